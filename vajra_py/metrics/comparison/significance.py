"""Tests of differences between settings: the only module that decides on significance.

A *family* consists of all combinations of a primary metric and a pair of settings under one load, in one scope (all
requests, a class, a tenant). Its p-values are adjusted together by Holm's method. All tables, reports and files use
these results, so a pair has the same adjusted p-value in a metric everywhere. Other metrics are secondary: their
p-values are not adjusted, and they have no verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from msgspec import Struct

from vajra_py.metrics.comparison.metrics import BY_KEY
from vajra_py.metrics.comparison.pairs import SIGNIFICANT_P, Difference, difference, holm

OVERLOADED = "overloaded"
CONSTANT = "the difference is the same under every seed"
ONE_REPLICATION = "fewer than two replications"

Samples = Mapping[str, float]
"""Values by seed."""


class Versus(Struct, frozen=True):
    """Comparison of one setting with another in one metric."""

    position: int
    baseline: int
    key: str
    is_primary: bool
    difference: Difference | None
    """Difference of the setting from the baseline; None if either has fewer than two replications."""
    p_adjusted: float | None
    """P-value adjusted for the family; None for secondary metrics or if not tested."""
    untested: str
    """Reason why no test was made; empty if a test was made."""

    @property
    def p_value(self) -> float | None:
        """Two-sided p-value of the hypothesis of no difference, not adjusted; None if not tested."""
        return None if self.difference is None or self.untested else self.difference.p_value

    @property
    def is_significant(self) -> bool | None:
        """True if the adjusted p-value is below 5 %; None for secondary metrics or if not tested."""
        return None if self.p_adjusted is None else self.p_adjusted < SIGNIFICANT_P

    @property
    def better_fraction(self) -> float | None:
        """Estimated probability that a replication of the setting is better than one of the baseline; None without
        `difference`, or if neither lower nor higher values of the metric are better.
        """
        lower_is_better = BY_KEY[self.key].lower_is_better
        if lower_is_better is None or self.difference is None:
            return None
        above = self.difference.above_fraction
        return 1 - above if lower_is_better else above

    @property
    def verdict(self) -> str:
        """`better`, `worse` or `differs` if significant, `no` if not significant; else `not tested: …` or
        `secondary`.
        """
        if self.untested:
            return f"not tested: {self.untested}"
        if self.is_significant is None:
            return "secondary"
        if not self.is_significant or self.difference is None:
            return "no"
        lower_is_better = BY_KEY[self.key].lower_is_better
        if lower_is_better is None:
            return "differs"
        return "better" if (self.difference.mean < 0) == lower_is_better else "worse"


class Field(Struct, frozen=True):
    """Inputs of the tests between settings in one scope."""

    names: tuple[str, ...]
    loads: tuple[str, ...]
    stability: tuple[str, ...]
    primary: tuple[str, ...]
    samples: Mapping[str, tuple[Samples, ...]]
    """Samples of each setting, by metric; empty if no setting has replications."""
    one_sample: tuple[str, ...] = ()
    """Reason why each setting's runs count as one observation; an empty text if each run is a replication."""

    def untested(self, position: int, baseline: int) -> str:
        """Return the reason why these two settings cannot be tested in any metric; empty if they can."""
        if self.loads[position] != self.loads[baseline]:
            return "their loads differ"
        unstable = [self.names[i] for i in (baseline, position) if self.stability[i] == OVERLOADED]
        if unstable:
            return f"{OVERLOADED}: {', '.join(unstable)}"
        copies = dict.fromkeys(self.one_sample[i] for i in (baseline, position) if self.one_sample)
        return "; ".join(filter(None, copies))


def versus(field: Field, adjusted: Mapping[tuple[str, int, int], float], pair: tuple[int, int], key: str) -> Versus:
    """Compare a pair (baseline, position) in one metric; `adjusted` has the p-values returned by `adjust`."""
    baseline, position = pair
    samples = field.samples.get(key, ())
    found = difference(samples[position], samples[baseline]) if samples else None
    untested = field.untested(position, baseline)
    if not untested:
        untested = ONE_REPLICATION if found is None else CONSTANT if found.p_value is None else ""
    low, high = sorted(pair)
    p_adjusted = None if untested else adjusted.get((key, low, high))
    return Versus(position, baseline, key, key in field.primary, found, p_adjusted, untested)


def adjust(field: Field) -> dict[tuple[str, int, int], float]:
    """Return the adjusted p-values of all pairs that can be tested, by (metric, lower position, higher position). The
    p-values of all primary metrics and all pairs under one load form a family.
    """
    found: dict[tuple[str, int, int], float] = {}
    for members in groups(field.loads):
        tested: dict[tuple[str, int, int], float] = {}
        for key in field.primary:
            for pair in combinations(members, 2):
                p_value = versus(field, {}, pair, key).p_value
                if p_value is not None:
                    tested[key, *pair] = p_value
        found |= zip(tested, holm(list(tested.values())), strict=True)
    return found


def groups(loads: Sequence[str]) -> list[list[int]]:
    """Return, for each load, the list of positions of its settings."""
    return [[i for i, own in enumerate(loads) if own == load] for load in dict.fromkeys(loads)]
