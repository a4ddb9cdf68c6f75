"""The gate: requests are accepted, degraded, refused or deferred, and none is lost whatever the policy says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_py.config import config_from_mapping
from vajra_py.contract import (
    ACCEPT,
    Accept,
    AdmissionDecision,
    AdmissionSpec,
    Defer,
    Layer,
    PolicyConfig,
    Refuse,
    ReplicasetView,
    RequestView,
    WakeUps,
)
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.errors import PolicyError
from vajra_py.experiment.runs.backend import Run
from vajra_py.experiment.runs.run import load_workload
from vajra_py.experiment.runs.simulated import SimulatedRun
from vajra_py.plugins import load_registry
from vajra_py.runtime.records.input_log import Failure, PolicyChange, Restart
from vajra_py.runtime.requests.request import RequestState
from vajra_py.runtime.serving import driver as driver_module
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.support.clock import to_ticks
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.sim.simulator import SimulationOptions, Simulator
from vajra_py.testing import Harness, HarnessOptions
from vajra_py.workload.request import RequestSpec

Decide = Callable[[RequestView, Sequence[ReplicasetView], float], AdmissionDecision]


class Scripted:
    """An admission policy that decides by a function, and remembers whom it was asked about and told of."""

    def __init__(self, decide: Decide) -> None:
        self._decide = decide
        self.asked: list[tuple[str, float]] = []
        self.arrived: list[str] = []
        self.left: list[str] = []

    def admit(self, request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        self.asked.append((request.request_id, now))
        return self._decide(request, replicasets, now)

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        self.arrived += [one.request_id for one in requests]

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        self.left += [one.request_id for one in requests]


class Layered:
    """A replicaset scheduler that remembers whom it was told of."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def assign(self, request: RequestView, replicas: Any, now: float) -> int:
        return 0

    def pull(self, replica: Any, queued: Any, now: float) -> tuple[str, ...]:
        return ()

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        self.told += [f"+{one.request_id}" for one in requests]

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        self.told += [f"-{one.request_id}" for one in requests]


def harness(decide: Decide, scheduler: Any = "round_robin", **options: Any) -> Harness:
    return Harness("fcfs", scheduler, "fixed_chunk", HarnessOptions(**options), admission=Scripted(decide))


def specs(*arrivals: float, tokens: int = 40, outputs: int = 10, **facts: Any) -> list[RequestSpec]:
    return [RequestSpec(f"r{index}", at, tokens, outputs, **facts) for index, at in enumerate(arrivals)]


def test_a_policy_that_accepts_everything_changes_nothing() -> None:
    arrivals = np.random.default_rng(2).uniform(0, 1, 30).cumsum() / 10
    without = Harness("lrs", "least_loaded", "fixed_chunk", HarnessOptions(num_replicas=2))
    gated = Harness(
        "lrs", "least_loaded", "fixed_chunk", HarnessOptions(num_replicas=2), admission=Scripted(lambda *_: ACCEPT)
    )
    assert without.run(specs(*arrivals)) == gated.run(specs(*arrivals))
    assert gated.controller.num_ended == without.controller.num_ended


def test_a_degraded_request_gets_less_than_it_asked_for() -> None:
    tried = harness(lambda *_: Accept(max_tokens=3, slo_class="batch"))
    tried.run(specs(0.0, outputs=10))
    request = tried.request("r0")
    assert (request.num_output_tokens, request.end_reason, request.slo_class) == (3, EndReason.LENGTH, "batch")
    assert request.admission is not None
    assert request.admission.degraded == "max_tokens=3, slo_class=batch"


def test_more_tokens_than_asked_for_are_not_given() -> None:
    tried = harness(lambda *_: Accept(max_tokens=10_000))
    tried.run([RequestSpec("r0", 0.0, 40, 10, max_tokens=4)])
    request = tried.request("r0")
    assert request.num_output_tokens == 4
    assert request.admission is not None
    assert (request.admission.outcome, request.admission.degraded) == ("accepted", "")


