"""Queue for keys that change only with a request's own progress.

A request's key is read when the request is added or has progressed, and is constant in between. Adding and removing a
request cost O(log n), reading the head O(1).
"""

from __future__ import annotations

from collections.abc import Iterator

from vajra_py.contract import PriorityKey, RequestPrioritizer, RequestView
from vajra_py.runtime.queues.base import RankedQueue
from vajra_py.runtime.queues.keys import KeyReader
from vajra_py.runtime.queues.ranks import ARRIVED_AT, INDEX, KEY, REQUEST, SERIAL, Rank, SortedRanks


class SortedQueue(RankedQueue):
    """A `RequestQueue` for static and progress-dependent keys."""

    def __init__(self, prioritizer: RequestPrioritizer, name: str | None = None) -> None:
        super().__init__()
        self._keys = KeyReader(prioritizer, name)
        self._order = SortedRanks()

    def peek(self, now: float) -> RequestView | None:
        """See `RequestQueue.peek`."""
        return self._order.first()[REQUEST] if self._ranks else None

    def ordered(self, now: float) -> Iterator[RequestView]:
        """See `RequestQueue.ordered`."""
        return self._ordered(self._newest)

    def _ordered(self, newest: int) -> Iterator[RequestView]:
        last: Rank | None = None
        # As long as the caller removes each yielded request before it asks for the next one, the next request to yield
        # is the head of the queue.
        while self._ranks:
            head = self._order.first()
            if head is last or head[SERIAL] > newest:
                break
            last = head
            yield head[REQUEST]
        if not self._ranks:
            return
        for rank in self._order.walk(last):
            if rank[SERIAL] <= newest:
                yield rank[REQUEST]

    def urgency(self, request: RequestView, now: float) -> PriorityKey:
        """See `RequestQueue.urgency`; for a waiting request, the key by which it is sorted is used."""
        rank = self._standing(request, now)
        if rank is not None:
            return (rank[KEY], rank[ARRIVED_AT], rank[INDEX])
        return (self._keys.key(request, now), request.arrived_at, request.index)

    def _rank(self, request: RequestView, now: float) -> Rank:
        key = self._keys.key(request, now)
        self._newest = serial = self._newest + 1
        num_tokens = request.num_known_tokens - request.num_computed_tokens
        return (key, request.arrived_at, request.index, serial, request, 0.0, num_tokens)

    def _enter(self, rank: Rank, now: float) -> None:
        self._order.add(rank)

    def _leave(self, rank: Rank) -> None:
        self._order.remove(rank)
