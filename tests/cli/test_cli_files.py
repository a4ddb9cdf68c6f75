"""What does the command line say about files that are missing, broken or wrong?"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vajra_py.config import load_system

Vajra = Callable[..., Any]


def test_a_right_file(vajra: Vajra, small: Path) -> None:
    said = vajra("check", small)
    assert (said.code, said.out, said.err) == (0, f"{small}: valid (1 run)\n", "")


def test_a_sweep_counts_its_runs(vajra: Vajra, small: Path) -> None:
    small.write_text(small.read_text() + "sweep: {seed: [1, 2, 3], workload.arrivals.rate: [5, 10]}\n")
    assert "valid (6 runs)" in vajra("check", small).out


@pytest.mark.parametrize("command", ["run", "check", "workloads describe"])
def test_a_missing_file(command: str, vajra: Vajra) -> None:
    said = vajra(*command.split(), "nowhere.yaml")
    assert said.code == 2
    assert said.err == "nowhere.yaml: cannot be read (No such file or directory).\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("version: 1\n  a: b: c\n", "broken.yaml:2: is not valid YAML"),
        ("- a\n- b\n", "must be a mapping"),
        ("version: 1\nversion: 1\n", "broken.yaml:2:"),
        ("", "backend: is missing"),
        ("version: 1\nsweep: {seed: [1, 2]}\n", "workload: is missing"),
    ],
)
def test_broken_yaml(text: str, expected: str, vajra: Vajra, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    said = vajra("check", path)
    assert said.code == 2
    assert expected in said.err
    assert "Traceback" not in said.err


def test_every_mistake_at_once_with_its_line(vajra: Vajra, small: Path) -> None:
    text = (
        small.read_text()
        .replace("fcfs", "fcsf")
        .replace("chunk_size: 128", "chunk_size: 0")
        .replace("seed: 3", "sed: 3")
    )
    small.write_text(text)
    said = vajra("run", small)
    lines = said.err.splitlines()
    assert said.code == 2
    assert len(lines) == 3
    assert any(line.startswith(f"{small}:3: ") and "sed" in line for line in lines)
    assert any(line.startswith(f"{small}:5: ") and "Did you mean 'fcfs'?" in line for line in lines)
    assert any(line.startswith(f"{small}:7: ") and "chunk_size" in line for line in lines)


def test_a_file_without_a_workload_is_a_system(vajra: Vajra, small: Path, tmp_path: Path) -> None:
    system = tmp_path / "system.yaml"
    system.write_text("version: 1\npreset: sarathi\nbackend: {engine: {model: models/any}}\n")
    said = vajra("check", system, small)
    assert said.code == 0
    assert f"{system}: valid (a system" in said.out
    assert f"{small}: valid (1 run)" in said.out
    effective = tmp_path / "effective.yaml"
    effective.write_text(vajra("check", system, "--effective").out)
    assert load_system(effective) == load_system(system).model_copy(update={"name": "system"})
    assert "workload: is missing" in vajra("run", system).err


def test_what_the_engine_would_refuse_is_found_without_its_model(vajra: Vajra, tmp_path: Path) -> None:
    system = tmp_path / "system.yaml"
    sections = "pools: {p: {role: prefill}, d: {role: decode}}\nhand_off: {overlap: by_layer, reserve: before_prompt, num_layers: 2}\n"
    cache = "replica: {memory: {prefix_cache: {enabled: true, unscheduled: keep}}}\n"
    for more, refused in ((sections, "hand_off.overlap: "), (cache, "prefix_cache.unscheduled: ")):
        system.write_text(f"version: 1\npreset: sarathi\n{more}backend: {{engine: {{model: models/any}}}}\n")
        said = vajra("check", system)
        assert said.code == 2
        assert refused in said.err
        assert "models/any" not in said.err


UNFIT = "replica: {max_model_len: 4096, memory: {num_blocks: 400}}\n"
SLOTS = "replica:\n  memory: {num_blocks: 40}\n  adapters:\n    max_loras: 4\n    models: [{name: a, num_blocks: 10}]\n"
NO_BLOCKS = (
    "replica.adapters: the slots leave no KV block (they take 40 of 40). Allowed: fewer slots, or smaller adapters.\n"
)
DRAFTS = "is missing, and replica.draft enables drafts. Such as {rate: 0.7}.\n"


@pytest.mark.parametrize(
    ("section", "options", "expected"),
    [
        (SLOTS, (), f"small.yaml:19: {NO_BLOCKS}"),
        (UNFIT + "sweep:\n  seed: [1, 2]\n  replica.adapters:\n    - {max_loras: 40, models: [{name: a, num_blocks: 10}]}\n", (),
         "small.yaml:21: replica.adapters (seed=1 adapters=(max_loras=40, models.0.name=a, models.0.num_blocks=10)): the slots leave no KV block (they take 400 of 400)"),
        (UNFIT, ("--set", "replica.adapters={max_loras: 40, models: [{name: a, num_blocks: 10}]}"), "--set replica.adapters: the slots leave no KV block"),
        (UNFIT.replace("}}", "}, draft: {num_tokens: 2}}"), (), f"small.yaml:15: backend.simulator.drafts: {DRAFTS}"),
    ],
    ids=["file", "sweep", "override", "missing"],
)  # fmt: skip
def test_what_does_not_fit_together_has_its_line(
    section: str, options: tuple[str, ...], expected: str, vajra: Vajra, small: Path
) -> None:
    small.write_text(small.read_text().replace(UNFIT, section))
    for command in ("check",) if "sweep" in section else ("check", "run"):
        said = vajra(command, small.name, *options)
        assert said.code == 2
        assert said.err.startswith(expected)
        assert said.err.count("\n") == 1


def test_a_pool_that_no_request_can_reach_has_its_line(vajra: Vajra, small: Path) -> None:
    picker = "replicaset_scheduler: {policy: endpoint_picker, params: {filters: [{filter: by-label, params: {label: pool, valid_values: [a]}}]}}"
    text = small.read_text().replace("replicaset_scheduler: round_robin", picker)
    small.write_text(f"{text}pools: {{a: {{role: mixed}}, b: {{role: mixed}}}}\n")
    expected = "small.yaml:6: scheduling.replicaset_scheduler: endpoint_picker can never send a request to pool 'b'"
    for command in ("check", "run"):
        said = vajra(command, small.name)
        assert (said.code, said.err.count("\n")) == (2, 1)
        assert said.err.startswith(expected)


def test_several_files_are_all_checked(vajra: Vajra, small: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(small.read_text().replace("version: 1", "version: 9"))
    said = vajra("check", other, small, "nowhere.yaml")
    assert said.code == 2
    assert f"{small}: valid" in said.out
    assert "other.yaml:1" in said.err
    assert "nowhere.yaml" in said.err


def test_overrides_are_named_as_such(vajra: Vajra, small: Path) -> None:
    said = vajra("check", small, "--set", "scheduling.request_prioritizer=fcsf", "--set", "seed=x", "--set", "nonsense")
    assert said.code == 2
    assert "--set scheduling.request_prioritizer: " in said.err
    assert "Did you mean 'fcfs'?" in said.err
    assert "--set seed: must be an integer (got 'x')" in said.err
    assert "--set nonsense: is not an assignment" in said.err


AZURE = "workload={type: azure, path: trace.csv}"
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:15:46.6805900,374,44\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (HEAD + ROW + "2023-11-16 18:15:50.9951690,x,109\n", "trace.csv:3: column 'ContextTokens'"),
        ("TIMESTAMP,ContextTokens\n", "GeneratedTokens"),
        (HEAD + ROW + "2023-11-16 18:15:40.0,5,5\n", "trace.csv:3"),
        ("", "trace.csv"),
    ],
    ids=["not a number", "missing column", "unsorted", "empty"],
)
@pytest.mark.parametrize("command", ["check", "run"])
def test_broken_traces_say_the_line(command: str, content: str, expected: str, vajra: Vajra, small: Path) -> None:
    small.with_name("trace.csv").write_text(content)
    said = vajra(command, small, "--set", AZURE)
    assert said.code == 2
    assert expected in said.err
    assert "Traceback" not in said.err
    assert not small.with_name("runs").exists()


def test_a_truncated_trace(vajra: Vajra, small: Path) -> None:
    whole = gzip.compress((HEAD + ROW * 1000).encode())
    small.with_name("trace.csv.gz").write_bytes(whole[: len(whole) // 2])
    said = vajra("check", small, "--set", "workload={type: azure, path: trace.csv.gz}")
    assert said.code == 2
    assert "trace.csv.gz" in said.err


def test_a_missing_trace_is_found_before_anything_runs(vajra: Vajra, small: Path) -> None:
    said = vajra("check", small, "--set", AZURE)
    assert said.code == 2
    assert "trace.csv: cannot be read (No such file or directory)" in said.err


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            ["backend.simulator.latency={type: roofline, model: llama-3.1-70b}", "replica.memory.num_blocks=null"],
            "does not fit",
        ),
        (["scheduling.replica_scheduler.params.preemption=swap"], "host_blocks"),
        (["backend.simulator.latency={type: profiled, path: nowhere.csv}"], "nowhere.csv"),
    ],
    ids=["model too large", "no host memory", "no table"],
)
def test_check_puts_the_parts_together(settings: list[str], expected: str, vajra: Vajra, small: Path) -> None:
    said = vajra("check", small, *[part for one in settings for part in ("--set", one)])
    assert said.code == 2
    assert said.err.startswith(str(small))
    assert expected in said.err


def test_what_is_wrong_with_every_point_is_said_once(vajra: Vajra, small: Path) -> None:
    small.write_text(small.read_text() + "sweep: {seed: [1, 2, 3]}\n")
    said = vajra("check", small, "--set", "scheduling.replica_scheduler.params.preemption=swap")
    assert said.code == 2
    assert len(said.err.splitlines()) == 1
    assert "(seed=1)" in said.err


def test_effective_settings_can_be_run_again(vajra: Vajra, small: Path, tmp_path: Path) -> None:
    printed = vajra("check", small, "--effective").out
    assert "watermark_fraction: 0.01" in printed
    again = tmp_path / "again.yaml"
    again.write_text(printed)
    assert vajra("check", again, "--effective").out == printed


def test_tracebacks_when_asked_for_wherever_the_flag_stands(vajra: Vajra) -> None:
    for arguments in (["--traceback", "check", "nowhere.yaml"], ["check", "nowhere.yaml", "--traceback"]):
        said = vajra(*arguments)
        assert said.code == 2
        assert said.err.startswith("Traceback")
        assert "nowhere.yaml: cannot be read" in said.err
