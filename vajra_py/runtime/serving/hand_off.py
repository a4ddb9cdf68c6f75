"""Hand-off: after their prompt is computed, requests leave their replica with their KV and continue on another one.

A request is held at its source from the end of its prompt until its KV is at the target; then the source's blocks are
freed. `HandOffConfig` determines when the target's blocks are allocated, what happens if the target is full, and
whether replicas take part at any time or only between two of their steps. The KV is sent over the links of a network.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from functools import partial
from typing import Generic

from msgspec import Struct

from vajra_py.contract import PoolRole, Refusal
from vajra_py.contract.observer import EndReason
from vajra_py.runtime.movement.rules import HandOffRules
from vajra_py.runtime.requests.lifecycle import Held
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.serving.backend import R
from vajra_py.runtime.serving.overlap import Overlap
from vajra_py.runtime.serving.replicaset import Replicaset
from vajra_py.runtime.serving.scaling import states_placed_anew
from vajra_py.runtime.serving.services import DriverServices
from vajra_py.runtime.serving.transfers import KV_LOST, REQUEST_ENDED, Transfers
from vajra_py.runtime.support.clock import to_seconds

TARGET_FULL = "the replica that was to go on with it is full"
"""Reason for ending requests whose target has no room (`when_full: drop`), and for cancelling migrations."""
_PLACED_ANEW = "the request is placed anew"
MAX_RETRIES = 100_000
"""Maximum number of checks of full targets while no replica computes; after that, requests are assumed to wait for each
other.
"""


class Stage(Enum):
    """Stages of a hand-off. A hand-off may skip stages, and may return to an earlier one."""

    HELD_BACK = "held back"
    """The prompt is not computed before a target has been found and has reserved blocks."""
    COMPUTING = "computing"
    """The prompt waits or is being computed; blocks of the target are reserved, unless the target was lost."""
    PLACING = "placing"
    """The request has no target."""
    RESERVING = "reserving"
    """The request waits for blocks of its target."""
    STAYING = "staying"
    """The request continues at its source as soon as the source is between two steps."""
    RETRYING = "retrying"
    """The target had no room; it is checked again after a while."""
    QUEUED = "queued"
    """The request waits for its target's scheduler to admit it."""
    MOVING = "moving"
    """The KV is being transferred."""
    ARRIVING = "arriving"
    """The KV is at the target, which accepts the request between two steps."""


# Module constants, because in Python 3.11 the lookup of an enum member costs more than a function call; these members
# are needed for every hand-off.
_PLACING, _RESERVING, _MOVING, _ARRIVING = Stage.PLACING, Stage.RESERVING, Stage.MOVING, Stage.ARRIVING
_PREFILL = PoolRole.PREFILL
_WITHOUT_BLOCKS = (Stage.PLACING, Stage.RESERVING, Stage.RETRYING, Stage.QUEUED)
"""Stages of a request without reserved blocks at its target."""


class HandOff(Struct, Generic[R], eq=False):
    """Hand-off of one request from one replica to another."""

    request: Request
    source: R
    num_tokens: int
    """Number of tokens whose KV the target gets."""
    target: R | None = None
    stage: Stage = Stage.PLACING
    has_reserved: bool = False
    """True if blocks of the target are reserved."""
    number: int = -1
    """Position among the hand-offs whose transfer has begun, from 0; -1: not begun."""
    is_early: bool = False
    """True until the prompt has been computed."""
    is_migration: bool = False
    """True if this is the last stage of a migration of a running request."""
    hit: int = 0
    """Number of prompt tokens in the target's cache, if blocks were reserved before the prompt was computed."""
    num_sent: int | None = None
    """Number of leading tokens whose KV was sent, or is sent with the step in flight, while the prompt is computed;
    None: nothing was sent.
    """
    num_announced: int = 0
    """Number of leading tokens whose KV was to be sent, as announced to observers when sending began."""


