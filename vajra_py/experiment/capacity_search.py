"""Searches for the highest rate and the cheapest replicas at which an SLO holds, given noisy answers.

A search is a generator: it yields the probes that it needs next and is sent their slacks, one for each seed; it knows nothing of runs. The slack of a probe is at least zero where
the SLO holds under that seed. The same seeds are used everywhere (common random numbers), so that slacks of neighbouring settings differ by the setting and not by chance. The
SLO is said to hold at a setting where the mean slack over its seeds is at least zero; the answer's 95 % interval is what Student's t interval of that mean leaves open.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from vajra_py.metrics.intervals import Interval, replication_interval

Setting: TypeAlias = tuple[float, ...]
"""What is searched: one rate, or numbers of replicas."""
Probe: TypeAlias = tuple[Setting, int]
"""A setting, and the number of seeds that it is wanted under."""
Slacks: TypeAlias = Mapping[Setting, Sequence[float]]
"""Of the settings that were probed: slacks by seed, at least as many as were asked for."""

_FIRST_STEP = 2.0
_COARSE = 1.5
"""Ratio of the ends of a bracket below which one seed says no more."""
_MAX_WIDENINGS = 3
_LONGEST_STEP = 1.4
_MAX_LINES = 6
"""Probes after which a bracket is halved instead of cut where a line through its ends passes zero."""
_FLATTEST = -0.5
"""Change of the slack by the logarithm of the rate that is taken for less."""
_FAR = 0.35
"""Slack beyond which one seed decides about numbers of replicas: more than a third off the limit."""


@dataclass(frozen=True, slots=True)
class RateQuestion:
    """What is asked about a rate."""

    low: float
    high: float
    start: float
    precision_fraction: float
    replications: int
    max_replications: int


Outcome: TypeAlias = Literal["found", "never", "always"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a search found; `never` and `always` are about the whole range that was allowed."""

    outcome: Outcome
    setting: Setting = ()
    """The highest rate, or the cheapest numbers of replicas; the end of the range where the SLO holds nowhere or everywhere."""
    interval: Interval | None = None
    """Of the rate, or of the cost of the replicas."""
    num_seeds: int = 0


Search: TypeAlias = Generator[Sequence[Probe], Slacks, Answer]


@dataclass(slots=True)
class _Seen:
    """Slacks known so far."""

    slacks: dict[Setting, list[float]] = field(default_factory=dict)

    def ask(self, settings: Sequence[Setting], num_seeds: int) -> Generator[Sequence[Probe], Slacks, None]:
        """Have these settings run under so many seeds, unless they were."""
        missing = [(one, num_seeds) for one in settings if len(self.slacks.get(one, ())) < num_seeds]
        if missing:
            found = yield missing
            for setting, count in missing:
                self.slacks[setting] = list(found[setting])[:count]

    def under(self, num_seeds: int) -> list[Setting]:
        """The settings that were run under so many seeds, in order."""
        return sorted(one for one, slacks in self.slacks.items() if len(slacks) >= num_seeds)

    def mean(self, setting: Setting, num_seeds: int) -> float:
        """The mean slack over the first seeds."""
        return float(np.mean(self.slacks[setting][:num_seeds]))

    def bounds(self, setting: Setting, num_seeds: int) -> Interval:
        """Student's interval of the mean slack."""
        interval = replication_interval(self.slacks[setting][:num_seeds])
        assert interval is not None  # at least two seeds are asked for
        return interval


