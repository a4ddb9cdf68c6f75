"""Requests that hold memory on a replica, in the orders that policies need.

A resident request is in exactly one of four sets: the decode pool; the skipped decodes, which were left out of the last
step or advance individually because of drafts; the partial prefills; or, under pipeline parallelism, the requests in
flight, which are part of a step that has not completed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, Protocol, cast

from vajra_py.contract import PriorityKey, ReplicaLimits, RequestView
from vajra_py.runtime.kv import KvMemory
from vajra_py.runtime.queues import RequestQueue
from vajra_py.runtime.queues.keys import SlackReader
from vajra_py.runtime.queues.shared import SharedAccess
from vajra_py.runtime.requests.adapters import Adapters
from vajra_py.runtime.requests.decode_pool import DecodePool, by_admission
from vajra_py.runtime.requests.request import Request


class PoolChanges(NamedTuple):
    """Requests that joined and requests that left a replica's decode pool since the replica's last plan. A request that
    left and joined again is in both lists.
    """

    joined: Sequence[Request]
    left: Sequence[Request]


NO_CHANGES = PoolChanges((), ())


class Unverified(NamedTuple):
    """Drafts of a request's last step, which has ended although it is not known yet which drafts are accepted."""

    num_drafts: int
    is_padding: bool = False
    """True if the drafts are only padding."""


class OffersWaiting(Protocol):
    """Connector that determines which waiting requests may be admitted."""

    def offered(
        self, in_order: Iterator[RequestView], urgency: Callable[[RequestView], PriorityKey], now: float
    ) -> Iterator[RequestView]:
        """Iterate over the waiting requests that may be admitted: first those that hold blocks, then the others, most
        urgent first.
        """

    def holds(self, request: RequestView) -> bool:
        """Return True if a waiting request holds blocks; such requests may run even if no new request is admitted."""

    @property
    def num_holding(self) -> int:
        """Number of waiting requests that hold blocks."""