def test_a_refused_request_says_who_refused_it_and_reaches_no_layer() -> None:
    layered = Layered()
    tried = harness(lambda request, *_: Refuse("no room", 7) if request.index else ACCEPT, layered)
    tried.run(specs(0.0, 0.01))
    refused = tried.request("r1")
    assert refused.end_reason is EndReason.REJECTED
    assert refused.detail == "shed by the admission policy Scripted: no room"
    assert refused.admission is not None
    assert refused.admission.retry_after_s == 7.0
    assert layered.told == ["+r0", "-r0"]
    assert tried.controller.num_ended[EndReason.REJECTED] == 1


def test_what_can_never_run_is_refused_without_asking() -> None:
    tried = harness(lambda *_: ACCEPT, num_blocks=8)
    tried.run(specs(0.0, tokens=4000))
    assert tried.admission.asked == []
    assert "leaves no room for output" in tried.request("r0").detail
    assert tried.request("r0").admission is None


def test_the_bounds_of_queues_come_after_the_policy() -> None:
    tried = harness(lambda *_: ACCEPT, max_batch_size=1)
    tried.replicaset.admission = type(tried.replicaset.admission)(max_queued_requests=1)
    tried.run(specs(0.0, 0.001, 0.002))
    assert [name for name, _ in tried.admission.asked] == ["r0", "r1", "r2"]
    assert tried.request("r2").detail.startswith("the queue is full")


