"""Queue for keys that may change at any event.

All keys are re-read, in O(n), at a query for a new time and at the first query of a new step. The order is then
computed only as far as it is used: a sorted part, and a heap of the rest. If a policy counts changes of its keys, keys
are not re-read while the count is unchanged.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from vajra_py.contract import CountsKeyChanges, KeyMotion, PriorityKey, RequestPrioritizer, RequestView
from vajra_py.runtime.queues.base import RankedQueue
from vajra_py.runtime.queues.keys import EpochReader, KeyReader
from vajra_py.runtime.queues.ranks import ARRIVED_AT, INDEX, KEY, NUM_TOKENS, REQUEST, SERIAL, Rank


class ArbitraryQueue(RankedQueue):
    """`RequestQueue` for keys of any `KeyMotion`."""

    is_arbitrary = True

    def __init__(self, prioritizer: RequestPrioritizer, name: str | None = None) -> None:
        super().__init__()
        self.is_volatile = prioritizer.key_motion is KeyMotion.VOLATILE
        self._keys = KeyReader(prioritizer, name)
        self._epochs = EpochReader(prioritizer, name) if isinstance(prioritizer, CountsKeyChanges) else None
        self._epoch: int | None = None
        """The prioritizer's count of key changes (`key_epoch`) when all keys were last read. None if the prioritizer
        has no `key_epoch`, or if the key of an added request was read later, with another count.
        """
        self._entered_in: int | None = None
        """The prioritizer's `key_epoch` when the key of the latest rank was read; None if it has no `key_epoch`."""
        self._read_at: float | None = None
        """Time at which the keys of the ranks were read; None when they must be read again."""
        self._num_readings = 0
        self._first: list[Rank] = []
        """The most urgent ranks, sorted, without requests that have left."""
        self._rest: list[Rank] = []
        """A heap of the other ranks; some of their requests may have left."""

    def peek(self, now: float) -> RequestView | None:
        """See `RequestQueue.peek`."""
        self._read(now)
        if self._first or self._extend():
            return self._first[0][REQUEST]
        return None

    def ordered(self, now: float) -> Iterator[RequestView]:
        """See `RequestQueue.ordered`."""
        return self._ordered(now, self._newest)

    def _ordered(self, now: float, newest: int) -> Iterator[RequestView]:
        given: set[int] = set()
        last: Rank | None = None
        reading = 0
        while True:
            self._read(now)
            # If keys were re-read, start again from the first rank: requests that were not yielded yet may now have any
            # rank.
            if reading != self._num_readings:
                reading, last = self._num_readings, None
            position = 0 if last is None else bisect_right(self._first, last)
            if position == len(self._first) and not self._extend():
                return
            last = self._first[position]
            if last[SERIAL] <= newest and last[SERIAL] not in given:
                given.add(last[SERIAL])
                yield last[REQUEST]

    def refresh(self, request: RequestView, now: float) -> None:
        """See `RequestQueue.refresh`."""
        super().refresh(request, now)
        if now != self._read_at:
            self._read_at = None

    def urgency(self, request: RequestView, now: float) -> PriorityKey:
        """See `RequestQueue.urgency`."""
        if now == self._read_at:
            rank = self._ranks.get(request)
            if rank is not None:
                return (rank[KEY], rank[ARRIVED_AT], rank[INDEX])
        return (self._keys.key(request, now), request.arrived_at, request.index)

    def begin_step(self) -> None:
        """See `RequestQueue.begin_step`."""
        self._read_at = None

    def _read(self, now: float) -> None:
        """Re-read every key at `now`, unless the keys are still valid; if a key breaks the contract, nothing changes."""
        if now == self._read_at:
            return
        epoch = None if self._epochs is None else self._epochs.epoch()
        if epoch is not None and epoch == self._epoch:
            self._read_at = now
            return
        key = self._keys.key
        ranks = {
            request: (key(request, now), rank[ARRIVED_AT], rank[INDEX], rank[SERIAL], request, 0.0, rank[NUM_TOKENS])
            for request, rank in self._ranks.items()
        }
        self._ranks = ranks
        self._first, self._rest = [], list(ranks.values())
        heapify(self._rest)
        self._read_at, self._epoch = now, epoch
        self._num_readings += 1

    def _extend(self) -> bool:
        """Move the next rank from the heap to the sorted part; return False if the heap has none."""
        while self._rest:
            rank = heappop(self._rest)
            if self._ranks.get(rank[REQUEST]) is rank:
                self._first.append(rank)
                return True
        return False

    def _rank(self, request: RequestView, now: float) -> Rank:
        self._entered_in = None if self._epochs is None else self._epochs.epoch()
        key = self._keys.key(request, now)
        self._newest = serial = self._newest + 1
        num_tokens = request.num_known_tokens - request.num_computed_tokens
        return (key, request.arrived_at, request.index, serial, request, 0.0, num_tokens)

    def _enter(self, rank: Rank, now: float) -> None:
        if now != self._read_at and (self._epoch is None or self._epoch != self._entered_in):
            self._read_at = self._epoch = None  # keys read at different times cannot be compared: re-read all
        elif self._first and rank < self._first[-1]:
            insort(self._first, rank)
        else:
            heappush(self._rest, rank)

    def _leave(self, rank: Rank) -> None:
        if (self._read_at is not None or self._epoch is not None) and self._first and rank <= self._first[-1]:
            del self._first[bisect_left(self._first, rank)]
