"""Order in which a retention policy evicts idle content: chains of blocks, the end of a chain first.

A block is a candidate when it is idle and nothing cached continues it. Candidates are kept in the same kinds of queues
as requests, one for each segment (`RetainsInSegments`), so that the order is exact for every `KeyMotion`. Choosing a
victim costs O(log n), unless keys may change at any event.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar, cast

from vajra_py.contract import KeyMotion, RequestView
from vajra_py.contract.retention import RetainsInSegments, RetentionPolicy
from vajra_py.errors import POLICY_EXCEPTIONS, PolicyError, VajraError
from vajra_py.runtime.queues import RequestQueue, make_queue


class CachedEntry:
    """Cached content of one block, as policies see it (`CachedBlock`). In a radix tree, whose nodes may be longer than
    a block, an entry is the content of one node.

    Candidates for eviction are kept in the same kinds of queues as waiting requests, so entries have the attributes by
    which queues break ties.
    """

    __slots__ = (
        "block",
        "block_hash",
        "depth",
        "index",
        "is_idle",
        "last_used_at",
        "num_children",
        "num_uses",
        "parent",
        "priority",
        "request",
        "segment",
        "stored_at",
    )

    arrived_at = 0.0
    num_known_tokens = num_computed_tokens = 0

    def __init__(
        self, block: int, block_hash: Hashable, parent: CachedEntry | None, request: Any = None, now: float = 0.0
    ) -> None:
        self.block = block
        self.block_hash = block_hash
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.num_children = 0
        """Number of entries that continue this one."""
        self.stored_at = self.last_used_at = now
        self.num_uses = 1
        self.priority: int = getattr(request, "priority", 0)
        self.request = request
        self.is_idle = False
        self.index = 0
        """Position in the order in which entries became idle."""
        self.segment = 0

    @property
    def request_id(self) -> str:
        """Id of the request that used the entry last, for error messages."""
        return str(getattr(self.request, "request_id", self.block_hash))

    def use(self, request: Any, now: float) -> None:
        """Count one use of the entry by a request."""
        self.num_uses += 1
        self.last_used_at = now
        self.request = request
        priority = getattr(request, "priority", 0)
        if priority < self.priority:
            self.priority = priority


EntryT = TypeVar("EntryT", bound=CachedEntry)


class RetentionOrder(Generic[EntryT]):
    """Candidates of one cache in the order of its retention policy.

    A policy that breaks the contract is not called again: from then on, entries are evicted in the order in which they
    became idle. The error is stored in `error`, so that the run can end at a point where memory is consistent.
    """

    def __init__(self, policy: RetentionPolicy, name: str) -> None:
        self.policy = policy
        self.name = name
        self.error: PolicyError | None = None
        """Violation of the contract by the policy; None if there was none."""
        self._segments = policy if isinstance(policy, RetainsInSegments) else None
        self._queues: dict[int, RequestQueue] = {}
        self._num_idle = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def number(self, entry: CachedEntry) -> None:
        """Set the `index` of an entry that becomes idle to the next number."""
        self._num_idle = entry.index = self._num_idle + 1

    def add(self, entry: EntryT, now: float) -> None:
        """Add a candidate."""
        if self._segments is not None:
            segment = self.ask(self._segments.segment, entry)
            if type(segment) is int:
                entry.segment = segment
            elif self.error is None:
                self.fail(PolicyError(self.name, f"segment() is not a whole number (got {segment!r})"))
        try:
            self._queue(entry.segment).add(cast(RequestView, entry), now)
        except PolicyError as error:
            self.fail(error)
            self._queue(entry.segment).add(cast(RequestView, entry), now)

    def discard(self, entry: EntryT) -> None:
        """Remove an entry if it is a candidate."""
        queue = self._queues.get(entry.segment)
        if queue is not None and entry in queue:
            queue.remove(cast(RequestView, entry))

    def begin(self) -> None:
        """Note a new event: keys that may change at any event are re-read before the next victim is chosen."""
        for queue in self._queues.values():
            queue.begin_step()

    def pop(self, now: float) -> EntryT:
        """Remove and return the candidate to be evicted first; there must be a candidate."""
        try:
            queue = self._next_queue(now)
            first = queue.peek(now)
        except PolicyError as error:
            self.fail(error)
            queue = self._next_queue(now)
            first = queue.peek(now)
        assert first is not None
        queue.remove(first)
        if queue.is_volatile:
            queue.begin_step()
        return cast(EntryT, first)

    def ask(self, method: Callable[..., Any], *about: object) -> Any:
        """Call a policy's method and return its result; return None if this call or an earlier one violated the
        contract.
        """
        if self.error is not None:
            return None
        try:
            return method(*about)
        except PolicyError as error:
            self.fail(error)
        except VajraError:
            raise
        except POLICY_EXCEPTIONS as error:
            self.fail(PolicyError.caused_by(self.name, error))
        return None

    def _next_queue(self, now: float) -> RequestQueue:
        queues = self._queues
        if len(queues) == 1:
            return next(iter(queues.values()))
        if self._segments is not None:
            wanted = self.ask(self._segments.next_segment, now)
            if type(wanted) is not int and self.error is None:
                self.fail(PolicyError(self.name, f"next_segment() is not a whole number (got {wanted!r})"))
            queue = queues.get(wanted)
            if queue is not None and len(queue):
                return queue
        return next(queues[segment] for segment in sorted(queues) if len(queues[segment]))

    def _queue(self, segment: int) -> RequestQueue:
        queue = self._queues.get(segment)
        if queue is None:
            ranks: Any = self.policy if self.error is None else _AsTheyBecameIdle()
            queue = self._queues[segment] = make_queue(ranks, self.name)
        return queue

    def fail(self, error: PolicyError) -> None:
        """Store a violation of the contract, and order the entries without the policy from now on."""
        self.error = error
        self._segments = None
        entries = [cast(EntryT, entry) for queue in self._queues.values() for entry in queue]
        self._queues = {}
        for entry in entries:
            self._queue(entry.segment).add(cast(RequestView, entry), 0.0)


class _AsTheyBecameIdle:
    """Equal keys for all entries, so that they are evicted in the order in which they became idle."""

    key_motion = KeyMotion.STATIC

    def key(self, block: object, now: float) -> float:
        """Return the same key for all blocks."""
        return 0.0
