"""Discrete-event simulator: requests, policies and replicas in virtual time.

Only steps, arrivals and ends are events. Between them nothing changes, and what a step costs is what changed in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop
from typing import Any, TypeAlias

from sortedcontainers import SortedDict

from vajra_py.contract import EndReason, ReadsNoLoad
from vajra_py.errors import PolicyError
from vajra_py.runtime.clock import NEVER, to_seconds, to_ticks
from vajra_py.runtime.collector import rare_collections
from vajra_py.runtime.content_of import facts_of, keys_of
from vajra_py.runtime.controller import EXPIRED, TAKEN_BACK, Controller
from vajra_py.runtime.executor import StepPlan
from vajra_py.runtime.input_log import Abandonment, Failure, Restart
from vajra_py.runtime.replica import Replica
from vajra_py.runtime.replicaset import Replicaset
from vajra_py.runtime.request import Request, RequestState
from vajra_py.runtime.swapping import PolicyChange
from vajra_py.sim.clocks import ReplicaClock
from vajra_py.sim.events import EventQueue, Phase
from vajra_py.sim.executor import SimulatedExecutor, StepTimer
from vajra_py.sim.runs import FIRST_STEPS, MAX_STEPS, TimesRuns
from vajra_py.workload import RequestSpec, Workload

# Looking a member of an enumeration up costs more than a call, and these are looked up for every event.
_STEP_END, _FORM, _ARRIVAL = Phase.STEP_END, Phase.FORM, Phase.ARRIVAL


def _looks_at_arrivals(replicaset: Replicaset) -> bool:
    """Whether some policy may look at running requests or loads when a request arrives."""
    scheduler = replicaset.scheduler
    reads_load = scheduler.reads_load if isinstance(scheduler, ReadsNoLoad) else True
    return reads_load or bool(replicaset.listeners.arrivals)


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """Rules of one simulation."""

    horizon_s: float | None = None
    """No arrival after this; None: the whole workload."""
    drain: bool = True
    """Whether to run on after the last arrival (or the horizon) until every request has ended."""
    tenant_salt: bool = False
    runs_ahead: bool = True
    """Whether steps that policies declare to repeat are worked out at once; the results are the same either way."""
    check_every_steps: int = 0
    """Check conservation every so many steps; 0: never."""
    expires: bool = True
    """Whether requests expire by the clock; False: only when told."""
    contains_breaches: bool = False
    """Whether a policy that breaks the contract takes its replicaset out of service, instead of ending the simulation."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A request is taken in at another time than the client sent it."""

    spec: RequestSpec
    arrived_at: float
    """When the client sent it, seconds."""


Injected: TypeAlias = Acceptance | Failure | Restart | Abandonment | PolicyChange | str
"""What may be let happen: with phase ARRIVAL, FAILURE (three kinds), POLICY, and the id of a request with EXPIRY or ABORT."""


