"""Confidence intervals: over replications with independent seeds, and within one run by batch means.

Everything here works on plain arrays and knows nothing of runs; scipy is loaded when it is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vajra_py.metrics.definitions import Floats, Ints, covered_s

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A range that holds the long-run value with the probability `CONFIDENCE`, in the unit of the value."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of its length."""
        return (self.high - self.low) / 2


def replication_interval(values: Sequence[float]) -> Interval | None:
    """Student's t interval for the mean of independent replications; None with fewer than two."""
    known = np.asarray(values, dtype=np.float64)
    if known.size < 2:
        return None
    from scipy import stats

    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, known.size - 1) * known.std(ddof=1) / math.sqrt(known.size))
    mean = float(known.mean())
    return Interval(mean - half, mean + half)


def latency_interval(values: Sequence[float]) -> Interval | None:
    """Student's t interval for the mean of independent replications of a latency, its upper end further away.

    Latencies of a few replications are skewed: those that met no burst are low and close together (`benchmarks/interval_coverage.py`). A skewness of six times the coefficient of
    variation, about what they have, takes the upper end of t further by twice the half-width times its part of the mean (Johnson, "Modified t tests and confidence intervals for
    asymmetrical populations", JASA 73, 1978).
    """
    found = replication_interval(values)
    if found is None:
        return None
    mean, half = float(np.mean(values)), found.half_width
    return Interval(found.low, found.high + _SKEWED * half**2 / mean) if mean > 0 else found


def floats(values: Sequence[float | None]) -> Floats:
    """The values that are known."""
    return np.array([value for value in values if value is not None], dtype=np.float64)


BATCHES = 10
"""Batches of a sequence: few and large ones, whose means are close to independent."""
MIN_VALUES = 200
"""Values of a sequence from which on batch means are worth making."""
MIN_EFFECTIVE = 75
"""Independent values that a sequence must be worth for an interval, by its load and by its variance; shorter ones vary more than their batches show."""
MIN_EFFECTIVE_BEYOND = MIN_EFFECTIVE / 20
"""Of them, those beyond a quantile on its shorter side: P95 is the last that has enough wherever the mean has."""
_LENGTH_BATCHES = 32
"""Batches by which it is told how many independent values a sequence is worth: many, since 10 of them would not tell it well."""
HIGH_QUANTILE = 0.9
_SKEWED = 2.0
"""Half-widths by which the upper end of replications of a latency moves up, for each half-width in the mean."""
_MARGIN_ERRORS = 1.5
"""Standard errors, by what a run is worth, that are added to the upper end at `MIN_EFFECTIVE` where chance decided which runs are long enough."""
_CONTRADICTS = 2.0
"""How many times as many independent values the load may promise as the variance shows: 32 batches tell it to about a quarter."""
_WIDEST = 0.9
"""Part of a value that its interval may reach above it before that is stretched."""


def mser5(values: Floats) -> int:
    """Values to leave out at the start because the system was still filling.

    MSER-5 (K. P. White, "An effective truncation heuristic for bias reduction in simulation output", Simulation 69, 1997): of means of five values, those are left out whose
    omission makes the standard error of the rest least; a cut in the second half means that no steady state was found, and then nothing is left out.
    """
    count = len(values) // 5
    if count < 10:
        return 0
    means = values[: 5 * count].reshape(count, 5).mean(axis=1)
    left = np.arange(count, 0, -1)
    sums, squares = np.cumsum(means[::-1])[::-1], np.cumsum(np.square(means)[::-1])[::-1]
    errors = (squares - np.square(sums) / left) / np.square(left)
    candidate = int(np.argmin(errors[: max(1, count - 5)]))
    return 5 * candidate if candidate < count // 2 else 0


def effective_size(values: Floats) -> float:
    """How many independent values would tell the mean of a correlated sequence as well: its variance over that of the mean, by batch means."""
    if len(values) < MIN_VALUES:
        return 0.0
    variance = float(_batched(values, _LENGTH_BATCHES).var(ddof=1)) / _LENGTH_BATCHES
    return float(values.var(ddof=1)) / variance if variance > 0 else float(len(values))


