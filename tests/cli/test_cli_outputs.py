"""Files that commands write: reports, figures, timelines and tables, where they go, and what stands in the way."""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Vajra = Callable[..., Any]


@pytest.fixture
def swept(vajra: Vajra, small: Path) -> Path:
    """The folder of two runs that differ in their prioritizer."""
    small.write_text(small.read_text() + "sweep: {scheduling.request_prioritizer: [fcfs, lrs]}\n")
    assert vajra("run", small, "-q").code == 0
    return Path("runs/small")


# Allowed output paths


@pytest.mark.parametrize(
    "command",
    [
        ("run", "small.yaml", "--report"),
        ("compare", "runs/small", "--report"),
        ("trace", "runs/small", "--output"),
        ("calibrate", "runs/small", "--output"),
        ("validate", "runs/small", "runs/small", "--report"),
    ],
    ids=lambda command: f"{command[0]} {command[-1]}",
)
@pytest.mark.parametrize("target", [".", "taken", "/"])
def test_a_folder_is_refused_before_any_work(command: tuple[str, ...], target: str, vajra: Vajra, small: Path) -> None:
    Path("taken").mkdir()
    said = vajra(*command, target)
    assert said.code == 2
    assert f"'{target}' is a directory" in said.err
    assert not Path("runs").exists()


def test_figures_do_not_go_into_a_file(vajra: Vajra, small: Path) -> None:
    said = vajra("figures", "runs/small", "--out", small)
    assert said.code == 2
    assert "is a file" in said.err


def test_figures_go_into_a_folder_that_is_made(vajra: Vajra, swept: Path) -> None:
    said = vajra("figures", swept, "--out", "a/b", "--format", "png", "--only", "latency_cdfs", "--width", "page")
    assert said.code == 0
    written = said.out.split()
    assert all(Path(one).exists() for one in written)
    assert {Path(one).name for one in written} == {
        "latency_cdfs.png",
        "latency_cdfs.csv",
        "table.csv",
        "table.md",
        "table.tex",
    }


@pytest.mark.parametrize("width", ["1", "nan", "inf", "wide", "-3", ""])
def test_a_width_that_is_none(width: str, vajra: Vajra, small: Path) -> None:
    said = vajra("figures", "runs/small", "--width", width)
    assert said.code == 2
    assert "not a width" in said.err
    assert "column, page, report, or 2 to 40 inches" in said.err


def test_an_unknown_figure_is_guessed(vajra: Vajra, swept: Path) -> None:
    said = vajra("figures", swept, "--only", "latency_cdf")
    assert said.code == 1
    assert "Did you mean 'latency_cdfs'" in said.err
    assert not Path("figures").exists()


@pytest.mark.parametrize("option", ["--panel", "--metric"])
def test_a_single_panel_by_its_metric(option: str, vajra: Vajra, swept: Path) -> None:
    said = vajra("figures", swept, "--out", "single", "--format", "png", "--only", "latency_ranges", option, "tpot")
    assert said.code == 0
    assert {Path(one).name for one in said.out.split()} >= {"latency_ranges-tpot.png", "latency_ranges-tpot.csv"}
    unknown = vajra("figures", swept, "--only", "latency_ranges", option, "tpop")
    assert unknown.code == 1
    assert "Did you mean 'tpot'? Allowed: e2e, tbt, tpot, ttft" in unknown.err
    assert not Path("figures").exists()


# Timelines


def test_a_timeline_holds_every_request_and_step(vajra: Vajra, small: Path) -> None:
    vajra("run", small, "-q")
    said = vajra("trace", "runs/small")
    assert said.out == "timeline: runs/small/timeline.json.gz\n"
    with gzip.open("runs/small/timeline.json.gz", "rt") as text:
        events = json.load(text)["traceEvents"]
    assert events
    assert {"ph", "pid"} <= set(events[0])
    assert all(event.get("dur", 0) >= 0 and event.get("ts", 0) >= 0 for event in events)
    named = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert sorted(name for name in named if name.isdigit()) == sorted(map(str, range(12)))


def test_a_timeline_by_another_name_is_plain_or_packed_as_its_name_says(vajra: Vajra, small: Path) -> None:
    vajra("run", small, "-q")
    vajra("trace", "runs/small", "-o", "new/plain.json")
    vajra("trace", "runs/small", "-o", "new/packed.json.gz")
    with gzip.open("new/packed.json.gz", "rt") as packed:
        assert json.loads(Path("new/plain.json").read_text()) == json.load(packed)


def test_a_timeline_is_of_one_run(vajra: Vajra, swept: Path) -> None:
    said = vajra("trace", swept)
    assert said.code == 1
    assert "manifest.json: the file is missing" in said.err


