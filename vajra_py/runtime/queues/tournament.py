"""Kinetic tournament: the lowest of many lines, and the time until which it stays the lowest.

It is a kinetic tournament (Basch, Guibas and Hershberger, "Data structures for mobile data", SODA 1997) over groups of
parallel lines. Every match caches its winner and a certificate: the time until which this group stays the winner. Keys
are compared as computed in floating point, intercept + slope * now, so a certificate is shortened by a bound on the
rounding of both keys; from the certificate's end until the lines are clearly apart again, the match is replayed at each
new time. The winner is thus always that of a plain comparison of all computed keys, ties broken by (arrival, index).

Queries may be for any time: a time before the last query costs O(groups), a later time costs only the matches that have
changed.
"""

from __future__ import annotations

from math import inf

from vajra_py.runtime.queues.ranks import ARRIVED_AT, INDEX, KEY, SERIAL, Rank, SortedRanks

_ROUNDING = 2.0**-49
"""Bound on the rounding of a key, relative to abs(intercept) + abs(slope * now). The error of a key, relative to
this sum, is at most 2**-52; the bound is larger because its own computation is rounded too.
"""

_TINY = 1e-300
"""Absolute bound on the rounding of subnormal numbers, for which the relative bound does not hold."""

_DISTINCT = 2.0**50
"""Two parallel lines have different computed keys as long as the keys' magnitude is below the distance of the lines
times this factor.
"""

_LARGEST = 1e300
"""Largest magnitude of keys for which overflow is impossible and the bounds on rounding hold."""


def tie(rank: Rank) -> tuple[float, int, int]:
    """Return the tie-break between equal computed keys: arrival, index, entry into the queue."""
    return rank[ARRIVED_AT], rank[INDEX], rank[SERIAL]


class SlopeGroup:
    """Waiting requests whose lines are parallel, so that their order is that of their intercepts, except for rounding.

    `head` is first by computed key at the time of the latest `seat`, and remains so until `until`.
    """

    __slots__ = (
        "_distance",
        "_steepness",
        "head",
        "intercept",
        "intercept_error",
        "ranks",
        "slope",
        "slope_error",
        "slot",
        "until",
    )

    def __init__(self, first: Rank, slope: float, now: float) -> None:
        self.ranks = SortedRanks()
        self.ranks.add(first)
        self.slope = slope
        self.head = first
        self.intercept: float = first[KEY]
        self.slope_error = abs(slope) * _ROUNDING + _TINY
        self._steepness = abs(slope)
        self.slot = -1
        self.seat(now)

    def seat(self, now: float) -> None:
        """Find the head at `now`, and the time until which it stays the head."""
        head, other = self.ranks.first_two()
        intercept: float = head[KEY]
        if other is not None and other[KEY] == intercept:
            other = self.ranks.first_after_key(intercept)
        self._distance = distance = inf if other is None else other[KEY] - intercept
        largest = distance * _DISTINCT
        if largest > _LARGEST:
            largest = _LARGEST
        # At times from -until to until, the computed keys of the head's line and of the next line differ in spite of
        # rounding.
        until = (largest - abs(intercept)) / self._steepness if self._steepness else inf
        if not -until <= now <= until:
            head, until = self._first_computed(now), now
            intercept = head[KEY]
            self._distance = 0.0
        self.head, self.until, self.intercept = head, until, intercept
        self.intercept_error = abs(intercept) * _ROUNDING + _TINY

    def _first_computed(self, now: float) -> Rank:
        """Return the head at `now` by computed keys and `tie`; needed where rounding makes keys of different lines
        equal.
        """
        head = self.ranks.first()
        key = head[KEY] + self.slope * now
        for rank in self.ranks.walk():
            if rank[KEY] + self.slope * now != key:
                break
            head = min(head, rank, key=tie)
        return head

    def add(self, rank: Rank, now: float) -> bool:
        """Add a rank; return True if the head or `until` may have changed."""
        self.ranks.add(rank)
        shift = self.slope * now
        key, head_key = rank[KEY] + shift, self.intercept + shift
        if key < head_key or (key == head_key and tie(rank) < tie(self.head)):
            self.seat(now)
            return True
        distance = rank[KEY] - self.intercept
        if distance == 0.0 or distance >= self._distance:
            return False
        self.seat(now)
        return True

    def remove(self, rank: Rank, now: float) -> bool:
        """Remove a rank, which must not be the only one; return True if the head has changed."""
        ranks = self.ranks
        ranks.remove(rank)
        if rank is not self.head:
            return False
        first = ranks.first()
        if first[KEY] == self.intercept and self.until != now:
            self.head = first  # its line is that of the old head, so `until` and `_distance` stay as they are
        else:
            self.seat(now)
        return True


