"""The two searches of SlidingServe: chunks for two consecutive steps, and the largest set of jobs that end in time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence


def first_of_two(
    t_1: Callable[[int], float], t_2: Callable[[int, int], float], s_1: float, s_2: float, sizes: Sequence[int]
) -> int | None:
    """Return c_1 of the pair of chunk sizes (c_1, c_2) with the largest sum; None if no pair meets the limits.

    The limits are t_1(c_1) <= s_1 and t_1(c_1) + t_2(c_1, c_2) <= s_2. c_1 is one of `sizes`, and c_2 is one of `sizes`
    or 0. `t_1` and `t_2` must be convex.
    """

    def most(fits: Callable[[int], bool]) -> int:
        """Return how many of `sizes` fit, assuming that all sizes below one that fits also fit."""
        return bisect_left(sizes, True, key=lambda size: not fits(size))

    def total(c_1: int) -> int:
        left = s_2 - t_1(c_1)
        count = most(lambda c_2: t_2(c_1, c_2) <= left)
        return c_1 + (sizes[count - 1] if count else 0)

    low, high = 0, most(lambda c_1: t_1(c_1) <= s_1 and t_1(c_1) + t_2(c_1, 0) <= s_2) - 1
    if high < 0:
        return None
    while high - low > 2:
        third = (high - low) // 3
        if total(sizes[low + third]) <= total(sizes[high - third]):
            low += third
        else:
            high -= third
    return max((sizes[position] for position in range(low, high + 1)), key=lambda c_1: (total(c_1), c_1))


def most_in_time(jobs: Sequence[tuple[float, float]]) -> frozenset[int]:
    """Return the positions of a largest set of jobs, each (time until due, duration), that one server can end in time."""
    least: list[tuple[float, frozenset[int]]] = [(0.0, frozenset())]
    for index in sorted(range(len(jobs)), key=lambda one: (jobs[one][0], one)):
        due_s, takes_s = jobs[index]
        for count in range(len(least) - 1, -1, -1):
            spent_s, chosen = least[count][0] + takes_s, least[count][1] | {index}
            if spent_s > due_s:
                continue
            if count + 1 == len(least):
                least.append((spent_s, chosen))
            elif spent_s < least[count + 1][0]:
                least[count + 1] = (spent_s, chosen)
    return least[-1][1]
