"""Faults that no single decision shows: hash seeds, methods that nobody calls, leaks, futile preemptions, keys that move unseen."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any

import numpy as np
import pytest

from vajra_py.contract import EndReason, FallenRequests, KeyMotion, Layer, PolicyConfig, PolicyContext, PolicySpec
from vajra_py.sim.simulator import SimulationOptions
from vajra_py.testing import ConformanceWarning, Harness, HarnessOptions, check_policy, conformance_checks
from vajra_py.testing.hash_seeds import HASH_SEEDS
from vajra_py.testing.reference_policies import ByArrival, InTurn, PlainChunks
from vajra_py.workload import RequestSpec

PRIORITIZER, ROUTER, SCHEDULER = Layer.REQUEST_PRIORITIZER, Layer.REPLICASET_SCHEDULER, Layer.REPLICA_SCHEDULER


class NoParameters(PolicyConfig):
    """Nothing."""


def spec_of(layer: Layer, build: Callable[[PolicyContext], Any]) -> PolicySpec:
    return PolicySpec("specimen", layer, NoParameters, lambda params, context: build(context), "A policy under test.")


def run_check(name: str, layer: Layer, build: Callable[[PolicyContext], Any]) -> None:
    (check,) = [one for one in conformance_checks(layer) if one.name == name]
    check(spec_of(layer, build))


class FirstOfASet(InTurn):
    """Takes the first replica of a set of names, whose order changes from process to process."""

    def assign(self, request: Any, replicas: Any, now: float) -> int | None:
        names = {f"replica-{one.replica_id}" for one in replicas if one.is_up}
        return int(next(iter(names)).removeprefix("replica-")) if names else None


class RanksByASet(ByArrival):
    """Ranks tenants by the order of a set of their names."""

    def key(self, request: Any, now: float) -> float:
        return float(list({"tenant0", "tenant1", "tenant2"}).index(request.tenant))


class Sorted(FirstOfASet):
    def assign(self, request: Any, replicas: Any, now: float) -> int | None:
        names = {f"replica-{one.replica_id}" for one in replicas if one.is_up}
        return int(min(names).removeprefix("replica-")) if names else None


@pytest.mark.parametrize("form", ["replica-{}", "tenant{}", "program{}", "{}"])
@pytest.mark.parametrize("size", range(2, 6))
def test_the_hash_seeds_begin_small_sets_of_names_with_different_members(form: str, size: int) -> None:
    names = [form.format(number) for number in range(size)]
    command = [sys.executable, "-c", "import sys; print(next(iter(set(sys.argv[1:]))))", *names]
    environments = [{**os.environ, "PYTHONHASHSEED": str(seed)} for seed in HASH_SEEDS]
    firsts = {subprocess.run(command, env=one, capture_output=True, check=True).stdout for one in environments}
    assert len(firsts) == len(HASH_SEEDS)


@pytest.mark.parametrize(("layer", "build"), [(ROUTER, FirstOfASet), (PRIORITIZER, RanksByASet)])
def test_the_order_of_a_set_of_strings_is_found(layer: Layer, build: Callable[[], Any]) -> None:
    with pytest.raises(AssertionError, match=r"decides otherwise in another process.*sort them, or use a dict"):
        run_check("decides the same in every process", layer, lambda context: build())


def test_a_sorted_set_is_fine() -> None:
    run_check("decides the same in every process", ROUTER, lambda context: Sorted())


def test_a_policy_that_cannot_be_sent_to_another_process_is_named() -> None:
    lock = Lock()
    with pytest.warns(ConformanceWarning, match="not tried under other hash seeds"):
        run_check("decides the same in every process", ROUTER, lambda context: (lock, InTurn())[1])


class MisspeltListener(ByArrival):
    def on_stepp_end(self, step: Any) -> None:
        """Never called."""


class WithHelpers(ByArrival):
    def key(self, request: Any, now: float) -> float:
        return self.arrival_of(request) + float(self.nothing())

    def arrival_of(self, request: Any) -> float:
        return float(request.arrived_at)

    def nothing(self) -> float:
        return 0.0


def test_a_public_method_that_nobody_calls_is_found() -> None:
    with pytest.raises(AssertionError, match=r"neither the mechanism nor its package calls: \['on_stepp_end'\]"):
        run_check("has no method that nobody calls", PRIORITIZER, lambda context: MisspeltListener())
    run_check("has no method that nobody calls", PRIORITIZER, lambda context: WithHelpers())


class Remembers(ByArrival):
    """Keeps every request by its name, and forgets those that are finished where it is told to."""

    def __init__(self, *, forgets: bool) -> None:
        self._seen: dict[str, float] = {}
        self._forgets = forgets

    def on_arrivals(self, requests: Sequence[Any], now: float) -> None:
        self._seen.update({one.request_id: now for one in requests})

    def on_departures(self, requests: Sequence[Any], now: float) -> None:
        for one in requests if self._forgets else ():
            del self._seen[one.request_id]


class RemembersOnTheClass(ByArrival):
    seen: list[Any] = []  # noqa: RUF012 - the fault

    def on_arrivals(self, requests: Sequence[Any], now: float) -> None:
        self.seen.extend(requests)


class RemembersInAClosure(ByArrival):
    def __init__(self) -> None:
        seen: set[Any] = set()
        self._note = lambda requests: seen.update(requests)

    def on_departures(self, requests: Sequence[Any], now: float) -> None:
        self._note(requests)


@pytest.mark.parametrize("build", [lambda: Remembers(forgets=False), RemembersOnTheClass, RemembersInAClosure])
def test_ended_requests_that_are_kept_are_found(build: Callable[[], Any]) -> None:
    with pytest.raises(AssertionError, match=r"still holds .* requests, all of which have ended"):
        run_check("forgets requests that have ended", PRIORITIZER, lambda context: build())


def test_what_is_forgotten_is_no_leak() -> None:
    run_check("forgets requests that have ended", PRIORITIZER, lambda context: Remembers(forgets=True))


class PreemptsForNothing(PlainChunks):
    """Preempts the request admitted last in every step, and takes it in again."""

    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        running = replica.running()
        if len(running) > 1:
            batch.preempt(running[-1])
        super().schedule(replica, batch, now)


def test_preemptions_for_nothing_are_named() -> None:
    with pytest.warns(ConformanceWarning, match="preemptions gained nothing"):
        run_check("preempts for somebody", SCHEDULER, lambda context: PreemptsForNothing())


class Shares(ByArrival):
    """Fair queueing by admissions: a tenant's counter moves while a step is formed."""

    def __init__(self, motion: KeyMotion) -> None:
        self.key_motion = motion
        self._served: dict[str, int] = {}

    def key(self, request: Any, now: float) -> float:
        return float(self._served.get(request.tenant, 0))

    def on_admission(self, request: Any, replica_id: int, now: float) -> None:
        self._served[request.tenant] = self._served.get(request.tenant, 0) + request.num_prompt_tokens


