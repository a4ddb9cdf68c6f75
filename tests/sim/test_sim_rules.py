"""Arrivals, expiries and followers, the end of a run, and steps in pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from vajra_py.contract import BatchBuilder, LocalReplicaView
from vajra_py.contract.observer import EndReason, Observer, StepEnd, StepRun
from vajra_py.latency import AffineModel, ConstantModel
from vajra_py.runtime.requests.request import Request, RequestFacts, RequestState
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.serving.eligibility import AdmissionLimits
from vajra_py.sim.executor import PredictedTimer, SimulatedExecutor
from vajra_py.sim.simulator import SimulationOptions, Simulator
from vajra_py.testing import Harness, HarnessOptions
from vajra_py.workload import RequestSpec
from vajra_py.workload.request import follows_of

OPTIONS = HarnessOptions(block_size=4, num_blocks=50, max_batch_size=4, latency=ConstantModel(0.01), max_model_len=150)


def spec(name: str, at: float, num_prompt: int = 4, num_output: int = 2, **facts: Any) -> RequestSpec:
    return RequestSpec(name, at, num_prompt, num_output, **facts)


STEPPED = SimulationOptions(check_every_steps=1, fast_forward=False)
"""Every step is formed by itself and can be looked at in `Harness.steps`."""


class Run:
    """A simulation and what became of its requests."""

    def __init__(
        self,
        specs: Sequence[RequestSpec],
        options: HarnessOptions = OPTIONS,
        rules: SimulationOptions | None = None,
        policies: Sequence[Any] = ("fcfs", "pull", ("fixed_chunk", {"chunk_size": 64})),
        admission: AdmissionLimits | None = None,
    ) -> None:
        rules = rules or SimulationOptions(check_every_steps=1)
        keeps_steps = not rules.fast_forward  # else every step is formed by itself
        options = replace(options, holds_ended_slots=rules.asynchronous, keeps_steps=keeps_steps)
        self.harness = Harness(*policies, options)
        if admission is not None:
            self.harness.replicaset.admission = admission
        self.simulator = self.harness.simulator(rules)
        self.specs = specs
        self.progress: list[tuple[int, float]] = []

    def go(self) -> Run:
        self.simulator._progress = lambda count, now: self.progress.append((count, now))
        self.simulator.run(self.specs)
        return self

    def __getitem__(self, name: str) -> Request:
        return self.harness.request(name)

    def ends(self) -> dict[str, tuple[EndReason | None, float | None]]:
        return {name: (one.end_reason, one.ended_at) for name, one in self.harness._recorder.requests.items()}


def run(*args: Any, **kwargs: Any) -> Run:
    return Run(*args, **kwargs).go()


# When a run ends

STREAM = [spec(f"r{index}", 0.1 * index, num_output=5) for index in range(10)]


def test_a_run_serves_everybody() -> None:
    served = run(STREAM)
    assert [reason for reason, _ in served.ends().values()] == [EndReason.STOP] * 10
    assert served["r9"].ended_at == pytest.approx(0.95)
    assert served.harness.controller.num_alive == 0
    assert sum(count for count, _ in served.progress) == 10


def test_after_the_horizon_nobody_arrives() -> None:
    rules = SimulationOptions(horizon_s=0.4)
    served = run(STREAM, rules=rules)
    assert list(served.ends()) == ["r0", "r1", "r2", "r3", "r4"]
    assert served["r4"].end_reason is EndReason.STOP, "who arrived is served"


def test_without_drain_the_run_stops_at_the_horizon() -> None:
    served = run(STREAM, rules=SimulationOptions(horizon_s=0.42, drain=False))
    assert served.simulator.now == round(0.42e12)
    assert (served["r3"].end_reason, served["r4"].state) == (EndReason.STOP, RequestState.RUNNING)
    assert served["r4"].num_output_tokens == 2, "a step that ends at the horizon counts"
    assert served.harness.controller.num_alive == 1


def test_without_drain_or_horizon_the_run_stops_at_the_last_arrival() -> None:
    served = run(STREAM, rules=SimulationOptions(drain=False))
    assert served.simulator.now == round(0.9e12)
    assert served["r9"].state is RequestState.RUNNING
    assert served.harness.controller.num_alive == 1


def test_a_workload_may_be_read_once() -> None:
    served = Run(STREAM)
    served.simulator.run(iter(STREAM))
    assert len(served.ends()) == 10


# Arrivals of one tick


def test_arrivals_of_one_tick_meet_in_one_step() -> None:
    for chooser in ("pull", "round_robin"):
        served = run([spec(name, 0.5) for name in "abc"], rules=STEPPED, policies=("fcfs", chooser, "fixed_chunk"))
        assert list(served.harness.steps[0].tokens) == ["a", "b", "c"]


def test_an_arrival_at_a_steps_end_joins_the_next_step() -> None:
    served = run([spec("a", 0.0, num_output=3), spec("b", 0.01)], rules=STEPPED)
    assert [list(step.tokens) for step in served.harness.steps] == [["a"], ["a", "b"], ["a", "b"]]


def test_idle_replicas_share_the_queue_in_order_of_their_ids() -> None:
    options = replace(OPTIONS, num_replicas=3, max_batch_size=1)
    served = run([spec(name, 0.0) for name in "abcd"], options)
    assert [served[name].replica_id for name in "abcd"] == [0, 1, 2, 0]
    assert served["d"].admitted_at == pytest.approx(0.02)


# Followers


def test_a_follower_arrives_after_the_end_and_a_pause() -> None:
    specs = [spec("a", 1.0), spec("b", 9.0, follows="a", think_time_s=0.5), spec("c", 0.0, follows="b"), spec("d", 3.0)]
    served = run(specs)
    assert served["b"].arrived_at == pytest.approx(1.02 + 0.5)
    assert served["c"].arrived_at == served["b"].ended_at
    assert list(served.ends()) == ["a", "b", "c", "d"], "in order of arrival"


def test_a_follower_arrives_however_the_other_ended() -> None:
    specs = [
        spec("never fits", 0.0, 500),
        spec("after it", 0.0, follows="never fits", think_time_s=1.0),
        spec("taken back", 2.0, num_output=50),
        spec("next", 0.0, follows="taken back"),
        spec("first", 3.0, num_prompt=4, num_output=90),
        spec("impatient", 3.0, expires_after_s=0.2),
        spec("later", 0.0, follows="impatient"),
    ]
    served = Run(specs, replace(OPTIONS, max_batch_size=1))
    served.simulator.abort_at(2.115, "taken back")
    served.go()
    assert served["after it"].arrived_at == 1.0
    assert served["taken back"].end_reason is EndReason.ABORTED
    assert served["next"].arrived_at == pytest.approx(2.12), "when the step that it was in is over"
    assert served["later"].arrived_at == pytest.approx(3.2)
    assert served.harness.controller.num_alive == 0


@st.composite
def graphs(draw: st.DrawFn) -> list[RequestSpec]:
    """Requests with up to three parents each, some of which are rejected or expire."""
    specs = []
    times = sorted(draw(st.lists(st.floats(0, 0.2), min_size=1, max_size=12)))
    for index, arrived_at in enumerate(times):
        parents = draw(st.lists(st.integers(0, index - 1), max_size=3, unique=True)) if index else []
        specs.append(
            spec(
                f"r{index}",
                arrived_at,
                draw(st.sampled_from([1, 4, 30, 500])),  # 500 never fits
                draw(st.integers(1, 9)),
                follows=follows_of([f"r{parent}" for parent in parents]),
                think_time_s=draw(st.sampled_from([0.0, 0.005, 0.1])),
                expires_after_s=draw(st.sampled_from([None, 0.01])),
            )
        )
    return specs


@given(graphs(), st.booleans())
def test_a_request_arrives_when_all_that_it_follows_have_ended(specs: list[RequestSpec], fast_forward: bool) -> None:
    served = run(specs, replace(OPTIONS, max_batch_size=2), SimulationOptions(fast_forward=fast_forward))
    ends = served.ends()
    assert set(ends) == {one.request_id for one in specs}, "nobody vanishes"
    assert served.harness.controller.num_alive == 0
    for one in specs:
        ended = [ends[parent][1] for parent in one.parents]
        expected = max(at for at in ended if at is not None) + one.think_time_s if ended else one.arrived_at
        assert served[one.request_id].arrived_at == pytest.approx(expected, abs=1e-11)


def test_who_follows_nobody_known_never_arrives() -> None:
    served = run([spec("a", 0.0), spec("b", 0.0, follows="nobody")])
    assert list(served.ends()) == ["a"]


def test_followers_keep_to_the_horizon() -> None:
    served = run(
        [spec("a", 0.0), spec("b", 0.0, follows="a", think_time_s=5.0)], rules=SimulationOptions(horizon_s=1.0)
    )
    assert list(served.ends()) == ["a"]


# Expiry and aborts


@pytest.mark.parametrize("chooser", ["pull", "round_robin"])
def test_whoever_waits_too_long_leaves(chooser: str) -> None:
    specs = [spec("a", 0.0, num_output=10), spec("b", 0.0, expires_after_s=0.05), spec("c", 0.0, expires_after_s=0.2)]
    served = run(specs, replace(OPTIONS, max_batch_size=1), policies=("fcfs", chooser, "fixed_chunk"))
    assert served["b"].end_reason is EndReason.EXPIRED
    assert served["b"].ended_at == pytest.approx(0.05)
    assert served["c"].end_reason is EndReason.STOP, "it got its turn at 0.1 s"
    assert served["c"].admitted_at == pytest.approx(0.1)


def test_expiry_at_the_very_moment_wins() -> None:
    specs = [spec("a", 0.0, num_output=5), spec("b", 0.0, expires_after_s=0.05)]
    served = run(specs, replace(OPTIONS, max_batch_size=1))
    assert served["a"].ended_at == served["b"].ended_at == pytest.approx(0.05)
    assert served["b"].end_reason is EndReason.EXPIRED


def test_a_preempted_request_does_not_expire() -> None:
    specs = [spec("a", 0.0, 12, 30), spec("b", 0.0, 8, 30, expires_after_s=0.12)]
    served = run(specs, replace(OPTIONS, num_blocks=12, max_model_len=48))
    assert served["b"].num_preemptions > 0
    assert served["b"].end_reason is EndReason.STOP, "it had started"


@pytest.mark.parametrize(("at", "ended_at"), [(0.005, 0.01), (0.035, 0.04), (0.01, 0.01), (7.0, 0.1)])
def test_a_running_request_is_aborted_when_its_step_is_over(at: float, ended_at: float) -> None:
    served = Run([spec("a", 0.0, num_output=10)])
    served.simulator.abort_at(at, "a")
    served.go()
    assert served["a"].ended_at == pytest.approx(ended_at)
    assert served["a"].end_reason is (EndReason.ABORTED if at < 1 else EndReason.STOP)


def test_aborting_frees_the_place_at_once() -> None:
    served = Run([spec("a", 0.0, num_output=90), spec("b", 0.0)], replace(OPTIONS, max_batch_size=1))
    served.simulator.abort_at(0.3, "a")
    served.go()
    assert served["b"].admitted_at == served["a"].ended_at == pytest.approx(0.3)


class NobodyPassesA:
    """Admits requests by turns; one called "a" cannot run yet, and those behind it wait."""

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        batch.add_running()
        for request in replica.waiting():
            if request.request_id == "a":
                return
            batch.add(request, batch.max_chunk(request))


def test_who_waits_behind_an_aborted_request_runs_at_once() -> None:
    """Nothing else would let its replica, which runs nobody, form a step."""
    served = Run([spec("a", 0.0), spec("b", 0.0)], policies=("fcfs", "round_robin", NobodyPassesA()))
    served.simulator.abort_at(0.3, "a")
    served.go()
    assert served["b"].admitted_at == served["a"].ended_at == pytest.approx(0.3)


# Admission


def test_requests_that_never_fit_are_refused_and_the_rest_is_served() -> None:
    served = run(
        [spec("long", 0.0, 149), spec("too long", 0.1, 150), spec("much too long", 0.2, 10**6), spec("a", 0.3)]
    )
    assert served["long"].end_reason is EndReason.LENGTH, "one token fits"
    for name in ("too long", "much too long"):
        assert served[name].end_reason is EndReason.REJECTED
        assert "may hold at most 150 tokens here" in served[name].detail
    assert served["a"].end_reason is EndReason.STOP
    counts = served.harness.controller.num_ended
    assert counts == {EndReason.LENGTH: 1, EndReason.REJECTED: 2, EndReason.STOP: 1}


def test_full_queues_turn_requests_away() -> None:
    specs = [spec(f"r{index}", 0.001 * index, num_output=10) for index in range(6)]
    served = run(specs, replace(OPTIONS, max_batch_size=1), admission=AdmissionLimits(max_queued_requests=2))
    reasons = [reason for reason, _ in served.ends().values()]
    assert reasons == [EndReason.STOP] * 3 + [EndReason.REJECTED] * 3
    assert "at most 2 may" in served["r5"].detail


def test_bounded_tokens_turn_long_requests_away_first() -> None:
    specs = [spec("a", 0.0, 20, 10), spec("b", 0.001, 20), spec("c", 0.002, 20), spec("d", 0.003, 4)]
    served = run(specs, replace(OPTIONS, max_batch_size=1), admission=AdmissionLimits(max_queued_tokens=30))
    assert [name for name, (reason, _) in served.ends().items() if reason is EndReason.REJECTED] == ["c"]


# Several replicasets


def test_replicasets_serve_side_by_side() -> None:
    executor = SimulatedExecutor()
    harnesses = {name: Harness("fcfs", "pull", "fixed_chunk", OPTIONS) for name in ("chat", "batch")}
    replicasets = {}
    for name, harness in harnesses.items():
        harness.replicaset.name = name
        for replica in harness.replicaset.replicas:
            replica.replicaset = name
            replica.parts = structs.replace(replica.parts, executor=executor)
        replicasets[name] = harness.replicaset

    def select(facts: RequestFacts) -> str:
        return "chat" if facts.tenant == "people" else "batch"

    controller = Controller(replicasets, select)
    timer = PredictedTimer(ConstantModel(0.01))
    simulator = Simulator(controller, executor, lambda replica: timer, SimulationOptions(check_every_steps=1))
    specs = [spec(f"r{index}", 0.0, tenant=("people", "jobs")[index % 3 == 0]) for index in range(9)]
    simulator.run(specs)
    assert controller.num_ended == {EndReason.STOP: 9}
    steps = {name: [step.num_running for step in _steps(replicaset)] for name, replicaset in replicasets.items()}
    assert steps == {"chat": [], "batch": []}, "nobody watched"
    assert [replica.num_steps for replica in controller.replicas()] == [4, 2]


def _steps(replicaset: Any) -> list[Any]:
    return [observer for observer in replicaset.observers if hasattr(observer, "num_running")]


# Time


def test_forming_a_step_may_take_time() -> None:
    harness = Harness("fcfs", "pull", "fixed_chunk", OPTIONS)
    timer = PredictedTimer(ConstantModel(0.01), overhead_s=0.002)
    simulator = Simulator(harness.controller, harness._executor, lambda replica: timer, SimulationOptions())
    simulator.run([spec("a", 0.0, num_output=4)])
    assert [step.ended_at for step in harness.steps] == pytest.approx([0.012, 0.024, 0.036, 0.048])


def test_steps_go_through_a_pipeline_one_behind_the_other() -> None:
    """Two stages of 10 ms, one request a step: a step enters every 10 ms and leaves 20 ms later."""
    options = replace(OPTIONS, pipeline_stages=2, max_batch_size=1, latency=ConstantModel(0.02, num_stages=2))
    served = run([spec("a", 0.0), spec("b", 0.0)], options, STEPPED)
    steps = [(list(step.tokens), step.formed_at, step.ended_at) for step in served.harness.steps]
    assert steps == [
        (["a"], 0.0, 0.02),
        (["b"], 0.01, 0.03),
        (["a"], 0.02, 0.04),
        (["b"], 0.03, 0.05),
    ]


def test_a_short_step_queues_behind_a_long_one_at_every_stage() -> None:
    """A tandem queue: 16 tokens need 4 ms a stage, 1 token 0.25 ms; nobody overtakes."""
    latency = AffineModel(base_s=0.0, per_token_s=0.0005, num_stages=2)
    options = replace(OPTIONS, pipeline_stages=2, max_batch_size=1, latency=latency)
    served = run([spec("long", 0.0, 16, 1), spec("short", 0.0, 1, 1)], options, STEPPED)
    steps = [(list(step.tokens), step.formed_at, step.ended_at) for step in served.harness.steps]
    assert steps == [(["long"], 0.0, 0.008), (["short"], 0.004, 0.00825)]


def test_chunks_of_one_prompt_follow_each_other_through_the_stages() -> None:
    """Three chunks, two stages of 10 ms: (3 + 1) stage times instead of 3 * 2."""
    options = replace(OPTIONS, pipeline_stages=2, max_batch_tokens=8, latency=ConstantModel(0.02, num_stages=2))
    served = run([spec("a", 0.0, 24, 1)], options, STEPPED)
    assert [step.formed_at for step in served.harness.steps] == [0.0, 0.01, 0.02]
    assert served["a"].first_token_at == 0.04


def test_chunks_end_where_a_kv_parallel_group_is_full() -> None:
    options = replace(OPTIONS, kv_parallel_groups=3, kv_group_tokens=16, num_blocks=24, max_model_len=48)
    served = run(
        [spec("a", 0.0, 40, 3)], options, STEPPED, policies=("fcfs", "pull", ("fixed_chunk", {"chunk_size": 2048}))
    )
    assert [step.tokens["a"] for step in served.harness.steps] == [16, 16, 8, 1, 1]


def test_the_same_run_twice_is_the_same() -> None:
    specs = [
        spec(f"r{index}", 0.013 * index, 3 + 7 * index % 40, 1 + index % 17, expires_after_s=0.3) for index in range(40)
    ]
    options = replace(OPTIONS, num_replicas=3, num_blocks=20, max_model_len=60)
    policies = ("lrs", "power_of_two", "dynamic_chunk")
    one, other = (run(specs, options, STEPPED, policies=policies) for _ in range(2))
    assert one.harness.steps == other.harness.steps
    assert one.ends() == other.ends()


# How requests reach the scheduler


def test_a_request_reaches_the_queue_late_by_the_hosts_delay() -> None:
    served = run([spec("a", 0.0), spec("b", 0.5)], rules=SimulationOptions(arrival_delay_s=0.003))
    assert [served[name].ended_at for name in "ab"] == [pytest.approx(0.023), pytest.approx(0.523)]
    assert [served[name].arrived_at for name in "ab"] == [0.0, 0.5]


def test_asynchronous_scheduling_misses_the_step_that_is_scheduled_already() -> None:
    """The step from 0.01 on is scheduled at 0.0, so that what arrives in between is computed from 0.02 on."""
    specs = [spec("a", 0.0, num_output=10), spec("b", 0.004, num_output=1)]
    synchronous, asynchronous = (run(specs, rules=SimulationOptions(asynchronous=choice)) for choice in (False, True))
    assert synchronous["b"].first_token_at == pytest.approx(0.02)
    assert asynchronous["b"].first_token_at == pytest.approx(0.03)
    assert asynchronous["a"].ended_at == pytest.approx(0.1)


def test_asynchronous_scheduling_sees_a_request_at_once_when_nothing_runs() -> None:
    served = run([spec("a", 0.0), spec("b", 0.5)], rules=SimulationOptions(asynchronous=True))
    assert served["b"].first_token_at == pytest.approx(0.51)


@pytest.mark.parametrize("fast_forward", [True, False])
def test_asynchronous_scheduling_fills_a_slot_again_one_step_late(fast_forward: bool) -> None:
    """`b` ends at 0.03, when the step that lasts until 0.04 is scheduled already: `c` is computed from 0.04 on."""
    specs = [spec("a", 0.0, num_output=20), spec("b", 0.0, num_output=3), spec("c", 0.0, num_output=2)]
    options = replace(OPTIONS, max_batch_size=2)
    first = {}
    for asynchronous in (False, True):
        rules = SimulationOptions(asynchronous=asynchronous, fast_forward=fast_forward)
        first[asynchronous] = run(specs, options, rules=rules)["c"].first_token_at
    assert first == {False: pytest.approx(0.04), True: pytest.approx(0.05)}


@pytest.mark.parametrize("fast_forward", [True, False])
def test_asynchronous_scheduling_reuses_the_blocks_of_an_ended_request_one_step_late(fast_forward: bool) -> None:
    """`a` and `b` fill the memory: `c` gets the blocks of `b`, which ends at 0.03, in the step from 0.04 on."""
    specs = [spec("a", 0.0, 12, num_output=4), spec("b", 0.0, 8, num_output=3), spec("c", 0.0, 16, num_output=2)]
    options = replace(OPTIONS, num_blocks=8, max_model_len=20)
    first = {}
    for asynchronous in (False, True):
        rules = SimulationOptions(asynchronous=asynchronous, fast_forward=fast_forward, check_every_steps=1)
        first[asynchronous] = run(specs, options, rules=rules)["c"].first_token_at
    assert first == {False: pytest.approx(0.04), True: pytest.approx(0.05)}


def test_no_block_is_lost_when_the_last_request_ends_under_asynchronous_scheduling() -> None:
    options = replace(OPTIONS, num_blocks=6, max_model_len=24)
    specs = [spec("a", 0.0, 12, num_output=8), spec("b", 1.0, 12, num_output=8)]
    served = run(specs, options, rules=SimulationOptions(asynchronous=True, check_every_steps=1))
    assert served["b"].ended_at == pytest.approx(1.08)
    (replica,) = served.harness.controller.replicas()
    assert replica.memory.free_blocks == 6


class FreeBlocks(Observer):
    """Free blocks after each step."""

    wants_step_ends = True

    def __init__(self, *, one_by_one: bool) -> None:
        self.wants_steps = one_by_one
        self.seen: list[tuple[int, int]] = []

    def on_step_end(self, step: StepEnd) -> None:
        self.seen.append((step.step_index, step.free_blocks))

    def on_step_run(self, run: StepRun) -> None:
        self.seen.extend(enumerate(run.free_blocks, run.first_step_index))


def test_blocks_freed_late_are_counted_alike_with_and_without_fast_forward() -> None:
    specs = [spec("a", 0.0, 12, num_output=4), spec("b", 0.0, 8, num_output=40)]
    seen = []
    for one_by_one in (True, False):
        observer = FreeBlocks(one_by_one=one_by_one)
        one = Run(specs, rules=SimulationOptions(asynchronous=True))
        one.harness.controller.watch((observer,))
        one.go()
        seen.append(observer.seen)
    assert seen[0] == seen[1]


class IgnoresRequestA:
    """Computes one chunk of request `a`, and everything else in full."""

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        batch.add_decodes()
        for request in [*replica.partial_prefills(), *replica.waiting()]:
            if request.request_id != "a" or not request.num_computed_tokens:
                batch.add(request, min(8, batch.max_chunk(request)))


def test_a_request_aborted_between_two_steps_frees_its_blocks_under_asynchronous_scheduling() -> None:
    options = replace(OPTIONS, num_blocks=8, max_model_len=32)
    rules = SimulationOptions(asynchronous=True, check_every_steps=1)
    one = Run([spec("a", 0.0, 24), spec("b", 2.0, 24)], options, rules, ("fcfs", "pull", IgnoresRequestA()))
    one.simulator.abort_at(1.0, "a")
    one.go()
    assert [one[name].end_reason for name in "ab"] == [EndReason.ABORTED, EndReason.STOP]
    (replica,) = one.harness.controller.replicas()
    assert replica.memory.free_blocks == 8


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("horizon_s", [0.4, None])
@pytest.mark.parametrize("rules", [{"arrival_delay_s": 0.15}, {"asynchronous": True}], ids=["late", "asynchronous"])
def test_requests_that_arrive_in_time_are_submitted_although_the_scheduler_sees_them_later(
    rules: dict[str, Any], horizon_s: float | None, drain: bool
) -> None:
    served = run(STREAM, rules=SimulationOptions(horizon_s=horizon_s, drain=drain, **rules))
    assert served.harness.controller.num_submitted == (10 if horizon_s is None else 5)


def test_a_replica_of_one_slot_goes_on_under_asynchronous_scheduling() -> None:
    options = replace(OPTIONS, max_batch_size=1)
    served = run([spec("a", 0.0), spec("b", 0.0)], options, rules=SimulationOptions(asynchronous=True))
    assert served["b"].ended_at > served["a"].ended_at


@pytest.mark.parametrize("fast_forward", [True, False])
def test_late_requests_do_not_depend_on_running_ahead(fast_forward: bool) -> None:
    specs = [spec("a", 0.0, num_output=100), *(spec(f"b{index}", 0.0504 + 0.1 * index) for index in range(5))]
    served = run(specs, rules=SimulationOptions(asynchronous=True, arrival_delay_s=0.001, fast_forward=fast_forward))
    firsts = [served[f"b{index}"].first_token_at for index in range(5)]
    assert firsts == [pytest.approx(0.081 + 0.1 * index) for index in range(5)]
