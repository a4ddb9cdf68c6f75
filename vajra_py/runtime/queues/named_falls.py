"""Queue for keys that may rise at any event, but fall only if the policy names the request, or at times that the policy
gives in advance.

Requests are sorted by their keys as last read. Before every query, keys that may have fallen are re-read: those of
requests that the policy named, and those for which a time given by the policy has come. A request may therefore be
placed too early but never too late. The key of the first request is re-read before the request is returned: if the key
has risen, the request moves back, in O(log n), and the next request is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from vajra_py.contract import FallsWithTime, NamesFalls, PriorityKey, RequestView
from vajra_py.errors import PolicyError
from vajra_py.runtime.queues.base import RankedQueue
from vajra_py.runtime.queues.fall_times import FallTimes
from vajra_py.runtime.queues.keys import KeyReader
from vajra_py.runtime.queues.ranks import KEY, NUM_TOKENS, REQUEST, Rank, SortedRanks


class NamedFallsQueue(RankedQueue):
    """A `RequestQueue` for keys with `KeyMotion.NAMED_FALLS`."""

    def __init__(self, prioritizer: NamesFalls, name: str | None = None) -> None:
        super().__init__()
        self._keys = KeyReader(prioritizer, name)
        self._times = FallTimes(prioritizer, name) if isinstance(prioritizer, FallsWithTime) else None
        self._fallen = prioritizer.fallen_requests
        self._num_read = self._fallen.num_named
        """Number of names read so far from `_fallen`."""
        self._order = SortedRanks()
        self._entries: dict[RequestView, int] = {}
        """Serial number that each request got when it was added or refreshed. If the key changes when it is re-read,
        the request's rank gets a new serial number, but this number stays.
        """
        self._by_id: dict[str, RequestView] = {}
        self._num_falls = 0
        """Number of times that a request has moved forward."""
        self._asked_at = -inf
        """Maximum of the time of the last query and the times at which requests were added or refreshed after it. A
        query for an earlier time re-reads all keys, because keys may have been lower then although no fall was named.
        """

    def peek(self, now: float) -> RequestView | None:
        """See `RequestQueue.peek`."""
        head = self._head(now)
        return None if head is None else head[REQUEST]

    def ordered(self, now: float) -> Iterator[RequestView]:
        """See `RequestQueue.ordered`."""
        return self._ordered(now, self._newest)

    def _ordered(self, now: float, newest: int) -> Iterator[RequestView]:
        given: set[int] = set()
        # As long as the caller removes each yielded request before it asks for the next one, the next request to yield
        # is the head of the queue.
        while True:
            head = self._head(now)
            if head is None:
                return
            entry = self._entries[head[REQUEST]]
            if entry > newest or entry in given:
                break
            given.add(entry)
            yield head[REQUEST]
        walk, num_falls = self._order.walk(), self._num_falls
        while True:
            self._settle(now)
            if num_falls != self._num_falls:  # a request may have moved to a place already passed: start again
                walk, num_falls = self._order.walk(), self._num_falls
            rank = next(walk, None)
            if rank is None:
                return
            entry = self._entries[rank[REQUEST]]
            if entry <= newest and entry not in given and not self._has_risen(rank, now):
                given.add(entry)
                yield rank[REQUEST]

    def add(self, request: RequestView, now: float) -> None:
        """See `RequestQueue.add`."""
        super().add(request, now)
        self._asked_at = max(self._asked_at, now)
        self._entries[request] = self._newest
        self._by_id[request.request_id] = request

    def remove(self, request: RequestView) -> None:
        """See `RequestQueue.remove`."""
        super().remove(request)
        del self._entries[request], self._by_id[request.request_id]
        if self._times is not None:
            self._times.drop(request)

    def refresh(self, request: RequestView, now: float) -> None:
        """See `RequestQueue.refresh`."""
        old = self._ranks[request]
        super().refresh(request, now)
        self._asked_at = max(self._asked_at, now)
        if self._ranks[request] is not old:
            self._entries[request] = self._newest

    def urgency(self, request: RequestView, now: float) -> PriorityKey:
        """See `RequestQueue.urgency`; the request's present key is used."""
        return (self._keys.key(request, now), request.arrived_at, request.index)

    def _head(self, now: float) -> Rank | None:
        """Return the most urgent rank; None if nothing waits."""
        self._settle(now)
        while self._ranks:
            head = self._order.first()
            if not self._has_risen(head, now):
                return head
        return None

    def _settle(self, now: float) -> None:
        """Re-read the keys of requests that were named as fallen, and of requests whose keys may have fallen because
        time passed.
        """
        fallen = self._fallen
        if fallen.num_named != self._num_read or now < self._asked_at:
            names = fallen.since(self._num_read) if now >= self._asked_at else None
            by_id = self._by_id
            known = self._ranks if names is None else [by_id[name] for name in dict.fromkeys(names) if name in by_id]
            self._move([(self._ranks[one], self._rank(one, now)) for one in known])
            self._num_read = fallen.num_named
        self._asked_at = now
        if self._times is not None and (taken := self._times.take_due(now)):
            try:
                moved = [(self._ranks[one], self._rank(one, now)) for one in self._times.requests_of(taken)]
            except PolicyError:
                self._times.put_back(taken)
                raise
            self._move(moved)

    def _move(self, ranks: list[tuple[Rank, Rank]]) -> None:
        """Move each request whose key has changed to its new position."""
        for old, new in ranks:
            if new[KEY] != old[KEY]:
                self._replace(old, new)
                self._num_falls += new[KEY] < old[KEY]

    def _has_risen(self, rank: Rank, now: float) -> bool:
        """Re-read a key and return True if it has risen; the request then moves back. PolicyError if the key has
        fallen.
        """
        request = rank[REQUEST]
        key = self._keys.key(request, now)
        if key == rank[KEY]:
            return False
        if key < rank[KEY]:
            what = f"key() has decreased without being reported (was {rank[KEY]!r}, got {key!r})"
            allowed = "Allowed: a fall that is named in fallen_requests, or from falls_at on; rises need not be."
            self._keys.blame(request, f"{what}. {allowed}")
        self._replace(rank, self._rank(request, now))
        return True

    def _replace(self, old: Rank, new: Rank) -> None:
        self._order.remove(old)
        new = (*new[:NUM_TOKENS], old[NUM_TOKENS])
        self._ranks[new[REQUEST]] = new
        self._order.add(new)

    def _rank(self, request: RequestView, now: float) -> Rank:
        key = self._keys.key(request, now)
        self._newest = serial = self._newest + 1
        if self._times is not None:
            self._times.note(request, now, serial)
        num_tokens = request.num_known_tokens - request.num_computed_tokens
        return (key, request.arrived_at, request.index, serial, request, 0.0, num_tokens)

    def _enter(self, rank: Rank, now: float) -> None:
        self._order.add(rank)

    def _leave(self, rank: Rank) -> None:
        self._order.remove(rank)
