"""Search for the highest rate at which an SLO holds, for each of its conditions and each seed.

The slack of a condition in a run is at least zero if the condition holds. Each run gives the slacks of all conditions,
so one search covers all conditions. First, runs under the first seed give an approximate capacity. Then the capacity
under every seed is bracketed, concurrently for all seeds. Seeds are added while the interval is wider than requested.
The next runs depend only on the results so far, so an interrupted search resumes with the same runs, for any number of
workers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np

from vajra_py.config.slo import Slo
from vajra_py.experiment.capacity.search import Answer, Probe, Search, Slacks, Stop
from vajra_py.experiment.capacity.seeds import (
    FEWEST_SEEDS,
    Crossing,
    RateEstimate,
    SeedCapacity,
    SeedRuns,
    condition_capacity,
    rate_estimate,
    root,
)
from vajra_py.metrics.comparison.intervals import CONFIDENCE

_COARSE = 1.5
"""Ratio of a bracket's ends at which the first seed's bracket is narrow enough to start the other seeds."""
_FIRST_STEP = 2.0
_LONGEST_STEP = 1.6
"""Largest step, as a factor between two rates, that is derived from an estimated slope of the slack."""
_LONGEST_GROWTH = 4.0
_GROWTH = 1.5
"""Factor by which a seed's steps in the logarithm of the rate grow until its capacity is bracketed."""
_MAX_LINES = 3
"""Largest `num_cuts` (number of rates tried inside brackets so far, see `_between`) for which the next rate is
interpolated; above it, the bracket is bisected.
"""
_PEAK = 1.25
"""Ratio of two adjacent rates below which the search does not look for a maximum of a goodput between them."""
_MOST_PROBES = 40
"""Maximum number of rates per seed; this limit ends a search whose slack does not depend on the rate."""
_FLATTEST = -0.5
"""Flattest slope of the slack over the logarithm of the rate; it replaces flatter estimates."""
_BEYOND = 1.5
"""Multiple of the estimated capacity. A condition that holds at this rate under all seeds cannot be the deciding one,
so its search ends.
"""


@dataclass(frozen=True, slots=True)
class RateQuestion:
    """Parameters of a search for a rate."""

    slo: Slo
    low: float
    high: float
    start: float
    precision_fraction: float
    replications: int
    max_replications: int

    @property
    def num_first_seeds(self) -> int:
        """Number of seeds that are always run: `replications`, but at least `FEWEST_SEEDS` if `max_replications` allows
        it.
        """
        return max(self.replications, min(FEWEST_SEEDS, self.max_replications))


def search_rate(question: RateQuestion) -> Search:
    """Search for the highest rate at which the SLO holds, as defined in `vajra_py.experiment.capacity.seeds`."""
    study = _Study(question)
    guess = yield from _locate(study)
    num_seeds = question.num_first_seeds
    limit = math.inf if question.slo.has_alternatives else _BEYOND * guess
    while True:
        yield from _close_in(study, num_seeds, guess, limit)
        found = study.estimate(num_seeds)
        # The limit was computed from the first seed's capacity. It is raised if other seeds have higher capacities.
        if limit < _needed(found) < math.inf:
            limit = max(_needed(found), _BEYOND * found.most)
            continue
        answer = study.answer(found, num_seeds)
        if answer.stop != "max_replications" or num_seeds >= question.max_replications:
            return answer
        half = found.interval.half_width if found.interval is not None else math.inf
        growth = min((half / (question.precision_fraction * found.rate)) ** 2, 2.0)
        num_seeds = min(question.max_replications, max(num_seeds + 2, math.ceil(num_seeds * growth)))
        guess = found.rate


def _needed(found: RateEstimate) -> float:
    """Return the rate at which a condition must hold under all seeds to be ruled out as the deciding one."""
    return found.most if found.interval is None else max(found.most, found.interval.high)


