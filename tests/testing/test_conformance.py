"""The suite passes every installed policy, and names what each broken one breaks."""

from __future__ import annotations

import datetime
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vajra_py.contract import (
    FallenRequests,
    KeyMotion,
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    SchedulerTraits,
    SteadyState,
    fill,
)
from vajra_py.testing import check_policy, conformance_checks, policies_under_test
from vajra_py.testing.reference_policies import ByArrival, BySlack, InTurn, PlainChunks, Shared

PRIORITIZER, CHOOSER, SCHEDULER = Layer.REQUEST_PRIORITIZER, Layer.REPLICASET_SCHEDULER, Layer.REPLICA_SCHEDULER


class NoParameters(PolicyConfig):
    """Nothing."""


class OneParameter(PolicyConfig):
    """A number without a default."""

    size: int


def spec_of(
    layer: Layer, build: Callable[[PolicyContext], Any], config: type[PolicyConfig] = NoParameters
) -> PolicySpec:
    return PolicySpec("specimen", layer, config, lambda params, context: build(context), "A policy under test.")


SERVES = "serves everybody: far more requests than fit into a batch"
MOVES = "keys move as declared"
READS = "reads what the contract offers"
DOWN = "leaves alone who is down"
FORWARD = "decides the same with decode fast-forward"
WORKS = "works while there is work, where it says so"


def failure_of(spec: PolicySpec, check: str | None = None, params: dict[str, Any] | None = None) -> str:
    """What the whole suite, or one check of it, has to say about a policy that is not as it should be."""
    run: Callable[..., None] = check_policy
    if check is not None:
        (run,) = [one for one in conformance_checks(spec.layer) if one.name == check]
    with pytest.raises(AssertionError) as caught:
        run(spec, params)
    message = str(caught.value)
    assert message.startswith(f"{spec.layer.value} 'specimen' breaks the contract:")
    return message


@pytest.mark.usefixtures("hash_seeds_at_once")
@pytest.mark.parametrize("spec", policies_under_test(), ids=lambda spec: f"{spec.layer.value}-{spec.name}")
def test_installed_policies_keep_the_contract(spec: PolicySpec) -> None:
    check_policy(spec)


@pytest.mark.parametrize(
    ("layer", "build"),
    [
        (PRIORITIZER, lambda context: BySlack(context.prefill_time)),
        (CHOOSER, lambda context: Shared()),
        (SCHEDULER, lambda context: PlainChunks()),
    ],
)
def test_the_partners_keep_it_too(layer: Layer, build: Callable[[PolicyContext], Any]) -> None:
    check_policy(spec_of(layer, build))


def test_checks_can_be_run_one_by_one() -> None:
    checks = conformance_checks(SCHEDULER)
    assert len({check.name for check in checks}) == len(checks)
    (lone,) = [check for check in checks if check.name == "chunks lone prompts as it says"]
    lone(spec_of(SCHEDULER, lambda context: PlainChunks(100)))
    with pytest.raises(AssertionError, match="solo_chunk_size"):
        lone(spec_of(SCHEDULER, lambda context: Boastful()))


def test_parameters_are_needed_where_there_is_no_default() -> None:
    spec = PolicySpec("specimen", SCHEDULER, OneParameter, lambda params, _: PlainChunks(params.size), "Chunks.")
    assert "cannot be built from its default parameters" in failure_of(spec)
    check_policy(spec, {"size": 96})
    assert "cannot be built from {'size': 'many'}" in failure_of(spec, params={"size": "many"})


# Broken prioritizers


class Drifting(ByArrival):
    def key(self, request: Any, now: float) -> float:
        return float(request.arrived_at + now)


class Shortening(ByArrival):
    def key(self, request: Any, now: float) -> float:
        return float(request.num_remaining_tokens)


class Restless(ByArrival):
    key_motion = KeyMotion.PROGRESS

    def key(self, request: Any, now: float) -> float:
        return float(int(now * 10) - request.num_computed_tokens)


class Crooked(BySlack):
    def key(self, request: Any, now: float) -> float:
        return float(super().key(request, now) + 1e-3 * now * now)


