"""Hand-off: requests whose prompt is computed leave their replica with their KV and go on at another.

A request is held at its source from the end of its prompt until its KV is at the target; the source's blocks are free when the target
has them. When the target's blocks are taken, what a full target means, and whether replicas take part at any time or only between two
of their steps is said by `HandOffConfig`. The KV travels over the links of a network.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import itemgetter
from typing import Generic, Protocol

from vajra_py.contract.observer import EndReason, Observer
from vajra_py.runtime.movement.links import Network
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.serving.backend import R
from vajra_py.runtime.serving.replica import FirstToken
from vajra_py.runtime.serving.replicaset import HandOffRules, Replicaset
from vajra_py.runtime.support.clock import to_seconds

TARGET_FULL = "the replica that was to go on with it is full"
"""Reason of requests that end because their target has no room (`when_full: drop`)."""


class Stage(Enum):
    """Stages of a hand-off, in order."""

    HELD_BACK = "held back"
    """Its prompt waits for blocks of its target."""
    COMPUTING = "computing"
    """Its prompt waits or is computed; blocks of its target are set aside, unless that was lost."""
    PLACING = "placing"
    """No target takes it now."""
    RESERVING = "reserving"
    """It waits for blocks of its target."""
    QUEUED = "queued"
    """It waits for its target's scheduler to admit it."""
    MOVING = "moving"
    """Its KV is on its way."""
    ARRIVING = "arriving"
    """Its KV is at the target, which takes it between two steps."""


@dataclass(eq=False, slots=True)
class HandOff(Generic[R]):
    """One request on its way from one replica to another."""

    request: Request
    source: R
    num_tokens: int
    """Tokens whose KV the target gets."""
    target: R | None = None
    stage: Stage = Stage.PLACING
    has_reserved: bool = False
    """True if blocks of the target are set aside."""
    number: int = -1
    """Position among those for which blocks were set aside."""
    is_early: bool = False
    """True while its prompt is not computed."""
    is_migration: bool = False
    """True if it was running; its prompt was computed before."""
    hit: int = 0
    """Tokens that the target's cache held when blocks were set aside before the prompt."""


class HandOffDriver(Protocol[R]):
    """Driver as hand-offs see it."""

    @property
    def now(self) -> int:
        """The present tick."""

    def replica(self, replicaset: str, replica_id: int) -> R:
        """Return a replica by id."""

    def touch(self, one: R) -> None:
        """Apply what has ended on a replica, and end a run of repeated steps with the one in flight."""

    def wake(self, one: R) -> None:
        """Let a replica form a step, unless it is busy."""

    def placed(self, request: Request, one: R) -> None:
        """Tell the backend that a request waits on a replica."""

    def copy(self, hand_off: HandOff[R]) -> None:
        """Tell the backend that KV is on its way."""

    def announce(self, request: Request, one: R | None) -> None:
        """Let a request be run that was bound to a replica, or put into the shared queue (None)."""

    def settle(self, ended: Sequence[tuple[Request, EndReason]]) -> None:
        """Count requests that have ended."""

    def schedule(self, tick: int, replicaset: str) -> None:
        """Call `HandOffs.transfers_due` at a tick."""


