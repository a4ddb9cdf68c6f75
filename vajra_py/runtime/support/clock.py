"""Time as integer picoseconds, so that the order of events is exact and sums of durations have no rounding error."""

from __future__ import annotations

from math import inf

TICKS_PER_SECOND = 10**12

NEVER = 2**63 - 1
"""A tick later than any event."""


def to_ticks(seconds: float) -> int:
    """Return the nearest tick to a time in seconds; `NEVER` if the number of ticks exceeds the range of floats."""
    ticks = seconds * TICKS_PER_SECOND
    return NEVER if ticks == inf else round(ticks)


def to_seconds(ticks: int) -> float:
    """Return a tick's time in seconds, correctly rounded."""
    return ticks / TICKS_PER_SECOND
