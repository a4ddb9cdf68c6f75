"""Which replica gets a request, what views of load say, and who is turned away at the door."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vajra_py.contract import KeyMotion, ReplicaState
from vajra_py.contract.observer import EndReason, Observer, StepRun
from vajra_py.errors import PolicyError
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.runtime.requests.request import RequestState
from vajra_py.runtime.serving.eligibility import AdmissionLimits
from vajra_py.runtime.serving.load import LiveLoad, SnapshotLoad
from vajra_py.sim.simulator import SimulationOptions
from vajra_py.testing import ByArrival, Harness, HarnessOptions, InTurn, PlainChunks, Shared
from vajra_py.workload import RequestSpec

OPTIONS = HarnessOptions(block_size=4, num_blocks=20, max_batch_size=4, num_replicas=2, max_model_len=60)


class Chooser:
    """Assigns and offers as the test says."""

    def __init__(self, assign: Callable[..., Any] = lambda *_: None, pull: Callable[..., Any] = lambda *_: ()) -> None:
        self.assign = assign
        self.pull = pull


def harness(chooser: Any, options: HarnessOptions = OPTIONS, prioritizer: Any = None) -> Harness:
    return Harness(prioritizer or ByArrival(), chooser, lambda context: PlainChunks(8), options)


# Early binding


def test_requests_are_bound_where_the_scheduler_says() -> None:
    bench = harness(Chooser(lambda request, replicas, now: len(replicas) - 1 - request.index % 2))
    requests = [bench.submit(f"r{index}", 4) for index in range(4)]
    assert [request.replica_id for request in requests] == [1, 0, 1, 0]
    assert (bench.waiting(0), bench.waiting(1)) == (["r1", "r3"], ["r0", "r2"])


@pytest.mark.parametrize("answer", [2, -1, "0", 0.5, [0]])
def test_a_replica_that_does_not_exist(answer: Any) -> None:
    bench = harness(Chooser(lambda *_: answer))
    with pytest.raises(PolicyError, match=r"request r: assigned a request to replica .*Replicas that are up: \[0, 1\]"):
        bench.submit("r", 4)


def test_a_numpy_integer_is_as_good() -> None:
    bench = harness(Chooser(lambda *_: np.int64(1)))
    assert bench.submit("r", 4).replica_id == 1


def test_a_replica_that_is_down() -> None:
    bench = harness(Chooser(lambda request, replicas, now: min(one.replica_id for one in replicas if one.is_up)))
    bench.replicaset.set_state(0, ReplicaState.DOWN)
    assert bench.submit("a", 4).replica_id == 1
    bench.replicaset.set_state(0, ReplicaState.UP)
    assert bench.submit("b", 4).replica_id == 0
    stubborn = harness(Chooser(lambda *_: 0))
    stubborn.replicaset.set_state(0, ReplicaState.DOWN)
    with pytest.raises(PolicyError, match=r"Replicas that are up: \[1\]"):
        stubborn.submit("r", 4)


def fails(*_: Any) -> Any:
    raise KeyError("load")


def test_an_exception_in_assign_names_policy_and_request() -> None:
    bench = harness(Chooser(fails))
    with pytest.raises(PolicyError) as caught:
        bench.submit("r", 4)
    assert (caught.value.policy, caught.value.request_id) == ("replicaset scheduler", "r")
    assert "KeyError: 'load'" in str(caught.value)


# Late binding


def test_a_replica_takes_what_it_may_in_the_order_of_the_offer() -> None:
    bench = harness(Chooser(pull=lambda replica, queued, now: [one.request_id for one in queued][::-1][:2]))
    for name in "abc":
        bench.submit(name, 4)
    step = bench.step(1)
    assert step is not None
    assert step.admitted == ["c", "b"]
    assert bench.request("c").replica_id == 1
    assert [request.request_id for request in bench.replicaset.shared] == ["a"]


def test_own_and_shared_requests_wait_in_one_order() -> None:
    bench = harness(
        Chooser(
            lambda request, replicas, now: 0 if request.index % 2 else None,
            lambda replica, queued, now: (one.request_id for one in queued),
        )
    )
    for name in "abcd":
        bench.submit(name, 4, 5)
        bench.wait(1.0)
    step = bench.step(0)
    assert step is not None
    assert step.admitted == ["a", "b"], "eight tokens a step"
    assert bench.replica(0).running_set.num_running == 2


@pytest.mark.parametrize(
    ("pull", "message"),
    [
        (
            lambda replica, queued, now: ["nobody"],
            "request nobody, step 0: pulled a request that is not in the shared queue",
        ),
        (lambda replica, queued, now: fails(), "KeyError: 'load'"),
        (lambda replica, queued, now: 7, "pull() returned 7. Allowed: an iterable of request ids"),
        (lambda replica, queued, now: (fails() for _ in range(1)), "KeyError: 'load'"),
    ],
)
def test_bad_offers_are_the_replicaset_schedulers_fault(pull: Any, message: str) -> None:
    bench = harness(Chooser(pull=pull))
    bench.submit("r", 4)
    with pytest.raises(PolicyError) as caught:
        bench.step(0)
    assert caught.value.policy == "replicaset scheduler"
    assert caught.value.step == 0
    assert message in str(caught.value)


def test_a_preempted_request_stays_with_its_replica() -> None:
    bench = harness(Shared(), replace(OPTIONS, num_blocks=7))
    for name in "ab":
        bench.submit(name, 8, 20)
    bench.step(0)
    bench.step(0)
    steps = [bench.step(0) for _ in range(8)]
    victims = [name for step in steps if step is not None for name, _ in step.preempted]
    assert victims == ["b"]
    assert bench.request("b").replica_id == 0
    assert bench.step(1) is None, "the other replica is not offered it"


# Values of load views


def test_live_views() -> None:
    bench = harness(InTurn(), replace(OPTIONS, num_replicas=1, max_batch_size=2))
    for name in "abc":
        bench.submit(name, 12, 9)
    view = LiveLoad(bench.replica())

    def figures() -> tuple[int, ...]:
        return view.num_running, view.num_waiting, view.num_pending_tokens, view.num_context_tokens

    assert figures() == (0, 3, 36, 0)
    bench.step()
    assert figures() == (1, 2, 4 + 24, 8)
    bench.step()
    assert figures() == (2, 1, 8 + 12, 12 + 4), "a is done and decodes; four tokens of b were left in the budget"
    assert (view.free_blocks, view.num_blocks, view.max_batch_size, view.age_s) == (14, 20, 2, 0.0)


def test_prefix_hits_of_another_replica() -> None:
    bench = harness(InTurn(), replace(OPTIONS, prefix_cache=PrefixCacheOptions()))
    tokens = tuple(range(12))
    bench.submit("a", 12, 1, prompt_token_ids=tokens)
    owner = bench.request("a").replica_id
    bench.steps_until_idle(owner)
    b = bench.submit("b", 12, 1, prompt_token_ids=tokens)
    hits = [LiveLoad(bench.replica(one)).prefix_hit_tokens(b) for one in (owner, 1 - owner)]
    assert hits == [8, 0]


def test_snapshots_grow_old() -> None:
    bench = harness(InTurn(), replace(OPTIONS, num_replicas=1))
    live = LiveLoad(bench.replica())
    view = SnapshotLoad.of(live)
    bench.submit("a", 12)
    assert (view.look(0.0, 5.0).num_waiting, view.age_s) == (1, 0.0)
    bench.submit("b", 12)
    live.is_up = False
    # A replica that is down accepts no request.
    assert (view.look(4.0, 5.0).num_waiting, view.age_s, view.is_up) == (1, 4.0, False)
    assert (view.look(5.0, 5.0).num_waiting, view.age_s, view.is_up) == (2, 0.0, False)


# The door


class RefusesWhileBusy(PlainChunks):
    """Takes no more than one request on a replica, and says when it said so."""

    def refuses(self, request: Any, replica: Any, now: float) -> str | None:
        if replica.num_running + replica.num_waiting:
            return f"replica {replica.replica_id} is busy at {now} s"
        return None


def test_a_request_is_refused_when_no_replica_that_is_up_would_run_it() -> None:
    bench = Harness(ByArrival(), InTurn(), lambda context: RefusesWhileBusy(), replace(OPTIONS, num_replicas=2))
    taken = [bench.submit(name, 8, 30) for name in "ab"]
    bench.wait(1.5)
    refused = bench.submit("c", 8)
    assert [one.state for one in taken] == [RequestState.WAITING] * 2
    assert refused.end_reason is EndReason.REJECTED
    assert refused.detail == "RefusesWhileBusy: replica 0 is busy at 1.5 s"
    bench.steps_until_idle(0)
    assert bench.submit("d", 8).end_reason is None  # replica 0 would run it
    bench.steps_until_idle(0)
    bench.replicaset.set_state(0, ReplicaState.DOWN)
    assert bench.submit("e", 8).detail == f"RefusesWhileBusy: replica 1 is busy at {bench.now} s"


def test_a_refusing_policy_reads_loads_as_they_are_also_while_steps_run_ahead() -> None:
    """One request a second, each decoding for longer; a figure of a run's beginning would let in another one."""

    class Crowded(PlainChunks):
        def refuses(self, request: Any, replica: Any, now: float) -> str | None:
            return "crowded" if replica.num_context_tokens > 64 else None

    def ends(fast_forward: bool) -> dict[str, Any]:
        bench = Harness(ByArrival(), InTurn(), lambda context: Crowded(), HarnessOptions(num_blocks=200))
        simulator = bench.simulator(SimulationOptions(fast_forward=fast_forward))
        specs = [RequestSpec(f"r{index}", 0.2 * index, 10, 400) for index in range(12)]
        ended: dict[str, Any] = {}
        runs = []

        class Diary(Observer):
            def on_step_run(self, run: StepRun) -> None:
                runs.append(run)

            def on_ended(self, request: Any, reason: EndReason, detail: str, now: float) -> None:
                ended[request.request_id] = (reason, detail, now)

        bench.controller.watch((Diary(),))
        simulator.run(specs)
        assert bool(runs) == fast_forward
        return ended

    assert ends(fast_forward=True) == ends(fast_forward=False)
    assert {detail for _, detail, _ in ends(fast_forward=True).values()} == {"", "Crowded: crowded"}


