"""Who goes first under each prioritizer, as its formula says, on the real queues?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_policies.edf import Edf, EdfConfig
from vajra_policies.fcfs import Fcfs, FcfsConfig
from vajra_policies.lrs import Lrs, LrsConfig
from vajra_policies.priority import Priority, PriorityConfig
from vajra_py.contract import KeyMotion, RequestPrioritizer, TimeLinearPrioritizer
from vajra_py.errors import ConfigError
from vajra_py.latency import AffineModel
from vajra_py.testing.harness import Harness, HarnessOptions


class LinearPrefill:
    """A prompt takes 1 ms a token."""

    def total_s(self, num_prompt_tokens: int) -> float:
        return num_prompt_tokens / 1000

    def remaining_s(self, num_prompt_tokens: int, num_done_tokens: int) -> float:
        return max(0, num_prompt_tokens - num_done_tokens) / 1000


def request(num_prompt_tokens: int, arrived_at: float = 0.0, **facts: Any) -> Any:
    defaults: dict[str, Any] = {"num_computed_tokens": 0, "deadline_at": None, "ttft_slo_s": None, "priority": 0}
    defaults |= {"num_prompt_tokens": num_prompt_tokens, "arrived_at": arrived_at, "preempted_index": 0}
    return SimpleNamespace(**defaults | facts)


def test_all_are_prioritizers() -> None:
    prefill = LinearPrefill()
    policies: list[RequestPrioritizer] = [Fcfs(FcfsConfig()), Edf(EdfConfig(), prefill), Priority(PriorityConfig())]
    linear: TimeLinearPrioritizer = Lrs(LrsConfig(), prefill)
    assert [one.key_motion for one in (*policies, linear)] == [*[KeyMotion.STATIC] * 3, KeyMotion.TIME_LINEAR]
    assert all(isinstance(one, RequestPrioritizer) for one in (*policies, linear))
    assert isinstance(linear, TimeLinearPrioritizer)


# Deadlines


def test_a_deadline_is_the_prefill_time_with_the_multiplier_and_never_too_short() -> None:
    edf = Edf(EdfConfig(), LinearPrefill())
    assert edf.key(request(10_000, arrived_at=3.0), 99.0) == pytest.approx(3.0 + 15.0)
    assert edf.key(request(400, arrived_at=3.0), 99.0) == pytest.approx(3.0 + 0.6), "the multiplier is not lost"
    assert edf.key(request(100, arrived_at=3.0), 99.0) == pytest.approx(3.5)


def test_deadline_parameters() -> None:
    edf = Edf(EdfConfig(deadline_multiplier=4.0, min_deadline_s=0.01), LinearPrefill())
    assert edf.key(request(100), 0.0) == pytest.approx(0.4)
    assert edf.key(request(1), 0.0) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("facts", "relative_s"),
    [
        ({}, 1.5),
        ({"deadline_at": 12.0}, 2.0),
        ({"ttft_slo_s": 0.2}, 0.2),
        ({"deadline_at": 12.0, "ttft_slo_s": 0.2}, 0.2),
        ({"deadline_at": 10.1, "ttft_slo_s": 0.2}, 0.1),
        ({"deadline_at": 9.0}, 0.001),
    ],
)
def test_own_slos_replace_the_formula_when_asked_for(facts: dict[str, float], relative_s: float) -> None:
    one = request(1000, arrived_at=10.0, **facts)
    own = EdfConfig(use_request_deadlines=True)
    assert Edf(own, LinearPrefill()).key(one, 0.0) == pytest.approx(10.0 + relative_s)
    assert Edf(EdfConfig(), LinearPrefill()).key(one, 0.0) == pytest.approx(11.5)


def test_prefill_times_are_those_of_the_chunks_that_the_scheduler_would_make() -> None:
    options = HarnessOptions(latency=AffineModel(base_s=0.5))
    for chunk_size, num_steps in ((256, 4), (500, 3), (2048, 1)):
        harness = Harness("edf", "round_robin", ("fixed_chunk", {"chunk_size": chunk_size}), options)
        harness.wait(7.0)
        key = harness.prioritizer.key(harness.submit("a", 1000), 0.0)
        assert key == pytest.approx(7.0 + 1.5 * 0.5 * num_steps)


# Slack


def test_relative_slack() -> None:
    lrs = Lrs(LrsConfig(), LinearPrefill())
    one = request(1000, arrived_at=2.0)  # D = 1.5
    assert lrs.key(one, 2.0) == pytest.approx(1 / 3)
    assert lrs.key(one, 2.5) == pytest.approx(0.0)
    assert lrs.key(one, 4.0) == pytest.approx(-1.0)
    half_done = request(1000, arrived_at=2.0, num_computed_tokens=500)
    assert lrs.key(half_done, 2.0) == pytest.approx((1.5 - 0.5) / 1.5)
    decoding = request(1000, arrived_at=2.0, num_computed_tokens=1007)
    assert lrs.key(decoding, 2.0) == pytest.approx(1.0)


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.floats(0, 1e5), st.floats(0, 1e5))
def test_slack_is_the_line_that_it_claims_to_be(prompt: int, computed: int, arrived_at: float, now: float) -> None:
    lrs = Lrs(LrsConfig(), LinearPrefill())
    one = request(prompt, arrived_at=arrived_at, num_computed_tokens=computed)
    intercept, slope = lrs.line(one)
    assert lrs.key(one, now) == intercept + slope * now
    deadline_s = max(1.5 * prompt / 1000, 0.5)
    remaining_s = max(0, prompt - computed) / 1000
    assert lrs.key(one, now) == pytest.approx((arrived_at + deadline_s - now - remaining_s) / deadline_s, abs=1e-6)


def harness_with_slack() -> Harness:
    """LRS where only deadlines matter: a step takes next to no time."""
    options = HarnessOptions(max_batch_size=1, latency=AffineModel(base_s=1e-9))
    return Harness(("lrs", {"use_request_deadlines": True}), "round_robin", "fixed_chunk", options)


def test_two_waiting_requests_change_places_as_time_passes() -> None:
    """A (D = 1 s) has slack 0.9, B (D = 100 s) has 50: B is first, and half a second later A is."""
    harness = harness_with_slack()
    harness.submit("B", 16, 1, ttft_slo_s=100.0)
    harness.wait(50.0)
    harness.submit("A", 16, 1, ttft_slo_s=1.0)
    harness.wait(0.1)
    assert harness.waiting() == ["B", "A"]
    keys = {one: harness.prioritizer.key(harness.request(one), harness.now) for one in "AB"}
    assert keys == pytest.approx({"A": 0.9, "B": 0.5}, abs=0.01)
    harness.wait(0.5)
    assert harness.waiting() == ["A", "B"], "a heap that was ordered when they were pushed would say B"
    step = harness.step()
    assert step is not None
    assert step.admitted == ["A"]


def test_a_long_prompt_that_waited_its_share_goes_before_new_short_ones() -> None:
    harness = harness_with_slack()
    harness.submit("long", 64, 1, ttft_slo_s=10.0)
    harness.wait(9.0)
    harness.submit("short", 16, 1, ttft_slo_s=1.0)
    assert harness.waiting() == ["long", "short"]


# Arrival and priority


def test_fcfs_goes_by_arrival_and_then_by_submission() -> None:
    harness = Harness("fcfs", "round_robin", "fixed_chunk", HarnessOptions(max_batch_size=1))
    for name in "cab":
        harness.submit(name, 10)
    harness.wait(1.0)
    harness.submit("later", 10)
    assert harness.waiting() == ["c", "a", "b", "later"]


@pytest.mark.parametrize(
    ("preempted", "order", "motion"),
    [("by_arrival", ["a", "c", "new"], KeyMotion.STATIC), ("first", ["c", "a", "new"], KeyMotion.PROGRESS)],
)
def test_where_preempted_requests_go(preempted: str, order: list[str], motion: KeyMotion) -> None:
    harness = Harness(("fcfs", {"preempted": preempted}), "round_robin", PreemptsInItsSecondStep("a", "c"))
    for name in "abc":
        harness.submit(name, 20, 9)
        harness.wait(0.1)
    harness.step()
    harness.submit("new", 20)
    step = harness.step()
    assert step is not None
    assert step.preempted == (("a", "recompute"), ("c", "recompute"))
    assert harness.waiting() == order
    assert harness.prioritizer.key_motion is motion


class PreemptsInItsSecondStep:
    """Admits everything in its first step; in the second, named requests are preempted and the others decode."""

    def __init__(self, *victims: str) -> None:
        self._victims = victims
        self._num_steps = 0

    def schedule(self, replica: Any, batch: Any, now: float) -> None:
        self._num_steps += 1
        if self._num_steps == 1:
            for one in list(replica.waiting()):
                batch.add(one, one.num_remaining_tokens)
            return
        running = {one.request_id: one for one in replica.running()}
        for name in self._victims:
            batch.preempt(running[name])
        batch.add_decodes()


def test_user_priority_lower_first_then_arrival() -> None:
    harness = Harness("priority", "round_robin", "fixed_chunk", HarnessOptions(max_batch_size=1))
    for name, priority in [("mid", 5), ("late_urgent", -3), ("urgent", -3), ("mid2", 5), ("plain", 0)]:
        harness.submit(name, 10, priority=priority)
    assert harness.waiting() == ["late_urgent", "urgent", "plain", "mid", "mid2"]


def test_lars_is_another_name_of_lrs() -> None:
    assert isinstance(Harness("lars", "pull", "fixed_chunk").prioritizer, Lrs)


@pytest.mark.parametrize(
    ("policy", "params"),
    [
        ("edf", {"deadline_multiplier": 0}),
        ("lrs", {"min_deadline_s": 0.0}),
        ("lrs", {"min_deadline_s": float("inf")}),
        ("fcfs", {"preempted": "last"}),
        ("priority", {"weight": 1}),
    ],
)
def test_wrong_parameters_are_refused(policy: str, params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(params))):
        Harness((policy, params), "pull", "fixed_chunk")
