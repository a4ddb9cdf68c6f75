"""The driver with a backend of another shape: asked for a plan, told of its output, as a model server's engine core does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vajra_py.contract.observer import EndReason
from vajra_py.errors import PolicyError
from vajra_py.latency import AffineModel
from vajra_py.runtime.queues import make_queue
from vajra_py.runtime.records.input_log import Abandonment, Abort, Expiry, Failure, Input, PolicyViolation, Restart
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.backend import Backend, BackendReplica
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.serving.driver import Driver, DriverOptions
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.serving.workload_adapter import facts_of, hashes_of
from vajra_py.runtime.step.plan import StepPlan, StepResult
from vajra_py.runtime.support.clock import NEVER, to_ticks
from vajra_py.testing import Harness, HarnessOptions
from vajra_py.testing.reference_policies import PlainChunks
from vajra_py.workload import RequestSpec

LATENCY = AffineModel(base_s=0.004, per_token_s=0.0002, per_decode_context_token_s=1e-6)
OPTIONS = HarnessOptions(block_size=4, num_blocks=30, max_batch_size=6, latency=LATENCY, max_model_len=100)
POLICIES = ("fcfs", "pull", ("fixed_chunk", {"chunk_size": 16}))


class EngineCore(Backend[BackendReplica]):
    """One replica, driven from outside: `add_request`, `schedule`, `update_from_output`. All that a backend has to write."""

    def __init__(self, controller: Controller, outputs: dict[str, int], *, isolates_policies: bool = False) -> None:
        self.noted: list[Input] = []
        self.ended: list[tuple[str, EndReason]] = []
        self.isolated: list[str] = []
        self._outputs = outputs
        self._scheduled: StepPlan | None = None
        self._replica = BackendReplica(controller.replicas()[0])
        options = DriverOptions(check_every_steps=1, isolates_policies=isolates_policies)
        self.driver = Driver(controller, self, [self._replica], options, self.noted.append)

    # The outer system's side

    def add_request(self, spec: RequestSpec, now: int) -> None:
        self.driver.events.push(now, Phase.ARRIVAL, spec)

    def schedule(self, now: int) -> StepPlan | None:
        self.driver.run_until(now)
        plan, self._scheduled = self._scheduled, None
        return plan

    def update_from_output(self, plan: StepPlan, tokens: Sequence[tuple[Request, int]], now: int) -> None:
        stopped = frozenset(one for one, _ in tokens if one.num_output_tokens + 1 == self._outputs[one.request_id])
        self.driver.events.push(now, Phase.STEP_END, (self._replica, (plan, StepResult(tokens, stopped)), self.epoch))

    # The driver's side

    @property
    def epoch(self) -> int:
        return self._replica.epoch

    def launch(self, replica: BackendReplica, plan: StepPlan) -> int:
        self._scheduled = plan
        return NEVER

    def cancel(self, replica: BackendReplica) -> int:
        self._scheduled = None
        return self.driver.now

    def on_step_end(self, replica: BackendReplica, payload: tuple[StepPlan, StepResult]) -> None:
        self.driver.complete(replica, *payload)

    def on_arrival(self, payload: RequestSpec) -> None:
        self.driver.submit(facts_of(payload), lambda size: hashes_of(payload, size, ""), payload, payload.arrived_at)

    def on_policy_change(self, payload: Any) -> None:
        self.driver.swap_policy(payload)

    def on_submitted(self, request: Request, payload: Any) -> None: ...

    def on_placed(self, request: Request, replicas: Sequence[BackendReplica]) -> None: ...

    def on_requests_ended(self, ended: Sequence[tuple[Request, EndReason]]) -> None:
        self.ended += [(request.request_id, reason) for request, reason in ended]

    def on_isolated(self, replicaset: str, error: PolicyError) -> None:
        self.isolated.append(replicaset)


WORKLOAD = [RequestSpec(f"r{i}", 0.003 * i, 3 + 7 * (i % 5), 1 + 4 * (i % 4)) for i in range(40)]


def due(plan: StepPlan) -> list[tuple[Request, int]]:
    """A token for every entry that reaches its last known token."""
    entries = plan.entries()
    return [(one, 7) for one, count, before, _ in entries if before + count == one.num_known_tokens]


def serve(core: EngineCore, workload: Sequence[RequestSpec]) -> None:
    """What an engine core's busy loop does, with predicted durations for a device."""
    now, left = 0, list(workload)
    while True:
        while left and to_ticks(left[0].arrived_at) <= now:
            core.add_request(left.pop(0), now)
        plan = core.schedule(now)
        if plan is None and not left:
            return
        if plan is None:
            now = to_ticks(left[0].arrived_at)
            continue
        end = now + to_ticks(LATENCY.stage_time_s(plan.features))
        while left and to_ticks(left[0].arrived_at) < end:
            core.add_request(left[0], to_ticks(left.pop(0).arrived_at))
        core.update_from_output(plan, due(plan), end)
        now = end