def utilisation(arrived_at: Floats, served_at: Floats, replica: Ints) -> float:
    """Fraction of the time between the first and the last arrival in which a replica had a request that was not served yet; mean over requests of that of their replica.

    With the first token for the service, it is the load of a queue for prefills: that of M/M/1 is its rate over its service rate.
    """
    start_at, end_at = float(arrived_at.min()), float(arrived_at.max())
    if not end_at > start_at:
        return 1.0
    order = np.lexsort((arrived_at, replica))
    waiting = 0.0
    for own in np.split(order, np.flatnonzero(np.diff(replica[order])) + 1):
        waiting += len(own) * covered_s(arrived_at[own], np.minimum(served_at[own], end_at), start_at)
    return waiting / len(order) / (end_at - start_at)


@dataclass(frozen=True, slots=True)
class Worth:
    """How many independent requests a run is worth by its load.

    `is_chance`: the load is what the run itself met, so that of runs of one length those pass for long ones that met fewer bursts.
    """

    size: float
    is_chance: bool = True


UNLIMITED = Worth(math.inf)
"""Of a run that its load says nothing about: a closed loop, whose queue is never longer than its clients."""


@dataclass(frozen=True, slots=True)
class LongRun:
    """What a run's workload asks for in the long run.

    `demand_fraction`: prompt tokens per second, over those that arrived in this run; `gap_variation`: squared coefficient of variation of the gaps between arrivals.
    """

    demand_fraction: float
    gap_variation: float = 1.0


def independent_by_load(arrived_at: Floats, served_at: Floats, replica: Ints, long_run: LongRun | None = None) -> Worth:
    """How many independent requests a run is worth by its load alone, whatever its latencies happened to be.

    A queue forgets in a time that grows like 1 / (1 - load)^2 and like the variability of its arrivals and services (Whitt, "Planning queueing simulations", Management Science 35,
    1989). The number of requests is divided by the sum of the autocorrelations of waiting times in M/M/1 (Daley 1968), and by (1 + squared coefficient of variation of the gaps
    between arrivals) / 2 where these vary more than Poisson ones.

    Args:
        arrived_at: seconds.
        served_at: of the first token.
        replica: that served it.
        long_run: load and gaps are then judged as the workload has them in the long run, and hardly differ between runs of one setting. None: it is not known.
    """
    is_chance = long_run is None
    if len(arrived_at) < 2:
        return Worth(0.0, is_chance)
    load = utilisation(arrived_at, served_at, replica) * (1.0 if long_run is None else long_run.demand_fraction)
    if load >= 1:
        return Worth(0.0, is_chance)
    gaps = np.diff(np.sort(arrived_at))
    variation = float(gaps.var() / gaps.mean() ** 2) if long_run is None else long_run.gap_variation
    correlation = (2 + 5 * load - 4 * load**2 + load**3) / ((2 - load) * (1 - load) ** 2)
    return Worth(len(arrived_at) / (correlation * max(1.0, (1 + variation) / 2)), is_chance)


def independent_size(values: Floats, by_load: Worth = UNLIMITED) -> float:
    """How many independent values a sequence is worth: by the load, unless its variance shows less than half of that.

    Few values of a busy system may vary little by chance, so that the variance alone would take lucky runs for long ones. It alone judges where the load says nothing.
    """
    size = effective_size(values)
    return size if by_load == UNLIMITED else min(_CONTRADICTS * size, by_load.size)


def is_long_enough(values: Floats, fraction: float | None = None, *, by_load: Worth = UNLIMITED) -> bool:
    """Whether a sequence is long enough for an interval of its long-run mean, or of this quantile."""
    return _is_enough(independent_size(values, by_load), fraction)


def _is_enough(size: float, fraction: float | None) -> bool:
    beyond = math.inf if fraction is None else size * min(fraction, 1 - fraction)
    return size >= MIN_EFFECTIVE and beyond >= MIN_EFFECTIVE_BEYOND * (1 - 1e-9)


def batch_means_interval(values: Floats, *, by_load: Worth = UNLIMITED) -> Interval | None:
    """Interval for the long-run mean of a stationary, correlated sequence of amounts; None when it is too short.

    The error of a mean grows with the mean (a busier system varies more): the lower end is that of the logarithm, the upper end that of the reciprocal.
    """
    size = independent_size(values, by_load)
    if not _is_enough(size, None):
        return None
    mean = float(values.mean())
    found = _bounds(values, size, by_load)
    return Interval(_of_logarithm(found.low, mean), _of_reciprocal(found.high, mean)) if mean > 0 else found


