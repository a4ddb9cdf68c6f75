"""Differences between the capacities of settings under common seeds, as data and text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vajra_py.experiment.capacity.answers import CapacityAnswer
from vajra_py.metrics.comparison.intervals import Interval
from vajra_py.metrics.comparison.pairs import SIGNIFICANT_P, difference, holm

_MANY_PAIRS = 10
"""Number of pairs of settings above which only pairs with the best setting are printed."""


@dataclass(frozen=True, slots=True)
class CapacityDifference:
    """Relative difference between the capacities of two settings."""

    first: str
    second: str
    fraction: float
    """Relative difference; 0.1 means that the first capacity is 10 % higher."""
    interval: Interval
    """Interval of the relative difference, not adjusted for other comparisons."""
    p_value: float
    """Two-sided p-value of the hypothesis that the capacities are equal."""
    corrected_p: float
    """P-value with Holm's correction over all pairs of settings."""
    num_seeds: int
    is_paired: bool

    @property
    def is_significant(self) -> bool:
        """True if the corrected p-value is below 5 %."""
        return self.corrected_p < SIGNIFICANT_P


def capacity_differences(answers: Sequence[CapacityAnswer]) -> list[CapacityDifference]:
    """Return the difference of each pair of settings; the first setting of a pair has the higher capacity.

    Only settings with several seeds and an exact capacity under each of them are compared. Pairs whose difference does
    not vary between seeds are left out, since such a difference cannot be tested.

    The capacities under single seeds are those of the setting's deciding condition. Their logarithms are compared by
    Student's t test, paired by seed if the settings have common seeds. The relative difference follows from the mean
    difference of the logarithms, so it compares geometric means over seeds.
    """
    known = [(one.label, rates) for one in answers if (rates := one.by_seed) is not None and len(rates) > 1]
    pairs = []
    for (first, ours), (second, theirs) in itertools.combinations(known, 2):
        found = difference(_logs(ours), _logs(theirs))
        # Without variation between seeds there is no test.
        if found is None or found.interval is None or found.p_value is None:
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


def difference_lines(answers: Sequence[CapacityAnswer]) -> list[str]:
    """Return lines of text on the differences; an empty list if no pair of settings is compared.

    The first lines have one pair each, with the higher capacity first. If there are more than `_MANY_PAIRS` pairs, only
    those with the best setting are listed. The next line describes seeds and p-values. The last line names the settings
    that are not compared or, if all are compared, the settings that may have the highest capacity.
    """
    pairs = capacity_differences(answers)
    if not pairs:
        return []
    compared = {label for one in pairs for label in (one.first, one.second)}
    rates = {one.label: one.answer.setting[0] for one in answers if one.label in compared and one.answer is not None}
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
        lines.append(f"Not compared, for lack of several seeds, each with a capacity: {', '.join(left_out)}")
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