@pytest.mark.parametrize(
    ("num_prompt", "num_output", "max_tokens", "detail"),
    [
        (59, 5, None, None),
        (60, 1, None, "leaves no room for output: a request may hold at most 60 tokens here"),
        (30, 10, 40, None),
        (59, 10, 40, None),
        (4, 10, 0, "leaves no room for output"),
    ],
)
def test_what_never_fits_is_refused(
    num_prompt: int, num_output: int, max_tokens: int | None, detail: str | None
) -> None:
    bench = harness(InTurn())
    request = bench.submit("r", num_prompt, num_output, max_tokens=max_tokens)
    if detail is None:
        assert request.state is RequestState.WAITING
        assert request.max_tokens == min(60 - num_prompt, max_tokens or 60)
        bench.steps_until_idle(request.replica_id)
        assert request.num_output_tokens == min(num_output, request.max_tokens)
    else:
        assert (request.state, request.end_reason) == (RequestState.ENDED, EndReason.REJECTED)
        assert detail in request.detail


def test_what_exceeds_memory_is_refused_and_what_fills_it_is_served() -> None:
    bench = harness(InTurn(), replace(OPTIONS, num_blocks=5, max_model_len=1000, watermark_blocks=1))
    assert bench.submit("fits", 15, 6, max_tokens=6).state is RequestState.WAITING
    too_long = bench.submit("too long", 15, 1, max_tokens=7)
    assert "(15 + 7 tokens) can never fit into the KV memory of a replica (5 blocks of 4 tokens)" in too_long.detail
    assert bench.submit("open end", 15, 50).max_tokens == 6, "as many as the memory leaves"
    for replica_id in (0, 1):
        bench.steps_until_idle(replica_id)
    assert bench.request("fits").num_output_tokens == 6
    assert bench.controller.num_alive == 0


