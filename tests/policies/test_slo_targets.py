"""SLOs-Serve's plan, QLM's groups, Kairos's order, Ascendra's hand-over and Equinox's counters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from tests.policies.routing_views import Request as Asked
from tests.policies.routing_views import context, replicas
from vajra_policies.slo.prompt_plans import Prompt, most_in_time
from vajra_policies.slo.qlm import Qlm, QlmConfig
from vajra_py.contract import Layer, RequestView
from vajra_py.latency import AffineModel
from vajra_py.latency.services.output_length import OracleLengths
from vajra_py.plugins import build_policy
from vajra_py.runtime.records.input_log import Failure
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.support.clock import to_ticks
from vajra_py.sim.simulator import SimulationOptions
from vajra_py.testing.harness import Harness, HarnessOptions, Step
from vajra_py.workload.request import RequestSpec


def step(harness: Harness) -> Step:
    done = harness.step()
    assert done is not None
    return done


# SLOs-Serve

prompts = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 8)), min_size=1, max_size=8)


def is_feasible(chosen: tuple[Prompt, ...], step_tokens: int, num_running: int) -> bool:
    total = 0
    for num, prompt in enumerate(chosen):
        total += prompt.num_tokens
        if total > prompt.num_steps * (step_tokens - num_running - num):
            return False
    return True


@given(prompts, st.integers(1, 200), st.integers(0, 5))
def test_a_plan_admits_as_many_as_exhaustive_search(
    facts: list[tuple[int, int]], step_tokens: int, num_running: int
) -> None:
    plan = sorted((Prompt(*one) for one in facts), key=lambda one: one.num_steps)
    chosen = most_in_time(plan, step_tokens, num_running)
    assert is_feasible(tuple(one for one, is_in in zip(plan, chosen, strict=True) if is_in), step_tokens, num_running)
    sets = (some for size in range(len(plan) + 1) for some in combinations(plan, size))
    best = max(len(some) for some in sets if is_feasible(some, step_tokens, num_running))
    assert sum(chosen) == best


def test_what_was_admitted_before_stays_in_every_plan() -> None:
    plan = [Prompt(50, 1), Prompt(90, 1, is_admitted=True), Prompt(50, 2)]
    assert most_in_time(plan, 100, 0) == [False, True, True]


def test_a_prompt_that_is_late_is_not_in_time_for_want_of_room() -> None:
    assert most_in_time([Prompt(50, -80, is_admitted=True), Prompt(10, -70)], 4, 4) == [True, False]


arrivals = st.lists(st.tuples(st.integers(0, 80), st.integers(1, 700), st.integers(1, 9)), min_size=1, max_size=12)


@settings_of_hypothesis(max_examples=60)
@given(arrivals)
def test_everybody_who_is_admitted_has_the_first_token_in_time(facts: list[tuple[int, int, int]]) -> None:
    specs = [
        RequestSpec(f"r{index}", at / 50, prompt, 20, ttft_slo_s=allowed / 10)
        for index, (at, prompt, allowed) in enumerate(sorted(facts))
    ]
    options = HarnessOptions(num_blocks=2000, max_batch_size=64, latency=AffineModel(0.01, 0.0001), keeps_steps=False)
    harness = Harness("fcfs", "round_robin", "slos_serve", options)
    verdicts: dict[str, bool] = {}
    scheduler = harness.replica_schedulers[0]
    decide = scheduler._decide

    def note(replica: object, now: float) -> None:
        decide(replica, now)
        verdicts.update((one.request_id, is_in) for one, is_in in scheduler._admitted.items())

    scheduler._decide = note
    harness.run(specs)
    for spec in specs:
        request = harness.request(spec.request_id)
        assert request.first_token_at is not None
        if verdicts[spec.request_id]:
            assert request.first_token_at - request.arrived_at <= (spec.ttft_slo_s or 0.0) + 1e-9


def decoding(num_requests: int, **options: Any) -> Harness:
    """Steps of 45.5 ms and 1 ms a token, of which a step of 50 ms has room for four; so many requests decode."""
    latency = AffineModel(0.0455, 0.001)
    harness = Harness("fcfs", "round_robin", "slos_serve", HarnessOptions(latency=latency, **options))
    for index in range(num_requests):
        harness.submit(f"d{index}", 1, 20)
    while len(step(harness).tokens) < num_requests:
        pass
    return harness


def test_no_step_takes_longer_for_a_prompt_beside_decodes_that_fill_its_time() -> None:
    harness = decoding(4)
    harness.submit("prompt", 10, 1, ttft_slo_s=60.0)
    assert step(harness).tokens == dict.fromkeys(("d0", "d1", "d2", "d3"), 1)


def test_where_no_token_fits_the_time_of_a_step_one_is_computed_in_each() -> None:
    harness = Harness("fcfs", "round_robin", "slos_serve", HarnessOptions(latency=AffineModel(0.06, 0.001)))
    harness.submit("prompt", 3, 1, ttft_slo_s=60.0)
    assert [one.tokens for one in harness.steps_until_idle()] == [{"prompt": 1}] * 3


def test_a_prompt_with_an_slo_has_the_last_slot_of_a_batch() -> None:
    harness = decoding(1, max_batch_size=2)
    harness.submit("prompt", 10, 1, ttft_slo_s=60.0)
    assert step(harness).tokens == {"d0": 1, "prompt": 3}


def test_a_prompt_with_an_slo_has_the_last_token_of_a_step() -> None:
    harness = decoding(3)
    harness.submit("prompt", 10, 1, ttft_slo_s=60.0)
    assert step(harness).tokens == dict.fromkeys(("d0", "d1", "d2", "prompt"), 1)


def test_a_request_whose_first_token_is_out_goes_behind_slos_when_it_is_computed_again_elsewhere() -> None:
    options = HarnessOptions(num_replicas=2, num_blocks=400, latency=AffineModel(0.01, 0.0001))
    harness = Harness("fcfs", "least_loaded", "slos_serve", options)
    simulator, at = harness.simulator(SimulationOptions()), to_ticks(0.2)
    simulator.inject(at, Phase.FAILURE, Failure(at, "harness", 0, "lost", max_reruns=1))
    simulator.run([RequestSpec("again", 0.0, 300, 50, ttft_slo_s=5.0), RequestSpec("new", 0.2, 900, 1, ttft_slo_s=9.0)])
    assert (harness.request("again").first_token_at or 1.0) < 0.2
    begun = next(step for step in harness.steps if step.replica_id == 1)
    assert list(begun.tokens) == ["new"], "the first token of the other, due earlier, is out"


# QLM


class Job:
    """Stand-in for a request, with the facts that QLM reads."""

    is_resident = False
    deadline_at = None

    def __init__(self, at: float, slo_s: float, num_output_tokens: int = 0) -> None:
        self.arrived_at, self.ttft_slo_s, self.num_output_tokens = at, slo_s, num_output_tokens


def test_groups_go_by_arrival_until_one_is_predicted_to_be_late() -> None:
    policy = Qlm(QlmConfig(throughput=100.0, output_tokens=100.0, group_requests=2))
    jobs = [Job(0.1 * index, slo) for index, slo in enumerate((100.0, 100.0, 100.0, 5.0))]
    policy.on_arrivals(jobs, 0.3)  # type: ignore[arg-type]
    groups = [policy.group(one) for one in jobs]  # type: ignore[arg-type]
    assert groups == ["0", "0", "1", "2"], "two a group, SLOs apart"
    order = lambda: sorted(dict.fromkeys(groups), key=policy.group_key)  # noqa: E731
    assert order() == ["0", "1", "2"], "3 s ahead of an SLO of 5 s"
    late = [Job(0.4, 100.0), Job(0.5, 3.0)]
    policy.on_arrivals(late, 0.5)  # type: ignore[arg-type]
    assert order()[0] == "2", "the last one has 4 s ahead and 3 s left"
    for one in (*jobs, *late):
        policy.on_admission(one, 0, 1.0)  # type: ignore[arg-type]
    again = [Job(2.0, 100.0), Job(2.1, 90.0)]
    policy.on_arrivals(again, 2.1)  # type: ignore[arg-type]
    assert policy.group_key(policy.group(again[0])) < policy.group_key(policy.group(again[1]))  # type: ignore[arg-type]


def test_a_group_closes_although_its_first_requests_have_left() -> None:
    policy = Qlm(QlmConfig(group_requests=2))
    jobs = [Job(0.1 * index, 1000.0) for index in range(5)]
    groups = []
    for index, one in enumerate(jobs):
        policy.on_arrivals([one], one.arrived_at)  # type: ignore[list-item]
        groups.append(policy.group(one))  # type: ignore[arg-type]
        if index:
            policy.on_departures([jobs[index - 1]], one.arrived_at)  # type: ignore[list-item]
    assert groups == ["0", "0", "1", "1", "2"]


def test_a_group_keeps_its_place_while_requests_are_queued_with_their_kv() -> None:
    policy = Qlm(QlmConfig(group_requests=1))
    jobs = [Job(0.1 * index, 1000.0) for index in range(3)]
    policy.on_arrivals(jobs, 0.2)  # type: ignore[arg-type]
    groups = [policy.group(one) for one in jobs]  # type: ignore[arg-type]
    for one in jobs[:2]:
        policy.on_admission(one, 0, 0.3)  # type: ignore[arg-type]
    assert [policy.group_key(group) for group in groups] == [0.0, 1.0, 2.0], "handed off, they wait at another replica"
    policy.on_departures(jobs, 0.4)  # type: ignore[arg-type]
    assert not policy._alive


def test_waits_follow_what_has_ended_unless_all_of_it_ended_at_once() -> None:
    policy = Qlm(QlmConfig(throughput=100.0, output_tokens=100.0))
    policy.on_departures([Job(0.0, 1.0, 10), Job(0.0, 1.0, 10)], 1000.0)  # type: ignore[list-item]
    assert policy.estimator.wait_s(3) == 3.0, "as configured"
    policy.on_departures([Job(0.0, 1.0, 10)], 1001.0)  # type: ignore[list-item]
    assert policy.estimator.wait_s(3) == 1.5, "20 tokens in the second after the first end, and 10 of each request"


class Watched(Qlm):
    """Keeps 20 predictions for the request that is 60th in the queue: (when, seconds)."""

    def __init__(self) -> None:
        super().__init__(QlmConfig())
        self.predicted: dict[str, tuple[float, float]] = {}

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        super().on_departures(requests, now)
        waiting = [one for group in self._groups.values() for one in group.waiting]
        if len(self.predicted) < 20 and len(waiting) > 60 and now > 10.0:
            self.predicted.setdefault(waiting[60].request_id, (now, self.estimator.wait_s(60)))


def test_waits_are_predicted_within_a_tenth_for_fifty_requests_ahead() -> None:
    specs = [RequestSpec(f"r{index}", 0.0, 20, 20 + 37 * index % 80) for index in range(300)]
    options = HarnessOptions(num_blocks=500, max_batch_size=8, latency=AffineModel(0.02), keeps_steps=False)
    policy = Watched()
    harness = Harness(policy, "round_robin", "fixed_chunk", options)
    harness.run(specs)
    predicted = policy.predicted
    assert len(predicted) == 20
    for name, (at, wait_s) in predicted.items():
        first_token_at = harness.request(name).first_token_at
        assert first_token_at is not None
        assert abs(first_token_at - at - wait_s) <= 0.1 * (first_token_at - at)


# Kairos


def test_of_equal_deadlines_the_longer_prompt_starts_first() -> None:
    options = HarnessOptions(num_blocks=400, max_batch_size=1)
    harness = Harness("kairos", "round_robin", ("fixed_chunk", {"chunk_size": 100}), options)
    harness.submit("short", 100, 1, ttft_slo_s=2.0)
    harness.submit("long", 2000, 1, ttft_slo_s=2.0)
    harness.submit("patient", 2000, 1, ttft_slo_s=9.0)
    assert harness.waiting() == ["long", "short", "patient"]


# Ascendra


def test_who_would_be_late_moves_to_the_replica_that_is_kept_for_it() -> None:
    specs = [RequestSpec("long", 0.0, 4000, 1)]
    specs += [RequestSpec("urgent", 0.01, 100, 1, ttft_slo_s=0.4), RequestSpec("patient", 0.02, 100, 1, ttft_slo_s=9.0)]
    options = HarnessOptions(num_replicas=2, num_blocks=400, max_batch_size=1, latency=AffineModel(0.005, 0.0001))
    harness = Harness("fcfs", "ascendra", ("fixed_chunk", {"chunk_size": 5000}), options)
    harness.run(specs)
    at = {entry.request_id: step.replica_id for step in harness.steps for entry in step.entries}
    assert at == {"long": 0, "urgent": 1, "patient": 0}
    urgent = harness.request("urgent")
    assert urgent.first_token_at is not None
    assert urgent.first_token_at <= 0.01 + 0.4


def test_nobody_moves_to_a_replica_that_has_as_much_to_do() -> None:
    made = build_policy(Layer.REPLICASET_SCHEDULER, "ascendra", {}, context(2))
    urgent: Any = Asked(100, ttft_slo_s=0.1)
    urgent.num_remaining_tokens = 100
    assert made.assign(urgent, replicas(num_pending_tokens=[0, 0]), 0.0) == 0
    assert made.moves(replicas(num_pending_tokens=[500, 500]), 0.1) == []
    assert [one.target for one in made.moves(replicas(num_pending_tokens=[500, 499]), 0.1)] == [1]


# Equinox


def test_counters_mix_what_users_got_and_what_it_cost_and_are_put_right_at_the_end() -> None:
    lengths = OracleLengths({"a": 50, "b": 10})
    options = HarnessOptions(max_batch_size=1, latency=AffineModel(0.0, 0.0001), output_lengths=lengths)
    harness = Harness("equinox", "round_robin", "fixed_chunk", options)
    policy = harness.prioritizer
    harness.submit("a", 100, 50, tenant="a")
    harness.submit("b", 100, 10, tenant="b", max_tokens=10)
    harness.step()
    # At once: (p + 4 d) of the user; a token takes 0.1 ms, decoded or not, so the device's is p + d.
    assert abs(policy.group_key("a") - (0.7 * (100 + 200) + 0.3 * (100 + 50))) < 0.02
    assert policy.group_key("b") == 0.0