class Counting(ByArrival):
    key_motion = KeyMotion.ARBITRARY

    def __init__(self) -> None:
        self.count = 0

    def key(self, request: Any, now: float) -> float:
        self.count += 1
        return float(self.count)


class Infinite(ByArrival):
    def key(self, request: Any, now: float) -> float:
        return float("inf") if request.num_prompt_tokens > 50 else 0.0


class Shapeless(ByArrival):
    def key(self, request: Any, now: float) -> Any:
        return (0.0, 1.0) if request.index % 3 else (0.0,)


class Peeking(ByArrival):
    def key(self, request: Any, now: float) -> float:
        return float(request._output or len(request.token_log))


class Probing(ByArrival):
    def key(self, request: Any, now: float) -> float:
        return float(request.arrived_at if getattr(request, "hashes", None) is None else 0.0)


class Writing(ByArrival):
    def key(self, request: Any, now: float) -> float:
        request.priority = 3
        return float(request.arrived_at)


class Returning(ByArrival):
    """Tenants whose keys fall again, and nobody is told."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}

    def group(self, request: Any) -> str:
        return str(request.tenant)

    def group_key(self, group: str) -> float:
        return float(self._served.get(group, 0) % 3)

    def on_admission(self, request: Any, replica_id: int, now: float) -> None:
        self._served[request.tenant] = self._served.get(request.tenant, 0) + 1


class Sinking(ByArrival):
    """Keys that fall with time and with what others do, and nobody is told."""

    key_motion = KeyMotion.NAMED_FALLS

    def __init__(self) -> None:
        self.fallen_requests = FallenRequests()
        self._num_admitted = 0

    def key(self, request: Any, now: float) -> float:
        return float(request.arrived_at - self._num_admitted)

    def on_admission(self, request: Any, replica_id: int, now: float) -> None:
        self._num_admitted += 1


class Aging(Sinking):
    def key(self, request: Any, now: float) -> float:
        return float(request.arrived_at - int(now * 10))


class Frozen(Aging):
    """Keys that move with time, and a count of changes that does not."""

    key_motion = KeyMotion.ARBITRARY

    def __init__(self) -> None:
        self._num_admitted = 0

    def key_epoch(self) -> int:
        return 0


class AgingHits(Aging):
    """Keys that are said to move with prefix hits, and move with time."""

    key_motion = KeyMotion.PREFIX_HITS

    def __init__(self) -> None:
        self._num_admitted = 0


class Foretold(Aging):
    """The same, told beforehand."""

    def falls_at(self, request: Any, now: float) -> float | None:
        return now


class Wandering(Returning):
    def group(self, request: Any) -> str:
        return str(request.num_computed_tokens > 0)

    def group_key(self, group: str) -> float:
        return 0.0


class Impatient(Returning):
    def group_key(self, group: str) -> float:
        self._served[group] = self._served.get(group, 0) + 1
        return float(self._served[group])


@pytest.mark.parametrize(
    ("policy", "check", "found"),
    [
        (Returning, MOVES, "and its fall was not named in fallen_groups"),
        (Returning, SERVES, "has decreased without being reported"),
        (Sinking, MOVES, "which was neither named nor given by falls_at"),
        (Sinking, SERVES, "has decreased without being reported"),
        (Frozen, MOVES, "and key_epoch() did not"),
        (
            AgingHits,
            MOVES,
            "is PREFIX_HITS and moved with the same hits and progress, although falls_at gave no earlier time",
        ),
        (Aging, MOVES, "which was neither named nor given by falls_at"),
        (Wandering, MOVES, "a request stays in its group"),
        (Impatient, MOVES, "and asked again"),
        (Drifting, MOVES, "is STATIC and moved since arrival"),
        (Shortening, MOVES, "is STATIC and moved since arrival"),
        (Restless, MOVES, "is PROGRESS and moved without progress"),
        (Counting, MOVES, "and asked again"),
        (Infinite, SERVES, "not finite"),
        (Infinite, MOVES, "not finite"),
        (Shapeless, SERVES, "changed its shape"),
        (Shapeless, MOVES, "keys have several shapes"),
        (Peeking, READS, "reads request._output"),
        (Probing, READS, "reads request.hashes"),
        (Writing, READS, "writes request.priority"),
    ],
)
def test_broken_prioritizers(policy: type[Any], check: str, found: str) -> None:
    assert found in failure_of(spec_of(PRIORITIZER, lambda context: policy()), check)


def test_falls_that_were_told_beforehand_are_none_to_complain_of() -> None:
    (moves,) = [one for one in conformance_checks(PRIORITIZER) if one.name == MOVES]
    moves(spec_of(PRIORITIZER, lambda context: Foretold()), None)


def test_a_line_that_the_key_does_not_follow() -> None:
    failure = failure_of(spec_of(PRIORITIZER, lambda context: Crooked(context.prefill_time)), MOVES)
    assert "its line says" in failure


class Lineless(ByArrival):
    key_motion = KeyMotion.TIME_LINEAR


def test_a_line_that_is_not_there() -> None:
    failure = failure_of(spec_of(PRIORITIZER, lambda context: Lineless()))
    assert "is built from its parameters" in failure
    assert "line" in failure
    assert "serves" not in failure, "nothing else can be checked"


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: time.monotonic(), "time.monotonic"),
        (lambda: random.random(), "random.random"),
        (lambda: random.randint(1, 6), "random.randint"),
        (lambda: np.random.random(), "numpy.random.random"),  # noqa: NPY002  # it is what must be caught
        (lambda: np.random.default_rng().random(), "numpy.random.default_rng"),
        (lambda: datetime.datetime.now().timestamp(), "datetime.datetime.now"),
    ],
)
def test_clocks_and_global_generators(call: Callable[[], Any], name: str) -> None:
    class Impure(ByArrival):
        def key(self, request: Any, now: float) -> float:
            call()
            return float(request.arrived_at)

    assert f"calls {name}" in failure_of(spec_of(PRIORITIZER, lambda context: Impure()), "is pure")


monotonic_by_name = time.monotonic
"""Imported by name, as plug-ins may do."""


def test_a_clock_that_was_imported_by_name() -> None:
    class Impure(ByArrival):
        def key(self, request: Any, now: float) -> float:
            return float(request.arrived_at + 0.0 * monotonic_by_name())

    clock = time.monotonic
    assert "calls time.monotonic" in failure_of(spec_of(PRIORITIZER, lambda context: Impure()), "is pure")
    assert time.monotonic is clock is monotonic_by_name, "everything is put back"


# Broken replicaset schedulers


class Stubborn(InTurn):
    def assign(self, request: Any, replicas: Any, now: float) -> int:
        return 0 if request.index % 2 else 1


class Blind(InTurn):
    def assign(self, request: Any, replicas: Any, now: float) -> int:
        return min(replicas, key=lambda one: (one.num_context_tokens, one.replica_id)).replica_id


class Withholding(Shared):
    def pull(self, replica: Any, queued: Any, now: float) -> Any:
        return ()


class Inventing(Shared):
    def pull(self, replica: Any, queued: Any, now: float) -> Any:
        return ["nobody"]


class Lazy(InTurn):
    traits = SchedulerTraits(is_work_conserving=True)

    def assign(self, request: Any, replicas: Any, now: float) -> int:
        return 0 if replicas[0].is_up else 1


@pytest.mark.parametrize(
    ("policy", "check", "found"),
    [
        (Stubborn, DOWN, "assigned a request to replica 1. Replicas that are up: [0]"),
        (Blind, READS, "reads replica view.num_context_tokens"),
        (Blind, FORWARD, "traits.reads_load = False is not true"),
        (Withholding, SERVES, "offers no replica anything"),
        (Inventing, SERVES, "not in the shared queue"),
        (Lazy, WORKS, "traits.is_work_conserving is not true: replica 1 is idle"),
    ],
)
def test_broken_replicaset_schedulers(policy: type[Any], check: str, found: str) -> None:
    assert found in failure_of(spec_of(CHOOSER, lambda context: policy()), check)


# Broken replica schedulers


class Idle(PlainChunks):
    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        return


class Overeager(PlainChunks):
    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        for request in [*replica.running(), *replica.waiting()]:
            batch.add(request, request.num_remaining_tokens + 1)


class Thrashing(PlainChunks):
    """Every step takes the memory of whoever is running and gives it to the next."""

    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        victims = list(replica.running())
        for request in victims:
            batch.preempt(request)
        for request in replica.waiting():
            if request not in victims and batch.add(request, min(8, batch.max_chunk(request))) is None:
                return


class Fickle(PlainChunks):
    """Says that decodes repeat, and leaves every other one out."""

    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        if now % 0.02 < 0.01 or not replica.num_decodes:
            fill(replica, batch, self._next_chunk)
        else:
            batch.add(replica.decodes()[0], 1)


class Boastful(PlainChunks):
    def solo_chunk_size(self, num_done_tokens: int, num_remaining_tokens: int) -> int:
        return num_remaining_tokens


class Hesitant(PlainChunks):
    """Says that it never rests, and lets each of the first requests wait for company."""

    traits = SchedulerTraits(is_work_conserving=True)

    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        if replica.num_running or replica.num_waiting > 1 or next(replica.waiting()).index > 6:
            fill(replica, batch, self._next_chunk)


class Remembering(PlainChunks):
    """What it does depends on how many steps of all its runs went before."""

    count = 0

    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        Remembering.count += 1
        self._num_tokens = 16 + Remembering.count % 7
        fill(replica, batch, self._next_chunk)


class Slackening(PlainChunks):
    """Needs slack, and does not declare it."""

    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        assert all(replica.slack_s(request) < 1e9 for request in replica.waiting())
        fill(replica, batch, self._next_chunk)


class Prying(PlainChunks):
    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        if replica._running_set.num_running >= 0:
            fill(replica, batch, self._next_chunk)


@pytest.mark.parametrize(
    ("policy", "check", "found"),
    [
        (Idle, SERVES, "scheduled nothing although"),
        (Overeager, SERVES, "Its next chunk may have at most"),
        (Thrashing, SERVES, "without a token for any request"),
        (Fickle, FORWARD, "traits.repeats_decodes is not true"),
        (Boastful, "chunks lone prompts as it says", "but the prompt alone got 128 tokens"),
        (Hesitant, WORKS, "traits.is_work_conserving is not true: replica 0 is idle"),
        (Remembering, "decides the same again", "differs when the run is repeated with the same seed"),
        (Prying, READS, "reads replica._running_set"),
        (Slackening, "declares that it needs slack", "traits.needs_slack is False, and it fails if the prioritizer"),
    ],
)
def test_broken_replica_schedulers(policy: type[Any], check: str, found: str) -> None:
    assert found in failure_of(spec_of(SCHEDULER, lambda context: policy()), check)


def test_claims_that_are_true_pass() -> None:
    class Busy(PlainChunks):
        traits = SchedulerTraits(repeats_decodes=frozenset({SteadyState.NOTHING_WAITS}), is_work_conserving=True)

    class BusyPull(Shared):
        traits = SchedulerTraits(is_work_conserving=True)

    for spec in (spec_of(SCHEDULER, lambda context: Busy()), spec_of(CHOOSER, lambda context: BusyPull())):
        for check in conformance_checks(spec.layer):
            if check.name in (WORKS, FORWARD):
                check(spec)


def test_a_policy_may_refuse_replicas_that_it_cannot_serve() -> None:
    def build(context: PolicyContext) -> PlainChunks:
        if context.limits.kv_parallel_groups > 1:
            raise ValueError("no KV parallelism")
        return PlainChunks()

    check_policy(spec_of(SCHEDULER, build))


def test_importing_the_facade_is_cheap() -> None:
    code = "import sys, vajra_py.testing as t; assert 'numpy' not in sys.modules; t.check_policy; assert 'numpy' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
