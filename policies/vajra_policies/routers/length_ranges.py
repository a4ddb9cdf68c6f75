"""Ranges of request lengths, and the number of replicas of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_MAX_PIECES = 32
"""Largest number of pieces into which the sorted lengths are divided; ranges end at the ends of pieces."""


class Stage(NamedTuple):
    """Range of lengths and its number of replicas."""

    up_to: float
    """Longest length in tokens; infinite for the last range."""
    num_replicas: int


def partition(lengths: Sequence[int], num_replicas: int, own_tokens: float) -> list[Stage]:
    """Return ranges of lengths, each with its number of replicas, such that the total cost is least.

    The ranges are found by dynamic programming. The cost of a range with n requests on m replicas is n · (n / m) ·
    (own_tokens + L), with L the longest length in the range and `own_tokens` the cost of a request besides its length.
    Each of the n requests takes part in steps of n / m requests, and each request of a step costs as much as the
    longest one. Ties go to the fewest ranges.
    """
    ordered = sorted(lengths)
    num_pieces = min(len(ordered), _MAX_PIECES)
    ends = sorted({len(ordered) * (piece + 1) // num_pieces for piece in range(num_pieces)})
    starts = [0, *ends]
    best: dict[tuple[int, int], tuple[float, list[Stage]]] = {(0, 0): (0.0, [])}
    for end in range(1, len(starts)):
        longest = ordered[starts[end] - 1]
        for used in range(1, num_replicas + 1):
            ways = []
            for begin, own in ((begin, own) for begin in range(end) for own in range(1, used + 1)):
                before = best.get((begin, used - own))
                if before is not None:
                    count = starts[end] - starts[begin]
                    cost = before[0] + count * count / own * (own_tokens + longest)
                    ways.append((cost, [*before[1], Stage(longest, own)]))
            if ways:
                best[end, used] = min(ways, key=lambda way: (way[0], len(way[1])))
    stages = best[len(starts) - 1, num_replicas][1] if ordered else [Stage(math.inf, num_replicas)]
    return [*stages[:-1], Stage(math.inf, stages[-1].num_replicas)]
