"""Budgets of devices over two pools, against an enumeration of all counts."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_policies.scaling.device_budget import Budget, clamp_one
from vajra_policies.scaling.pair_budget import PairBudget

Counts = tuple[int, int]


@pytest.mark.parametrize(
    ("budget", "lowest"), [(Budget(), None), (Budget(9), None), (Budget(None, 4), 4), (Budget(9, 4), 1)]
)
def test_the_floor_may_be_missed_by_a_replica_where_there_is_a_ceiling(budget: Budget, lowest: int | None) -> None:
    assert budget.lowest(3) == lowest
    for devices in range(12):
        above_floor = lowest is None or devices >= lowest
        assert budget.admits(devices, 3) == (above_floor and (budget.ceiling is None or devices <= budget.ceiling))


@pytest.mark.parametrize(("wanted", "expected"), [(1, 4), (3, 3), (4, 4), (5, 5), (6, 5), (9, 5)])
def test_one_pool_is_cut_or_raised_into_the_budget(wanted: int, expected: int) -> None:
    assert clamp_one(wanted, 2, Budget(10, 7), 1) == expected
    assert clamp_one(9, 2, Budget(3), 2) == 0, "its fewest replicas pass the ceiling"


small = st.tuples(st.integers(0, 6), st.integers(0, 6))
pairs = st.builds(
    PairBudget,
    st.builds(
        lambda ceiling, floor: Budget(ceiling, floor if ceiling is None or floor is None else min(ceiling, floor)),
        st.none() | st.integers(0, 20),
        st.none() | st.integers(0, 20),
    ),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
)


def nearest(pair: PairBudget, current: Counts, wanted: Counts) -> Counts:
    """The counts that `fit` says it returns, found by trying every pair."""
    ranges = [range(min(ends), max(ends) + 1) for ends in zip(current, wanted, strict=True)]
    is_exchange = (wanted[0] - current[0]) * (wanted[1] - current[1]) < 0
    asked = [abs(wanted[pool] - current[pool]) for pool in (0, 1)]

    def may_be(counts: Counts) -> bool:
        moved = [counts[pool] != current[pool] for pool in (0, 1)]
        enough = all(counts[pool] >= pair.least[pool] for pool in (0, 1))
        return enough and pair.admits(counts) and (moved[0] == moved[1] or not is_exchange)

    def rank(counts: Counts) -> tuple[int, ...]:
        done = [abs(counts[pool] - current[pool]) for pool in (0, 1)]
        left = [abs(wanted[pool] - counts[pool]) for pool in (0, 1)]
        return sum(left), abs(done[0] * asked[1] - done[1] * asked[0]), -sum(done), *counts

    return min(filter(may_be, product(*ranges)), key=rank, default=current)


@given(pairs, small, small)
def test_a_fit_is_the_nearest_within_the_budget(pair: PairBudget, current: Counts, wanted: Counts) -> None:
    assert pair.fit(current, wanted) == nearest(pair, current, wanted)


@given(pairs, small)
def test_a_clamp_ends_within_the_bound_that_it_was_beyond(pair: PairBudget, wanted: Counts) -> None:
    clamped = pair.clamp(wanted)
    total, lowest = pair.total(wanted), pair.budget.lowest(pair.tolerance)
    if pair.admits(wanted):
        assert clamped == wanted
    elif pair.budget.ceiling is not None and total > pair.budget.ceiling:
        assert pair.total(clamped) <= pair.budget.ceiling
        assert clamped == (0, 0) or all(clamped[pool] >= pair.least[pool] for pool in (0, 1))
        assert clamped != (0, 0) or pair.budget.ceiling < max(pair.total(pair.least), min(pair.devices))
    else:
        assert lowest is not None
        assert all(clamped[pool] >= wanted[pool] for pool in (0, 1))
        assert pair.budget.ceiling is None or pair.total(clamped) <= pair.budget.ceiling
        assert pair.budget.ceiling is not None or pair.total(clamped) >= lowest


@pytest.mark.parametrize(
    ("wanted", "floor", "expected"),
    [((0, 0), 8, (2, 2)), ((1, 1), 6, (2, 1)), ((1, 3), 12, (2, 4)), ((2, 0), 8, (4, 0)), ((0, 3), 8, (0, 4))],
)
def test_pools_grow_to_the_floor_in_proportion(wanted: Counts, floor: int, expected: Counts) -> None:
    assert PairBudget(Budget(None, floor), (2, 2), (0, 0)).clamp(wanted) == expected