def search_rate(question: RateQuestion) -> Search:
    """The highest rate at which the mean slack is at least zero.

    One seed brackets the rate by doubling and halving; all seeds then close in on it along the slope that one seed showed; and seeds are added while the interval is wider than
    asked for.
    """
    seen = _Seen()
    ends = yield from _bracket(seen, question, _inside(question, question.start), 1, _FIRST_STEP)
    if isinstance(ends, str):
        ends = yield from _check_end(seen, question, ends)
        if isinstance(ends, str):
            edge = question.low if ends == "never" else question.high
            return Answer(ends, (edge,), num_seeds=question.replications)
    else:
        ends = yield from _narrow(seen, ends, 1, _COARSE)
    slope = _slope(*((one[0], seen.slacks[one][0]) for one in ends))
    starts = [_inside(question, _root(*((one[0], seen.slacks[one][0]) for one in ends)))]
    seeds = question.replications
    while True:
        found = yield from _close_in(seen, question, starts, slope, seeds)
        if isinstance(found, str):
            edge = question.low if found == "never" else question.high
            return Answer(found, (edge,), num_seeds=seeds)
        rate = _root(*((one[0], seen.mean(one, seeds)) for one in found))
        if question.max_replications == 1:  # every seed would say the same: nothing is known of chance
            return Answer("found", (rate,), None, 1)
        interval = yield from _interval(seen, question, rate, found, seeds)
        wide = interval.half_width > question.precision_fraction * rate
        if not wide or seeds >= question.max_replications:
            return Answer("found", (rate,), interval, seeds)
        growth = (interval.half_width / (question.precision_fraction * rate)) ** 2
        seeds = min(question.max_replications, max(seeds + 2, math.ceil(seeds * min(growth, 2.0))))
        starts = [*found]


_Bracket: TypeAlias = tuple[Setting, Setting]


def _bracket(
    seen: _Seen, question: RateQuestion, start: Setting, num_seeds: int, step: float
) -> Generator[Sequence[Probe], Slacks, _Bracket | Literal["never", "always"]]:
    """Two rates between which the slack changes its sign, searched outwards from `start`; or that there are none in the range."""
    yield from seen.ask([start], num_seeds)
    low = high = start
    while seen.mean(low, num_seeds) < 0:
        if low[0] <= question.low:
            return "never"
        high, low = low, _inside(question, low[0] / step)
        step = step**1.5
        yield from seen.ask([low], num_seeds)
    while seen.mean(high, num_seeds) >= 0:
        if high[0] >= question.high:
            return "always"
        low, high = high, _inside(question, high[0] * step)
        step = step**1.5
        yield from seen.ask([high], num_seeds)
    return low, high


def _check_end(
    seen: _Seen, question: RateQuestion, outcome: Literal["never", "always"]
) -> Generator[Sequence[Probe], Slacks, _Bracket | Literal["never", "always"]]:
    """Whether all seeds say what the first one said about an end of the range."""
    end = (question.low if outcome == "never" else question.high,)
    yield from seen.ask([end], question.replications)
    if (seen.mean(end, question.replications) < 0) == (outcome == "never"):
        return outcome
    return (yield from _bracket(seen, question, end, question.replications, _COARSE))


def _narrow(seen: _Seen, ends: _Bracket, num_seeds: int, ratio: float) -> Generator[Sequence[Probe], Slacks, _Bracket]:
    """Halve the bracket (where a line through its ends says, kept off the ends) until its ratio is small."""
    low, high = ends
    while high[0] / low[0] > ratio:
        guess = _root((low[0], seen.mean(low, num_seeds)), (high[0], seen.mean(high, num_seeds)))
        room = (high[0] / low[0]) ** 0.2
        if high[0] / low[0] > 4:
            guess = math.sqrt(low[0] * high[0])
        at = (_rounded(min(max(guess, low[0] * room), high[0] / room)),)
        if at in (low, high):
            break
        yield from seen.ask([at], num_seeds)
        if seen.mean(at, num_seeds) >= 0:
            low = at
        else:
            high = at
    return low, high


