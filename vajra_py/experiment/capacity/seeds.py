"""Statistics of a search for a rate: capacities of single seeds, and the estimate of their geometric mean.

The capacity of a condition under one seed is the highest rate at which it holds. It is defined as the rate at which the
non-increasing least-squares fit of its slack over the logarithm of the rate crosses zero, so that it is unique even if
the slack changes its sign several times by chance. The capacity of a condition is the geometric mean of the seeds'
capacities.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from vajra_py.config.slo import Slo
from vajra_py.metrics.comparison.intervals import CONFIDENCE, Interval, replication_interval

FEWEST_SEEDS = 5
"""Smallest number of seeds for which the largest of their capacities may be the upper end of a 95 % interval for the
median. The capacities of all `n` seeds lie below the median with a probability of `2 ** -n`, which is less than 5 %
from five seeds on.
"""

_CURVE_LEVELS = 40
"""Number of a curve's points on each side of the limit."""
_CURVE_SEEDS = 3
"""Minimum number of seeds for a point of a curve (all seeds if there are fewer)."""

Side: TypeAlias = Literal["exact", "above", "below"]


@dataclass(frozen=True, slots=True)
class SeedCapacity:
    """The highest rate at which a condition holds under one seed."""

    rate: float
    side: Side = "exact"
    """`above`: the condition still holds at `rate`, the highest one that was run; `below`: it fails at `rate`, the
    lowest one that was run.
    """


@dataclass(frozen=True, slots=True)
class Crossing:
    """Zero crossing of a condition's slack, from the runs under one seed."""

    low: tuple[float, float] | None
    """(Highest rate at which the condition holds, fitted slack at this rate); None if it holds at no rate that was run.
    """
    high: tuple[float, float] | None
    """(Next higher rate that was run, fitted slack at this rate); the lowest rate that was run if `low` is None. None
    if the condition holds at the highest rate that was run.
    """
    rises_at: float = 0.0
    """Highest rate at which the condition fails although it holds at higher rates; 0 if there is none."""

    @property
    def rate(self) -> float:
        """Rate at which the line through `low` and `high`, over the logarithm of the rate, crosses zero; if there is
        only one of these points, the rate of this point.
        """
        if self.low is None or self.high is None:
            end = self.high if self.low is None else self.low
            assert end is not None  # an end exists, as there is at least one run
            return end[0]
        return root(self.low, self.high)

    @property
    def capacity(self) -> SeedCapacity:
        """The rate, as the seed's capacity or as a bound of it."""
        return SeedCapacity(self.rate, "below" if self.low is None else "above" if self.high is None else "exact")


def crossing(rates: Sequence[float], slacks: Sequence[float]) -> Crossing:
    """Return the zero crossing of a condition's slack under one seed, given the rates that were run, in ascending
    order, and the slack at each of them.

    The fit starts at the largest slack: a goodput is too low both at low and at high rates, and its capacity is the
    upper crossing.
    """
    best = max(slacks)
    first = len(slacks) - 1 - slacks[::-1].index(best)
    if best < 0:
        return Crossing(None, (rates[0], slacks[0]))
    rises_at = max((rate for rate, slack in zip(rates[:first], slacks[:first], strict=True) if slack < 0), default=0.0)
    fit = _falling(slacks[first:])
    last = max(k for k, slack in enumerate(fit) if slack >= 0)
    low = rates[first + last], fit[last]
    if last + 1 == len(fit):
        return Crossing(low, None, rises_at)
    return Crossing(low, (rates[first + last + 1], fit[last + 1]), rises_at)


def _falling(slacks: Sequence[float]) -> Sequence[float]:
    """Return the non-increasing least-squares fit of the slacks."""
    if all(a >= b for a, b in itertools.pairwise(slacks)):
        return slacks
    from scipy.optimize import isotonic_regression

    fit: list[float] = isotonic_regression(slacks, increasing=False).x.tolist()
    return fit


def root(low: tuple[float, float], high: tuple[float, float]) -> float:
    """Return the rate between two (rate, slack) points at which the line through them, over the logarithm of the rate,
    is zero.
    """
    (first, above), (last, below) = low, high
    part = 0.5 if above == below else min(1.0, max(0.0, above / (above - below)))
    return float(first * (last / first) ** part)


