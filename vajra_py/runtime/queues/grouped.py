"""Queue for keys by group: (key of the group, key of the request, arrival, index).

Two levels: the requests of each group in order, and the groups in the order of (key, head). Groups are sorted by their
keys as last read. Keys of groups only rise, except for falls that the prioritizer names, so a group may be placed too
early but never too late. The key of the first group is re-read before its head is returned: if the key has risen, the
group moves back, in O(log groups), and the next group is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any, TypeAlias, cast

from vajra_py.contract import (
    FallenGroups,
    GroupsRequests,
    Key,
    KeyMotion,
    LowersGroups,
    PriorityKey,
    RequestView,
)
from vajra_py.runtime.queues.base import RankedQueue
from vajra_py.runtime.queues.keys import GroupReader, KeyReader
from vajra_py.runtime.queues.ranks import ARRIVED_AT, INDEX, KEY, REQUEST, SERIAL, Rank, SortedRanks

_Next: TypeAlias = tuple[tuple[Any, Any], float, int, int, "_Cursor"]
"""Sort key of the request that a cursor reaches next, with the cursor: ((key of the group, key of the request),
arrival, index, serial, cursor).
"""


class _Group:
    """The waiting requests of one group, in order."""

    __slots__ = ("head", "key", "name", "place", "ranks")

    def __init__(self, name: str, key: Any) -> None:
        self.name = name
        self.key = key
        """Key as last read; not greater than the present key, unless a fall was named."""
        self.ranks = SortedRanks()
        self.head: Rank | None = None
        """First of `ranks` at the time when `place` was set."""
        self.place: Any = None
        """Tuple by which the group is sorted among the groups; None if it is not in their order yet. Its fields are
        those of a `Rank`: (key, key of the head), arrival and index of the head, serial, group, 0, 0.
        """


class _Cursor:
    """Position in one group that an iteration over the queue has reached."""

    __slots__ = ("group", "next", "walk")

    def __init__(self, group: _Group, last: Rank | None = None) -> None:
        """Create a cursor that begins after the rank `last` (None: at the first rank)."""
        self.group = group
        self.walk = group.ranks.walk(last)
        self.next: Rank | None = None
        """Rank that was reached but not yielded yet."""


class GroupedQueue(RankedQueue):
    """A `RequestQueue` for static and progress-dependent keys within groups; keys of groups may change at any time."""

    def __init__(self, prioritizer: GroupsRequests, name: str | None = None) -> None:
        super().__init__()
        self._keys = KeyReader(prioritizer, name)
        self._reader = GroupReader(prioritizer, name)
        self._fallen: FallenGroups | None = None
        self._num_read = 0
        """Number of names read so far from `_fallen`."""
        if isinstance(prioritizer, LowersGroups):
            self._fallen = prioritizer.fallen_groups
            self._num_read = self._fallen.num_named
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[RequestView, _Group] = {}
        self._order = SortedRanks()
        """Order of the groups: the `place` of each."""
        self._headless: dict[_Group, None] = {}
        """Groups whose head may have changed since their `place` was set."""
        self._version = 0
        """Counter that increases whenever the order of groups changes; also the serial number of the newest `place`."""

    def peek(self, now: float) -> RequestView | None:
        """See `RequestQueue.peek`."""
        head = self._head()
        return None if head is None else head[REQUEST]

    def ordered(self, now: float) -> Iterator[RequestView]:
        """See `RequestQueue.ordered`."""
        return self._ordered(self._newest)

    def urgency(self, request: RequestView, now: float) -> PriorityKey:
        """See `RequestQueue.urgency`; the group's present key is used."""
        rank = self._standing(request, now)
        if rank is not None:
            group_key, key = self._reader.key(self._group_of[request].name), rank[KEY]
        else:
            group_key, key = self._reader.key(self._reader.group(request)), self._keys.key(request, now)
        return (_joined(group_key, key), request.arrived_at, request.index)

    def remove(self, request: RequestView) -> None:
        """See `RequestQueue.remove`."""
        super().remove(request)
        del self._group_of[request]

    def _ordered(self, newest: int) -> Iterator[RequestView]:
        # As long as the caller removes each yielded request before it asks for the next one, the next request to yield
        # is the head of the queue.
        while True:
            head = self._head()
            if head is None:
                return
            if head[SERIAL] > newest:
                yield from self._merged(newest, {})
                return
            request = head[REQUEST]
            group = self._group_of[request]
            yield request
            if self._ranks.get(request) is head:
                yield from self._merged(newest, {group: _Cursor(group, head)})
                return

    def _merged(self, newest: int, cursors: dict[_Group, _Cursor]) -> Iterator[RequestView]:
        """Merge the groups: yield the requests that no cursor has passed, each time the most urgent one by the present
        order.
        """
        ahead: list[_Next] = []
        """Heap with the next request of each group that was reached since the order of groups last changed."""
        places: Iterator[Rank] = iter(())
        reached: Rank | None = None
        """The `place` of the first group that has not been reached yet."""
        version = -1
        while True:
            self._settle()
            if version != self._version:
                version, ahead, places = self._version, [], self._order.walk()
                reached = next(places, None)
            while reached is not None and (not ahead or reached < ahead[0]):
                group: Any = reached[REQUEST]
                if self._has_risen(group):
                    version = self._version
                else:
                    cursor = cursors.get(group)
                    if cursor is None:
                        cursor = cursors[group] = _Cursor(group)
                    self._push(cursor, newest, ahead)
                reached = next(places, None)
            if not ahead:
                return
            cursor = ahead[0][-1]
            rank = cursor.next
            if rank is None or self._ranks.get(rank[REQUEST]) is not rank:  # the request has left since `_push`
                heappop(ahead)
                self._push(cursor, newest, ahead)
            elif not self._has_risen(cursor.group):
                heappop(ahead)
                cursor.next = None
                yield rank[REQUEST]
                self._push(cursor, newest, ahead)

    def _push(self, cursor: _Cursor, newest: int, ahead: list[_Next]) -> None:
        """Push a cursor's next request onto the heap `ahead`, skipping requests that have left or were added after
        serial number `newest`.
        """
        rank = cursor.next or next(cursor.walk, None)
        while rank is not None and (rank[SERIAL] > newest or self._ranks.get(rank[REQUEST]) is not rank):
            rank = next(cursor.walk, None)
        cursor.next = rank
        if rank is not None:
            heappush(ahead, ((cursor.group.key, rank[KEY]), rank[ARRIVED_AT], rank[INDEX], rank[SERIAL], cursor))

    def _head(self) -> Rank | None:
        """Return the most urgent rank; None if nothing waits."""
        self._settle()
        while self._ranks:
            group: Any = self._order.first()[REQUEST]
            if not self._has_risen(group):
                head: Rank = group.head
                return head
        return None

    def _settle(self) -> None:
        """Re-read the keys of groups that were named as fallen, and re-insert groups whose key or head has changed."""
        fallen = self._fallen
        if fallen is not None and fallen.num_named != self._num_read:
            names = fallen.since(self._num_read)
            known = self._groups if names is None else [name for name in dict.fromkeys(names) if name in self._groups]
            keys = [(self._groups[name], self._reader.key(name)) for name in known]
            self._num_read = fallen.num_named
            for group, key in keys:
                if key != group.key:
                    group.key = key
                    self._place(group)
        if self._headless:
            for group in self._headless:
                if group.place is None or (group.head is not group.ranks.first() and not self._has_risen(group)):
                    self._place(group)
            self._headless.clear()

    def _has_risen(self, group: _Group) -> bool:
        """Re-read a group's key and return True if it has risen; the group is then placed again, further back.
        PolicyError if the key has fallen.
        """
        key = self._reader.key(group.name)
        if key == group.key:
            return False
        if key < group.key:
            what = f"group_key({group.name!r}) has decreased without being reported (was {group.key!r}, got {key!r})"
            allowed = "Allowed: a fall that is named in fallen_groups; rises need not be."
            self._reader.blame(f"{what}. {allowed}")
        group.key = key
        self._place(group)
        return True

    def _place(self, group: _Group) -> None:
        """Insert a group at the position given by its key and head."""
        order = self._order
        if group.place is not None:
            order.remove(group.place)
        group.head = head = group.ranks.first()
        self._version = serial = self._version + 1
        group.place = place = ((group.key, head[KEY]), head[ARRIVED_AT], head[INDEX], serial, group, 0.0, 0)
        order.add(cast(Rank, place))

    def _rank(self, request: RequestView, now: float) -> Rank:
        key = self._keys.key(request, now)
        if request not in self._group_of:
            name = self._reader.group(request)
            group = self._groups.get(name) or _Group(name, self._reader.key(name))
            self._group_of[request] = group
        self._newest = serial = self._newest + 1
        num_tokens = request.num_known_tokens - request.num_computed_tokens
        return (key, request.arrived_at, request.index, serial, request, 0.0, num_tokens)

    def _enter(self, rank: Rank, now: float) -> None:
        group = self._group_of[rank[REQUEST]]
        group.ranks.add(rank)
        if group.head is None:
            self._groups[group.name] = group
            self._headless[group] = None
        elif rank < group.head:
            self._headless[group] = None

    def _leave(self, rank: Rank) -> None:
        group = self._group_of[rank[REQUEST]]
        group.ranks.remove(rank)
        if not len(group.ranks):
            del self._groups[group.name]
            self._headless.pop(group, None)
            if group.place is not None:
                self._order.remove(group.place)
                self._version += 1
            group.head = group.place = None
        elif rank is group.head:
            self._headless[group] = None


class KeyedByGroup:
    """Adapter that turns a prioritizer by group into one with plain `VOLATILE` keys: (key of the group, key of the
    request).
    """

    key_motion = KeyMotion.VOLATILE

    def __init__(self, prioritizer: GroupsRequests, name: str | None = None) -> None:
        self._keys = KeyReader(prioritizer, name)
        self._reader = GroupReader(prioritizer, name)

    def key(self, request: RequestView, now: float) -> Key:
        """Return the two keys, joined; PolicyError if one breaks the contract."""
        return _joined(self._reader.key(self._reader.group(request)), self._keys.key(request, now))


def _joined(group_key: Any, key: Any) -> Key:
    """Join two keys to one that orders by the first, then by the second."""
    first = group_key if type(group_key) is tuple else (group_key,)
    return (*first, *key) if type(key) is tuple else (*first, key)