def quantile_interval(values: Floats, fraction: float, *, by_load: Worth = UNLIMITED) -> Interval | None:
    """Interval for the long-run quantile of such a sequence; None when it is too short.

    The share of values up to the observed quantile gets a batch-means interval; the quantiles of its two ends are those of the interval. The upper end of a
    high quantile is that of the reciprocal, since it grows faster with the quantile than that of a median. (A bootstrap of the batches covers less:
    `docs/adr/0028-intervals.md`.)
    """
    size = independent_size(values, by_load)
    if not _is_enough(size, fraction):
        return None
    used = values[len(values) % BATCHES :]
    ordered = np.sort(used)
    place = min(max(math.ceil(fraction * len(ordered)) - 1, 0), len(ordered) - 1)
    below = (used <= ordered[place]).astype(np.float64)
    bounds, ties = _bounds(below, size, by_load), int(below.sum()) - (place + 1)
    low, high = math.floor(bounds.low * len(ordered)) - ties, math.ceil(bounds.high * len(ordered)) - 1 - ties
    found = Interval(*(float(ordered[min(max(end, 0), len(ordered) - 1)]) for end in (low, high)))
    quantile = float(ordered[place])
    if not quantile > 0:
        return found
    if fraction < HIGH_QUANTILE:
        return Interval(_of_logarithm(found.low, quantile), _of_logarithm(found.high, quantile))
    return Interval(found.low, _of_reciprocal(found.high, quantile)) if found.high < (1 + _WIDEST) * quantile else None


def _bounds(values: Floats, size: float, by_load: Worth) -> Interval:
    """Interval for the mean of a sequence that is worth `size` independent values, by its batch means and by the chance that it is no shorter.

    Where chance decides, of runs that are worth about `MIN_EFFECTIVE` those get an interval that met fewer bursts and hence have lower values. The upper end is therefore moved up
    there, the less the more a run is worth: its worth is told with a standard error of about 1 / sqrt(size) of itself, so that a few of them above the bound chance decides nothing.
    """
    found = _skewed_t(_batched(values, BATCHES))
    if not by_load.is_chance:
        return found
    margin = _MARGIN_ERRORS * (MIN_EFFECTIVE / size) ** math.sqrt(size) * float(values.std()) / math.sqrt(size)
    return Interval(found.low, found.high + margin)


def _of_logarithm(end: float, value: float) -> float:
    """The end of an interval whose relative error is taken for that of the value's logarithm."""
    return value * math.exp((end - value) / value)


def _of_reciprocal(end: float, value: float) -> float:
    """The end of an interval whose relative error is taken for that of the value's reciprocal."""
    return value / (1 - min((end - value) / value, _WIDEST))


def _batched(values: Floats, count: int) -> Floats:
    """Means of `count` batches of equal size; what is over is left out at the start."""
    means: Floats = values[len(values) % count :].reshape(count, -1).mean(axis=1)
    return means


def _correlation(means: Floats) -> float:
    gaps = means - means.mean()
    power = float(gaps @ gaps)
    return float(gaps[1:] @ gaps[:-1]) / power if power > 0 else 0.0


def _skewed_t(means: Floats) -> Interval:
    """Student's t interval for the mean of batch means, corrected for their skewness and for what is left of their correlation.

    As Skart does, with a fixed number of values (Tafazzoli and Wilson, "Skart: A skewness- and autoregression-adjusted batch-means procedure for simulation analysis", IIE Transactions
    43, 2011); an estimated autocorrelation is too low by about one part in as many as there are batches (Kendall, Biometrika 41, 1954), which is added.
    """
    from scipy import stats

    count, mean = len(means), float(means.mean())
    variance = float(means.var(ddof=1))
    if not variance > 0:
        return Interval(mean, mean)
    phi = min(max(_correlation(means) + 1 / count, 0.0), 0.9)
    error = math.sqrt((1 + phi) / (1 - phi) * variance / count)
    skewness = count * float(((means - mean) ** 3).sum()) / ((count - 1) * (count - 2)) / variance**1.5
    beta = skewness / (6 * math.sqrt(count))
    low, high = (_johnson(float(stats.t.ppf(p, count - 1)), beta) for p in ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return Interval(mean - high * error, mean - low * error)


def _johnson(quantile: float, beta: float) -> float:
    """A quantile of t, transformed for the skewness of what it is made of."""
    if abs(beta) < 1e-9:
        return quantile
    return (float(np.cbrt(1 + 6 * beta * (quantile - beta))) - 1) / (2 * beta)
