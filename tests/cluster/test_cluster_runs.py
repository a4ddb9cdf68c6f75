"""Runs on a cluster of several nodes: the results of one machine, whatever is lost on the way."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.cluster import nodes
from tests.cluster.nodes import SWEEP, LocalCluster, end_node, results, write_requests
from vajra_py.cluster import pool
from vajra_py.cluster.connect import RayCluster, ray_cluster
from vajra_py.cluster.node import RemoteResult, RemoteRun, execute_run
from vajra_py.cluster.places import pool_on
from vajra_py.config import config_from_mapping
from vajra_py.errors import RunError, RunInterrupted
from vajra_py.experiment.runs.point_status import PointStatus
from vajra_py.experiment.runs.pool import RunTask, run_in_pool
from vajra_py.experiment.runs.sweep import SweepResult, sweep

pytestmark = pytest.mark.slow
Asked: TypeAlias = Callable[..., SweepResult]
OnNodes: TypeAlias = Callable[[Callable[[RemoteRun, Any], None]], None]


@pytest.fixture(scope="module")
def connected(cluster: LocalCluster) -> Iterator[RayCluster]:
    with ray_cluster(cluster.address) as reached:
        assert reached is not None
        yield reached


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Runs the sweep in a folder below the test's own, on a cluster."""

    def run(name: str, cluster: RayCluster, **options: Any) -> SweepResult:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        write_requests(folder / "requests.jsonl")
        config = config_from_mapping(SWEEP)
        return sweep(config, pool=pool_on(cluster, config), **options)

    return run


@pytest.fixture
def on_nodes(monkeypatch: pytest.MonkeyPatch) -> OnNodes:
    """Has nodes do something with each run before its result is given back."""

    import ray

    ray.cloudpickle.register_pickle_by_value(nodes)  # nodes have the package, and not its tests

    def put(before: Callable[[RemoteRun, Any], None]) -> None:
        def execute(run: RemoteRun, collector: Any) -> RemoteResult:
            result = execute_run(run, collector)
            before(run, collector)
            return result

        monkeypatch.setattr(pool, "execute_run", execute)

    return put


def test_a_sweep_gives_the_bytes_of_one_machine_and_resumes(
    connected: RayCluster, asked: Asked, expected: dict[str, bytes], tmp_path: Path
) -> None:
    assert not asked("there", connected).failures
    assert len(expected) >= 4 * 6
    assert results(tmp_path / "there/runs") == expected
    # What is finished is not run again, what is missing is.
    kept, lost = sorted((tmp_path / "there/runs/small").iterdir())[:2]
    written = (kept / "manifest.json").stat().st_mtime_ns
    for path in lost.iterdir():
        path.unlink()
    seen: list[PointStatus] = []
    asked("there", connected, progress=lambda index, status: seen.append(status))
    assert sum(one.was_there for one in seen) == 3
    assert results(tmp_path / "there/runs") == expected
    assert (kept / "manifest.json").stat().st_mtime_ns == written


def test_a_killed_worker_costs_only_the_run_that_it_had(
    connected: RayCluster, asked: Asked, on_nodes: OnNodes, expected: dict[str, bytes], tmp_path: Path
) -> None:
    deaths = tmp_path / "deaths"
    deaths.mkdir()

    def die_once(run: RemoteRun, collector: Any) -> None:
        if run.number == 1 and not any(deaths.iterdir()):
            (deaths / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    on_nodes(die_once)
    assert not asked("there", connected).failures
    assert len(list(deaths.iterdir())) == 1
    assert results(tmp_path / "there/runs") == expected


def test_a_run_that_always_kills_its_worker_fails_alone(
    connected: RayCluster,
    asked: Asked,
    on_nodes: OnNodes,
    expected: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "MOST_LOSSES", 1)  # each loss takes the start of a process

    def die(run: RemoteRun, collector: Any) -> None:
        if run.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    on_nodes(die)
    result = asked("there", connected)
    (_, error), *others = result.failures
    assert not others
    assert error.startswith("its worker was lost 2 times (")
    assert len(result.runs) == 3
    assert results(tmp_path / "there/runs").items() < expected.items()


def test_runs_of_a_lost_node_are_executed_on_others(
    cluster: LocalCluster,
    connected: RayCluster,
    asked: Asked,
    on_nodes: OnNodes,
    expected: dict[str, bytes],
    tmp_path: Path,
) -> None:
    deaths = tmp_path / "deaths"
    deaths.mkdir()

    def end_node_once(run: RemoteRun, collector: Any) -> None:
        if run.number == 1 and not any(deaths.iterdir()):
            (deaths / str(os.getppid())).touch()
            end_node(os.getppid())

    on_nodes(end_node_once)
    try:
        assert not asked("there", connected).failures
    finally:
        cluster.add_node()
    assert len(list(deaths.iterdir())) == 1
    assert results(tmp_path / "there/runs") == expected


@pytest.mark.long
def test_an_interrupt_keeps_what_is_finished(
    connected: RayCluster,
    asked: Asked,
    on_nodes: OnNodes,
    expected: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asker = os.getpid()

    def interrupt(run: RemoteRun, collector: Any) -> None:
        if run.number == 3:
            os.kill(asker, signal.SIGINT)
            threading.Event().wait()

    on_nodes(interrupt)
    ended: list[int] = []
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a process of the background
    try:
        with pytest.raises(RunInterrupted, match="finished runs are kept"):
            asked("there", connected, progress=lambda index, status: status.is_finished and ended.append(index))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert len(list((tmp_path / "there/runs").rglob("manifest.json"))) == len(ended) >= 2
    monkeypatch.undo()
    asked("there", connected)
    assert results(tmp_path / "there/runs") == expected


def test_the_progress_of_every_run_is_told(
    connected: RayCluster, asked: Asked, on_nodes: OnNodes, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"

    def wait_until_seen(run: RemoteRun, collector: Any) -> None:
        if run.number == 2:
            collector.report.remote(run.number, 30, 60, 1.5)
            while not seen.exists():
                time.sleep(0.01)

    def look(index: int, status: PointStatus) -> None:
        if (index, status.num_done, status.num_total, status.now_s) == (2, 30, 60, 1.5):
            seen.touch()

    on_nodes(wait_until_seen)
    assert not asked("there", connected, progress=look).failures
    assert seen.exists()


def test_what_a_run_says_on_a_node_is_said_here(
    connected: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requests.jsonl").write_text('{"request_id": "r0"}\n')
    single = {name: value for name, value in SWEEP.items() if name != "sweep"}
    config = config_from_mapping(single)
    with pytest.raises(RunError) as caught:
        run_in_pool(pool_on(connected, config), RunTask(config, tmp_path / "runs/single"))
    assert str(caught.value).startswith(f"{tmp_path}/requests.jsonl:1: has no field 'arrived_at'. ")
    assert not (tmp_path / "runs").exists()
    write_requests(tmp_path / "requests.jsonl")
    run = run_in_pool(pool_on(connected, config), RunTask(config, tmp_path / "runs/single"))
    assert run.requests("request_id").num_rows == 60