def _close_in(
    seen: _Seen, question: RateQuestion, starts: Sequence[Setting], slope: float, num_seeds: int
) -> Generator[Sequence[Probe], Slacks, _Bracket | Literal["never", "always"]]:
    """Two rates as close as the precision asked for, between which the mean slack changes its sign; or that there are none in the range.

    Each probe lies where the slope (of slack by the logarithm of the rate), or a line through the ends, has its zero, and a little beyond, so that the next ones lie on both sides.
    """
    tolerance = 1 + question.precision_fraction
    low: Setting | None = None
    high: Setting | None = None
    todo = list(starts)
    for probe in itertools.count():
        yield from seen.ask(todo, num_seeds)
        for one in todo:
            if seen.mean(one, num_seeds) >= 0:
                low = max(low or one, one)
            else:
                high = min(high or one, one)
        known = seen.under(num_seeds)
        if len(known) > 1:
            slope = _slope(*((one[0], seen.mean(one, num_seeds)) for one in (known[0], known[-1])))
        if low is None:
            assert high is not None  # something was asked for
            if high[0] <= question.low:
                return "never"
            at = _along(high[0], seen.mean(high, num_seeds), slope, tolerance)
        elif high is None:
            if low[0] >= question.high:
                return "always"
            at = _along(low[0], seen.mean(low, num_seeds), slope, tolerance)
        else:
            low, high = min(low, high), max(low, high)  # noise may turn the slack's sign more than once
            if high[0] <= low[0] * tolerance:
                return low, high
            at = _between((low[0], seen.mean(low, num_seeds)), (high[0], seen.mean(high, num_seeds)), tolerance, probe)
        todo = [_inside(question, at)]
        if todo[0] in (low, high):
            if low is not None and high is not None:
                return low, high
            todo = [(min(max(at, question.low), question.high),)]  # finer than what people read
    raise AssertionError


def _along(rate: float, slack: float, slope: float, tolerance: float) -> float:
    """The rate at which the slope takes the slack through zero, and a quarter of the way further, at most `_LONGEST_STEP` away."""
    distance = min(max(1.25 * abs(slack / slope), math.log(tolerance)), math.log(_LONGEST_STEP))
    return float(rate * math.exp(math.copysign(distance, slack)))


def _between(low: tuple[float, float], high: tuple[float, float], tolerance: float, probe: int) -> float:
    """A rate between two: a little to the farther end's side of where a line passes zero, so that the bracket soon shrinks from both."""
    if probe > _MAX_LINES:
        return math.sqrt(low[0] * high[0])
    root, little = _root(low, high), math.pow(tolerance, 0.4)
    at = root / little if root / low[0] > high[0] / root else root * little
    room = min(little, math.pow(high[0] / low[0], 0.2))
    return min(max(at, low[0] * room), high[0] / room)


def _slope(low: tuple[float, float], high: tuple[float, float]) -> float:
    """Change of the slack by the logarithm of the rate between two points; of no use where it does not fall."""
    found = (high[1] - low[1]) / math.log(high[0] / low[0]) if high[0] > low[0] else 0.0
    return min(found, _FLATTEST)


def _interval(
    seen: _Seen, question: RateQuestion, rate: float, ends: _Bracket, num_seeds: int
) -> Generator[Sequence[Probe], Slacks, Interval]:
    """The rates at which the ends of the slack's interval pass zero, from further rates outwards where those known do not show them."""
    yield from _reach(seen, question, ends[0], num_seeds, downwards=True)
    yield from _reach(seen, question, ends[1], num_seeds, downwards=False)
    probed = seen.under(num_seeds)
    bounds = [seen.bounds(one, num_seeds) for one in probed]
    rates = [one[0] for one in probed]
    below = _crossing(rates, [one.low for one in bounds], rate, downwards=True)
    above = _crossing(rates, [one.high for one in bounds], rate, downwards=False)
    return Interval(below, above)


def _reach(
    seen: _Seen, question: RateQuestion, end: Setting, num_seeds: int, *, downwards: bool
) -> Generator[Sequence[Probe], Slacks, None]:
    """Probe outwards from an end of the bracket until the SLO certainly holds (downwards) or certainly fails, or a few times in vain."""
    for _ in range(_MAX_WIDENINGS):
        outside = [one for one in seen.under(num_seeds) if (one <= end if downwards else one >= end)]
        bounds = [seen.bounds(one, num_seeds) for one in outside]
        if any(one.low >= 0 if downwards else one.high < 0 for one in bounds):
            return
        last = outside[0] if downwards else outside[-1]
        if last[0] <= question.low if downwards else last[0] >= question.high:
            return
        missing = seen.bounds(last, num_seeds).low if downwards else seen.bounds(last, num_seeds).high
        all_seen = seen.under(num_seeds)
        slope = _slope(*((one[0], seen.mean(one, num_seeds)) for one in (all_seen[0], all_seen[-1])))
        at = _along(last[0], missing, slope, 1 + question.precision_fraction)
        yield from seen.ask([_inside(question, at)], num_seeds)


