"""Driver of a controller's replicas: arrivals, steps, failures and policy changes, in one order for every backend.

What happens at one tick happens in the order of `Phase`: steps that came back, failures, pipeline stages, arrivals, requests
that admission had deferred, expiries, aborts, policy changes, scaling; then replicas form their next steps by rank, and idle ones pull from shared queues. A backend has the
clock: it lets the driver run up to a tick, and between two ticks nothing changes. So what was decided over an engine is
decided again over a simulator that is given the same events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop
from typing import Any, Generic

from sortedcontainers import SortedDict

from vajra_py.contract import Layer
from vajra_py.contract.observer import EndReason
from vajra_py.contract.policies import traits_of
from vajra_py.contract.views import ReplicaState
from vajra_py.errors import POLICY_EXCEPTIONS, PolicyError, VajraError
from vajra_py.plugins import ADMISSION, SCALER
from vajra_py.runtime.kv import BlockHashes
from vajra_py.runtime.records.input_log import (
    Abandonment,
    Abort,
    Control,
    Expiry,
    Failure,
    Gate,
    Input,
    PolicyChange,
    PolicyViolation,
    Readmission,
    ReplicaChange,
    Restart,
    Stall,
    Swap,
    WakeUp,
)
from vajra_py.runtime.requests.listeners import NOBODY
from vajra_py.runtime.requests.request import Request, RequestFacts, RequestState
from vajra_py.runtime.serving.admission import MAX_FRUITLESS, Deferral
from vajra_py.runtime.serving.alarms import Alarm, Sleeper, wake_tick
from vajra_py.runtime.serving.backend import Backend, FastForward, R
from vajra_py.runtime.serving.controller import ABORTED, EXPIRED, Controller
from vajra_py.runtime.serving.events import EventQueue, Phase
from vajra_py.runtime.serving.hand_off import HandOff, HandOffs, is_leaving
from vajra_py.runtime.serving.migration import Migrations
from vajra_py.runtime.serving.policy_swap import Swapped
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.serving.replicaset import Replicaset
from vajra_py.runtime.serving.scaling import Start, place_shared
from vajra_py.runtime.step.plan import StepPlan, StepResult
from vajra_py.runtime.support.clock import NEVER, to_seconds, to_ticks

# Module constants: an enum lookup costs more than a function call, and these are needed for every event.
_STEP_END, _FORM, _ARRIVAL, _ADMISSION = Phase.STEP_END, Phase.FORM, Phase.ARRIVAL, Phase.ADMISSION
_WAITING, _DEFERRED, _ENDED = RequestState.WAITING, RequestState.DEFERRED, RequestState.ENDED

_OF_POLICIES = (Phase.WAKE, Phase.SCALING)
"""Phases of events that policies ask for: they do not keep a run going that has no request left."""

MAX_FRUITLESS_WAKES = 100_000
"""Wake-ups in a row with nothing else happening after which the policy is held to be stuck."""

FormStep = Callable[[Replica, int], StepPlan | None]


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """Rules of one run.

    Attributes:
        check_every_steps: check conservation every so many steps; 0: never.
        expires: whether requests expire, and deferred ones are asked about again, by the clock; False: only when told.
        wakes: whether policies are woken when they asked to be, and scalers are asked; False: only what they decided is done, when told.
        serves: whether requests may come that no event announces, so that wake-ups go on when none is left.
        isolates_policies: whether a policy that breaks the contract takes its replicaset out of service, instead of ending
            the run.
    """

    check_every_steps: int = 0
    expires: bool = True
    wakes: bool = True
    serves: bool = False
    isolates_policies: bool = False


class Driver(Generic[R]):
    """Applies events to a controller's replicas. Not thread-safe.

    Its fields, and those of a `BackendReplica`, are written here alone; a backend calls the method that says what happens.

    Attributes:
        now: the present tick.
        until: up to where `run_until` goes.
        num_steps: steps launched so far.
        events: what will happen. Payloads by phase: `STEP_END` and `STAGE_END` (replica, anything or the plan, epoch),
            `FAILURE` a `Failure`, `Restart`, `Abandonment` or `Control`, `SCALING` a `Start`, a `ReplicaChange` or the name of a
            replicaset whose scaler is asked, `ADMISSION` a `Deferral`, the id of a request, or None for
            all that wait for a change, `EXPIRY` a request or an id, `ABORT` an id; those of `ARRIVAL` and `POLICY` are the
            backend's.
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
        """See `use`."""
        self.form_step: FormStep = Replica.next_plan
        """Forms a replica's next step; see `form_through`."""
        self._backend = backend
        self._options = options
        self._note = note
        self._replicas: dict[str, list[R]] = {name: [] for name in controller.replicasets}
        self._idle: dict[str, SortedDict[int, R]] = {name: SortedDict() for name in controller.replicasets}
        self._offers: set[str] = set()
        """Replicasets whose shared queue is offered to idle replicas at the end of this tick."""
        self._num_replicas = 0
        self._idlers: dict[int, Sleeper] = {}
        """By rank, those whose scheduler left them idle on purpose at some time."""
        self._num_fruitless_wakes = 0
        self._completing = -1
        """Rank of the replica whose step is being completed among the ends of this tick; -1: none."""
        self._formed_at = -1
        """Tick at which a step was formed last."""
        for one in replicas:
            name = one.replica.replicaset
            one.rank, self._num_replicas = self._num_replicas, self._num_replicas + 1
            self._replicas[name].append(one)
            if controller.replicasets[name].computes(one.replica.replica_id):
                self._idle[name][one.replica.replica_id] = one
            else:
                one.free_at, one.is_idle = NEVER, False
        self._draining: set[int] = set()
        """Ranks of replicas that go down when they have nothing left."""
        self._asks: set[str] = set()
        """Replicasets whose scaler is asked in this tick."""
        for name, replicaset in controller.replicasets.items():
            if replicaset.scaling is not None:
                self._ask_soon(name)
        controller.on_ended = backend.on_requests_ended
        self._hand_offs: dict[str, HandOffs[R]] = {
            name: HandOffs(one, one.hand_off, _Floor(self))
            for name, one in controller.replicasets.items()
            if one.hand_off is not None
        }
        self._migrations: dict[str, Migrations[R]] = {
            name: Migrations(one, self._hand_offs[name], _Floor(self), one.hand_off.migration)
            for name, one in controller.replicasets.items()
            if one.hand_off is not None
        }
        self._asks_timeless = False
        """Whether requests that were deferred until something changes are asked about in this tick."""
        if controller.gate is not None:
            controller.gate.on_room = self.ask_deferred
        if options.wakes:
            controller.alarms.connect(self._set_alarm)
        self._read_declarations()

    def use(self, fast_forward: FastForward[R]) -> None:
        """Let the backend launch several steps at once; their changes are applied before anything reads them."""
        self.fast_forward = fast_forward
        self._read_declarations()
        for name, replicaset in self.controller.replicasets.items():
            replicaset.sync = partial(fast_forward.sync_all, name)

    def form_through(self, form_step: FormStep) -> None:
        """Form steps by this function from now on, to measure them for instance; it returns what `Replica.next_plan` returns."""
        self.form_step = form_step

    # Time

    def advance_to(self, tick: int) -> None:
        """Set the clock to a later tick; events due before then happen when `run_until` is called."""
        self.now = tick

    def stop_now(self) -> None:
        """Stop the present `run_until` at the present tick."""
        self.until = min(self.until, self.now)

    def run_until(self, until: int) -> None:
        """Handle every event that is due up to a tick, each at its own.

        Raises `PolicyError` when a policy breaks the contract, unless that is isolated.
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
            elif not _is_void(phase, payload) and not (phase in _OF_POLICIES and self._is_over()):
                self.now = tick
                self._dispatch(phase, payload)

    def next_due(self) -> int:
        """Return the tick of the next event; `NEVER` when there is none."""
        heap = self.events.heap
        while heap and _is_void(heap[0][1], heap[0][4]):
            heappop(heap)
        return NEVER if not heap or self._is_over() else heap[0][0]

    def _dispatch(self, phase: Phase, payload: Any) -> None:
        if phase is _ARRIVAL:
            self._backend.on_arrival(payload)
        elif phase is Phase.STAGE_END:
            self._stage_ended(*payload)
        elif phase is Phase.FAILURE:
            self._fail(payload)
        elif phase is _ADMISSION:
            self._ask_again(payload)
        elif phase is Phase.EXPIRY:
            self._expire(payload)
        elif phase is Phase.ABORT:
            self.abort(payload)
        elif phase is Phase.WAKE:
            self._ring(payload)
        elif phase is Phase.SCALING:
            self._scale(payload)
        elif phase is Phase.TRANSFER:
            self._hand_offs[payload].transfers_due()
            self._end_drains(payload)
        else:
            self._backend.on_policy_change(payload)

    def _tell(self, entry: Input) -> None:
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
        """Submit a request; see `Controller.submit`. `payload`: the backend's own object for it."""
        replicaset = self.controller.replicaset_for(facts)
        if self.fast_forward is not None and replicaset.name in self._looks_at_arrivals:
            self.fast_forward.sync_all(replicaset.name)
        backend = self._backend
        try:
            request, replica = self.controller.submit(facts, replicaset, make_hashes, self.now, arrived_at)
        except PolicyError as error:
            taken_in = self.controller.find(facts.request_id)
            assert taken_in is not None
            backend.on_submitted(taken_in, payload)
            self._isolate(taken_in.replicaset, error)
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
        self._placed(request, replica)

    def _placed(self, request: Request, replica: Replica | None, *, at_once: bool = True) -> None:
        """Announce a request that was queued at a replica, or in the shared queue (None). `at_once`: see `_wake`."""
        backend, replicaset = self._backend, self.controller.replicasets[request.replicaset]
        if replica is not None:
            one = self._replicas[replicaset.name][replica.replica_id]
            backend.on_placed(request, (one,))
            if self.fast_forward is not None:
                self.fast_forward.on_queued(one)
            if replicaset.newly_held_back:
                self._hold_back(replicaset.name)
                return
            self._wake(one, at_once=at_once)
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
        """Ask the admission policy, in this tick, about every request that it has deferred until something changes."""
        if not self._asks_timeless:
            self._asks_timeless = True
            self.events.push(self.now, _ADMISSION, None, 1)  # after those whose time has come

    def _ask_again(self, what: Deferral | str | None) -> None:
        gate = self.controller.gate
        assert gate is not None
        if what is None:
            self._asks_timeless = False
            for request in gate.timeless():
                if request.state is _DEFERRED:  # the policy may have broken the contract meanwhile
                    self._ask_about(request)
            return
        known = self.controller.find(what) if isinstance(what, str) else what.request
        if known is None or known.state is not _DEFERRED:
            return
        self._tell(Readmission(self.now, known.request_id))
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
            self._isolate(request.replicaset, error)
            return
        if request.state is _ENDED:
            assert request.end_reason is not None
            self._backend.on_requests_ended(((request, request.end_reason),))
        elif request.state is _DEFERRED:
            self._await_decision(request)
        else:
            self._placed(request, replica, at_once=False)

    def _expire(self, what: Request | str) -> None:
        request = self.controller.find(what) if isinstance(what, str) else what
        if request is not None:
            self._tell(Expiry(self.now, request.request_id))
            self._abort_request(request, EndReason.EXPIRED, EXPIRED)

    def abort(self, request_id: str) -> None:
        """Abort a request now; one that holds blocks while a step is in flight ends when the step comes back."""
        request = self.controller.find(request_id)
        if request is not None:
            self._tell(Abort(self.now, request_id))
            self._abort_request(request, EndReason.ABORTED, ABORTED)

    def _abort_request(self, request: Request, reason: EndReason, detail: str) -> None:
        replica = self.controller.replica_of(request)
        one = None if replica is None else self._replicas[request.replicaset][replica.replica_id]
        if is_leaving(request) or request in self.controller.replicasets[request.replicaset].held_back:
            hand_offs = self._hand_offs[request.replicaset]
            hand_off = hand_offs.find(request)
            if hand_off is not None:
                self._interrupt(request.replicaset)
                hand_offs.end(hand_off, reason, detail)
                self._end_drains(request.replicaset)
                return
        if self.fast_forward is not None:
            if request.replicaset in self._looks_at_departures:
                self.fast_forward.sync_all(request.replicaset)
            if one is not None:
                self.fast_forward.interrupt(one)
        try:
            has_ended = self.controller.abort(request.request_id, reason, self.now, detail)
        except PolicyError as error:
            self._isolate(request.replicaset, error)
            return
        if has_ended and one is not None:
            if self._hand_offs:
                self._forget_hand_offs(one, ((request, reason),))
                self._move_on(one)
            if self._goes_down(one):
                return
            self._wake(one)

    # Steps

    def complete(self, one: R, plan: StepPlan, result: StepResult, *, at_once: bool = True) -> None:
        """Complete a step that came back now. `at_once`: see `_wake`."""
        if one.free_at == NEVER and one.num_stages == 1:
            one.free_at = self.now
        replica, outer = one.replica, self._completing
        if at_once or outer >= 0:
            self._completing = one.rank
        if replica.replicaset in self._looks_at_departures and self.fast_forward is not None:
            self.fast_forward.sync_before(one)
        try:
            ended = replica.complete_step(plan, result, self.now)
            if ended:
                self.controller.settle(ended, self.now)
            if self._hand_offs:
                self._forget_hand_offs(one, ended)
                self._move_on(one, has_freed=bool(ended or plan.preempted))
        except PolicyError as error:
            self._isolate(replica.replicaset, error)
            return
        finally:
            self._completing = outer
        every = self._options.check_every_steps
        if every and self.num_steps % every == 0:
            self.controller.check_conservation()
        if self._draining and self._goes_down(one):
            return
        self._wake(one, at_once=at_once)

    def _stage_ended(self, one: R, plan: StepPlan, _: int) -> None:
        if one.free_at == NEVER:
            one.free_at = self.now
        one.replica.first_stage_completed(plan)
        self._wake(one)

    def count_repeats(self, num_steps: int) -> None:
        """Count steps that a backend launched along with another one and that have ended."""
        self.num_steps += num_steps

    def end_run_at(self, one: R, tick: int) -> None:
        """Make the step in flight the last of those launched together: it ends at `tick`, and the announced end is void."""
        one.epoch += 1
        one.free_at = tick

    def freed(self, one: R) -> None:
        """Free a replica whose called-off step has come back now."""
        one.free_at = self.now
        self._set_idle(one, is_idle=True)

    def _wake(self, one: R, *, at_once: bool = True) -> None:
        """Let the replica form a step after everything else of this tick, unless it is busy.

        `at_once` is False when something of this tick is being handled that the event queue no longer shows.
        """
        if one.form_pending or one.free_at > self.now or one.replica.num_in_flight >= one.num_stages:
            return
        heap = self.events.heap
        # Nothing else of this tick is left to wait for.
        if at_once and one.replica.replicaset not in self._syncs_forming and (not heap or heap[0][0] > self.now):
            self._start(one)
            return
        one.form_pending = True
        self.events.push(self.now, _FORM, one, one.rank)

    def _offer(self, replicaset: Replicaset) -> None:
        if replicaset.name not in self._offers:
            self._offers.add(replicaset.name)
            self.events.push(self.now, _FORM, replicaset.name, self._num_replicas)  # after the replicas of this tick

    def _form(self, what: R | str) -> None:
        name = what if isinstance(what, str) else what.replica.replicaset
        if name in self._syncs_forming and self.fast_forward is not None:
            self.fast_forward.sync_all(name)  # its policies may read requests of other replicas
            rank = self._num_replicas if isinstance(what, str) else what.rank
            heap = self.events.heap
            if heap and heap[0][:3] < (self.now, _FORM, rank):  # a replica of lower rank has just become free
                self.events.push(self.now, _FORM, what, rank)
                return
        if not isinstance(what, str):
            what.form_pending = False
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

    def _start(self, one: R) -> None:
        self._formed_at = self.now
        try:
            plan = self.form_step(one.replica, self.now)
            if one.replica.builder.dropped:
                dropped = one.replica.take_dropped()
                self.controller.settle(dropped, self.now)
                self._forget_hand_offs(one, dropped)
            if one.replica.builder.loads:
                self._hand_offs[one.replica.replicaset].load(one)
        except PolicyError as error:
            self._isolate(one.replica.replicaset, error)
            return
        if plan is None:  # steps may be in later stages; the first stage is free
            if not one.is_idle:
                self._set_idle(one, is_idle=True)
            if self._draining and self._goes_down(one):
                return
            if one.replica.builder.idle_at is not None:
                self._ask_again_at(one, one.replica.builder.idle_at)
            hand_offs = self._hand_offs.get(one.replica.replicaset) if self._hand_offs else None
            if hand_offs is not None and hand_offs.nothing_ran(one):
                self._wake(one, at_once=False)
            return
        if one.is_idle:
            self._set_idle(one, is_idle=False)
        self.num_steps += 1
        one.free_at = self._backend.launch(one, plan)

    def _set_idle(self, one: R, *, is_idle: bool) -> None:
        if is_idle is one.is_idle:
            return
        one.is_idle = is_idle
        idle = self._idle[one.replica.replicaset]
        if is_idle:
            idle[one.replica.replica_id] = one
        else:
            del idle[one.replica.replica_id]

    # KV goes from one replica to another

    def _hold_back(self, name: str) -> None:
        """Look for targets of requests whose prompt waits for blocks of another replica."""
        try:
            self._hand_offs[name].hold_back()
        except PolicyError as error:
            self._isolate(name, error)

    def _forget_hand_offs(self, one: R, ended: Sequence[tuple[Request, EndReason]]) -> None:
        """Requests of a replica have ended by themselves."""
        hand_offs = self._hand_offs.get(one.replica.replicaset)
        if hand_offs is not None:
            migrations = self._migrations[one.replica.replicaset]
            for request, _ in ended:
                migrations.gone(request)
                hand_offs.gone(request)

    def _ask_for_moves(self, name: str) -> None:
        """Let the replicaset scheduler move requests, if it moves any."""
        replicaset = self.controller.replicasets[name]
        if not replicaset.moves_requests or replicaset.out_of_service or name not in self._migrations:
            return
        try:
            for move in replicaset.asked_moves(to_seconds(self.now)):
                self._migrations[name].move(move)
        except PolicyError as error:
            self._isolate(name, error)

    def _move_on(self, one: R, *, has_freed: bool = True) -> None:
        """Let requests leave a replica that is between two steps, and come to it. `has_freed`: whether blocks may have become free."""
        hand_offs = self._hand_offs.get(one.replica.replicaset)
        if hand_offs is None:
            return
        hand_offs.at_boundary(one)
        for request in one.replica.take_newly_held():
            hand_offs.begin(request, one)
        if has_freed:
            hand_offs.freed(one, at_boundary=True)
        self._end_drains(one.replica.replicaset)

    # Policies are woken

    def _ask_again_at(self, one: R, time_s: float) -> None:
        """The replica's scheduler leaves it idle on purpose until then."""
        if not self._options.wakes:
            return
        replica = one.replica
        sleeper = self._idlers.get(one.rank)
        if sleeper is None:
            name, layer = replica.parts.policy_name, Layer.REPLICA_SCHEDULER.value
            sleeper = self._idlers[one.rank] = Sleeper(replica.replicaset, layer, name, replica.replica_id)
        self.controller.alarms.set(sleeper, None, wake_tick(time_s))

    def _is_over(self) -> bool:
        """True if nothing but wake-ups of policies is left, with no request to serve and none to come."""
        return not self._options.serves and not self.controller.num_alive and self._only_wakes_left()

    def _only_wakes_left(self) -> bool:
        return all(event[1] in _OF_POLICIES for event in self.events.heap)

    def _set_alarm(self, alarm: Alarm) -> None:
        """Schedule a wake-up; what is due now comes a tick later once steps are formed, before which a replay would let it happen."""
        earliest = self.now + 1 if self._formed_at == self.now else self.now
        self.events.push(max(earliest, alarm.tick), Phase.WAKE, alarm)

    def _ring(self, what: Alarm | WakeUp) -> None:
        """Wake a policy: at the time that it asked for, or in a replay when it was woken."""
        if isinstance(what, WakeUp):
            self._wake_policy(what, self._policy_at(what))
            return
        sleeper = what.sleeper
        self.controller.alarms.rang(what)
        if sleeper.slot == SCALER.key:
            self._wake_scaler(sleeper, what.key or "")
            return
        entry = WakeUp(self.now, sleeper.replicaset, sleeper.slot, sleeper.replica_id, what.key)
        if self._is_over() or not self._is_in_force(sleeper, entry):
            return  # another policy may have taken its place
        try:
            sleeper.count(self.now)
            self._check_fruitless(sleeper)
        except PolicyError as error:
            if sleeper.slot == ADMISSION.key and self.controller.gate is not None:
                self.controller.gate.error = error
            self._isolate(sleeper.replicaset, error)
            return
        self._wake_policy(entry, sleeper.policy)

    def _is_in_force(self, sleeper: Sleeper, entry: WakeUp) -> bool:
        if entry.slot == ADMISSION.key:
            return sleeper.policy is self._policy_at(entry)
        is_fixed = self.controller.replicasets[entry.replicaset].policies is None
        return entry.key is None or is_fixed or sleeper.policy is self._policy_at(entry)

    def _policy_at(self, entry: WakeUp) -> object:
        if entry.slot == ADMISSION.key:
            return None if self.controller.gate is None else self.controller.gate.policy
        policies = self.controller.replicasets[entry.replicaset].policies
        assert policies is not None
        return policies.layer(Layer(entry.slot)).made[entry.replica_id or 0]

    def _check_fruitless(self, sleeper: Sleeper) -> None:
        """Raise `PolicyError` when wake-ups are all that happens, with requests that wait, and nothing comes of them."""
        is_all = self._only_wakes_left() and not any(one.num_in_flight for one in self.controller.replicas())
        self._num_fruitless_wakes = self._num_fruitless_wakes + 1 if is_all and not self._options.serves else 0
        if self._num_fruitless_wakes > MAX_FRUITLESS_WAKES:
            stall = self.controller.stall(self.now)
            message = f"was woken {MAX_FRUITLESS_WAKES:,} times in a row, and nothing came of it"
            raise PolicyError(sleeper.policy_name, f"{message}. {stall}" if stall is not None else message)

    def _wake_admission(self, entry: WakeUp) -> None:
        """Wake the admission policy, and ask it about what it has deferred until then."""
        gate = self.controller.gate
        if gate is None or gate.error is not None:
            return
        self._tell(entry)
        for replicaset in self.controller.replicasets.values():
            replicaset.sync()
        try:
            gate.wake(entry.key or "", to_seconds(self.now))
        except PolicyError as error:
            self._isolate("", error)
            return
        if gate.waits_for_change:
            self.ask_deferred()

    def _wake_policy(self, entry: WakeUp, policy: object) -> None:
        if entry.slot == ADMISSION.key:
            self._wake_admission(entry)
            return
        name, layer = entry.replicaset, Layer(entry.slot)
        replicaset = self.controller.replicasets[name]
        if replicaset.out_of_service:
            return
        self._tell(entry)
        self._interrupt(name)
        if entry.key is not None:
            try:
                _call_on_wake(policy, replicaset, entry)
            except PolicyError as error:
                self._isolate(name, error)
                return
        if layer is Layer.REPLICA_SCHEDULER:
            self._wake(self._replicas[name][entry.replica_id or 0])
            return
        if layer is Layer.REQUEST_PRIORITIZER:
            for one in self._replicas[name]:
                one.replica.running_set.read_keys_again()
        if layer is Layer.REPLICASET_SCHEDULER and name in self._hand_offs:
            self._hand_offs[name].place_again()
            self._ask_for_moves(name)
        for one in list(self._idle[name].values()):
            self._wake(one)
        if len(replicaset.shared):
            self._offer(replicaset)

    # Replicas start and stop as scalers ask

    def _ask_soon(self, name: str) -> None:
        """Ask a replicaset's scaler later in this tick; the first time, tell observers the state of each replica."""
        if name not in self._asks:
            self._asks.add(name)
            self.events.push(self.now, Phase.SCALING, name)

    def _scale(self, what: Start | ReplicaChange | str) -> None:
        if not isinstance(what, str):
            self._change(what.change if isinstance(what, Start) else what)
            return
        self._asks.discard(what)
        self.controller.tell_states_once(self.controller.replicasets[what], self.now)
        self._ask_scaler(what)

    def _wake_scaler(self, sleeper: Sleeper, key: str) -> None:
        replicaset = self.controller.replicasets[sleeper.replicaset]
        if self._is_over() or replicaset.scaling is None or replicaset.scaling.is_broken:
            return
        try:
            sleeper.count(self.now)
            self._check_fruitless(sleeper)
            replicaset.scaling.on_wake(key, self.now)
        except PolicyError as error:
            self._isolate(sleeper.replicaset, error)
            return
        self._ask_soon(sleeper.replicaset)

    def _ask_scaler(self, name: str) -> None:
        scaling = self.controller.replicasets[name].scaling
        if scaling is None or scaling.is_broken or not self._options.wakes:
            return
        if self.fast_forward is not None:
            self.fast_forward.sync_all(name)
        try:
            changes = scaling.ask(self.now)
        except PolicyError as error:
            self._isolate(name, error)
            return
        for change in changes:
            self._change(change)

    def _change(self, change: ReplicaChange) -> None:
        """Set the state of a replica now, and what follows from it."""
        self._tell(change)
        name, state = change.replicaset, ReplicaState(change.state)
        one, scaling = self._replicas[name][change.replica_id], self.controller.replicasets[name].scaling
        self._interrupt(name)
        try:
            if state is ReplicaState.DRAINING:
                self._drain(one)
            else:
                self.controller.change_replica(one.replica, state, self.now)
            if state is ReplicaState.UP:
                self._call_off(one)
                self._move_on(one)
                self._bind_shared(name)
        except PolicyError as error:
            self._isolate(name, error)
            return
        if state is ReplicaState.STARTING and scaling is not None and self._options.wakes:
            start = scaling.begin_start(change.replica_id, self.now)
            self.events.push(start.change.tick, Phase.SCALING, start)
        elif state is ReplicaState.UP:
            self._wake(one)
            self._ask_soon(name)
        elif state is ReplicaState.DOWN:
            self._call_off(one, is_lost=True)

    def _bind_shared(self, name: str) -> None:
        """Place what waits in the shared queue where prompts wait for blocks of their target. Raises `PolicyError`.

        A replica that pulls a prompt would compute it without such blocks, and requests with and without them could wait for each other.
        """
        replicaset = self.controller.replicasets[name]
        if replicaset.hand_off is not None and replicaset.hand_off.reserves_first and len(replicaset.shared):
            self._wake_placed(name, place_shared(replicaset, self.now))
            self._hand_offs[name].hold_back()

    def _drain(self, one: R) -> None:
        """Let a replica take no more requests; those that have not begun go elsewhere. Raises `PolicyError`."""
        name = one.replica.replicaset
        hand_offs = self._hand_offs.get(name)
        if hand_offs is not None:
            hand_offs.recall_from(one)
        moved = self.controller.change_replica(one.replica, ReplicaState.DRAINING, self.now)
        self._draining.add(one.rank)
        self._wake_placed(name, moved)
        if hand_offs is not None:
            hand_offs.divert(one)
        self._goes_down(one)

    def _goes_down(self, one: R) -> bool:
        """Let a draining replica go down if it has no request left; return True if it does."""
        if one.rank not in self._draining or not one.replica.is_empty:
            return False
        hand_offs = self._hand_offs.get(one.replica.replicaset)
        if hand_offs is not None and hand_offs.involves(one):
            return False
        self._draining.discard(one.rank)
        self.controller.change_replica(one.replica, ReplicaState.DOWN, self.now)
        self._call_off(one, is_lost=True)
        self._ask_soon(one.replica.replicaset)
        return True

    def _end_drains(self, name: str) -> None:
        """Let the draining replicas of a replicaset go down that have no request left."""
        if self._draining:
            for one in self._replicas[name]:
                self._goes_down(one)

    # Failures and changes of policies

    def _fail(self, what: Failure | Restart | Abandonment | Control) -> None:
        self._tell(what)
        if self.controller.gate is not None and self.controller.gate.waits_for_change:
            self.ask_deferred()
        if isinstance(what, Control):
            self._control(what)
            return
        if isinstance(what, Abandonment):
            self.controller.abandon(self.controller.replicasets[what.replicaset], what.detail, self.now)
            return
        one, replicaset = self._replicas[what.replicaset][what.replica_id], self.controller.replicasets[what.replicaset]
        if replicaset.scaling is not None:
            is_lost, state = what.replica_id in replicaset.lost, replicaset.state_of(what.replica_id)
            if (not is_lost and state is ReplicaState.DOWN) or is_lost is isinstance(what, Failure):
                return  # nothing runs there that could fail, or it has not failed
            self._ask_soon(what.replicaset)
        if isinstance(what, Failure):
            self._lose(one, what)
            return
        self.controller.restore_replica(one.replica, self.now)
        self._call_off(one)
        if self._hand_offs:
            self._move_on(one)
            self._ask_for_moves(what.replicaset)
        self._wake(one)

    def _control(self, what: Control) -> None:
        self._interrupt(what.replicaset)
        if isinstance(what, Stall):
            stall = self.controller.stall(self.now)
            if stall is not None:
                self._isolate(what.replicaset, stall)
            return
        one = self._replicas[what.replicaset][what.replica_id]
        if isinstance(what, Gate):
            one.replica.set_gate(what)
        else:
            hand_offs = self._hand_offs.get(what.replicaset)
            if hand_offs is not None:
                self._migrations[what.replicaset].lose(one)
                hand_offs.lose(one)
            try:
                self.controller.reset_cache(one.replica, self.now)
                if hand_offs is not None:
                    hand_offs.place_again()
            except PolicyError as error:
                self._isolate(what.replicaset, error)
                return
        self._wake(one)

    def _lose(self, one: R, what: Failure) -> None:
        self._interrupt(what.replicaset)
        self._call_off(one, is_lost=True)
        self._draining.discard(one.rank)
        hand_offs = self._hand_offs.get(what.replicaset)
        if hand_offs is not None:
            self._migrations[what.replicaset].lose(one)
            hand_offs.lose(one)
        try:
            losses = self.controller.lose_replica(one.replica, what, self.now)
            if hand_offs is not None:
                hand_offs.place_again()
        except PolicyError as error:
            self._isolate(what.replicaset, error)
            return
        self._wake_placed(what.replicaset, losses.moved)
        self._ask_for_moves(what.replicaset)

    def _wake_placed(self, name: str, moved: Sequence[tuple[Request, Replica | None]]) -> None:
        """Wake the replicas that may run requests that were placed anew."""
        self._tell_placed(name, moved)
        for replica_id in sorted({replica.replica_id for _, replica in moved if replica is not None}):
            self._wake(self._replicas[name][replica_id])
        if any(replica is None for _, replica in moved):
            self._offer(self.controller.replicasets[name])

    def swap_policy(self, change: PolicyChange) -> Swapped:
        """Put another policy in force; see `policy_swap.swap_policy`. Nothing has changed when it raises."""
        self._interrupt(change.replicaset)
        hand_offs = self._hand_offs.get(change.replicaset)
        if hand_offs is not None and change.layer is Layer.REPLICASET_SCHEDULER:
            hand_offs.recall()
        swapped = self.controller.swap_policy(change, self.now)
        self._read_declarations()
        choice = change.choice
        self._tell(Swap(self.now, change.replicaset, change.layer.value, choice.policy, choice.params))
        self._tell_placed(change.replicaset, swapped.moved)
        if hand_offs is not None:
            self._hold_back(change.replicaset)
        for one in self._replicas[change.replicaset]:
            self._wake(one)
        return swapped

    def _isolate(self, name: str, error: PolicyError) -> None:
        """Isolate the replicaset of a policy that broke the contract; raises the error unless policies are isolated."""
        if not self._options.isolates_policies:
            raise error
        gate = self.controller.gate
        concerned = self._replicas if gate is not None and gate.error is error else (name,)  # the gate serves them all
        for one in concerned:
            self._take_out_of_service(one, error)

    def _take_out_of_service(self, name: str, error: PolicyError) -> None:
        self._tell(PolicyViolation(self.now, name, str(error)))
        self._backend.on_isolated(name, error)
        self._interrupt(name)
        replicaset = self.controller.replicasets[name]
        if name in self._hand_offs:
            self._migrations[name].clear()
            self._hand_offs[name].clear()
        self.controller.take_out_of_service(replicaset, error, self.now)
        for one in self._replicas[name]:
            self._call_off(one, is_lost=not replicaset.computes(one.replica.replica_id))
            self._goes_down(one)

    def _call_off(self, one: R, *, is_lost: bool = False) -> None:
        """Call off the steps that the replica executes."""
        one.epoch += 1
        free_at = self._backend.cancel(one)
        one.free_at = NEVER if is_lost else free_at
        self._set_idle(one, is_idle=one.free_at != NEVER)

    def _interrupt(self, name: str) -> None:
        if self.fast_forward is not None:
            self.fast_forward.interrupt_all(name)

    def _tell_placed(self, name: str, placed: Sequence[tuple[Request, Replica | None]]) -> None:
        replicas = self._replicas[name]
        for request, replica in placed:
            self._backend.on_placed(request, replicas if replica is None else (replicas[replica.replica_id],))

    def _read_declarations(self) -> None:
        """Read from the policies in force which of them may look at other replicas than the one that an event concerns."""
        replicasets = self.controller.replicasets.items()
        self._looks_at_arrivals = frozenset(name for name, one in replicasets if _looks_at_arrivals(one))
        self._looks_at_departures = frozenset(name for name, one in replicasets if one.listeners.departures)
        listening = frozenset(name for name, one in replicasets if one.listeners != NOBODY)
        self._syncs_forming = frozenset() if self.fast_forward is None else listening
        """Replicasets that are synchronised before a replica forms a step: a policy that listens may hold any of its requests."""