def _locate(study: _Study) -> Generator[Sequence[Probe], Slacks, float]:
    """Search under the first seed alone and return a rate near the capacity of the whole SLO."""
    question = study.question
    runs = study.seed(0)
    guess = study.inside(question.start)
    joint = SeedRuns.none_yet(1)
    while len(runs.rates) < _MOST_PROBES:
        at = study.next_rate(joint, 0, _Aim(guess, _COARSE, None, math.inf))
        if at is None:
            break
        yield from study.run([(at, 0)])
        joint.add(at, [question.slo.combined(runs.slacks[at])])
    return joint.crossing(0).rate


def _close_in(study: _Study, num_seeds: int, guess: float, limit: float) -> Generator[Sequence[Probe], Slacks, None]:
    """Narrow down every seed's capacities. Each round requests one run for each seed that still needs one, so that
    seeds run concurrently.
    """
    while True:
        slopes = study.slopes()
        followed = study.limits(num_seeds, limit)
        wanted = [
            (at, seed)
            for seed in range(num_seeds)
            if (at := study.next_of_seed(seed, guess, slopes, followed)) is not None
        ]
        if not wanted:
            return
        yield from study.run(wanted)


@dataclass(frozen=True, slots=True)
class _Aim:
    """Target of the search for one condition's crossing under one seed."""

    guess: float
    ratio: float
    """Ratio of a bracket's ends at which the bracket is narrow enough."""
    slope: float | None
    """Slope of the slack over the logarithm of the rate, estimated from other seeds; None if unknown."""
    limit: float
    """Rate above which no runs are needed."""


