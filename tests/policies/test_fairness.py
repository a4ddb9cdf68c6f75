"""Shares of tenants in every window, as VTC, deficit round robin and the control guarantee them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from claims_parts import service_gap
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.plain_fairness import PlainDrr, PlainVtc
from tests.policies.routing_views import context
from vajra_policies.fairness.accounts import added
from vajra_policies.fairness.deficit_round_robin import DeficitRoundRobin, DeficitRoundRobinConfig
from vajra_policies.fairness.dlpm import Dlpm, DlpmConfig
from vajra_policies.fairness.equinox import Equinox, EquinoxConfig
from vajra_policies.fairness.least_counter_first import LeastCounterFirstConfig
from vajra_policies.fairness.vtc import Vtc, VtcConfig
from vajra_py.runtime.records.input_log import Failure
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


def test_a_tenant_that_was_served_before_an_idle_stretch_is_not_starved_after_it() -> None:
    policy = Equinox(EquinoxConfig(), context())
    jobs = [Job(tenant, num_output_tokens=100) for tenant in "b" + "a" * 9]
    policy.on_arrivals(jobs, 0.0)  # type: ignore[arg-type]
    for job in jobs:
        policy.on_admission(job, 0, 0.0)  # type: ignore[arg-type]
    policy.on_departures(jobs[1:], 1.0)  # type: ignore[arg-type]
    policy.on_departures(jobs[:1], 2.0)  # type: ignore[arg-type]
    policy.on_arrivals([Job("b"), Job("a")], 3.0)  # type: ignore[list-item]
    assert policy.group_key("b") > 0
    assert policy.group_key("a") == pytest.approx(9 * policy.group_key("b")), "as before the idle stretch"


def test_prompts_computed_again_are_not_charged_again() -> None:
    one = Harness("vtc", "pull", "fixed_chunk", HarnessOptions(num_blocks=8, max_batch_size=4))
    for index in range(4):
        one.submit(f"a{index}", 24, 30, tenant="a")
    one.steps_until_idle()
    assert sum(one.request(f"a{index}").num_preemptions for index in range(4)) > 0
    probe = one.submit("probe", 1, 1, tenant="a")
    assert one.prioritizer.group_key(probe.tenant) == 4 * (24 * 1.0 + 30 * 2.0)


def test_a_turn_lasts_for_a_quantum_and_debts_are_paid() -> None:
    requests = [(f"{tenant}{index}", tenant) for tenant in "ab" for index in range(4)]
    two_each = order(("drr", {"quantum": 30.0}), requests)  # a request costs 10 + 2 * 5
    assert "".join(name[0] for name in two_each) == "aabbabab", "the second turn has a debt of 10 to pay"
    one_each = order(("drr", {"quantum": 10.0}), requests)
    assert "".join(name[0] for name in one_each) == "abababab"


def test_a_turn_lasts_down_to_the_last_token_of_credit() -> None:
    requests = [(f"{tenant}{index}", tenant) for tenant in "ab" for index in range(2)]
    assert order(("drr", {"quantum": 21.0}), requests)[:2] == ["a0", "a1"], "a request costs 20: one is left"


@pytest.mark.parametrize(("total", "cost", "times"), [(0.0, 0.1, 10), (0.5, 1.0, 3), (2.0**53, 1.0, 4), (7.0, 2.0, 5)])
def test_tokens_charged_together_come_to_the_same_as_one_by_one_to_the_last_bit(
    total: float, cost: float, times: int
) -> None:
    one_by_one = total
    for _ in range(times):
        one_by_one += cost
    assert added(total, cost, times) == one_by_one


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


CONFIGS: dict[str, tuple[type[Any], Callable[[Any], Any]]] = {
    "vtc": (VtcConfig, PlainVtc),
    "least_counter_first": (LeastCounterFirstConfig, lambda config: PlainVtc(config, lifts=False)),
    "drr": (DeficitRoundRobinConfig, PlainDrr),
}


@st.composite
def params_of(draw: st.DrawFn, name: str) -> dict[str, Any]:
    weights = st.sampled_from([1.0, 2.0, 3.0, 0.1, 7.3])
    params: dict[str, Any] = {
        "prompt_weight": draw(st.sampled_from([1.0, 0.0, 0.37])),
        "output_weight": draw(st.sampled_from([2.0, 0.3])),
        "tenant_weights": {tenant: draw(weights) for tenant in "abc"},
    }
    return params if name != "drr" else {**params, "quantum": draw(st.sampled_from([3.3, 50.0, 1000.0]))}


@st.composite
def loads(draw: st.DrawFn) -> list[RequestSpec]:
    """Bursts and lulls of up to a dozen tenants; some requests are aborted by their deadline."""
    gaps = st.sampled_from([0.0, 0.0, 0.0, 0.01, 0.1, 3.0])
    ask = st.tuples(gaps, st.sampled_from("aaabbcdefghi"), st.integers(1, 90), st.integers(1, 40), st.integers(0, 9))
    at, specs = 0.0, []
    for index, (gap, tenant, prompt, output, expiry) in enumerate(draw(st.lists(ask, min_size=1, max_size=60))):
        at += gap
        late = 0.05 if expiry == 0 else None
        specs.append(RequestSpec(f"{tenant}{index}", at, prompt, output, tenant=tenant, expires_after_s=late))
    return specs


def decisions(prioritizer: Any, specs: list[RequestSpec], others: tuple[str, str], options: HarnessOptions) -> Any:
    one = Harness(prioritizer, *others, options)
    one.run(specs)
    return [(step.replica_id, step.formed_at, step.entries, step.preempted, step.num_waiting) for step in one.steps]


OTHERS = [("pull", "fixed_chunk"), ("round_robin", "vllm_v1"), ("round_robin", "preemptive")]


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=40, deadline=None)
@given(st.data(), loads(), st.sampled_from(OTHERS), st.sampled_from([14, 64]), st.integers(1, 2))
def test_decisions_are_those_of_the_plain_definitions(
    name: str, data: Any, specs: list[RequestSpec], others: tuple[str, str], num_blocks: int, num_replicas: int
) -> None:
    """Keys by group, counters that are brought up to date late, and what is forgotten make no difference."""
    kind, plain = CONFIGS[name]
    params = data.draw(params_of(name))
    options = HarnessOptions(num_blocks=num_blocks, max_batch_size=4, num_replicas=num_replicas)
    reference = plain(kind(**params))
    assert decisions((name, params), specs, others, options) == decisions(reference, specs, others, options)


@dataclass(eq=False)
class Job:
    """Attributes of a request that these policies read."""

    tenant: str
    num_prompt_tokens: int = 10
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    admitted_index: int = 0
    is_resident: bool = False
    arrived_at: float = 0.0
    max_tokens: int = 100


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Vtc(VtcConfig()), [10.0, 10.0]),  # the new tenant is lifted to the one that waits, not to the last admitted
        (DeficitRoundRobin(DeficitRoundRobinConfig(), 1000), [2.0, 3.0]),
        (Dlpm(DlpmConfig(quantum=5.0), 1000), [0.0, 1.0]),
    ],
)
def test_the_tenant_of_a_moved_request_waits_again(policy: Any, expected: list[float]) -> None:
    moved, running, new = Job("moved"), Job("running", 100), Job("new")
    for one in (moved, running):
        policy.on_arrivals([one], 0.0)
        policy.on_admission(one, 0, 0.0)
    policy.on_moved(moved, 0, 1, 1.0)
    policy.on_arrivals([new], 1.0)
    assert [policy.group_key(tenant) for tenant in ("moved", "new")] == expected


def test_the_tenant_of_a_request_whose_replica_was_lost_waits_again() -> None:
    one = Harness("deficit_round_robin", "round_robin", "fixed_chunk", HarnessOptions(num_replicas=2, max_batch_size=1))
    one.submit("lost", 16, 200, tenant="a")
    for index in range(200):
        one.submit(f"b{index}", 16, 4, tenant="b")
    one.step(0)
    one.controller.lose_replica(one.replica(0), Failure(1, "default", 0, "gone", max_reruns=1), 1)
    admitted = [name for step in one.steps_until_idle(1) for name in step.admitted]
    assert admitted.index("lost") < 100
    assert len(admitted) == 201


def test_a_counter_is_kept_while_it_matters_and_no_longer() -> None:
    one = Harness("vtc", "pull", "fixed_chunk", HarnessOptions(max_batch_size=2))
    counters = one.prioritizer._counters
    for index in range(300):
        one.submit(f"r{index}", 10, 5, tenant=f"t{index}")
        one.submit(f"s{index}", 10, 5, tenant="steady")
    for _ in range(900):
        one.step()
    waiting = one.waiting()
    assert len(counters) <= len(waiting) + 6
    one.steps_until_idle()
    assert len(counters) <= 2, "the tenant that waited last, and one that was served beyond it"
    heavy = one.submit("heavy", 900, 5, tenant="heavy")
    one.submit("light", 10, 5, tenant="light")
    one.steps_until_idle()
    assert one.prioritizer.group_key("heavy") >= 900, "it has had more than others: a later lift would not reach so far"
    assert heavy.end_reason is not None


def test_deficit_round_robin_keeps_nothing_but_debts() -> None:
    one = Harness(("drr", {"output_weight": 0.0}), "pull", "fixed_chunk", HarnessOptions(max_batch_size=2))
    for index in range(100):
        one.submit(f"r{index}", 10, 5, tenant=f"t{index}")
    one.steps_until_idle()
    debts = one.prioritizer._credit
    assert all(debt < 0 for debt in debts.values())
    assert not one.prioritizer._circle
