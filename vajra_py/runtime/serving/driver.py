"""Driver of a controller's replicas: arrivals, steps, failures and policy changes, in one order for every backend.

Events of one tick are handled in the order of `Phase`: completed steps, failures, pipeline stages, transfers of KV,
arrivals, deferred requests, expiries, aborts, ends of programs, policy changes, wake-ups, scaling; then replicas form
their next steps in order of rank, and idle replicas pull from shared queues. The backend has the clock: it calls
`run_until` with a tick, and nothing changes between two ticks. A simulator that gets the events of an engine's run
therefore makes the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from heapq import heappop
from typing import Any, Generic

from msgspec import Struct, structs
from sortedcontainers import SortedDict

from vajra_py.contract import Layer, PoolRole
from vajra_py.contract.observer import EndReason
from vajra_py.contract.policies import traits_of
from vajra_py.contract.programs import ProgramEnd
from vajra_py.errors import PolicyError
from vajra_py.runtime.kv import BlockHashes
from vajra_py.runtime.records.input_log import (
    Abandonment,
    Abort,
    AdapterEnd,
    CacheReset,
    Control,
    Expiry,
    Failure,
    Gate,
    Input,
    PolicyChange,
    PolicyViolation,
    ProgramIdle,
    Readmission,
    Restart,
    Retry,
    Stall,
    Swap,
    TierEnd,
    TransferEnd,
)
from vajra_py.runtime.requests.adapters import Adapters
from vajra_py.runtime.requests.connector import KvReport
from vajra_py.runtime.requests.draft_inputs import Verification
from vajra_py.runtime.requests.kv_inputs import KvNews
from vajra_py.runtime.requests.listeners import NOBODY
from vajra_py.runtime.requests.programs import Program
from vajra_py.runtime.requests.request import Request, RequestFacts, RequestState
from vajra_py.runtime.serving.admission import MAX_FRUITLESS, Deferral
from vajra_py.runtime.serving.alarms import Alarm
from vajra_py.runtime.serving.backend import Backend, FastForward, R, TierCopy, Transfer
from vajra_py.runtime.serving.controller import ABORTED, EXPIRED, Controller
from vajra_py.runtime.serving.elastic import Elasticity
from vajra_py.runtime.serving.events import EventQueue, Phase
from vajra_py.runtime.serving.movement import Movement
from vajra_py.runtime.serving.policy_swap import Swapped
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.serving.replicaset import Replicaset
from vajra_py.runtime.serving.scaling import Start
from vajra_py.runtime.serving.swap_moves import SwapMoves, use_swap_links
from vajra_py.runtime.serving.tier_moves import TierMoves
from vajra_py.runtime.serving.waking import PolicyWaker
from vajra_py.runtime.step.plan import StepPlan, StepResult
from vajra_py.runtime.support.clock import NEVER, to_seconds, to_ticks

# Module constants, because in Python 3.11 the lookup of an enum member costs more than a function call; these members
# are needed for every event.
_STEP_END, _FORM, _ARRIVAL, _ADMISSION = Phase.STEP_END, Phase.FORM, Phase.ARRIVAL, Phase.ADMISSION
_TRANSFER = Phase.TRANSFER
_WAITING, _DEFERRED, _ENDED = RequestState.WAITING, RequestState.DEFERRED, RequestState.ENDED

_ASKS_POLICIES = (Phase.WAKE, Phase.SCALING, Phase.PROGRAM)
"""Phases whose events advance requests only if a policy acts."""
_IN_THE_BACKGROUND = (*_ASKS_POLICIES, Phase.TIER)
"""Phases whose events do not keep a run going when no request is left."""

FormStep = Callable[[Replica, int], StepPlan | None]


class DriverOptions(Struct, frozen=True):
    """Rules of one run.

    Attributes:
        check_every_steps: number of steps between two calls of `Controller.check_conservation`; 0: no calls.
        expires: True if the driver itself lets requests expire, ends idle programs, and calls the admission policy
            again for deferred requests, each at its time on the clock; False: only when an input requires it.
        times_transfers: True if the duration of KV transfers is modelled from the links, and that of adapter loads is
            taken from the settings; False: an input reports the end of each transfer (`TransferEnd`; between memory
            tiers, `TierEnd`) and of each load (`AdapterEnd`).
        wakes: True if the driver itself wakes policies, calls scalers, and (if transfers are untimed) retries hand-offs
            to full targets, each at its time on the clock; False: only when an input requires it.
        serves: True if requests may arrive at any time; the run is then never over, and wake-ups continue while there
            are no requests.
        isolates_policies: True if a policy that breaks the contract takes its replicaset out of service instead of
            ending the run.
    """

    check_every_steps: int = 0
    expires: bool = True
    times_transfers: bool = True
    wakes: bool = True
    serves: bool = False
    isolates_policies: bool = False


class Driver(Generic[R]):
    """Applies events to a controller's replicas. Not thread-safe.

    Only this class writes its fields and those of a `BackendReplica`; a backend calls one method for each event.

    Attributes:
        now: the present tick.
        until: tick up to which `run_until` runs.
        num_steps: number of steps launched so far.
        events: future events, with these payloads by phase. `STEP_END`: (replica, anything, epoch); `STAGE_END`:
            (replica, plan, epoch); `FAILURE`: a `Failure`, `Restart`, `Abandonment` or `Control`; `SCALING`: a `Start`,
            a `ReplicaChange`, or the name of a replicaset whose scaler is called; `TIER`: the name of a replicaset, a
            `TierEnd`, a replica's `SwapMoves`, or an `AdapterEnd`; `TRANSFER`: a `TransferEnd`, a `Retry`, or the name
            of a replicaset whose links are modelled; `ADMISSION`: a `Deferral`, the id of a request, or None for all
            requests deferred without a time; `EXPIRY`: a request or an id; `ABORT`: an id; `PROGRAM`: a program with
            its activity, or an id; `WAKE`: an `Alarm` or a `WakeUp`; `FORM`: a replica, or the name of a replicaset
            whose shared queue is offered; `ARRIVAL` and `POLICY`: defined by the backend.
    """

    def __init__(
        self,
        controller: Controller,
        backend: Backend[R],
        replicas: Iterable[R],
        options: DriverOptions,
        note: Callable[[Input], None] | None = None,
    ) -> None:
        self.controller = controller
        self.now = 0
        self.until = 0
        self.num_steps = 0
        self.events = EventQueue()
        self.fast_forward: FastForward[R] | None = None
        """Fast-forward of the backend; None: steps are launched one by one. See `use`."""
        self.form_step: FormStep = Replica.next_plan
        """Function that forms a replica's next step; see `form_through`."""
        self._backend = backend
        self._options = options
        self._every = options.check_every_steps
        self._note = note
        self._replicas: dict[str, list[R]] = {name: [] for name in controller.replicasets}
        self._idle: dict[str, SortedDict[int, R]] = {name: SortedDict() for name in controller.replicasets}
        self._offers: set[str] = set()
        """Replicasets whose shared queue is offered to idle replicas at the end of this tick."""
        self._num_replicas = 0
        self._completing = -1
        """Rank of the replica whose step is being completed (-1: none); replicas of higher rank follow in this tick."""
        self._formed_at = -1
        """Latest tick at which a replica formed a step."""
        for one in replicas:
            name = one.replica.replicaset
            one.rank, self._num_replicas = self._num_replicas, self._num_replicas + 1
            one.replica.memory.use_clock(self._seconds)
            if one.replica.adapters is not None and not options.times_transfers:
                one.replica.adapters.wait_for_loads()
            self._replicas[name].append(one)
            if controller.replicasets[name].computes(one.replica.replica_id):
                self._idle[name][one.replica.replica_id] = one
            else:
                one.free_at, one.is_idle = NEVER, False
        controller.on_ended = backend.on_requests_ended
        controller.programs.on_pause = self._program_paused
        self._movements: dict[str, Movement[R]] = {
            name: Movement(one, one.hand_off, self, is_timed=options.times_transfers, asks=options.wakes)
            for name, one in controller.replicasets.items()
            if one.hand_off is not None
        }
        self._tiers: dict[str, TierMoves[R]] = {
            name: TierMoves(one, one.tiers, self, is_timed=options.times_transfers)
            for name, one in controller.replicasets.items()
            if one.tiers is not None
        }
        use_swap_links(self)
        overlaps = [name for name, one in self._movements.items() if one.hand_offs.overlap is not None]
        self._overlapping = frozenset(overlaps if options.times_transfers else ())
        """Names of the replicasets in which a prompt's KV is sent while the prompt is computed."""
        self._elasticity = Elasticity(self._movements, self, asks=options.wakes)
        self._draining = self._elasticity.draining
        is_all = None if options.serves else self._only_policies_are_left
        self._waker = PolicyWaker(self._movements, self._elasticity, self, is_all)
        self._asks_timeless = False
        """True if the admission policy is called again, later in this tick, for requests deferred without a time."""
        if controller.gate is not None:
            controller.gate.on_room = self.ask_deferred
        if options.wakes:
            controller.alarms.connect(self._set_alarm)
        self._read_declarations()

    def _seconds(self) -> float:
        return to_seconds(self.now)

    def use(self, fast_forward: FastForward[R]) -> None:
        """Use the fast-forward of a backend that launches several steps at once; the results of these steps are applied
        before anything reads them.
        """
        self.fast_forward = fast_forward
        self._read_declarations()
        for name, replicaset in self.controller.replicasets.items():
            replicaset.sync = partial(fast_forward.sync_all, name)

    def form_through(self, form_step: FormStep) -> None:
        """Form steps with this function from now on in place of `Replica.next_plan`, for instance to measure them."""
        self.form_step = form_step

    # Time

    def advance_to(self, tick: int) -> None:
        """Set the clock to a later tick; events that were due before are handled when `run_until` is called."""
        self.now = tick

    def stop_now(self) -> None:
        """Stop the present `run_until` at the present tick."""
        self.until = min(self.until, self.now)

    def run_until(self, until: int) -> None:
        """Handle every event that is due up to a tick, each at its own tick.

        Raises `PolicyError` if a policy breaks the contract and is not isolated.
        """
        self.until = until
        heap = self.events.heap
        while heap and heap[0][0] <= self.until:
            tick, phase, _, _, payload = heappop(heap)
            if phase is _STEP_END:
                one, what, epoch = payload
                if epoch == one.epoch:
                    self.now = tick
                    self._backend.on_step_end(one, what)
            elif phase is _FORM:
                self.now = tick
                self._form(payload)
            elif phase is _ARRIVAL:
                self.now = tick
                self._backend.on_arrival(payload)
            elif phase is _TRANSFER:
                self.now = tick
                self._transfers_due(payload)
            elif not _is_void(phase, payload) and not self._is_too_late(tick, phase):
                self.now = tick
                self._dispatch(phase, payload)

    def next_due(self) -> int:
        """Return the tick of the next event; `NEVER` if there is none or the run is over."""
        heap = self.events.heap
        while heap and _is_void(heap[0][1], heap[0][4]):
            heappop(heap)
        return NEVER if not heap or self._is_over() else heap[0][0]

    def _dispatch(self, phase: Phase, payload: Any) -> None:
        if phase is Phase.STAGE_END:
            self._stage_ended(*payload)
        elif phase is Phase.FAILURE:
            self._fail(payload)
        elif phase is _ADMISSION:
            self._ask_again(payload)
        elif phase is Phase.EXPIRY:
            self._expire(payload)
        elif phase is Phase.ABORT:
            self.abort(payload)
        elif phase is Phase.PROGRAM:
            self._end_program(payload)
        elif phase is Phase.WAKE:
            self._waker.wake(payload)
        elif phase is Phase.SCALING:
            self._elasticity.happen(payload)
        elif phase is Phase.TIER:
            if isinstance(payload, str | SwapMoves | TierEnd):
                self._tiers_due(payload)
            else:
                self._adapter_due(payload)
        else:
            self._backend.on_policy_change(payload)

    def record(self, entry: Input) -> None:
        """See `DriverServices`."""
        if self._note is not None:
            self._note(entry)

    # Arrivals and departures

    def submit(
        self,
        facts: RequestFacts,
        make_hashes: Callable[[int], BlockHashes | None],
        payload: Any,
        arrived_at: float | None = None,
    ) -> None:
        """Submit a request; see `Controller.submit`. `payload`: the backend's own object for the request."""
        replicaset = self.controller.replicaset_for(facts)
        if self.controller.gate is not None:
            self._sync_all()
        elif self.fast_forward is not None and replicaset.name in self._looks_at_arrivals:
            self.fast_forward.sync_all(replicaset.name)
        backend = self._backend
        try:
            request, replica = self.controller.submit(facts, replicaset, make_hashes, self.now, arrived_at)
        except PolicyError as error:
            taken_in = self.controller.find(facts.request_id)
            assert taken_in is not None
            backend.on_submitted(taken_in, payload)
            self.isolate(taken_in.replicaset, error)
            return
        backend.on_submitted(request, payload)
        if request.state is _ENDED:
            assert request.end_reason is not None
            backend.on_requests_ended(((request, request.end_reason),))
            return
        if request.expires_at is not None and self._options.expires:
            self.events.push(max(self.now, to_ticks(request.expires_at)), Phase.EXPIRY, request)
        if request.state is _DEFERRED:
            self._await_decision(request)
            return
        self.announce(request, replica, at_once=True)

    def announce(self, request: Request, replica: Replica | None, *, at_once: bool = False) -> None:
        """See `DriverServices`. `at_once`: see `wake`."""
        backend, replicaset = self._backend, self.controller.replicasets[request.replicaset]
        if replica is not None:
            one = self._replicas[replicaset.name][replica.replica_id]
            backend.on_placed(request, (one,))
            if replicaset.name in self._tiers:
                self._tiers[replicaset.name].queued(request, one)
            if self.fast_forward is not None:
                self.fast_forward.on_queued(one)
            if replicaset.newly_held_back:
                try:
                    self._movements[replicaset.name].hand_offs.hold_back()
                except PolicyError as error:
                    self.isolate(replicaset.name, error)
                return
            self.wake(one, at_once=at_once)
            return
        backend.on_placed(request, self._replicas[replicaset.name])
        if self.fast_forward is not None:
            self.fast_forward.interrupt_all(replicaset.name)
        self._offer(replicaset)

    # Deferred requests

    def _await_decision(self, request: Request) -> None:
        gate = self.controller.gate
        assert gate is not None
        deferral = gate.deferral_of(request)
        if deferral.until is not None and self._options.expires:
            self.events.push(deferral.until, _ADMISSION, deferral)

    def ask_deferred(self) -> None:
        """Call the admission policy again, later in this tick, for each request that it has deferred without a time."""
        if not self._asks_timeless:
            self._asks_timeless = True
            self.events.push(self.now, _ADMISSION, None, 1)  # rank 1: after requests deferred to this tick (rank 0)

    def _ask_again(self, what: Deferral | str | None) -> None:
        gate = self.controller.gate
        assert gate is not None
        self._sync_all()
        if what is None:
            self._asks_timeless = False
            held = set[str]()  # replicasets in which a still deferred request holds back the rest
            for request in gate.timeless():
                # The policy may have broken the contract in an earlier iteration, so that the request is no longer
                # deferred.
                if request.state is _DEFERRED and request.replicaset not in held:
                    self._ask_about(request)
                    if gate.holds_rest(request):
                        held.add(request.replicaset)
            return
        known = self.controller.find(what) if isinstance(what, str) else what.request
        if known is None or known.state is not _DEFERRED:
            return
        self.record(Readmission(self.now, known.request_id))
        self._ask_about(known)
        if gate.num_fruitless >= MAX_FRUITLESS and not self._options.isolates_policies:
            idle = (_ADMISSION, Phase.WAKE)
            if all(phase in idle or _is_void(phase, payload) for _, phase, _, _, payload in self.events.heap):
                raise gate.violation(f"deferred requests {MAX_FRUITLESS:,} times while nothing else happened", known)
            gate.num_fruitless = 0

    def _ask_about(self, request: Request) -> None:
        try:
            replica = self.controller.ask_again(request, self.now)
        except PolicyError as error:
            if request.state is _ENDED and request.end_reason is not None:
                self._backend.on_requests_ended(((request, request.end_reason),))
            self.isolate(request.replicaset, error)
            return
        if request.state is _ENDED:
            assert request.end_reason is not None
            self._backend.on_requests_ended(((request, request.end_reason),))
        elif request.state is _DEFERRED:
            self._await_decision(request)
        else:
            self.announce(request, replica)

    def _expire(self, what: Request | str) -> None:
        request = self.controller.find(what) if isinstance(what, str) else what
        if request is not None:
            self.record(Expiry(self.now, request.request_id))
            self._abort_request(request, EndReason.EXPIRED, EXPIRED)

    def abort(self, request_id: str) -> None:
        """Abort a request now; if it holds blocks while a step is in flight, it ends when the step completes."""
        request = self.controller.find(request_id)
        if request is not None:
            self.record(Abort(self.now, request_id))
            self._abort_request(request, EndReason.ABORTED, ABORTED)

    def _abort_request(self, request: Request, reason: EndReason, detail: str) -> None:
        name = request.replicaset
        movement = self._movements.get(name)
        if movement is not None and movement.end(request, reason, detail):
            self._elasticity.end_drains(name)
            return
        replica = self.controller.replica_of(request)
        one = None if replica is None else self._replicas[name][replica.replica_id]
        if self.fast_forward is not None:
            if name in self._looks_at_departures:
                self.fast_forward.sync_all(name)
            if one is not None:
                self.fast_forward.interrupt(one)
        try:
            has_ended = self.controller.abort(request.request_id, reason, self.now, detail)
            if has_ended and one is not None and movement is not None:
                self._look_after(movement, one, ((request, reason),))
        except PolicyError as error:
            self.isolate(name, error)
            return
        if has_ended and one is not None and not self._elasticity.goes_down(one):
            self.wake(one, at_once=True)

    # Programs

    def _program_paused(self, program: Program) -> None:
        """Schedule the end of a program of which no call is alive: in this tick if the client has declared the end,
        otherwise after the idle time, if one is set.
        """
        tick, idle_s = self.now, self.controller.programs.idle_s
        if program.due_end is None:
            if idle_s is None or not self._options.expires:
                return
            tick += to_ticks(idle_s)
        self.events.push(tick, Phase.PROGRAM, (program, program.activity))

    def _end_program(self, what: tuple[Program, int] | str) -> None:
        program = self.controller.programs.find(what) if isinstance(what, str) else what[0]
        if program is None or program.num_alive:
            return
        reason = program.due_end or ProgramEnd.IDLE
        if reason is ProgramEnd.IDLE:
            self.record(ProgramIdle(self.now, program.program_id))
        for name, calls in self.controller.end_program(program, reason, self.now).items():
            self.sync(name)
            try:
                for notify in calls:
                    notify()
            except PolicyError as error:
                self.isolate(name, error)

    # Steps

    def complete(self, one: R, plan: StepPlan, result: StepResult, *, at_once: bool = True) -> None:
        """Complete a step that ended now. `at_once`: see `wake`."""
        if one.free_at == NEVER and one.num_stages == 1:
            one.free_at = self.now
        replica = one.replica
        name = replica.replicaset
        movement, outer = self._movements.get(name) if self._movements else None, self._completing
        if movement is not None and (at_once or outer >= 0):
            self._completing = one.rank
        others = self.fast_forward if name in self._looks_at_departures else None
        if others is not None and (name not in self._looks_if_waiting or replica.may_end(plan, result)):
            others.sync_before(one)
        try:
            ended = replica.complete_step(plan, result, self.now)
            if ended:
                self.controller.settle(ended, self.now)
            if movement is not None and (
                ended
                or replica.newly_held
                or plan.preempted
                or movement.attends_steps
                or movement.waiting
                or self._draining
            ):
                self._look_after(movement, one, ended, has_freed=bool(ended or plan.preempted))
        except PolicyError as error:
            self.isolate(name, error)
            return
        finally:
            self._completing = outer
        if self._every and self.num_steps % self._every == 0:
            self.controller.check_conservation()
        if self._draining and self._elasticity.goes_down(one):
            return
        self.wake(one, at_once=at_once)

    def take_report(self, one: R, report: KvReport) -> None:
        """Apply a connector report that arrives now, without a step's result."""
        ended = one.replica.take_report(report, self.now)
        if ended:
            self.controller.settle(ended, self.now)
        self.wake(one)

    def verify(self, one: R, accepted: Mapping[Request, int]) -> None:
        """Count the accepted drafts of an earlier step; they were not known when that step ended."""
        ended = one.replica.verify(accepted, self.now)
        if ended:
            self.controller.settle(ended, self.now)
        self.wake(one)

    def _stage_ended(self, one: R, plan: StepPlan, _: int) -> None:
        if one.free_at == NEVER:
            one.free_at = self.now
        one.replica.first_stage_completed(plan)
        self.wake(one, at_once=True)

    def count_repeats(self, num_steps: int) -> None:
        """Count ended steps that a backend launched together with another step."""
        self.num_steps += num_steps

    def end_run_at(self, one: R, tick: int) -> None:
        """Make the step in flight, which ends at `tick`, the last of the steps launched together."""
        one.epoch += 1
        one.free_at = tick

    def freed(self, one: R) -> None:
        """Mark a replica as free, because its cancelled step has ended now."""
        one.free_at = self.now
        self._set_idle(one, is_idle=True)

    def wake(self, one: R, *, at_once: bool = False) -> None:
        """See `DriverServices`. `at_once`: the replica may form the step now if no other event of this tick is left.

        Pass True only if this call is the last action of the present event: the event queue does not contain further
        actions of that event.
        """
        if one.form_pending or one.free_at > self.now or one.replica.num_in_flight >= one.num_stages:
            return
        if at_once and (not (heap := self.events.heap) or heap[0][0] > self.now):
            name = one.replica.replicaset
            if name not in self._syncs_forming or not self._looks_around(name, one):
                self._start(one)
                return
        one.form_pending = True
        self.events.push(self.now, _FORM, one, one.rank)

    def _offer(self, replicaset: Replicaset) -> None:
        if replicaset.name not in self._offers:
            self._offers.add(replicaset.name)
            # This rank comes after those of all replicas, so replicas that form steps in this tick come first.
            self.events.push(self.now, _FORM, replicaset.name, self._num_replicas)

    def _form(self, what: R | str) -> None:
        name = what if isinstance(what, str) else what.replica.replicaset
        looks = name in self._syncs_forming and self._looks_around(name, None if isinstance(what, str) else what)
        if looks and self.fast_forward is not None:
            self.fast_forward.sync_all(name)  # the replicaset's policies may read requests of other replicas
            rank = self._num_replicas if isinstance(what, str) else what.rank
            heap = self.events.heap
            # `sync_all` may have added an event that must come first, for example because a replica of lower rank
            # became free.
            if heap and heap[0][:3] < (self.now, _FORM, rank):
                self.events.push(self.now, _FORM, what, rank)
                return
        if not isinstance(what, str):
            what.form_pending = False
            if what.free_at <= self.now:  # otherwise `call_off` was called in this tick, and the replica is free later
                self._start(what)
            return
        self._offers.discard(what)
        shared = self.controller.replicasets[what].shared
        idle = self._idle[what]
        for replica_id in list(idle):
            if not len(shared):
                return
            if replica_id in idle and not idle[replica_id].form_pending:
                self._start(idle[replica_id])

    def _looks_around(self, name: str, one: R | None) -> bool:
        """Return True if a policy that listens to events may be called while this replica (None: any idle replica)
        forms a step.
        """
        if one is None or name not in self._looks_if_waiting:
            return True
        policies = self.controller.replicasets[name].policies
        is_alone = policies is None or policies.shared.is_empty
        return not is_alone or one.replica.running_set.num_waiting > 0

    def _start(self, one: R) -> None:
        self._formed_at = self.now
        movements = self._movements
        replica, builder = one.replica, one.replica.builder
        tiers = self._tiers[replica.replicaset] if replica.has_tiers else None
        if tiers is not None:
            tiers.before_step(one)
        try:
            plan = self.form_step(replica, self.now)
            if tiers is not None:
                tiers.after_step(one)
            adapters = replica.adapters
            if adapters is not None and adapters.loads:
                self._begin_loads(one, adapters)
            if builder.dropped:
                dropped = replica.take_dropped()
                self.controller.settle(dropped, self.now)
                if replica.replicaset in movements:
                    movements[replica.replicaset].requests_ended(dropped)
            if builder.handed_off:
                movements[replica.replicaset].leave(one)
            if builder.loads:
                movements[replica.replicaset].hand_offs.load(one)
        except PolicyError as error:
            self.isolate(replica.replicaset, error)
            return
        if plan is None:  # idle: the first pipeline stage is free, even if later stages still execute steps
            if not one.is_idle:
                self._set_idle(one, is_idle=True)
            if self._draining and self._elasticity.goes_down(one):
                return
            if builder.idle_at is not None and self._options.wakes:
                self._waker.leave_idle(one, builder.idle_at)
            movement = movements.get(replica.replicaset)
            if movement is not None and movement.hand_offs.nothing_ran(one):
                self.wake(one)
            return
        if one.is_idle:
            self._set_idle(one, is_idle=False)
        self.num_steps += 1
        one.free_at = self._backend.launch(one, plan)
        if self._overlapping and plan.chunks and replica.replicaset in self._overlapping:
            overlap = movements[replica.replicaset].hand_offs.overlap
            assert overlap is not None
            overlap.step_formed(plan, one.free_at - self.now)

    def _set_idle(self, one: R, *, is_idle: bool) -> None:
        if is_idle is one.is_idle:
            return
        one.is_idle = is_idle
        idle = self._idle[one.replica.replicaset]
        if is_idle:
            idle[one.replica.replica_id] = one
        else:
            del idle[one.replica.replica_id]

    # Moves between replicas, scaling and wake-ups

    def _transfers_due(self, what: TransferEnd | Retry | str) -> None:
        name = what if isinstance(what, str) else what.replicaset
        movement = self._movements[name]
        try:
            if isinstance(what, str):
                movement.transfers_due()
            elif isinstance(what, Retry):
                if movement.has_retry:
                    self.record(structs.replace(what, tick=self.now))
                    movement.retry()
            elif movement.is_under_way(what.number):
                self.record(what)
                movement.transfer_ended(what.number)
        except PolicyError as error:
            self.isolate(name, error)
            return
        if self._draining:
            self._elasticity.end_drains(name)

    def _tiers_due(self, what: str | TierEnd | SwapMoves[R]) -> None:
        if isinstance(what, TierEnd):
            tiers = self._tiers[what.replicaset]
            if not tiers.take_end(what.number):
                return
            self.record(what)
            what = what.replicaset
        moves = what if isinstance(what, SwapMoves) else self._tiers[what]
        try:
            moves.due()
        except PolicyError as error:
            self.isolate(moves.replicaset, error)

    def _begin_loads(self, one: R, adapters: Adapters) -> None:
        for load in adapters.take_loads():
            if self._options.times_transfers:
                end = AdapterEnd(0, one.replica.replicaset, one.replica.replica_id, load.number)
                self.events.push(self.now + adapters.load_ticks[load.name], Phase.TIER, end)
            else:
                self._backend.on_adapter_load(one, load)

    def _adapter_due(self, what: AdapterEnd) -> None:
        one = self.replica(what.replicaset, what.replica_id)
        adapters = one.replica.adapters
        if adapters is None or not adapters.is_under_way(what.number):
            return
        self.touch(one)
        self.record(structs.replace(what, tick=self.now))
        adapters.end_load(what.number)
        self.wake(one, at_once=True)

    def _look_after(
        self, movement: Movement[R], one: R, ended: Sequence[tuple[Request, EndReason]], *, has_freed: bool = True
    ) -> None:
        """Continue the moves that wait for the end of a replica's step or for blocks of the replica. Raises
        `PolicyError`.
        """
        movement.step_ended(one, ended, has_freed=has_freed)
        if self._draining:
            self._elasticity.end_drains(one.replica.replicaset)

    def _is_over(self) -> bool:
        """Return True if only background events are left, with no request to serve and none to come."""
        return not self._options.serves and not self.controller.num_alive and self._is_left_only(_IN_THE_BACKGROUND)

    def _is_too_late(self, tick: int, phase: Phase) -> bool:
        """Return True if an event is dropped because the run is over; programs may still end in the last tick."""
        in_last_tick = phase is Phase.PROGRAM and tick == self.now
        return phase in _IN_THE_BACKGROUND and not in_last_tick and self._is_over()

    def _only_policies_are_left(self) -> bool:
        """Return True if the remaining events advance requests only if a policy acts."""
        return self._is_left_only(_ASKS_POLICIES)

    def _is_left_only(self, phases: Sequence[Phase]) -> bool:
        return all(event[1] in phases for event in self.events.heap)

    def _set_alarm(self, alarm: Alarm) -> None:
        """Schedule a wake-up for its time. If that time is now and steps were formed in this tick already, schedule it
        a tick later: a replay would handle a wake-up of this tick before these steps.
        """
        earliest = self.now + 1 if self._formed_at == self.now else self.now
        self.events.push(max(earliest, alarm.tick), Phase.WAKE, alarm)

    # Failures and changes of policies

    def _fail(self, what: Failure | Restart | Abandonment | Control) -> None:
        self.record(what)
        if self.controller.gate is not None and self.controller.gate.waits_for_change:
            self.ask_deferred()
        if isinstance(what, Control):
            self._control(what)
            return
        if isinstance(what, Abandonment):
            self._abandon(self.controller.replicasets[what.replicaset], what.detail)
            return
        one = self._replicas[what.replicaset][what.replica_id]
        if not self._elasticity.may_happen(what):
            return
        if isinstance(what, Failure):
            self._lose(one, what)
            return
        self.controller.restore_replica(one.replica, self.now)
        self.call_off(one)
        movement = self._movements.get(what.replicaset)
        if movement is not None:
            try:
                self._look_after(movement, one, ())
                self._elasticity.place_shared(what.replicaset)
                movement.make_moves()
            except PolicyError as error:
                self.isolate(what.replicaset, error)
                return
        self.wake(one, at_once=True)

    def _abandon(self, replicaset: Replicaset, why: str) -> None:
        """End the requests that no replica will continue: those in the shared queue, or, if only prefill replicas are
        up, all requests.
        """
        self.controller.abandon(replicaset, why, self.now)
        if replicaset.bounds.is_split and not any(
            replicaset.is_up(one.replica_id) and one.parts.role is not PoolRole.PREFILL for one in replicaset.replicas
        ):
            for request in [one for one in self.controller.alive() if one.replicaset == replicaset.name]:
                self._abort_request(request, EndReason.FAILED, why)

    def _control(self, what: Control) -> None:
        self.interrupt(what.replicaset)
        if isinstance(what, Stall):
            stall = self.controller.stall(self.now)
            if stall is not None:
                self.isolate(what.replicaset, stall)
            return
        one = self._replicas[what.replicaset][what.replica_id]
        if isinstance(what, KvNews):
            self.take_report(one, one.replica.report_of(what))
            return
        if isinstance(what, Verification):
            self.verify(one, one.replica.accepted_of(what.accepted))
            return
        if isinstance(what, Gate):
            one.replica.set_gate(what)
        elif isinstance(what, CacheReset):  # otherwise a `KvLook`, which only wakes the replica
            movement = self._movements.get(what.replicaset)
            try:
                if movement is not None:
                    movement.lose(one)
                self.controller.reset_cache(one.replica, self.now)
                if movement is not None:
                    movement.after_loss()
            except PolicyError as error:
                self.isolate(what.replicaset, error)
                return
        self.wake(one, at_once=True)

    def _lose(self, one: R, what: Failure) -> None:
        self.interrupt(what.replicaset)
        self.call_off(one, is_lost=True)
        self._draining.discard(one.rank)
        movement = self._movements.get(what.replicaset)
        try:
            if movement is not None:
                movement.lose(one)
            losses = self.controller.lose_replica(one.replica, what, self.now)
            if movement is not None:
                movement.after_loss()
            self.announce_all(what.replicaset, losses.moved)
            if movement is not None:
                movement.make_moves()
        except PolicyError as error:
            self.isolate(what.replicaset, error)

    def announce_all(self, replicaset: str, placed: Iterable[tuple[Request, Replica | None]]) -> None:
        """See `DriverServices`. Raises `PolicyError`."""
        moved = list(placed)
        self._notify_placed(replicaset, moved)
        movement = self._movements.get(replicaset)
        if movement is not None:
            movement.hand_offs.hold_back()
        for replica_id in sorted({replica.replica_id for _, replica in moved if replica is not None}):
            # If requests may move, moves may follow in this event, and must come before the step is formed.
            self.wake(self._replicas[replicaset][replica_id], at_once=movement is None)
        if any(replica is None for _, replica in moved):
            self._offer(self.controller.replicasets[replicaset])

    def swap_policy(self, change: PolicyChange) -> Swapped:
        """Replace a policy; see `policy_swap.swap_policy`. If this raises, the old policy stays."""
        self.interrupt(change.replicaset)
        movement = self._movements.get(change.replicaset)
        if movement is not None and change.layer is Layer.REPLICASET_SCHEDULER:
            swapped = self._swap_scheduler(change, movement)
        else:
            swapped = self.controller.swap_policy(change, self.now)
        self._read_declarations()
        choice = change.choice
        self.record(Swap(self.now, change.replicaset, change.layer.value, choice.policy, choice.params))
        self._notify_placed(change.replicaset, swapped.moved)
        self._go_on(change.replicaset)
        return swapped

    def _swap_scheduler(self, change: PolicyChange, movement: Movement[R]) -> Swapped:
        """Replace the scheduler of a replicaset whose requests move. If this raises, the old scheduler stays, and
        finds targets again for the prompts that are held back.
        """
        movement.hand_offs.recall()
        try:
            return self.controller.swap_policy(change, self.now)
        except Exception:
            self._go_on(change.replicaset)
            raise

    def _go_on(self, replicaset: str) -> None:
        """Find targets for the prompts that are held back, and wake all replicas."""
        movement = self._movements.get(replicaset)
        if movement is not None:
            try:
                movement.hand_offs.hold_back()
            except PolicyError as error:
                self.isolate(replicaset, error)
        for one in self._replicas[replicaset]:
            self.wake(one, at_once=True)

    def isolate(self, replicaset: str, error: PolicyError) -> None:
        """See `DriverServices`."""
        error.at_time(to_seconds(self.now))
        if not self._options.isolates_policies:
            raise error
        gate = self.controller.gate
        # An error of the admission policy concerns all replicasets, since this policy decides for all of them.
        concerned = self._replicas if gate is not None and gate.error is error else (replicaset,)
        for one in concerned:
            self._take_out_of_service(one, error)

    def _take_out_of_service(self, name: str, error: PolicyError) -> None:
        self.record(PolicyViolation(self.now, name, str(error)))
        self._backend.on_isolated(name, error)
        self.interrupt(name)
        replicaset = self.controller.replicasets[name]
        if name in self._movements:
            self._movements[name].clear()
        self.controller.take_out_of_service(replicaset, error, self.now)
        for one in self._replicas[name]:
            self.call_off(one, is_lost=not replicaset.computes(one.replica.replica_id))
            self._elasticity.goes_down(one)

    def call_off(self, one: R, *, is_lost: bool = False) -> None:
        """See `DriverServices`."""
        one.epoch += 1
        free_at = self._backend.cancel(one)
        one.free_at = NEVER if is_lost else free_at
        self._set_idle(one, is_idle=one.free_at != NEVER)

    def interrupt(self, replicaset: str) -> None:
        """See `DriverServices`."""
        if self.fast_forward is not None:
            self.fast_forward.interrupt_all(replicaset)

    def sync(self, replicaset: str) -> None:
        """See `DriverServices`."""
        if self.fast_forward is not None:
            self.fast_forward.sync_all(replicaset)

    def _sync_all(self) -> None:
        """Apply every ended step: the admission policy may read all replicas and send a request to any of them."""
        for name in self._replicas:
            self.sync(name)

    def touch(self, one: R) -> None:
        """See `DriverServices`."""
        if self.fast_forward is not None:
            self.fast_forward.interrupt(one, up_to_now=not 0 <= self._completing < one.rank)

    def catch_up(self, one: R) -> None:
        """See `DriverServices`."""
        if self.fast_forward is not None:
            self.fast_forward.catch_up(one, up_to_now=not 0 <= self._completing < one.rank)

    def blocks_taken(self, one: R) -> None:
        """See `DriverServices`."""
        if self.fast_forward is not None:
            self.fast_forward.shorten(one)

    def replica(self, replicaset: str, replica_id: int) -> R:
        """See `DriverServices`."""
        return self._replicas[replicaset][replica_id]

    def replicas_of(self, replicaset: str) -> Sequence[R]:
        """See `DriverServices`."""
        return self._replicas[replicaset]

    def wake_idle(self, replicaset: str) -> None:
        """See `DriverServices`."""
        for one in list(self._idle[replicaset].values()):
            self.wake(one, at_once=True)
        if len(self.controller.replicasets[replicaset].shared):
            self._offer(self.controller.replicasets[replicaset])

    def arrived(self, request: Request, one: R) -> None:
        """See `DriverServices`."""
        self._backend.on_placed(request, (one,))

    def transfer(self, transfer: Transfer[R]) -> None:
        """See `DriverServices`."""
        self._backend.on_transfer(transfer)

    def cancel_transfer(self, transfer: Transfer[R]) -> None:
        """See `DriverServices`."""
        self._backend.on_transfer_cancelled(transfer)

    def copy_tier(self, copy: TierCopy[R]) -> None:
        """See `DriverServices`."""
        self._backend.on_tier_copy(copy)

    def cancel_tier_copy(self, copy: TierCopy[R]) -> None:
        """See `DriverServices`."""
        self._backend.on_tier_copy_cancelled(copy)

    def settle(self, ended: Sequence[tuple[Request, EndReason]]) -> None:
        """See `DriverServices`."""
        self.controller.settle(ended, self.now)

    def _notify_placed(self, name: str, placed: Sequence[tuple[Request, Replica | None]]) -> None:
        replicas = self._replicas[name]
        for request, replica in placed:
            if request.state is _ENDED:  # the request ended after it was placed
                continue
            self._backend.on_placed(request, replicas if replica is None else (replicas[replica.replica_id],))

    def _read_declarations(self) -> None:
        """Determine in which replicasets a policy may read replicas other than the one that an event concerns. This
        follows from what the present policies declare.
        """
        replicasets = self.controller.replicasets.items()
        self._looks_at_arrivals = frozenset(name for name, one in replicasets if _looks_at_arrivals(one))
        self._looks_at_departures = frozenset(name for name, one in replicasets if one.listeners.departures)
        listening = frozenset(
            name
            for name, one in replicasets
            if one.listeners.across_replicas or (name in self._movements and one.listeners != NOBODY)
        )
        self._looks_if_waiting = frozenset(name for name in listening if not self._looks_always(name))
        """Replicasets whose policies listen to events, but are not called while a replica without waiting requests
        forms a step.
        """
        forming = frozenset(name for name in listening if not self._looks_never(name))
        self._syncs_forming = frozenset() if self.fast_forward is None else forming
        """Replicasets in which a policy that listens to events may read requests of other replicas while a replica
        forms a step. Before the step is formed, all ended steps of the replicaset are therefore applied.
        """

    def _looks_always(self, name: str) -> bool:
        replicaset = self.controller.replicasets[name]
        listeners, policies = replicaset.listeners, replicaset.policies
        if policies is None or name in self._movements or replicaset.feed is not None:
            return True
        if listeners.preemptions or listeners.moves or listeners.listen_to_each_step or listeners.listen_to_content:
            return True
        return policies.asks_listeners_each_step

    def _looks_never(self, name: str) -> bool:
        """Return True if no policy that listens to events is called while a step is formed, even if the step admits
        or drops waiting requests.
        """
        listeners = self.controller.replicasets[name].listeners
        return name in self._looks_if_waiting and not (listeners.admissions or listeners.departures)


def _looks_at_arrivals(replicaset: Replicaset) -> bool:
    """Return True if some policy may read running requests or loads when a request arrives."""
    listeners = replicaset.listeners
    hears = bool(listeners.arrivals or (listeners.step_runs and listeners.across_replicas))
    hears = hears or replicaset.feed is not None
    return traits_of(replicaset.scheduler).reads_load or hears


def _is_void(phase: Phase, payload: Any) -> bool:
    """Return True if an event is obsolete: for instance, its step or wake-up was cancelled, or the request that was to
    expire does not wait any more.
    """
    if phase is Phase.WAKE:
        return isinstance(payload, Alarm) and payload.is_void
    if phase is Phase.SCALING:
        return isinstance(payload, Start) and payload.is_void
    if phase is _STEP_END or phase is Phase.STAGE_END:
        return bool(payload[0].epoch != payload[2])
    if phase is Phase.PROGRAM:
        return isinstance(payload, tuple) and payload[0].activity != payload[1]
    if phase is _ADMISSION:
        return isinstance(payload, Deferral) and payload.is_void
    if phase is not Phase.EXPIRY or not isinstance(payload, Request):
        return False
    return payload.state is not _WAITING and payload.state is not _DEFERRED
