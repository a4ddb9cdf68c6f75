"""Queues for keys that change with the prefix hits of their requests.

At a query for a new time, and at the first query of a new step, two kinds of keys are re-read, in O(log n) each: keys
of requests whose hits have changed, as the memory reports, and keys that may have fallen because time passed. All keys
are re-read if the memory does not report changes, or if the policy's count of key changes (`CountsKeyChanges`) has
changed. All other queries use the keys as last read.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator

from vajra_py.contract import CountsKeyChanges, FallsWithTime, GroupsRequests, RequestPrioritizer, RequestView
from vajra_py.errors import PolicyError
from vajra_py.runtime.queues.base import HitChanges, RankedQueue
from vajra_py.runtime.queues.fall_times import FallTimes
from vajra_py.runtime.queues.grouped import GroupedQueue
from vajra_py.runtime.queues.keys import EpochReader
from vajra_py.runtime.queues.ranks import KEY, NUM_TOKENS, REQUEST, SERIAL, Rank
from vajra_py.runtime.queues.sorted_queue import SortedQueue


class NoHits:
    """`HitChanges` of a memory without prefix cache: hits never change."""

    def follow(self, request: RequestView) -> None:
        """Do nothing."""

    def drop(self, request: RequestView) -> None:
        """Do nothing."""

    def take_changed(self) -> Collection[RequestView]:
        """Return no requests."""
        return ()


class Readings:
    """Determines which keys of a queue must be re-read, and when."""

    def __init__(self, prioritizer: RequestPrioritizer, name: str | None = None) -> None:
        self._times = FallTimes(prioritizer, name) if isinstance(prioritizer, FallsWithTime) else None
        self._epochs = EpochReader(prioritizer, name) if isinstance(prioritizer, CountsKeyChanges) else None
        self._epoch: int | None = None
        self._hits: HitChanges | None = None
        """Source of changed prefix hits; None: there is no source, and all keys are re-read."""
        self._read_at: float | None = None
        """Time for which all keys are valid; None if they must be checked."""
        self._latest: float | None = None
        """Latest time at which a key was read; None: all keys must be read."""
        self._changed: dict[RequestView, None] = {}
        """Requests whose keys must be re-read."""

    def use(self, hits: HitChanges | None) -> None:
        """Use this source from now on; it tracks no request yet."""
        self._hits, self._read_at, self._latest = hits, None, None

    def begin_step(self) -> None:
        """Let the keys be checked at the next query."""
        self._read_at = None

    def stand_at(self, now: float) -> bool:
        """Return True if the keys of waiting requests are valid for this time."""
        return now == self._read_at

    def is_read(self, request: RequestView, now: float, serial: int) -> None:
        """Record that a request's key is read at `now`, and the time from which the key may fall (`FallsWithTime`).

        Raises `PolicyError` if that time violates the contract.
        """
        if self._times is not None:
            self._times.note(request, now, serial)

    def entered(self, request: RequestView, now: float) -> None:
        """Add a waiting request whose key was read at `now`."""
        if self._hits is not None:
            self._hits.follow(request)
        if now != self._read_at:
            self._read_at = None
        if self._latest is not None and now > self._latest:
            self._latest = now

    def left(self, request: RequestView) -> None:
        """Remove a request that has left the queue."""
        if self._times is not None:
            self._times.drop(request)
        if self._hits is not None:
            self._hits.drop(request)
        self._changed.pop(request, None)

    def touch(self, request: RequestView) -> None:
        """Mark a request's key to be re-read at the next query."""
        self._changed[request] = None

    def read(
        self, now: float, waiting: Collection[RequestView], read: Callable[[list[RequestView], float], None]
    ) -> None:
        """Call `read` with the requests whose keys may have changed by `now`; if `read` raises, all keys stay marked as
        they were.
        """
        if now == self._read_at:
            return
        epoch = None if self._epochs is None else self._epochs.epoch()
        hits, times, changed = self._hits, self._times, self._changed
        if hits is not None:
            changed.update(dict.fromkeys(hits.take_changed()))
        taken = [] if times is None else times.take_due(now)
        is_any = hits is None or self._latest is None or epoch != self._epoch
        if is_any or (times is not None and self._latest is not None and now < self._latest):
            wanted = list(waiting)
        else:
            due = changed if times is None or not taken else {**changed, **times.requests_of(taken)}
            wanted = list(due)
        try:
            read(wanted, now)
        except PolicyError:
            if times is not None:
                times.put_back(taken)
            raise
        if hits is not None:
            for request in wanted:
                hits.follow(request)
        changed.clear()
        self._read_at = self._latest = now
        self._epoch = epoch


