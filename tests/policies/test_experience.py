"""What is a stream worth to its reader, and whom do Andes, JITServe and PolyServe serve for it?"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.routing_views import Request, context, replicas
from vajra_policies.slo.andes import Andes, AndesConfig
from vajra_policies.slo.jitserve import Jitserve, JitserveConfig
from vajra_policies.slo.polyserve import Polyserve, PolyserveConfig
from vajra_policies.slo.reading import Reading
from vajra_policies.slo.tiers import TierConfig, Tiers
from vajra_py.contract import EndedStep, LengthEstimate
from vajra_py.latency import AffineModel
from vajra_py.testing.harness import Harness, HarnessOptions

# Quality of experience


def read(times: list[float], speed: float = 2.0, ttft_s: float = 1.0) -> Reading:
    reading = Reading(speed, ttft_s)
    for at in times:
        reading.receive(at, 1)
    return reading


def test_three_tokens_by_hand() -> None:
    # Read at 2 tokens a second from 1 s on; the second one comes at 2 s, half a second late, the third one at 4 s.
    reading = read([1.0, 2.0, 4.0])
    # From 1 s: one token read by 1.5 s (area 0.25), 0.5 s of waiting (0.5); from 2 s: the second by 2.5 s (0.75), 1.5 s of waiting (3).
    assert reading.area == pytest.approx(0.25 + 0.5 + 0.75 + 3.0)
    # Expected: 2 (t - 1) up to 3 tokens at 2.5 s (2.25), then 3 tokens for 1.5 s.
    assert reading.expected_area(4.0, 3) == pytest.approx(2.25 + 4.5)
    assert reading.qoe() == pytest.approx(4.5 / 6.75)


@given(st.integers(1, 30), st.floats(0.2, 20.0), st.floats(0.0, 3.0), st.floats(0.0, 1.0))
def test_a_stream_that_is_never_late_is_perfect_however_early_it_is(
    num_tokens: int, speed: float, ttft_s: float, haste: float
) -> None:
    times = [ttft_s + index / speed for index in range(num_tokens)]
    assert read(times, speed, ttft_s).qoe() == pytest.approx(1.0)
    early = [haste * at for at in times]
    assert read(early, speed, ttft_s).qoe() == pytest.approx(1.0)


steady = st.tuples(st.floats(0.1, 5.0), st.floats(0.0, 5.0), st.floats(0.0, 10.0), st.integers(0, 8))


@given(steady, st.floats(0.5, 6.0))
def test_what_will_be_read_is_the_integral_step_by_step(case: tuple[float, float, float, int], speed: float) -> None:
    seconds, delay_s, rate, num_buffered = case
    reading = Reading(speed, 0.0, num_tokens=num_buffered)
    come, done, area, span = float(num_buffered), 0.0, 0.0, seconds / 4000
    for index in range(4000):
        come += rate * span if index * span >= delay_s else 0.0
        more = min(speed * span, come - done)
        area += (done + more / 2) * span
        done += more
    assert reading.area_after(seconds, delay_s, rate) == pytest.approx(area, rel=0.01, abs=0.02)


def test_a_reader_with_tokens_in_store_gives_way_to_one_who_waits() -> None:
    options = HarnessOptions(max_batch_size=1, latency=AffineModel(0.05))
    one = Harness(("andes", {"reading_speed": 2.0, "horizon_s": 2.0}), "round_robin", "preemptive", options)
    one.submit("first", 10, 60)
    for _ in range(30):
        one.step()
    assert one.request("first").num_output_tokens == 30, "15 s of reading in 1.5 s"
    one.submit("second", 10, 60)
    served = [next(iter(step.tokens)) for step in (one.step() for _ in range(5)) if step is not None]
    assert set(served) == {"second"}, "until it has enough in store too"
    one.steps_until_idle()
    assert one.request("first").num_preemptions == 0


def test_those_that_run_stay_once_the_cap_of_preemptions_is_reached() -> None:
    policy = Andes(AndesConfig(preemption_cap=1.0), SimpleNamespace(remaining_s=lambda prompt, done: 0.0))  # type: ignore[arg-type]
    facts = {"num_known_tokens": 10, "num_computed_tokens": 9, "num_remaining_tokens": 1, "num_output_tokens": 0}
    facts |= {"arrived_at": 0.0, "tpot_slo_s": None, "tbt_slo_s": None, "ttft_slo_s": None}
    runs: Any = SimpleHashable(**facts, is_resident=True)
    waits: Any = SimpleHashable(**facts, is_resident=False)
    policy.on_arrivals([runs, waits], 0.0)
    policy.on_preemption(waits, 0, 0.0)
    policy.on_preemption(waits, 0, 0.0)
    assert policy.key(runs, 1.0) == policy.key(waits, 1.0)
    policy.on_preemption(waits, 0, 0.0)
    assert policy.key(runs, 1.0)[0] < policy.key(waits, 1.0)[0]


def test_the_gain_is_what_is_read_more_within_the_horizon() -> None:
    prefill: Any = SimpleNamespace(remaining_s=lambda prompt, done: (prompt - done) / 10)
    policy = Andes(AndesConfig(reading_speed=2.0, expected_ttft_s=1.0, horizon_s=2.0, first_step_s=0.25), prefill)
    facts = {"arrived_at": 0.0, "tpot_slo_s": None, "tbt_slo_s": None, "ttft_slo_s": None, "is_resident": True}
    decodes: Any = SimpleHashable(
        **facts, num_known_tokens=10, num_computed_tokens=9, num_remaining_tokens=1, num_output_tokens=1
    )
    # Its token comes at 1 s and has been read half by 1.25 s; from then on, tokens come faster than they are read.
    policy.on_step_end(EndedStep(0, 0, 0.75, 1.0, [decodes], [1]))
    expected = 2.0 * 2.25**2 / 2  # from 1 s to 3.25 s
    read_anyway = 0.25 + 1.75  # one token by 1.5 s
    assert policy.key(decodes, 1.25)[1] * 10 == pytest.approx(-(expected - read_anyway) / expected)
    prompt: Any = SimpleHashable(
        **facts, num_known_tokens=10, num_computed_tokens=0, num_remaining_tokens=10, num_output_tokens=0
    )
    # At 1 s, the prompt takes 1 s more, and then one second of reading is left of the horizon.
    assert policy.key(prompt, 1.0)[1] * 10 == pytest.approx(-(2.0 * 1.0**2 / 2) / (2.0 * 2.0**2 / 2))


class SimpleHashable(SimpleNamespace):
    """Facts by name; equal only to itself."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