def _crossing(rates: Sequence[float], values: Sequence[float], rate: float, *, downwards: bool) -> float:
    """Where values by rising rate pass zero, searched outwards from `rate`; the last rate on that side where they do not."""
    pairs = list(zip(rates, values, strict=True))
    inner, outer = [p for p in pairs if p[0] <= rate], [p for p in pairs if p[0] > rate]
    if downwards:  # the lower bound is negative at the rate, and zero or more somewhere below
        path = [*outer[:1], *reversed(inner)]
        ends = next((k for k, (_, value) in enumerate(path) if value >= 0), None)
    else:
        path = [*inner[-1:], *outer]
        ends = next((k for k, (_, value) in enumerate(path) if value < 0), None)
    if ends is None:
        return path[-1][0]
    if ends == 0:
        return rate
    crossing = _root(*sorted((path[ends - 1], path[ends])))
    return min(crossing, rate) if downwards else max(crossing, rate)


def _root(low: tuple[float, float], high: tuple[float, float]) -> float:
    """Where a line through two (rate, slack) points passes zero; between them."""
    (first, above), (last, below) = low, high
    if above == below:
        return math.sqrt(first * last)
    return first + (last - first) * min(1.0, max(0.0, above / (above - below)))


def _rounded(rate: float) -> float:
    """Four significant digits: a setting that people can read, and find again."""
    return float(f"{rate:.4g}")


def _inside(question: RateQuestion, rate: float) -> Setting:
    """The rate, rounded, or the end of the range that it lies beyond, as it was given."""
    return (min(max(_rounded(rate), question.low), question.high),)


def search_replicas(ranges: Sequence[range], costs: Sequence[float], replications: int) -> Search:
    """The cheapest numbers of replicas at which the mean slack is at least zero, when more of any kind that is there never make it worse.

    Each test rules out a whole side: where the SLO fails, all with no more replicas of any kind and the same kinds left out; where it holds, all that cost as much or more. The
    interval goes from the cheapest that cannot be told from holding to the cheapest that certainly holds.
    """
    seen = _Seen()
    candidates = sorted(filter(any, itertools.product(*ranges)), key=lambda one: (_cost(one, costs), one))
    settings = [tuple(float(count) for count in one) for one in candidates]

    def decide(rule: Callable[[Setting], bool]) -> Generator[Sequence[Probe], Slacks, Setting | None]:
        open_ones, best = list(settings), None
        while open_ones:
            at = open_ones[len(open_ones) // 2]
            yield from seen.ask([at], 1)
            if abs(seen.slacks[at][0]) <= _FAR:
                yield from seen.ask([at], replications)
            if rule(at):
                best = at
                open_ones = open_ones[: open_ones.index(at)]
            else:
                open_ones = [one for one in open_ones if _is_other(one, at)]
        return best

    def certainly(setting: Setting) -> bool:
        slacks = seen.slacks[setting]
        return slacks[0] >= 0 if len(slacks) == 1 else seen.bounds(setting, len(slacks)).low >= 0

    def possibly(setting: Setting) -> bool:
        slacks = seen.slacks[setting]
        return slacks[0] >= 0 if len(slacks) == 1 else seen.bounds(setting, len(slacks)).high >= 0

    best = yield from decide(lambda setting: float(np.mean(seen.slacks[setting])) >= 0)
    if best is None:
        return Answer("never", settings[-1], num_seeds=replications)
    surely = yield from decide(certainly)
    maybe = yield from decide(possibly)
    low = _cost(maybe if maybe is not None else best, costs)
    high = _cost(surely, costs) if surely is not None else math.inf
    outcome: Outcome = "always" if best == settings[0] else "found"
    return Answer(outcome, best, Interval(low, high) if replications > 1 else None, replications)


def _is_other(one: Setting, failed: Setting) -> bool:
    """Whether nothing follows about this setting from one at which the SLO failed: it has more of some kind, or other kinds."""
    return any(a > b for a, b in zip(one, failed, strict=True)) or [not a for a in one] != [not b for b in failed]


def _cost(setting: Sequence[float], costs: Sequence[float]) -> float:
    return sum(count * cost for count, cost in zip(setting, costs, strict=True))
