"""Engine replicas on the nodes of a cluster."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import LocalCluster, end_node, raylets_of_ranks
from vajra_py.cluster.connect import RayCluster, ray_cluster
from vajra_py.cluster.places import pool_on
from vajra_py.config import config_from_mapping
from vajra_py.errors import RunError
from vajra_py.experiment.pool import RunTask, run_in_pool
from vajra_py.experiment.replay import replay
from vajra_py.experiment.run import run_experiment
from vajra_py.metrics.run_data import RunData

pytestmark = pytest.mark.slow

ENGINE: dict[str, Any] = {
    "version": 1,
    "name": "engine",
    "seed": 3,
    "num_replicas": 2,
    "scheduling": {
        "request_prioritizer": "fcfs",
        "replicaset_scheduler": "round_robin",
        "replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_size": 32}},
    },
    "workload": {
        "type": "synthetic",
        "arrivals": {"type": "poisson", "rate": 100},
        "num_requests": 12,
        "prompt_tokens": {"type": "uniform", "min": 8, "max": 60},
        "output_tokens": {"type": "uniform", "min": 4, "max": 12},
    },
    "replica": {"max_batch_size": 8, "max_model_len": 128, "memory": {"num_blocks": 60}},
}


@pytest.fixture(scope="module")
def connected(cluster: LocalCluster) -> Iterator[RayCluster]:
    with ray_cluster(cluster.address) as reached:
        assert reached is not None
        yield reached


def engine(model: Path, **settings: Any) -> dict[str, Any]:
    return ENGINE | {"backend": {"engine": {"model": str(model), "self_check": False, **settings}}}


@pytest.fixture(scope="module")
def here(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """What two replicas on this machine compute."""
    return outputs(run_experiment(config_from_mapping(engine(model)), folder=tmp_path_factory.mktemp("here") / "run"))


def outputs(run: RunData) -> dict[str, list[int]]:
    with gzip.open(run.path / "outputs.jsonl.gz") as file:
        rows = [json.loads(line) for line in file]
    return {row["request_id"]: row["token_ids"] for row in rows}


def test_replicas_on_two_nodes_compute_what_one_machine_computes_and_replay(
    connected: RayCluster, model: Path, here: dict[str, list[int]], tmp_path: Path
) -> None:
    config = config_from_mapping(engine(model))
    there = run_in_pool(pool_on(connected, config), RunTask(config, tmp_path / "there"))
    assert outputs(there) == here
    assert sum(map(len, outputs(there).values())) > 40
    assert json.loads((there.path / "engine.json").read_text())["default"]["device"].startswith("cpu of node ")
    assert replay(there.path).is_equal


def test_ranks_of_a_replica_meet_across_nodes(
    connected: RayCluster, model: Path, here: dict[str, list[int]], tmp_path: Path
) -> None:
    placement = {"strategy": "strict_spread"}
    given = engine(model, placement=placement, tensor_parallel=2) | {"num_replicas": 1}
    config = config_from_mapping(given)
    there = run_in_pool(pool_on(connected, config), RunTask(config, tmp_path / "there"))
    assert outputs(there) == here


def test_a_lost_node_takes_its_replica_only(
    cluster: LocalCluster, connected: RayCluster, model: Path, here: dict[str, list[int]], tmp_path: Path
) -> None:
    settings = engine(model, recovery={"max_reruns": 3, "max_restarts": 8, "backoff_s": 0.1})
    config = config_from_mapping(settings)
    raylets: list[int] = []

    def progress(done: int, total: int, now: float) -> None:
        if not raylets:
            raylets.append(raylets_of_ranks()[0])
            end_node(raylets[0])

    try:
        run = run_in_pool(pool_on(connected, config), RunTask(config, tmp_path / "shaken"), progress)
    finally:
        cluster.add_node()
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert raylets
    assert outputs(run) == here
    assert manifest["num_ended"] == {"stop": 12}
    assert [one["what"] for one in manifest["changes"]][:1] == ["lost"]
    assert replay(run.path).is_equal


def test_a_replica_without_room_is_an_error_of_one_line(connected: RayCluster, model: Path, tmp_path: Path) -> None:
    placement = {"cpus_per_rank": 64, "timeout_s": 0.5}
    config = config_from_mapping(engine(model, placement=placement))
    with pytest.raises(RunError, match=r"^placement: replica 0 of default needs 1 x \{'CPU': 64.0\}") as caught:
        run_in_pool(pool_on(connected, config), RunTask(config, tmp_path / "there"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "there").exists()
