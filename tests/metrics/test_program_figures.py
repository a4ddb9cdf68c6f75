"""Programs in tables, summaries, reports and comparisons of runs, and nothing of them where there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from vajra_py.config import config_from_mapping
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.metrics import RunData, compare, write_report
from vajra_py.metrics.tables.programs import PROGRAM_TABLE_COLUMNS
from vajra_py.metrics.tables.requests import PROGRAM_COLUMNS, REQUEST_COLUMNS
from vajra_py.workload import PromptContent, RequestSpec, Workload, write_jsonl

SECOND_A_STEP: dict[str, Any] = {"type": "affine", "base_s": 1.0, "per_token_s": 0.0}


def run(folder: Path, specs: list[RequestSpec], name: str = "run", **settings: Any) -> RunData:
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.jsonl"
    write_jsonl(Workload.from_requests(specs, sort=True), file)
    mapping = {
        "version": 1,
        "name": name,
        "workload": {"type": "jsonl", "path": str(file)},
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": "round_robin",
            "replica_scheduler": "fixed_chunk",
        },
        "replica": {"max_batch_size": 8, "memory": {"num_blocks": 64}},
        "backend": {"simulator": {"latency": SECOND_A_STEP}},
        **settings,
    }
    return run_experiment(config_from_mapping(mapping), folder=folder / name)


def call(name: str, program: str, follows: Any = None, **facts: Any) -> RequestSpec:
    facts = {"arrived_at": 0.0, "num_prompt_tokens": 8, "num_output_tokens": 3, **facts}
    return RequestSpec(name, program_id=program, follows=follows, **facts)


FORK = [
    call("plan", "p", program_slo_s=12.0),
    call("left", "p", "plan", think_time_s=1.0),
    call("right", "p", "plan", think_time_s=1.0, num_output_tokens=5),
    call("join", "p", ("left", "right"), is_last_call=True),
]


def test_makespan_slowdown_and_slo_of_programs(tmp_path: Path) -> None:
    chain = [
        call("c0", "c", arrived_at=0.5, program_slo_s=4.0),
        call("c1", "c", "c0", arrived_at=0.5, think_time_s=2.0),
    ]
    data = run(tmp_path, [*FORK, *chain, RequestSpec("alone", 0.0, 8, 2)])
    table = data.programs()
    assert tuple(table.column_names) == PROGRAM_TABLE_COLUMNS
    fork, other = table.to_pylist()
    assert (fork["program_id"], fork["reason"], fork["num_calls"]) == ("p", "completed", 4)
    assert fork["ideal_s"] == pytest.approx(3 + 1 + 5 + 3)
    assert fork["makespan_s"] >= fork["ideal_s"]
    assert fork["slowdown"] == pytest.approx(fork["makespan_s"] / fork["ideal_s"])
    assert fork["slo_met"] is (fork["makespan_s"] <= 12.0)
    assert (other["ideal_s"], other["slo_met"]) == (8.0, False)
    section = data.summary.data["programs"]
    assert (section["arrived"], section["completed"], section["calls"]["mean"]) == (2, 2, 3.0)
    assert section["slo"]["num_met"] + section["slo"]["num_missed"] == 2
    assert section["makespan_s"]["max"] == max(fork["makespan_s"], other["makespan_s"])


def test_cached_contexts_make_the_ideal_shorter(tmp_path: Path) -> None:
    first = PromptContent((("text", 32),))
    second = PromptContent((("text", 32), (("out", "a"), 8), ("more", 24)))
    specs = [
        call("a", "p", num_prompt_tokens=32, num_output_tokens=8, content=first),
        call("b", "p", "a", num_prompt_tokens=64, num_output_tokens=1, content=second, is_last_call=True),
    ]
    latency = {"type": "affine", "base_s": 1.0, "per_token_s": 0.1, "per_prefill_pair_s": 0.0}
    backend = {"simulator": {"latency": latency}}
    memory = {"num_blocks": 64, "block_size": 8}
    cached, without = (
        run(
            tmp_path, specs, name, backend=backend, replica={"memory": {**memory, "prefix_cache": {"enabled": enabled}}}
        )
        for name, enabled in (("cached", True), ("without", False))
    )
    (ideal, other) = (one.programs().to_pylist()[0]["ideal_s"] for one in (cached, without))
    assert other - ideal == pytest.approx(0.1 * 40)
    assert cached.programs().to_pylist()[0]["num_cached_tokens"] > 0


def test_programs_that_fail_or_do_not_finish_have_no_makespan(tmp_path: Path) -> None:
    lost = [call("x", "lost", num_prompt_tokens=3000), call("y", "lost", "x"), call("z", "lost", "y")]
    cut = [call("k", "cut", num_program_calls=2), call("l", "cut", "k", think_time_s=50.0, num_program_calls=2)]
    simulator = {"latency": SECOND_A_STEP, "horizon_s": 20.0}
    data = run(tmp_path, [*lost, *cut, *FORK], backend={"simulator": simulator})
    rows = {row["program_id"]: row for row in data.programs().to_pylist()}
    assert {name: row["reason"] for name, row in rows.items()} == {
        "lost": "failed",
        "cut": "unfinished",
        "p": "completed",
    }
    assert [rows[name]["makespan_s"] == rows[name]["makespan_s"] for name in ("lost", "cut", "p")] == [
        False,
        False,
        True,
    ]
    details = {row["request_id"]: row["detail"] for row in data.requests().to_pylist()}
    assert "'x' of its program" in details["y"]
    assert "'y' of its program" in details["z"]
    assert data.summary.data["programs"]["failed"] == 1


def test_a_program_that_missed_its_slo_by_the_end_of_the_run_missed_it(tmp_path: Path) -> None:
    simulator = {"latency": SECOND_A_STEP, "horizon_s": 20.0, "drain": False}
    data = run(tmp_path, [call("a", "p", num_output_tokens=50, program_slo_s=9.0)], backend={"simulator": simulator})
    (row,) = data.programs().to_pylist()
    assert (row["reason"], row["slo_met"]) == ("unfinished", False)


def test_comparison_and_report_have_programs(tmp_path: Path) -> None:
    runs = [run(tmp_path, FORK, name, seed=seed) for seed, name in enumerate(("one", "two"))]
    compared = compare(runs)
    assert {"makespan_mean_s", "slowdown_mean", "program_slo_attainment_fraction"} <= {
        metric.key for metric in compared.shown(level=2)
    }
    page = tmp_path / "report.html"
    write_report(runs, page)
    assert "Makespans of programs" in page.read_text()
    frame = runs[0].requests("program_id", "stage", "parent_calls", "is_last_call").to_pylist()
    assert [row["is_last_call"] for row in frame] == [False, False, False, True]


def test_a_run_without_programs_has_nothing_of_them(tmp_path: Path) -> None:
    data = run(tmp_path, [RequestSpec("a", 0.0, 8, 3, session_id="s"), RequestSpec("b", 1.0, 8, 3)])
    assert tuple(pq.read_schema(data.path / "requests.parquet").names) == REQUEST_COLUMNS
    assert not {*PROGRAM_COLUMNS} & {*REQUEST_COLUMNS}
    assert not (data.path / "programs.parquet").exists()
    assert "programs" not in data.summary.data
    assert "programs:" not in (data.path / "config.yaml").read_text()
    assert data.programs().num_rows == 0
    page = tmp_path / "report.html"
    write_report([data], page)
    assert "Programs" not in page.read_text()
    assert [row["program_id"] for row in data.requests("program_id").to_pylist()] == ["", ""]


def test_a_run_with_adapters_and_no_programs_has_no_table_of_programs(tmp_path: Path) -> None:
    models = [{"name": "french", "num_blocks": 2, "load_s": 0.0}]
    replica = {"max_batch_size": 8, "memory": {"num_blocks": 64}, "adapters": {"max_loras": 1, "models": models}}
    data = run(tmp_path, [RequestSpec("a", 0.0, 8, 3, adapter="french"), RequestSpec("b", 1.0, 8, 3)], replica=replica)
    assert [row["adapter"] for row in data.requests("adapter").to_pylist()] == ["french", ""]
    assert not data.has_programs
    assert "programs" not in data.summary.data
