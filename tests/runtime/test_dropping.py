"""A scheduler ends requests that wait: each is told, counted once, and nothing is left of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vajra_py.contract import KeyMotion, SchedulerTraits, SteadyState
from vajra_py.contract.observer import EndReason, Observer, StepRun
from vajra_py.errors import PolicyError
from vajra_py.runtime.requests.request import RequestState
from vajra_py.sim.simulator import SimulationOptions
from vajra_py.testing import ByArrival, Harness, HarnessOptions, InTurn, PlainChunks, Shared
from vajra_py.workload import RequestSpec

OPTIONS = HarnessOptions(block_size=4, num_blocks=20, max_batch_size=2)


class Impatient(PlainChunks):
    """Drops what has waited for longer than it allows; is told of departures."""

    traits = SchedulerTraits(
        repeats_decodes=frozenset({SteadyState.NOTHING_WAITS})
    )  # time matters while a request waits

    def __init__(self, patience_s: float = 0.05) -> None:
        super().__init__()
        self.departed: list[str] = []
        self._patience_s = patience_s

    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        for request in list(replica.waiting()):
            if now - request.arrived_at > self._patience_s:
                batch.drop(request, f"waited for {now - request.arrived_at:.3f} s")
        super().schedule(replica, batch, now)

    def on_departures(self, requests: Any, now: float) -> None:
        self.departed.extend(request.request_id for request in requests)


@pytest.mark.parametrize("router", [InTurn(), Shared()], ids=lambda one: type(one).__name__)
def test_a_dropped_request_is_rejected_with_the_reason(router: Any) -> None:
    scheduler = Impatient()
    harness = Harness(ByArrival(), router, scheduler, OPTIONS)
    for name in "abc":
        harness.submit(name, 8, 20)
    harness.steps_until_idle()
    dropped = harness.request("c")
    assert dropped.end_reason is EndReason.REJECTED
    assert dropped.detail.startswith("Impatient: waited for 0.0")
    assert scheduler.departed == ["c", "a", "b"]
    assert harness.controller.num_ended == {EndReason.REJECTED: 1, EndReason.STOP: 2}
    assert harness.replica().memory.used_blocks == 0


def test_everything_that_waits_may_be_dropped_and_followers_come_all_the_same() -> None:
    harness = Harness(ByArrival(), Shared(), Impatient(-1.0), replace(OPTIONS, num_replicas=2))
    specs = [RequestSpec("a", 0.0, 8, 2), RequestSpec("b", 0.5, 8, 2, follows="a", think_time_s=1.0)]
    harness.run(specs)
    assert harness.controller.num_ended == {EndReason.REJECTED: 2}
    assert harness.request("b").ended_at == harness.request("a").ended_at + 1.0  # type: ignore[operator]


def test_running_ahead_drops_the_same() -> None:
    def ends(fast_forward: bool) -> list[tuple[str, Any, float]]:
        found, runs = [], []

        class Diary(Observer):
            def on_step_run(self, run: StepRun) -> None:
                runs.append(run)

            def on_ended(self, request: Any, reason: EndReason, detail: str, now: float) -> None:
                found.append((request.request_id, reason, now))

        harness = Harness(ByArrival(), InTurn(), lambda context: Impatient(0.1), replace(OPTIONS, num_replicas=2))
        harness.controller.watch((Diary(),))
        specs = [RequestSpec(f"r{index}", 0.01 * index, 8, 5 + 7 * index % 40) for index in range(30)]
        harness.simulator(SimulationOptions(fast_forward=fast_forward, check_every_steps=1)).run(specs)
        assert bool(runs) == fast_forward
        return found

    assert ends(fast_forward=True) == ends(fast_forward=False)
    assert {reason for _, reason, _ in ends(fast_forward=True)} == {EndReason.STOP, EndReason.REJECTED}


class DropsVictims(PlainChunks):
    """A preempted request that is dropped does not come back."""

    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        super().schedule(replica, batch, now)
        for request in [one for one in replica.waiting() if one.num_preemptions]:
            batch.drop(request, "was preempted")


def test_a_preempted_request_can_be_dropped_at_once() -> None:
    harness = Harness(ByArrival(), InTurn(), DropsVictims(), replace(OPTIONS, num_blocks=8))
    for name in "ab":
        harness.submit(name, 12, 12)
    harness.steps_until_idle()
    assert [harness.request(name).end_reason for name in "ab"] == [EndReason.STOP, EndReason.REJECTED]
    assert harness.request("b").num_output_tokens > 0
    assert harness.replica().memory.used_blocks == 0


@pytest.mark.parametrize(
    ("drop", "said"),
    [
        (lambda replica, batch: batch.drop(replica.running()[0], "late"), "cannot drop what runs"),
        (lambda replica, batch: batch.drop(next(replica.waiting()), ""), r"cannot drop it without a reason \(got ''\)"),
        (
            lambda replica, batch: [batch.drop(one, "late") for one in [next(replica.waiting())] * 2],
            "it is not one of this replica's requests",
        ),
    ],
)
def test_what_cannot_be_dropped_is_a_breach(drop: Any, said: str) -> None:
    class Dropping(PlainChunks):
        def schedule(self, replica: Any, batch: Any, now: float) -> None:
            if replica.num_running:
                drop(replica, batch)
            super().schedule(replica, batch, now)

    harness = Harness(ByArrival(), InTurn(), Dropping(), replace(OPTIONS, max_batch_size=1))
    for name in "ab":
        harness.submit(name, 8, 3)
    harness.step()
    with pytest.raises(PolicyError, match=said):
        harness.step()


# Keys that move while a step is formed


class FewestAdmitted(ByArrival):
    """The tenant that was admitted least often goes first."""

    def __init__(self, motion: KeyMotion) -> None:
        self.key_motion = motion
        self._admitted: dict[str, int] = {}

    def key(self, request: Any, now: float) -> float:
        return self._admitted.get(request.tenant, 0)

    def on_admission(self, request: Any, replica_id: int, now: float) -> None:
        self._admitted[request.tenant] = self._admitted.get(request.tenant, 0) + 1


@pytest.mark.parametrize("router", [InTurn(), Shared()], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(
    ("motion", "admitted"),
    [(KeyMotion.ARBITRARY, ["a0", "a1", "a2", "b0"]), (KeyMotion.VOLATILE, ["a0", "b0", "a1", "b1"])],
)
def test_volatile_keys_are_read_again_within_a_step(router: Any, motion: KeyMotion, admitted: list[str]) -> None:
    harness = Harness(FewestAdmitted(motion), router, PlainChunks(), replace(OPTIONS, max_batch_size=4))
    for name in ("a0", "a1", "a2", "b0", "b1", "b2"):
        harness.submit(name, 4, 1, tenant=name[0])
    step = harness.step()
    assert step is not None
    assert step.admitted == admitted
    assert harness.request("b2").state is RequestState.WAITING
