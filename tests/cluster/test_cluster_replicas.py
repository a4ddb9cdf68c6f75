"""Engine replicas on the nodes of a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import LocalCluster, end_node, engine, outputs, raylets_of_ranks
from vajra_py.cluster.connect import RayCluster, ray_cluster
from vajra_py.cluster.places import pool_on
from vajra_py.config import config_from_mapping
from vajra_py.errors import RunError
from vajra_py.experiment.runs.pool import RunTask, run_in_pool
from vajra_py.experiment.runs.replay import replay
from vajra_py.runtime.records.input_log import TransferEnd, read_inputs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def connected(cluster: LocalCluster) -> Iterator[RayCluster]:
    with ray_cluster(cluster.address) as reached:
        assert reached is not None
        yield reached


@pytest.mark.long
def test_ranks_of_a_replica_meet_across_nodes(
    connected: RayCluster, model: Path, here: dict[str, list[int]], tmp_path: Path
) -> None:
    placement = {"strategy": "strict_spread"}
    given = engine(model, placement=placement, tensor_parallel=2) | {"num_replicas": 1}
    config = config_from_mapping(given)
    there = run_in_pool(pool_on(connected, config), RunTask(config, tmp_path / "there"))
    assert outputs(there) == here
    assert json.loads((there.path / "engine.json").read_text())["default"]["device"].startswith("cpu of node ")
    assert replay(there.path).is_equal


@pytest.mark.long
def test_requests_leave_a_node_with_their_kv(
    connected: RayCluster, model: Path, here: dict[str, list[int]], tmp_path: Path
) -> None:
    settings = engine(model) | {"pools": {"prefill": {}, "decode": {}}}
    del settings["num_replicas"]
    config = config_from_mapping(settings)
    run = run_in_pool(pool_on(connected, config), RunTask(config, tmp_path / "apart"))
    assert outputs(run) == here
    moved = [one for one in read_inputs(run.path / "inputs.jsonl.gz") if isinstance(one, TransferEnd)]
    assert len(moved) == len(here)
    assert replay(run.path).is_equal


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
