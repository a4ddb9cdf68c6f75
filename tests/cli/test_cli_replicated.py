"""Runs under several seeds on the command line: what stands in a comparison, and what is said of all of them once."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vajra_py.cli.main import main

SEEDS = 3


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory, small_text: str) -> Path:
    """The folder of two settings under three seeds each; one of the settings is overloaded, requests are of two classes."""
    folder = tmp_path_factory.mktemp("replicated")
    file = folder / "small.yaml"
    file.write_text(
        small_text.replace("num_requests: 12", "num_requests: 60\n  slo_classes: [{name: chat}, {name: batch}]")
        + f"replications: {SEEDS}\nsweep: {{workload.arrivals.rate: [2, 400]}}\noutput: {{dir: {folder}/runs}}\n"
    )
    with pytest.raises(SystemExit) as end:
        main(["run", str(file), "-q", "--workers", "1"])
    assert end.value.code == 0
    return folder / "runs"


@pytest.fixture
def compare(vajra: Callable[..., Any], replicated: Path) -> Callable[..., Any]:
    return lambda *arguments: vajra("compare", replicated, *arguments)


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_seeds_of_a_setting_are_one_row(compare: Callable[..., Any]) -> None:
    found = rows(compare("--format", "csv", "--scope", "chat").out)
    assert len(found) == 2
    each = rows(compare("--format", "csv", "--scope", "chat", "--each-run").out)
    assert len(each) == 2 * SEEDS


def test_without_a_scope_csv_holds_them_all(compare: Callable[..., Any]) -> None:
    scopes = {row["scope"] for row in rows(compare("--format", "csv").out)}
    assert {"overall", "slo_class chat", "slo_class batch"} <= scopes
    assert {row["scope"] for row in rows(compare("--format", "csv", "--scope", "batch").out)} == {"slo_class batch"}


def test_a_table_says_which_scopes_there_are_besides(compare: Callable[..., Any]) -> None:
    (line,) = (line for line in compare().out.splitlines() if line.startswith("also by --scope: "))
    assert {"slo_class chat", "slo_class batch"} <= set(line.partition(": ")[2].split(", "))
    assert "also by --scope" not in compare("--scope", "chat").out


def test_that_a_setting_is_overloaded_is_said_once_for_its_seeds(compare: Callable[..., Any]) -> None:
    lines = [line for line in compare().err.splitlines() if "seeds." in line]
    assert len(lines) == len(set(lines))
    (line,) = (line for line in lines if "overloaded" in line)
    assert line.startswith("note: ")
    assert f"overloaded under {SEEDS} of {SEEDS} seeds." in line
    assert "400" in line.partition("overloaded")[0]


def test_tables_in_files_have_no_notes(compare: Callable[..., Any]) -> None:
    for form in ("csv", "markdown", "latex"):
        assert not compare("--format", form).err


def test_settings_of_another_load_are_no_differences_from_a_baseline(compare: Callable[..., Any]) -> None:
    said = compare("--baseline", "2", "--format", "csv")
    assert said.code == 0
    assert rows(said.out) == []
    assert "warning: no difference from 2: every other setting has a different load" in said.err


def test_one_run_of_a_setting_can_be_compared_alone(vajra: Callable[..., Any], replicated: Path) -> None:
    one = sorted(path.parent for path in replicated.rglob("manifest.json"))[0]
    said = vajra("compare", one, "--format", "csv", "--scope", "overall")
    assert len(rows(said.out)) == 1
    (number,) = (
        value for name, value in rows(said.out)[0].items() if name == "ttft_p99_s" or name.startswith("TTFT P99")
    )
    assert float(number) > 0


# What is not a value of an option


@pytest.mark.parametrize(("option", "example"), [("--engine", "max_num_seqs=128"), ("--latency", "system=h200_sxm")])
@pytest.mark.parametrize("command", ["validate", "calibrate"])
def test_what_is_no_name_and_value(
    command: str, option: str, example: str, vajra: Callable[..., Any], replicated: Path, tmp_path: Path
) -> None:
    one = sorted(path.parent for path in replicated.rglob("manifest.json"))[0]
    more = ("--latency", "system=h200_sxm") if option == "--engine" else ()
    said = vajra(command, one, option, "word", *more)
    assert said.code == 2
    assert f"{option}: is not NAME=VALUE ('word'). Such as {example}" in said.err


def test_validate_wants_one_simulation_and_not_two(vajra: Callable[..., Any]) -> None:
    for arguments in (
        ("measured",),
        ("measured", "simulated", "--profile", "p"),
        ("measured", "s", "--latency", "a=1"),
    ):
        said = vajra("validate", *arguments)
        assert said.code == 2
        assert "name either a simulated run, or --profile or --latency (got both or neither)" in said.err


def test_a_calibration_that_is_there_is_not_replaced_before_it_is_asked_for(
    vajra: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "mine.json").write_text("{}")
    said = vajra("calibrate", "nowhere", "--output", "mine.json")
    assert said.code == 2
    assert "--output mine.json: is there already. Another file, or --overwrite" in said.err
    assert "nowhere" in vajra("calibrate", "nowhere", "--output", "mine.json", "--overwrite").err
    assert (tmp_path / "mine.json").read_text() == "{}"


@pytest.mark.parametrize("fraction", ["0", "1", "-0.5", "nan", "most"])
def test_a_part_to_fit_is_neither_nothing_nor_everything(fraction: str, vajra: Callable[..., Any]) -> None:
    said = vajra("calibrate", "nowhere", "--fit-fraction", fraction)
    assert said.code == 2
    assert "--fit-fraction" in said.err


@pytest.mark.parametrize("width", ["1", "nan", "inf", "wide"])
def test_a_workload_is_not_drawn_at_any_width(width: str, vajra: Callable[..., Any], small: Path) -> None:
    said = vajra("workloads", "describe", small, "--figure", "w.svg", "--width", width)
    assert said.code == 2
    assert "--width" in said.err
    assert not Path("w.svg").exists()


# Checks of what a file names


def test_every_file_of_a_mixed_workload_is_read_by_check(vajra: Callable[..., Any], small: Path) -> None:
    trace = "{type: csv, path: %s}"
    mixed = f"workload={{type: merge, workloads: [{trace % 'good.csv'}, {trace % 'bad.csv'}]}}"
    Path("good.csv").write_text("arrived_at,num_prompt_tokens,num_output_tokens\n0,10,5\n")
    Path("bad.csv").write_text("arrived_at,num_prompt_tokens,num_output_tokens\n0,ten,5\n")
    said = vajra("check", small, "--set", mixed)
    assert said.code == 2
    assert "bad.csv" in said.err
    assert "ten" in said.err
    Path("bad.csv").write_text("arrived_at,num_prompt_tokens,num_output_tokens\n1,10,5\n")
    assert vajra("check", small, "--set", mixed).out == f"{small}: valid (1 run)\n"


def test_checks_of_a_sweep_name_the_point_that_cannot_be(vajra: Callable[..., Any], small: Path) -> None:
    swept = "sweep={scheduling.replica_scheduler.params.preemption: [recompute, swap]}"
    said = vajra("check", small, "--set", swept)
    assert said.code == 2
    assert said.err.startswith(f"{small}:7: scheduling.replica_scheduler (preemption=swap): ")
    assert "valid" not in said.out