class _Floor(Generic[R]):
    """`HandOffDriver` over a driver."""

    def __init__(self, driver: Driver[R]) -> None:
        self._driver = driver

    @property
    def now(self) -> int:
        """The present tick."""
        return self._driver.now

    def replica(self, replicaset: str, replica_id: int) -> R:
        """See `HandOffDriver`."""
        return self._driver._replicas[replicaset][replica_id]

    def touch(self, one: R) -> None:
        """See `HandOffDriver`."""
        driver = self._driver
        if driver.fast_forward is not None:
            ends_later = 0 <= driver._completing < one.rank
            driver.fast_forward.interrupt(one, up_to_now=not ends_later)

    def wake(self, one: R) -> None:
        """See `HandOffDriver`."""
        self._driver._wake(one, at_once=False)

    def announce(self, request: Request, one: R | None) -> None:
        """See `HandOffDriver`."""
        self._driver._placed(request, None if one is None else one.replica, at_once=False)

    def placed(self, request: Request, one: R) -> None:
        """See `HandOffDriver`."""
        self._driver._backend.on_placed(request, (one,))

    def copy(self, hand_off: HandOff[R]) -> None:
        """See `HandOffDriver`."""
        assert hand_off.target is not None
        self._driver._backend.on_transfer(hand_off.request, hand_off.source, hand_off.target)

    def settle(self, ended: Sequence[tuple[Request, EndReason]]) -> None:
        """See `HandOffDriver`."""
        self._driver.controller.settle(ended, self._driver.now)

    def schedule(self, tick: int, replicaset: str) -> None:
        """See `HandOffDriver`."""
        self._driver.events.push(max(tick, self._driver.now), Phase.TRANSFER, replicaset)


