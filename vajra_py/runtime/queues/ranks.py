"""Ranks of requests whose mutual order does not change with time.

A rank is a queue's entry for one waiting request: the tuple by which the request is sorted. It is a plain tuple because
tuples compare at C speed, and comparisons are most of what a queue does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import chain
from math import inf
from typing import Any, Final, TypeAlias, cast

from vajra_py.contract import RequestView

Rank: TypeAlias = tuple[Any, float, int, int, RequestView, float, int]
"""Entry of a waiting request in a queue: (key or intercept, arrival, index, serial, request, slope, tokens left).

Serial numbers are unique within a queue and rise in the order in which they are given, so comparisons never reach the
fields after the serial number. The slope is 0 if keys do not change with time.
"""

KEY: Final = 0
ARRIVED_AT: Final = 1
INDEX: Final = 2
SERIAL: Final = 3
REQUEST: Final = 4
SLOPE: Final = 5
NUM_TOKENS: Final = 6

_BLOCK = 256
"""Number of ranks in a full block; a block that grows to twice this size is split."""

_NOTHING: Final[frozenset[int]] = frozenset()


class SortedRanks:
    """Ranks in ascending order. Adding a rank costs O(log n). Reading or removing the first rank costs O(1), and so
    does marking another rank as removed.

    Ranks are stored in sorted blocks, as in the lists of the library sortedcontainers. The library itself is not used,
    because it would make up half of a queue's cost. To find a rank in the middle takes a cache miss per comparison and
    would be most of the cost of an abort. If there are several blocks, ranks removed from the middle are therefore only
    marked; marked ranks are deleted when they reach the front, or when they outnumber the others. The first rank is
    never marked.
    """

    __slots__ = ("_blocks", "_gone", "_lasts", "_num_listed", "_version")

    def __init__(self) -> None:
        self._blocks: list[list[Rank]] = []
        """Blocks of ranks, none of them empty."""
        self._lasts: list[Rank] = []
        """The last rank of each block."""
        self._num_listed = 0
        """Number of ranks in all blocks, including those marked as removed."""
        self._gone: set[int] | frozenset[int] = _NOTHING
        """Serials of the ranks marked as removed."""
        self._version = 0
        """Counter of changes that invalidate positions."""

    def __len__(self) -> int:
        return self._num_listed - len(self._gone)

    def first(self) -> Rank:
        """Return the first rank; IndexError if there is none."""
        return self._blocks[0][0]

    def first_two(self) -> tuple[Rank, Rank | None]:
        """Return the first rank and the next stored one, which may be marked as removed (None: no other rank is
        stored); IndexError if there are no ranks.
        """
        block = self._blocks[0]
        if len(block) > 1:
            return block[0], block[1]
        return block[0], self._blocks[1][0] if len(self._blocks) > 1 else None

    def first_after_key(self, key: object) -> Rank | None:
        """Return the first stored rank with a greater key, which may be marked as removed; None if there is none."""
        after: Any = (key, inf)  # greater than every rank with this key: a rank continues with its finite arrival time
        return next(self._after(after), None)

    def add(self, rank: Rank) -> None:
        """Insert a new rank."""
        self._version += 1
        self._num_listed += 1
        blocks, lasts = self._blocks, self._lasts
        if not lasts:
            blocks.append([rank])
            lasts.append(rank)
            return
        if lasts[-1] < rank:  # the usual case: requests mostly arrive in rank order
            position = -1
            block = blocks[-1]
            block.append(rank)
            lasts[-1] = rank
        else:
            position = bisect_left(lasts, rank)
            block = blocks[position]
            insort(block, rank)
        if len(block) >= 2 * _BLOCK:
            self._split(position % len(blocks))

    def _split(self, position: int) -> None:
        block = self._blocks[position]
        # Split only the greatest rank off the last block, so that blocks stay full if ranks are appended in order.
        half = len(block) - 1 if position == len(self._blocks) - 1 else _BLOCK
        self._blocks[position : position + 1] = [block[:half], block[half:]]
        self._lasts.insert(position, block[half - 1])

    def remove(self, rank: Rank) -> None:
        """Remove a rank that is present."""
        block = self._blocks[0]
        if block[0] is rank:
            self._drop_first()
            while self._gone and self.first()[SERIAL] in self._gone:
                cast(set[int], self._gone).remove(self.first()[SERIAL])
                self._drop_first()
        elif len(self._blocks) == 1:
            self._version += 1
            self._num_listed -= 1
            del block[bisect_left(block, rank)]
            self._lasts[0] = block[-1]
        else:
            self._mark(rank)

    def _drop_first(self) -> None:
        self._version += 1
        self._num_listed -= 1
        block = self._blocks[0]
        if len(block) > 1:
            del block[0]
        else:
            del self._blocks[0], self._lasts[0]

    def _mark(self, rank: Rank) -> None:
        if not isinstance(self._gone, set):
            self._gone = set()
        gone = self._gone
        gone.add(rank[SERIAL])
        if len(gone) > _BLOCK and 2 * len(gone) > self._num_listed:
            left = [rank for block in self._blocks for rank in block if rank[SERIAL] not in gone]
            self._blocks = [left[start : start + _BLOCK] for start in range(0, len(left), _BLOCK)]
            self._lasts = [block[-1] for block in self._blocks]
            self._num_listed, self._gone = len(left), _NOTHING
            self._version += 1

    def walk(self, last: Rank | None = None) -> Iterator[Rank]:
        """Yield the ranks after `last` in order; if ranks are added or removed meanwhile, each yielded rank is the next
        one at that moment.
        """
        while True:
            version = self._version
            for rank in self._after(last):
                if rank[SERIAL] in self._gone:
                    continue
                yield rank
                last = rank
                if self._version != version:
                    break
            else:
                return

    def _after(self, last: Rank | None) -> Iterator[Rank]:
        """Return an iterator over the ranks greater than `last`, including marked ones; it is valid until the next
        change.
        """
        blocks = self._blocks
        if last is None or not blocks or blocks[0][0] > last:
            return chain.from_iterable(blocks)
        position = bisect_right(self._lasts, last)
        if position == len(blocks):
            return iter(())
        block = blocks[position]
        rest = map(block.__getitem__, range(bisect_right(block, last), len(block)))
        return chain(rest, chain.from_iterable(map(blocks.__getitem__, range(position + 1, len(blocks)))))
