"""Moves of requests between replicas, waiting and running."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from tests.sim.split_pools import POLICIES, prepared, settings, simulate
from vajra_py.contract import (
    Layer,
    Move,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    QueueView,
    ReplicaLoadView,
    RequestView,
)
from vajra_py.contract.observer import EndReason
from vajra_py.errors import PolicyError
from vajra_py.plugins import Registry, load_registry
from vajra_py.runtime.records.input_log import Failure, Restart
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.support.clock import to_ticks
from vajra_py.workload import RequestSpec

DECODE_S = 0.0101
Choose = Callable[[dict[str, RequestView], float], Iterable[Move]]


class Mover:
    """Assigns everything to replica 0, and moves at the times that it is given what a function says."""

    def __init__(self, context: PolicyContext, times: Sequence[float], choose: Choose, first: int = 0) -> None:
        self.alive: dict[str, RequestView] = {}
        self._choose, self._first = choose, first
        for time_s in times:
            context.wake.at(time_s, str(time_s))

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        self.alive.update({one.request_id: one for one in requests})

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        for one in requests:
            self.alive.pop(one.request_id, None)

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> int | None:
        up = [one.replica_id for one in replicas if one.is_up]
        return self._first if self._first in up else up[0]

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        return [one.request_id for one in queued] if replica.replica_id == 1 else []

    def moves(self, replicas: Sequence[ReplicaLoadView], now: float) -> Iterable[Move]:
        return self._choose(self.alive, now)


def registry_of(times: Sequence[float], choose: Choose) -> Registry:
    spec = PolicySpec(
        "mover",
        Layer.REPLICASET_SCHEDULER,
        PolicyConfig,
        lambda config, context: Mover(context, times, choose),
        "Moves what a test says.",
    )
    return load_registry().with_policies([spec])


def mixed(**keys: Any) -> dict[str, Any]:
    mapping = settings(**{"hand_off": {"kv_bytes_per_token": 1_000_000}, **keys})
    del mapping["pools"]
    mapping["num_replicas"] = 2
    mapping["scheduling"] = {**mapping["scheduling"], "replicaset_scheduler": "mover"}
    return mapping


def move_all(target: int | None) -> Choose:
    return lambda alive, now: [Move(one, target) for one in alive.values()]


def test_a_running_request_moves_in_stages_and_goes_on_where_it_stopped() -> None:
    mapping = mixed(migration={"last_stage_max_blocks": 2})
    requests = [RequestSpec("a", 0.0, 640, 200)]
    ways = simulate(mapping, requests, registry=registry_of([0.5], move_all(1))).ways
    alone = simulate(mapping, requests, registry=registry_of([], move_all(1))).ways
    way = ways["a"]
    assert way.held is not None
    assert way.arrived is not None
    assert way.held > 0.5 + 0.064  # the first 640 MB go at 10 GB/s while it decodes
    down_s = way.arrived - way.held
    assert 0 < down_s < 0.005  # a few blocks of the last stage
    assert alone["a"].ended is not None
    assert way.ended is not None
    assert way.ended - alone["a"].ended < down_s + 2 * DECODE_S
    assert way.num_moved is not None
    assert way.num_moved < 48


def test_downtime_does_not_grow_with_the_length_of_the_request() -> None:
    downs = []
    for prompt in (320, 1280):
        mapping = mixed(migration={"last_stage_max_blocks": 2, "max_stages": 5})
        requests = [RequestSpec("a", 0.0, prompt, 200)]
        way = simulate(mapping, requests, registry=registry_of([0.5], move_all(1))).ways["a"]
        assert way.arrived is not None
        assert way.held is not None
        downs.append(way.arrived - way.held)
    assert max(downs) < 0.005


def test_waiting_requests_go_to_another_queue_or_back_to_the_shared_one() -> None:
    requests = [RequestSpec(name, 0.0, 1500, 50, max_tokens=50) for name in "abc"]  # two do not fit into one replica
    for target in (1, None):

        def moves(alive: dict[str, RequestView], now: float, target: int | None = target) -> Iterable[Move]:
            return [Move(one, target) for one in alive.values() if not one.is_resident]

        ways = simulate(mixed(), requests, registry=registry_of([0.1], moves)).ways
        alone = simulate(mixed(), requests, registry=registry_of([], moves)).ways
        assert ways["b"].ended is not None
        assert alone["b"].ended is not None
        assert ways["b"].ended < alone["b"].ended
        assert ways["b"].assigned == [0, target]


def test_a_target_without_room_leaves_the_source_as_it_was() -> None:
    mapping = mixed()
    requests = [RequestSpec("a", 0.0, 1400, 100, max_tokens=100), RequestSpec("b", 0.6, 400, 20)]
    done = simulate(mapping, requests, registry=registry_of([0.5], move_all(1)))
    assert done.ways["a"].reason is EndReason.LENGTH

    def there(alive: dict[str, RequestView], now: float) -> Iterable[Move]:
        if now < 0.3:
            return [Move(alive["a"], 1)]
        return [Move(alive["b"], 1)]

    requests = [RequestSpec("a", 0.0, 1400, 100, max_tokens=100), RequestSpec("b", 0.25, 400, 60, max_tokens=60)]
    done = simulate(mapping, requests, registry=registry_of([0.2, 0.6], there))
    assert done.ways["b"].held is None
    assert ("aborted", "b") in {(what, name) for what, name, _ in done.order}


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda alive, now: [Move(alive["a"], 0)], r"request a, at 0\.1 s: moves a request to replica 0, where it is"),
        (lambda alive, now: [Move(alive["a"], 7)], "to replica 7. Replicas that are up and can run it: .0, 1."),
        (lambda alive, now: [Move(alive["a"], 1.0)], r"to replica 1\.0\. Replicas that are up"),  # type: ignore[arg-type]
        (lambda alive, now: [Move(alive["a"], None)], "calls back a request that does not wait .running."),
        (lambda alive, now: [Move("a", 1)], "moves what is no request"),  # type: ignore[arg-type]
        (lambda alive, now: ["a"], r"at 0\.1 s: moves 'a'; expected a Move"),
        (lambda alive, now: [1 / 0], "ZeroDivisionError"),
    ],
)
def test_moves_that_make_no_sense_are_named(choose: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=f"mover.*{message}"):
        simulate(mixed(), [RequestSpec("a", 0.0, 100, 100)], registry=registry_of([0.1], choose))


@pytest.mark.parametrize("seed", range(60))
def test_random_moves_lose_nothing_and_do_not_depend_on_repeated_steps(seed: int) -> None:
    draw = random.Random(seed)
    times = [round(draw.uniform(0, 2), 3) for _ in range(20)]
    requests = sorted(
        (
            RequestSpec(f"r{one}", round(draw.uniform(0, 1), 3), draw.randint(1, 600), draw.randint(1, 120))
            for one in range(12)
        ),
        key=lambda one: one.arrived_at,
    )
    faults = [(draw.choice(["abort", "fail"]), round(draw.uniform(0, 2), 3), draw.randrange(12)) for _ in range(4)]

    def choose(alive: dict[str, RequestView], now: float) -> Iterable[Move]:
        found = []
        for one in alive.values():
            replica_id = one.replica_id
            up = [
                other for other in (0, 1) if other != replica_id and run.controller.replicasets["default"].is_up(other)
            ]
            state = one.state.value
            if state in ("running", "waiting", "preempted") and up and replica_id >= 0:
                found.append(Move(one, up[0]))
        return found

    results = []
    for wants_steps in (False, True):
        mapping = mixed(migration={"last_stage_max_blocks": 2, "max_per_replica": 3})
        run, simulator, ways = prepared(mapping, wants_steps=wants_steps, registry=registry_of(times, choose))
        failed: set[int] = set()
        for kind, at, number in faults:
            tick = to_ticks(at)
            if kind == "abort":
                simulator.inject(tick, Phase.ABORT, f"r{number}")
            elif number % 2 not in failed:
                failed.add(number % 2)
                lost = Failure(tick, "default", number % 2, "lost", max_reruns=9)
                simulator.inject(tick, Phase.FAILURE, lost)
                simulator.inject(tick + 10**11, Phase.FAILURE, Restart(tick + 10**11, "default", number % 2))
        simulator.run(requests)
        assert run.controller.num_alive == 0
        run.controller.check_conservation()
        for replica in run.controller.replicas():
            replica.memory.check()
            assert replica.memory.free_blocks == replica.memory.num_blocks
            assert not replica.lifecycle.held
        results.append((ways.of, ways.order))
    assert results[0] == results[1]


def reserving_first(num_blocks: int, **more: Any) -> dict[str, Any]:
    """Two prefill replicas, and one decode replica whose blocks are set aside before a prompt is computed."""
    return settings(
        scheduling={**POLICIES, "replicaset_scheduler": "mover"},
        pools={"prefill": {"num_replicas": 2}, "decode": {"replica": {"memory": {"num_blocks": num_blocks}}}},
        hand_off={"kv_bytes_per_token": 1_000_000, "reserve": "before_prompt"},
        **more,
    )


def test_a_prompt_that_moves_takes_its_reservation_along() -> None:
    """b waits behind a with blocks of the decode replica; on the other prefill replica it begins at once."""

    to_move = ["b"]

    def moves(alive: dict[str, RequestView], now: float) -> Iterable[Move]:
        return [Move(alive[to_move.pop()], 1)] if to_move else []

    requests = [RequestSpec("a", 0.0, 900, 5), RequestSpec("b", 0.001, 900, 5)]
    mapping = reserving_first(200)
    ways = simulate(mapping, requests, registry=registry_of([0.02], moves)).ways
    assert ways["b"].assigned == [0, 1]
    assert ways["b"].held == pytest.approx(0.02 + 0.01 + 0.0001 * 900)
    assert ways["b"].target == 2


def test_a_prompt_that_waits_for_blocks_of_its_target_is_not_called_back() -> None:
    """It is bound already, and its blocks come next; to call it back changes nothing."""

    def moves(alive: dict[str, RequestView], now: float) -> Iterable[Move]:
        return [Move(alive["b"], None)]

    requests = [RequestSpec("a", 0.0, 900, 5), RequestSpec("b", 0.001, 900, 5)]
    called = simulate(reserving_first(60), requests, registry=registry_of([0.02], moves)).ways
    assert called == simulate(reserving_first(60), requests, registry=registry_of([], moves)).ways
    assert called["a"].ended is not None
    assert called["b"].held is not None
    assert called["b"].held > called["a"].ended


def test_a_decode_does_not_move_to_a_replica_that_computes_prompts_alone() -> None:
    """It would grow there beyond what the replica may hold."""
    mapping = reserving_first(200)
    with pytest.raises(PolicyError, match=r"moves a request to replica 1\. Replicas that are up and can run it: \[2\]"):
        simulate(mapping, [RequestSpec("a", 0.0, 100, 100)], registry=registry_of([0.5], move_all(1)))