class HandOffs(Generic[R]):
    """Hand-offs of one replicaset."""

    def __init__(
        self, replicaset: Replicaset, rules: HandOffRules, transfers: Transfers[R], driver: DriverServices[R]
    ) -> None:
        self._replicaset = replicaset
        # Read once: attributes of a pydantic model are slow, and these are needed for every hand-off.
        settings = rules.settings
        self._at_boundary = settings.takes_effect == "at_step_boundary"
        self._one_at_a_time = settings.reservations == "one_at_a_time"
        self._reserves_at_admission = settings.reserve == "at_admission"
        self._recomputes_token = settings.first_token == "recompute"
        self._moves_missing = settings.moves == "missing"
        self._when_full = settings.when_full
        self._retry_interval_s = settings.retry_interval_s
        self._ahead_tokens = settings.reserve_ahead_tokens
        self.follows_steps = self._at_boundary or self._one_at_a_time
        """True if requests may wait for the end of a step even if `Transfers.waiting` is empty."""
        self._transfers = transfers
        self._driver = driver
        self._replicas = driver.replicas_of(replicaset.name)
        """The driver's replicas, by id."""
        self._num_started = 0
        self._of: dict[Request, HandOff[R]] = {}
        self._unplaced: dict[Request, HandOff[R]] = {}
        """Hand-offs that wait for a target; the one that has waited longest is first."""
        self._lines: dict[int, deque[HandOff[R]]] = {}
        """Hand-offs that wait for blocks of a target, by the target's id, in the order in which they will get blocks.
        """
        self._asked_while_busy: set[int] = set()
        """Ids of targets that were busy when blocks were to be reserved. The hand-offs that wait for such a target are
        continued when the target's step ends.
        """
        self._stayed: dict[Request, int] = {}
        """Requests that arrived at a replica or stayed there, with their number of computed tokens at that time: they
        leave only after more tokens were computed.
        """
        self._freed_by_loss: dict[R, None] = {}
        """Targets whose reserved blocks were freed because the sources were lost; see `after_loss`."""
        self.overlap = Overlap(rules, transfers, self._of, self._moved) if rules.overlaps else None
        """Transfers that begin before the prompt is computed; None if the rules allow none."""
        for replica in replicaset.replicas:
            replica.builder.let_hand_off(self._why_kept)
            if self.overlap is not None:
                replica.lifecycle.on_memory_taken = self.overlap.preempted
        self._num_retries = 0
        """Number of consecutive checks of full targets during which no blocks were reserved, no replica computed and no
        deadlock was resolved.
        """

    # Stages of a hand-off

    def begin(self, request: Request, source: R) -> None:
        """Begin the hand-off of a request whose prompt has been computed."""
        num_tokens = request.num_computed_tokens
        one = self._of.get(request)
        if one is None:
            one = self._of[request] = HandOff(request, source, num_tokens)
        else:
            one.num_tokens, one.is_early = num_tokens, False
        if self._recomputes_token and not request.num_remaining_tokens:
            request.set_computed(num_tokens - 1)
        for observer in self._replicaset.hand_off_watchers:
            observer.on_held(request, source.replica.replica_id, to_seconds(self._driver.now))
        if one.has_reserved:
            self._start(one, min(one.hit, one.num_tokens))
        else:
            self._place(one)

    def _why_kept(self, request: Request) -> Refusal | None:
        """Return the reason why a running request cannot be handed off; None if it can. A request that ends with the
        step in flight stays.
        """
        if request in self._replicas[request.replica_id].replica.to_end:
            return Refusal.STAYS
        if self._stayed.get(request) == request.num_computed_tokens or request.stays_at == request.replica_id:
            return Refusal.STAYS
        able = self._replicaset.bounds.holders(request).of_decodes
        others = (one.replica_id for one in able if one.replica_id != request.replica_id)
        return None if any(map(self._replicaset.is_up, others)) else Refusal.NO_TARGET

    def hold_back(self) -> None:
        """Find targets for requests that are bound to one replica, and whose prompts wait for blocks of another."""
        newly = self._replicaset.newly_held_back
        while newly:
            request = newly.pop(0)
            if request not in self._replicaset.held_back or request in self._of:
                continue
            source = self._replicas[request.replica_id]
            one = HandOff(request, source, request.num_known_tokens, stage=Stage.HELD_BACK, is_early=True)
            self._of[request] = one
            self._place(one)

    def _compute_prompt(self, one: HandOff[R]) -> None:
        """Release a held-back prompt for computation."""
        del self._replicaset.held_back[one.request]
        one.source.replica.enqueue(one.request, to_seconds(self._driver.now))
        self._driver.wake(one.source)

    def _place(self, one: HandOff[R]) -> None:
        request, source = one.request, one.source.replica
        chosen = self._replicaset.place_after_prompt(request, to_seconds(self._driver.now))
        if chosen == source.replica_id or (chosen is None and source.parts.role is not _PREFILL):
            self._stay(one)
            return
        if chosen is None:
            one.stage, one.target = _PLACING, None
            self._unplaced[request] = one
            return
        if self._unplaced:
            self._unplaced.pop(request, None)
        one.target = target = self._replicas[chosen]
        if self._reserves_at_admission:
            one.stage = Stage.QUEUED
            self._queue(request, target)
        elif self._when_full == "retry":
            self._try(one, target)
        else:
            one.stage = _RESERVING
            self._join_line(one, target)
            self._reserve(target)

    def _join_line(self, one: HandOff[R], target: R) -> None:
        """Queue a request for blocks of its target. If its prompt has been computed, the request holds blocks at its
        source, and is therefore queued before all requests whose prompts have not been computed.
        """
        line = self._lines.get(target.replica.replica_id)
        if line is None:
            line = self._lines[target.replica.replica_id] = deque()
        if one.is_early or not line or not line[-1].is_early:
            line.append(one)
        else:
            line.insert(sum(not other.is_early for other in line), one)

    def _queue(self, request: Request, target: R) -> None:
        """Queue a request at its target, whose scheduler will admit it."""
        self._driver.touch(target)
        target.replica.lifecycle.expect(request, to_seconds(self._driver.now))
        self._driver.arrived(request, target)
        self._driver.wake(target)

    def load(self, target: R) -> None:
        """Begin to transfer the KV of the requests that a replica's scheduler has just admitted."""
        for request, hit in target.replica.builder.take_loads():
            self._start(self._of[request], hit)

    def _stay(self, one: HandOff[R]) -> None:
        """Keep the request on the replica that computed its prompt."""
        self._unplaced.pop(one.request, None)
        if one.is_early:
            del self._of[one.request]
            self._compute_prompt(one)
            return
        self._stayed[one.request] = one.num_tokens
        if one.source.num_stages == 1:
            one.stage, one.target = Stage.STAYING, None
            self._driver.touch(one.source)
            # The request may join the decode pool only between steps: when a step ends, every member of the pool gets
            # a token, even one that joined while the step ran.
            self._transfers.between_steps(one.source, one.number, lambda: self._resume(one))
        else:
            one.stage = Stage.STAYING
            self._resume(one)

    def _resume(self, one: HandOff[R]) -> None:
        """Resume a request at its source."""
        if self._of.get(one.request) is not one or one.stage is not Stage.STAYING:
            return  # the request has ended, or its source was lost
        del self._of[one.request]
        if not one.is_migration:
            one.request.set_computed(one.num_tokens)
        for observer in self._replicaset.hand_off_watchers:
            observer.on_stayed(one.request, one.source.replica.replica_id, to_seconds(self._driver.now))
        self._driver.settle(one.source.replica.resume_held(one.request, self._driver.now))
        self._driver.wake(one.source)

    def _may_act(self, target: R) -> bool:
        """Return True if the target may allocate blocks now; otherwise it is checked again when its step ends."""
        if self._at_boundary and target.replica.num_in_flight:
            self._asked_while_busy.add(target.replica.replica_id)
            return False
        self._asked_while_busy.discard(target.replica.replica_id)
        if self._one_at_a_time and _runs_full(target):
            target.replica.expects_kv = True
            return False
        return True

    def _reserve(self, target: R) -> None:
        """Reserve blocks of a target for the hand-offs that wait for them, as far as the target has room; `when_full`
        determines what happens to the others.
        """
        line = self._lines.get(target.replica.replica_id)
        if not line:
            return
        if not self.follows_steps:
            self._driver.catch_up(target)
        else:
            self._driver.touch(target)
            if not self._may_act(target):
                return
        reserve, now = target.replica.lifecycle.reserve, to_seconds(self._driver.now)
        dropped = []
        while line:
            one = line[0]
            hit = reserve(one.request, self._tokens_reserved(one), now)
            if hit is not None:
                line.popleft()
                self._driver.blocks_taken(target)
                self._reserved(one, hit)
                if self._one_at_a_time:
                    break
                continue
            if self._when_full == "wait":
                break
            line.popleft()
            one.stage, one.target = _PLACING, None
            if self._when_full == "hold":
                self._unplaced[one.request] = one
            else:
                dropped.append(one)
        if self._one_at_a_time:
            target.replica.expects_kv = bool(line)
        for one in dropped:
            self._end(one, EndReason.REJECTED, TARGET_FULL)

    def _try(self, one: HandOff[R], target: R) -> None:
        """Reserve blocks at a target for one request, even if other requests wait for blocks there; retry later if too
        few are free.
        """
        if self._of.get(one.request) is not one or one.target is not target:
            return
        self._driver.catch_up(target)
        now = to_seconds(self._driver.now)
        hit = target.replica.lifecycle.reserve(one.request, self._tokens_reserved(one), now)
        if hit is not None:
            self._num_retries = 0
            self._driver.blocks_taken(target)
            self._reserved(one, hit)
            return
        one.stage = Stage.RETRYING
        is_computing = any(each.num_in_flight for each in self._replicaset.replicas)
        self._num_retries = 0 if is_computing or self._free_from_each_other() else self._num_retries + 1
        if self._num_retries > MAX_RETRIES:
            stall = self._driver.controller.stall(self._driver.now)
            if stall is not None:
                raise stall
        self._transfers.after(self._retry_interval_s, lambda: self._try(one, target))

    def _tokens_reserved(self, one: HandOff[R]) -> int:
        if not self._ahead_tokens:
            return one.num_tokens
        return min(one.num_tokens + self._ahead_tokens, _most_tokens(one.request))

    def _reserved(self, one: HandOff[R], hit: int) -> None:
        """Continue the hand-off of a request for which blocks of its target were reserved."""
        hit = min(hit, one.num_tokens)
        if one.is_early:
            one.stage, one.has_reserved, one.hit = Stage.COMPUTING, True, hit
            self._compute_prompt(one)
        else:
            self._start(one, hit)

    def _start(self, one: HandOff[R], hit: int) -> None:
        target = one.target
        assert target is not None
        one.stage, one.has_reserved = _MOVING, True
        one.number = self._num_started
        self._num_started += 1
        if one.num_sent is not None and self.overlap is not None:
            self.overlap.prompt_done(one)
            return
        num_tokens = one.num_tokens
        num_moved = num_tokens - hit if self._moves_missing or one.is_migration else num_tokens
        self._transfers.start(one, (one.source, target), (hit, num_tokens), num_moved, self._moved)

    def _moved(self, one: HandOff[R]) -> None:
        target = one.target
        assert target is not None
        one.stage = _ARRIVING
        self._driver.touch(target)
        if self._at_boundary:
            self._transfers.between_steps(target, one.number, partial(self._arrive, one, target))
        else:
            self._arrive(one, target)

    def _arrive(self, one: HandOff[R], target: R) -> None:
        request, source = one.request, one.source
        if self._of.get(request) is not one:
            return  # the hand-off was cancelled meanwhile
        del self._of[request]
        now = to_seconds(self._driver.now)
        target.replica.lifecycle.arrived(request, now)
        self._stayed[request] = request.num_computed_tokens
        ends = source.replica.replica_id, target.replica.replica_id
        for observer in self._replicaset.hand_off_watchers:
            observer.on_arrived(request, *ends, now)
        for notify in self._replicaset.listeners.moves:
            notify(request, *ends, now)
        self._driver.arrived(request, target)
        if self._one_at_a_time:
            self._reserve(target)
        self._driver.wake(target)
        self._driver.touch(source)
        held = source.replica.lifecycle.held.get(request)
        if held is None:
            return
        if self._at_boundary:
            self._transfers.between_steps(source, one.number, partial(self._release, request, source, held))
        else:
            self._release(request, source, held)

    def _release(self, request: Request, source: R, held: Held) -> None:
        """Free the source's blocks, unless the request has returned meanwhile."""
        if source.replica.lifecycle.held.get(request) is not held:
            return
        source.replica.release_held(request)
        for observer in self._replicaset.hand_off_watchers:
            observer.on_kv_released(request, source.replica.replica_id, to_seconds(self._driver.now))
        self.freed(source)
        self._driver.wake(source)

    def step_ended(self, one: R) -> None:
        """Execute the actions that were waiting until a replica is between two steps."""
        if self._one_at_a_time:
            self._reserve(one)
        if self._transfers.waiting:
            self._transfers.step_ended(one)
        if not self._one_at_a_time and one.replica.replica_id in self._asked_while_busy:
            self._reserve(one)

    def freed(self, one: R, *, has_looked: bool = False) -> None:
        """Continue hand-offs that wait for blocks of a replica, because blocks may have become free. `has_looked`: True
        if `step_ended` was just called, which already reserves blocks if reservations are made one at a time.
        """
        if self._lines.get(one.replica.replica_id) and not (has_looked and self._one_at_a_time):
            self._reserve(one)
        if self._unplaced or self._replicaset.newly_held_back:
            self.place_again()

    def nothing_ran(self, one: R) -> bool:
        """Continue hand-offs after a replica found nothing to run; return True if blocks were reserved for one of them
        or a deadlock was resolved.

        Without this, preempted requests and arriving requests would wait for each other if reservations are made one at
        a time.
        """
        line = self._lines.get(one.replica.replica_id)
        if not line or not self._one_at_a_time or not one.replica.running_set.num_waiting:
            return self._free_from_each_other()
        before = len(line)
        self._reserve(one)
        return len(line) < before or self._free_from_each_other()

    def _free_from_each_other(self) -> bool:
        """Resolve a deadlock of requests that wait for each other's blocks, if no replica can run a step and no KV is
        being transferred; return True if there was a deadlock.

        A request whose prompt has been computed stays at its source if the source decodes. Otherwise the request holds
        blocks of a prefill replica, and prompts that wait there may hold blocks of the request's target. Of these
        prompts, the one whose hand-off was planned last releases its blocks. Such a deadlock is possible if some
        prompts are computed without reserved blocks, for instance because replicas pulled them.
        """
        if not self._of or self._transfers.is_busy or self._may_go_on():
            return False
        stuck = [one for one in self._of.values() if one.stage in _WITHOUT_BLOCKS and not one.is_early]
        for one in stuck:
            if one.source.replica.parts.role is not PoolRole.PREFILL:
                self._call_off(one, _PLACED_ANEW)
                self._stay(one)
                return True
        targets = {one.target for one in stuck}
        for one in reversed(self._of.values()):
            target = one.target
            if one.is_early and one.has_reserved and target is not None and not targets.isdisjoint((target, None)):
                self._driver.touch(target)
                self._call_off(one, _PLACED_ANEW)
                self.freed(target)
                return True
        return False

    def _may_go_on(self) -> bool:
        """Return True if some replica executes a step, can execute one, or waits for KV that is arriving."""
        for each in self._replicas:
            replica, running_set = each.replica, each.replica.running_set
            if each.form_pending or replica.num_in_flight:
                return True
            if running_set.num_running and not replica.lacks_blocks_to_run:
                return True
            if running_set.arrived or running_set.loading:
                return True
        return False

    def send_last(self, request: Request, ends: tuple[R, R], num_copied: int) -> None:
        """Send the remaining KV of a migrating request that was stopped. The target has already reserved blocks for all
        KV of the request.
        """
        source, target = ends
        self.recall_prompt(request)
        one = HandOff(request, source, request.num_computed_tokens, target, has_reserved=True, is_migration=True)
        self._of[request] = one
        for observer in self._replicaset.hand_off_watchers:
            observer.on_held(request, source.replica.replica_id, to_seconds(self._driver.now))
        self._start(one, num_copied)

    # Early ends

    def end_if_leaving(self, request: Request, reason: EndReason, detail: str) -> bool:
        """End a request that is moving, or whose prompt waits for blocks of its target; return False for any other
        request.
        """
        one = self._of.get(request)
        if one is None or (one.is_early and request not in self._replicaset.held_back):
            return False
        self._driver.interrupt(self._replicaset.name)
        self._end(one, reason, detail)
        return True

    def _end(self, one: HandOff[R], reason: EndReason, detail: str) -> None:
        """End a moving request, and free the blocks that both replicas hold for it."""
        target = one.target
        self._forget(one, REQUEST_ENDED)
        self._stayed.pop(one.request, None)
        if one.request in self._replicaset.held_back:
            del self._replicaset.held_back[one.request]
        else:
            one.source.replica.release_held(one.request)
        one.source.replica.lifecycle.end_held(one.request, reason, to_seconds(self._driver.now), detail)
        self._driver.settle(((one.request, reason),))
        for each in (one.source, target):
            if each is not None:
                self.freed(each)
                self._driver.wake(each)

    def gone(self, request: Request) -> None:
        """Release the blocks reserved for a request that ended while its prompt was being computed or while it was in
        its target's queue.
        """
        one = self._of.pop(request, None)
        self._stayed.pop(request, None)
        if one is None:
            return
        target = one.target
        self._transfers.cancel(one, REQUEST_ENDED)
        if request in one.source.replica.lifecycle.held:
            self._driver.touch(one.source)
            one.source.replica.release_held(request)
        elif one.has_reserved and target is not None:
            self._driver.touch(target)
            target.replica.lifecycle.unreserve(request)
        for each in (one.source, target):
            if each is not None:
                self.freed(each)
                self._driver.wake(each)

    def recall_from(self, draining: R) -> None:
        """Drop the planned hand-offs of prompts that wait on a draining replica and will be placed anew."""
        states = states_placed_anew(self._replicaset, draining.replica.replica_id)
        for one in list(self._of.values()):
            if one.is_early and one.source is draining and one.request.state in states:
                self._forget(one, _PLACED_ANEW)

    def recall_prompt(self, request: Request) -> None:
        """Drop the planned hand-off of a request, if there is one and the prompt has not been computed; free the blocks
        reserved for the request.
        """
        one = self._of.get(request)
        if one is None or not one.is_early:
            return
        target = one.target
        if target is not None:
            self._driver.touch(target)
        self._forget(one, _PLACED_ANEW)
        if target is not None:
            self._reserve(target)

    def recall(self) -> None:
        """Drop the planned hand-offs of prompts that have not been computed; their targets will be chosen again."""
        for one in list(self._of.values()):
            if one.is_early:
                self._forget(one, _PLACED_ANEW)

    def _forget(self, one: HandOff[R], why: str) -> None:
        """Drop a hand-off and release the blocks reserved at its target; the source still holds the KV. For a prompt
        that is held back, `hold_back` will find a target again.
        """
        self._of.pop(one.request, None)
        if one.request in self._replicaset.held_back:
            self._replicaset.newly_held_back.append(one.request)
        self._call_off(one, why)

    def _call_off(self, one: HandOff[R], why: str) -> None:
        target = one.target
        self._unplaced.pop(one.request, None)
        if target is None:
            return
        self._transfers.cancel(one, why)
        if one.stage is Stage.RESERVING:
            self._lines[target.replica.replica_id].remove(one)
        elif one.request.state is RequestState.REMOTE:
            target.replica.lifecycle.expect_no_more(one.request)
            one.request.replica_id = one.source.replica.replica_id
        elif one.has_reserved:
            target.replica.lifecycle.unreserve(one.request)
        one.target, one.has_reserved, one.num_sent, one.stage = None, False, None, Stage.PLACING
        if one.is_early:
            one.stage = Stage.HELD_BACK if one.request in self._replicaset.held_back else Stage.COMPUTING

    def lose(self, lost: R) -> None:
        """Cancel all hand-offs from and to a lost replica.

        To be called before the replica's memory is cleared; `after_loss` must follow, for requests that were moving to
        the replica or that wait for the freed blocks.
        """
        here = lost.replica.replica_id
        self._stayed = {one: count for one, count in self._stayed.items() if one.replica_id != here}
        for one in list(self._of.values()):
            if one.source is lost:
                if one.target is not None:
                    self._freed_by_loss[one.target] = None
                self._forget(one, KV_LOST)
            elif one.target is lost:
                self._call_off(one, KV_LOST)
                if one.is_migration:
                    self._stay(one)
                elif one.stage is not Stage.COMPUTING:
                    self._unplaced[one.request] = one

    def after_loss(self) -> None:
        """Continue requests that wait for blocks freed by a loss, and find targets for requests without a target."""
        while self._freed_by_loss:
            target = next(iter(self._freed_by_loss))
            del self._freed_by_loss[target]
            self.freed(target)
            self._driver.wake(target)
        self.place_again()

    def is_being_sent(self, request: Request) -> bool:
        """Return True if KV of a request is being sent although its prompt is not computed yet."""
        one = self._of.get(request)
        return one is not None and one.is_early and one.num_sent is not None

    def is_to_go_to(self, request: Request, replica_id: int) -> bool:
        """Return True if this replica is the target of the request's hand-off."""
        one = self._of.get(request)
        return one is not None and one.target is not None and one.target.replica.replica_id == replica_id

    def involves(self, one: R) -> bool:
        """Return True if a request is moving from or to a replica."""
        return any(one is each.source or one is each.target for each in self._of.values())

    def divert(self, draining: R) -> None:
        """Find other targets for the requests that wait for blocks of a draining replica or for admission there."""
        for one in list(self._of.values()):
            if one.target is draining and one.stage in (Stage.RESERVING, Stage.RETRYING, Stage.QUEUED):
                self._call_off(one, _PLACED_ANEW)
                self._unplaced[one.request] = one
        self.place_again()
        for replica_id in list(self._lines):  # blocks that were reserved may be free now
            self._reserve(self._replicas[replica_id])

    def place_again(self) -> None:
        """Find targets for the requests that have none."""
        self.hold_back()
        for one in list(self._unplaced.values()):
            if self._unplaced.get(one.request) is one:  # placing another request may have ended this hand-off
                self._place(one)

    def clear(self) -> None:
        """Drop every hand-off; the caller ends the requests."""
        self._of.clear()
        self._unplaced.clear()
        self._stayed.clear()
        self._lines.clear()
        self._freed_by_loss.clear()
        self._asked_while_busy.clear()


def _most_tokens(request: Request) -> int:
    """Return the maximum number of tokens whose KV a request may hold."""
    return request.num_prompt_tokens + request.max_tokens - 1


def _runs_full(one: R) -> bool:
    return one.replica.running_set.num_running >= one.replica.limits.max_batch_size
