"""Words and marks of settings whose several seeds all give one run, in every table of a comparison."""

from __future__ import annotations

from collections.abc import Iterator

from vajra_py.metrics.comparison import Comparison

COPIED = "all seeds give equal requests and nothing else is random: one run, no interval, nothing tested"


def has_copies_at_load(comparison: Comparison, position: int) -> bool:
    """Whether a setting is, or stands under one load with, one run for several seeds: then no value of that load is marked."""
    return any(map(comparison.is_copied, comparison.of_load(position)))


def replication_counts(comparison: Comparison) -> list[str]:
    """The number of each setting's runs, with the number of seeds that one run stands for."""
    return [
        f"{count} for {comparison.copied[i]} equal seeds" if comparison.is_copied(i) else str(count)
        for i, count in enumerate(comparison.replications)
    ]


def copied_lines(comparison: Comparison) -> Iterator[str]:
    """A sentence on the settings that are one run for several seeds, below a table; nothing where there is none."""
    names = [name for i, name in enumerate(comparison.names) if comparison.is_copied(i)]
    if names:
        whose = "" if len(names) == len(comparison.names) else f" of {', '.join(names)}"
        yield f"Replications{whose}: {COPIED}."


def not_tested(comparison: Comparison, baseline: int, position: int) -> str:
    """Why a setting is not tested against a baseline, in a table's cell."""
    if comparison.is_copied(baseline) or comparison.is_copied(position):
        return "not tested: equal seeds"
    return "not tested"