# Comparisons


def test_a_run_named_twice_counts_once(vajra: Vajra, swept: Path) -> None:
    once = vajra("compare", swept, "--format", "csv").out
    assert vajra("compare", swept, swept, *swept.iterdir(), "--format", "csv").out == once
    assert len(list(csv.DictReader(io.StringIO(once)))) == 2


def test_a_baseline_shows_differences_in_every_format(vajra: Vajra, swept: Path) -> None:
    for form in ("table", "markdown", "latex", "csv"):
        said = vajra("compare", swept, "--baseline", "fcfs", "--format", form)
        assert said.code == 0, said.err
        assert "lrs" in said.out
    said = vajra("compare", swept, "--baseline", "edf")
    assert said.code == 1
    assert "--baseline: no setting has that name ('edf'). Allowed: fcfs, lrs" in said.err


def test_an_unknown_scope_is_told(vajra: Vajra, swept: Path) -> None:
    said = vajra("compare", swept, "--scope", "premium")
    assert said.code == 1
    assert "premium" in said.err


def test_a_report_of_a_sweep_names_every_setting(vajra: Vajra, swept: Path) -> None:
    said = vajra("compare", swept, "--report", "deep/down/report.html")
    assert said.out.endswith("report: deep/down/report.html\n")
    text = Path("deep/down/report.html").read_text()
    assert "fcfs" in text
    assert "lrs" in text
    assert "<script" not in text


# Output that is not read, or cannot be written


def test_a_reader_that_goes_away_is_no_error(vajra: Vajra, small: Path) -> None:
    vajra("run", small, "-q")
    code = "from vajra_py.cli.main import main; main()"
    compare = [sys.executable, "-c", code, "policies", "--json"]
    with subprocess.Popen(compare, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait() == 0, said
    assert "Traceback" not in said
    assert "BrokenPipe" not in said


def test_a_full_disk_is_told_in_a_line(vajra: Vajra, small: Path) -> None:
    Path("report.html").symlink_to("/dev/full")
    said = vajra("run", small, "-q", "--report", "report.html")
    assert Path("report.html").is_char_device()
    assert (said.code, said.err) == (1, "output: No space left on device.\n")


def test_a_folder_that_holds_something_else_is_left_alone(vajra: Vajra, small: Path) -> None:
    mine = Path("runs/small")
    mine.mkdir(parents=True)
    (mine / "notes.txt").write_text("mine")
    for extra in ((), ("--overwrite",), ("--workers", "2", "--overwrite")):
        said = vajra("run", small, "-q", *extra)
        assert said.code == 2
        assert "output runs/small: contains something other than a run, and is left as it is" in said.err
    assert [one.name for one in mine.iterdir()] == ["notes.txt"]


def test_a_sweeps_folder_is_not_taken_by_a_single_run(vajra: Vajra, swept: Path, small: Path) -> None:
    before = sorted(one.name for one in swept.iterdir())
    said = vajra("run", small, "-q", "--set", "sweep=null", "--overwrite")
    assert said.code == 2
    assert "contains something other than a run" in said.err
    assert sorted(one.name for one in swept.iterdir()) == before


# Effective settings and schema


def test_effective_settings_of_a_run_are_what_it_ran_with(vajra: Vajra, small: Path) -> None:
    vajra("run", small, "-q", "--set", "seed=11")
    shown = vajra("check", "--effective", small, "--set", "seed=11").out
    assert shown.strip().endswith(Path("runs/small/config.yaml").read_text().strip())
    again = vajra("run", "runs/small/config.yaml", "-q", "--set", "output.dir=again")
    assert again.code == 0
    for name in ("requests.parquet", "steps.parquet", "tbt.parquet", "decisions.parquet", "summary.json"):
        assert Path("again/small", name).read_bytes() == Path("runs/small", name).read_bytes(), name


def test_the_schema_accepts_what_check_accepts(vajra: Vajra, small: Path) -> None:
    from jsonschema import Draft202012Validator
    from ruamel.yaml import YAML

    schema = json.loads(vajra("schema").out)
    Draft202012Validator.check_schema(schema)
    experiment = YAML(typ="safe").load(small.read_text())
    Draft202012Validator(schema).validate(experiment)
    experiment["replica"]["max_model_len"] = 2**31
    assert not Draft202012Validator(schema).is_valid(experiment)
    small.write_text(json.dumps(experiment))
    assert vajra("check", small).code == 2


def test_a_command_that_loads_tensor_libraries_prints_nothing_of_them_at_its_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from vajra_py.cli.main import main; main()", "model", "tiny", "tiny"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("model: tiny\n", "", 0)