class HandOffs(Generic[R]):
    """Hand-offs of one replicaset."""

    def __init__(self, replicaset: Replicaset, rules: HandOffRules, driver: HandOffDriver[R]) -> None:
        self._replicaset = replicaset
        self._rules = rules
        self._driver = driver
        self._network = Network(rules.links)
        self._at_boundary = rules.settings.takes_effect == "at_step_boundary"
        self._one_at_a_time = rules.settings.reservations == "one_at_a_time"
        self._num_started = 0
        self._of: dict[Request, HandOff[R]] = {}
        self._unplaced: dict[Request, HandOff[R]] = {}
        """Those for which no target was named, in order."""
        self._lines: dict[int, deque[HandOff[R]]] = {}
        """By target, those that wait for its blocks, in order."""
        self._dues: dict[int, list[tuple[int, Callable[[], None]]]] = {}
        """By replica, what it takes part in between two of its steps, in order of reservation."""
        self._asked_while_busy: set[int] = set()
        """Targets that look at their line when their step ends."""
        self._scheduled_at: int | None = None
        self.on_stage_copied: Callable[[object], None] = _nothing_copied
        """Called with the stage of a migration whose KV has arrived."""
        self.on_stopped: Callable[[object], None] = _nothing_copied
        """Called with a migration whose source is between two steps, as it asked."""

    def __len__(self) -> int:
        return len(self._of)

    def find(self, request: Request) -> HandOff[R] | None:
        """Return the hand-off of a request that has not arrived; None if there is none."""
        return self._of.get(request)

    @property
    def observers(self) -> Sequence[Observer]:
        """Observers of the replicaset."""
        return self._replicaset.observers

    # The way of a request

    def begin(self, request: Request, source: R) -> None:
        """Let a request whose prompt has just been computed leave its replica."""
        one = self._of.get(request)
        if one is None:
            one = self._of[request] = HandOff(request, source, request.num_computed_tokens)
        one.num_tokens, one.is_early = request.num_computed_tokens, False
        for observer in self.observers:
            observer.on_held(request, source.replica.replica_id, to_seconds(self._driver.now))
        if one.has_reserved:
            self._start(one, one.hit)
        else:
            self._place(one)

    def hold_back(self) -> None:
        """Look for targets of requests that are bound to a replica and whose prompt waits for blocks of another."""
        newly = self._replicaset.newly_held_back
        while newly:
            request = newly.pop(0)
            if request not in self._replicaset.held_back or request in self._of:
                continue
            source = self._driver.replica(self._replicaset.name, request.replica_id)
            one = HandOff(request, source, request.num_known_tokens, stage=Stage.HELD_BACK, is_early=True)
            self._of[request] = one
            self._place(one)

    def _prepare(self, one: HandOff[R], hit: int) -> None:
        """Let a prompt be computed, since blocks of its target are set aside."""
        one.stage, one.has_reserved, one.hit = Stage.COMPUTING, True, hit
        del self._replicaset.held_back[one.request]
        one.source.replica.enqueue(one.request, to_seconds(self._driver.now))
        self._driver.wake(one.source)

    def _place(self, one: HandOff[R]) -> None:
        request, source = one.request, one.source.replica
        chosen = self._replicaset.place_after_prompt(request, to_seconds(self._driver.now))
        stays = chosen is None and source.parts.role.value != "prefill"
        if stays or chosen == source.replica_id:
            if one.is_early:
                self._prepare_here(one)
            else:
                self._stay(one)
            return
        if chosen is None:
            one.stage, one.target = Stage.PLACING, None
            self._unplaced[request] = one
            return
        self._unplaced.pop(request, None)
        if self._rules.settings.reserve == "at_admission":
            one.target, one.stage = self._driver.replica(self._replicaset.name, chosen), Stage.QUEUED
            self._queue(one, one.target)
            return
        one.target, one.stage = self._driver.replica(self._replicaset.name, chosen), Stage.RESERVING
        self._lines.setdefault(chosen, deque()).append(one)
        self._reserve(one.target)

    def _queue(self, one: HandOff[R], target: R) -> None:
        """Let a request wait at its target, whose scheduler admits it."""
        if self._rules.settings.first_token == FirstToken.RECOMPUTE.value:
            one.request.set_computed(one.num_tokens - 1)
        self._driver.touch(target)
        target.replica.expect(one.request, to_seconds(self._driver.now))
        self._driver.placed(one.request, target)
        self._driver.wake(target)

    def load(self, target: R) -> None:
        """Bring the KV of the requests that a replica's scheduler has just admitted."""
        for request, hit in target.replica.builder.take_loads():
            self._start(self._of[request], hit)

    def _prepare_here(self, one: HandOff[R]) -> None:
        """Let a prompt be computed that goes on where it is computed."""
        self._unplaced.pop(one.request, None)
        del self._of[one.request]
        del self._replicaset.held_back[one.request]
        one.source.replica.enqueue(one.request, to_seconds(self._driver.now))
        self._driver.wake(one.source)

    def _stay(self, one: HandOff[R]) -> None:
        """Go on where the prompt was computed."""
        self._unplaced.pop(one.request, None)
        del self._of[one.request]
        ended = one.source.replica.resume_held(one.request, self._driver.now)
        self._driver.settle(ended)
        self._driver.wake(one.source)

    def _may_act(self, one: R) -> bool:
        return not self._at_boundary or not one.replica.num_in_flight

    def _reserve(self, target: R) -> None:
        """Set blocks aside for those that wait in line for a target, as far as it has room."""
        line = self._lines.get(target.replica.replica_id)
        if not line:
            return
        self._driver.touch(target)
        if not self._may_act(target):
            self._asked_while_busy.add(target.replica.replica_id)
            return
        self._asked_while_busy.discard(target.replica.replica_id)
        if self._one_at_a_time and _runs_full(target):
            target.replica.expects_kv = True
            return
        dropped = []
        while line:
            one = line[0]
            hit = target.replica.reserve(one.request, one.num_tokens)
            if hit is not None:
                line.popleft()
                if one.is_early:
                    self._prepare(one, hit)
                else:
                    self._start(one, hit)
                if self._one_at_a_time:
                    break
                continue
            rule = self._rules.settings.when_full
            if rule == "wait":
                break
            line.popleft()
            one.stage, one.target = Stage.PLACING, None
            if rule == "hold":
                self._unplaced[one.request] = one
            else:
                dropped.append(one)
        target.replica.expects_kv = self._one_at_a_time and bool(line)
        for one in dropped:
            self.end(one, EndReason.REJECTED, TARGET_FULL)

    def _start(self, one: HandOff[R], hit: int) -> None:
        target = one.target
        assert target is not None
        one.stage, one.has_reserved = Stage.MOVING, True
        one.number, self._num_started = self._num_started, self._num_started + 1
        is_partial = self._rules.settings.moves == "missing" or one.is_migration
        num_moved = one.num_tokens - (hit if is_partial else 0)
        ids = (one.source.replica.replica_id, target.replica.replica_id)
        now = self._driver.now
        for observer in self.observers:
            observer.on_transfer(one.request, *ids, num_moved, to_seconds(now))
        self._network.start(one, *ids, num_moved * self._rules.bytes_per_token, now)
        self._driver.copy(one)
        self._schedule()

    def _schedule(self) -> None:
        tick = self._network.next_change()
        if tick is not None and (self._scheduled_at is None or tick < self._scheduled_at):
            self._scheduled_at = tick
            self._driver.schedule(tick, self._replicaset.name)

    def transfers_due(self) -> None:
        """Look which transfers have ended by now."""
        now = self._driver.now
        if self._scheduled_at is not None and self._scheduled_at <= now:
            self._scheduled_at = None
        for transfer in self._network.ended(now):
            if isinstance(transfer, HandOff):
                self._moved(transfer)
            else:
                self.on_stage_copied(transfer)
        self._schedule()

    def _moved(self, one: HandOff[R]) -> None:
        target = one.target
        assert target is not None
        one.stage = Stage.ARRIVING
        self._driver.touch(target)
        if self._may_act(target):
            self._arrive(one)
            self._driver.wake(target)
        else:
            self._due(target, one.number, lambda: self._arrive(one) if self._of.get(one.request) is one else None)

    def _arrive(self, one: HandOff[R]) -> None:
        request, source, target = one.request, one.source, one.target
        assert target is not None
        del self._of[request]
        now = to_seconds(self._driver.now)
        if self._rules.settings.first_token == FirstToken.RECOMPUTE.value and not one.is_migration:
            request.set_computed(one.num_tokens - 1)
        target.replica.arrived(request, now)
        for observer in self.observers:
            observer.on_arrived(request, source.replica.replica_id, target.replica.replica_id, now)
        self._driver.placed(request, target)
        if self._one_at_a_time:
            self._reserve(target)
        self._driver.touch(source)
        if self._may_act(source):
            self._release(request, source)
            self._driver.wake(source)
        else:
            self._due(source, one.number, lambda: self._release(request, source))

    def _release(self, request: Request, source: R) -> None:
        """Free the source's blocks."""
        if request not in source.replica.held:
            return
        source.replica.release_held(request)
        for observer in self.observers:
            observer.on_kv_released(request, source.replica.replica_id, to_seconds(self._driver.now))
        self.freed(source)

    def _due(self, one: R, number: int, action: Callable[[], None]) -> None:
        """Let a replica take part in something between two steps: in order of reservation, as engines look through their queues."""
        insort(self._dues.setdefault(one.replica.replica_id, []), (number, action), key=itemgetter(0))

    def at_boundary(self, one: R) -> None:
        """Let a replica, which is between two steps, take part in what waits for that."""
        replica_id = one.replica.replica_id
        if self._one_at_a_time:
            self._reserve(one)
        dues = self._dues.get(replica_id)
        while dues and not one.replica.num_in_flight:
            _, act = dues.pop(0)
            act()
        if not self._one_at_a_time and replica_id in self._asked_while_busy:
            self._reserve(one)

    def freed(self, one: R, *, at_boundary: bool = False) -> None:
        """Blocks of a replica may have become free: let those come that wait for them. `at_boundary`: right after that was called."""
        if not (at_boundary and self._one_at_a_time):
            self._reserve(one)
        self.place_again()

    def nothing_ran(self, one: R) -> bool:
        """A replica has found nothing to run: with requests that wait there for memory, it looks on; True if that took a request.

        Otherwise, with one reservation at a time, requests that were preempted and those that are to come would wait for each other.
        """
        line = self._lines.get(one.replica.replica_id)
        if not line or not self._one_at_a_time or not one.replica.running_set.num_waiting:
            return False
        before = len(line)
        self._reserve(one)
        return len(line) < before

    # Parts of migrations

    def copy_stage(self, stage: Hashable, request: Request, ends: tuple[R, R], num_tokens: int) -> None:
        """Copy KV of a request that goes on running; `on_stage_copied` is called when it has arrived."""
        source, target = (one.replica.replica_id for one in ends)
        now = self._driver.now
        for observer in self.observers:
            observer.on_transfer(request, source, target, num_tokens, to_seconds(now))
        self._network.start(stage, source, target, num_tokens * self._rules.bytes_per_token, now)
        self._schedule()

    def cancel_stage(self, stage: Hashable) -> None:
        """Call a copy off."""
        self._network.cancel(stage, self._driver.now)
        self._schedule()

    def stop_between_steps(self, stage: object, source: R) -> None:
        """Call `on_stopped` when the source is between two steps."""
        if source.replica.num_in_flight:
            self._due(source, -1, lambda: self.on_stopped(stage))
        else:
            self.on_stopped(stage)

    def send_last(self, request: Request, ends: tuple[R, R], num_copied: int) -> None:
        """Send the last KV of a request that was stopped; blocks of the target are set aside for all of it."""
        source, target = ends
        one = HandOff(request, source, request.num_computed_tokens, target, has_reserved=True, is_migration=True)
        self._of[request] = one
        for observer in self.observers:
            observer.on_held(request, source.replica.replica_id, to_seconds(self._driver.now))
        self._start(one, num_copied)

    # Ends before the time

    def end(self, one: HandOff[R], reason: EndReason, detail: str) -> None:
        """End a request that is on its way: what both ends hold of it is free."""
        target = one.target
        self._forget(one)
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
        """Give back what is set aside for a request that has ended by itself: while its prompt was computed, or in its target's queue."""
        one = self._of.pop(request, None)
        if one is None:
            return
        target = one.target
        if one.stage is Stage.MOVING:
            self._network.cancel(one, self._driver.now)
            self._schedule()
        if request in one.source.replica.held:
            one.source.replica.release_held(request)
        elif one.has_reserved and target is not None:
            target.replica.unreserve(request)
        for each in (one.source, target):
            if each is not None:
                self.freed(each)
                self._driver.wake(each)

    def recall_from(self, draining: R) -> None:
        """Forget what is planned for prompts that have not begun on a replica that takes no more requests."""
        for one in list(self._of.values()):
            if one.is_early and one.source is draining and one.request.state is RequestState.WAITING:
                self._forget(one)

    def recall(self) -> None:
        """Forget what is planned for prompts that are not computed; their replicas are chosen anew."""
        for one in list(self._of.values()):
            if one.is_early:
                self._forget(one)

    def _forget(self, one: HandOff[R]) -> None:
        """Give up what a target has set aside; the source still holds the KV."""
        self._of.pop(one.request, None)
        self._call_off(one)

    def _call_off(self, one: HandOff[R]) -> None:
        target = one.target
        self._unplaced.pop(one.request, None)
        if target is None:
            return
        if one.stage is Stage.RESERVING:
            self._lines[target.replica.replica_id].remove(one)
        elif one.request.state is RequestState.REMOTE:
            if one.stage is Stage.MOVING:
                self._network.cancel(one, self._driver.now)
                self._schedule()
            target.replica.expect_no_more(one.request)
            one.request.replica_id = one.source.replica.replica_id
        elif one.has_reserved:
            if one.stage is Stage.MOVING:
                self._network.cancel(one, self._driver.now)
                self._schedule()
            if target.replica.memory.is_registered(one.request):
                target.replica.unreserve(one.request)
        one.target, one.has_reserved, one.stage = None, False, Stage.PLACING
        if one.is_early:
            one.stage = Stage.HELD_BACK if one.request in self._replicaset.held_back else Stage.COMPUTING

    def lose(self, lost: R) -> list[Request]:
        """Call off what a lost replica takes part in; returns the requests whose KV was on it, in the order in which they were held.

        Call before its memory is cleared, and `place_again` afterwards for those that were on their way to it.
        """
        self._dues.pop(lost.replica.replica_id, None)
        gone = []
        for one in list(self._of.values()):
            if one.source is lost:
                self._forget(one)
                gone.append(one.request)
            elif one.target is lost:
                self._call_off(one)
                if one.is_migration:
                    self._stay(one)
                elif one.stage is not Stage.COMPUTING:
                    self._unplaced[one.request] = one
        return gone

    def involves(self, one: R) -> bool:
        """Return True if a request leaves a replica or comes to it, or the replica is to take part in such a move."""
        if self._dues.get(one.replica.replica_id):
            return True
        return any(one is each.source or one is each.target for each in self._of.values())

    def divert(self, draining: R) -> None:
        """Find other targets for those that wait for a replica that takes no more requests: for its blocks, or to be admitted."""
        for one in list(self._of.values()):
            if one.target is draining and one.stage in (Stage.RESERVING, Stage.QUEUED):
                self._call_off(one)
                self._unplaced[one.request] = one
        self.place_again()
        for replica_id in list(self._lines):  # blocks that were set aside for others may be free
            self._reserve(self._driver.replica(self._replicaset.name, replica_id))

    def place_again(self) -> None:
        """Find targets for those that have none."""
        self.hold_back()
        for one in list(self._unplaced.values()):
            if self._unplaced.get(one.request) is one:  # what came of others may have ended it
                self._place(one)

    def clear(self) -> None:
        """Forget every hand-off; their requests are accounted for elsewhere."""
        for one in list(self._of.values()):
            if one.stage is Stage.MOVING:
                self._network.cancel(one, self._driver.now)
        self._of.clear()
        self._unplaced.clear()
        self._lines.clear()
        self._dues.clear()
        self._asked_while_busy.clear()


def _runs_full(one: R) -> bool:
    return one.replica.running_set.num_running >= one.replica.limits.max_batch_size


def _nothing_copied(stage: object) -> None:
    """Nothing migrates."""


def is_leaving(request: Request) -> bool:
    """Return True if the request is on its way to another replica."""
    return request.state is RequestState.HELD or request.state is RequestState.REMOTE
