"""Binary search for the largest number of tokens or requests that a policy's condition admits."""

from __future__ import annotations

from collections.abc import Callable


def most_that_fits(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number of at least `low` and below `high` that fits; `low` is taken to, and what is smaller fits where more does."""
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
