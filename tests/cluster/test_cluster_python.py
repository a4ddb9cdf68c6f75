"""`on=` of the Python interface: the results of this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import vajra_py
from tests.cluster.nodes import SWEEP, LocalCluster, results, write_requests

pytestmark = pytest.mark.slow

SINGLE = {name: value for name, value in SWEEP.items() if name != "sweep"}
QUESTION: dict[str, Any] = SINGLE | {
    "workload": {
        "type": "synthetic",
        "arrivals": {"type": "poisson", "rate": 5},
        "num_requests": 60,
        "prompt_tokens": {"type": "uniform", "min": 50, "max": 150},
        "output_tokens": {"type": "uniform", "min": 10, "max": 30},
    },
    "capacity": {
        "slo": "p90(e2e) <= 0.5",
        "rate": {"min": 1, "max": 60},
        "precision_fraction": 0.2,
        "replications": 2,
        "max_replications": 2,
    },
}


def test_runs_and_sweeps(
    cluster: LocalCluster, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for on in ("local", cluster.address):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        monkeypatch.chdir(folder)
        write_requests(folder / "requests.jsonl")
        vajra_py.run(vajra_py.load(SINGLE | {"name": "single"}), on=on)
        found.append(results(folder / "runs"))
    assert found[0] == found[1]
    assert len(found[0]) >= 6
    swept = vajra_py.sweep(vajra_py.load(SWEEP), on=cluster.address, workers=1)
    assert len(swept.runs) == 4
    assert results(Path("runs/small")) == {name.removeprefix("small/"): text for name, text in expected.items()}


def test_capacity_searches(cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    for on in ("local", cluster.address):
        folder = tmp_path / str(len(answers))
        folder.mkdir()
        monkeypatch.chdir(folder)
        answers.append(vajra_py.capacity(vajra_py.load(QUESTION), on=on, workers=1))
    assert answers[0] == answers[1]
    assert answers[0][0].answer is not None
    assert results(tmp_path / "0/runs") == results(tmp_path / "1/runs")