@dataclass(frozen=True, slots=True)
class ConditionCapacity:
    """The highest rate at which one condition of the SLO holds."""

    text: str
    by_seed: tuple[SeedCapacity, ...]
    least: float
    """Lower limit of the geometric mean over seeds; 0 if any capacity lies below the lowest rate that was run."""
    most: float
    """Upper limit of the geometric mean over seeds, equal to `least` if every capacity is exact; infinite if any
    capacity lies above the highest rate that was run.
    """
    interval: Interval | None
    """Confidence interval; None with one seed."""
    confidence: float

    @property
    def rate(self) -> float:
        """Geometric mean of the seeds' capacities, or the known bound of this mean."""
        return self.least if self.least > 0 else self.most

    @property
    def bound(self) -> Bound:
        """Relation of `rate` to the capacity: equal to it, a bound of it, or unknown."""
        return bound_of(self.least, self.most)


Bound: TypeAlias = Literal["exact", "at least", "at most", "unknown"]


def bound_of(least: float, most: float) -> Bound:
    """Return how a rate (`least` if above 0, else `most`) is related to a capacity between `least` and `most`."""
    if math.isclose(least, most, rel_tol=1e-12):
        return "exact"
    if least > 0:
        return "at least"
    return "unknown" if math.isinf(most) else "at most"


def condition_capacity(text: str, seeds: Sequence[SeedCapacity], *, may_go_on: bool) -> ConditionCapacity:
    """Return the capacity of a condition from its capacities under single seeds.

    `may_go_on` is True if more seeds would have been run for a wider interval; see `_seeds_interval`.
    """
    logs = [math.log(one.rate) for one in seeds]
    mean = math.exp(float(np.mean(logs)))
    sides = {one.side for one in seeds}
    interval, confidence = _seeds_interval(seeds, may_go_on=may_go_on)
    least = 0.0 if "below" in sides else mean
    most = math.inf if "above" in sides else mean
    return ConditionCapacity(text, tuple(seeds), least, most, interval, confidence)


def _seeds_interval(seeds: Sequence[SeedCapacity], *, may_go_on: bool) -> tuple[Interval | None, float]:
    """Return the interval of the geometric mean, and the confidence of this interval.

    The interval is Student's t interval of the logarithms; its upper end is at most the highest seed's capacity, beyond
    which every seed fails. A search that stops once the interval is narrow stops more often when the seeds agree by
    chance, so if `may_go_on`, the half width of `n` seeds is increased by a fraction of `1 / n`
    (`tests/experiment/test_capacity_coverage.py`). With fewer than `FEWEST_SEEDS` seeds, or if a capacity is only
    bounded, the interval is the range of the seeds, which contains the median with a known probability.
    """
    count = len(seeds)
    if count < 2:
        return None, 0.0
    rates = [one.rate for one in seeds]
    low = 0.0 if any(one.side == "below" for one in seeds) else min(rates)
    high = math.inf if any(one.side == "above" for one in seeds) else max(rates)
    one_sided = low == 0 or math.isinf(high)
    if one_sided or count < FEWEST_SEEDS:
        return Interval(low, high), min(CONFIDENCE, 1 - 2.0 ** ((0 if one_sided else 1) - count))
    logs = [math.log(one) for one in rates]
    found = replication_interval(logs)
    assert found is not None  # None only for fewer than two values
    mean, half = float(np.mean(logs)), found.half_width * (1 + 1 / count if may_go_on else 1.0)
    return Interval(math.exp(mean - half), max(math.exp(mean), min(math.exp(mean + half), high))), CONFIDENCE


