"""Fairness of backlogged tenants: constructed schedules with known differences, an independent search over windows, and what no order of tenants may change."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_py.metrics.definitions import Floats, ServiceWeights
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.metrics.summary.fairness import Service, backlogged_service, fairness_section, worst_p99

Turns = Callable[[int, float], int]


def serve(turns: Sequence[int], *, prompt: int = 10, output: int = 5, each_s: float = 1.0) -> Service:
    """One server that is given the requests of these tenants, all of them waiting from 0 s on: each takes its turn, and its first token comes half-way."""
    begun = np.arange(len(turns), dtype=np.float64) * each_s
    first, ended = (np.add(begun, part * each_s, dtype=np.float64) for part in (0.5, 1.0))
    ones = np.ones(len(turns), dtype=np.int64)
    return Service(
        np.array(turns, dtype=np.int64), np.zeros(len(turns)), begun, first, ended, prompt * ones, output * ones
    )  # fmt: skip


def section_of(service: Service, num_tenants: int, weights: ServiceWeights | None = None) -> dict[str, object]:
    names = [f"t{i}" for i in range(num_tenants)]
    window = (float(service.arrived_at.min()), float(np.nanmax(service.ended_at)))
    return fairness_section(service, names, weights or ServiceWeights(), window, np.ones(len(service.tenant), bool))


def test_taking_turns_is_fair_and_one_after_the_other_is_not() -> None:
    in_turn = section_of(serve([0, 1] * 100), 2)
    one_first = section_of(serve([0] * 100 + [1] * 100), 2)
    assert in_turn["jain_index"] == pytest.approx(1.0, abs=1e-3)
    # While tenant 0 waits it gets everything: 99 requests begin before its last one does, 10 prompt tokens and twice 5 output tokens each.
    assert one_first["jain_index"] == pytest.approx(0.5)
    assert one_first["max_service_difference"] == pytest.approx(99 * 20, rel=0.01)
    assert one_first["difference_tenants"] == ["t0", "t1"]
    assert 20 - 1e-6 <= float(str(in_turn["max_service_difference"])) <= 40
    assert in_turn["max_service"] == one_first["max_service"], "totals do not tell them apart"


def test_three_to_one_has_the_index_of_three_to_one() -> None:
    found = section_of(serve([0, 0, 0, 1] * 100 + [1] * 200), 2)
    assert found["jain_index"] == pytest.approx(16 / 20, rel=0.01)
    assert found["max_service_difference"] == pytest.approx(2 * 20 * 100, rel=0.02)
    owed = section_of(serve([0, 0, 0, 1] * 100 + [1] * 200), 2, ServiceWeights(tenants={"t0": 3.0}))
    assert owed["jain_index"] == pytest.approx(1.0, abs=1e-3)
    assert float(str(owed["max_service_difference"])) <= 2 * 20


def test_service_that_was_not_waited_for_says_nothing_of_the_policy() -> None:
    """Tenant 0 asks for ten times as much, and nobody ever waits beside another."""
    alone = serve([0] * 10 + [1])
    at_once = Service(alone.tenant, alone.admitted_at, alone.admitted_at, alone.first_token_at, alone.ended_at, alone.num_prompt_tokens, alone.num_output_tokens)  # fmt: skip
    found = section_of(at_once, 2)
    assert (found["num_backlogged"], found["jain_index"], found["max_service_difference"]) == (0, None, None)


def test_a_difference_counts_only_while_both_wait_without_a_break() -> None:
    """Each of two phases serves one tenant alone while both wait; between the phases nobody does."""
    first, second = serve([0] * 50 + [1] * 50), serve([0] * 50 + [1] * 50)
    names = ("arrived_at", "admitted_at", "first_token_at", "ended_at")
    moments = [np.concatenate((getattr(first, name), getattr(second, name) + 200.0)) for name in names]
    twice = (np.tile(getattr(first, name), 2) for name in ("tenant", "num_prompt_tokens", "num_output_tokens"))
    tenant, *tokens = twice
    apart = Service(tenant, *moments, *tokens)
    assert section_of(apart, 2)["max_service_difference"] == pytest.approx(49 * 20, rel=0.03)


def test_one_tenant_is_neither_fair_nor_unfair() -> None:
    found = section_of(serve([0] * 20), 1)
    assert (found["num_tenants"], found["jain_index"], found["max_service_difference"]) == (1, None, None)


def test_a_request_that_never_ran_waited_to_the_end() -> None:
    service = serve([0] * 20 + [1])
    never = np.where(service.tenant == 1, np.nan, 0.0)
    starved = Service(service.tenant, service.arrived_at, service.admitted_at + never, service.first_token_at + never, service.ended_at + never, service.num_prompt_tokens, service.num_output_tokens)  # fmt: skip
    found = section_of(starved, 2)
    assert found["max_service_difference"] == pytest.approx(19 * 20, rel=0.05)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Service, int]:
    """Requests of a few tenants, some of which never begin or end."""
    count, tenants = draw(st.integers(2, 40)), draw(st.integers(2, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    owner = np.concatenate((np.arange(min(tenants, count)), rng.integers(0, tenants, max(0, count - tenants))))
    arrived = np.round(rng.uniform(0, 10, len(owner)), 1)
    admitted = arrived + np.round(rng.exponential(4, len(owner)), 1)
    first = admitted + rng.exponential(0.5, len(owner))
    ended = first + rng.exponential(2.0, len(owner))
    never = rng.uniform(size=len(owner)) < 0.1
    for column in (admitted, first, ended):
        column[never] = np.nan
    outputs = np.where(never, 0, rng.integers(1, 50, len(owner)))
    return Service(owner, arrived, admitted, first, ended, rng.integers(1, 100, len(owner)), outputs), tenants


def waits(service: Service, tenant: int, start: float, end: float, end_at: float) -> bool:
    """Whether the tenant has a waiting request at all times between two moments, by walking from one request to the next."""
    own = service.tenant == tenant
    begins, ends = service.arrived_at[own], service.waits_until(end_at)[own]
    at = start
    while at < end - 1e-9:
        reach = [float(e) for b, e in zip(begins, ends, strict=True) if b <= at + 1e-9 and e > at + 1e-9]
        if not reach:
            return False
        at = max(reach)
    return True


def served(service: Service, tenant: int, at: float, end_at: float) -> float:
    """Service until a moment, one request at a time."""
    total = 0.0
    for i in np.flatnonzero(service.tenant == tenant):
        first, last = service.first_token_at[i], service.ended_at[i]
        if first <= at:
            last = end_at if math.isnan(last) else last
            part = 1.0 if last <= first else min(1.0, (at - first) / (last - first))
            total += service.num_prompt_tokens[i] + 2 * service.num_output_tokens[i] * part
    return total


@settings(max_examples=25, deadline=None)
@given(schedules())
def test_the_difference_is_that_of_a_search_over_all_windows_and_pairs(drawn: tuple[Service, int]) -> None:
    service, tenants = drawn
    end_at = max(float(np.nanmax(np.append(service.ended_at, 0.0))), float(service.arrived_at.max()))
    ones = np.ones(tenants)
    both = backlogged_service(service, tenants, ones, ServiceWeights(), end_at, float(service.arrived_at.min()))
    gaps = both.gaps()
    if gaps is None:
        return
    start, end = gaps.window
    more, less = gaps.tenants
    assert waits(service, more, start, end, end_at)
    assert waits(service, less, start, end, end_at)
    got = [served(service, tenant, end, end_at) - served(service, tenant, start, end_at) for tenant in gaps.tenants]
    assert gaps.largest == pytest.approx(got[0] - got[1], abs=1e-6)
    # Every eighth edge of the grid: no window between two of them, and no pair, has more.
    edges = both.edges[:: max(1, len(both.edges) // 8)]
    for (start, end), (one, other) in itertools.product(
        itertools.combinations(edges, 2), itertools.combinations(range(tenants), 2)
    ):
        if waits(service, one, start, end, end_at) and waits(service, other, start, end, end_at):
            amounts = [served(service, own, end, end_at) - served(service, own, start, end_at) for own in (one, other)]
            assert abs(amounts[0] - amounts[1]) <= gaps.largest + 1e-6


@settings(max_examples=50, deadline=None)
@given(schedules(), st.randoms(use_true_random=False))
def test_neither_names_nor_order_change_a_measure_and_the_index_stays_in_its_bounds(
    drawn: tuple[Service, int], chance: object
) -> None:
    service, tenants = drawn
    found = section_of(service, tenants)
    index = found["jain_index"]
    if index is not None:
        assert 1 / float(str(found["num_backlogged"])) - 1e-9 <= float(str(index)) <= 1 + 1e-9
    swapped = list(range(tenants))
    chance.shuffle(swapped)  # type: ignore[attr-defined]
    rows = list(range(len(service.tenant)))
    chance.shuffle(rows)  # type: ignore[attr-defined]
    other = Service(
        np.array(swapped)[service.tenant][rows],
        *(getattr(service, name)[rows] for name in Service.__struct_fields__[1:]),
    )
    again = section_of(other, tenants)
    for name in ("jain_index", "max_service_difference", "num_backlogged", "max_service", "min_service"):
        assert again[name] == (None if found[name] is None else pytest.approx(found[name])), name


def test_many_tenants_take_a_coarser_grid_and_little_memory() -> None:
    rng = np.random.default_rng(0)
    turns = rng.integers(0, 1000, 19_000)
    service = serve(turns.tolist(), each_s=0.1)
    both = backlogged_service(service, 1000, np.ones(1000), ServiceWeights(), 1900.0, 0.0)
    assert both.served.shape[1] <= 224 + 1
    gaps = both.gaps()
    assert gaps is not None
    assert gaps.largest >= 20
    found = section_of(service, 1000)
    assert 0.8 < float(str(found["jain_index"])) <= 1.0


@pytest.mark.parametrize(
    ("values", "worst"),
    [([1.0, 5.0, 2.0, 3.0], (0, 5.0)), ([1.0, math.nan, 2.0, 3.0], (1, 3.0)), ([math.nan] * 4, None)],
)
def test_the_worst_tenants_p99(values: list[float], worst: tuple[int, float] | None) -> None:
    tenant: np.ndarray = np.array([0, 0, 1, 1])
    column: Floats = np.array(values)
    assert worst_p99(tenant, column, 3) == worst


def test_a_run_says_whose_p99_is_worst(make_run: Callable[..., RunData]) -> None:
    run = make_run(name="busy", rate_per_s=40.0)
    fairness = run.summary.value("fairness")
    by_tenant = {name: group["ttft_s"]["p99"] for name, group in run.summary.value("by_tenant").items()}
    assert fairness["worst_ttft_p99_s"] == max(by_tenant.values())
    assert by_tenant[fairness["worst_ttft_tenant"]] == max(by_tenant.values())
