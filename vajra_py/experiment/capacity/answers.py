"""Answers of a capacity search, one per setting of the sweep, as data and text: the rate or replica counts with an
interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vajra_py.experiment.capacity.search import Answer, Setting
from vajra_py.experiment.capacity.seeds import FEWEST_SEEDS, Bound, ConditionCapacity
from vajra_py.metrics.comparison.intervals import CONFIDENCE, Interval
from vajra_py.metrics.comparison.metrics import significant

ONE_SEED = "no interval: all seeds give equal requests and nothing else is random, so it was run under one"


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Measurements of the runs at one rate, or with given replica counts."""

    setting: Setting
    seeds: tuple[int, ...]
    values: Mapping[str, tuple[float | None, ...]]
    """Values of each metric of the SLO, one per seed."""
    slacks: tuple[tuple[float, ...], ...]
    """Slack of each condition of the SLO, in the order of the conditions; one tuple per seed."""
    slack: tuple[float, ...]
    """Slack of the whole SLO, one per seed: at least zero if the SLO holds."""
    num_overloaded: int


@dataclass(frozen=True, slots=True)
class CapacityAnswer:
    """Answer for one setting of the sweep."""

    label: str
    answer: Answer | None
    curve: tuple[CurvePoint, ...] = ()
    """Measured points in ascending order of rate or cost."""
    paths: tuple[str, ...] = ()
    """Searched settings, as dotted paths."""
    costs: tuple[float, ...] = ()
    """Cost of a replica of each searched kind; empty for a rate."""
    unit: str = "requests/s"
    num_runs: int = 0
    num_new: int = 0
    """Number of runs executed for this answer, not counting runs that existed before."""
    error: str | None = None
    range: tuple[float, float] = (0.0, 0.0)
    """Allowed range of rates (low, high)."""
    seeds: tuple[int, ...] = ()
    """Seeds of a rate's answer, in the order of `ConditionCapacity.by_seed`."""
    precision_fraction: float = 0.0
    """Requested relative precision of a rate."""
    note: str = ""
    """Reason why there are fewer seeds than requested; a single seed gives no interval. With all requested seeds: the
    only source of variation between them (such as step times) if they have equal requests, else empty.
    """

    @property
    def sentence(self) -> str:
        """The answer with its interval as one line of text."""
        return _sentence(self)

    def cost(self, setting: Setting) -> float:
        """Return the cost of replica counts; for a rate, return the rate itself."""
        return sum(a * b for a, b in zip(setting, self.costs, strict=True)) if self.costs else setting[0]

    @property
    def by_seed(self) -> dict[int, float] | None:
        """Capacity of the deciding condition by seed; None if there is no capacity, or only a bound under some seed."""
        found = None if self.answer is None else self.answer.deciding
        if found is None or self.answer is None or self.answer.outcome != "found":
            return None
        if any(one.side != "exact" for one in found.by_seed):
            return None
        return {seed: one.rate for seed, one in zip(self.seeds, found.by_seed, strict=True)}


def _sentence(answer: CapacityAnswer) -> str:
    found = answer.answer
    if found is None:
        return f"{answer.label}: failed: {answer.error}"
    text = _replicas_text(answer) if answer.costs else _rate_text(answer, found)
    is_single = found.num_seeds == 1 and answer.note
    return f"{answer.label}: {text} ({ONE_SEED}; {answer.num_runs} runs)" if is_single else f"{answer.label}: {text}"


def _rate_text(answer: CapacityAnswer, found: Answer) -> str:
    lowest, highest = answer.range
    if found.outcome == "never":
        failing = [one.text for one in found.conditions if all(each.side == "below" for each in one.by_seed)]
        what = " and ".join(failing) + " fail" + "s" * (len(failing) == 1) if len(found.conditions) > 1 else "it fails"
        return f"the SLO never holds: {what} even at the lowest rate allowed ({lowest:g} requests/s; capacity.rate.min)"
    if found.outcome == "always":
        return f"the SLO always holds: even at the highest rate allowed ({highest:g} requests/s; capacity.rate.max)"
    if found.outcome == "apart":
        still = "a condition" if found.deciding is None else found.deciding.text
        return (
            f"the SLO never holds: {still} fails up to {significant(found.setting[0])} requests/s, from where on another "
            "condition fails"
        )
    text = bounded_text(found.setting[0], found.bound, "requests/s")
    if found.interval is not None:
        text += f" ({_interval_text(found)}; {found.num_seeds} seeds, {answer.num_runs} runs)"
    return text + _conditions_text(found) + _precision_text(answer, found) + _warning(answer)


def bounded_text(rate: float, bound: Bound, unit: str = "") -> str:
    """Return a rate as text, preceded by the kind of bound unless the rate is exact."""
    text = f"{significant(rate)} {unit}".rstrip()
    return {"exact": text, "unknown": f"not known, about {text}"}.get(bound, f"{bound} {text}")


