"""Interface of capacity searches as generators, and the search for the cheapest replica counts at which an SLO holds.

A search yields the probes it needs next and receives, for each, the slacks of the SLO's conditions; it does not execute
runs itself. Each probe has a seed, and the slack of a condition is at least zero if the condition holds in the run with
this seed. All settings use the same seeds (common random numbers), so that slacks of neighbouring settings differ by
the setting and not by chance. Conditions are judged separately.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from vajra_py.config.slo import Slo
from vajra_py.experiment.capacity.seeds import Bound, ConditionCapacity
from vajra_py.metrics.comparison.intervals import CONFIDENCE, Interval, replication_interval

Setting: TypeAlias = tuple[float, ...]
"""Search point: one rate, or replica counts."""
Probe: TypeAlias = tuple[Setting, int]
"""(Setting, position of the seed: 0 for the first seed)."""
Slacks: TypeAlias = Mapping[Probe, Sequence[float]]
"""Slack of each condition, by requested probe."""

_FAR = 0.35
"""Absolute slack (relative distance from the limit) above which replica counts are judged by the first seed alone."""

Outcome: TypeAlias = Literal["found", "never", "always", "apart"]
Stop: TypeAlias = Literal["precision", "max_replications", "range", "one seed"]


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a search; `never` and `always` refer to the whole allowed range.

    `apart` means that each condition holds somewhere in the range, but at no point do all conditions hold.
    """

    outcome: Outcome
    setting: Setting = ()
    """Highest rate, or cheapest replica counts; an end of the range if the SLO never or always holds."""
    interval: Interval | None = None
    """Interval of the rate, or of the cost of the replicas."""
    num_seeds: int = 0
    confidence: float = CONFIDENCE
    """Confidence of the interval."""
    bound: Bound = "exact"
    """Relation of the rate to the capacity: a bound if the capacity of any seed lies outside the range."""
    conditions: tuple[ConditionCapacity, ...] = ()
    """Capacity of each condition of the SLO, for a rate."""
    decides: int | None = None
    """Position of the condition whose capacity is the answer; for `apart`, a condition that fails at the capacity of
    another one.
    """
    stop: Stop | None = None
    """Reason why no more seeds were run for a rate: the interval meets `precision_fraction`, `max_replications` is
    reached, a capacity lies outside the range, or only one seed is run.
    """

    @property
    def deciding(self) -> ConditionCapacity | None:
        """Condition that decides the answer; None if no condition does."""
        return None if self.decides is None else self.conditions[self.decides]


Search: TypeAlias = Generator[Sequence[Probe], Slacks, Answer]


@dataclass(slots=True)
class _Seen:
    """Known slacks, by setting and seed."""

    slo: Slo
    slacks: dict[Setting, list[Sequence[float]]] = field(default_factory=dict)

    def ask(self, setting: Setting, num_seeds: int) -> Generator[Sequence[Probe], Slacks, None]:
        """Request the runs of a setting under the first `num_seeds` seeds, except runs with known slacks."""
        own = self.slacks.setdefault(setting, [])
        missing = [(setting, seed) for seed in range(len(own), num_seeds)]
        if missing:
            found = yield missing
            own += [found[probe] for probe in missing]

    def first(self, setting: Setting) -> float:
        """Return the slack of the whole SLO under the first seed."""
        return self.slo.combined(self.slacks[setting][0])

    def judged(self, setting: Setting, judge: Callable[[Sequence[float]], float]) -> float:
        """Return the slack of the whole SLO, with each condition's slacks under all seeds reduced to one number by
        `judge`.
        """
        return self.slo.combined([judge(own) for own in zip(*self.slacks[setting], strict=True)])


def _mean(slacks: Sequence[float]) -> float:
    return float(np.mean(slacks))


def _surely(slacks: Sequence[float]) -> float:
    """Return the lower end of Student's interval of the mean slack; with one seed, the slack under this seed."""
    interval = replication_interval(slacks)
    return slacks[0] if interval is None else interval.low


def _maybe(slacks: Sequence[float]) -> float:
    """Return the upper end of Student's interval of the mean slack, but at most the largest slack, so that a condition
    that fails under every seed fails; with one seed, the slack under this seed.
    """
    interval = replication_interval(slacks)
    return slacks[0] if interval is None else min(interval.high, max(slacks))


def search_replicas(slo: Slo, ranges: Sequence[range], costs: Sequence[float], replications: int) -> Search:
    """Search for the cheapest replica counts at which the mean slack of each condition is at least zero.

    The search assumes that more replicas of an existing kind never reduce the slack, so each tested setting rules out
    many others. If the SLO fails at a setting, it also fails at every setting that uses the same kinds and has at most
    as many replicas of each. If the SLO holds at a setting, settings of higher cost are not needed. The interval of the
    cost extends from the cheapest setting at which the SLO may hold (judged by the upper ends of the slacks' intervals)
    to the cheapest at which it certainly holds (judged by the lower ends).
    """
    seen = _Seen(slo)
    candidates = sorted(filter(any, itertools.product(*ranges)), key=lambda one: (_cost(one, costs), one))
    settings = [tuple(float(count) for count in one) for one in candidates]

    def decide(judge: Callable[[Sequence[float]], float]) -> Generator[Sequence[Probe], Slacks, Setting | None]:
        open_ones, best = list(settings), None
        while open_ones:
            at = open_ones[len(open_ones) // 2]
            yield from seen.ask(at, 1)
            if abs(seen.first(at)) <= _FAR:
                yield from seen.ask(at, replications)
            if seen.judged(at, judge) >= 0:
                best = at
                open_ones = open_ones[: open_ones.index(at)]
            else:
                open_ones = [one for one in open_ones if _is_other(one, at)]
        return best

    best = yield from decide(_mean)
    if best is None:
        return Answer("never", settings[-1], num_seeds=replications)
    surely = yield from decide(_surely)
    maybe = yield from decide(_maybe)
    low = _cost(maybe if maybe is not None else best, costs)
    high = _cost(surely, costs) if surely is not None else math.inf
    outcome: Outcome = "always" if best == settings[0] else "found"
    return Answer(outcome, best, Interval(low, high) if replications > 1 else None, replications)


def _is_other(one: Setting, failed: Setting) -> bool:
    """Return True if the SLO may hold at the setting `one` although it fails at `failed`: `one` has more replicas of
    some kind, or other kinds.
    """
    return any(a > b for a, b in zip(one, failed, strict=True)) or [not a for a in one] != [not b for b in failed]


def _cost(setting: Sequence[float], costs: Sequence[float]) -> float:
    return sum(count * cost for count, cost in zip(setting, costs, strict=True))
