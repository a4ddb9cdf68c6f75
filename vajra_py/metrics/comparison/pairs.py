"""Statistics of the difference between two settings: interval, probability of improvement, p-value and its correction.

Two policies serve the same requests under the same seed (common random numbers), so replications are compared in pairs
with equal seeds. Effects of a seed that are common to both runs of a pair cancel, so that few replications suffice to
detect small differences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from vajra_py.metrics.comparison.intervals import CONFIDENCE, Interval
from vajra_py.metrics.definitions import Floats

SIGNIFICANT_P = 1 - CONFIDENCE


class Difference(Struct, frozen=True):
    """Difference between two settings, positive if the first is higher."""

    mean: float
    interval: Interval | None
    """Confidence interval of the mean difference, not adjusted for other comparisons; None if `p_value` is None."""
    above_fraction: float
    """Estimated probability that a replication of the first setting has a higher value than one of the second; ties
    count half.
    """
    p_value: float | None
    """Two-sided p-value of the hypothesis of no difference, not adjusted for the number of comparisons. None if the
    difference is nonzero and equal in every pair, since a t test needs a variance above 0.
    """
    is_paired: bool
    """True if replications were paired by common seeds. With fewer than two common seeds, settings are compared as
    independent samples.
    """


def difference(first: Mapping[str, float], second: Mapping[str, float]) -> Difference | None:
    """Compare two settings, given their values by seed; None if either has fewer than two replications."""
    common = [seed for seed in first if seed in second]
    if len(common) >= 2:
        gaps = np.array([first[seed] - second[seed] for seed in common])
        mean, above = float(gaps.mean()), float((np.sign(gaps) + 1).mean() / 2)
        return Difference(mean, *_t_test(mean, _standard_error(gaps), len(gaps) - 1, above), is_paired=True)
    if len(first) < 2 or len(second) < 2:
        return None
    ours, theirs = np.array(list(first.values())), np.array(list(second.values()))
    mean = float(ours.mean() - theirs.mean())
    errors = _standard_error(ours), _standard_error(theirs)
    above = float((np.sign(ours[:, None] - theirs[None, :]) + 1).mean() / 2)
    freedom = _welch_freedom(errors, (len(ours), len(theirs)))
    return Difference(mean, *_t_test(mean, math.hypot(*errors), freedom, above), is_paired=False)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for multiple tests by Holm's method: S. Holm, "A simple sequentially rejective
    multiple test procedure" (1979).
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected = [1.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def _standard_error(values: Floats) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def _t_test(mean: float, error: float, freedom: float, above: float) -> tuple[Interval | None, float, float | None]:
    """Return (interval of the mean difference, `above` unchanged, two-sided p-value)."""
    if not error > abs(mean) * 1e-12:  # the difference is the same in every replication
        return (None, above, None) if mean else (Interval(0.0, 0.0), above, 1.0)
    from scipy import stats

    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    return Interval(mean - half, mean + half), above, float(2 * stats.t.sf(abs(mean) / error, freedom))


def _welch_freedom(errors: tuple[float, float], counts: tuple[int, int]) -> float:
    """Return the degrees of freedom for samples with different variances (Welch and Satterthwaite)."""
    parts = sum(error**4 / (count - 1) for error, count in zip(errors, counts, strict=True))
    return (errors[0] ** 2 + errors[1] ** 2) ** 2 / parts if parts > 0 else float(sum(counts) - 2)
