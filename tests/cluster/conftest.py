"""Fixtures of tests on a Ray cluster, which are skipped without Ray."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import SWEEP, LocalCluster, engine, outputs, results, write_requests
from vajra_py.config import config_from_mapping
from vajra_py.engine.tiny import write_tiny_model
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.experiment.runs.sweep import sweep

collect_ignore_glob = [] if importlib.util.find_spec("ray") else ["test_cluster_*.py"]
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """Two nodes of one CPU each; a test that ends one adds another."""
    made = LocalCluster()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Result files of the sweep in this process."""
    folder = tmp_path_factory.mktemp("expected")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_requests(folder / "requests.jsonl")
        sweep(config_from_mapping(SWEEP), workers=1)
    return results(folder / "runs")


@pytest.fixture(scope="session")
def here(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Output tokens of two engine replicas on this machine."""
    return outputs(run_experiment(config_from_mapping(engine(model)), folder=tmp_path_factory.mktemp("here") / "run"))