@dataclass(slots=True)
class _Study:
    """All runs so far, by seed."""

    question: RateQuestion
    seeds: list[SeedRuns] = field(default_factory=list)
    _num_cuts: dict[tuple[int, int], int] = field(default_factory=dict)
    """Number of rates requested so far that lay between the lowest and the highest rate run before, by (position of the
    seed, condition).
    """

    @property
    def num_conditions(self) -> int:
        """Number of conditions of the SLO."""
        return len(self.question.slo.conditions)

    def seed(self, position: int) -> SeedRuns:
        """Return the runs of a seed."""
        while len(self.seeds) <= position:
            self.seeds.append(SeedRuns.none_yet(self.num_conditions))
        return self.seeds[position]

    def run(self, wanted: Sequence[tuple[float, int]]) -> Generator[Sequence[Probe], Slacks, None]:
        """Request runs, given as (rate, seed position), and record their slacks."""
        found = yield [((rate,), seed) for rate, seed in wanted]
        for rate, seed in wanted:
            self.seed(seed).add(rate, found[(rate,), seed])

    def inside(self, rate: float) -> float:
        """Return a rate rounded to four significant digits, for readability and reproducibility, and clamped to the
        range.
        """
        return min(max(float(f"{rate:.4g}"), self.question.low), self.question.high)

    def slopes(self) -> list[float]:
        """Return the slope of each condition's slack at its zero crossing: the median over seeds, at most `_FLATTEST`,
        or an assumed slope if it is unknown for all seeds.
        """
        found = []
        for condition in range(self.num_conditions):
            own = [_slope(one.crossing(condition)) for one in self.seeds if one.rates]
            known = [slope for slope in own if slope is not None]
            found.append(min(float(np.median(known)), _FLATTEST) if known else 4 * _FLATTEST)
        return found

    def limits(self, num_seeds: int, limit: float) -> list[float]:
        """Return the maximum rate to search for each condition: unlimited if the condition fails below `limit` under
        any seed, else `limit`.
        """
        known = self.seeds[:num_seeds]
        ends = [[one.crossing(k) for one in known if one.rates] for k in range(self.num_conditions)]
        fails = [any(one.high is not None and one.rate < limit for one in own) for own in ends]
        return [math.inf if failed else limit for failed in fails]

    def next_of_seed(self, seed: int, guess: float, slopes: Sequence[float], limits: Sequence[float]) -> float | None:
        """Return the next rate to run under a seed. It is chosen for the condition with the lowest capacity among those
        whose capacity is not known precisely enough. Return None if there is no such condition, or if the seed has
        `_MOST_PROBES` rates.
        """
        runs = self.seed(seed)
        if not runs.rates:
            return self.inside(guess)
        if len(runs.rates) >= _MOST_PROBES:
            return None
        ratio = 1 + self.question.precision_fraction
        for condition in sorted(range(self.num_conditions), key=lambda k: runs.crossing(k).rate):
            key = seed, condition
            aim = _Aim(guess, ratio, slopes[condition], limits[condition])
            at = self.next_rate(runs, condition, aim, self._num_cuts.get(key, 0))
            if at is not None:
                if runs.rates[0] < at < runs.rates[-1]:
                    self._num_cuts[key] = self._num_cuts.get(key, 0) + 1
                return at
        return None

    def next_rate(self, runs: SeedRuns, condition: int, aim: _Aim, num_cuts: int = 0) -> float | None:
        """Return the most informative next rate for a condition; None if its capacity is known precisely enough or lies
        outside the range.
        """
        if not runs.rates:
            return aim.guess
        found = runs.crossing(condition)
        if found.low is None:
            at = self._outside(runs, condition, aim)
        elif found.high is None:
            if found.low[0] >= min(aim.limit, self.question.high):
                return None
            at = min(found.low[0] * _step(runs.rates, found.low[1], aim, upwards=True), aim.limit)
        elif found.high[0] <= found.low[0] * aim.ratio:
            return None
        else:
            at = _between(found.low, found.high, aim.ratio, num_cuts)
        if at is None:
            return None
        rounded = self.inside(at)
        if rounded in runs.slacks:
            # The rounded rate was already run, so the exact rate is tried.
            rounded = min(max(at, self.question.low), self.question.high)
        return None if rounded in runs.slacks else rounded

    def _outside(self, runs: SeedRuns, condition: int, aim: _Aim) -> float | None:
        """Return the next rate for a condition that fails at all rates so far; None if no rate is left to try.

        If the slack is largest at the highest of several rates, the next rate is above this one. If the slack is
        largest at a rate between others, the next rate is between this one and a neighbour. Otherwise, or if no
        further rate is needed there, the next rate is below all rates so far.
        """
        slacks = [runs.slacks[rate][condition] for rate in runs.rates]
        best = int(np.argmax(slacks))
        lowest, highest = runs.rates[0], runs.rates[-1]
        if 0 < best == len(slacks) - 1 and highest < min(self.question.high, aim.limit):
            return highest * _step(runs.rates, slacks[-1], aim, upwards=True)
        if 0 < best < len(slacks) - 1:
            gaps = itertools.pairwise(runs.rates[best - 1 : best + 2])
            low, high = max(gaps, key=lambda gap: gap[1] / gap[0])
            if high > _PEAK * low:
                return math.sqrt(low * high)
        return lowest / _step(runs.rates, slacks[0], aim, upwards=False) if lowest > self.question.low else None

    def estimate(self, num_seeds: int) -> RateEstimate:
        """Return the estimate for the whole SLO."""
        may_go_on = num_seeds < self.question.max_replications
        conditions = self.question.slo.conditions
        return rate_estimate(
            self.question.slo,
            [
                condition_capacity(
                    one.text, [self.seeds[k].crossing(i).capacity for k in range(num_seeds)], may_go_on=may_go_on
                )
                for i, one in enumerate(conditions)
            ],
        )

    def answer(self, found: RateEstimate, num_seeds: int) -> Answer:
        """Return the answer that follows from the runs so far."""
        question = self.question
        sides = [_outcome(one.by_seed, question) for one in found.conditions]
        decided = question.slo.combined(sides)
        if decided < 0:
            return Answer("never", (question.low,), num_seeds=num_seeds, conditions=found.conditions)
        if decided > 0:
            return Answer("always", (question.high,), num_seeds=num_seeds, conditions=found.conditions)
        apart = None if question.slo.has_alternatives else self._fails_below(found.rate, num_seeds)
        if apart is not None:
            return Answer("apart", (found.rate,), None, num_seeds, conditions=found.conditions, decides=apart)
        return Answer(
            "found", (found.rate,), found.interval, num_seeds, found.confidence, found.bound, found.conditions, found.decides,
            self._stop(found),
        )  # fmt: skip

    def _stop(self, found: RateEstimate) -> Stop:
        if found.bound != "exact":
            return "range"
        if self.question.max_replications == 1 or found.interval is None:
            return "one seed"
        is_narrow = found.interval.half_width <= self.question.precision_fraction * found.rate
        return "precision" if is_narrow and found.confidence >= CONFIDENCE else "max_replications"

    def _fails_below(self, rate: float, num_seeds: int) -> int | None:
        """Return the position of a condition that, under most seeds, fails at this rate or above but holds at a still
        higher rate; None if there is no such condition. An example is a minimum goodput, which cannot be reached if
        too few requests arrive.
        """
        for condition in range(self.num_conditions):
            rises = sum(self.seeds[k].crossing(condition).rises_at >= rate for k in range(num_seeds))
            if 2 * rises > num_seeds:
                return condition
        return None