def _looks_at_arrivals(replicaset: Replicaset) -> bool:
    """Return True if some policy may look at running requests or loads when a request arrives."""
    return traits_of(replicaset.scheduler).reads_load or bool(replicaset.listeners.arrivals)


def _call_on_wake(policy: object, replicaset: Replicaset, entry: WakeUp) -> None:
    """Tell a policy that its time has come. Raises `PolicyError`."""
    on_wake = getattr(policy, "on_wake", None)
    if on_wake is None:
        return
    try:
        on_wake(entry.key, to_seconds(entry.tick))
    except VajraError:
        raise
    except POLICY_EXCEPTIONS as error:
        policies = replicaset.policies
        name = type(policy).__name__ if policies is None else policies.name(Layer(entry.slot))
        raise PolicyError.caused_by(name, error) from error


def _is_void(phase: Phase, payload: Any) -> bool:
    """Return True if an event is obsolete: its step was called off, or its request was scheduled before it expired."""
    if phase is Phase.WAKE:
        return isinstance(payload, Alarm) and payload.is_void
    if phase is Phase.SCALING:
        return isinstance(payload, Start) and payload.is_void
    if phase is _STEP_END or phase is Phase.STAGE_END:
        return bool(payload[0].epoch != payload[2])
    if phase is _ADMISSION:
        return isinstance(payload, Deferral) and payload.is_void
    if phase is not Phase.EXPIRY or not isinstance(payload, Request):
        return False
    return payload.state is not _WAITING and payload.state is not _DEFERRED
