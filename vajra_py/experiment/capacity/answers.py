"""Answers of a capacity search: one per setting of the sweep, and differences between them under common seeds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vajra_py.experiment.capacity.search import Answer, Setting
from vajra_py.experiment.capacity.seeds import ConditionCapacity
from vajra_py.metrics.comparison.intervals import Interval
from vajra_py.metrics.comparison.pairs import SIGNIFICANT_P, difference, holm


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Measurements of the runs at one rate, or with given replica counts."""

    setting: Setting
    seeds: tuple[int, ...]
    values: Mapping[str, tuple[float | None, ...]]
    """Values by seed, for each metric of the SLO."""
    slacks: tuple[tuple[float, ...], ...]
    """Slack of each condition of the SLO, by seed."""
    slack: tuple[float, ...]
    """Slack of the whole SLO, by seed: at least zero if it holds."""
    num_overloaded: int


@dataclass(frozen=True, slots=True)
class CapacityAnswer:
    """Answer for one setting of the sweep."""

    label: str
    answer: Answer | None
    curve: tuple[CurvePoint, ...] = ()
    """Points by rising rate or cost."""
    paths: tuple[str, ...] = ()
    """Searched settings, as dotted paths."""
    costs: tuple[float, ...] = ()
    """Cost of a replica of each kind; empty for a rate."""
    unit: str = "requests/s"
    num_runs: int = 0
    num_new: int = 0
    """Number of runs that did not exist before."""
    error: str | None = None
    range: tuple[float, float] = (0.0, 0.0)
    """Allowed range of rates."""
    seeds: tuple[int, ...] = ()
    """Seeds of a rate's answer, in the order of its capacities by seed."""
    precision_fraction: float = 0.0
    """Requested relative precision of a rate."""
    note: str = ""
    """Reason for fewer seeds than requested (no interval for a single one), or the only source of variation between
    them.
    """

    @property
    def sentence(self) -> str:
        """The answer with its interval in one line."""
        from vajra_py.experiment.capacity.words import answer_line

        return answer_line(self)

    def cost(self, setting: Setting) -> float:
        """Return the cost of replica counts; a rate is its own cost."""
        return sum(a * b for a, b in zip(setting, self.costs, strict=True)) if self.costs else setting[0]

    @property
    def by_seed(self) -> dict[int, float] | None:
        """Capacities of the seeds, for the deciding condition; None if some are unknown."""
        found = None if self.answer is None else self.answer.deciding
        if found is None or self.answer is None or self.answer.outcome != "found":
            return None
        if any(one.side != "exact" for one in found.by_seed):
            return None
        return {seed: one.rate for seed, one in zip(self.seeds, found.by_seed, strict=True)}


@dataclass(frozen=True, slots=True)
class CapacityDifference:
    """Relative difference between the capacities of two settings."""

    first: str
    second: str
    fraction: float
    """Relative difference: 0.1 is a tenth more."""
    interval: Interval
    """Interval for this comparison alone."""
    p_value: float
    """Two-sided p-value under no difference."""
    corrected_p: float
    """P-value with Holm's correction over all pairs of settings."""
    num_seeds: int
    is_paired: bool

    @property
    def is_significant(self) -> bool:
        """True if the difference is significant."""
        return self.corrected_p < SIGNIFICANT_P


def capacity_differences(answers: Sequence[CapacityAnswer]) -> list[CapacityDifference]:
    """Return every pair of settings with known rates, the one with the higher capacity first.

    Student's t of the differences of the logarithms of the seeds' capacities, in pairs of one seed: the ratio of two geometric means, which are the two answers where both have the same
    seeds. Each answer is that of the condition that decides it.
    """
    known = [(one.label, rates) for one in answers if (rates := one.by_seed) is not None and len(rates) > 1]
    pairs = []
    for (first, ours), (second, theirs) in itertools.combinations(known, 2):
        found = difference(_logs(ours), _logs(theirs))
        if found is None or found.interval is None or found.p_value is None:  # equal in every pair: nothing to test
            continue
        num_seeds = len(ours.keys() & theirs.keys()) or min(len(ours), len(theirs))
        if found.mean < 0:
            first, second = second, first
        low, high = sorted(math.copysign(1, found.mean) * end for end in (found.interval.low, found.interval.high))
        ends = Interval(math.expm1(low), math.expm1(high))
        pairs.append((first, second, math.expm1(abs(found.mean)), ends, found.p_value, num_seeds, found.is_paired))
    corrected = holm([one[4] for one in pairs])
    return [
        CapacityDifference(first, second, fraction, ends, p_value, corrected_p, num_seeds, is_paired)
        for (first, second, fraction, ends, p_value, num_seeds, is_paired), corrected_p in zip(
            pairs, corrected, strict=True
        )
    ]


def _logs(rates: Mapping[int, float]) -> dict[str, float]:
    return {str(seed): math.log(rate) for seed, rate in rates.items()}


def plain_values(slo: str, answers: Sequence[CapacityAnswer]) -> dict[str, Any]:
    """Return answers, curves and differences as plain values for JSON."""
    return {
        "slo": slo,
        "answers": [_plain(one) for one in answers],
        "differences": [
            {
                "first": one.first,
                "second": one.second,
                "fraction": one.fraction,
                "interval": _ends(one.interval),
                "p_value": one.p_value,
                "corrected_p": one.corrected_p,
                "num_seeds": one.num_seeds,
                "is_paired": one.is_paired,
            }
            for one in capacity_differences(answers)
        ],
    }


def _plain(one: CapacityAnswer) -> dict[str, Any]:
    found = one.answer
    return {
        "label": one.label,
        "outcome": None if found is None else found.outcome,
        "error": one.error,
        "searched": list(one.paths),
        "setting": None if found is None else list(found.setting),
        "bound": None if found is None else found.bound,
        "interval": None if found is None else _ends(found.interval),
        "confidence": None if found is None or found.interval is None else found.confidence,
        "unit": one.unit,
        "precision_fraction": one.precision_fraction or None,
        "stop": None if found is None else found.stop,
        "decides": None if found is None or found.deciding is None else found.deciding.text,
        "conditions": [] if found is None else [_plain_condition(each, one.seeds) for each in found.conditions],
        "num_seeds": None if found is None else found.num_seeds,
        "num_runs": one.num_runs,
        "note": one.note,
        "curve": [
            {
                "setting": list(point.setting),
                "seeds": list(point.seeds),
                "values": {key: list(values) for key, values in point.values.items()},
                "slacks": list(point.slack),
                "slacks_by_condition": [list(each) for each in point.slacks],
                "num_overloaded": point.num_overloaded,
            }
            for point in one.curve
        ],
    }


def _plain_condition(one: ConditionCapacity, seeds: Sequence[int]) -> dict[str, Any]:
    return {
        "condition": one.text,
        "rate": one.rate,
        "bound": one.bound,
        "interval": _ends(one.interval),
        "confidence": one.confidence if one.interval is not None else None,
        "by_seed": [
            {"seed": seed, "rate": each.rate, "side": each.side} for seed, each in zip(seeds, one.by_seed, strict=True)
        ],
    }


def _ends(interval: Interval | None) -> list[float | None] | None:
    if interval is None:
        return None
    return [value if math.isfinite(value) else None for value in (interval.low, interval.high)]
