"""Moves of requests between replicas: waiting requests move immediately, running ones by live migration in stages.

A running request continues to compute while full blocks of its KV are copied; it is stopped only for the last stage,
when few blocks are left. The source keeps all KV until the request has arrived, so a cancelled migration leaves the
source as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from numbers import Integral
from typing import Generic

from msgspec import Struct

from vajra_py.config.hand_off import MigrationConfig
from vajra_py.contract import Move
from vajra_py.errors import PolicyError
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.serving.backend import R
from vajra_py.runtime.serving.hand_off import TARGET_FULL, HandOffs
from vajra_py.runtime.serving.replicaset import Replicaset
from vajra_py.runtime.serving.services import DriverServices
from vajra_py.runtime.serving.transfers import KV_LOST, PREEMPTED, REQUEST_ENDED, Transfers
from vajra_py.runtime.support.clock import to_seconds

_GOES_THERE = "it goes there when its prompt is computed"
_TARGET_DRAINS = "its target takes no more requests"
_HANDED_OFF = "it is handed off"
_MOVABLE_WAITING = (RequestState.WAITING, RequestState.PREEMPTED)


class Migration(Struct, Generic[R], eq=False):
    """One running request whose KV is copied while it continues to compute."""

    request: Request
    source: R
    target: R
    admitted_index: int
    """Admission number at the source when the migration began; another number means that the request was preempted
    meanwhile.
    """
    num_copied: int = 0
    """Number of leading tokens whose KV is at the target or being sent to it."""
    num_copies: int = 0
    has_reserved: bool = False

    @property
    def is_current(self) -> bool:
        """True if the request still runs at the source and was not admitted again meanwhile."""
        return self.request.state is RequestState.RUNNING and self.request.admitted_index == self.admitted_index


class Migrations(Generic[R]):
    """Moves of the requests of one replicaset."""

    def __init__(
        self,
        replicaset: Replicaset,
        rules: MigrationConfig,
        transfers: Transfers[R],
        hand_offs: HandOffs[R],
        driver: DriverServices[R],
    ) -> None:
        self._replicaset = replicaset
        self._transfers = transfers
        self._hand_offs = hand_offs
        self._driver = driver
        self._rules = rules
        self._of: dict[Request, Migration[R]] = {}
        self._num_at: Counter[int] = Counter()
        """Number of migrations in which each replica takes part, as source or target."""
        self.on_slot_free: Callable[[], None] | None = None
        """Callback, called when a migration begins its last stage or is cancelled, so that source and target may take
        part in other migrations.
        """

    # Moves

    def move(self, move: Move) -> None:
        """Execute one move of the replicaset scheduler. Raises `PolicyError` if the move is invalid."""
        request = move.request
        if not isinstance(request, Request) or request.replicaset != self._replicaset.name:
            raise PolicyError(
                self._replicaset.scheduler_name, f"moves what is no request of its replicaset ({request!r})"
            )
        if request.state is RequestState.ENDED:
            raise self._wrong(request, "moves a request that has ended")
        target: int | None = None
        if move.target is not None:
            target = self._checked_target(request, move.target)
        elif not self._replicaset.bounds.holders(request).of_prompts:
            num_tokens = request.num_known_tokens
            raise self._wrong(
                request, f"calls back a request whose {num_tokens} tokens fit on no replica that computes prompts"
            )
        if request.state is not RequestState.RUNNING:
            self._end(request, PREEMPTED)  # end a migration that began while the request was running
        if request.state in _MOVABLE_WAITING and request not in self._replicaset.held_back:
            self._move_waiting(request, target, move.reason)
        elif request.state is RequestState.RUNNING and target is not None:
            self.begin(request, target, move.reason)
        elif target is None and request not in self._replicaset.held_back:
            raise self._wrong(request, f"calls back a request that does not wait ({request.state.value})")

    def _wrong(self, request: Request, message: str) -> PolicyError:
        return PolicyError(self._replicaset.scheduler_name, message, request_id=request.request_id)

    def _checked_target(self, request: Request, target: object) -> int:
        """Return the target of a move as an `int`. Raises `PolicyError` unless it is another replica that is up and can
        run the request.
        """
        holders = self._replicaset.bounds.holders(request)
        is_decode = request.state is RequestState.RUNNING and request.num_output_tokens > 0
        candidates = holders.of_decodes if is_decode else holders.all
        up = [one.replica_id for one in candidates if self._replicaset.is_up(one.replica_id)]
        if not isinstance(target, Integral) or int(target) not in up:
            raise self._wrong(
                request, f"moves a request to replica {target!r}. Replicas that are up and can run it: {up}"
            )
        if target == request.replica_id:
            raise self._wrong(request, f"moves a request to replica {target!r}, where it is")
        return int(target)

    def _move_waiting(self, request: Request, target: int | None, reason: str) -> None:
        replicaset, now = self._replicaset, to_seconds(self._driver.now)
        source_id = None
        self._hand_offs.recall_prompt(request)
        if request in replicaset.shared:
            if target is None:
                return
            replicaset.shared.remove(request)
        else:
            source_id = request.replica_id
            self._driver.touch(self._driver.replica(replicaset.name, source_id))
            replicaset.unbind(request)
        for observer in replicaset.observers:
            observer.on_moved(request, source_id, target, reason, now)
            observer.on_assigned(request, target, now)
        self._driver.announce(request, replicaset.bind(request, target, now))

    def is_moving(self, request: Request) -> bool:
        """Return True if a request's KV is being copied while the request continues to compute."""
        return request in self._of

    def has_slot(self, replica_id: int) -> bool:
        """Return True if a replica may take part in one more migration."""
        return self._num_at[replica_id] < self._rules.max_per_replica

    def begin(self, request: Request, target_id: int, reason: str) -> None:
        """Begin to copy a running request's KV to another replica, if source and target can take part in one more
        migration.
        """
        source = self._driver.replica(self._replicaset.name, request.replica_id)
        if not source.replica.migrates:
            return
        if request in self._of or not (self.has_slot(source.replica.replica_id) and self.has_slot(target_id)):
            return  # no error: the caller may call again later
        if self._hand_offs.is_being_sent(request):
            return  # KV of its prompt is being sent ahead to the target of its hand-off
        target = self._driver.replica(self._replicaset.name, target_id)
        one = Migration(request, source, target, request.admitted_index)
        self._of[request] = one
        self._num_at[source.replica.replica_id] += 1
        self._num_at[target_id] += 1
        now = to_seconds(self._driver.now)
        for observer in self._replicaset.observers:
            observer.on_migration_begun(request, source.replica.replica_id, target_id, reason, now)
        self._next_stage(one)

    # Stages

    def _next_stage(self, one: Migration[R]) -> None:
        self._driver.touch(one.source)
        if not one.is_current:
            self._call_off(one, PREEMPTED)
            return
        size = one.source.replica.memory.block_size
        num_full = one.request.num_computed_tokens // size * size
        if one.source.replica.num_in_flight:
            num_full = max(0, num_full - size)  # a step in flight may still write the last of these blocks
        one.num_copies += 1
        num_left = (num_full - one.num_copied) // size
        if one.num_copies >= self._rules.max_stages or num_left <= self._rules.last_stage_max_blocks:
            self._transfers.between_steps(one.source, -1, lambda: self._last_stage(one))
            return
        if (why := self._reserve(one, num_full)) is not None:
            self._call_off(one, why)
            return
        start, one.num_copied = one.num_copied, max(one.num_copied, num_full)
        ends = (one.source, one.target)
        lacking = start, one.num_copied
        self._transfers.start(one, ends, lacking, one.num_copied - start, self._next_stage)

    def _reserve(self, one: Migration[R], num_tokens: int) -> str | None:
        """Reserve blocks at the target for `num_tokens` leading tokens; return the reason if that is impossible, else
        None.
        """
        self._driver.touch(one.target)
        replica = one.target.replica
        if one.has_reserved:
            return None if replica.memory.grow(one.request, num_tokens) else TARGET_FULL
        if num_tokens < 1:
            return None
        if self._hand_offs.is_to_go_to(one.request, replica.replica_id):
            return _GOES_THERE
        hit = replica.lifecycle.reserve(one.request, num_tokens, to_seconds(self._driver.now))
        if hit is None:
            return TARGET_FULL
        one.has_reserved, one.num_copied = True, max(one.num_copied, hit)
        return None

    def _last_stage(self, one: Migration[R]) -> None:
        """Stop the request, whose source is between two steps, and send the rest of the request's KV."""
        if self._of.get(one.request) is not one:
            return
        request = one.request
        if not one.is_current:
            self._call_off(one, PREEMPTED)
            return
        if (why := self._reserve(one, request.num_computed_tokens)) is not None:
            self._call_off(one, why)
            return
        self._forget(one)
        one.source.replica.lifecycle.hold(request)
        self._hand_offs.send_last(request, (one.source, one.target), one.num_copied)

    # Early ends

    def _forget(self, one: Migration[R]) -> None:
        del self._of[one.request]
        self._num_at[one.source.replica.replica_id] -= 1
        self._num_at[one.target.replica.replica_id] -= 1
        if self.on_slot_free is not None:
            self.on_slot_free()

    def _call_off(self, one: Migration[R], why: str) -> None:
        """Cancel a migration and release the blocks reserved at the target; the source continues unchanged."""
        self._forget(one)
        self._transfers.cancel(one, why)
        if one.has_reserved:
            self._driver.touch(one.target)
            one.target.replica.lifecycle.unreserve(one.request)
        ends = (one.source.replica.replica_id, one.target.replica.replica_id)
        for observer in self._replicaset.observers:
            observer.on_migration_aborted(one.request, *ends, why, to_seconds(self._driver.now))
        self._hand_offs.freed(one.target)
        self._driver.wake(one.target)

    def gone(self, request: Request) -> None:
        """Cancel the migration of a request that has ended."""
        if self._of:
            self._end(request, REQUEST_ENDED)

    def left(self, request: Request) -> None:
        """Cancel the migration of a request that is handed off."""
        if self._of:
            self._end(request, _HANDED_OFF)

    def drains(self, target: R) -> None:
        """Cancel the migrations to a replica that accepts no more requests."""
        for one in list(self._of.values()):
            if one.target is target:
                self._call_off(one, _TARGET_DRAINS)

    def _end(self, request: Request, why: str) -> None:
        one = self._of.get(request)
        if one is not None:
            self._call_off(one, why)

    def lose(self, lost: R) -> None:
        """Cancel all migrations from and to a lost replica; to be called before the replica's memory is cleared."""
        for one in list(self._of.values()):
            if one.source is lost or one.target is lost:
                self._call_off(one, KV_LOST)

    def clear(self) -> None:
        """Drop every migration; the caller clears the memories."""
        self._of.clear()
        self._num_at.clear()
