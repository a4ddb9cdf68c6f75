"""QoServe, SlidingServe, Past-Future, HyGen and SCORPIO against their formulas, step by step."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, combinations
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_policies.slo.past_future import peak_tokens
from vajra_policies.slo.qoserve import Qoserve, QoserveConfig
from vajra_policies.slo.windows import first_of_two, most_in_time
from vajra_py.contract import EndedStep
from vajra_py.contract.observer import EndReason
from vajra_py.errors import ConfigError
from vajra_py.latency import AffineModel
from vajra_py.latency.services.output_length import OracleLengths
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.testing.harness import Harness, HarnessOptions, Step
from vajra_py.workload.request import PromptContent, RequestSpec


def step(one: Harness) -> Step:
    done = one.step()
    assert done is not None
    return done


# QoServe


def first_served(prioritizer: Any, requests: dict[str, dict[str, Any]], **options: Any) -> list[str]:
    one = Harness(
        prioritizer, "round_robin", "fixed_chunk", HarnessOptions(max_batch_size=1, num_blocks=999, **options)
    )
    for name, facts in requests.items():
        one.submit(name, facts.pop("prompt"), 1, **facts)
    return [name for each in one.steps_until_idle() for name in each.admitted]


@pytest.mark.parametrize(("alpha_s", "order"), [(0.0, ["soon", "small", "late"]), (1.0, ["small", "late", "soon"])])
def test_alpha_mixes_deadline_and_length(alpha_s: float, order: list[str]) -> None:
    requests = {
        "late": {"prompt": 200, "ttft_slo_s": 60.0},
        "soon": {"prompt": 400, "ttft_slo_s": 20.0},
        "small": {"prompt": 50, "ttft_slo_s": 30.0},
    }
    assert first_served(("qoserve", {"alpha_s": alpha_s}), requests) == order


def test_a_deadline_leaves_time_for_the_expected_output() -> None:
    requests = {"end": {"prompt": 10, "deadline_s": 10.0}, "first": {"prompt": 10, "ttft_slo_s": 6.0}}
    assert first_served(("qoserve", {"expected_output_tokens": 15, "batch_tbt_s": 0.4}), dict(requests)) == [
        "end",
        "first",
    ]
    requests = {"end": {"prompt": 10, "deadline_s": 10.1}, "first": {"prompt": 10, "ttft_slo_s": 4.0}}
    assert first_served("qoserve", dict(requests)) == ["first", "end"]


def test_who_is_late_anyway_goes_behind_all_that_can_be_in_time() -> None:
    requests = {
        "lost": {"prompt": 900, "ttft_slo_s": 0.05},
        "tight": {"prompt": 100, "ttft_slo_s": 0.5},
        "loose": {"prompt": 100, "ttft_slo_s": 50.0},
    }
    params = {"first_throughput": 10_000.0}
    assert first_served(("qoserve", params), {name: dict(one) for name, one in requests.items()}) == [
        "tight",
        "loose",
        "lost",
    ]
    plain = ("qoserve", {**params, "relegates": False, "alpha_s": 0.0})
    assert first_served(plain, requests) == ["lost", "tight", "loose"]


@dataclass(eq=False)
class Prompt:
    """The facts of a waiting request that relegation reads."""

    request_id: str
    num_remaining_prompt_tokens: int
    arrived_at: float = 0.0
    ttft_slo_s: float = 1.0
    is_resident: bool = False
    num_output_tokens: int = 0


def test_relegation_is_taken_back_where_the_throughput_rises_in_time_and_is_named() -> None:
    policy = Qoserve(QoserveConfig(first_throughput=1000.0, decay=0.0, alpha_s=0.0))
    small, large = (Prompt(name, num_tokens) for name, num_tokens in (("small", 900), ("large", 5000)))
    keys = [policy.key(cast(Any, one), 0.2) for one in (small, large)]
    assert keys == [(1.0, 1.0), (1.0, 1.0)]
    policy.on_step_end(EndedStep(0, 0, 0.2, 0.3, (cast(Any, large),), (200,)))  # 2,000 tokens a second
    assert policy.fallen_requests.since(0) == ["small", "large"]
    assert [policy.key(cast(Any, one), 0.3)[0] for one in (small, large)] == [0.0, 1.0]
    policy.on_step_end(EndedStep(0, 1, 1.0, 1.1, (cast(Any, large),), (900,)))
    assert policy.fallen_requests.num_named == 2, "their time is over"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0.02, 0.2), st.integers(5, 30)), min_size=1, max_size=5), st.integers(100, 6000))
def test_a_chunk_keeps_the_tightest_decode_in_time_unless_even_the_smallest_does_not(
    decodes: list[tuple[float, int]], prompt: int
) -> None:
    latency = AffineModel(0.01, 0.0001)
    one = Harness(
        "fcfs", "round_robin", "slack_chunk", HarnessOptions(num_blocks=999, max_batch_size=16, latency=latency)
    )
    for index, (tbt_s, num_tokens) in enumerate(decodes):
        one.submit(f"d{index}", 10, num_tokens, tbt_slo_s=tbt_s, ttft_slo_s=0.05)
    step(one)
    step(one)
    one.submit("prompt", prompt, 1)
    while one.request("prompt").end_reason is None:
        formed_at = one.now
        due = [
            max(live.first_token_at, 0.05) + live.num_output_tokens * decodes[index][0]
            for index in range(len(decodes))
            if (live := one.request(f"d{index}")).end_reason is None and live.first_token_at is not None
        ]
        done = step(one)
        if "prompt" in done.tokens and done.num_tokens > 128:
            assert 1.2 * done.duration_s <= min(due, default=float("inf")) - formed_at + 1e-9


# SlidingServe


@settings(max_examples=150, deadline=None)
@given(
    st.tuples(st.floats(0.005, 0.03), st.floats(1e-5, 2e-4), st.integers(0, 600)),
    st.floats(0.0, 0.3),
    st.floats(0.0, 0.4),
    st.integers(1, 40),
)
def test_the_window_computes_as_much_as_exhaustive_search_finds_to_a_grain(
    model: tuple[float, float, int], s_1: float, more_s: float, num_sizes: int
) -> None:
    """Step times with a floor, as where memory limits them: the case in which two small chunks beat a large one."""
    base_s, token_s, free = model
    s_2, sizes = s_1 + more_s, range(32, 32 * num_sizes + 1, 32)

    def time_s(chunk: int) -> float:
        return base_s + token_s * max(chunk - free, 0)

    def total(c_1: int) -> int:
        return c_1 + max((c_2 for c_2 in (0, *sizes) if time_s(c_1) + time_s(c_2) <= s_2), default=0)

    allowed = [c_1 for c_1 in sizes if time_s(c_1) <= s_1 and time_s(c_1) + time_s(0) <= s_2]
    found = first_of_two(time_s, lambda c_1, c_2: time_s(c_2), s_1, s_2, sizes)
    if not allowed:
        assert found is None
    else:
        assert found in allowed
        assert total(found) >= max(map(total, allowed)) - 32


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), max_size=7))
def test_as_many_prompts_are_in_time_as_in_the_best_choice(jobs: list[tuple[int, int]]) -> None:
    def in_time(chosen: Iterable[int]) -> bool:
        ends = accumulate(jobs[one][1] for one in sorted(chosen, key=lambda one: jobs[one][0]))
        return all(end <= due for end, due in zip(ends, sorted(jobs[one][0] for one in chosen), strict=True))

    chosen = most_in_time(jobs)
    assert in_time(chosen)
    sizes = [
        size for size in range(len(jobs) + 1) if any(in_time(some) for some in combinations(range(len(jobs)), size))
    ]
    assert len(chosen) == max(sizes)


def test_sliding_serve_leaves_time_for_the_next_step_and_gives_up_who_is_late_anyway() -> None:
    """Step times of 5 ms and 100 us a token: nearly 60 ms for two tokens of the decode, of which a greedy chunk could take all but nothing."""
    latency = AffineModel(0.005, 0.0001)
    options = HarnessOptions(num_blocks=999, max_batch_size=16, latency=latency, max_model_len=4000)
    one = Harness("fcfs", "round_robin", ("sliding_serve", {"safety_factor": 1.0, "max_chunk": 512}), options)
    one.submit("decode", 10, 500, tbt_slo_s=0.03, ttft_slo_s=0.05)
    step(one)
    one.submit("long", 3000, 2, ttft_slo_s=0.1)
    one.submit("short", 100, 2, ttft_slo_s=0.1)
    begun, live = [], one.request("decode")
    while one.request("long").end_reason is None:
        begun += [name for name in step(one).tokens if name != "decode"]
        assert live.last_token_at is not None
        assert live.last_token_at <= 0.05 + 0.03 * (live.num_output_tokens - 1) + 1e-9
    assert begun[0] == "short"


def test_a_decode_is_due_at_the_same_time_whenever_it_is_first_seen() -> None:
    """Its first ten tokens came faster than its SLO asks for, so that there is time for a large chunk."""
    chunks = {}
    for has_company in (True, False):
        one = Harness("fcfs", "round_robin", "slack_chunk", HarnessOptions(num_blocks=999))
        one.submit("decode", 10, 500, tbt_slo_s=0.05)
        step(one)
        if has_company:
            one.submit("company", 10, 1)
        for _ in range(10):
            step(one)
        one.submit("long", 6000, 1)
        chunks[has_company] = step(one).tokens["long"]
    assert chunks[True] == chunks[False] > 1000


def test_chunks_of_sliding_serve_are_within_their_limits() -> None:
    with pytest.raises(ConfigError, match="min_chunk 128, grain 32, max_chunk 64"):
        Harness("fcfs", "round_robin", ("sliding_serve", {"max_chunk": 64}))
    for tbt_slo_s in (0.0135, 0.02, 0.04):
        one = Harness("fcfs", "round_robin", "sliding_serve", HarnessOptions(num_blocks=999))
        one.submit("decode", 10, 500, tbt_slo_s=tbt_slo_s, ttft_slo_s=0.01)
        step(one)
        one.submit("long", 6000, 1)
        assert step(one).tokens["long"] >= 128


def test_the_time_of_a_prompt_is_that_of_chunks_that_have_nothing_before_them() -> None:
    """Ten milliseconds a pair: two tokens have three pairs and so take 30 ms, and 20 tokens ten times as long."""
    latency = AffineModel(0.0, per_prefill_pair_s=0.01)
    params = {"safety_factor": 1.0, "min_chunk": 1, "max_chunk": 2, "grain": 1}
    one = Harness("fcfs", "round_robin", ("sliding_serve", params), HarnessOptions(latency=latency))
    one.submit("long", 16, 2, ttft_slo_s=0.301)
    one.submit("short", 4, 2, ttft_slo_s=0.301)
    assert step(one).tokens == {"long": 2}, "both can be in time, so that nobody is passed over"


# Past-Future


def peak_by_steps(entries: list[tuple[int, int]]) -> int:
    """The peak by going through the steps: each holds a, and b more come; who has none left is gone."""
    return max(sum(a + now for a, b in entries if b >= now) for now in range(max(b for _, b in entries) + 1))


def test_the_formula_is_the_peak_of_twenty_thousand_random_batches() -> None:
    stream = random.Random(7)
    for _ in range(20_000):
        entries = [(stream.randint(1, 40), stream.randint(0, 20)) for _ in range(stream.randint(1, 6))]
        assert peak_tokens(entries) == peak_by_steps(entries), entries


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(2, 40)), min_size=1, max_size=8))
def test_the_formula_is_the_peak_of_memory_of_a_real_batch(requests: list[tuple[int, int]]) -> None:
    """Blocks of one token, all admitted in one step: the last token of a request is never held."""
    one = Harness("fcfs", "round_robin", "fixed_chunk", HarnessOptions(block_size=1, num_blocks=2000, max_batch_size=8))
    for index, (prompt, output) in enumerate(requests):
        one.submit(f"r{index}", prompt, output)
    steps = one.steps_until_idle()
    peak = max(2000 - each.free_blocks for each in steps)
    assert peak == peak_tokens((prompt, output - 1) for prompt, output in requests)


def test_with_the_true_lengths_nobody_is_evicted_and_memory_is_used() -> None:
    specs = [RequestSpec(f"r{index}", 0.0, 30 + index % 7, 20 + 3 * (index % 11)) for index in range(40)]
    evictions, held = {}, {}
    for name, batcher in (
        ("predicted", ("past_future", {"lengths": "predicted", "reserve_fraction": 0.0})),
        ("longest", ("past_future", {"lengths": "longest", "reserve_fraction": 0.0})),
        ("greedy", "fixed_chunk"),
    ):
        lengths = OracleLengths({spec.request_id: spec.num_output_tokens for spec in specs})
        options = HarnessOptions(
            num_blocks=400, block_size=1, max_batch_size=40, output_lengths=lengths, max_model_len=200
        )
        one = Harness("fcfs", "round_robin", batcher, options)
        one.run(specs)
        evictions[name] = sum(one.request(spec.request_id).num_preemptions for spec in specs)
        held[name] = sum(400 - each.free_blocks for each in one.steps) / len(one.steps)
    assert evictions["predicted"] == evictions["longest"] == 0 < evictions["greedy"]
    assert held["longest"] < held["predicted"]


def test_a_peak_that_fills_memory_to_the_last_block_is_let_in() -> None:
    # Two blocks for a prompt, one for its output, of each of the two.
    options = HarnessOptions(num_blocks=6, block_size=16)
    one = Harness("fcfs", "round_robin", ("past_future", {"lengths": "longest", "reserve_fraction": 0.0}), options)
    for name in ("first", "second"):
        one.submit(name, 17, 16, max_tokens=16)
    assert set(step(one).tokens) == {"first", "second"}


def test_lengths_of_the_past_are_learnt() -> None:
    one = Harness(
        "fcfs",
        "round_robin",
        ("past_future", {"reserve_fraction": 0.0}),
        HarnessOptions(num_blocks=16, max_model_len=250),
    )
    for index in range(5):
        one.submit(f"r{index}", 20, 8)
    num_running = [len(each.tokens) for each in one.steps_until_idle()]
    assert num_running[0] == 1, "at first each may need all of the memory"
    for index in range(5):
        one.submit(f"s{index}", 20, 8)
    assert len(step(one).tokens) == 5


# HyGen


def hygen(budget_s: float, **options: Any) -> Harness:
    latency = AffineModel(0.01, 0.0001)
    params = {"latency_budget_s": budget_s}
    return Harness("priority", "round_robin", ("hygen", params), HarnessOptions(latency=latency, **options))


def test_offline_work_fills_the_budget_and_no_more() -> None:
    one = hygen(0.03, num_blocks=400)
    one.submit("chat", 20, 30, priority=0)
    step(one)
    one.submit("batch", 1000, 2, priority=1)
    tokens = step(one).tokens
    assert tokens == {"chat": 1, "batch": 199}, "10 ms and 200 tokens of 0.1 ms"
    one.submit("urgent", 500, 2, priority=0)
    assert step(one).tokens == {"urgent": 500, "chat": 1}, "what is online takes what it needs"
    assert step(one).tokens == {"chat": 1, "urgent": 1, "batch": 198}


def test_online_requests_take_memory_from_offline_ones() -> None:
    one = hygen(1.0, num_blocks=10)
    one.submit("batch", 100, 40, priority=1)
    step(one)
    one.submit("chat", 60, 5, priority=0)
    done = step(one)
    assert done.preempted == (("batch", "recompute"),)
    assert done.tokens == {"chat": 60}


def test_an_offline_request_alone_is_served_whatever_the_budget() -> None:
    one = hygen(0.001)
    one.submit("batch", 40, 3, priority=1)
    one.steps_until_idle()
    assert one.request("batch").num_output_tokens == 3


# SCORPIO


def test_decodes_run_as_often_as_their_slos_need_exactly() -> None:
    one = Harness("fcfs", "round_robin", "scorpio", HarnessOptions(num_blocks=400))
    for name, tpot_s in (("tight", 0.025), ("middle", 0.05), ("third", 0.075), ("loose", 0.1)):
        one.submit(name, 10, 61, tpot_slo_s=tpot_s)
    step(one)
    runs = [step(one).tokens for _ in range(60)]
    for name, gap in (("tight", 1), ("middle", 2), ("third", 3), ("loose", 4)):
        ran = [index for index, tokens in enumerate(runs) if name in tokens]
        assert ran == list(range(gap - 1, 60, gap)), name


def test_a_prompt_that_would_be_late_is_turned_away_and_those_behind_it_are_not() -> None:
    one = Harness("fcfs", "round_robin", "scorpio", HarnessOptions(num_blocks=999, max_batch_size=1))
    one.submit("first", 1000, 1, ttft_slo_s=0.2)
    one.submit("late", 1000, 1, ttft_slo_s=0.2)
    one.submit("behind", 50, 1, ttft_slo_s=0.2)
    one.steps_until_idle()
    reasons = {name: one.request(name).end_reason for name in ("first", "late", "behind")}
    assert reasons == {"first": EndReason.STOP, "late": EndReason.REJECTED, "behind": EndReason.STOP}


def test_a_prompt_that_its_cached_prefix_brings_in_time_is_not_turned_away() -> None:
    one = Harness("fcfs", "round_robin", "scorpio", HarnessOptions(num_blocks=999, prefix_cache=PrefixCacheOptions()))
    shared = PromptContent((("shared", 4000),))
    one.submit("before", 4000, 2, content=shared)
    one.steps_until_idle()
    one.submit("again", 4000, 2, content=shared, ttft_slo_s=0.1)
    one.submit("other", 4000, 2, ttft_slo_s=0.1)
    one.steps_until_idle()
    assert [one.request(name).end_reason for name in ("again", "other")] == [EndReason.STOP, EndReason.REJECTED]


def test_nobody_is_let_in_who_would_make_decodes_late() -> None:
    latency = AffineModel(0.01, per_request_s=0.004)
    options = HarnessOptions(num_blocks=400, max_batch_size=32, latency=latency)
    admitted = {}
    for name, loose_s in (("all tight", 0.03), ("half loose", 0.06)):
        one = Harness("fcfs", "round_robin", "scorpio", options)
        for index in range(12):
            one.submit(f"r{index}", 10, 30, tpot_slo_s=0.03 if index % 2 else loose_s)
        admitted[name] = len(step(one).tokens)
    assert admitted == {"all tight": 5, "half loose": 7}, "five in each step: 10 ms and 4 ms for each take 30 ms"
