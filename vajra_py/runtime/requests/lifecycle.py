"""Transitions of a request on its replica: admission, preemption, first token, end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from msgspec import Struct

from vajra_py.contract import PreemptionMode
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.runtime.requests.listeners import NOBODY
from vajra_py.runtime.requests.pinning import Pinning
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.requests.running_set import RunningSet
from vajra_py.runtime.support.clock import to_seconds

# Module constants, because in Python 3.11 the lookup of an enum member costs more than a function call; these members
# are needed for every request.
_WAITING, _RUNNING, _ENDED = RequestState.WAITING, RequestState.RUNNING, RequestState.ENDED
_HELD, _REMOTE, _ARRIVED, _LOADED = RequestState.HELD, RequestState.REMOTE, RequestState.ARRIVED, RequestState.LOADED

PinSeconds: TypeAlias = Callable[[Request, float], float]
"""Function of (request, now in seconds) that returns the seconds for which to pin the request's content; 0: no pin."""
MOVED = "moved"
"""Kind of the first chunk of a request that arrived on its replica with its KV."""
_KINDS = {RequestState.WAITING: "admitted", RequestState.ARRIVED: MOVED}
"""Kind of a request's first chunk after its admission, by the request's state before the admission. For other states,
the kind is "resumed", or "admitted" if KV was loaded before the first admission.
"""


class Held(Struct, frozen=True, eq=False):
    """KV that stays on a replica when its request leaves."""

    num_tokens: int
    """Number of tokens whose KV is on this replica; the request may have computed more tokens on another replica."""


class KeepsEnded(Protocol):
    """Connector that may need the blocks of requests after the requests have ended."""

    def keeps(self, request: Request) -> bool:
        """Return True if a request that ends now keeps its blocks until `Lifecycle.release_kept` is called."""

    def give_up(self, request: Request) -> None:
        """Note that the KV that was loaded for a waiting request is dropped because no request can run."""

    def clear(self) -> None:
        """Drop all state, because the replica has lost its memory."""


