"""Recorded events of requests and ours, compared in order of time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from tests.golden.readers.trace import Difference


@dataclass(frozen=True, slots=True)
class Compared:
    """One recorded value and ours."""

    at: float
    """Recorded time of the event, for the order of events."""
    request_id: Any
    field: str
    expected: Any
    actual: Any
    tolerance: float = 0.0
    """Largest difference of two numbers that is none."""

    @property
    def is_equal(self) -> bool:
        """True if both sides are the same."""
        expected, actual = self.expected, self.actual
        if isinstance(expected, float) and isinstance(actual, int | float):
            return abs(expected - actual) <= self.tolerance
        return bool(expected == actual)


def first_difference(
    compared: Iterable[Compared], rows: Mapping[Any, Any], around: Sequence[str] = ()
) -> Difference | None:
    """The earliest event that differs; `rows`: the recorded row of each request."""
    different = [one for one in compared if not one.is_equal]
    if not different:
        return None
    one = min(different, key=lambda each: each.at if each.at is not None else inf)
    told = [f"{key}: {value}" for key, value in rows[one.request_id].items() if key != "hash_ids"]
    others = [f"{len(different)} values differ, of {len({each.request_id for each in different})} requests", *around]
    return Difference(f"at {one.at} of request {one.request_id}", one.field, one.expected, one.actual, told, others)
