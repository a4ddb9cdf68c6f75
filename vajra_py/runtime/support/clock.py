"""Time as integer picoseconds, so that events order exactly and sums of durations never drift."""

from __future__ import annotations

TICKS_PER_SECOND = 10**12

NEVER = 2**63 - 1
"""A tick later than any event."""


def to_ticks(seconds: float) -> int:
    """Return the nearest tick to a time in seconds."""
    return round(seconds * TICKS_PER_SECOND)


def to_seconds(ticks: int) -> float:
    """A tick's time in seconds, correctly rounded."""
    return ticks / TICKS_PER_SECOND