def test_a_deferred_request_is_asked_about_at_its_time_and_no_sooner() -> None:
    def decide(request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        return ACCEPT if now >= 2.0 else Defer(now + 0.75)

    tried = harness(decide)
    tried.run(specs(0.5))
    assert [now for _, now in tried.admission.asked] == [0.5, 1.25, 2.0]
    request = tried.request("r0")
    assert request.admitted_at == 2.0
    assert request.admission is not None
    assert (request.admission.num_deferrals, request.admission.deferred_s) == (2, 1.5)
    assert request.arrived_at == 0.5


def test_a_request_deferred_without_a_time_is_asked_about_when_another_has_ended() -> None:
    def decide(request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        (replicaset,) = replicasets
        busy = replicaset.num_queued + sum(one.num_running for one in replicaset.replicas)
        return Defer() if busy else ACCEPT

    tried = harness(decide)
    tried.run(specs(0.0, 0.001, 0.002))
    ends = [tried.request(name).ended_at for name in ("r0", "r1", "r2")]
    assert [tried.request(name).admitted_at for name in ("r1", "r2")] == ends[:2]


def test_the_most_urgent_by_priority_is_asked_about_first_then_the_first_that_came() -> None:
    open_at: list[float] = []

    def decide(request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        if request.index == 0 or open_at:
            return ACCEPT
        return Defer()

    tried = harness(decide)
    given_specs = [RequestSpec(f"r{i}", 0.001 * i, 40, 3, priority=p) for i, p in enumerate((0, 5, 1, 5, -1))]
    tried.admission._decide = decide
    ended = []

    class Watch(Observer):
        def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
            open_at.append(now)
            ended.append(request.request_id)

    tried.controller.watch((*tried.controller._observers, Watch()))
    tried.run(given_specs)
    assert [name for name, _ in tried.admission.asked[5:]] == ["r4", "r2", "r1", "r3"]


def test_the_policy_is_called_for_the_first_in_line_alone_if_it_holds_the_rest() -> None:
    def decide(request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        (replicaset,) = replicasets
        busy = replicaset.num_queued + sum(one.num_running for one in replicaset.replicas)
        return Defer(holds_rest=True) if busy else ACCEPT

    tried = harness(decide)
    tried.run([RequestSpec(f"r{i}", 0.001 * i, 40, 3, priority=p) for i, p in enumerate((0, 5, 1, 5))])
    assert [name for name, _ in tried.admission.asked[:4]] == ["r0", "r1", "r2", "r3"]
    # An end lets the first in, and the next of the line is held; those behind it are not decided again.
    assert [name for name, _ in tried.admission.asked[4:]] == ["r2", "r1", "r1", "r3", "r3"]
    for name, times in (("r2", 1), ("r1", 2), ("r3", 2)):
        admission = tried.request(name).admission
        assert admission is not None
        assert admission.num_deferrals == times


def test_a_deferred_request_expires_and_is_taken_back_like_a_waiting_one() -> None:
    layered = Layered()
    tried = harness(lambda *_: Defer(100.0), layered)
    simulator = tried.simulator(SimulationOptions(check_every_steps=1))
    simulator.abort_at(0.5, "r1")
    simulator.run(
        [
            RequestSpec("r0", 0.0, 40, 3, expires_after_s=0.25),
            RequestSpec("r1", 0.0, 40, 3),
        ]
    )
    first, second = tried.request("r0"), tried.request("r1")
    assert (first.end_reason, first.ended_at) == (EndReason.EXPIRED, 0.25)
    assert (second.end_reason, second.ended_at) == (EndReason.ABORTED, 0.5)
    assert first.admission is not None
    assert (first.admission.outcome, first.admission.deferred_s) == ("deferred", 0.25)
    assert layered.told == []
    assert tried.admission.left == ["r0", "r1"]
    tried.controller.check_conservation()


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (None, "something else than Accept, Refuse or Defer"),
        (True, "something else than Accept, Refuse or Defer"),
        (Accept(max_tokens=0), "max_tokens that is not a whole number of at least 1"),
        (Accept(max_tokens=True), "max_tokens that is not a whole number"),
        (Accept(max_tokens=2.5), "max_tokens that is not a whole number"),  # type: ignore[arg-type]
        (Accept(slo_class=3), "slo_class that is not a name"),  # type: ignore[arg-type]
        (Accept(replicaset="nowhere"), "a replicaset that there is not. Replicasets: harness"),
        (Refuse(""), "without a reason"),
        (Refuse(3), "without a reason"),  # type: ignore[arg-type]
        (Refuse("x", -1.0), "retry_after_s that is not a finite number"),
        (Refuse("x", float("nan")), "retry_after_s that is not a finite number"),
        (Defer(0.5), "into the past"),
        (Defer(0.25), "into the past"),
        (Defer(float("inf")), "a time that is not a number"),
        (Defer("soon"), "a time that is not a number"),  # type: ignore[arg-type]
        (Defer(9.0, 4), "for a reason that is no text"),  # type: ignore[arg-type]
        (Defer(9.0, holds_rest=1), "neither true nor false"),  # type: ignore[arg-type]
    ],
)
def test_nonsense_names_the_policy_and_the_request(answer: Any, complaint: str) -> None:
    tried = harness(lambda *_: answer)
    with pytest.raises(PolicyError) as raised:
        tried.run(specs(0.5))
    assert complaint in str(raised.value)
    assert (raised.value.policy, raised.value.request_id) == ("Scripted", "r0")


def test_the_time_of_a_deferral_may_be_a_small_numpy_number() -> None:
    until: Any = np.int8(1)
    tried = harness(lambda request, replicasets, now: Defer(until) if now < 1 else ACCEPT)
    tried.run(specs(0.25))
    assert tried.admission.asked == [("r0", 0.25), ("r0", 1.0)]


def test_an_exception_of_the_policy_is_its_own() -> None:
    with pytest.raises(PolicyError, match="ZeroDivisionError") as raised:
        harness(lambda *_: 1 // 0).run(specs(0.0))  # type: ignore[arg-type,return-value]
    assert raised.value.policy == "Scripted"


def test_requests_that_are_deferred_for_ever_are_named_instead_of_waited_for() -> None:
    with pytest.raises(PolicyError, match="defers 2 requests although nothing else will happen") as raised:
        harness(lambda *_: Defer()).run(specs(0.0, 1.0))
    assert (raised.value.policy, raised.value.request_id) == ("Scripted", "r0")


def test_requests_that_are_deferred_again_and_again_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "MAX_FRUITLESS", 50)
    tried = harness(lambda request, _, now: Defer(now + 0.001))
    with pytest.raises(PolicyError, match="deferred requests 50 times while nothing else happened"):
        tried.run(specs(0.0))


def test_a_request_that_is_deferred_by_microseconds_is_named_while_others_arrive() -> None:
    tried = harness(lambda request, _, now: ACCEPT if request.index else Defer(now + 1e-6))
    with pytest.raises(PolicyError, match=r"deferred a request 10,000 times within 0\.1 s, and again") as raised:
        tried.run(specs(*(0.05 * number for number in range(100))))
    assert (raised.value.policy, raised.value.request_id) == ("Scripted", "r0")
    assert raised.value.time_s == pytest.approx(0.01)


def test_a_request_may_be_deferred_many_thousand_times() -> None:
    tried = harness(lambda request, _, now: ACCEPT if request.index or now >= 0.3 else Defer(now + 12e-6))
    tried.run(specs(*(0.05 * number for number in range(10))))
    admission = tried.request("r0").admission
    assert admission is not None
    assert (admission.outcome, admission.num_deferrals) == ("accepted", 25_000)


def test_polling_is_no_fault_while_something_else_will_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "MAX_FRUITLESS", 50)
    tried = harness(lambda request, _, now: ACCEPT if now >= 1.0 else Defer(now + 0.001))
    tried.run(specs(0.0, 2.0))
    assert tried.request("r0").end_reason is EndReason.STOP


def test_a_request_that_is_deferred_while_every_replica_fails_is_told_so() -> None:
    def decide(request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        return Defer()

    tried = harness(decide)
    simulator = tried.simulator(SimulationOptions())
    simulator.inject(to_ticks(1.0), Phase.FAILURE, Failure(to_ticks(1.0), "harness", 0, "gone"))
    simulator.run(specs(0.0))
    request = tried.request("r0")
    assert (request.end_reason, request.detail) == (EndReason.REJECTED, "every replica has failed (all 1)")
    assert tried.admission.left == ["r0"]


# Systems of several replicasets, through settings


class ScriptedConfig(PolicyConfig):
    """No parameters."""


def system(
    decide: Decide, make: Callable[[Any], Scripted] | None = None, **more: Any
) -> tuple[SimulatedRun, list[Scripted]]:
    """A simulation of two replicasets (`a` takes class x, `b` the rest) behind a scripted policy, or that of `make`."""
    made: list[Scripted] = []

    def build(config: ScriptedConfig, context: Any) -> Scripted:
        made.append(Scripted(decide) if make is None else make(context))
        return made[-1]

    registry = load_registry().with_policies([AdmissionSpec("scripted", ScriptedConfig, build, "Scripted.")])
    layers = {"request_prioritizer": "fcfs", "replicaset_scheduler": "round_robin", "replica_scheduler": "fixed_chunk"}
    mapping = {
        "version": 1,
        "scheduling": {"admission": "scripted", **layers},
        "replicasets": {
            "a": {"select": {"slo_classes": ["x"]}, "replica": {"memory": {"num_blocks": 100}}},
            "b": {"replica": {"memory": {"num_blocks": 40}}},
        },
        "backend": {"simulator": {"latency": {"type": "affine", "base_s": 0.01, "per_token_s": 1e-4}}},
        "workload": {
            "type": "synthetic",
            "num_requests": 12,
            "arrivals": {"type": "fixed", "rate": 50},
            "prompt_tokens": {"type": "constant", "value": 60},
            "output_tokens": {"type": "constant", "value": 8},
            "slo_classes": [{"name": "x"}, {"name": "y"}],
        },
        **more,
    }
    config = config_from_mapping(mapping, registry=registry)
    return SimulatedRun(Run(config, registry, load_workload(config), SeedTree(3), None)), made


def ended(run: SimulatedRun) -> list[Any]:
    """Requests of a run in the order in which they end."""
    found: list[Any] = []

    class Watch(Observer):
        def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
            found.append(request)

    run.controller.watch((Watch(),))
    return found


def test_a_request_may_be_sent_to_another_replicaset() -> None:
    def decide(request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        assert [one.name for one in replicasets] == ["a", "b"]
        return Accept(replicaset="b") if request.replicaset == "a" else Defer(now + 0.1) if now < 0.2 else ACCEPT

    run, _ = system(decide)
    requests = ended(run)
    run.start()
    assert {one.replicaset for one in requests} == {"b"}
    moved = [one for one in requests if one.slo_class == "x"]
    assert moved
    assert all(one.admission.degraded == "replicaset=b" and one.end_reason is EndReason.STOP for one in moved)
    run.controller.check_conservation()


def test_a_replicaset_that_cannot_run_what_it_is_sent_says_why() -> None:
    def decide(request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        return Accept(replicaset="b")

    run, _ = system(decide, replica={"memory": {"block_size": 1}})
    requests = ended(run)
    run.start()
    assert {one.end_reason for one in requests} == {EndReason.REJECTED}
    assert all("leaves no room for output" in one.detail for one in requests)
    moved = [one for one in requests if one.slo_class == "x"]
    assert moved
    assert all(one.detail.endswith("(admission policy scripted sent it to replicaset b)") for one in moved)


def test_views_count_what_waits_runs_and_is_deferred() -> None:
    seen: list[tuple[int, int, int]] = []

    def decide(request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        own = next(one for one in replicasets if one.name == request.replicaset)
        (pool,) = own.pools
        assert (pool.name, pool.role, pool.num_queued) == ("default", "mixed", own.num_queued)
        assert pool.num_queued_tokens == own.num_queued_tokens
        seen.append((own.num_deferred, own.num_queued, sum(one.num_running for one in pool.replicas)))
        return Defer(1.0) if now < 0.1 else ACCEPT

    run, _ = system(decide)
    run.start()
    assert max(one[0] for one in seen) >= 2
    assert seen[-1][0] == 1


def test_a_broken_policy_takes_the_whole_system_out_of_service_until_a_swap_builds_a_new_one() -> None:
    def decide(request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        if len(made) == 1 and now > 0.1:
            raise ValueError("broken")
        return Defer(now + 0.5) if len(made) == 1 and request.index % 2 else ACCEPT

    run, made = system(decide)
    simulator = run._simulator
    options = simulator._driver._options
    simulator._driver._options = type(options)(check_every_steps=1, isolates_policies=True)
    requests = ended(run)
    change = {
        name: PolicyChange(
            name,
            Layer.REQUEST_PRIORITIZER,
            run.controller.replicasets[name].policies.common_choices()[Layer.REQUEST_PRIORITIZER],  # type: ignore[union-attr]
        )
        for name in ("a", "b")
    }
    for name in ("a", "b"):
        simulator.inject(to_ticks(0.15), Phase.POLICY, change[name])
    run.start()
    run.controller.check_conservation()
    assert len(made) == 2
    reasons = Counter(one.end_reason for one in requests)
    assert sum(reasons.values()) == 12
    assert {name for _, name, _ in simulator.violations} == {"a", "b"}
    assert all("broken" in detail for _, _, detail in simulator.violations)
    late = [one for one in requests if one.arrived_at > 0.155]
    assert late
    assert all(one.end_reason is EndReason.STOP for one in late)
    assert made[1].arrived == [one.request_id for one in sorted(late, key=lambda one: one.index)]


@pytest.mark.parametrize("error", [PolicyError("scripted", "broken"), ValueError("broken")])
def test_a_policy_that_fails_when_it_is_woken_takes_the_whole_system_out_of_service(error: Exception) -> None:
    class Waking(Scripted):
        def __init__(self, wake: WakeUps) -> None:
            super().__init__(self.decide)
            self.wake = wake

        def decide(self, request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
            self.wake.at(0.1)
            return ACCEPT

        def on_wake(self, key: str, now: float) -> None:
            raise error

    run, _ = system(lambda *_: ACCEPT, make=lambda context: Waking(context.wake))
    simulator = run._simulator
    simulator._driver._options = type(simulator._driver._options)(check_every_steps=1, isolates_policies=True)
    requests = ended(run)
    run.start()
    run.controller.check_conservation()
    assert {name for _, name, _ in simulator.violations} == {"a", "b"}
    assert len(requests) == 12
    assert all(one.end_reason is not EndReason.STOP for one in requests if one.arrived_at > 0.1)


def test_deferred_requests_survive_a_swap_of_another_layer() -> None:
    run, _ = system(lambda request, _, now: ACCEPT if now >= 0.4 else Defer(0.4))
    change = PolicyChange(
        "b", Layer.REPLICASET_SCHEDULER, config_from_mapping(
            {
                "version": 1, "preset": "vllm-v1", "scheduling": {"replicaset_scheduler": "pull"},
                "backend": {"simulator": {"latency": {"type": "affine", "base_s": 1, "per_token_s": 1}}},
                "replica": {"memory": {"num_blocks": 10}}, "workload": {
                    "type": "synthetic", "num_requests": 1, "arrivals": {"type": "at_once"},
                    "prompt_tokens": {"type": "constant", "value": 1}, "output_tokens": {"type": "constant", "value": 1},
                },
            }
        ).effective_replicasets["default"].scheduling.replicaset_scheduler,
    )  # fmt: skip
    requests = ended(run)
    run._simulator.inject(to_ticks(0.3), Phase.POLICY, change)
    run.start()
    assert len(requests) == 12
    assert {one.end_reason for one in requests} == {EndReason.STOP}
    assert all(one.admission.deferred_s > 0 for one in requests)


def test_the_line_of_one_replicaset_holds_no_other() -> None:
    def decide(request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        own = next(one for one in replicasets if one.name == request.replicaset)
        busy = own.num_queued + sum(one.num_running for one in own.replicas)
        return Defer(holds_rest=True) if busy else ACCEPT

    run, _ = system(decide)
    requests = ended(run)
    run.start()
    for name in ("a", "b"):
        line = [one for one in requests if one.replicaset == name]
        assert len(line) > 2
        assert [one.admitted_at for one in line[1:]] == [one.ended_at for one in line[:-1]]


# Whatever happens


class Erratic:
    """Decides at random."""

    def __init__(self, seed: int, weights: Sequence[float]) -> None:
        self._stream = np.random.default_rng(seed)
        self._weights = np.array(weights) / sum(weights)

    def admit(self, request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        (replicaset,) = replicasets
        in_system = replicaset.num_queued + sum(one.num_running for one in replicaset.replicas)
        kind = int(self._stream.choice(5, p=self._weights))
        wait_s = float(self._stream.exponential(0.05)) + 1e-6
        if kind == 0:
            return ACCEPT
        if kind == 1:
            return Accept(max_tokens=int(self._stream.integers(1, 8)), slo_class="cheap")
        if kind == 2:
            return Refuse("by lot", wait_s)
        if kind == 3 or not in_system:
            return Defer(now + wait_s)
        return Defer()


class Census(Observer):
    """Counts requests at every event that observers are told of."""

    def __init__(self, tried: Harness) -> None:
        self._controller = tried.controller
        self.ends: list[tuple[str, str, str, float]] = []
        self.decisions: list[tuple[str, str, float]] = []

    def on_admission_decision(self, request: RequestView, policy: str, decision: AdmissionDecision, now: float) -> None:
        self.decisions.append((request.request_id, repr(decision), now))

    def on_assigned(self, request: RequestView, replica_id: int | None, now: float) -> None:
        states = Counter(one.state for one in self._controller.alive())
        assert self._controller.gate is not None
        assert states[RequestState.DEFERRED] == len(self._controller.gate)
        assert self._controller.num_submitted == self._controller.num_alive + sum(self._controller.num_ended.values())

    def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
        self.ends.append((request.request_id, reason.value, detail, now))


def erratic_run(data: dict[str, Any], *, fast_forward: bool) -> tuple[list[Any], list[Any]]:
    tried = Harness(
        data["prioritizer"],
        data["scheduler"],
        "fixed_chunk",
        HarnessOptions(
            num_replicas=2, num_blocks=24, max_batch_size=3, keeps_steps=False, reserves_growth=fast_forward
        ),
        admission=Erratic(data["seed"], data["weights"]),
    )
    census = Census(tried)
    tried.controller.watch((census,))
    stream = np.random.default_rng(data["seed"])
    simulator: Simulator = tried.simulator(SimulationOptions(fast_forward=fast_forward, check_every_steps=1))
    arrivals = np.sort(stream.uniform(0, 0.6, data["count"]))
    requests = [
        RequestSpec(
            f"r{index}",
            float(at),
            int(stream.integers(1, 120)),
            int(stream.integers(1, 20)),
            priority=int(stream.integers(-1, 2)),
            expires_after_s=float(stream.uniform(0.01, 0.5)) if stream.random() < 0.3 else None,
        )
        for index, at in enumerate(arrivals)
    ]
    for one in requests:
        if stream.random() < 0.2:
            simulator.abort_at(one.arrived_at + float(stream.uniform(0, 0.3)), one.request_id)
    for at in stream.uniform(0, 0.8, data["failures"]):
        tick = to_ticks(float(at))
        reruns = None if stream.random() < 0.5 else 2
        replica = int(stream.integers(2))
        if not any(entry[1] is Phase.FAILURE for entry in simulator._driver.events.heap):
            simulator.inject(tick, Phase.FAILURE, Failure(tick, "harness", replica, "lost", reruns))
            back = tick + to_ticks(0.1)
            simulator.inject(back, Phase.FAILURE, Restart(back, "harness", replica))
    simulator.run(requests)
    tried.controller.check_conservation()
    assert tried.controller.num_alive == 0
    assert sorted(name for name, *_ in census.ends) == sorted(one.request_id for one in requests)
    return census.ends, census.decisions


@given(
    st.fixed_dictionaries(
        {
            "seed": st.integers(0, 10_000),
            "count": st.integers(1, 40),
            "weights": st.lists(st.floats(0.05, 1.0), min_size=5, max_size=5),
            "prioritizer": st.sampled_from(["fcfs", "lrs", "priority"]),
            "scheduler": st.sampled_from(["round_robin", "pull", "least_loaded"]),
            "failures": st.integers(0, 2),
        }
    )
)
@settings(max_examples=60, deadline=None)
def test_no_request_vanishes_and_two_runs_are_equal(data: dict[str, Any]) -> None:
    first = erratic_run(data, fast_forward=True)
    assert first == erratic_run(data, fast_forward=True)
    assert first == erratic_run(data, fast_forward=False)


def test_observers_hear_of_decisions_that_change_something() -> None:
    class Hears(Observer):
        def __init__(self) -> None:
            self.heard: list[tuple[str, str]] = []

        def on_admission_decision(self, request: Any, policy: str, decision: Any, now: float) -> None:
            self.heard.append((request.request_id, type(decision).__name__))

    answers: dict[str, list[AdmissionDecision]] = {
        "r0": [ACCEPT],
        "r1": [Accept(max_tokens=3)],
        "r2": [Defer(0.5), ACCEPT],
        "r3": [Refuse("no")],
    }
    tried, hears = harness(lambda request, *_: answers[request.request_id].pop(0)), Hears()
    tried.controller.watch((hears, *tried.controller._observers))
    tried.run(specs(0.0, 0.0, 0.0, 0.0))
    assert sorted(hears.heard) == [("r1", "Accept"), ("r2", "Accept"), ("r2", "Defer"), ("r3", "Refuse")]
