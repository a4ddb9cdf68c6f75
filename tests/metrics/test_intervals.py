"""Intervals hold what they should as often as they should, and a warm-up is found where there is one."""

from __future__ import annotations

import numpy as np
import pytest

from vajra_py.metrics.comparison import compare
from vajra_py.metrics.intervals import (
    batch_means_interval,
    effective_size,
    is_long_enough,
    latency_interval,
    mser5,
    quantile_interval,
    replication_interval,
)
from vajra_py.metrics.run_data import RunData


def correlated(count: int, seed: int, phi: float = 0.9) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """An autoregressive sequence of mean 10 and standard deviation 1."""
    rng = np.random.default_rng(seed)
    values, state = np.empty(count), rng.normal()
    for i, noise in enumerate(rng.normal(0, np.sqrt(1 - phi**2), count)):
        state = phi * state + noise
        values[i] = 10 + state
    return values


def test_correlated_values_get_intervals_that_hold_the_mean_and_the_median() -> None:
    naive = means = medians = 0
    for seed in range(200):
        values = correlated(6000, seed)
        mean, median = batch_means_interval(values), quantile_interval(values, 0.5)
        assert mean is not None
        assert median is not None
        means += mean.low <= 10 <= mean.high
        medians += median.low <= 10 <= median.high
        naive += abs(values.mean() - 10) <= 1.96 * values.std() / np.sqrt(len(values))
    assert 0.91 <= means / 200 <= 0.99
    assert 0.91 <= medians / 200 <= 0.99
    assert naive / 200 < 0.6  # what ignoring the correlation would do


def test_a_correlated_sequence_is_worth_fewer_values() -> None:
    independent = effective_size(np.random.default_rng(0).normal(10, 1, 3200))
    assert 1500 < independent < 7000
    assert effective_size(correlated(3200, 1, phi=0.9)) == pytest.approx(3200 / 19, rel=0.6)
    assert effective_size(np.full(500, 2.0)) == 500
    assert effective_size(np.arange(100.0)) == 0


def test_a_sequence_that_is_too_short_for_its_correlation_has_no_interval() -> None:
    short, long = correlated(600, 1, phi=0.97), correlated(60_000, 1, phi=0.97)
    assert batch_means_interval(short) is None
    assert quantile_interval(short, 0.5) is None
    assert batch_means_interval(long) is not None
    assert is_long_enough(long, 0.95)
    assert not is_long_enough(correlated(6_000, 1, phi=0.97), 0.99)  # too few beyond it


def busy_queue(load: float, num_requests: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Times in system of an M/M/1 queue that starts empty."""
    rng = np.random.default_rng(seed)
    service, gaps = rng.exponential(1, num_requests), rng.exponential(1 / load, num_requests)
    times, wait = np.empty(num_requests), 0.0
    for i in range(num_requests):
        times[i] = wait + service[i]
        wait = max(times[i] - gaps[i], 0.0)
    return times


@pytest.mark.parametrize("fraction", [None, 0.9])
def test_a_queue_gets_intervals_that_hold_as_often_as_they_say_and_a_short_one_gets_none(
    fraction: float | None,
) -> None:
    def held(load: float, num_requests: int, runs: int) -> tuple[int, int]:
        truth = (1 if fraction is None else -np.log(1 - fraction)) / (1 - load)
        found = [
            batch_means_interval(one) if fraction is None else quantile_interval(one, fraction)
            for one in (busy_queue(load, num_requests, seed) for seed in range(runs))
        ]
        given = [one for one in found if one is not None]
        return len(given), sum(one.low <= truth <= one.high for one in given)

    num_given, num_held = held(0.5, 3000, 150)
    assert num_given >= 145
    assert 0.9 <= num_held / num_given <= 0.99
    num_given, _ = held(0.9, 1500, 40)
    assert num_given <= 1


def test_amounts_have_intervals_above_zero_with_the_longer_end_upwards() -> None:
    values = busy_queue(0.5, 3000, 3)
    mean, high = batch_means_interval(values), quantile_interval(values, 0.9)
    assert mean is not None
    assert high is not None
    assert 0 < mean.low < values.mean() < mean.high
    assert mean.high - values.mean() > values.mean() - mean.low
    assert 0 < high.low < np.quantile(values, 0.9) < high.high


def test_replications_get_students_interval() -> None:
    found = replication_interval([1.0, 2.0, 3.0])
    assert found is not None
    assert (found.low, found.high) == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-3)
    assert replication_interval([1.0]) is None


def test_replications_of_a_latency_get_a_longer_upper_end() -> None:
    values = [1.0, 1.2, 2.0]
    plain, found = replication_interval(values), latency_interval(values)
    assert plain is not None
    assert found is not None
    assert found.low == plain.low
    assert found.high > plain.high
    assert latency_interval([2.0, 2.0]) == replication_interval([2.0, 2.0])
    assert latency_interval([0.0, 0.0]) == replication_interval([0.0, 0.0])
    wide = latency_interval([0.1, 5.0])
    assert wide is not None
    assert np.isfinite(wide.high)
    assert latency_interval([1.0]) is None


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


def test_one_run_has_intervals_where_it_was_steady_and_none_where_it_was_not(make_run: object) -> None:
    steady: RunData = make_run(name="steady", num_requests=600, rate_per_s=3.0)  # type: ignore[operator]
    crowded: RunData = make_run(name="crowded", num_requests=600, rate_per_s=60.0)  # type: ignore[operator]
    assert (steady.summary.value("stability.label"), crowded.summary.value("stability.label")) == (
        "stable",
        "overloaded",
    )
    comparison = compare([steady, crowded])
    interval = comparison.interval("ttft_mean_s", 0)
    assert interval is not None
    assert interval.low < steady.summary.value("overall.ttft_s.mean") < interval.high
    assert comparison.interval("ttft_mean_s", 1) is None
    assert comparison.interval("ttft_p99_s", 0) is None
    assert comparison.interval("e2e_p50_s", 0, "slo_class batch") is not None
    assert "ttft_mean_s_low" in comparison.frame().columns
