"""Shares of tenants in every window, as VTC, deficit round robin and the control promise them."""

from __future__ import annotations

from typing import Any

import pytest
from claims_parts import service_gap
from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_py.testing.harness import Harness, HarnessOptions
from vajra_py.workload.request import RequestSpec

BLOCKS, BLOCK = 64, 16
OPTIONS = HarnessOptions(num_blocks=BLOCKS, block_size=BLOCK, max_batch_size=6)
LONGEST_PROMPT, LONGEST_OUTPUT = 100, 60
"""Six requests of these lengths fit into memory, so that nobody is preempted."""


def order(prioritizer: Any, requests: list[tuple[str, str]], **options: Any) -> list[str]:
    """Requests (id, tenant), all there at once, in the order in which they are admitted one by one."""
    one = Harness(prioritizer, "pull", "fixed_chunk", HarnessOptions(max_batch_size=1, **options))
    for request_id, tenant in requests:
        one.submit(request_id, 10, 5, tenant=tenant)
    return [name for step in one.steps_until_idle() for name in step.admitted]


def test_tenants_are_served_in_turn_however_many_requests_one_has() -> None:
    flood = [(f"a{index}", "a") for index in range(5)]
    assert order("vtc", [*flood, ("b0", "b"), ("b1", "b")]) == ["a0", "b0", "a1", "b1", "a2", "a3", "a4"]


def test_a_tenant_with_twice_the_weight_is_served_twice_as_much() -> None:
    requests = [(f"{tenant}{index}", tenant) for index in range(6) for tenant in "ab"]
    served = order(("vtc", {"tenant_weights": {"b": 2.0}}), requests)
    assert sum(name.startswith("b") for name in served[:6]) == 4


@pytest.mark.parametrize(("prioritizer", "expected"), [("vtc", "abab"), ("least_counter_first", "bbbb")])
def test_time_without_requests_earns_no_credit_under_the_lift(prioritizer: str, expected: str) -> None:
    one = Harness(prioritizer, "pull", "fixed_chunk", HarnessOptions(max_batch_size=1))
    for index in range(20):
        one.submit(f"a{index}", 10, 5, tenant="a")
    for _ in range(50):
        one.step()  # ten requests of `a` have been served
    for index in range(4):
        one.submit(f"b{index}", 10, 5, tenant="b")
    admitted = [name for step in one.steps_until_idle() for name in step.admitted]
    assert "".join(name[0] for name in admitted[:4]) == expected


def test_where_nobody_waits_a_tenant_is_lifted_to_the_one_that_waited_last() -> None:
    one = Harness("vtc", "pull", "fixed_chunk", HarnessOptions(max_batch_size=1))
    for index in range(3):
        one.submit(f"a{index}", 10, 5, tenant="a")
    one.steps_until_idle()
    one.submit("b0", 10, 5, tenant="b")
    one.step()
    for index in range(2):
        one.submit(f"c{index}", 10, 5, tenant="c")
        one.submit(f"a{3 + index}", 10, 5, tenant="a")
    admitted = [name for step in one.steps_until_idle() for name in step.admitted]
    assert sorted(name[0] for name in admitted[:2]) == ["a", "c"], "the idle stretch is no credit of `c` against `a`"


def test_prompts_computed_again_are_not_charged_again() -> None:
    one = Harness("vtc", "pull", "fixed_chunk", HarnessOptions(num_blocks=8, max_batch_size=4))
    for index in range(4):
        one.submit(f"a{index}", 24, 30, tenant="a")
    one.steps_until_idle()
    assert sum(one.request(f"a{index}").num_preemptions for index in range(4)) > 0
    probe = one.submit("probe", 1, 1, tenant="a")
    assert one.prioritizer.key(probe, one.now) == 4 * (24 * 1.0 + 30 * 2.0)


def test_a_turn_lasts_for_a_quantum_and_debts_are_paid() -> None:
    requests = [(f"{tenant}{index}", tenant) for tenant in "ab" for index in range(4)]
    two_each = order(("drr", {"quantum": 30.0}), requests)  # a request costs 10 + 2 * 5
    assert "".join(name[0] for name in two_each) == "aabbabab", "the second turn has a debt of 10 to pay"
    one_each = order(("drr", {"quantum": 10.0}), requests)
    assert "".join(name[0] for name in one_each) == "abababab"


lengths = st.tuples(st.integers(1, LONGEST_PROMPT), st.integers(1, LONGEST_OUTPUT))
arrivals = st.lists(st.tuples(st.floats(0.0, 3.0), lengths), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["vtc", "drr"]), arrivals, arrivals)
def test_backlogged_tenants_differ_by_less_than_the_bound_in_every_window(
    prioritizer: str, first: list[Any], second: list[Any]
) -> None:
    specs = [
        RequestSpec(f"{tenant}{index}", at, prompt, output, tenant=tenant)
        for tenant, arrivals in (("a", first), ("b", second))
        for index, (at, (prompt, output)) in enumerate(arrivals)
    ]
    specs.sort(key=lambda spec: spec.arrived_at)
    one = Harness(prioritizer, "round_robin", "fixed_chunk", OPTIONS)
    one.run(specs)
    assert not any(step.preempted for step in one.steps)
    most_in_batch = 6 * (LONGEST_PROMPT + LONGEST_OUTPUT)
    bound = 2 * max(1.0 * LONGEST_PROMPT, 2.0 * most_in_batch)
    if prioritizer == "drr":
        bound += 2 * BLOCKS * BLOCK / 20
    assert service_gap(one, specs, ("a", "b"), 1.0, 2.0) <= bound
