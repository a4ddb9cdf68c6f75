"""Orders by what the cache holds: longest prefix match, PREFLOW, residual shortest job first, and DLPM between them and fairness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from claims_parts import service_gap
from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_policies.fairness.deficits import refill
from vajra_policies.prefixes.longest_prefix_match import LongestPrefixMatch, LongestPrefixMatchConfig
from vajra_policies.prefixes.preflow import Preflow, PreflowConfig, attention_work
from vajra_policies.prefixes.residual_shortest_job import ResidualShortestJob, ResidualShortestJobConfig
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.testing.harness import Harness, HarnessOptions
from vajra_py.workload.request import PromptContent, RequestSpec

SHARED = 64


@dataclass(eq=False)
class Prompt:
    """Attributes of a request that these policies read."""

    num_prompt_tokens: int = 100
    hit: int = 0
    arrived_at: float = 0.0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    admitted_index: int = 0
    num_preemptions: int = 0

    @property
    def is_resident(self) -> bool:
        return self.num_computed_tokens > 0

    @property
    def num_remaining_prompt_tokens(self) -> int:
        return max(self.num_prompt_tokens - self.num_computed_tokens, 0)

    def prefix_hit_tokens(self) -> int:
        return 0 if self.is_resident else self.hit


def content(prefix: str, own: str, num_own: int = 40) -> PromptContent:
    return PromptContent(((prefix, SHARED), (own, num_own)))


def warm(prioritizer: Any, *prefixes: str, **options: Any) -> Harness:
    """One slot, with these prefixes in the cache and a request that runs for a while."""
    sizes = HarnessOptions(max_batch_size=1, num_blocks=200, prefix_cache=PrefixCacheOptions(), **options)
    one = Harness(prioritizer, "round_robin", "fixed_chunk", sizes)
    for prefix in prefixes:
        one.submit(f"warm {prefix}", SHARED + 40, 1, content=content(prefix, f"own {prefix}"), tenant=prefix)
    one.steps_until_idle()
    one.submit("running", 10, 3)
    one.step()
    return one


def admitted(one: Harness) -> list[str]:
    return [name for step in one.steps_until_idle() for name in step.admitted]


# Longest prefix match


@pytest.mark.parametrize(("limit", "order"), [(None, ["hot", "cold"]), (2, ["hot", "cold"]), (1, ["cold", "hot"])])
def test_the_longest_match_goes_first_unless_too_many_wait(limit: int | None, order: list[str]) -> None:
    one = warm(("lpm", {"fcfs_above": limit}), "a")
    one.submit("cold", SHARED + 40, 1, content=content("b", "own cold"))
    one.submit("hot", SHARED + 40, 1, content=content("a", "own hot"))
    assert admitted(one) == order


def test_a_moved_request_waits_again() -> None:
    policy: Any = LongestPrefixMatch(LongestPrefixMatchConfig(fcfs_above=0), num_replicas=1)
    request = Prompt(hit=10)
    policy.on_arrivals([request], 0.0)
    policy.on_admission(request, 0, 0.0)
    epoch = policy.key_epoch()
    policy.on_moved(request, 0, 1, 1.0)
    assert policy.key_epoch() == epoch + 1, "keys by order of arrival"


def test_what_others_compute_meanwhile_counts_as_soon_as_it_is_there() -> None:
    one = warm("lpm", "a")
    for name, prefix in (("b1", "b"), ("c1", "c"), ("a1", "a"), ("b2", "b")):
        one.submit(name, SHARED + 40, 1, content=content(prefix, name))
    assert admitted(one) == ["a1", "b1", "b2", "c1"]


# PREFLOW

prompts = st.builds(
    lambda size, part, ages: Prompt(size, hit=int(size * part), arrived_at=-10.0 * ages),
    st.integers(1, 40_000),
    st.sampled_from([0.0, 0.3, 0.9]),
    st.integers(0, 12),
)


@given(st.lists(prompts, min_size=2, max_size=6), st.integers(0, 100).map(lambda one: 10.0 * one))
def test_keys_stand_in_the_order_of_aged_priorities_at_any_time(requests: list[Prompt], now: float) -> None:
    def product(one: Prompt) -> int:
        left = attention_work(one.num_prompt_tokens) - attention_work(min(one.hit, one.num_prompt_tokens - 1))
        return left * left

    policy = Preflow(PreflowConfig(doubling_s=10.0))
    for one in requests:
        for other in requests:
            ages = [round((now - each.arrived_at) / 10.0) for each in (one, other)]
            # 2^A / (P R), compared as whole numbers
            mine, theirs = 2 ** ages[0] * product(other), 2 ** ages[1] * product(one)
            if mine > theirs * (1 + 1e-9):
                assert policy.key(one, now) < policy.key(other, now)  # type: ignore[arg-type]


def test_what_was_needed_is_frozen_at_admission_and_what_is_left_falls() -> None:
    policy = Preflow(PreflowConfig(doubling_s=1e9))
    half_done: Any = Prompt(1000, num_computed_tokens=500, num_cached_tokens=200, admitted_index=1)
    needed, left = attention_work(1000) - attention_work(200), attention_work(1000) - attention_work(500)
    below, above = (Prompt(size) for size in (920, 922))
    assert attention_work(920) ** 2 < needed * left < attention_work(922) ** 2
    assert policy.key(below, 0.0) < policy.key(half_done, 0.0) < policy.key(above, 0.0)  # type: ignore[arg-type]
    older: Any = Prompt(1000, arrived_at=-1.0)
    assert policy.key(older, 0.0) < policy.key(Prompt(1000), 0.0)  # type: ignore[arg-type]
    decode: Any = Prompt(1000, num_computed_tokens=1000)
    assert policy.key(decode, 0.0) < policy.key(Prompt(1), 0.0)  # type: ignore[arg-type]


# Residual shortest job


@pytest.mark.parametrize(
    ("max_wait_s", "order"),
    [(None, [1, 3, 2, 0]), (0.0, [0, 1, 2, 3]), (3.0, [0, 1, 3, 2])],
    ids=["never", "at once", "after 3 s"],
)
def test_blocks_that_are_left_decide_until_somebody_has_waited_for_too_long(
    max_wait_s: float | None, order: list[int]
) -> None:
    policy = ResidualShortestJob(ResidualShortestJobConfig(max_wait_s=max_wait_s), 16)
    waiting: list[Any] = [
        Prompt(900, arrived_at=1.0),
        Prompt(800, hit=784, arrived_at=2.0),
        Prompt(100, arrived_at=3.0),
        Prompt(80, arrived_at=4.0),
    ]
    assert sorted(range(4), key=lambda index: policy.key(waiting[index], 4.5)) == order
    back: Any = Prompt(900, num_preemptions=1)
    assert policy.key(back, 4.5) < min(policy.key(one, 4.5) for one in waiting)


# Deficit longest prefix match


@pytest.mark.parametrize(
    ("prioritizer", "order"),
    [
        ("lpm", "aaaabbbb"),
        (("dlpm", {"quantum": 1e9}), "aaaabbbb"),
        (("dlpm", {"quantum": 1.0}), "abbbabaa"),  # the first of `a` has twice as much to compute as any other
    ],
)
def test_a_large_quantum_gives_the_longest_match_and_a_small_one_lets_tenants_take_turns(
    prioritizer: Any, order: str
) -> None:
    one = warm(prioritizer, "a", "b")
    for index in range(4):
        one.submit(f"b{index}", SHARED + 30, 1, content=content("b", f"b{index}", 30), tenant="b")
    for index in range(4):
        segments = (("a", SHARED), ("own a", SHARED), (f"a{index}", 30))
        one.submit(f"a{index}", 2 * SHARED + 30, 1, content=PromptContent(segments), tenant="a")
    assert "".join(name[0] for name in admitted(one)) == order


def test_a_deficit_is_refilled_only_when_nobody_who_waits_has_any_left() -> None:
    deficits = {"a": -25.0, "b": -3.0, "idle": -100.0}
    refill(deficits, ["a", "b"], 10.0)
    assert deficits == {"a": -15.0, "b": 7.0, "idle": -90.0}
    refill(deficits, ["a", "b"], 10.0)
    assert deficits["a"] == -15.0, "b has some left"
    refill(deficits, ["a", "new"], 10.0)
    assert deficits == {"a": -5.0, "b": 7.0, "idle": -80.0, "new": 10.0}
    refill(deficits, ["a"], 1.0)
    assert deficits == {"a": 1.0, "b": 7.0, "idle": -74.0, "new": 10.0}


def test_who_is_at_0_after_a_refill_has_no_deficit_left() -> None:
    deficits = {"a": 0.0, "b": -10.0}
    assert refill(deficits, ["a", "b"], 10.0) == ["a"]
    assert deficits == {"a": 10.0, "b": 0.0}


arrivals = st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(1, 100), st.integers(1, 60)), min_size=1, max_size=40)


@settings(max_examples=40, deadline=None)
@given(arrivals, arrivals, st.sampled_from([1.0, 50.0, 400.0]))
def test_backlogged_tenants_differ_by_less_than_two_quanta_and_what_runs(
    first: list[Any], second: list[Any], quantum: float
) -> None:
    specs = [
        RequestSpec(f"{tenant}{index}", at, prompt, output, tenant=tenant)
        for tenant, arrivals in (("a", first), ("b", second))
        for index, (at, prompt, output) in enumerate(arrivals)
    ]
    specs.sort(key=lambda spec: spec.arrived_at)
    one = Harness(("dlpm", {"quantum": quantum}), "round_robin", "fixed_chunk", HarnessOptions(max_batch_size=6))
    one.run(specs)
    assert not any(step.preempted for step in one.steps)
    most_in_batch = 6 * (100 + 60)
    assert service_gap(one, specs, ("a", "b"), 1.0, 1.0) <= 2 * (100 + most_in_batch + quantum)