def typical_curve(
    by_seed: Sequence[Sequence[tuple[float, float]]], own: ConditionCapacity
) -> list[tuple[float, float]]:
    """Return the (rate, slack) points of a curve that crosses zero at the condition's capacity; an empty list if only a
    bound of the capacity is known.

    The rate at each slack is the capacity that would result if the condition's limit were shifted by that slack. To
    compute it, the rate at this slack under each seed is divided by the capacity under the same seed. The condition's
    capacity is multiplied by the geometric mean of these quotients, without seeds that did not reach the slack.
    """
    zeros = [one.rate if one.side == "exact" else None for one in own.by_seed]
    known = [(sorted(runs), zero) for runs, zero in zip(by_seed, zeros, strict=True) if runs and zero is not None]
    if own.bound != "exact" or not known:
        return []
    slacks = [slack for runs, _ in known for _, slack in runs]
    lower, upper = (
        [end * k / _CURVE_LEVELS for k in range(1, _CURVE_LEVELS + 1)] for end in (min(slacks), max(slacks))
    )
    outwards = [_along(levels, known, own.rate) for levels in (upper, lower)]
    return [*reversed(outwards[0]), (own.rate, 0.0), *outwards[1]]


def _along(
    levels: Sequence[float], known: Sequence[tuple[Sequence[tuple[float, float]], float]], rate: float
) -> list[tuple[float, float]]:
    """Return the curve's points at the slacks `levels`, which are in order of increasing distance from zero. The curve
    ends before the first slack that too few seeds reached, or at which the rate would reverse its direction.
    """
    curve, last = [], 0.0
    for level in levels:
        moves = []
        for runs, zero in known:
            found = crossing([one for one, _ in runs], [slack - level for _, slack in runs])
            if found.low is not None and found.high is not None:
                moves.append(math.log(found.rate / zero))
        move = float(np.mean(moves)) if len(moves) >= min(len(known), _CURVE_SEEDS) else math.nan
        if not (move <= last if level > 0 else move >= last):
            break
        last = move
        curve.append((rate * math.exp(move), level))
    return curve


@dataclass(frozen=True, slots=True)
class RateEstimate:
    """Capacity of a whole SLO: the minimum over conditions joined by `and`, the maximum over those joined by `or`."""

    least: float
    most: float
    """Upper limit of the capacity; `least` is the lower one. See `ConditionCapacity`."""
    interval: Interval | None
    confidence: float
    conditions: tuple[ConditionCapacity, ...]
    decides: int
    """Position of the condition whose capacity is that of the SLO."""

    @property
    def rate(self) -> float:
        """Capacity of the SLO, or the known bound of this capacity."""
        return self.least if self.least > 0 else self.most

    @property
    def bound(self) -> Bound:
        """Relation of `rate` to the capacity: equal to it, a bound of it, or unknown."""
        return bound_of(self.least, self.most)


def rate_estimate(slo: Slo, conditions: Sequence[ConditionCapacity]) -> RateEstimate:
    """Return the capacity of the SLO from its conditions' capacities; the ends of the interval are combined in the same
    way.
    """
    least, by_least = slo.decided([one.least for one in conditions])
    most, by_most = slo.decided([one.most for one in conditions])
    decides = by_least if least > 0 else by_most
    intervals = [one.interval for one in conditions if one.interval is not None]
    if len(intervals) < len(conditions):
        return RateEstimate(least, most, None, 0.0, tuple(conditions), decides)
    low, high = slo.combined([one.low for one in intervals]), slo.combined([one.high for one in intervals])
    confidence = min(one.confidence for one in conditions)
    return RateEstimate(least, most, Interval(low, high), confidence, tuple(conditions), decides)


@dataclass(slots=True)
class SeedRuns:
    """Runs under one seed: the slacks of the conditions by rate."""

    num_conditions: int
    rates: list[float]
    """Rates in ascending order."""
    slacks: dict[float, tuple[float, ...]]
    _crossings: list[Crossing | None]

    @classmethod
    def none_yet(cls, num_conditions: int) -> SeedRuns:
        """Return an empty record of a seed."""
        return cls(num_conditions, [], {}, [None] * num_conditions)

    def add(self, rate: float, slacks: Sequence[float]) -> None:
        """Add a run at a rate."""
        if rate not in self.slacks:
            bisect.insort(self.rates, rate)
        self.slacks[rate] = tuple(slacks)
        self._crossings = [None] * self.num_conditions

    def crossing(self, condition: int) -> Crossing:
        """Return the crossing of one condition."""
        known = self._crossings[condition]
        if known is None:
            known = crossing(self.rates, [self.slacks[rate][condition] for rate in self.rates])
            self._crossings[condition] = known
        return known
