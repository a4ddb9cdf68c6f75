"""Confidence intervals: over replications with independent seeds, and within one run by batch means and a block bootstrap.

Everything here works on plain arrays and knows nothing of runs; scipy is loaded when it is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vajra_py.metrics.definitions import Floats

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


def floats(values: Sequence[float | None]) -> Floats:
    """The values that are known."""
    return np.array([value for value in values if value is not None], dtype=np.float64)