def _interval_text(found: Answer) -> str:
    assert found.interval is not None
    ends = bounds_text(found.interval)
    if found.confidence >= CONFIDENCE:
        return f"95 % interval {ends}"
    return f"the seeds' range {ends} is an interval of {100 * found.confidence:.3g} %, one of 95 % takes {FEWEST_SEEDS} seeds"


def _conditions_text(found: Answer) -> str:
    """Return a text with the deciding condition and the capacities of the other conditions; empty if there are no
    others.
    """
    if len(found.conditions) < 2 or found.deciding is None:
        return ""
    others = [one for place, one in enumerate(found.conditions) if place != found.decides]
    return f"; {found.deciding.text} decides: " + ", ".join(f"{one.text} holds to {_own(one)}" for one in others)


def _own(one: ConditionCapacity) -> str:
    text = bounded_text(one.rate, one.bound)
    return f"{text} ({bounds_text(one.interval)})" if one.bound == "exact" and one.interval is not None else text


def _precision_text(answer: CapacityAnswer, found: Answer) -> str:
    """Return a sentence on whether the interval is as narrow as requested, and if not, on why the search ended."""
    wanted = f"{100 * answer.precision_fraction:.3g} % of precision_fraction"
    if found.stop == "one seed":
        return "" if answer.note else "; one seed: no interval"
    if found.stop == "range" and found.deciding is not None:
        lowest, highest = answer.range
        above = sum(one.side == "above" and one.rate >= highest for one in found.deciding.by_seed)
        below = sum(one.side == "below" for one in found.deciding.by_seed)
        parts = [
            f"{above} of {found.num_seeds} seeds hold even at {highest:g} requests/s (capacity.rate.max)" * bool(above),
            f"{below} of {found.num_seeds} seeds fail even at {lowest:g} requests/s (capacity.rate.min)" * bool(below),
        ]
        return "; precision_fraction is not reached" + "".join(f", {part}" for part in parts if part)
    if found.interval is None or found.stop is None:
        return ""
    half = f"±{100 * found.interval.half_width / found.setting[0]:.2g} %"
    if found.stop == "precision":
        return f"; {half}, within the {wanted}"
    stopped = f"stopped at max_replications ({found.num_seeds})"
    if found.confidence < CONFIDENCE:
        return f"; the {wanted} are of an interval of 95 %: {stopped}"
    return f"; {half}, not within the {wanted}: {stopped}"


def _replicas_text(answer: CapacityAnswer) -> str:
    found = answer.answer
    assert found is not None
    counts = counts_text(answer)
    if found.outcome == "never":
        return f"the SLO never holds: it fails even with the most replicas allowed ({counts})"
    if found.outcome == "always":
        return f"the SLO always holds: even with the fewest replicas allowed ({counts})"
    text = counts if answer.unit == "replicas" else f"{counts}, {significant(answer.cost(found.setting))} {answer.unit}"
    interval = found.interval
    if interval is None:
        return text
    if math.isinf(interval.high):
        return f"{text} (95 % interval {significant(interval.low)} {answer.unit} to more than the range allows)"
    return f"{text} (95 % interval {significant(interval.low)} to {significant(interval.high)} {answer.unit}; {found.num_seeds} seeds, {answer.num_runs} runs)"


def counts_text(answer: CapacityAnswer) -> str:
    """Return the replica counts of an answer as text."""
    found = answer.answer
    assert found is not None
    names = [path.removesuffix(".num_replicas").rpartition(".")[2] for path in answer.paths]
    if names == ["num_replicas"]:
        return f"{found.setting[0]:g} replicas" if found.setting[0] != 1 else "1 replica"
    return " + ".join(f"{count:g} {name}" for name, count in zip(names, found.setting, strict=True) if count)


def _warning(answer: CapacityAnswer) -> str:
    """Return a warning if some runs at rates just below the capacity are overloaded; else an empty text.

    Queues of an overloaded run grow, so a longer run would give worse values and a lower capacity.
    """
    found = answer.answer
    assert found is not None
    near = [point for point in answer.curve if 0.9 * found.setting[0] <= point.setting[0] <= found.setting[0]]
    overloaded = sum(point.num_overloaded for point in near)
    total = sum(len(point.seeds) for point in near)
    if not overloaded:
        return ""
    return (
        f"; {overloaded} of {total} runs just below it are overloaded: in longer runs the SLO would fail at lower rates"
    )


def bounds_text(interval: Interval) -> str:
    """Return the ends of an interval, which may be infinite, as text."""
    low, high = significant(interval.low), significant(interval.high)
    if math.isinf(interval.high):
        return f"{low} or more" if interval.low > 0 else "all rates"
    return f"{low} to {high}" if interval.low > 0 else f"{high} or less"


def answer_notes(answers: Sequence[CapacityAnswer]) -> list[str]:
    """Return the distinct notes of the answers; a note that does not apply to all answers is preceded by the labels of
    its settings.
    """
    notes = []
    for note in dict.fromkeys(answer.note for answer in answers if answer.note):
        labels = [answer.label for answer in answers if answer.note == note]
        notes.append(f"{'' if len(labels) == len(answers) else ', '.join(labels) + ': '}{note}")
    return notes
