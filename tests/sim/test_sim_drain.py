"""Replicas that drain by migration: what runs moves away, what waits goes elsewhere, and nothing is lost where that is not possible."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sim.scaled import Scaled, Scripted, requests, scaled
from vajra_py.contract.observer import Observer
from vajra_py.runtime.records.input_log import Failure
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.support.clock import to_ticks
from vajra_py.sim.simulator import SimulationOptions
from vajra_py.workload import RequestSpec


class Moved(Observer):
    """Requests that arrived elsewhere with their KV: (request, source, target, time)."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, int, float]] = []
        self.preempted = 0

    def on_arrived(self, request: Any, source: int, target: int, now: float) -> None:
        self.rows.append((request.request_id, source, target, now))

    def on_preempted(self, request: Any, mode: str, now: float) -> None:
        self.preempted += 1


def draining(drain: str, script: dict[float, int], num_replicas: int, **more: Any) -> tuple[Scaled, Moved]:
    """A replicaset that follows a script; 20 tokens of KV take 2 ms."""
    rules: dict[str, Any] = {
        "chooser": "round_robin",
        "hand_off": {"kv_bytes_per_token": 1_000_000},
        "links": {"bandwidth_gb_s": 10.0},
        "replica": {"max_batch_size": 8, "max_model_len": 1000, "memory": {"num_blocks": 100}},
        "options": SimulationOptions(check_every_steps=1),
    }
    elastic = {"max_replicas": num_replicas, "drain": drain}
    world = scaled(
        lambda context: Scripted(context, script), num_replicas=num_replicas, elastic=elastic, **(rules | more)
    )
    moved = Moved()
    world.controller.watch((world.watcher, moved))
    return world, moved


def down_at(world: Scaled, replica_id: int) -> float:
    return next(at for at, one, state in world.watcher.changes() if (one, state) == (replica_id, "down"))


def test_a_replica_is_down_as_soon_as_its_requests_are_elsewhere() -> None:
    ends = {}
    for drain in ("wait", "migrate"):
        world, moved = draining(drain, {0.5: 1}, 2)
        seen = world.run(requests(6, output=200))
        assert {reason for _, reason, _ in seen.ends} == {"stop"}
        assert moved.preempted == 0
        ends[drain] = down_at(world, 1), max(at for _, _, at in seen.ends), len(moved.rows)
    assert ends["wait"][0] == pytest.approx(2.0, abs=0.02)
    assert ends["migrate"][0] < 0.6
    assert (ends["wait"][2], ends["migrate"][2]) == (0, 3)
    assert ends["migrate"][1] < ends["wait"][1] + 0.1, "requests lose a few steps at most"


@pytest.mark.parametrize("chooser", ["pull", "least_loaded", "llumnix"])
def test_the_replicaset_scheduler_chooses_where_they_go(chooser: str) -> None:
    replica = {"max_batch_size": 4, "max_model_len": 1000, "memory": {"num_blocks": 100}}
    world, moved = draining("migrate", {0.5: 2}, 3, chooser=chooser, replica=replica)
    seen = world.run([RequestSpec(f"r{one}", 0.0, 20, 20 if one < 2 else 150) for one in range(9)])
    assert {reason for _, reason, _ in seen.ends} == {"stop"}
    drained = next(one for _, one, state in seen.changes() if state == "draining")
    assert {source for _, source, _, _ in moved.rows} == {drained}
    assert down_at(world, drained) < 0.7
    if chooser == "least_loaded":
        assert [target for _, _, target, _ in moved.rows] == [0, 0], "it has two requests, the other one three"


def test_what_has_no_room_elsewhere_is_waited_for() -> None:
    """Four requests of 13 blocks run on each of two replicas of 52 blocks: there is room when one has ended."""
    replica = {"max_batch_size": 8, "max_model_len": 400, "memory": {"num_blocks": 54, "watermark_fraction": 0.0}}
    specs = [RequestSpec(f"r{one}", 0.0, 20, 180 + 4 * (one % 2) - 8 * (one == 0)) for one in range(8)]
    world, moved = draining("migrate", {1.7: 1}, 2, replica=replica)
    seen = world.run(specs)
    ends = {name: at for name, _, at in seen.ends}
    assert len(ends) == 8
    assert moved.rows, "one is moved once there is room"
    assert min(at for *_, at in moved.rows) > ends["r0"] == min(ends.values())


def test_requests_that_wait_or_were_preempted_are_placed_anew() -> None:
    replica = {"max_batch_size": 8, "max_model_len": 400, "memory": {"num_blocks": 14, "watermark_fraction": 0.0}}
    world, moved = draining("migrate", {0.4: 1}, 2, replica=replica)
    seen = world.run(requests(16, output=100))
    assert moved.preempted > 0
    assert {reason for _, reason, _ in seen.ends} == {"stop"}
    late = [row for row in seen.admitted if row[1] == 1 and row[2] > 0.4]
    assert len(late) <= 2, "nobody is admitted there but who had just been preempted again"
    assert down_at(world, 1) < max(at for _, _, at in seen.ends) / 2


def test_a_replica_that_is_lost_while_its_requests_leave_loses_none_of_them() -> None:
    for lost in (0, 1):
        world, _ = draining("migrate", {0.5: 2}, 3, links={"bandwidth_gb_s": 0.1})
        tick = to_ticks(0.61)  # a migration takes 0.2 s and more
        world.simulator.inject(tick, Phase.FAILURE, Failure(tick, "default", lost, "pulled the plug", 3))
        seen = world.run(requests(9, output=150))
        assert {reason for _, reason, _ in seen.ends} == {"stop"}
        assert len(seen.ends) == 9


def test_an_aborted_request_does_not_keep_a_replica_up() -> None:
    world, moved = draining("migrate", {0.5: 1}, 2, links={"bandwidth_gb_s": 0.1})
    world.simulator.abort_at(0.55, "r1")
    seen = world.run(requests(2, output=150))
    assert sorted(reason for _, reason, _ in seen.ends) == ["aborted", "stop"]
    assert moved.rows == []
    assert down_at(world, 1) == pytest.approx(0.56, abs=0.011)