class HitsQueue(RankedQueue):
    """Base class that re-reads the keys of requests whose prefix hits have changed; a subclass has a second base class,
    which keeps the ranks in order.
    """

    is_arbitrary = True
    reads_hits = True
    _readings: Readings
    _entries: dict[RequestView, int]
    """Serial number that each request got when it was added or refreshed. If the key changes when it is re-read,
    the request's rank gets a new serial number, but this number stays.
    """
    _num_moves: int
    """Number of re-readings in which at least one key had changed."""

    def _start(self, readings: Readings) -> None:
        self._readings, self._entries, self._num_moves = readings, {}, 0

    @abstractmethod
    def _walk(self) -> Iterator[RequestView]:
        """Iterate over all waiting requests in order; the iterator is invalid once a key has changed."""

    def use_hits(self, hits: HitChanges | None) -> None:
        """See `RequestQueue.use_hits`."""
        self._readings.use(hits)

    def touch(self, request: RequestView) -> None:
        """See `RequestQueue.touch`."""
        if request in self._ranks:
            self._readings.touch(request)

    def begin_step(self) -> None:
        """See `RequestQueue.begin_step`."""
        self._readings.begin_step()

    def peek(self, now: float) -> RequestView | None:
        """See `RequestQueue.peek`."""
        self._read(now)
        return super().peek(now)  # type: ignore[safe-super] # in the second base class

    def ordered(self, now: float) -> Iterator[RequestView]:
        """See `RequestQueue.ordered`."""
        return self._ordered_at(now, self._newest)

    def _ordered_at(self, now: float, newest: int) -> Iterator[RequestView]:
        given: set[int] = set()
        walk, num_moves = self._walk(), self._num_moves
        while True:
            self._read(now)
            if num_moves != self._num_moves:  # requests not yielded yet may have any rank now: start again
                walk, num_moves = self._walk(), self._num_moves
            request = next(walk, None)
            if request is None:
                return
            entry = self._entries[request]
            if entry <= newest and entry not in given:
                given.add(entry)
                yield request

    def add(self, request: RequestView, now: float) -> None:
        """See `RequestQueue.add`."""
        super().add(request, now)
        self._entries[request] = self._newest
        self._readings.entered(request, now)

    def remove(self, request: RequestView) -> None:
        """See `RequestQueue.remove`."""
        super().remove(request)
        del self._entries[request]
        self._readings.left(request)

    def refresh(self, request: RequestView, now: float) -> None:
        """See `RequestQueue.refresh`."""
        old = self._ranks[request]
        super().refresh(request, now)
        self._readings.entered(request, now)
        if self._ranks[request] is not old:
            self._entries[request] = self._newest

    def _standing(self, request: RequestView, now: float) -> Rank | None:
        return super()._standing(request, now) if self._readings.stand_at(now) else None

    def _read(self, now: float) -> None:
        self._readings.read(now, self._ranks, self._read_again)

    def _read_again(self, requests: list[RequestView], now: float) -> None:
        read = [(self._ranks[one], self._rank(one, now)) for one in requests]
        moved = [(old, new) for old, new in read if new[KEY] != old[KEY]]
        for old, new in moved:
            rank = (*new[:NUM_TOKENS], old[NUM_TOKENS])
            self._leave(old)
            self._ranks[rank[REQUEST]] = rank
            self._enter(rank, now)
        self._num_moves += bool(moved)

    def _noted(self, rank: Rank, now: float) -> Rank:
        self._readings.is_read(rank[REQUEST], now, rank[SERIAL])
        return rank


class PrefixHitsQueue(HitsQueue, SortedQueue):
    """A `RequestQueue` for keys with `KeyMotion.PREFIX_HITS`."""

    def __init__(self, prioritizer: RequestPrioritizer, name: str | None = None) -> None:
        SortedQueue.__init__(self, prioritizer, name)
        self._start(Readings(prioritizer, name))

    def _walk(self) -> Iterator[RequestView]:
        return (rank[REQUEST] for rank in self._order.walk())

    def _rank(self, request: RequestView, now: float) -> Rank:
        return self._noted(SortedQueue._rank(self, request, now), now)


class GroupedHitsQueue(HitsQueue, GroupedQueue):
    """A `RequestQueue` for keys by group, with `KeyMotion.PREFIX_HITS` within groups.

    Keys of requests are also checked after each admission and preemption; keys of groups are always up to date, as in
    `GroupedQueue`.
    """

    is_volatile = True

    def __init__(self, prioritizer: GroupsRequests, name: str | None = None) -> None:
        GroupedQueue.__init__(self, prioritizer, name)
        self._start(Readings(prioritizer, name))

    def _walk(self) -> Iterator[RequestView]:
        return self._merged(sys.maxsize, {})

    def _rank(self, request: RequestView, now: float) -> Rank:
        return self._noted(GroupedQueue._rank(self, request, now), now)