def test_a_backend_that_is_asked_and_told_decides_as_the_simulator_does() -> None:
    asked, simulated = Harness(*POLICIES, OPTIONS), Harness(*POLICIES, OPTIONS)
    core = EngineCore(asked.controller, {spec.request_id: spec.num_output_tokens for spec in WORKLOAD})
    serve(core, WORKLOAD)
    steps = simulated.run(WORKLOAD)
    assert asked.steps == steps
    assert len(steps) > 50
    assert sorted(core.ended) == sorted((spec.request_id, EndReason.STOP) for spec in WORKLOAD)


def test_what_reaches_a_run_is_noted_in_the_order_of_phases() -> None:
    """Whatever the order in which it became known: failures, arrivals, expiries, aborts, then the forming of steps."""
    harness = Harness("fcfs", "round_robin", "fixed_chunk", OPTIONS)
    core = EngineCore(harness.controller, {})
    events = core.driver.events
    core.add_request(RequestSpec("a", 0.0, 4, 50), 0)
    core.add_request(RequestSpec("b", 0.0, 4, 50), 0)
    assert core.schedule(0) is not None
    core.add_request(RequestSpec("c", 0.0, 4, 50, expires_after_s=1.0), 1)
    later = to_ticks(1.0)
    events.push(later, Phase.ABORT, "nobody")
    events.push(later, Phase.ABORT, "d")
    core.add_request(RequestSpec("d", 1.0, 4, 50), later)
    core.schedule(later)
    events.push(later + 1, Phase.ABORT, "b")
    events.push(later + 1, Phase.FAILURE, Failure(later + 1, "harness", 0, "broke", 1))
    assert core.schedule(later + 1) is None, "the only replica is lost"
    events.push(later + 2, Phase.FAILURE, Restart(later + 2, "harness", 0))
    plan = core.schedule(later + 2)
    assert plan is not None
    assert [chunk.request.request_id for chunk in plan.chunks] == ["a"]
    assert [(type(entry), entry.tick) for entry in core.noted] == [
        (Expiry, later),
        (Abort, later),
        (Failure, later + 1),
        (Abort, later + 1),
        (Restart, later + 2),
    ]
    assert core.ended == [("c", EndReason.EXPIRED), ("d", EndReason.ABORTED), ("b", EndReason.ABORTED)]


def test_what_a_lost_replica_executed_is_void() -> None:
    harness = Harness("fcfs", "round_robin", "fixed_chunk", OPTIONS)
    core = EngineCore(harness.controller, {"a": 50})
    core.add_request(RequestSpec("a", 0.0, 4, 50), 0)
    plan = core.schedule(0)
    assert plan is not None
    core.update_from_output(plan, due(plan), 10)
    core.driver.events.push(9, Phase.FAILURE, Failure(9, "harness", 0, "broke"))
    assert core.schedule(20) is None
    assert core.ended == [("a", EndReason.FAILED)]
    assert core.driver.next_due() == NEVER


def test_the_next_due_time_is_that_of_the_earliest_event() -> None:
    core = EngineCore(Harness("fcfs", "round_robin", "fixed_chunk", OPTIONS).controller, {"a": 2, "b": 2})
    assert core.driver.next_due() == NEVER
    for name, at in (("b", 9), ("a", 5)):
        core.add_request(RequestSpec(name, at / 10**12, 4, 2), at)
    assert core.driver.next_due() == 5
    core.schedule(5)
    assert core.driver.next_due() == 9


def test_who_waits_for_a_replica_that_is_given_up_ends() -> None:
    harness = Harness("fcfs", "pull", "fixed_chunk", OPTIONS)
    core = EngineCore(harness.controller, {"a": 50})
    core.add_request(RequestSpec("a", 0.0, 4, 50), 0)
    assert core.schedule(0) is not None
    core.driver.events.push(9, Phase.FAILURE, Failure(9, "harness", 0, "broke", 1))
    core.schedule(9)
    assert core.ended == [], "it waits to be computed again"
    core.driver.events.push(11, Phase.FAILURE, Abandonment(11, "harness", "waited long enough"))
    core.schedule(11)
    assert core.ended == [("a", EndReason.FAILED)]


class Forgetful(PlainChunks):
    """Raises when told that a certain request has left."""

    def on_departures(self, requests: Any, now: float) -> None:
        if requests[0].request_id == "a":
            raise LookupError("who?")


def test_who_ended_is_told_also_when_a_policy_raises_over_it() -> None:
    """Once each, the request that ended with the step and the one that its replicaset no longer serves."""
    harness = Harness("fcfs", "round_robin", lambda context: Forgetful(), OPTIONS)
    core = EngineCore(harness.controller, {"a": 1, "b": 9}, isolates_policies=True)
    harness.replicaset.policies = _Policies(harness)  # type: ignore[assignment]
    for name in ("a", "b"):
        core.add_request(RequestSpec(name, 0.0, 4, 50), 0)
    plan = core.schedule(0)
    assert plan is not None
    core.update_from_output(plan, due(plan), 10)
    core.schedule(10)
    assert core.ended == [("a", EndReason.STOP), ("b", EndReason.FAILED)]
    assert [type(entry) for entry in core.noted] == [PolicyViolation]
    assert core.isolated == ["harness"]


class _Policies:
    """As much of a replicaset's policies as being taken out of service needs."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness

    def new_queue(self) -> Any:
        return make_queue(self._harness.prioritizer)