def _outcome(seeds: Sequence[SeedCapacity], question: RateQuestion) -> float:
    """Return -1 if a condition holds at no rate of the searched range, 1 if it holds at every rate, else 0.

    `seeds` has the capacity of each seed under this condition.
    """
    if all(one.side == "below" for one in seeds):
        return -1.0
    return float(all(one.side == "above" and one.rate >= question.high for one in seeds))


def _slope(found: Crossing) -> float | None:
    if found.low is None or found.high is None:
        return None
    return (found.high[1] - found.low[1]) / math.log(found.high[0] / found.low[0])


def _step(rates: Sequence[float], slack: float, aim: _Aim, *, upwards: bool) -> float:
    """Return the factor (above 1) between the highest rate so far (the lowest unless `upwards`) and the next rate.

    Its logarithm is the larger of two values: 1.25 times the estimated distance to zero slack, and `_GROWTH` times the
    logarithm of the previous factor in this direction. With an estimated slope, both values are limited. Without one,
    the first value is the logarithm of `_FIRST_STEP`, and the second value is not limited.
    """
    if aim.slope is None:
        distance = math.log(_FIRST_STEP)
    else:
        distance = min(max(1.25 * abs(slack / aim.slope), math.log(aim.ratio)), math.log(_LONGEST_STEP))
    if len(rates) > 1:
        last, before = (rates[-1], rates[-2]) if upwards else (rates[0], rates[1])
        growth = _GROWTH * abs(math.log(last / before))
        distance = max(distance, growth if aim.slope is None else min(growth, math.log(_LONGEST_GROWTH)))
    return math.exp(distance)


def _between(low: tuple[float, float], high: tuple[float, float], ratio: float, num_cuts: int) -> float:
    """Return the next rate inside a bracket, whose ends `low` and `high` are (rate, slack) points.

    The rate is the interpolated zero of the slack, shifted towards the farther end so that the bracket shrinks from
    both sides. If the ends differ by more than a factor of 4, or `num_cuts` (the number of rates tried inside brackets
    before) exceeds `_MAX_LINES`, the rate is the geometric mean of the ends.
    """
    middle = math.sqrt(low[0] * high[0])
    if num_cuts > _MAX_LINES or high[0] > 4 * low[0]:
        return middle
    guess, little = root(low, high), math.pow(ratio, 0.4)
    at = guess / little if guess / low[0] > high[0] / guess else guess * little
    room = min(little, math.pow(high[0] / low[0], 0.2))
    return min(max(at, low[0] * room), high[0] / room)
