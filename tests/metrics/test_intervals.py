"""Intervals hold what they should as often as they should, and a warm-up is found where there is one."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from vajra_py.metrics.comparison import compare
from vajra_py.metrics.intervals import (
    MIN_EFFECTIVE,
    Interval,
    LongRun,
    Worth,
    batch_means_interval,
    effective_size,
    independent_by_load,
    is_long_enough,
    latency_interval,
    mser5,
    quantile_interval,
    replication_interval,
    utilisation,
)
from vajra_py.metrics.replications import group_replications
from vajra_py.metrics.run_data import RunData
from vajra_py.metrics.trust import warnings_of
from vajra_py.metrics.within_run import is_short, run_intervals


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


def queues(load: float, num_requests: int, num_runs: int, seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Arrivals and times in system of M/M/1 queues that start empty, a row a queue."""
    rng = np.random.default_rng(seed)
    shape = (num_requests, num_runs)
    service, gaps = rng.exponential(1, shape), rng.exponential(1 / load, shape)
    backlog = np.cumsum(service - gaps, axis=0) - (service - gaps)
    times = backlog - np.minimum.accumulate(backlog) + service
    return (np.cumsum(gaps, axis=0) - gaps).T, times.T


def queue_with_arrivals(load: float, num_requests: int, seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Arrivals and times in system of one such queue."""
    arrived_at, times = queues(load, num_requests, 1, seed)
    return arrived_at[0], times[0]


def busy_queue(load: float, num_requests: int, seed: int) -> NDArray[np.float64]:
    """Its times in system."""
    return queue_with_arrivals(load, num_requests, seed)[1]


def worth(load: float, num_requests: int, seed: int) -> float:
    """Independent requests that the queue is worth by its load."""
    arrived_at, times = queue_with_arrivals(load, num_requests, seed)
    return independent_by_load(arrived_at, arrived_at + times, np.zeros(num_requests, dtype=np.int64)).size


@pytest.mark.parametrize(
    ("load", "num_requests", "num_runs"), [(0.5, 700, 600), (0.5, 1200, 300), (0.8, 5500, 800), (0.8, 8000, 300)]
)
def test_runs_that_are_just_long_enough_hold_the_long_run_values_as_often_as_longer_ones(
    load: float, num_requests: int, num_runs: int
) -> None:
    """Those of the shorter lengths have an interval only because they met fewer bursts than usual."""
    arrived_at, times = queues(load, num_requests, num_runs, 11)
    one = np.zeros(num_requests, dtype=np.int64)
    truth = {fraction: (1 if fraction is None else -math.log(1 - fraction)) / (1 - load) for fraction in (None, 0.5, 0.9, 0.95)}  # fmt: skip
    held: dict[float | None, list[bool]] = {fraction: [] for fraction in truth}
    for arrivals, own in zip(arrived_at, times, strict=True):
        by_load = independent_by_load(arrivals, arrivals + own, one)
        for fraction, value in truth.items():
            found = batch_means_interval(own, by_load=by_load) if fraction is None else quantile_interval(own, fraction, by_load=by_load)  # fmt: skip
            if found is not None:
                held[fraction].append(found.low <= value <= found.high)
    for outcomes in held.values():
        assert len(outcomes) >= 80
        assert 0.89 <= np.mean(outcomes) <= 1


@pytest.mark.parametrize(
    ("load", "num_requests", "num_given"), [(0.5, 690, 0), (0.5, 770, 300), (0.8, 5850, 0), (0.8, 6550, 300)]
)
def test_the_load_of_the_long_run_lets_all_queues_of_a_length_through_or_none(
    load: float, num_requests: int, num_given: int
) -> None:
    rng = np.random.default_rng(13)
    held = []
    for _ in range(300):
        gaps, service = rng.exponential(1 / load, num_requests), rng.exponential(1, num_requests)
        arrived_at, backlog = np.cumsum(gaps) - gaps, np.cumsum(service - gaps) - (service - gaps)
        times = backlog - np.minimum.accumulate(backlog) + service
        demand = load * float(arrived_at[-1]) / service[:-1].sum()
        by_load = independent_by_load(
            arrived_at, arrived_at + times, np.zeros(num_requests, dtype=np.int64), LongRun(demand)
        )
        found = batch_means_interval(times, by_load=by_load)
        if found is not None:
            held.append(found.low <= 1 / (1 - load) <= found.high)
    assert abs(len(held) - num_given) <= 15
    assert not num_given or 0.91 <= np.mean(held) <= 0.98


@given(seed=st.integers(0, 10**6), sizes=st.lists(st.floats(75, 5000), min_size=2, max_size=4))
@settings(max_examples=20)
def test_the_upper_end_comes_down_as_a_run_is_worth_more_and_the_lower_end_stays(seed: int, sizes: list[float]) -> None:
    values = np.random.default_rng(seed).exponential(1, 20_000)
    for fraction in (None, 0.5, 0.9):
        found = [
            batch_means_interval(values, by_load=Worth(size))
            if fraction is None
            else quantile_interval(values, fraction, by_load=Worth(size))
            for size in sorted(sizes)
        ]
        intervals = [one for one in found if one is not None]
        assert len(intervals) == len(sizes)
        assert len({one.low for one in intervals}) == 1
        highs = [one.high for one in intervals]
        assert highs == sorted(highs, reverse=True)


def test_the_interval_of_a_mean_by_hand() -> None:
    """Batch means without skewness: Student's t with the correlation that is left, and the chance of being longer by luck."""
    steps = np.array([-2.0, 1.0, 0.0, 2.0, -1.0, 1.0, -1.0, 0.0, 2.0, -2.0])
    noise = np.tile([-10.0, 10.0], 50 * len(steps))
    values = 50 + np.repeat(steps, 100) + noise
    around = (steps[1:] * steps[:-1]).sum() / (steps**2).sum() + 1 / 10
    phi = max(around, 0.0)
    half = stats.t.ppf(0.975, 9) * math.sqrt((1 + phi) / (1 - phi) * steps.var(ddof=1) / 10)
    margin = 1.5 * (75 / 90) ** math.sqrt(90) * values.std() / math.sqrt(90)
    spread_out = values.reshape(10, 100)[:, np.random.default_rng(0).permutation(100)].ravel()
    found = batch_means_interval(spread_out, by_load=Worth(90))
    long = batch_means_interval(spread_out)
    told = batch_means_interval(spread_out, by_load=Worth(90, is_chance=False))
    assert effective_size(spread_out) > 90  # so that the load decides
    assert found is not None
    assert long is not None
    assert found.low == pytest.approx(50 * math.exp(-half / 50))
    assert found.high == pytest.approx(50 / (1 - (half + margin) / 50))
    assert long.high < found.high
    assert told is not None
    assert told.high == pytest.approx(50 / (1 - half / 50))  # nothing for chance where the workload decided


def test_a_metric_that_is_zero_or_negative_has_a_plain_interval() -> None:
    """Relative errors mean nothing there."""
    rng = np.random.default_rng(1)
    assert batch_means_interval(np.zeros(5000)) == Interval(0, 0)
    assert quantile_interval(np.zeros(5000), 0.9) == Interval(0, 0)
    negative = rng.normal(-10, 1, 5000)
    found = batch_means_interval(negative)
    assert found is not None
    assert found.low < -10 < found.high < -9.9


@pytest.mark.parametrize(("fraction", "share_of_zeros", "expected"), [
    (0.5, 0.8, (0, 0)), (0.9, 0.97, (0, 0)), (0.5, 0.2, (1, 1)), (0.5, 0.5, (0, 1)),
])  # fmt: skip
def test_a_quantile_among_equal_values_is_that_value_unless_its_share_is_in_doubt(
    fraction: float, share_of_zeros: float, expected: tuple[float, float]
) -> None:
    """Requests that do not wait at all are many, and a queueing time of 0 is then certain."""
    values = np.where(np.random.default_rng(3).random(5000) < share_of_zeros, 0.0, 1.0)
    found = quantile_interval(values, fraction)
    assert found is not None
    assert (found.low, found.high) == expected


@pytest.mark.parametrize("fraction", [None, 0.9])
def test_a_queue_gets_intervals_that_hold_as_often_as_they_say_and_a_short_one_gets_none(
    fraction: float | None,
) -> None:
    def held(load: float, num_requests: int, runs: int) -> tuple[int, int]:
        truth = (1 if fraction is None else -np.log(1 - fraction)) / (1 - load)
        found = [
            batch_means_interval(one) if fraction is None else quantile_interval(one, fraction)
            for one in queues(load, num_requests, runs, 1)[1]
        ]
        given = [one for one in found if one is not None]
        return len(given), sum(one.low <= truth <= one.high for one in given)

    num_given, num_held = held(0.5, 3000, 150)
    assert num_given >= 145
    assert 0.9 <= num_held / num_given <= 0.99
    num_given, _ = held(0.9, 1500, 40)
    assert num_given <= 1


def test_utilisation_is_the_time_in_which_a_replica_owes_a_request_its_service() -> None:
    arrived_at = np.array([0.0, 1.0, 6.0, 10.0])
    served_at = np.array([3.0, 2.0, 8.0, 99.0])  # the second within the first; nothing counts after the last arrival
    one, two = np.zeros(4, dtype=np.int64), np.array([0, 1, 0, 1])
    assert utilisation(arrived_at, served_at, one) == pytest.approx(0.5)
    assert utilisation(arrived_at, served_at, two) == pytest.approx((0.5 + 0.1) / 2)
    assert utilisation(arrived_at[::-1], served_at[::-1], one) == pytest.approx(0.5)  # in any order
    assert utilisation(np.zeros(3), np.ones(3), np.zeros(3, dtype=np.int64)) == 1.0


@pytest.mark.parametrize("load", [0.5, 0.7, 0.8, 0.9])
def test_the_load_of_a_queue_is_found(load: float) -> None:
    arrived_at, times = queue_with_arrivals(load, 20_000, 1)
    found = utilisation(arrived_at, arrived_at + times, np.zeros(len(times), dtype=np.int64))
    assert found == pytest.approx(load, rel=0.05)


def test_what_a_run_is_worth_by_its_load_agrees_with_the_autocorrelation_of_the_queue() -> None:
    times = busy_queue(0.7, 200_000, 2)
    gaps = times - times.mean()
    correlation = 1 + 2 * sum(float(gaps[lag:] @ gaps[:-lag]) for lag in range(1, 300)) / float(gaps @ gaps)
    assert worth(0.7, 200_000, 2) == pytest.approx(len(times) / correlation, rel=0.25)


def test_the_load_decides_where_the_variance_of_a_short_run_is_luck() -> None:
    by_variance, by_load = [], []
    for seed in range(60):
        arrived_at, times = queue_with_arrivals(0.8, 2500, seed)
        served_at, replica = arrived_at + times, np.zeros(len(times), dtype=np.int64)
        by_variance.append(is_long_enough(times))
        by_load.append(is_long_enough(times, by_load=independent_by_load(arrived_at, served_at, replica)))
    assert sum(by_variance) >= 6  # runs that met no long busy period
    assert not any(by_load)


@pytest.mark.parametrize(("load", "num_requests"), [(0.5, 3000), (0.7, 5000), (0.8, 12_000)])
def test_a_queue_that_is_long_enough_gets_its_intervals(load: float, num_requests: int) -> None:
    given = 0
    for seed in range(20):
        arrived_at, times = queue_with_arrivals(load, num_requests, seed)
        by_load = independent_by_load(arrived_at, arrived_at + times, np.zeros(num_requests, dtype=np.int64))
        found = [batch_means_interval(times, by_load=by_load)]
        found += [quantile_interval(times, fraction, by_load=by_load) for fraction in (0.5, 0.9, 0.95)]
        given += all(found)
    assert given >= 18


def test_the_length_test_at_its_bounds() -> None:
    values = np.random.default_rng(0).exponential(1, 3000)
    assert is_long_enough(values, by_load=Worth(MIN_EFFECTIVE))
    assert is_long_enough(values, 0.95, by_load=Worth(MIN_EFFECTIVE))
    assert not is_long_enough(values, 0.96, by_load=Worth(MIN_EFFECTIVE))
    assert not is_long_enough(values, by_load=Worth(MIN_EFFECTIVE - 0.01))
    assert batch_means_interval(values, by_load=Worth(MIN_EFFECTIVE - 0.01)) is None
    assert quantile_interval(values, 0.5, by_load=Worth(MIN_EFFECTIVE - 0.01)) is None
    assert not is_long_enough(correlated(600, 1, phi=0.97), by_load=Worth(1000))  # the variance still has its say


def test_the_worth_of_a_run_at_the_bounds_of_load() -> None:
    one = np.zeros(1000, dtype=np.int64)
    arrived_at = np.arange(1000.0)
    assert independent_by_load(arrived_at, arrived_at, one).size == 1000  # nothing waits: all are independent
    assert independent_by_load(arrived_at, arrived_at + 5, one).size == 0  # never caught up
    assert independent_by_load(np.zeros(1000), np.ones(1000), one).size == 0
    assert independent_by_load(arrived_at[:1], arrived_at[:1], one[:1]).size == 0
    worths = [independent_by_load(arrived_at, arrived_at + wait, one).size for wait in (0.2, 0.5, 0.8, 0.99)]
    assert worths == sorted(worths, reverse=True)


def test_bursts_of_arrivals_make_a_run_worth_less() -> None:
    rng = np.random.default_rng(4)
    one = np.zeros(4000, dtype=np.int64)
    smooth, bursty = np.cumsum(rng.gamma(1, 1, 4000)), np.cumsum(rng.gamma(0.1, 10, 4000))
    served = 1e-9
    assert independent_by_load(smooth, smooth + served, one).size == pytest.approx(4000, rel=0.1)
    assert independent_by_load(bursty, bursty + served, one, LongRun(1.0, 1.0)).size == pytest.approx(4000, rel=0.01)
    assert independent_by_load(bursty, bursty + served, one).size == pytest.approx(4000 / 5.5, rel=0.2)


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


@pytest.mark.parametrize("num_seeds", [2, 5])
def test_replications_of_a_latency_hold_as_often_as_they_say(num_seeds: int) -> None:
    values = 4.9 + np.random.default_rng(5).gamma(
        1.78, 1.0, (2000, num_seeds)
    )  # as scattered and skewed as P99 of runs
    found = [latency_interval(one) for one in values.tolist()]
    held = [one is not None and one.low <= 4.9 + 1.78 <= one.high for one in found]
    assert 0.94 <= np.mean(held) <= 0.96


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


def test_a_busy_run_that_is_too_short_for_its_load_has_no_interval_and_the_report_names_it(make_run: object) -> None:
    busy: RunData = make_run(name="busy", num_requests=250, rate_per_s=14.0)  # type: ignore[operator]
    assert busy.summary.value("stability.label") == "stable"
    assert is_long_enough(busy.measured("ttft_s")["ttft_s"])  # by its variance alone
    assert is_short(busy)
    assert run_intervals(busy, ["overall"]) == {"overall": {}}
    warnings = dict(warnings_of(group_replications([busy]), compare([busy])))
    assert [names for text, names in warnings.items() if text.startswith("Too short for intervals")] == [["busy"]]


def test_a_run_is_judged_by_what_its_workload_asks_for_in_the_long_run(make_run: object, tmp_path: Path) -> None:
    busy: RunData = make_run(name="busy", num_requests=250, rate_per_s=14.0)  # type: ignore[operator]
    shutil.copytree(busy.path, tmp_path / "lucky")
    columns = busy.measured("arrived_at", "num_prompt_tokens")
    met = columns["num_prompt_tokens"].sum() / np.ptp(columns["arrived_at"])
    workload = {
        "type": "synthetic",
        "arrivals": {"type": "poisson", "rate": 1},
        "num_requests": 250,
        "prompt_tokens": {"type": "constant", "value": int(met / 20)},
        "output_tokens": {"type": "constant", "value": 10},
    }
    (tmp_path / "lucky" / "config.yaml").write_text(json.dumps({"workload": workload}))
    assert is_short(busy)
    assert not is_short(RunData.load(tmp_path / "lucky"))


def test_a_closed_loop_is_judged_by_its_variance_alone(make_run: object, tmp_path: Path) -> None:
    busy: RunData = make_run(name="busy", num_requests=250, rate_per_s=14.0)  # type: ignore[operator]
    shutil.copytree(busy.path, tmp_path / "closed")
    (tmp_path / "closed" / "config.yaml").write_text("workload: {arrivals: {type: closed_loop, clients: 4}}\n")
    closed = RunData.load(tmp_path / "closed")
    assert not is_short(closed)
    assert "ttft_mean_s" in run_intervals(closed, ["overall"])["overall"]


def test_replicas_of_several_sets_have_their_own_load(make_run: object, tmp_path: Path) -> None:
    busy: RunData = make_run(name="busy", num_requests=250, rate_per_s=12.0)  # type: ignore[operator]
    shutil.copytree(busy.path, tmp_path / "sets")
    assert is_short(busy)
    table = busy.requests()
    names = [f"set{number // 2 % 2}" for number in range(table.num_rows)]
    place = table.column_names.index("replicaset")
    pq.write_table(table.set_column(place, "replicaset", pa.array(names)), tmp_path / "sets" / "requests.parquet")
    assert not is_short(RunData.load(tmp_path / "sets"))  # four replicas instead of two, each less busy
