"""Seeds that decide nothing give copies of one run: they are recognised before they are run and where they lie, and never taken for replications."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import vajra_py as v
from vajra_py.cli.main import vajra
from vajra_py.config import config_from_mapping, expand_sweep
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.experiment.runs.sweep import sweep
from vajra_py.metrics.comparison.comparison import compare
from vajra_py.metrics.report.report import render_report
from vajra_py.metrics.runs.naming import load_runs
from vajra_py.metrics.runs.replications import group_replications
from vajra_py.metrics.runs.workload_words import workload_words

EQUAL = "equal requests"
STUDY = """
version: 1
name: study
seed: 1
replications: 5
scheduling: {{request_prioritizer: fcfs, replicaset_scheduler: least_loaded, replica_scheduler: fixed_chunk}}
num_replicas: 2
workload:
  type: csv
  path: {folder}/trace.csv
  first: 60
  rate: 8
  slo_classes: [{{name: chat, ttft_slo_s: 1, tpot_slo_s: 0.05}}]
backend: {{simulator: {{latency: {{type: constant, step_time_s: 0.02}}}}}}
replica: {{max_batch_size: 4, memory: {{num_blocks: 4000}}}}
output: {{dir: {folder}/runs, decision_log: false}}
sweep:
  scheduling.request_prioritizer: [fcfs, lrs]
  workload.rate: [6, 12]
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Two policies at two rates under five seeds, on a file of 120 requests."""
    draw, at = random.Random(5), 0.0
    lines = ["arrived_at,num_prompt_tokens,num_output_tokens"]
    for _ in range(120):
        at += draw.expovariate(5)
        lines.append(f"{at:.4f},{draw.randint(20, 800)},{draw.randint(2, 40)}")
    (tmp_path / "trace.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "study.yaml").write_text(STUDY.format(folder=tmp_path))
    return tmp_path / "study.yaml"


def command(*arguments: object) -> str:
    """What a command says, on both outputs."""
    result = CliRunner().invoke(vajra, [str(one) for one in arguments], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.output


def sentences(text: str) -> str:
    """The text without line breaks and table rules."""
    return " ".join(text.replace("│", " ").split())


def test_a_study_on_a_file_is_one_run_each_and_says_so_everywhere(study: Path, tmp_path: Path) -> None:
    checked = command("check", study)
    assert "valid (4 runs; 16 would repeat them under another seed)" in checked
    assert EQUAL in checked

    said = command("run", study, "--workers", "1", "--report", tmp_path / "report.html")
    folders = sorted((tmp_path / "runs" / "study").iterdir())
    assert len(folders) == 4
    assert "(4 runs; 16 would repeat them under another seed)" in said
    compared = command("compare", tmp_path / "runs" / "study")
    for text in (said, compared):
        assert "1 for 5 equal seeds" in text
        assert "note: all settings: Its 5 seeds give equal requests" in sentences(text)
        assert "nothing else is random: one run, no interval, nothing tested" in sentences(text)
        assert "±" not in text
        assert "*" not in text
        assert "≈" not in text
        assert "`replications: 5`" not in text

    for folder in folders:
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["replications"] | {"why": ""} == {"asked": 5, "run": 1, "why": ""}
        assert summary["replications"]["why"] in summary["warnings"]
    page = (tmp_path / "report.html").read_text()
    assert "Its 5 seeds give equal requests" in page
    assert "★" not in page.partition("<body")[2]
    assert "±" not in page.partition("<body")[2]


def test_tables_of_differences_and_machine_readable_ones_say_it_too(study: Path, tmp_path: Path) -> None:
    command("run", study, "-q", "--workers", "1")
    runs = tmp_path / "runs" / "study"
    table = command("compare", runs, "--baseline", "fcfs/6")
    assert EQUAL in sentences(table)
    assert "nothing else is random" in sentences(table)
    assert "±" not in table
    (_, *rows) = csv.reader(io.StringIO(command("compare", runs, "--baseline", "fcfs/6", "--format", "csv")))
    assert rows
    assert all(any(cell.startswith("not tested: ") and EQUAL in cell for cell in row) for row in rows)
    assert not any("±" in cell for row in rows for cell in row)
    for row in csv.DictReader(io.StringIO(command("compare", runs, "--format", "csv"))):
        assert (row["replications"], row["equal_seeds"]) == ("1", "5")
        assert EQUAL in row["not_tested_because"]
        assert not [name for name, cell in row.items() if name.endswith(("_low", "_high")) and cell]
    for form in ("markdown", "latex"):
        text = command("compare", runs, "--format", form)
        assert EQUAL in text
        assert "±" not in text.replace("$\\pm$", "±")
        assert "**" not in text
        assert "textbf" not in text


def test_from_python(study: Path, tmp_path: Path) -> None:
    result = v.sweep(study, workers=1)
    assert (len(result.runs), len(result.copies), len(result.failures)) == (4, 16, 0)
    comparison = v.compare(result.runs)
    assert comparison.copied == (5, 5, 5, 5)
    assert all(comparison.interval("ttft_mean_s", i) is None for i in range(4))
    assert comparison.against(0, ["ttft_mean_s"]) == []
    assert len(v.sweep(study, workers=1).runs) == 4  # again, from what is there


def old_runs(study: Path) -> list[Path]:
    """All twenty runs, as a version made them that did not recognise copies."""
    points = expand_sweep(v.load(study))
    folders = [study.parent / "old" / point.point_id for point, _ in points]
    for (_, one), folder in zip(points, folders, strict=True):
        run_experiment(one, folder=folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["workload"]["fingerprint"], manifest["drawn_beside_workload"]
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return folders


def test_copies_that_lie_there_are_no_replications(study: Path) -> None:
    runs = load_runs(old_runs(study))
    assert len(runs) == 20
    settings = group_replications(runs)
    assert [(len(one.runs), one.num_seeds) for one in settings] == [(1, 5)] * 4
    comparison = compare(runs)
    assert comparison.replications == (1, 1, 1, 1)
    assert not comparison.is_replicated
    said = command("compare", study.parent / "old")
    assert "Its 5 seeds give equal requests" in sentences(said)
    assert "±" not in said
    assert "*" not in said
    page = render_report(runs)
    assert "Its 5 seeds give equal requests" in page
    assert "★" not in page.partition("<body")[2]
    assert "means of the replications" not in page
    assert len(compare(runs, each_run=True).names) == 20


def small(study: Path, **changes: Any) -> dict[str, Any]:
    mapping = v.load(study).model_dump(mode="json", by_alias=True, exclude_none=True)
    return {**mapping, "sweep": None, "replications": 4, **changes}


@pytest.mark.parametrize("router", ["power_of_two", "random"])
def test_runs_that_draw_beside_their_requests_are_replications_of_one_load(study: Path, router: str) -> None:
    config = v.load(study, {"sweep": None, "replications": 4, "scheduling.replicaset_scheduler": router})
    result = sweep(config, workers=1)
    assert (len(result.runs), result.copies) == (4, [])
    (setting,) = group_replications(result.runs)
    assert len(setting.runs) == 4
    assert f"Its seeds give equal requests: its runs differ by {router} alone" in setting.note
    assert setting.note in render_report(result.runs)
    assert len({run.manifest["workload"]["fingerprint"] for run in result.runs}) == 1
    assert compare(result.runs).interval("ttft_mean_s", 0) is not None


def test_a_predictor_whose_draws_nobody_uses_gives_copies_after_all(study: Path) -> None:
    noisy = {"backend.simulator.output_length": {"type": "noisy_oracle", "sigma": 1.0}}
    result = sweep(v.load(study, {"sweep": None, "replications": 2} | noisy), workers=1)
    assert len(result.runs) == 2
    (setting,) = group_replications(result.runs)
    assert (len(setting.runs), setting.is_copied) == (1, True)


def test_windows_are_replications_and_the_same_for_every_policy(study: Path) -> None:
    config = v.load(
        study,
        {
            "workload.window": "random",
            "workload.first": 20,
            "sweep": {"scheduling.request_prioritizer": ["fcfs", "lrs"]},
        },
    )
    result = sweep(config, workers=1)
    assert (len(result.runs), result.copies) == (10, [])
    settings = group_replications(result.runs)
    assert [len(one.runs) for one in settings] == [5, 5]
    arrivals = [[run.requests("arrived_at").column("arrived_at").to_numpy() for run in one.runs] for one in settings]
    for one, other in zip(*arrivals, strict=True):
        np.testing.assert_array_equal(one, other)
    offered = [run.summary.value("overall.offered_requests_per_s") for run in settings[0].runs]
    assert np.std(offered) > 0.2
    assert compare(result.runs).interval("ttft_mean_s", 0) is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workload.window": "random", "workload.first": 20}, "20 in a row from a place that the seed draws"),
        (
            {"workload.window": "random", "workload.first": None, "workload.window_s": 9},
            "those of 9 s from a place that",
        ),
        ({"workload.bootstrap": {"block_s": 2}}, "blocks of 2 s (bootstrap), the first 60"),
        ({"workload.bootstrap": {"block_requests": 7}}, "blocks of 7 requests (bootstrap)"),
        ({"workload.thin": {"rate": 2}, "workload.rate": None}, "thinned by the seed to 2 requests/s"),
        ({"workload.thin": {"fraction": 0.5}, "workload.rate": None}, "thinned by the seed to 50% of them"),
    ],
)
def test_reports_say_how_a_trace_was_sampled(study: Path, changes: dict[str, Any], words: str) -> None:
    run = v.run(v.load(study, {"sweep": None, "replications": 1} | changes))
    assert words in " ".join(workload_words([run]))


def test_windows_that_coincide_are_run_once(study: Path) -> None:
    config = v.load(study, {"workload.window": "random", "workload.first": 119, "sweep": None})
    result = sweep(config, workers=1)
    assert len(result.runs) == 2  # there are two windows of 119 of 120 requests
    assert len(result.copies) == 3
    (setting,) = group_replications(result.runs)
    assert (len(setting.runs), setting.num_seeds, setting.is_copied) == (2, 5, False)
    assert "Of its 5 seeds 3 give the run of another one" in setting.note


@pytest.mark.parametrize(
    ("length", "overlap"), [({"first": 60}, True), ({"window_s": 12.0, "first": None}, True), ({"first": 2}, False)]
)
def test_overlapping_windows_are_said_to_be_dependent(study: Path, length: dict[str, Any], overlap: bool) -> None:
    changes = {f"workload.{key}": value for key, value in length.items()}
    config = v.load(study, {"workload.window": "random", "sweep": None} | changes)
    (setting,) = group_replications(sweep(config, workers=1).runs)
    assert ("Its windows overlap: together they cover" in setting.note) == overlap


def test_a_load_that_does_not_vary_is_said_so(study: Path) -> None:
    """Open sessions are stretched to a rate by what each seed drew, since their rate on average is not known."""
    sessions = {
        "type": "sessions", "mode": "open", "arrivals": {"type": "poisson", "rate": 2}, "num_sessions": 10,
        "turns": {"type": "constant", "value": 2}, "first_turn_tokens": {"type": "constant", "value": 20},
        "turn_tokens": {"type": "constant", "value": 20}, "output_tokens": {"type": "constant", "value": 3}, "rate": 5.0,
    }  # fmt: skip
    config = config_from_mapping(small(study, workload=sessions))
    (setting,) = group_replications(sweep(config, workers=1).runs)
    assert "stretched to exactly the rate that is set: load does not vary" in setting.note


def test_a_stream_that_a_policy_asks_for_late_is_seen_in_its_run(study: Path, late_random: Any) -> None:
    config = small(study, replications=3)
    config["scheduling"]["replicaset_scheduler"] = {"policy": late_random.name}
    result = v.sweep(config, policies=[late_random])
    assert (len(result.runs), result.copies) == (3, [])
    assert "late" in result.runs[0].manifest["drawn_beside_workload"]


@pytest.fixture
def late_random() -> Any:
    """A router that asks for its random stream with the first request."""
    from vajra_py.contract import Layer, PolicyConfig, PolicySpec

    class Late:
        def __init__(self, stream_of: Callable[[str], Any]) -> None:
            self._stream_of, self._stream = stream_of, None

        def assign(self, request: Any, replicas: Any, now: float) -> Any:
            self._stream = self._stream or self._stream_of("late")
            return replicas[int(self._stream.integers(0, len(replicas)))].replica_id  # type: ignore[attr-defined]

        def pull(self, replica: Any, queued: Any, now: float) -> Any:
            return ()

    return PolicySpec(
        name="late",
        layer=Layer.REPLICASET_SCHEDULER,
        config=PolicyConfig,
        build=lambda config, context: Late(context.random_stream),
        summary="Routes at random.",
        source="",
    )


CAPACITY = {
    "slo": "p99(ttft) <= 0.3",
    "replications": 3,
    "max_replications": 4,
    "curve": [0.5],
    "precision_fraction": 0.1,
}


def test_a_capacity_on_a_file_is_searched_under_one_seed_without_interval(study: Path, tmp_path: Path) -> None:
    overrides = ["--set", "sweep=null", "--set", "replications=1", "--set", f"capacity={json.dumps(CAPACITY)}"]
    said = command("capacity", study, "--workers", "1", *overrides)
    assert "note: Its 4 seeds give equal requests" in said
    assert "no interval: all seeds give equal requests" in said.splitlines()[-1]
    assert "95 % interval 0" not in said
    folder = tmp_path / "runs" / "study"
    assert {one.name.rpartition("-")[2] for one in folder.iterdir() if one.is_dir()} == {"1"}
    (answer,) = json.loads((folder / "capacity.json").read_text())["answers"]
    assert (answer["interval"], answer["num_seeds"]) == (None, 1)
    assert EQUAL in answer["note"]
    assert all(EQUAL in row["note"] for row in csv.DictReader(io.StringIO((folder / "capacity.csv").read_text())))
    (found,) = v.capacity(v.load(study, {"sweep": None, "replications": 1, "capacity": CAPACITY}), workers=1)
    assert EQUAL in found.note
    assert "no interval" in found.sentence


def test_a_capacity_on_windows_of_a_file_has_an_interval(study: Path) -> None:
    changes = {
        "sweep": None,
        "replications": 1,
        "capacity": CAPACITY,
        "workload.window": "random",
        "workload.first": 40,
    }
    (found,) = v.capacity(v.load(study, changes), workers=1)
    assert found.note == ""
    assert found.answer is not None
    assert found.answer.interval is not None
    assert found.answer.interval.low < found.answer.interval.high
