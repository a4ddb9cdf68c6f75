"""Exact order for keys that are linear in time.

Requests with the same slope keep their order, so they form a sorted group; a kinetic tournament over the groups gives
the most urgent request and the time until which it stays the most urgent. The key of a request is intercept + slope *
now, computed in floating point from its `line`; the order is exactly that of these numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from math import isfinite
from typing import TypeAlias

from vajra_py.contract import PriorityKey, RequestView, TimeLinearPrioritizer
from vajra_py.runtime.queues.base import RankedQueue
from vajra_py.runtime.queues.keys import LineReader
from vajra_py.runtime.queues.ranks import KEY, REQUEST, SERIAL, SLOPE, Rank
from vajra_py.runtime.queues.tournament import SlopeGroup, Tournament, tie

_Place: TypeAlias = tuple[float, float, int, int]
"""Sort key of a queue entry (`Rank`) at one time: (key computed for that time, arrival, index, serial)."""


class KineticQueue(RankedQueue):
    """A `RequestQueue` for time-linear keys: O(log n) to add and remove, O(1) for a head that has not changed."""

    def __init__(self, prioritizer: TimeLinearPrioritizer, name: str | None = None) -> None:
        super().__init__()
        self._lines = LineReader(prioritizer, name)
        self._groups: dict[float, SlopeGroup] = {}
        self._tournament = Tournament()

    def peek(self, now: float) -> RequestView | None:
        """See `RequestQueue.peek`."""
        group = self._tournament.winner(now)
        if group is None:
            return None
        request = group.head[REQUEST]
        self._check(request, group.intercept + group.slope * now, now)
        return request

    def ordered(self, now: float) -> Iterator[RequestView]:
        """See `RequestQueue.ordered`."""
        return self._ordered(now, self._newest)

    def _ordered(self, now: float, newest: int) -> Iterator[RequestView]:
        last: Rank | None = None
        # As long as the caller removes each yielded request before it asks for the next one, the next request to yield
        # is the head of the queue.
        while True:
            group = self._tournament.winner(now)
            if group is None:
                return
            head = group.head
            if head is last or head[SERIAL] > newest:
                break
            last = head
            self._check(head[REQUEST], group.intercept + group.slope * now, now)
            yield head[REQUEST]
        last_place = None if last is None else _place(last, now)
        for place, rank in _Frontier(self._tournament, now):
            request = rank[REQUEST]
            if rank[SERIAL] > newest or self._ranks.get(request) is not rank:
                continue
            if last_place is None or place > last_place:
                self._check(request, place[0], now)
                yield request

    def urgency(self, request: RequestView, now: float) -> PriorityKey:
        """See `RequestQueue.urgency`; for a waiting request, the line by which it is sorted is used."""
        rank = self._ranks.get(request)
        intercept, slope = self._lines.line(request) if rank is None else (rank[KEY], rank[SLOPE])
        key = intercept + slope * now
        self._check(request, key, now)
        return (key, request.arrived_at, request.index)

    def _rank(self, request: RequestView, now: float) -> Rank:
        intercept, slope = self._lines.line(request)
        self._newest = serial = self._newest + 1
        num_tokens = request.num_known_tokens - request.num_computed_tokens
        return (intercept, request.arrived_at, request.index, serial, request, slope, num_tokens)

    def _enter(self, rank: Rank, now: float) -> None:
        tournament, slope = self._tournament, rank[SLOPE]
        group = self._groups.get(slope)
        if group is None:
            if not self._groups:
                tournament.restart(now)
            group = self._groups[slope] = SlopeGroup(rank, slope, tournament.now)
            tournament.enter(group)
        elif group.add(rank, tournament.now):
            tournament.changed(group)

    def _leave(self, rank: Rank) -> None:
        tournament, slope = self._tournament, rank[SLOPE]
        group = self._groups[slope]
        if len(group.ranks) == 1:
            del self._groups[slope]
            tournament.leave(group)
        elif group.remove(rank, tournament.now):
            tournament.changed(group)

    def _check(self, request: RequestView, key: float, now: float) -> None:
        if not isfinite(key):
            self._lines.reject(request, key, now)


class _Frontier:
    """Iteration over all ranks in their order at time `now`, at a cost of O(log n) per rank. A heap holds the first
    rank of each unread part.

    A part is a subtree of the tournament, represented by the head of its winner, or a group that is being read. The
    tournament may change during iteration. After a removal, the rank stored in the heap for a part may come before the
    part's first rank, which costs an extra check. An added request may be yielded too, at any position; the caller must
    skip it.
    """

    def __init__(self, tournament: Tournament, now: float) -> None:
        self._tournament = tournament
        self._now = now
        self._order = count()
        self._parts: list[tuple[_Place, int, Rank | None, tuple[int, int] | Iterator[Rank]]] = []

    def __iter__(self) -> Iterator[tuple[_Place, Rank]]:
        tournament, parts = self._tournament, self._parts
        tournament.winner(self._now)
        self._push_subtree(tournament.top_level, 0)
        while parts:
            place, _, rank, source = heappop(parts)
            if isinstance(source, tuple):
                tournament.winner(self._now)
                self._open(*source)
            elif rank is not None:
                yield place, rank
                self._push_next(source)

    def _open(self, level: int, position: int) -> None:
        """Split a subtree into the group that won it and the subtrees that lost to this group."""
        group = self._tournament.winners[self._tournament.match(level, position)]
        if group is None:
            return
        for below in range(level - 1, -1, -1):
            self._push_subtree(below, (group.slot >> below) ^ 1)
        self._push_next(_in_order(group, self._now))

    def _push_subtree(self, level: int, position: int) -> None:
        group = self._tournament.winners[self._tournament.match(level, position)]
        if group is not None:
            place = _place(group.head, self._now)
            heappush(self._parts, (place, next(self._order), None, (level, position)))

    def _push_next(self, source: Iterator[Rank]) -> None:
        rank = next(source, None)
        if rank is not None:
            heappush(self._parts, (_place(rank, self._now), next(self._order), rank, source))


def _place(rank: Rank, now: float) -> _Place:
    return (rank[KEY] + rank[SLOPE] * now, *tie(rank))


def _in_order(group: SlopeGroup, now: float) -> Iterator[Rank]:
    """Iterate over a group's ranks by computed key; ties caused by rounding are broken by arrival and index."""
    ranks, shift = group.ranks, group.slope * now
    equal: list[Rank] = []
    settled: float | None = None
    """Intercept whose computed key no other intercept shares; the ranks with this intercept are in order already."""
    for rank in ranks.walk():
        intercept = rank[KEY]
        if intercept == settled:
            yield rank
            continue
        if equal and intercept + shift != equal[0][KEY] + shift:
            yield from sorted(equal, key=tie)
            equal = []
        equal.append(rank)
        if len(equal) == 2 and intercept == equal[0][KEY]:
            following = ranks.first_after_key(intercept)
            if following is None or following[KEY] + shift != intercept + shift:
                yield from equal
                equal, settled = [], intercept
    yield from sorted(equal, key=tie)