class RunningSet:
    """The requests of one replica, grouped by state."""

    def __init__(self, limits: ReplicaLimits, memory: KvMemory, queue: RequestQueue, shared: SharedAccess) -> None:
        self.limits = limits
        self.memory = memory
        self.queue = queue
        self.shared = shared
        self.pool = DecodePool(limits.block_size)
        self.skipped: dict[Request, None] = {}
        """Decodes outside the pool: left out of the last step, or advancing individually because of drafts."""
        self.partial: dict[Request, None] = {}
        self.in_flight: dict[Request, None] = {}
        self.arrived: dict[Request, None] = {}
        """Waiting requests that arrived with their KV, or whose prefix was loaded. They hold blocks and are offered
        before other requests, which might otherwise wait for these blocks.
        """
        self.loading: dict[Request, None] = {}
        """Waiting requests whose KV is being transferred or loaded; they hold blocks and are not offered."""
        self.connected: OffersWaiting | None = None
        """Connector to KV outside the replica; None if there is none."""
        self.adapters: Adapters | None = None
        """LoRA adapters of the replica; None if it has none."""
        self.num_running = 0
        """Number of running requests; waiting requests that hold KV blocks are not counted."""
        self.num_admissions = 0
        self.num_preemptions = 0
        self.has_spare_blocks = False
        """True if some request may hold more blocks than its known tokens need."""
        self.admits = True
        """True if waiting requests may be admitted."""
        self.bars_preempted = False
        """True if a request that a step preempts may be admitted again only by a later step."""
        self.unverified: dict[Request, Unverified] = {}
        """Requests that got a token in a step with drafts, as long as it is unknown which drafts are accepted."""
        self.barred: set[Request] = set()
        """Requests preempted in this step, which must not be admitted again in it."""

    def lets_in(self, request: RequestView) -> bool:
        """Return True if this waiting request may be admitted now, provided that memory suffices."""
        lets_in = self.admits or (self.connected is not None and self.connected.holds(request))
        return lets_in and request not in self.barred

    @property
    def may_admit(self) -> bool:
        """True if at least one waiting request may be admitted."""
        return bool(self.num_waiting and self.admits) or (self.connected is not None and self.connected.num_holding > 0)

    @property
    def num_waiting(self) -> int:
        """Number of requests in the replica's own queue and in the shared queue."""
        return self.queue.num_requests + self.shared.queue.num_requests

    def admit(self, request: Request) -> None:
        """Add a request that got KV blocks, as a partial prefill and the latest admission."""
        self.num_running += 1
        self.num_admissions += 1
        request.admitted_index = self.num_admissions
        self.partial[request] = None

    def decodes(self) -> Sequence[Request]:
        """Return the pool members and skipped decodes in order of admission."""
        if not self.skipped:
            return self.pool.in_admission_order()
        return sorted([*self.pool, *self.skipped], key=by_admission)

    def read_keys_again(self) -> None:
        """Cause the next query to re-read keys that may change at any event."""
        self.queue.begin_step()
        self.shared.begin_step()

    def running(self) -> Sequence[Request]:
        """Return the requests that are resident and not in flight, in order of admission."""
        if not self.partial:
            return self.decodes()
        return sorted([*self.pool, *self.skipped, *self.partial], key=by_admission)

    def materialize(self) -> None:
        """Move the blocks reserved for decodes into the decodes' block tables."""
        if self.memory.has_reserved:
            for request in self.pool:
                self.memory.materialize(request, request.num_computed_tokens)

    def _leave_pool(self, request: Request) -> int:
        if self.memory.has_reserved:
            self.memory.materialize(request, request.num_computed_tokens)
        return self.pool.leave(request)

    def skip(self, request: Request) -> None:
        """Leave a decode of the pool out of this step."""
        request.end_epoch = self._leave_pool(request)
        request.is_skipped = True
        self.skipped[request] = None

    def decode_alone(self, request: Request, num_steps_to_end: int) -> None:
        """Let a request decode individually, outside the pool, now that its prompt has been computed.
        `num_steps_to_end`: number of tokens until its end.
        """
        del self.partial[request]
        request.end_epoch = num_steps_to_end
        request.is_skipped = True
        self.skipped[request] = None

    def unskip(self, request: Request) -> None:
        """Put a skipped decode back into the pool."""
        del self.skipped[request]
        request.is_skipped = False
        self.pool.join(request, request.end_epoch)

    def log_pool(self, *, on: bool) -> None:
        """Start or stop tracking which requests join and leave the decode pool, for `take_pool_changes`."""
        self.pool.joined = dict(self.pool.members) if on else None

    def take_pool_changes(self) -> PoolChanges:
        """Return the requests that joined and the requests that left the pool since the last call."""
        pool = self.pool
        if not (pool.joined or pool.left):
            return NO_CHANGES
        changes = PoolChanges(tuple(pool.joined or ()), tuple(pool.left))
        pool.joined, pool.left = {}, []
        return changes

    def clear(self) -> None:
        """Remove all requests."""
        old, self.pool = self.pool, DecodePool(self.limits.block_size)
        if old.joined is not None:
            self.pool.joined = {}
            self.pool.left = [*old.left, *(one for one in old.members if one not in old.joined)]
        self.skipped.clear()
        self.partial.clear()
        self.in_flight.clear()
        self.arrived.clear()
        self.loading.clear()
        self.num_running = 0
        self.has_spare_blocks = False
        self.unverified.clear()
        self.barred.clear()
        if self.adapters is not None:
            self.adapters.clear()

    def check(self) -> None:
        """Raise `RuntimeError` unless the sets together have as many requests as are running."""
        held = len(self.pool) + len(self.skipped) + len(self.partial) + len(self.in_flight)
        if held != self.num_running:
            raise RuntimeError(f"{self.num_running} requests run, and {held} are in the sets of those that do")

    def drop(self, request: Request) -> None:
        """Remove a resident request from the set that holds it."""
        self.num_running -= 1
        if request in self.pool.members:
            self._leave_pool(request)
        elif request.is_skipped:
            del self.skipped[request]
            request.is_skipped = False
        elif request.in_flight:
            del self.in_flight[request]
            request.in_flight = False
        else:
            del self.partial[request]

    def compute_again(self, request: Request, num_valid_tokens: int) -> None:
        """Make a running request recompute all tokens after its first `num_valid_tokens`, as if they were prompt
        tokens.
        """
        if request in self.pool.members:
            self._leave_pool(request)
        elif request.is_skipped:
            del self.skipped[request]
            request.is_skipped = False
        else:
            del self.partial[request]
        request.set_computed(num_valid_tokens)
        self.partial[request] = None

    def take_back_token(self, request: Request) -> None:
        """Remove a token that was counted for a member in the pool's last step although it was never produced; the
        member becomes a partial prefill.
        """
        if request in self.pool.members:
            self._leave_pool(request)
            self.partial[request] = None
            request.take_back_output()


