"""Capacity answers as sentences: the rate or the replicas, their uncertainty, and significant differences between
settings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from vajra_py.experiment.capacity.answers import CapacityAnswer, CapacityDifference, capacity_differences
from vajra_py.experiment.capacity.search import Answer
from vajra_py.experiment.capacity.seeds import FEWEST_SEEDS, Bound, ConditionCapacity
from vajra_py.metrics.comparison.intervals import CONFIDENCE, Interval
from vajra_py.metrics.comparison.metrics import significant

ONE_SEED = "no interval: all seeds give equal requests and nothing else is random, so it was run under one"
_MANY_PAIRS = 10
"""Pairs of settings above which only those with the highest one are printed."""


def answer_line(answer: CapacityAnswer) -> str:
    """One sentence with the answer and its interval."""
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
    """Return a rate that is exact, or a bound of it."""
    text = f"{significant(rate)} {unit}".rstrip()
    return {"exact": text, "unknown": f"not known, about {text}"}.get(bound, f"{bound} {text}")


def _interval_text(found: Answer) -> str:
    assert found.interval is not None
    ends = bounds_text(found.interval)
    if found.confidence >= CONFIDENCE:
        return f"95 % interval {ends}"
    return f"the seeds' range {ends} is an interval of {100 * found.confidence:.3g} %, one of 95 % takes {FEWEST_SEEDS} seeds"


def _conditions_text(found: Answer) -> str:
    """Return the condition that decides, and where the others end to hold."""
    if len(found.conditions) < 2 or found.deciding is None:
        return ""
    others = [one for place, one in enumerate(found.conditions) if place != found.decides]
    return f"; {found.deciding.text} decides: " + ", ".join(f"{one.text} holds to {_own(one)}" for one in others)


def _own(one: ConditionCapacity) -> str:
    text = bounded_text(one.rate, one.bound)
    return f"{text} ({bounds_text(one.interval)})" if one.bound == "exact" and one.interval is not None else text


def _precision_text(answer: CapacityAnswer, found: Answer) -> str:
    """Return a sentence on whether the interval is as narrow as requested, and if not, the reason that the search
    ended.
    """
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
    return f"; {half}, not within the {wanted}: stopped at max_replications ({found.num_seeds})"


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
    """Return the numbers of replicas of an answer."""
    found = answer.answer
    assert found is not None
    names = [path.removesuffix(".num_replicas").rpartition(".")[2] for path in answer.paths]
    if names == ["num_replicas"]:
        return f"{found.setting[0]:g} replicas" if found.setting[0] != 1 else "1 replica"
    return " + ".join(f"{count:g} {name}" for name, count in zip(names, found.setting, strict=True) if count)


def _warning(answer: CapacityAnswer) -> str:
    """A word where runs below the capacity did not keep up with their load: longer runs would be worse."""
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


def answer_notes(answers: Sequence[CapacityAnswer]) -> list[str]:
    """Return the reasons that searches used fewer seeds, or the only source of variation; with the settings if not all
    are concerned.
    """
    notes = []
    for note in dict.fromkeys(answer.note for answer in answers if answer.note):
        labels = [answer.label for answer in answers if answer.note == note]
        notes.append(f"{'' if len(labels) == len(answers) else ', '.join(labels) + ': '}{note}")
    return notes


def difference_lines(answers: Sequence[CapacityAnswer]) -> list[str]:
    """Return the pairwise comparison of settings, the one with the higher capacity first; then the candidates for the
    highest one, and the criterion.
    """
    pairs = capacity_differences(answers)
    if not pairs:
        return []
    rates = {one.label: one.answer.setting[0] for one in answers if one.by_seed is not None and one.answer is not None}
    top = max(rates, key=lambda label: rates[label])
    with_top = [one for one in pairs if top in (one.first, one.second)]
    rivals = [
        one.second if one.first == top else one.first
        for one in with_top
        if not (one.is_significant and one.first == top)
    ]
    shown = with_top if len(pairs) > _MANY_PAIRS else pairs
    lines = [_difference_line(one) for one in sorted(shown, key=lambda one: one.corrected_p)]
    seeds = "common seeds" if all(one.is_paired for one in pairs) else "seeds that are not common"
    lines.append(f"({seeds}; p corrected by Holm over {len(pairs)} {'pair' if len(pairs) == 1 else 'pairs'})")
    left_out = [one.label for one in answers if one.label not in rates]
    if left_out:
        lines.append(f"Not compared, without a capacity for every seed: {', '.join(left_out)}")
    elif rivals:
        lines.append(f"The highest is not told apart from the next: {', '.join([top, *rivals])}")
    else:
        lines.append(f"Highest, told apart from all others: {top}")
    return lines


def _difference_line(one: CapacityDifference) -> str:
    low, high = (f"{100 * end:+.1f} %" for end in (one.interval.low, one.interval.high))
    numbers = f"{100 * one.fraction:+.1f} % (95 % interval {low} to {high}; p = {one.p_value:.2g}, corrected {one.corrected_p:.2g}; {one.num_seeds} seeds)"
    if one.is_significant:
        return f"{one.first} takes more than {one.second}: {numbers}"
    return f"{one.first} and {one.second} are not told apart: {numbers}"


def bounds_text(interval: Interval) -> str:
    """Return the ends of an interval that may be open."""
    low, high = significant(interval.low), significant(interval.high)
    if math.isinf(interval.high):
        return f"{low} or more" if interval.low > 0 else "all rates"
    return f"{low} to {high}" if interval.low > 0 else f"{high} or less"