class Lifecycle:
    """The only writer of request states on a replica that is up; updates running set, memory and queues together, and
    notifies observers and policies.
    """

    def __init__(
        self, replica_id: int, running_set: RunningSet, replicaset: str = "", pins: PinSeconds | None = None
    ) -> None:
        """Create the lifecycle. `pins`: function of the retention policy that returns how long an ended request's
        content is pinned; None: nothing is pinned.
        """
        self.replica_id = replica_id
        self.pinning = Pinning(replicaset, replica_id, running_set.memory)
        self._pins = pins
        self._running_set = running_set
        self.observers: Sequence[Observer] = ()
        self.listeners = NOBODY
        self.held: dict[Request, Held] = {}
        """Requests that have left the running set and whose KV stays on this replica until another replica has it."""
        self.on_memory_taken: Callable[[Request], None] | None = None
        """Called when a running request is preempted, before its blocks are freed."""
        self.connected: KeepsEnded | None = None
        """Connector to KV outside the replica; None if there is none."""
        self.holding: list[Request] = []
        """Ended requests that still hold their blocks, because an asynchronous scheduler has not processed their ends
        yet.
        """
        self.keeps_as_cached = False
        """True if freeing a request's blocks adds none of them to the prefix cache: only blocks that were cached when
        steps were formed stay cached, not blocks that accepted drafts filled later.
        """

    def _num_valid(self, request: Request) -> int | None:
        """Return the number of leading tokens whose blocks are cached when this request's blocks are freed; None: only
        blocks that are already cached stay cached.
        """
        return None if self.keeps_as_cached else request.num_computed_tokens

    def admitted(self, request: Request, num_done_tokens: int, now: float) -> str:
        """Record that a waiting request was admitted; return the kind of its first chunk."""
        running_set = self._running_set
        kind = _KINDS.get(request.state, "resumed")
        if request in running_set.queue:
            running_set.queue.remove(request)
        else:
            running_set.shared.take(request)
            request.replica_id = self.replica_id
        if kind is MOVED:
            del running_set.arrived[request]
        elif request.state is _LOADED:
            del running_set.arrived[request]
            kind = "admitted" if request.admitted_at is None else kind
        request.move_to(_RUNNING)
        running_set.admit(request)
        if running_set.adapters is not None:
            running_set.adapters.acquire(request)
        if request.admitted_at is None:
            request.admitted_at = now
            request.num_cached_tokens = num_done_tokens
        for observer in self.observers:
            observer.on_admitted(request, self.replica_id, now)
        for notify in self.listeners.admissions:
            notify(request, self.replica_id, now)
        if running_set.queue.is_volatile:
            running_set.read_keys_again()
        return kind

    def preempt(self, request: Request, mode: PreemptionMode, now: float) -> int:
        """Free a running request's device memory and make the request wait again; return the number of blocks that move
        to the host.
        """
        running_set, memory = self._running_set, self._running_set.memory
        if self.on_memory_taken is not None:
            self.on_memory_taken(request)
        running_set.drop(request)
        if self._running_set.adapters is not None:
            self._running_set.adapters.release(request)
        num_moved = 0
        if mode is PreemptionMode.SWAP:
            moved = memory.swap_out(request, request.num_computed_tokens)
            if moved is None:
                raise RuntimeError(f"request {request.request_id}: host memory was checked and is full")
            num_moved = moved
            request.move_to(RequestState.SWAPPED)
        else:
            memory.free(request, self._num_valid(request))
            request.set_computed(0)
            request.move_to(RequestState.PREEMPTED)
        request.num_preemptions += 1
        self._wait_again(request, now)
        for observer in self.observers:
            observer.on_preempted(request, mode.value, now)
        self._notify_preempted(request, now)
        return num_moved

    def give_up_kv(self, request: Request, now: float) -> None:
        """Free a waiting request's KV, which arrived with the request or was loaded for it, so that other requests can
        run; this replica will recompute the KV.
        """
        running_set = self._running_set
        if running_set.memory.tiers is not None:
            running_set.memory.tiers.give_up(request)
        if self.connected is not None:
            self.connected.give_up(request)
        del running_set.arrived[request]
        running_set.queue.remove(request)
        running_set.memory.free(request, self._num_valid(request))
        request.set_computed(0)
        request.move_to(RequestState.PREEMPTED)
        request.num_preemptions += 1
        self._wait_again(request, now)
        for observer in self.observers:
            observer.on_preempted(request, PreemptionMode.RECOMPUTE.value, now)
        self._notify_preempted(request, now)

    def lose_memory(self, request: Request, now: float) -> None:
        """Make a running request whose KV is invalid wait again with no computed tokens. Policies are notified of a
        preemption, but `Request.num_preemptions` does not count it.
        """
        running_set = self._running_set
        running_set.drop(request)
        if self._running_set.adapters is not None:
            self._running_set.adapters.release(request)
        running_set.memory.free(request, self._num_valid(request))
        request.set_computed(0)
        request.move_to(RequestState.PREEMPTED)
        self._wait_again(request, now)
        self._notify_preempted(request, now)

    def _wait_again(self, request: Request, now: float) -> None:
        running_set = self._running_set
        running_set.num_preemptions += 1
        request.preempted_index = running_set.num_preemptions
        if running_set.bars_preempted:
            running_set.barred.add(request)
        running_set.queue.add(request, now)

    def _notify_preempted(self, request: Request, now: float) -> None:
        for notify in self.listeners.preemptions:
            notify(request, self.replica_id, now)
        if self._running_set.queue.is_volatile:
            self._running_set.read_keys_again()

    def verified(self, request: Request, num_drafts: int, num_accepted: int, now: int) -> None:
        """Count the drafts that were verified by the step that produced the request's newest token, and those of them
        that became output. The request may have been preempted since that step.
        """
        if request.state is _RUNNING:
            request.add_verified(num_drafts, num_accepted, now)
            memory, num_computed = self._running_set.memory, request.num_known_tokens - 1
            if (
                request.hashes is not None and num_computed % memory.block_size <= num_accepted
            ):  # accepted drafts may have filled a block
                memory.cache_blocks(request, num_computed)
            return
        queue = self._running_set.queue
        queue.remove(request)
        request.add_verified(num_drafts, num_accepted, now)
        queue.add(request, to_seconds(now))

    def first_token(self, request: Request, now: int) -> None:
        """Record that the request's first token is sent to its client."""
        request.first_token_at = seconds = to_seconds(now)
        for observer in self.observers:
            observer.on_first_token(request, seconds)

    def finish(
        self, request: Request, reason: EndReason, now: float, detail: str = "", *, keeps_blocks: bool = False
    ) -> None:
        """End a resident request and free its memory; its cached blocks can still be hit.

        With `keeps_blocks`, the memory is freed only by `release_ended`; if a connector keeps the blocks, only by
        `release_kept`.
        """
        self._running_set.drop(request)
        if self._running_set.adapters is not None:
            self._running_set.adapters.release(request)
        if self.connected is None or not self.connected.keeps(request):
            if keeps_blocks:
                self.holding.append(request)
            else:
                self._release_ended(request)
        self._notify_end(request, reason, detail, now)

    def release_ended(self) -> None:
        """Free the blocks of the ended requests in `holding`."""
        for request in self.holding:
            self._release_ended(request)
        self.holding.clear()

    def _release_ended(self, request: Request) -> None:
        memory = self._running_set.memory
        memory.free(request, self._num_valid(request), for_good=True)
        if self._pins is not None:
            self._pin_ended(request, self._pins)
        memory.forget(request)

    def release_kept(self, request: Request) -> None:
        """Free the blocks of an ended request that a connector has kept."""
        memory = self._running_set.memory
        memory.free(request, self._num_valid(request), for_good=True)
        memory.forget(request)

    def _pin_ended(self, request: Request, pins: PinSeconds) -> None:
        now = self._running_set.memory.now()
        seconds = pins(request, now)
        if seconds > 0:
            self.pinning.pin(request, seconds, now)

    # Requests that leave, return or arrive with their KV

    def hold(self, request: Request) -> None:
        """Remove a running request from the running set; its blocks stay until another replica has its KV."""
        self._running_set.drop(request)
        if self._running_set.adapters is not None:
            self._running_set.adapters.release(request)
        request.move_to(_HELD)
        self.held[request] = Held(request.num_computed_tokens)

    def release_held(self, request: Request) -> None:
        """Free the blocks of a held request that has ended or whose KV another replica has; its cached blocks can still
        be hit.
        """
        num_tokens = min(self.held.pop(request).num_tokens, request.num_computed_tokens)
        self._running_set.memory.free(request, num_tokens, for_good=True)
        self._running_set.memory.forget(request)

    def register(self, request: Request, now: float) -> None:
        """Register a request that was bound to this replica; blocks that this replica still holds for it from an
        earlier stay are freed first.
        """
        if request in self.held:
            self.release_held(request)
            for observer in self.observers:
                observer.on_kv_released(request, self.replica_id, now)
        self._running_set.memory.register(request, request.hashes)

    def resume_held(self, request: Request) -> None:
        """Resume a held request on this replica."""
        del self.held[request]
        request.move_to(_RUNNING)
        self._running_set.admit(request)

    def can_resume(self, request: Request) -> bool:
        """Acquire the adapter of a resumed request, if it has one, and return True. Return False if the adapter is no
        longer loaded, because another adapter has taken its slot.
        """
        adapters = self._running_set.adapters
        if adapters is None:
            return True
        if adapters.has_for(request):
            adapters.acquire(request)
            return True
        return False

    def wait_with_kv(self, request: Request, now: float) -> None:
        """Make a resumed request wait for its adapter while it keeps its KV, like a request that came from another
        replica.
        """
        self._running_set.drop(request)
        request.move_to(_HELD)
        self.arrived(request, now)

    def reserve(self, request: Request, num_tokens: int, now: float) -> int | None:
        """Reserve blocks for a request that will arrive with the KV of its first `num_tokens` tokens.

        Returns the number of these tokens that this replica's prefix cache holds; returns None and does not register
        the request if blocks are lacking. If no request runs, pins are ended to free blocks.
        """
        memory = self._running_set.memory
        self.register(request, now)
        hit = memory.allocate(request, num_tokens)
        while hit is None and not self._running_set.num_running and self.pinning.release_one(memory.now()):
            hit = memory.allocate(request, num_tokens)
        if hit is None:
            memory.forget(request)
            return None
        if num_tokens > request.num_known_tokens:
            self._running_set.has_spare_blocks = True
        return min(hit, num_tokens)

    def unreserve(self, request: Request) -> None:
        """Release the blocks reserved for a request that will not arrive."""
        self._running_set.memory.free(request, 0, for_good=True)
        self._running_set.memory.forget(request)

    def arrived(self, request: Request, now: float) -> None:
        """Record that the KV of a request with reserved blocks has arrived; the request waits to run."""
        is_queued = request.state is _REMOTE
        request.move_to(_ARRIVED)
        request.replica_id = self.replica_id
        if request.hashes is not None:
            self._running_set.memory.cache_blocks(request, request.num_computed_tokens)
        self._running_set.arrived[request] = None
        if is_queued:
            del self._running_set.loading[request]
            self._running_set.queue.touch(request)
        else:
            self._running_set.queue.add(request, now)

    def expect(self, request: Request, now: float) -> None:
        """Queue a request whose KV is on another replica; the KV is transferred when the request is admitted."""
        request.move_to(_REMOTE)
        request.replica_id = self.replica_id
        self.register(request, now)
        self._running_set.queue.add(request, now)

    def expect_no_more(self, request: Request) -> None:
        """Undo `expect`, and free the blocks that were reserved for the request."""
        self._running_set.queue.remove(request)
        if request in self._running_set.loading:
            del self._running_set.loading[request]
            self._running_set.memory.free(request, 0, for_good=True)
        self._running_set.memory.forget(request)
        request.move_to(_HELD)

    # Requests whose KV comes from a lower tier, from swap space or through a connector

    def bind(self, request: Request, now: float) -> None:
        """Move a request from the shared queue to this replica's queue, unless it is there already. The replica's
        memory must have registered the request.
        """
        running_set = self._running_set
        if request not in running_set.queue:
            running_set.shared.take(request)
            request.replica_id = self.replica_id
            running_set.queue.add(request, now)

    def load(self, request: Request, now: float) -> None:
        """Record that KV is being loaded (from a lower tier, from swap space or through a connector) to blocks of a
        waiting request.
        """
        self.bind(request, now)
        request.move_to(RequestState.LOADING)
        self._running_set.loading[request] = None
        self._running_set.queue.touch(request)

    def loaded(self, request: Request, num_tokens: int, now: float) -> None:
        """Record that the load of a request's KV is complete; the request waits to run."""
        running_set = self._running_set
        running_set.queue.remove(request)
        request.set_computed(min(num_tokens, request.num_known_tokens - 1))
        request.move_to(_LOADED)
        if request.hashes is not None:
            running_set.memory.cache_blocks(request, num_tokens)
        del running_set.loading[request]
        running_set.arrived[request] = None
        running_set.queue.add(request, now)

    def load_again(self, request: Request, now: float) -> None:
        """Undo a load that loaded no tokens: the request waits as before, without blocks."""
        running_set = self._running_set
        running_set.queue.remove(request)
        running_set.memory.free(request, 0)
        request.move_to(RequestState.PREEMPTED if request.num_preemptions else _WAITING)
        del running_set.loading[request]
        running_set.queue.add(request, now)

    # Ends

    def requeue(self, request: Request) -> None:
        """Detach a running, waiting or held request from this replica, which has lost its memory or has freed the
        request's blocks; the request then has no computed tokens.
        """
        running_set = self._running_set
        if request in running_set.queue:
            running_set.queue.remove(request)
        elif request.state is _RUNNING:
            running_set.drop(request)
            if self._running_set.adapters is not None:
                self._running_set.adapters.release(request)
        if request.state is not _WAITING:
            request.set_computed(0)
            if request.state is not RequestState.PREEMPTED:
                request.move_to(RequestState.PREEMPTED)
        request.replica_id = request.stays_at = -1
        request.preempted_index = 0

    def end_waiting(self, request: Request, reason: EndReason, now: float, detail: str = "") -> None:
        """End a request that waits in this replica's own queue."""
        running_set = self._running_set
        running_set.queue.remove(request)
        if request.state is RequestState.SWAPPED:
            running_set.memory.drop_swapped(request)
        is_kept = self.connected is not None and self.connected.keeps(request)
        if request in running_set.arrived:
            del running_set.arrived[request]
            if not is_kept:
                running_set.memory.free(request, self._num_valid(request), for_good=True)
        elif request in running_set.loading:
            del running_set.loading[request]
            if not is_kept:
                running_set.memory.free(request, 0, for_good=True)
        if is_kept:
            self._notify_end(request, reason, detail, now)
        else:
            self._end(request, reason, detail, now)

    def end_held(self, request: Request, reason: EndReason, now: float, detail: str = "") -> None:
        """End a request that was moving to another replica."""
        self._notify_end(request, reason, detail, now)

    def drop(self, request: Request, detail: str, now: float) -> None:
        """End a request that waits in the replica's own queue or in the shared queue, because a scheduler dropped it."""
        running_set = self._running_set
        if request not in running_set.queue:
            running_set.shared.take(request)
            request.replica_id = self.replica_id
            self._end(request, EndReason.REJECTED, detail, now)
        else:
            self.end_waiting(request, EndReason.REJECTED, now, detail)

    def _end(self, request: Request, reason: EndReason, detail: str, now: float) -> None:
        self._running_set.memory.forget(request)
        self._notify_end(request, reason, detail, now)

    def _notify_end(self, request: Request, reason: EndReason, detail: str, now: float) -> None:
        end_request(request, reason, detail, now)
        for observer in self.observers:
            observer.on_ended(request, reason, detail, now)


def end_request(request: Request, reason: EndReason, detail: str, now: float) -> None:
    """Move a request to the state ENDED, and set the fields that describe its end."""
    request.move_to(_ENDED)
    request.end_reason = reason
    request.detail = detail
    request.ended_at = now
