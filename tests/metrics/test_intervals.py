"""Intervals hold the mean as often as they say, stay where their values can lie, and a warm-up is found where there is one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_py.metrics.comparison.intervals import (
    Interval,
    mser5,
    positive_interval,
    proportion_interval,
    replication_interval,
)


def correlated(count: int, seed: int, phi: float = 0.9) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """An autoregressive sequence of mean 10 and standard deviation 1."""
    rng = np.random.default_rng(seed)
    values, state = np.empty(count), rng.normal()
    for i, noise in enumerate(rng.normal(0, np.sqrt(1 - phi**2), count)):
        state = phi * state + noise
        values[i] = 10 + state
    return values


def share_that_holds(found: list[Interval | None], mean: float) -> float:
    return float(np.mean([one is not None and one.low <= mean <= one.high for one in found]))


def test_a_quantity_of_either_sign_gets_students_interval() -> None:
    found = replication_interval([1.0, 2.0, 3.0])
    assert found is not None
    assert (found.low, found.high) == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-3)
    assert replication_interval([1.0]) is None


def test_five_seeds_of_which_one_met_a_burst_have_an_interval_above_zero() -> None:
    values = [1.27, 1.32, 1.40, 2.80, 6.34]
    plain, found = replication_interval(values), positive_interval(values)
    assert plain is not None
    assert found is not None
    assert plain.low < 0
    assert (found.low, found.high) == pytest.approx((0.942, 7.33), rel=0.01)
    assert found.low < np.mean(values) < found.high


@given(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=10))
def test_intervals_of_positive_quantities_are_positive_and_hold_the_mean(values: list[float]) -> None:
    found = positive_interval(values)
    assert found is None or 0 < found.low <= np.mean(values) * (1 + 1e-9) <= found.high * (1 + 2e-9)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=10))
def test_intervals_of_proportions_lie_between_0_and_1_and_hold_the_mean(values: list[float]) -> None:
    found = proportion_interval(values)
    assert found is None or 0 <= found.low <= np.mean(values) + 1e-9 <= found.high + 2e-9 <= 1 + 2e-9


def test_the_upper_end_of_a_proportion_that_t_would_take_above_1() -> None:
    values = [0.99, 1.0, 0.999, 0.93, 1.0]
    plain, found = replication_interval(values), proportion_interval(values)
    assert plain is not None
    assert found is not None
    assert plain.high > 1
    assert found.high < 1
    assert found.low < plain.low  # what is taken off above is added below


@pytest.mark.parametrize("make", [positive_interval, proportion_interval])
def test_values_that_are_all_equal_do_not_say_how_much_they_vary(make: object) -> None:
    assert make([1.0, 1.0, 1.0]) is None  # type: ignore[operator]
    assert make([0.3, 0.1 + 0.2, 0.3]) is None  # type: ignore[operator]
    assert make([0.0, 0.0]) is None  # type: ignore[operator]
    assert make([0.5]) is None  # type: ignore[operator]
    assert make([]) is None  # type: ignore[operator]


@pytest.mark.parametrize(
    ("log_deviation", "num_seeds", "least"),
    [(0.1, 5, 0.94), (0.3, 5, 0.935), (0.6, 5, 0.92), (0.6, 20, 0.92), (1.0, 5, 0.88)],
)
def test_lognormal_replications_are_held_as_often_as_documented(
    log_deviation: float, num_seeds: int, least: float
) -> None:
    draws = np.random.default_rng(5).lognormal(0.0, log_deviation, (4000, num_seeds)).tolist()
    truth = float(np.exp(log_deviation**2 / 2))
    held = share_that_holds([positive_interval(one) for one in draws], truth)
    assert least <= held <= 0.96
    assert held >= share_that_holds([replication_interval(one) for one in draws], truth)


@pytest.mark.parametrize(
    ("mean", "size", "least"), [(0.9, 200.0, 0.94), (0.97, 100.0, 0.94), (0.5, 20.0, 0.94), (0.99, 100.0, 0.92)]
)
def test_replications_of_a_proportion_are_held_as_often_as_documented(mean: float, size: float, least: float) -> None:
    draws = np.random.default_rng(6).beta(mean * size, (1 - mean) * size, (4000, 5)).tolist()
    held = share_that_holds([proportion_interval(one) for one in draws], mean)
    assert least <= held <= 0.96


@pytest.mark.parametrize("warm", [200, 500])
def test_a_warm_up_is_found(warm: int) -> None:
    values = correlated(4000, 3, phi=0.5)
    values[:warm] -= np.linspace(8, 0, warm)
    assert 0.5 * warm <= mser5(values) <= 1.5 * warm


def test_no_warm_up_is_made_up() -> None:
    assert mser5(np.full(1000, 2.0)) == 0
    assert mser5(np.arange(1000.0)) == 0  # never steady
    assert mser5(np.arange(20.0)) == 0
    assert np.mean([mser5(correlated(2000, seed, phi=0.3)) for seed in range(20)]) < 200