def test_queues_have_bounds() -> None:
    bench = harness(Chooser(lambda request, replicas, now: (0, None)[request.index % 2]))
    bench.replicaset.admission = AdmissionLimits(max_queued_requests=3)
    states = [bench.submit(f"r{index}", 4).state for index in range(4)]
    assert states == [RequestState.WAITING] * 3 + [RequestState.ENDED]
    assert bench.request("r3").detail == "the queue is full (3 requests wait, at most 3 may)"
    bench.step(0)
    assert bench.submit("later", 4).state is RequestState.WAITING, "running requests do not count"

    bench = harness(InTurn())
    bench.replicaset.admission = AdmissionLimits(max_queued_tokens=20)
    names = [f"r{size}" for size in (12, 8, 1)]
    states = [bench.submit(name, int(name[1:])).state for name in names]
    assert states == [RequestState.WAITING, RequestState.WAITING, RequestState.ENDED]
    assert bench.request("r1").detail == "the queue is full (20 tokens wait, at most 20 may)"


def test_a_bad_key_names_prioritizer_and_request() -> None:
    class Endless(ByArrival):
        key_motion = KeyMotion.STATIC

        def key(self, request: Any, now: float) -> float:
            return float("nan")

    bench = harness(InTurn(), prioritizer=Endless())
    with pytest.raises(PolicyError, match="policy Endless, request r: key"):
        bench.submit("r", 4)