class Simulator:
    """One run of a workload over a controller's replicas."""

    def __init__(
        self,
        controller: Controller,
        executor: SimulatedExecutor,
        timer_of: Callable[[Replica], StepTimer],
        options: SimulationOptions,
        progress: Callable[[int, float], None] | None = None,
    ) -> None:
        self.controller = controller
        self.now = 0
        self.num_steps = 0
        self.breaches: list[tuple[int, str, str]] = []
        """(tick, replicaset, what a policy did) of those that were contained."""
        self._executor = executor
        self._options = options
        self._progress = progress
        self._events = EventQueue()
        self._clocks: dict[Replica, ReplicaClock] = {}
        self._idle: dict[str, SortedDict[int, ReplicaClock]] = {}
        self._running_ahead: dict[str, dict[int, ReplicaClock]] = {}
        self._read_claims()
        self._followers: dict[str, list[RequestSpec]] = {}
        self._offers: set[str] = set()
        self._all_arrived = False
        for name, replicaset in controller.replicasets.items():
            self._idle[name] = SortedDict()
            ahead = self._running_ahead[name] = {}
            for replica in replicaset.replicas:
                timer = timer_of(replica)
                runs = timer if options.runs_ahead and isinstance(timer, TimesRuns) else None
                free_at, rank = [0] * replica.limits.pipeline_stages, len(self._clocks)
                clock = ReplicaClock(replica, replicaset, timer, free_at, runs, rank, ahead)
                self._clocks[replica] = clock
                self._idle[name][replica.replica_id] = clock

    def _read_claims(self) -> None:
        """The policies are there, or others: read when they may look at replicas that run ahead."""
        replicasets = self.controller.replicasets.values()
        self._looks_at_arrivals = any(map(_looks_at_arrivals, replicasets))
        self._looks_at_departures = any(one.listeners.departures for one in replicasets)

    # The loop

    def run(self, workload: Iterable[RequestSpec]) -> None:
        """Simulate to the end (or the horizon). Raises `PolicyError` when a policy leaves requests standing for ever."""
        with rare_collections():
            self._run(workload)

    def _run(self, workload: Iterable[RequestSpec]) -> None:
        arrivals = self._timed(workload)
        self._next_arrival(arrivals)
        horizon = NEVER if self._options.horizon_s is None else to_ticks(self._options.horizon_s)
        drains = self._options.drain
        stop_at = NEVER if drains else horizon
        heap = self._events.heap
        while heap:
            if stop_at != NEVER and heap[0][0] > stop_at:
                self.now = stop_at
                self._catch_up_all(goes_on=False)
                if heap[0][0] > stop_at:  # else a step that ended just now is followed by another
                    break
            tick, phase, _, _, payload = heappop(heap)
            if phase is _STEP_END:
                clock, plan, version = payload
                if version == clock.version:  # else it was called off
                    self.now = tick
                    self._step_ended(clock, plan)
            elif phase is _FORM:
                self.now = tick
                self._form(payload)
            elif phase is _ARRIVAL:
                self.now = tick
                if tick <= horizon:
                    self._take_in(payload, arrivals)
                if not drains and horizon == NEVER and self._all_arrived:
                    stop_at = tick
            else:
                self._happen(tick, phase, payload)
        else:
            stall = self.controller.stall(self.now)
            if stall is not None:
                raise stall

    def _happen(self, tick: int, phase: Phase, payload: Any) -> None:
        """What comes rarely."""
        if phase is Phase.EXPIRY and isinstance(payload, Request) and payload.state is not RequestState.WAITING:
            return  # it got its turn
        self.now = tick
        if phase is Phase.STAGE_END:
            self._stage_ended(*payload)
        elif phase is Phase.FAILURE:
            self._upheaval(payload)
        elif phase is Phase.POLICY:
            self._swap(payload)
        elif phase is Phase.EXPIRY:
            self._end_early(payload, EndReason.EXPIRED, EXPIRED)
        else:
            self._end_early(payload, EndReason.ABORTED, TAKEN_BACK)

    def abort_at(self, seconds: float, request_id: str) -> None:
        """Let a client take its request back at a time of the run."""
        self.inject(to_ticks(seconds), Phase.ABORT, request_id)

    def inject(self, tick: int, phase: Phase, payload: Injected) -> None:
        """Let something of a recorded run happen."""
        self._events.push(tick, phase, payload)

    def _timed(self, workload: Iterable[RequestSpec]) -> Iterator[RequestSpec]:
        """The requests that have an arrival time of their own; the others wait for the request that they follow."""
        if isinstance(workload, Workload) and not workload.has_followers:
            return iter(workload)
        if isinstance(workload, Iterator):  # it is gone through twice
            workload = list(workload)
        for spec in workload:
            if spec.follows is not None:
                self._followers.setdefault(spec.follows, []).append(spec)
        return (spec for spec in workload if spec.follows is None)

    def _next_arrival(self, arrivals: Iterator[RequestSpec]) -> None:
        spec = next(arrivals, None)
        self._all_arrived = spec is None
        if spec is not None:
            self._events.push(to_ticks(spec.arrived_at), Phase.ARRIVAL, spec)

    # Arrivals and departures

    def _take_in(self, payload: RequestSpec | Acceptance, arrivals: Iterator[RequestSpec]) -> None:
        if isinstance(payload, Acceptance):
            self._arrive(payload.spec, payload.arrived_at)
            return
        if payload.follows is None:  # first, so that no step is formed between arrivals of one tick
            self._next_arrival(arrivals)
        self._arrive(payload)

    def _arrive(self, spec: RequestSpec, arrived_at: float | None = None) -> None:
        if self._looks_at_arrivals:
            self._catch_up_all(goes_on=True)
        salt = spec.tenant if self._options.tenant_salt else ""
        facts = facts_of(spec)
        try:
            request, replicaset, replica = self.controller.submit(
                facts, lambda size: keys_of(spec, size, salt), self.now, arrived_at
            )
        except PolicyError as error:
            self._contain(self.controller.select(facts), error)
            return
        if request.state is RequestState.ENDED:
            self._ended((request,))
            return
        self._executor.expect(request, spec.num_output_tokens)
        if request.expires_at is not None and self._options.expires:
            self._events.push(to_ticks(request.expires_at), Phase.EXPIRY, request)
        if replica is not None:
            clock = self._clocks[replica]
            self._catch_up(clock, goes_on=replica.repeats.ignores_arrivals(clock.plan))
            self._wake(clock)
            return
        for clock in list(self._running_ahead[replicaset.name].values()):
            self._catch_up(clock, goes_on=False)
        self._offer(replicaset)

    def _end_early(self, payload: Request | str, reason: EndReason, detail: str) -> None:
        request = self.controller.find(payload) if isinstance(payload, str) else payload
        if request is None:
            return
        replica = self.controller.replica_of(request)
        if self._looks_at_departures:
            self._catch_up_all(goes_on=True)
        if replica is not None:
            self._catch_up(self._clocks[replica], goes_on=False)
        try:
            is_ended = self.controller.end_early(request.request_id, reason, self.now, detail)
        except PolicyError as error:
            self._contain(request.replicaset, error)
            return
        if is_ended:
            self._executor.release(request)
            self._ended((request,))
            if replica is not None:
                self._wake(self._clocks[replica])

    def _ended(self, requests: Sequence[Request]) -> None:
        """Tell of ended requests, and let whoever follows one arrive after its think time."""
        if self._progress is not None:
            self._progress(len(requests), to_seconds(self.now))
        if not self._followers:
            return
        for request in requests:
            for spec in self._followers.pop(request.request_id, ()):
                self._events.push(self.now + to_ticks(spec.think_time_s), Phase.ARRIVAL, spec)

    # Replicas and policies come and go

    def _upheaval(self, what: Failure | Restart | Abandonment) -> None:
        replicaset = self.controller.replicasets[what.replicaset]
        if isinstance(what, Abandonment):
            ended = self.controller.abandon(replicaset, what.detail, self.now)
            self._ended([request for request, _ in ended])
            return
        clock = self._clocks[replicaset.replicas[what.replica_id]]
        if isinstance(what, Restart):
            self.controller.restore_replica(clock.replica, self.now)
            self._empty(clock, free_at=self.now)
            self._wake(clock)
            return
        self._catch_up_set(replicaset)
        self._empty(clock, free_at=NEVER)
        try:
            losses = self.controller.lose_replica(clock.replica, what.detail, what.max_reruns, self.now)
        except PolicyError as error:
            self._contain(what.replicaset, error)
            return
        self._ended([request for request, _ in losses.ended])
        self._wake_for(replicaset, losses.moved)

    def _swap(self, change: PolicyChange) -> None:
        replicaset = self.controller.replicasets[change.replicaset]
        self._catch_up_set(replicaset)
        self.controller.swap_policy(change, self.now)
        self._read_claims()
        for replica in replicaset.replicas:
            self._wake(self._clocks[replica])

    def _contain(self, name: str, error: PolicyError) -> None:
        """A policy of this replicaset broke the contract. Raises the error unless breaches are contained."""
        if not self._options.contains_breaches:
            raise error
        self.breaches.append((self.now, name, str(error)))
        replicaset = self.controller.replicasets[name]
        self._catch_up_set(replicaset)
        ended = self.controller.take_out_of_service(replicaset, error, self.now)
        for replica in replicaset.replicas:
            clock = self._clocks[replica]
            self._empty(clock, free_at=clock.stage_free_at[0] if replica.replica_id in replicaset.lost else self.now)
        for request, _ in ended:
            self._executor.release(request)
        self._ended([request for request, _ in ended])

    def _empty(self, clock: ReplicaClock, free_at: int) -> None:
        """Nothing is in flight any more; the replica is idle, unless it is never to be free."""
        clock.version += 1
        clock.plan, clock.run_ends = None, None
        clock.stage_free_at[:] = [free_at] * len(clock.stage_free_at)
        clock.running_ahead.pop(clock.replica.replica_id, None)
        idle = self._idle[clock.replica.replicaset]
        clock.is_idle = free_at != NEVER
        if clock.is_idle:
            idle[clock.replica.replica_id] = clock
        else:
            idle.pop(clock.replica.replica_id, None)

    def _catch_up_set(self, replicaset: Replicaset) -> None:
        for replica in replicaset.replicas:
            self._catch_up(self._clocks[replica], goes_on=False)

    def _wake_for(self, replicaset: Replicaset, moved: Sequence[tuple[Request, Replica | None]]) -> None:
        """Requests wait anew, each for its replica, or for any."""
        places = {replica.replica_id: replica for _, replica in moved if replica is not None}
        for replica_id in sorted(places):
            self._wake(self._clocks[places[replica_id]])
        if any(replica is None for _, replica in moved):
            self._offer(replicaset)

    def _offer(self, replicaset: Replicaset) -> None:
        if replicaset.name not in self._offers:
            self._offers.add(replicaset.name)
            self._events.push(self.now, Phase.FORM, replicaset.name, len(self._clocks))  # after replicas of this tick

    # Steps

    def _wake(self, clock: ReplicaClock, *, at_once: bool = True) -> None:
        """Let the replica form a step after everything else of this tick, unless it is busy.

        `at_once` is False when something of this tick is being handled that the event queue no longer shows.
        """
        free_at = clock.stage_free_at
        if clock.form_pending or free_at[0] > self.now or clock.replica.num_in_flight >= len(free_at):
            return
        if at_once and self._events.nothing_up_to(self.now, _FORM):
            self._start(clock)
            return
        clock.form_pending = True
        self._events.push(self.now, _FORM, clock, clock.rank)

    def _form(self, payload: ReplicaClock | str) -> None:
        if isinstance(payload, ReplicaClock):
            payload.form_pending = False
            self._start(payload)
            return
        self._offers.discard(payload)
        shared = self.controller.replicasets[payload].shared
        idle = self._idle[payload]
        for replica_id in list(idle):
            if not len(shared):
                return
            if replica_id in idle and not idle[replica_id].form_pending:
                self._start(idle[replica_id])

    def _start(self, clock: ReplicaClock) -> None:
        replica = clock.replica
        try:
            plan = replica.next_plan(self.now)
        except PolicyError as error:
            self._contain(replica.replicaset, error)
            return
        if plan is None:  # perhaps with steps further up the pipeline; the first stage is free
            if not clock.is_idle:
                clock.is_idle = True
                self._idle[replica.replicaset][replica.replica_id] = clock
            return
        if clock.is_idle:
            clock.is_idle = False
            del self._idle[replica.replicaset][replica.replica_id]
        self.num_steps += 1
        free_at = clock.stage_free_at
        if len(free_at) == 1:
            self._fly(clock, plan)
            return
        ticks = max(1, clock.timer.stage_ticks(plan))
        leaves_at = self.now
        for stage, free in enumerate(free_at):
            leaves_at = max(leaves_at, free) + ticks
            free_at[stage] = leaves_at
        self._events.push(free_at[0], Phase.STAGE_END, (clock, plan), clock.rank)
        self._events.push(leaves_at, _STEP_END, (clock, plan, clock.version), clock.rank)

    def _fly(self, clock: ReplicaClock, plan: StepPlan) -> None:
        """The step begins; if it is sure to be repeated, so do its repetitions, as one event."""
        runs, replica = clock.runs, clock.replica
        num_steps = 1
        if runs is not None and not plan.chunks:
            num_steps = min(1 + replica.repeats.num_repeats(plan), clock.run_limit)
        clock.plan = plan
        if runs is not None and num_steps > 1:
            shape = plan.shape
            ends = runs.run_ends(self.now, shape.num_decodes, shape.decode_context_tokens, num_steps)
            clock.run_ends = ends
            end = ends[-1]
            replica.repeats.note_waiting()
            clock.running_ahead[replica.replica_id] = clock
        else:
            end = self.now + max(1, clock.timer.stage_ticks(plan))
        clock.stage_free_at[0] = end
        self._events.push(end, _STEP_END, (clock, None, clock.version), clock.rank)

    def _catch_up(self, clock: ReplicaClock, *, goes_on: bool, up_to_now: bool = True) -> None:
        """Apply the steps of a run that ended before now. Unless it goes on, the step in flight is its last.

        `up_to_now`: also the one that ends now, which precedes what happens now.
        """
        ends, plan = clock.run_ends, clock.plan
        if ends is None or plan is None:
            return
        replica = clock.replica
        num_done = bisect_left(ends, self.now)
        if num_done:
            replica.repeats.apply(plan, ends[:num_done])
            self.num_steps += num_done
            del ends[:num_done]
        if up_to_now and len(ends) > 1 and ends[0] == self.now:  # the next one follows what happens now
            clock.version += 1
            del ends[1:]
            clock.stage_free_at[0] = self.now
            self._step_ended(clock, None, forms_at_once=False)
            return
        if not goes_on and len(ends) > 1:
            clock.version += 1
            del ends[1:]
            clock.stage_free_at[0] = end = ends[0]
            self._events.push(end, _STEP_END, (clock, None, clock.version), clock.rank)
            clock.running_ahead.pop(replica.replica_id, None)
            clock.run_limit = FIRST_STEPS
        replica.repeats.note_waiting()

    def _catch_up_all(self, *, goes_on: bool) -> None:
        for running in self._running_ahead.values():
            for clock in list(running.values()):
                self._catch_up(clock, goes_on=goes_on)

    def _catch_up_others(self, clock: ReplicaClock) -> None:
        """Bring every other replica to the end of this one's step: of ends at one tick the lower rank's goes first."""
        for running in self._running_ahead.values():
            for other in list(running.values()):
                self._catch_up(other, goes_on=True, up_to_now=other.rank < clock.rank)

    def _stage_ended(self, clock: ReplicaClock, plan: StepPlan) -> None:
        clock.replica.first_stage_completed(plan)
        self._wake(clock)

    def _step_ended(self, clock: ReplicaClock, plan: StepPlan | None, *, forms_at_once: bool = True) -> None:
        replica = clock.replica
        if plan is None:
            if clock.run_ends is not None:
                if len(clock.run_ends) > 1:
                    self._catch_up(clock, goes_on=True)
                    clock.run_limit = min(4 * clock.run_limit, MAX_STEPS)
                clock.running_ahead.pop(replica.replica_id, None)
                clock.run_ends = None
            plan, clock.plan = clock.plan, None
            assert plan is not None
        if self._looks_at_departures:
            self._catch_up_others(clock)
        try:
            ended = replica.complete_step(plan, self._executor.result(plan), self.now)
            if ended:
                self.controller.settle(ended, self.now)
        except PolicyError as error:
            self._contain(replica.replicaset, error)
            return
        if ended:
            self._ended([request for request, _ in ended])
        every = self._options.check_every_steps
        if every and self.num_steps % every == 0:
            self.controller.check_conservation()
        self._wake(clock, at_once=forms_at_once)
