"""What every test may rely on: repeatable hypothesis runs, the reference data where present, a GPU where asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports a numeric library: one thread per worker (workers share the cores), figures into files, no model hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parent.parent

# `ci` (the default): the same examples in every run, no deadline, since a shared machine stalls now and then.
settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
# `explore`: new examples each time, and more of them; what it finds becomes an explicit @example.
settings.register_profile("explore", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where torch sees none; torch is imported only if such a test was collected."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; torch sees none"))


@pytest.fixture(scope="session")
def repository_root() -> Path:
    """The folder that holds pyproject.toml."""
    return ROOT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Reference traces and recorded decisions that are not shipped: `../shared`, or what VAJRA_SHARED_DIR names."""
    folder = Path(os.environ.get("VAJRA_SHARED_DIR", ROOT.parent / "shared")).resolve()
    if not folder.is_dir():
        pytest.skip(f"reference data absent: no folder {folder} (VAJRA_SHARED_DIR names another)")
    return folder