# JITServe


@dataclass(eq=False)
class Call:
    """What JITServe reads of a request; `length` is what is predicted."""

    length: float = 100.0
    num_prompt_tokens: int = 200
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    arrived_at: float = 0.0
    deadline_at: float | None = None
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    tpot_slo_s: float | None = None
    program: Any = None


def jitserve(**params: Any) -> Jitserve:
    lengths = SimpleNamespace(predict=lambda one: LengthEstimate(1.0, 1.0, one.length))
    prefill = SimpleNamespace(remaining_s=lambda prompt, done: (prompt - done) / 1000)
    services: Any = SimpleNamespace(output_lengths=lengths, prefill_time=prefill)
    return Jitserve(JitserveConfig(**params), services)


@pytest.mark.parametrize(
    ("facts", "reward"),
    [
        ({}, 200 + 8 * 100),
        ({"deadline_at": 100.0}, 200 + 8 * 100),
        ({"deadline_at": 1.5}, (200 + 8 * 100) * 1.5 / 3.0),  # 1 s has passed, 100 tokens take 2 s
        ({"ttft_slo_s": 0.6}, 200 * 0.6 / 1.2 + 8 * 100),  # 1 s has passed, the prompt takes 0.2 s
        ({"ttft_slo_s": 9.0, "tbt_slo_s": 0.01}, 200 + 8 * 100 * 0.5),  # a step takes 20 ms
        ({"ttft_slo_s": 0.6, "num_output_tokens": 50}, 200 + 8 * 100),
    ],
)
def test_priority_is_reward_over_remaining_time(facts: dict[str, Any], reward: float) -> None:
    request: Any = Call(**facts)
    remaining_s = (100 - request.num_output_tokens) * 0.02
    assert -jitserve().key(request, 1.0) == pytest.approx(reward / remaining_s)


def test_the_assumed_step_time_counts_until_steps_have_ended_and_no_longer() -> None:
    policy = jitserve(refresh_steps=1, first_step_s=9.0)
    for duration_s in (0.04, 0.06):
        policy.on_step_end(EndedStep(0, 0, 0.0, duration_s, [], []))
    request: Any = Call()
    assert -policy.key(request, 0.0) == pytest.approx((200 + 8 * 100) / (100 * 0.05))


def test_calls_of_a_program_with_a_deadline_count_together() -> None:
    program = SimpleHashable(deadline_at=5.0, arrived_at=0.0)
    policy = jitserve()
    calls: list[Any] = [Call(length=50.0, program=program), Call(length=300.0, program=program)]
    policy.on_arrivals(calls, 0.0)
    reward = (200 + 8 * 50 + 200 + 8 * 300) * 5.0 / (1.0 + 6.0)
    assert [-policy.key(one, 1.0) for one in calls] == pytest.approx([reward / 6.0] * 2)


@given(st.lists(st.tuples(st.floats(1, 500), st.integers(1, 4000)), min_size=2, max_size=6), st.floats(1.1, 4.0))
def test_the_power_of_lateness_changes_nothing_among_those_in_time(
    sizes: list[tuple[float, int]], power: float
) -> None:
    calls: list[Any] = [Call(length, prompt, deadline_at=1e6) for length, prompt in sizes]
    plain, steep = jitserve(), jitserve(lateness_power=power)
    assert [plain.key(one, 2.0) for one in calls] == [steep.key(one, 2.0) for one in calls]


# PolyServe