def test_keys_that_move_while_a_step_is_formed_are_named_where_they_are_read_once() -> None:
    with pytest.warns(ConformanceWarning, match="VOLATILE would order otherwise"):
        run_check("declares how keys move", PRIORITIZER, lambda context: Shares(KeyMotion.ARBITRARY))
    run_check("declares how keys move", PRIORITIZER, lambda context: Shares(KeyMotion.VOLATILE))


@pytest.mark.parametrize("draw", [np.random.default_rng, random.random])
def test_randomness_while_a_policy_is_built_is_a_failure_that_names_it(draw: Callable[[], Any]) -> None:
    class DrawsAtStart(ByArrival):
        def __init__(self) -> None:
            draw_with(self)

    def draw_with(policy: Any) -> None:
        policy.drawn = {"default_rng": np.random.default_rng, "random": random.random}[draw.__name__]()

    with pytest.raises(AssertionError, match=r"request_prioritizer 'specimen' breaks the contract:\n  is pure: calls "):
        run_check("is pure", PRIORITIZER, lambda context: DrawsAtStart())


def test_a_policy_that_cannot_be_built_a_second_time_is_a_failure_that_names_it() -> None:
    built: list[int] = []

    def build(context: PolicyContext) -> Any:
        built.append(1)
        return ByArrival() if len(built) == 1 else built[99]

    with pytest.raises(AssertionError, match=r"request_prioritizer 'specimen' breaks the contract:(\n.*)*IndexError"):
        check_policy(spec_of(PRIORITIZER, build))


class FollowsCaches(InTurn):
    """Takes the replica that has stored the fewest blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.num_stored: Counter[int] = Counter()

    def on_blocks_stored(self, replica_id: int, hashes: Sequence[Any], now: float) -> None:
        self.num_stored[replica_id] += len(hashes)

    def assign(self, request: Any, replicas: Any, now: float) -> int | None:
        return min((one.replica_id for one in replicas if one.is_up), key=self.num_stored.__getitem__, default=None)


def test_a_policy_that_listens_to_caches_gets_their_events_behind_strict_views() -> None:
    run_check("reads what the contract offers", ROUTER, lambda context: FollowsCaches())


class PeeksForFalls(ByArrival):
    key_motion = KeyMotion.NAMED_FALLS

    def __init__(self) -> None:
        self.fallen_requests = FallenRequests()

    def falls_at(self, request: Any, now: float) -> float | None:
        return None if request.spec else now


def test_falls_at_gets_strict_views() -> None:
    with pytest.raises(AssertionError, match=r"reads request\.spec, which policies must not read"):
        run_check("reads what the contract offers", PRIORITIZER, lambda context: PeeksForFalls())


class Reasons(ByArrival):
    """Notes why requests left."""

    def __init__(self) -> None:
        self.seen: dict[str, EndReason | None] = {}
        self.alive: list[EndReason | None] = []

    def on_arrivals(self, requests: Iterable[Any], now: float) -> None:
        self.alive += [one.end_reason for one in requests]

    def on_departures(self, requests: Iterable[Any], now: float) -> None:
        self.seen.update({one.request_id: one.end_reason for one in requests})


def test_departures_say_why() -> None:
    policy = Reasons()
    harness = Harness(policy, InTurn(), PlainChunks(), HarnessOptions(max_batch_size=1))
    simulator = harness.simulator(SimulationOptions())
    specs = [
        RequestSpec("finished", 0.0, 20, 30),
        RequestSpec("expired", 0.0, 20, 5, expires_after_s=0.01),
        RequestSpec("taken back", 0.0, 20, 5),
        RequestSpec("cut off", 0.0, 20, 50, max_tokens=4),
    ]
    simulator.abort_at(0.02, "taken back")
    simulator.run(specs)
    assert policy.seen == {
        "finished": EndReason.STOP,
        "expired": EndReason.EXPIRED,
        "taken back": EndReason.ABORTED,
        "cut off": EndReason.LENGTH,
    }
    assert policy.alive == [None] * 4
