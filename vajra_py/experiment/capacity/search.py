"""Searches for a capacity as generators, and the one for the cheapest replicas at which an SLO holds.

A search yields the probes it needs next and receives the slack of each condition of the SLO for each; it is independent
of runs. A slack is at least zero if the condition holds under that seed. All settings use the same seeds (common random
numbers), so that slacks of neighbouring settings differ by the setting and not by chance. Conditions are judged
separately.
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
"""Setting, and the position of its seed: 0 for the first."""
Slacks: TypeAlias = Mapping[Probe, Sequence[float]]
"""Slack of each condition, by requested probe."""

_FAR = 0.35
"""Slack above which one seed decides about replica counts: more than a third off the limit."""

Outcome: TypeAlias = Literal["found", "never", "always", "apart"]
Stop: TypeAlias = Literal["precision", "max_replications", "range", "one seed"]


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a search; `never` and `always` refer to the whole allowed range.

    `apart`: each condition holds somewhere, and nowhere all of them.
    """

    outcome: Outcome
    setting: Setting = ()
    """Highest rate, or cheapest replica counts; the end of the range if the SLO holds nowhere or everywhere."""
    interval: Interval | None = None
    """Interval of the rate, or of the cost of the replicas."""
    num_seeds: int = 0
    confidence: float = CONFIDENCE
    """Confidence of the interval."""
    bound: Bound = "exact"
    """Relation of the rate to the capacity, if that of some seed lies outside the range."""
    conditions: tuple[ConditionCapacity, ...] = ()
    """Capacity of each condition of the SLO, for a rate."""
    decides: int | None = None
    """Position of the condition whose capacity is the answer; with `apart`, one that fails at the limit of another one."""
    stop: Stop | None = None
    """Reason that no more seeds were run for a rate: the interval meets `precision_fraction`, no seeds are left, or the
    range is too small.
    """

    @property
    def deciding(self) -> ConditionCapacity | None:
        """The condition whose capacity is the answer."""
        return None if self.decides is None else self.conditions[self.decides]


Search: TypeAlias = Generator[Sequence[Probe], Slacks, Answer]


@dataclass(slots=True)
class _Seen:
    """Known slacks, by setting and seed."""

    slo: Slo
    slacks: dict[Setting, list[Sequence[float]]] = field(default_factory=dict)

    def ask(self, setting: Setting, num_seeds: int) -> Generator[Sequence[Probe], Slacks, None]:
        """Request runs of a setting under its first `num_seeds` seeds, unless they exist."""
        own = self.slacks.setdefault(setting, [])
        missing = [(setting, seed) for seed in range(len(own), num_seeds)]
        if missing:
            found = yield missing
            own += [found[probe] for probe in missing]

    def first(self, setting: Setting) -> float:
        """Return the slack of the whole SLO under the first seed."""
        return self.slo.combined(self.slacks[setting][0])

    def judged(self, setting: Setting, judge: Callable[[Sequence[float]], float]) -> float:
        """Reduce the conditions, each judged by its slacks over all seeds, to one number."""
        return self.slo.combined([judge(own) for own in zip(*self.slacks[setting], strict=True)])


def _mean(slacks: Sequence[float]) -> float:
    return float(np.mean(slacks))


def _surely(slacks: Sequence[float]) -> float:
    """Return the lower end of Student's interval of the mean slack."""
    interval = replication_interval(slacks)
    return slacks[0] if interval is None else interval.low


def _maybe(slacks: Sequence[float]) -> float:
    """Return its upper end, at most the best seed's slack: if every seed fails, the condition does."""
    interval = replication_interval(slacks)
    return slacks[0] if interval is None else min(interval.high, max(slacks))


def search_replicas(slo: Slo, ranges: Sequence[range], costs: Sequence[float], replications: int) -> Search:
    """Search for the cheapest replica counts at which the mean slack of each condition is at least zero, if more
    replicas of an existing kind never make it worse.

    Each test rules out a whole side: where the SLO fails, all with no more replicas of any kind and the same kinds left out; where it holds, all that cost as much or more. The
    interval goes from the cheapest that cannot be distinguished from holding to the cheapest that certainly holds.
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
    """Return whether a failure of the SLO at `failed` implies nothing for this setting: it has more of some kind, or
    other kinds.
    """
    return any(a > b for a, b in zip(one, failed, strict=True)) or [not a for a in one] != [not b for b in failed]


def _cost(setting: Sequence[float], costs: Sequence[float]) -> float:
    return sum(count * cost for count, cost in zip(setting, costs, strict=True))
