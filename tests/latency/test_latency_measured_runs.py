"""Errors of real runs that no default was fitted to stay within what is aimed at; the runs are not shipped."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "accuracy.py"

PINNED = {
    "rtxpro6000_llama-3.1-8b": {"ttft": 0.050, "tpot": 0.020, "e2e": 0.028},
    "rtxpro6000_qwen3-32b": {"ttft": 0.010, "tpot": 0.012, "e2e": 0.012},
}
"""Errors of means that these runs had when they were last looked at, and a little."""


@pytest.fixture(scope="module")
def accuracy() -> ModuleType:
    spec = importlib.util.spec_from_file_location("accuracy", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["accuracy"] = module
    spec.loader.exec_module(module)
    return module


def test_defaults_are_within_the_aim_on_every_run_without_calibration(
    accuracy: ModuleType, shared_dir: Path, tmp_path: Path
) -> None:
    folder = shared_dir / "measured"
    runs = list(accuracy.runs_in(folder))
    if not runs:
        pytest.skip(f"no measured runs in {folder}")
    found = list(accuracy.accuracies(folder, tmp_path))
    assert [one.name for one in found] == [run.path.name for run in runs]
    assert list(accuracy.beyond(found)) == []
    for one in found:
        bounds = PINNED.get(one.name, accuracy.AIMS)
        errors = {error.name: error.relative for error in one.errors}
        for name, bound in bounds.items():
            assert abs(errors[f"{name}_mean_ms"]) <= bound, (one.name, name)
    lines = list(accuracy.table(found))
    assert len(lines) == 2 + 12
    assert all(line.count("|") == 2 * len(found) + 2 for line in lines)


def test_a_run_has_the_bundle_of_its_own_card_and_model(accuracy: ModuleType, shared_dir: Path) -> None:
    folder = shared_dir / "measured"
    for run in accuracy.runs_in(folder):
        bundle = accuracy.bundle_of(run, folder)
        assert bundle is not None
        assert bundle.relative_to(folder / "profiles").parts[0].lower() == run.path.name.split("_")[0]
        assert bundle.parent.name.lower() == run.settings.model.split("/")[-1].lower()