class StateView:
    """`LocalReplicaView` of the running set, for a replica scheduler that forms a step."""

    __slots__ = ("_running_set", "limits", "now", "replica_id", "slack")

    def __init__(self, replica_id: int, running_set: RunningSet) -> None:
        self.replica_id = replica_id
        self.limits = running_set.limits
        self._running_set = running_set
        self.now = 0.0
        """Time at which the step is formed, seconds."""
        self.slack: SlackReader | None = None
        """Reader of the slack that the present prioritizer predicts; None if this prioritizer predicts no slack."""

    @property
    def free_blocks(self) -> int:
        """Number of free KV blocks, including idle cached ones."""
        return self._running_set.memory.free_blocks

    @property
    def num_running(self) -> int:
        """Number of running requests; waiting requests that hold KV blocks are not counted."""
        return self._running_set.num_running

    @property
    def num_decodes(self) -> int:
        """Number of decodes that are not in flight."""
        return len(self._running_set.pool) + len(self._running_set.skipped)

    @property
    def num_partial_prefills(self) -> int:
        """Number of partial prefills that are not in flight."""
        return len(self._running_set.partial)

    @property
    def num_waiting(self) -> int:
        """Number of requests in the replica's own queue and in the shared queue."""
        running_set = self._running_set
        return running_set.queue.num_requests + running_set.shared.queue.num_requests

    @property
    def loaded_adapters(self) -> Sequence[str]:
        """Names of the adapters that slots hold, the least recently used first."""
        adapters = self._running_set.adapters
        return () if adapters is None else adapters.loaded()

    @property
    def num_adapter_slots(self) -> int:
        """Number of slots that are free or hold an idle adapter."""
        adapters = self._running_set.adapters
        return 0 if adapters is None else adapters.num_available()

    def adapter_blocks(self, name: str) -> int:
        """Return the size of an adapter in KV blocks."""
        adapters = self._running_set.adapters
        return 0 if adapters is None else adapters.num_blocks.get(name, 0)

    def running(self) -> Sequence[RequestView]:
        """Return the running requests in order of admission."""
        return self._running_set.running()

    def decodes(self) -> Sequence[RequestView]:
        """Return the decodes in order of admission."""
        return self._running_set.decodes()

    def partial_prefills(self) -> Sequence[RequestView]:
        """Return the partial prefills, most urgent first."""
        partial = self._running_set.partial
        if len(partial) < 2:
            return list(partial)
        return sorted(partial, key=self.urgency)

    def waiting(self) -> Iterator[RequestView]:
        """Iterate over the waiting requests, in the replica's own queue and in the shared queue, that may be admitted:
        first those that hold blocks, then the others, most urgent first.
        """
        running_set = self._running_set
        if running_set.connected is not None:
            others = self._in_order() if running_set.admits else iter(())
            order = running_set.connected.offered(others, self.urgency, self.now)
        else:
            order = self._with_kv_first() if running_set.arrived or running_set.loading else self._in_order()
        if running_set.adapters is not None:
            order = filter(running_set.adapters.fits, order)
        if running_set.barred or not running_set.admits:
            is_closed = not running_set.admits and running_set.connected is None
            return filter(running_set.lets_in, () if is_closed else order)
        return order

    def _with_kv_first(self) -> Iterator[RequestView]:
        running_set = self._running_set
        arrived, loading = running_set.arrived, running_set.loading
        first = sorted(arrived, key=self.urgency) if len(arrived) > 1 else list(arrived)
        if running_set.num_waiting == len(arrived) + len(loading):
            return iter(first)
        return chain(first, (one for one in self._in_order() if one not in arrived and one not in loading))

    def _in_order(self) -> Iterator[RequestView]:
        running_set, now = self._running_set, self.now
        if not running_set.shared.queue.num_requests:
            return running_set.queue.ordered(now) if running_set.queue.num_requests else iter(())
        pulled = running_set.shared.pulled(now)
        if not running_set.queue.num_requests:
            return pulled
        return self._merged(running_set.queue.ordered(now), pulled)

    def _merged(self, own: Iterator[RequestView], pulled: Iterator[RequestView]) -> Iterator[RequestView]:
        left, right = next(own, None), next(pulled, None)
        while left is not None or right is not None:
            if right is None or (left is not None and self.urgency(left) < self.urgency(right)):
                if left in self._running_set.queue:
                    yield cast(RequestView, left)
                left = next(own, None)
            else:
                if right in self._running_set.shared:
                    yield right
                right = next(pulled, None)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of KV blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.limits.block_size)

    def urgency(self, request: RequestView) -> PriorityKey:
        """Return the request's present key in the total order: the prioritizer's key, arrival and index."""
        return self._running_set.queue.urgency(request, self.now)

    def slack_s(self, request: RequestView) -> float | None:
        """Return the request's present slack in seconds; None if the prioritizer predicts no slack."""
        return None if self.slack is None else self.slack.slack_s(request, self.now)

    def slack_fraction(self, request: RequestView) -> float | None:
        """Return the request's present slack as a fraction of the time from its arrival to its deadline; None if the
        prioritizer predicts no slack.
        """
        return None if self.slack is None else self.slack.slack_fraction(request, self.now)
