"""Searches for the highest rate at which an SLO holds: the rate at which each of its conditions ends to hold, under each seed by itself.

Every run says of every condition how it does, so that one search serves them all. One seed finds the neighbourhood; each seed then closes in on its own capacity from there, all seeds
at once; and seeds are added while the interval is wider than wanted. What is run next depends on nothing but what was run: a search that was interrupted goes on, however many workers there are.
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
"""Ratio of the ends of a bracket below which the first seed says no more about the others."""
_FIRST_STEP = 2.0
_LONGEST_STEP = 1.6
"""Of a seed whose neighbourhood is known."""
_LONGEST_GROWTH = 4.0
_GROWTH = 1.5
"""Of the steps of a seed whose capacity lies further out, on the logarithm of the rate."""
_MAX_LINES = 3
"""Probes of a bracket after which it is halved instead of cut where a line through its ends passes zero."""
_PEAK = 1.25
"""Ratio of two rates below which no rate between them is sought at which a goodput may hold."""
_MOST_PROBES = 40
"""Rates that are run under one seed: slacks that have nothing to do with the rate would be searched for ever."""
_FLATTEST = -0.5
"""Change of the slack by the logarithm of the rate that is taken for less."""
_BEYOND = 1.5
"""Times the capacity: a condition that holds there under all seeds does not decide, and is followed no further."""


@dataclass(frozen=True, slots=True)
class RateQuestion:
    """What is asked about a rate."""

    slo: Slo
    low: float
    high: float
    start: float
    precision_fraction: float
    replications: int
    max_replications: int

    @property
    def num_first_seeds(self) -> int:
        """Seeds that are run in any case: an interval takes `FEWEST_SEEDS`."""
        return max(self.replications, min(FEWEST_SEEDS, self.max_replications))


def search_rate(question: RateQuestion) -> Search:
    """The highest rate at which the SLO holds; see `capacity_seeds` for what that is."""
    study = _Study(question)
    guess = yield from _locate(study)
    num_seeds = question.num_first_seeds
    limit = math.inf if question.slo.has_alternatives else _BEYOND * guess
    while True:
        yield from _close_in(study, num_seeds, guess, limit)
        found = study.estimate(num_seeds)
        if limit < _needed(found) < math.inf:  # the first seed took less than the others
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
    """A rate that a condition has to hold at under all seeds so as not to decide."""
    return found.most if found.interval is None else max(found.most, found.interval.high)


def _locate(study: _Study) -> Generator[Sequence[Probe], Slacks, float]:
    """A rate near the whole SLO's capacity under the first seed."""
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
    """Run every seed where its conditions end to hold, all seeds at once, one rate of each at a time."""
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
    """How one condition's crossing under one seed is sought."""

    guess: float
    ratio: float
    """Of the ends of a bracket that is narrow enough."""
    slope: float | None
    """Change of the slack by the logarithm of the rate, as other seeds show it."""
    limit: float
    """A rate beyond which nothing more is wanted."""


@dataclass(slots=True)
class _Study:
    """Everything that was run, by seed."""

    question: RateQuestion
    seeds: list[SeedRuns] = field(default_factory=list)
    _num_cuts: dict[tuple[int, int], int] = field(default_factory=dict)
    """By seed and condition, probes inside a bracket."""

    @property
    def num_conditions(self) -> int:
        """Of the SLO."""
        return len(self.question.slo.conditions)

    def seed(self, position: int) -> SeedRuns:
        """What was run under a seed."""
        while len(self.seeds) <= position:
            self.seeds.append(SeedRuns.none_yet(self.num_conditions))
        return self.seeds[position]

    def run(self, wanted: Sequence[tuple[float, int]]) -> Generator[Sequence[Probe], Slacks, None]:
        """Have rates run under seeds."""
        found = yield [((rate,), seed) for rate, seed in wanted]
        for rate, seed in wanted:
            self.seed(seed).add(rate, found[(rate,), seed])

    def inside(self, rate: float) -> float:
        """Four significant digits, which people can read and find again; or the end of the range that the rate lies beyond, as it was given."""
        return min(max(float(f"{rate:.4g}"), self.question.low), self.question.high)

    def slopes(self) -> list[float]:
        """By condition, the change of the slack by the logarithm of the rate where it passes zero: the median of the seeds; of no use where it does not fall."""
        found = []
        for condition in range(self.num_conditions):
            own = [_slope(one.crossing(condition)) for one in self.seeds if one.rates]
            known = [slope for slope in own if slope is not None]
            found.append(min(float(np.median(known)), _FLATTEST) if known else 4 * _FLATTEST)
        return found

    def limits(self, num_seeds: int, limit: float) -> list[float]:
        """By condition, the rate up to which it is followed: to its end where any seed fails below the limit."""
        known = self.seeds[:num_seeds]
        ends = [[one.crossing(k) for one in known if one.rates] for k in range(self.num_conditions)]
        fails = [any(one.high is not None and one.rate < limit for one in own) for own in ends]
        return [math.inf if failed else limit for failed in fails]

    def next_of_seed(self, seed: int, guess: float, slopes: Sequence[float], limits: Sequence[float]) -> float | None:
        """The rate to run next under a seed, for the condition that ends first among those that are not settled; None when all are."""
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
        """The rate that says most about where a condition ends to hold; None when that is known well enough, or lies outside the range."""
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
            rounded = min(max(at, self.question.low), self.question.high)  # finer than what people read
        return None if rounded in runs.slacks else rounded

    def _outside(self, runs: SeedRuns, condition: int, aim: _Aim) -> float | None:
        """A rate to try when none of those that were run holds: lower than all, unless the slack is largest further up."""
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
        """Of the whole SLO."""
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
        """The answer as it stands."""
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
        """The condition that fails up to this rate under most seeds though it holds at higher ones: a goodput that so few requests cannot reach."""
        for condition in range(self.num_conditions):
            rises = sum(self.seeds[k].crossing(condition).rises_at >= rate for k in range(num_seeds))
            if 2 * rises > num_seeds:
                return condition
        return None


def _outcome(seeds: Sequence[SeedCapacity], question: RateQuestion) -> float:
    """-1 of a condition that never holds in the range, 1 of one that always does, else 0."""
    if all(one.side == "below" for one in seeds):
        return -1.0
    return float(all(one.side == "above" and one.rate >= question.high for one in seeds))


def _slope(found: Crossing) -> float | None:
    if found.low is None or found.high is None:
        return None
    return (found.high[1] - found.low[1]) / math.log(found.high[0] / found.low[0])


def _step(rates: Sequence[float], slack: float, aim: _Aim, *, upwards: bool) -> float:
    """The factor by which to go on beyond the last rate, along the slope and a quarter further; longer each time, so that nothing is far."""
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
    """A rate between two: a little to the farther end's side of where a line passes zero, so that the bracket soon shrinks from both."""
    middle = math.sqrt(low[0] * high[0])
    if num_cuts > _MAX_LINES or high[0] > 4 * low[0]:
        return middle
    guess, little = root(low, high), math.pow(ratio, 0.4)
    at = guess / little if guess / low[0] > high[0] / guess else guess * little
    room = min(little, math.pow(high[0] / low[0], 0.2))
    return min(max(at, low[0] * room), high[0] / room)
