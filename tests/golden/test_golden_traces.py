"""Do the policies reproduce every recorded run, and does the comparison notice when they do not?"""

from __future__ import annotations

import gzip
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from tests.golden.readers import compare_folder
from tests.golden.readers.__main__ import main
from tests.golden.readers.folder import report

SYSTEMS = ("vllm_v1", "nano_old", "nano_new", "minivllm_doc", "minivllm_real")


@pytest.fixture(scope="session")
def golden_dir(shared_dir: Path) -> Path:
    folder = shared_dir / "golden"
    if not folder.is_dir():
        pytest.skip(f"recorded decisions absent: no folder {folder}")
    return folder


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_recorded_decision_is_reproduced(golden_dir: Path, system: str) -> None:
    results = list(compare_folder(golden_dir / system))
    assert results
    for result in results:
        told = result.difference.lines() if result.difference else []
        assert result.matches, "\n".join([f"{result.system}/{result.name}", *told])
        assert result.num_compared


@pytest.fixture
def one_trace(golden_dir: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A folder of its own for one recorded run, and the run."""
    with gzip.open(golden_dir / "vllm_v1" / "preempt_fcfs.json.gz", "rt") as stream:
        trace = json.load(stream)
    folder = tmp_path / "traces"
    (folder / "vllm_v1").mkdir(parents=True)
    return folder, trace


def written(folder: Path, trace: dict[str, Any]) -> Path:
    (folder / "vllm_v1" / "changed.json").write_text(json.dumps(trace))
    return folder


def preempting_step(trace: dict[str, Any]) -> dict[str, Any]:
    step: dict[str, Any] = next(step for step in trace["steps"] if step.get("preempted"))
    return step


def test_a_difference_is_told_with_both_sides(one_trace: tuple[Path, dict[str, Any]]) -> None:
    folder, trace = one_trace
    step = preempting_step(trace)
    right = list(step["preempted"])
    step["preempted"] = ["r0"]
    out = StringIO()
    assert not report(written(folder, trace), out)
    told = out.getvalue()
    assert f"step {step['step']}: preempted" in told
    assert "recorded: ['r0']" in told
    assert f"here:     {right}" in told
    assert "free blocks:" in told
    assert "0 of 1 traces match" in told


@pytest.mark.parametrize(
    "field", ["sched", "kind", "computed", "preempted", "free_sched", "free_end", "running", "num_waiting", "waiting"]
)
def test_each_field_is_compared(one_trace: tuple[Path, dict[str, Any]], field: str) -> None:
    folder, trace = one_trace
    step = preempting_step(trace)
    value = step[field]
    step[field] = value + 1 if isinstance(value, int) else value[1:]
    (result,) = compare_folder(written(folder, trace))
    assert result.difference is not None
    assert (result.difference.step, result.difference.field) == (str(step["step"]), field)


def test_an_end_that_is_not_recorded_is_noticed(one_trace: tuple[Path, dict[str, Any]]) -> None:
    folder, trace = one_trace
    next(step for step in trace["steps"] if step.get("finished")).pop("finished")
    (result,) = compare_folder(written(folder, trace))
    assert result.difference is not None
    assert result.difference.field == "finished"


def test_requests_left_at_the_end_are_noticed(one_trace: tuple[Path, dict[str, Any]]) -> None:
    folder, trace = one_trace
    del trace["steps"][-3:]
    (result,) = compare_folder(written(folder, trace))
    assert result.difference is not None
    assert result.difference.field == "requests left"


def test_an_unknown_kind_of_trace_is_no_match(one_trace: tuple[Path, dict[str, Any]]) -> None:
    folder, trace = one_trace
    (result,) = compare_folder(written(folder, {**trace, "schema": "vllm-sched-golden-9"}))
    assert not result.matches


def test_the_command_tells_by_its_exit_code(
    one_trace: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, trace = one_trace
    monkeypatch.setattr("sys.argv", ["golden", str(written(folder, trace))])
    assert main() == 0
    assert "1 of 1 traces match" in capsys.readouterr().out
    preempting_step(trace)["free_end"] = -1
    written(folder, trace)
    assert main() == 1
    monkeypatch.setattr("sys.argv", ["golden", str(folder / "nothing")])
    assert main() == 2
