"""Opening run folders: what a user sees of good, partial and broken ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from vajra_py.errors import RunError
from vajra_py.metrics.runs.differences import ABSENT, axes, differences, flatten, natural
from vajra_py.metrics.runs.naming import distinct, load_runs
from vajra_py.metrics.runs.run_data import RunData


@pytest.fixture
def folder(make_run: Callable[..., RunData], tmp_path: Path) -> Path:
    """A copy of a run's folder, to be broken."""
    return Path(shutil.copytree(make_run(name="whole").path, tmp_path / "whole"))


def test_a_whole_run_reads_as_tables_and_frames(make_run: Callable[..., RunData]) -> None:
    run = make_run(name="whole")
    assert (run.name, run.is_finished, run.has_decisions) == ("whole", True, True)
    frame = run.requests_frame("request_id", "ttft_s", "slo_met")
    assert list(frame.columns) == ["request_id", "ttft_s", "slo_met"]
    assert len(frame) == 60
    assert frame.ttft_s.min() > 0
    assert len(run.steps_frame()) == run.summary.value("resources.num_steps")
    assert run.tbt_frame().weight.sum() == run.summary.value("overall.tbt_s.count")
    assert run.config["workload"]["num_requests"] == 60
    assert sum(1 for _ in run.decisions()) == run.steps("step_index").num_rows


def test_measured_columns_are_those_of_the_window(make_run: Callable[..., RunData]) -> None:
    run = make_run(name="whole")
    measured = run.measured("ttft_s", "tenant")
    assert sorted(measured) == ["tenant", "ttft_s"]
    assert len(measured["ttft_s"]) == run.summary.value("overall.counts.arrived")


def test_nothing_is_read_before_it_is_asked_for(folder: Path) -> None:
    for name in ("requests.parquet", "steps.parquet", "summary.json", "decisions.parquet"):
        (folder / name).write_bytes(b"not what it should be")
    assert RunData.load(folder).tbt().num_rows > 0


@pytest.mark.parametrize("path", ["missing", "a_file"])
def test_no_folder_is_no_run(tmp_path: Path, path: str) -> None:
    (tmp_path / "a_file").write_text("x")
    with pytest.raises(RunError, match=rf"{path}: not a run folder"):
        RunData.load(tmp_path / path)


def test_a_folder_without_manifest_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"manifest\.json: the file is missing"):
        RunData.load(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1, 2]", "\xff"])
def test_a_broken_manifest_is_named(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(RunError, match=r"manifest\.json: "):
        RunData.load(folder)


def test_a_missing_table_says_how_the_run_ended(folder: Path) -> None:
    (folder / "requests.parquet").unlink()
    manifest = json.loads((folder / "manifest.json").read_text()) | {"status": "interrupted"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    run = RunData.load(folder)
    assert not run.is_finished
    with pytest.raises(RunError, match=r"requests\.parquet: the file is missing\. The run's status is: interrupted"):
        run.requests()


def test_a_cut_off_table_is_named(folder: Path) -> None:
    data = (folder / "steps.parquet").read_bytes()
    (folder / "steps.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(RunError, match=r"steps\.parquet: not a readable Parquet file"):
        RunData.load(folder).steps()


def test_a_table_of_another_kind_is_named(folder: Path) -> None:
    shutil.copy(folder / "tbt.parquet", folder / "requests.parquet")
    with pytest.raises(RunError, match=r"requests\.parquet: lacks columns \(ttft_s\)"):
        RunData.load(folder).requests("replicaset", "ttft_s")


def test_an_unknown_column_is_answered_with_the_known_ones(folder: Path) -> None:
    with pytest.raises(RunError, match=r"no such column \(ttft\)\. Allowed: request_id, index"):
        RunData.load(folder).requests("ttft")


def test_a_cut_off_decision_log_is_named(folder: Path) -> None:
    data = (folder / "decisions.parquet").read_bytes()
    (folder / "decisions.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(RunError, match=r"decisions\.parquet: not a readable decision log"):
        list(RunData.load(folder).decisions())


def test_a_missing_summary_is_computed_and_a_broken_one_named(folder: Path) -> None:
    kept = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").unlink()
    assert json.loads(RunData.load(folder).summary.to_json()) == kept
    (folder / "summary.json").write_text("{}")
    with pytest.raises(RunError, match=r"summary\.json: not a readable summary"):
        _ = RunData.load(folder).summary


def test_a_run_without_configuration_has_an_empty_one(folder: Path) -> None:
    (folder / "config.yaml").unlink()
    assert RunData.load(folder).config == {}
    (folder / "config.yaml").write_text("a: [1")
    with pytest.raises(RunError, match=r"config\.yaml: cannot be read"):
        _ = RunData.load(folder).config


def test_the_digest_of_a_sweeps_folder_is_no_part_of_the_name(folder: Path) -> None:
    moved = folder.rename(folder.parent / "lrs-pull-0a1b2c3d")
    assert RunData.load(moved).name == "lrs-pull"
    assert RunData.load(moved, "mine").name == "mine"


def test_equal_names_give_way_to_what_differs(make_run: Callable[..., RunData]) -> None:
    runs = [
        make_run(name="same", chunk_tokens=chunk, shortest_first=first)
        for chunk in (64, 256)
        for first in (False, True)
    ]
    assert [run.name for run in distinct(runs)] == ["fcfs/64", "spt/64", "fcfs/256", "spt/256"]


def test_equal_names_without_a_difference_are_numbered(make_run: Callable[..., RunData]) -> None:
    run = make_run(name="same")
    parent = run.path.parent.name
    assert [one.name for one in load_runs([run.path, run.path])] == [f"{parent}/same", f"{parent}/same #2"]
    assert [one.name for one in distinct([run.renamed("a"), run.renamed("b")])] == ["a", "b"]


def test_differences_and_axes(make_run: Callable[..., RunData]) -> None:
    runs = [make_run(name=f"r{rate}", rate_per_s=rate, chunk_tokens=64, seed=int(rate)) for rate in (4.0, 16.0)]
    assert differences(runs) == {"seed": ("4", "16"), "workload.arrivals.rate_per_s": ("4", "16")}
    # The seed follows from the rate here, and is not an axis of its own.
    assert [(axis.label, axis.values) for axis in axes(runs)] == [("rate per s", ("4", "16"))]


def test_a_parameter_that_one_policy_has_is_no_axis(make_run: Callable[..., RunData]) -> None:
    first, second = make_run(name="a").renamed("a"), make_run(name="a").renamed("b")
    first.__dict__["config"] = {"policy_of": {"policy": "fixed"}, "p": {"x": 1}}
    second.__dict__["config"] = {"policy_of": {"policy": "dynamic", "params": {"target": 0.5}}, "p": {"x": 1}}
    assert differences([first, second])["policy_of.params.target"] == (ABSENT, "0.5")
    assert [axis.path for axis in axes([first, second])] == ["policy_of.policy"]


def test_flat_configurations_and_natural_order() -> None:
    assert flatten({"a": {"b": [1, 2], "c": None}, "d": "x", "e": {}}) == {
        "a.b": "[1, 2]",
        "a.c": "null",
        "d": "x",
        "e": "{}",
    }
    assert sorted(["rate 16", "rate 2", "rate 4.5"], key=natural) == ["rate 2", "rate 4.5", "rate 16"]
