"""Binary search for the largest number of tokens or requests that a policy's condition admits."""

from __future__ import annotations

from collections.abc import Callable


def most_that_fits(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from `low` to `high` - 1 that fits. It is assumed that `low` fits, and that if a number
    fits, all smaller ones fit too.
    """
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
