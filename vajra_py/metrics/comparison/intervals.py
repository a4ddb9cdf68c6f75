"""Confidence intervals of means over replications with independent seeds, and detection of a run's warm-up.

The functions take plain numbers and are independent of runs; scipy is loaded on first use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from vajra_py.metrics.definitions import Floats

CONFIDENCE = 0.95


class Interval(Struct, frozen=True):
    """Confidence interval of the mean over all possible seeds, at level `CONFIDENCE`, in the unit of the value."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2


def replication_interval(values: Sequence[float]) -> Interval | None:
    """Return Student's t interval for the mean of independent replications of a quantity of any sign; None for fewer
    than two values.
    """
    half = _half_width(values)
    if half is None:
        return None
    mean = float(np.mean(values))
    return Interval(mean - half, mean + half)


def positive_interval(values: Sequence[float]) -> Interval | None:
    """Return an interval with ends above zero for the mean of independent replications of a positive quantity.

    It is Student's t interval for the logarithm of the mean. The standard error of the logarithm is the standard error
    of the mean divided by the mean (delta method): `mean · exp(± t s / (√n mean))`. The arithmetic mean is the
    geometric centre of the interval. None for fewer than two values, and for equal values, which give no estimate of
    the variance.
    """
    half, mean = _half_width(values), float(np.mean(values)) if len(values) else 0.0
    if not half or not mean > 0:
        return None
    ratio = math.exp(min(half / mean, _LARGEST_EXPONENT))
    return Interval(mean / ratio, mean * ratio)


def proportion_interval(values: Sequence[float]) -> Interval | None:
    """Return an interval with ends between 0 and 1 for the mean of independent replications of a proportion.

    It is Student's t interval for the log-odds of the mean `p`. The standard error of the log-odds is the standard
    error of the mean divided by `p (1 - p)` (delta method). None for fewer than two values, and for equal values, such
    as 1 in every replication: an interval of zero width would claim more than a few replications can show.
    """
    half, mean = _half_width(values), float(np.mean(values)) if len(values) else 0.0
    if not half or not 0 < mean < 1:
        return None
    ratio = math.exp(min(half / (mean * (1 - mean)), _LARGEST_EXPONENT))
    odds = mean / (1 - mean)
    return Interval(odds / (odds + ratio), odds * ratio / (1 + odds * ratio))


_LARGEST_EXPONENT = 300.0
"""Largest exponent, to keep the ends of an interval finite."""


def _half_width(values: Sequence[float]) -> float | None:
    """Return half the width of Student's t interval; None for fewer than two values, 0 if the values are equal up to
    rounding.
    """
    known = np.asarray(values, dtype=np.float64)
    if known.size < 2:
        return None
    error = float(known.std(ddof=1)) / math.sqrt(known.size)
    if error <= _ROUNDING * abs(float(known.mean())):
        return 0.0
    from scipy import stats

    return float(stats.t.ppf((1 + CONFIDENCE) / 2, known.size - 1)) * error


_ROUNDING = 1e-12
"""Relative standard error below which a variation counts as rounding error."""


def floats(values: Sequence[float | None]) -> Floats:
    """Return the values that are not None, as an array."""
    return np.array([value for value in values if value is not None], dtype=np.float64)


def mser5(values: Floats) -> int:
    """Return the number of values to leave out at the start, as warm-up.

    MSER-5 (K. P. White, "An effective truncation heuristic for bias reduction in simulation output", Simulation 69,
    1997): the series is divided into batches of five values. The number of leading batches left out is the one for
    which the standard error of the remaining batch means is smallest. If it reaches into the second half of the series,
    no steady state was found, and the result is 0. The result is also 0 for fewer than 50 values.
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
