"""A reset of the prefix cache, as an input of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from vajra_py.contract.observer import Observer
from vajra_py.latency import ConstantModel
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.runtime.records.input_log import CacheReset
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.support.clock import to_ticks
from vajra_py.sim.simulator import SimulationOptions
from vajra_py.testing import ByArrival, Harness, HarnessOptions, InTurn, PlainChunks
from vajra_py.workload import RequestSpec
from vajra_py.workload.request import PromptContent

OPTIONS = HarnessOptions(num_blocks=100, latency=ConstantModel(0.01), prefix_cache=PrefixCacheOptions())
CACHED = {"a": 0, "b": 16, "hit": 16, "miss": 16}
"""Leading tokens that each finds in the cache: the last token of a prompt is computed in any case."""


class Events(Observer):
    """What an observer is told of replicas and of requests that lose their memory."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.requests: dict[str, Any] = {}

    def on_arrival(self, request: Any, now: float) -> None:
        self.requests[request.request_id] = request

    def on_preempted(self, request: Any, mode: str, now: float) -> None:
        self.told.append(("preempted", request.request_id))

    def on_requeued(self, request: Any, replica_id: int, now: float) -> None:
        self.told.append(("requeued", request.request_id))

    def on_replica_lost(self, replicaset: str, replica_id: int, detail: str, now: float) -> None:
        self.told.append(("lost", replica_id))

    def on_replica_restored(self, replicaset: str, replica_id: int, now: float) -> None:
        self.told.append(("restored", replica_id))

    def on_cache_reset(self, replicaset: str, replica_id: int, requests: Sequence[Any], now: float) -> None:
        self.told.append(("cache reset", replica_id, [one.request_id for one in requests], round(now, 9)))


class Balanced(ByArrival):
    """Counts who has memory, as a fair share policy does."""

    def __init__(self) -> None:
        self.holding: list[str] = []

    def on_admission(self, request: Any, replica_id: int, now: float) -> None:
        assert request.request_id not in self.holding
        self.holding.append(request.request_id)

    def on_preemption(self, request: Any, replica_id: int, now: float) -> None:
        self.holding.remove(request.request_id)

    def on_departures(self, requests: Any, now: float) -> None:
        for one in requests:
            self.holding.remove(one.request_id)


@pytest.mark.parametrize("fast_forward", [False, True])
def test_who_ran_is_computed_again_and_nobody_was_preempted_or_lost(fast_forward: bool) -> None:
    policy, events = Balanced(), Events()
    harness = Harness(policy, InTurn(), PlainChunks(64), OPTIONS)
    harness.controller.watch((events,))
    shared = PromptContent((("prompt", 32),))
    arrivals = {"a": 0.0, "b": 0.0, "hit": 0.5, "miss": 0.7}
    specs = [RequestSpec(name, at, 32, 40, content=shared) for name, at in arrivals.items()]
    simulator = harness.simulator(SimulationOptions(fast_forward=fast_forward, check_every_steps=1))
    for at in map(to_ticks, (0.2, 0.65, 0.95)):
        simulator.inject(at, Phase.FAILURE, CacheReset(at, harness.replicaset.name, 0))
    simulator.run(specs)
    assert events.told == [
        ("cache reset", 0, ["b", "a"], 0.2),
        ("cache reset", 0, ["hit"], 0.65),
        ("cache reset", 0, ["miss"], 0.95),
    ]
    assert {one.num_preemptions for one in events.requests.values()} == {0}
    assert {one.num_output_tokens for one in events.requests.values()} == {40}
    assert {name: one.num_cached_tokens for name, one in events.requests.items()} == CACHED
    assert policy.holding == []


def test_memory_is_not_emptied_under_a_step() -> None:
    harness = Harness(ByArrival(), InTurn(), PlainChunks(64), OPTIONS)
    simulator = harness.simulator(SimulationOptions())
    at = to_ticks(0.205)
    simulator.inject(at, Phase.FAILURE, CacheReset(at, harness.replicaset.name, 0))
    with pytest.raises(RuntimeError, match="a step of replica 0 is in flight"):
        simulator.run([RequestSpec("a", 0.0, 32, 40)])
