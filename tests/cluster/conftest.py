"""Tests on a Ray cluster; without Ray they are left out."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

from tests.cluster.nodes import LocalCluster

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