def polyserve(num_replicas: int = 4, **params: Any) -> Polyserve:
    """A decode step of n requests takes 5 ms and 5 ms each; prompts 0.1 ms a token."""
    latency = AffineModel(0.005, 0.0001, per_request_s=0.005)
    return Polyserve(
        PolyserveConfig(tiers_s=(0.02, 0.1), **params), context(num_replicas, latency=latency, num_blocks=1000)
    )


def place(policy: Polyserve, loads: list[int], **facts: Any) -> int | None:
    """Place a request where each replica runs so many; the load is counted on."""
    views = replicas(num_running=loads, num_context_tokens=[100 * one for one in loads], num_blocks=[1000] * len(loads))
    chosen = policy.assign(Request(100, **facts), views, 0.0)  # type: ignore[arg-type]
    if chosen is not None:
        loads[chosen] += 1
    return chosen


def test_a_tier_fills_one_replica_before_it_takes_the_next() -> None:
    policy, loads = polyserve(), [0] * 4
    tight = [place(policy, loads, tpot_slo_s=0.02) for _ in range(5)]
    # 5 + 5 n + 0.1 n ms <= 20 ms: two at most
    assert tight == [0, 0, 1, 1, 2]
    assert place(policy, loads, tpot_slo_s=0.1) == 2, "a looser one may share it"
    assert place(policy, loads, tpot_slo_s=0.1) == 3
    assert place(policy, loads, tpot_slo_s=0.02) is None, "a tight one may not join a looser tier, and nobody is idle"


def test_a_first_token_that_would_be_late_behind_others_goes_elsewhere() -> None:
    policy = polyserve(2)
    busy = replicas(num_running=[1, 0], num_context_tokens=[100, 0], num_pending_tokens=[900, 0], num_blocks=[1000] * 2)
    assert policy.assign(Request(100), replicas(num_running=[0, 0]), 0.0) == 0  # type: ignore[arg-type]
    assert policy.assign(Request(100, ttft_slo_s=0.5), busy, 0.0) == 0  # type: ignore[arg-type]
    assert policy.assign(Request(100, ttft_slo_s=0.05), busy, 0.0) == 1  # type: ignore[arg-type]


def test_a_cached_prefix_leaves_less_to_compute_before_the_first_token() -> None:
    # 256 tokens are left of the prompt, and as many wait before it: 51.2 ms.
    busy = replicas(
        num_running=[1], num_context_tokens=[100], num_pending_tokens=[256], num_blocks=[1000], hit_tokens=[256]
    )
    for ttft_slo_s, is_kept in ((0.052, True), (0.051, False)):
        asked: Any = Request(512, ttft_slo_s=ttft_slo_s, tpot_slo_s=0.1)
        tiers = Tiers(TierConfig(tiers_s=(0.1,)), context(latency=AffineModel(0.0, 0.0001), num_blocks=1000))
        assert tiers.keeps(asked, busy[0], 0, 0.0, is_attainable=True) is is_kept


def test_a_peak_that_fills_memory_to_the_last_token_fits() -> None:
    tiers = Tiers(TierConfig(tiers_s=(0.1,), default_output_tokens=60.0), context(latency=AffineModel(0.001)))
    asked: Any = Request(100)
    sizes = {10: True, 9: False}  # blocks of 16 tokens, for a prompt of 100 and an output of 60
    views = replicas(num_blocks=list(sizes))
    assert [tiers.keeps(asked, one, 0, 0.0, is_attainable=False) for one in views] == list(sizes.values())


def test_a_replica_without_requests_is_idle_again_and_who_waits_is_pulled() -> None:
    policy, loads = polyserve(1), [0]
    first: Any = Request(100, tpot_slo_s=0.02)
    views = replicas(num_running=[2], num_context_tokens=[200], num_blocks=[1000])
    assert policy.assign(first, replicas(num_running=[0]), 0.0) == 0
    waiting: Any = Request(100, tpot_slo_s=0.02)
    assert policy.assign(waiting, views, 0.0) is None
    assert list(policy.pull(views[0], [waiting], 0.0)) == []  # type: ignore[arg-type]
    policy.on_departures([first], 1.0)
    assert list(policy.pull(replicas(num_running=[0])[0], [waiting], 1.0)) == ["r"]
    assert loads == [0]


def test_a_replica_that_pulls_a_request_whose_slos_nothing_meets_joins_the_loosest_tier() -> None:
    policy, idle = polyserve(1), replicas(num_running=[0])
    late: Any = Request(100, ttft_slo_s=1e-6, tpot_slo_s=0.02)
    assert list(policy.pull(idle[0], [late], 0.0)) == ["r"]  # type: ignore[arg-type]
    policy.on_admission(late, 0, 0.0)
    busy = replicas(num_running=[1], num_context_tokens=[100], num_blocks=[1000])
    for tpot_slo_s, chosen in ((0.02, None), (0.1, 0)):
        assert policy.assign(Request(100, tpot_slo_s=tpot_slo_s), busy, 0.0) == chosen  # type: ignore[arg-type]