class Tournament:
    """Tournament among groups of different slopes, won by the group with the lowest key at `now`; adding or removing a
    group costs O(log n).
    """

    def __init__(self) -> None:
        self.now = 0.0
        """Time for which every cached result was computed."""
        self._capacity = 1
        self._free = [0]
        # Layout of a binary heap: the match at place i is between the winners at places 2i and 2i + 1; the last
        # `_capacity` places hold the groups.
        self.winners: list[SlopeGroup | None] = [None, None]
        self._until: list[float] = [inf, inf]

    def restart(self, now: float) -> None:
        """Set the time of an empty tournament, at no cost."""
        self.now = now

    def enter(self, group: SlopeGroup) -> None:
        """Add a group."""
        if not self._free:
            self._double()
        group.slot = self._free.pop()
        leaf = self._capacity + group.slot
        self.winners[leaf] = group
        self.changed(group)

    def leave(self, group: SlopeGroup) -> None:
        """Remove an empty group."""
        leaf = self._capacity + group.slot
        self._free.append(group.slot)
        self.winners[leaf] = None
        self._until[leaf] = inf
        self._climb(leaf, group)

    def changed(self, group: SlopeGroup) -> None:
        """Update the matches of a group whose `head` or `until` has changed."""
        leaf = self._capacity + group.slot
        self._until[leaf] = group.until
        self._climb(leaf, group)

    def winner(self, now: float) -> SlopeGroup | None:
        """Return the group whose head has the lowest key at `now`; None if there are no groups."""
        if now != self.now:
            self._advance(now)
        return self.winners[1]

    def match(self, level: int, position: int) -> int:
        """Return the index in `winners` of the match at `position` of a level. Levels are counted from the groups
        (level 0), so that a match keeps its level when the tournament grows.
        """
        return (self._capacity >> level) + position

    @property
    def top_level(self) -> int:
        """Level of the tournament's last match; the groups are level 0."""
        return self._capacity.bit_length() - 1

    def _advance(self, now: float) -> None:
        back, self.now = now < self.now, now
        if back:
            for leaf in range(self._capacity, 2 * self._capacity):
                self._seat(leaf)
            for match in range(self._capacity - 1, 0, -1):
                self._climb(2 * match, None, match)
        elif self._until[1] < now:
            self._repair(1)

    def _repair(self, match: int) -> None:
        """Replay every match of this subtree whose certificate has expired."""
        if match >= self._capacity:
            self._seat(match)
            return
        child = 2 * match
        if self._until[child] < self.now:
            self._repair(child)
        if self._until[child + 1] < self.now:
            self._repair(child + 1)
        self._climb(2 * match, None, match)

    def _seat(self, leaf: int) -> None:
        group = self.winners[leaf]
        if group is not None:
            group.seat(self.now)
            self._until[leaf] = group.until

    def _climb(self, place: int, changed: SlopeGroup | None, final: int = 1) -> None:
        """Replay the matches above `place` up to `final`, or up to the first match that `changed` neither won before
        nor wins now: above it, no winner changes, but certificates may expire earlier.

        This is the inner loop of every step: one match costs a third of a microsecond.
        """
        winners, until, now = self.winners, self._until, self.now
        group, holds, age = winners[place], until[place], abs(now)
        key = 0.0 if group is None else group.intercept + group.slope * now
        while place > final:
            rival, rival_holds = winners[place ^ 1], until[place ^ 1]
            if rival_holds < holds:
                holds = rival_holds
            place >>= 1
            if group is None:
                group = rival
                key = 0.0 if group is None else group.intercept + group.slope * now
            elif rival is not None:
                rival_key = rival.intercept + rival.slope * now
                lead = rival_key - key
                if lead < 0.0 or (lead == 0.0 and tie(rival.head) < tie(group.head)):
                    group, rival, key, lead = rival, group, rival_key, -lead
                # Allow for rounding twice: in the lead at `now`, and in the rate at which the lead shrinks.
                slope_error = group.slope_error + rival.slope_error
                lead -= group.intercept_error + rival.intercept_error + slope_error * age
                closing = group.slope - rival.slope + slope_error
                if not 0.0 < lead < inf:
                    holds = now
                elif closing > 0.0:
                    meeting = now + lead / closing
                    if meeting < holds:
                        holds = meeting
            before = winners[place]
            winners[place], until[place] = group, holds
            if before is not changed and group is not changed:
                break
        # Certificates of matches above may have to expire earlier. Certificates that could hold longer are left as they
        # are and renewed when they expire.
        while place > final:
            place >>= 1
            if until[place] <= holds:
                return
            until[place] = holds

    def _double(self) -> None:
        """Make this tournament the left half of a tournament twice as large."""
        old = self._capacity
        winners: list[SlopeGroup | None] = [None, self.winners[1]]
        until = [inf, self._until[1]]
        width = 1
        while width <= old:
            winners += self.winners[width : 2 * width]
            winners += [None] * width
            until += self._until[width : 2 * width]
            until += [inf] * width
            width *= 2
        self.winners, self._until = winners, until
        self._capacity = 2 * old
        self._free = list(range(2 * old - 1, old - 1, -1))
