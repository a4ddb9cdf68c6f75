"""Intervals hold what they should as often as they should, and a warm-up is found where there is one."""

from __future__ import annotations

import numpy as np
import pytest

from vajra_py.metrics.comparison import compare
from vajra_py.metrics.intervals import batch_means_interval, mser5, num_batches, quantile_interval, replication_interval
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
        values = correlated(2000, seed)
        mean, median = batch_means_interval(values), quantile_interval(values, 0.5)
        assert mean is not None
        assert median is not None
        means += mean.low <= 10 <= mean.high
        medians += median.low <= 10 <= median.high
        naive += abs(values.mean() - 10) <= 1.96 * values.std() / np.sqrt(len(values))
    assert 0.91 <= means / 200 <= 0.99
    assert 0.91 <= medians / 200 <= 0.99
    assert naive / 200 < 0.6  # what ignoring the correlation would do


def test_stronger_correlation_takes_larger_batches() -> None:
    assert num_batches(np.random.default_rng(0).normal(size=3200)) == 32
    assert num_batches(correlated(3200, 1, phi=0.995)) < 32


def test_replications_get_students_interval() -> None:
    found = replication_interval([1.0, 2.0, 3.0])
    assert found is not None
    assert (found.low, found.high) == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-3)
    assert replication_interval([1.0]) is None


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
