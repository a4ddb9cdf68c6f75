"""Accept requests and account for each until it ends.

Invariant, at every step: submitted = deferred + waiting + running + held (`RequestState.HELD`) + ended, and every
request ends exactly once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from vajra_py.contract import Accept, Defer, Refuse, ReplicaState
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.contract.programs import ProgramEnd
from vajra_py.errors import ConfigError, PolicyError, Problem, place_of_definition
from vajra_py.runtime.kv import BlockHashes
from vajra_py.runtime.records.emitted import PolicyDiary
from vajra_py.runtime.records.input_log import Failure, PolicyChange
from vajra_py.runtime.requests.lifecycle import end_request
from vajra_py.runtime.requests.programs import Program, Programs
from vajra_py.runtime.requests.rejections import OUT_OF_SERVICE
from vajra_py.runtime.requests.request import Request, RequestFacts, RequestState
from vajra_py.runtime.serving.admission import AdmissionGate, Deferral
from vajra_py.runtime.serving.alarms import AlarmClock
from vajra_py.runtime.serving.policy_swap import Swapped, swap_policy
from vajra_py.runtime.serving.recovery import Losses, abandon, lose_replica, reset_cache, take_out_of_service
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.serving.replicaset import Replicaset
from vajra_py.runtime.serving.scaling import place_anew
from vajra_py.runtime.support.clock import to_seconds

ABORTED = "taken back by the client"
EXPIRED = "waited longer than it allows"
"""Detail of requests that expire; `ABORTED`: detail of requests that are aborted."""


class Controller:
    """The replicasets of a run, and an account of every request."""

    def __init__(
        self,
        replicasets: Mapping[str, Replicaset],
        select: Callable[[RequestFacts], str],
        observers: Sequence[Observer] = (),
        *,
        diary: PolicyDiary | None = None,
        alarms: AlarmClock | None = None,
        programs: Programs | None = None,
    ) -> None:
        self.replicasets = dict(replicasets)
        self.select = select
        """Function that returns the name of the replicaset that serves a request. Raises `ConfigError` if none does."""
        self._observers = observers
        self.diary = PolicyDiary() if diary is None else diary
        """Figures that the policies emit, and the names of policies that read unknown output lengths."""
        self.gate: AdmissionGate | None = None
        """Admission policy and the requests that it has deferred; None: all requests are accepted."""
        self.alarms = AlarmClock() if alarms is None else alarms
        """Wake-ups that policies set."""
        self.num_submitted = 0
        self.index_of: Callable[[RequestFacts], int] | None = None
        """Function that returns a request's index, for a controller that serves only a part of a run's requests; None:
        the index is the number of requests submitted before.
        """
        self.num_ended: Counter[EndReason] = Counter()
        self.on_ended: Callable[[Sequence[tuple[Request, EndReason]]], None] | None = None
        """Callback for requests that have ended, except those rejected during `submit` or `ask_again`; each request is
        passed once, before any policy is notified of its end.
        """
        self.programs = Programs() if programs is None else programs
        """Programs that have not ended."""
        self._alive: dict[str, tuple[Request, Replicaset]] = {}

    def watch(self, observers: Sequence[Observer]) -> None:
        """Notify these observers of all events; to be called before the first request."""
        self._observers = observers
        for replicaset in self.replicasets.values():
            replicaset.watch(observers)

    def unwatch(self, observers: Sequence[Observer]) -> None:
        """Stop notifying these observers; not to be called while one of them is being notified."""
        self.watch([one for one in self._observers if not any(one is other for other in observers)])

    @property
    def num_alive(self) -> int:
        """Number of requests, deferred ones included, that have not ended or whose end is not settled (`settle`)."""
        return len(self._alive)

    def alive(self) -> Sequence[Request]:
        """Return the requests that have not ended, including deferred ones, in order of submission. Unlike in
        `num_alive`, requests whose end is not settled yet are left out.
        """
        entries = list(self._alive.values())  # copy in one operation: other threads may call this method
        return [request for request, _ in entries if request.state is not RequestState.ENDED]

    def find(self, request_id: str) -> Request | None:
        """Return the request with this id that has not ended; None if there is none."""
        entry = self._alive.get(request_id)
        return None if entry is None else entry[0]

    def replica_of(self, request: Request) -> Replica | None:
        """Return the replica to which a request that has not ended is bound; None if it is deferred or in a shared
        queue.
        """
        if request.replica_id < 0:
            return None
        _, replicaset = self._alive[request.request_id]
        return replicaset.replicas[request.replica_id]

    def replicas(self) -> Sequence[Replica]:
        """Return every replica of every replicaset."""
        return [replica for replicaset in self.replicasets.values() for replica in replicaset.replicas]

    def only_replica(self) -> Replica:
        """Return the only replica of a run. Raises `ConfigError` if there are several."""
        replicas = self.replicas()
        if len(replicas) != 1:
            sizes = {name: len(one.replicas) for name, one in self.replicasets.items()}
            raise ConfigError(Problem("replicasets", f"there is more than one replica (got {sizes})", "Allowed: one"))
        return replicas[0]

    def num_blocks_of(self, replicaset: str, replica_id: int) -> int:
        """Return the number of KV blocks of a replica."""
        return self.replicasets[replicaset].replicas[replica_id].memory.num_blocks

    def replicaset_for(self, facts: RequestFacts) -> Replicaset:
        """Return the replicaset that serves a request. Raises `ConfigError` if none does."""
        return self.replicasets[self.select(facts)]

    def submit(
        self,
        facts: RequestFacts,
        replicaset: Replicaset,
        make_hashes: Callable[[int], BlockHashes | None],
        now: int,
        arrived_at: float | None = None,
    ) -> tuple[Request, Replica | None]:
        """Submit a request; it is queued or deferred, or it ends at once with a reason (`request.end_reason`,
        `request.detail`).

        `replicaset` is the result of `replicaset_for`. `make_hashes` returns the hashes of the prompt's blocks, given a
        block size. `arrived_at` is the time in seconds at which the client sent the request, if earlier than `now` (a
        busy engine accepts requests later). Returns the request and the replica to which it is bound (None: shared
        queue, deferred, or ended).
        """
        seconds = to_seconds(now)
        request = self.new_request(facts, replicaset, seconds if arrived_at is None else arrived_at)
        self.num_submitted += 1
        if facts.request_id in self._alive:
            detail: str | None = "another request with this id is being served"
        else:
            # Register the request before policies are called: if a policy raises, the requests in `_alive` are ended.
            self._alive[facts.request_id] = (request, replicaset)
            detail = replicaset.why_never(request, seconds)
            if facts.program_id:
                detail = self.programs.why_never(facts) or detail
                self.programs.join(request)
            if detail is None:
                if self.gate is not None:
                    return self._at_gate(self.gate, Deferral(request, facts, make_hashes), now)
                detail = replicaset.why_full(request)
            if detail is not None:
                del self._alive[facts.request_id]
        if detail is not None:
            end_request(request, EndReason.REJECTED, detail, seconds)
            self._count_end(request, EndReason.REJECTED, seconds)
            for observer in self._observers:
                observer.on_arrival(request, seconds)
                observer.on_ended(request, EndReason.REJECTED, detail, seconds)
            return request, None
        request.hashes = make_hashes(replicaset.bounds.block_size)
        for observer in self._observers:
            observer.on_arrival(request, seconds)
        return request, replicaset.accept(request, now)

    # The admission policy

    def _at_gate(self, gate: AdmissionGate, deferral: Deferral, now: int) -> tuple[Request, Replica | None]:
        """Call the admission policy for an arriving request that some replica can run."""
        request, seconds = deferral.request, to_seconds(now)
        _, replicaset = self._alive[request.request_id]
        gate.num_fruitless = 0
        request.hashes = deferral.make_hashes(replicaset.bounds.block_size)
        for observer in self._observers:
            observer.on_arrival(request, seconds)
        return request, self._decide(gate, deferral, now)

    def ask_again(self, request: Request, now: int) -> Replica | None:
        """Call the admission policy again for a deferred request; return the replica to which the request is bound,
        None if there is none.
        """
        gate = self.gate
        assert gate is not None
        deferral = gate.deferral_of(request)
        _, replicaset = self._alive[request.request_id]
        detail = replicaset.why_never(request, to_seconds(now))
        if detail is not None:
            gate.forget(request, to_seconds(now))
            self._turn_away(request, detail, now)
            return None
        return self._decide(gate, deferral, now)

    def _decide(self, gate: AdmissionGate, deferral: Deferral, now: int) -> Replica | None:
        request, seconds = deferral.request, to_seconds(now)
        decision = gate.ask(request, seconds)
        gate.forget(request, seconds)
        _, replicaset = self._alive[request.request_id]
        detail = None
        if isinstance(decision, Accept):
            replicaset = self.replicasets[decision.replicaset or replicaset.name]
            detail = self._why_not_there(gate, deferral, replicaset, seconds)
        if gate.note(request, decision, seconds):
            for observer in self._observers:
                observer.on_admission_decision(request, gate.name, decision, seconds)
        if isinstance(decision, Defer):
            gate.keep(deferral, decision, now)
            gate.num_fruitless = gate.num_fruitless + 1 if len(gate) == len(self._alive) else 0
            return None
        gate.num_fruitless = 0
        if isinstance(decision, Refuse):
            self._turn_away(request, gate.detail_of(decision), now)
            return None
        request.replicaset = replicaset.name
        self._alive[request.request_id] = (request, replicaset)
        detail = detail or replicaset.why_full(request)
        if detail is not None:
            self._turn_away(request, detail, now)
            return None
        return replicaset.accept(request, now)

    def _why_not_there(self, gate: AdmissionGate, deferral: Deferral, replicaset: Replicaset, now: float) -> str | None:
        """Adapt a request to the replicaset chosen by the admission policy; return the reason why that replicaset
        cannot run it, None if it can.
        """
        request, facts = deferral.request, deferral.facts
        if replicaset.name == request.replicaset:
            return None
        request.max_tokens = replicaset.bounds.output_limit(facts.num_prompt_tokens, facts.max_tokens)
        request.hashes = deferral.make_hashes(replicaset.bounds.block_size)
        detail = replicaset.why_never(request, now)
        return detail and f"{detail} (admission policy {gate.name} sent it to replicaset {replicaset.name})"

    def _turn_away(self, request: Request, detail: str, now: int) -> None:
        """Reject a request that is in no queue; the caller notifies the backend."""
        seconds = to_seconds(now)
        del self._alive[request.request_id]
        end_request(request, EndReason.REJECTED, detail, seconds)
        self._count_end(request, EndReason.REJECTED, seconds)
        for observer in self._observers:
            observer.on_ended(request, EndReason.REJECTED, detail, seconds)
        if self.gate is not None and request.admission is not None and request.admission.num_deferrals:
            for notify in self.gate.own.departures:
                notify((request,), seconds)

    def _end_deferred(self, gate: AdmissionGate, request: Request, how: tuple[EndReason, str], now: int) -> None:
        """End a deferred request that is aborted or expires; `how` holds the reason and the detail."""
        seconds, (reason, detail) = to_seconds(now), how
        gate.forget(request, seconds)
        end_request(request, reason, detail, seconds)
        for observer in self._observers:
            observer.on_ended(request, reason, detail, seconds)
        self.settle(((request, reason),), now)

    def new_request(self, facts: RequestFacts, replicaset: Replicaset, arrived_at: float) -> Request:
        """Return a new request for a replicaset, without counting it as submitted."""
        max_tokens = replicaset.bounds.output_limit(facts.num_prompt_tokens, facts.max_tokens)
        index = self.num_submitted if self.index_of is None else self.index_of(facts)
        request = Request(facts, index, arrived_at, max_tokens)
        request.replicaset = replicaset.name
        return request

    def abort(self, request_id: str, reason: EndReason, now: int, detail: str = "") -> bool:
        """Abort or expire a request; return False if it is unknown, has ended, or will end with its present step."""
        entry = self._alive.get(request_id)
        if entry is None:
            return False
        request, replicaset = entry
        if self.gate is not None and request.state is RequestState.DEFERRED:
            self._end_deferred(self.gate, request, (reason, detail), now)
            return True
        if replicaset.abort(request, reason, to_seconds(now), detail):
            self.settle(((request, reason),), now)
            return True
        return False

    def lose_replica(self, replica: Replica, failure: Failure, now: int) -> Losses:
        """Handle a lost replica: its requests are recomputed elsewhere, or end; see `recovery.lose_replica`."""
        replicaset = self.replicasets[replica.replicaset]
        try:
            losses = lose_replica(replicaset, replica, failure, now)
        finally:  # the replica is lost also if a policy fails while the requests are placed again
            if replicaset.scaling is not None:
                replicaset.scaling.end_start(replica.replica_id)
                self._notify_state(replicaset, replica.replica_id, now)
        self.settle(losses.ended, now)
        return losses

    def restore_replica(self, replica: Replica, now: int) -> None:
        """Restore a lost replica, with empty memory."""
        replicaset = self.replicasets[replica.replicaset]
        replicaset.restore(replica.replica_id)
        for observer in self._observers:
            observer.on_replica_restored(replica.replicaset, replica.replica_id, to_seconds(now))
        if replicaset.scaling is not None:
            self._notify_state(replicaset, replica.replica_id, now)

    def change_replica(
        self, replica: Replica, state: ReplicaState, now: int
    ) -> Sequence[tuple[Request, Replica | None]]:
        """Set the state of a replica that a scaler starts or stops; the memory of a replica that goes down is emptied.

        Return the requests that are placed again because the replica drains, each with its new replica; see
        `scaling.place_anew`.
        """
        replicaset, replica_id = self.replicasets[replica.replicaset], replica.replica_id
        if replicaset.scaling is not None:
            replicaset.scaling.end_start(replica_id)
        replicaset.scale(replica_id, state)
        if state is ReplicaState.DOWN:
            replica.clear()
        self._notify_state(replicaset, replica_id, now)
        return place_anew(replicaset, replica, now) if state is ReplicaState.DRAINING else ()

    def notify_states_once(self, replicaset: Replicaset, now: int) -> None:
        """Notify observers of the state of every replica of a replicaset with a scaler, on the first call only."""
        scaling = replicaset.scaling
        if scaling is not None and not scaling.has_begun:
            scaling.has_begun = True
            for replica in replicaset.replicas:
                self._notify_state(replicaset, replica.replica_id, now)

    def _notify_state(self, replicaset: Replicaset, replica_id: int, now: int) -> None:
        state = replicaset.state_of(replica_id)
        for observer in self._observers:
            observer.on_replica_state(replicaset.name, replica_id, state, to_seconds(now))

    def reset_cache(self, replica: Replica, now: int) -> None:
        """Empty a replica's KV memory and prefix cache; its running requests wait again and will be recomputed."""
        seconds = to_seconds(now)
        held = reset_cache(replica, seconds)
        for observer in self._observers:
            observer.on_cache_reset(replica.replicaset, replica.replica_id, held, seconds)

    def abandon(self, replicaset: Replicaset, why: str, now: int) -> list[tuple[Request, EndReason]]:
        """End the requests of the replicaset's shared queue, because no replica will be up in time."""
        ended = abandon(replicaset, why, now)
        self.settle(ended, now)
        return ended

    def swap_policy(self, change: PolicyChange, now: int) -> Swapped:
        """Replace a policy; see `policy_swap.swap_policy`."""
        replicaset = self.replicasets[change.replicaset]
        if self.gate is not None and self.gate.error is not None:
            self.gate.renew()
        swapped = swap_policy(replicaset, change, self._alive_of(replicaset), now)
        for observer in self._observers:
            observer.on_policy_swapped(swapped.swap, to_seconds(now))
        return swapped

    def take_out_of_service(
        self, replicaset: Replicaset, error: PolicyError, now: int
    ) -> list[tuple[Request, EndReason]]:
        """End all requests of a replicaset whose policy broke the contract; policies are not notified."""
        ended = take_out_of_service(replicaset, self._alive_of(replicaset), f"{OUT_OF_SERVICE}: {error}", now)
        for request, reason in ended:
            if self.gate is not None:
                self.gate.forget(request, to_seconds(now))
            del self._alive[request.request_id]
            replicaset.forget(request)
            self._count_end(request, reason, to_seconds(now))
        if self.on_ended is not None:
            self.on_ended(ended)
        return ended

    def _alive_of(self, replicaset: Replicaset) -> list[Request]:
        return [request for request, one in self._alive.values() if one is replicaset]

    def settle(self, ended: Sequence[tuple[Request, EndReason]], now: int) -> None:
        """Count requests that have ended, and notify `on_ended`, then the policies that listen to ends."""
        if not ended:
            return
        to_notify, gate = [], self.gate
        for request, reason in ended:
            _, replicaset = self._alive.pop(request.request_id)
            replicaset.forget(request)
            self._count_end(request, reason, to_seconds(now))
            listeners = replicaset.listeners.departures
            if gate is not None and request.admission is not None and not request.admission.was_let_in:
                listeners = gate.own.departures  # no other policy was notified of a request that was not accepted
            if listeners:
                to_notify.append((request, listeners))
        if self.on_ended is not None:
            self.on_ended(ended)
        for request, listeners in to_notify:
            for notify in listeners:
                notify((request,), to_seconds(now))
        if gate is not None and gate.waits_for_change and gate.on_room is not None:
            gate.on_room()

    def _count_end(self, request: Request, reason: EndReason, now: float) -> None:
        self.num_ended[reason] += 1
        if request.program is not None:
            self.programs.leave(request, reason, now)

    def end_program(self, program: Program, reason: ProgramEnd, now: int) -> Mapping[str, list[Callable[[], None]]]:
        """End a program and notify observers; return the policies' callbacks, by replicaset, for the driver to call."""
        self.programs.end(program, reason)
        seconds = to_seconds(now)
        for observer in self._observers:
            observer.on_program_end(program, seconds)
        notified: list[object] = []
        calls: dict[str, list[Callable[[], None]]] = {}
        for name in program.replicasets:
            replicaset = self.replicasets[name]
            for policy, notify in () if replicaset.out_of_service else replicaset.listeners.program_ends:
                if not any(policy is one for one in notified):
                    notified.append(policy)
                    calls.setdefault(name, []).append(partial(notify, program, seconds))
        return calls

    def stall(self, now: int) -> PolicyError | None:
        """Return the error of a policy that leaves requests waiting although no step runs; None if no policy is to
        blame.
        """
        standing = [request for request in self.alive() if self._is_let_in(request)]
        if not standing:
            return None if self.gate is None else self._stalled_gate(self.gate)
        request = _to_blame_for(standing)
        remain = "although one request remains" if len(standing) == 1 else f"although {len(standing)} requests remain"
        remain += f" and nothing else will happen (the one named is {request.state.value})"
        replicaset = self.replicasets[request.replicaset]
        replica = self.replica_of(request)
        if replicaset.scaling is not None and not replicaset.can_go_on(request, to_seconds(now)):
            message = f"leaves replicaset {replicaset.name!r} without an active replica that could continue {remain}"
            return PolicyError(replicaset.scaling.name, message, request_id=request.request_id)
        if request.state is RequestState.HELD:
            pool = "" if replica is None else f" in pool {replica.parts.pool!r}"
            message = f"places no request whose prompt is computed{pool} {remain}"
            return PolicyError(replicaset.scheduler_name, message, request_id=request.request_id)
        if replica is None:
            replica = next((one for one in replicaset.replicas if replicaset.offers(one.replica_id, now)), None)
        if replica is None:
            message, name = f"offers no replica anything of the shared queue {remain}", replicaset.scheduler_name
            place = place_of_definition(replicaset.scheduler.pull)
            return PolicyError(name, message, request_id=request.request_id, place=place)
        parts = replica.parts
        message, own = f"scheduled nothing {remain}. {_refused(replica, request)}", parts.policy.schedule
        where = place_of_definition(own)
        error = PolicyError(parts.policy_name, message, request_id=request.request_id, place=where)
        return error.at(replica.replica_id, replica.num_steps)

    def _stalled_gate(self, gate: AdmissionGate) -> PolicyError | None:
        """Return the error of an admission policy that defers requests until something changes, although nothing will
        change; None if no request is deferred in this way.
        """
        if not gate.waits_for_change:
            return None
        remain = "one request" if len(gate) == 1 else f"{len(gate)} requests"
        return gate.violation(f"defers {remain} although nothing else will happen", gate.timeless()[0])

    def _is_let_in(self, request: Request) -> bool:
        """Return False if a request is deferred, or if the backend does not allow its replica to run it (`Gate`)."""
        if request.state is RequestState.DEFERRED:
            return False
        replica = self.replica_of(request)
        if replica is None or request.state is RequestState.HELD:
            return True
        is_running = request.state is RequestState.RUNNING
        return replica.forms_steps and (is_running or replica.running_set.admits)

    def check_conservation(self) -> None:
        """Raise `RuntimeError` unless every request is accounted for, and `AssertionError` unless every block is used
        or free.
        """
        ended = sum(self.num_ended.values())
        if self.num_submitted != ended + len(self._alive):
            raise RuntimeError(f"{self.num_submitted} requests submitted, {ended} ended, {len(self._alive)} alive")
        waiting = sum(replicaset.num_queued for replicaset in self.replicasets.values())
        running = sum(replica.running_set.num_running for replica in self.replicas())
        leaving = sum(one.state is RequestState.HELD for one, _ in self._alive.values())
        deferred = 0 if self.gate is None else len(self.gate)
        if waiting + running + leaving + deferred != len(self._alive):
            found = f"{waiting} requests wait, {running} run, {leaving} move and {deferred} are deferred"
            raise RuntimeError(f"{found}, but {len(self._alive)} are alive")
        states = Counter(request.state for request in self.alive())
        if states[RequestState.DEFERRED] != deferred:
            raise RuntimeError(f"{deferred} requests are deferred, but {states[RequestState.DEFERRED]} say so")
        if states[RequestState.RUNNING] != running:
            raise RuntimeError(f"{running} requests run, but {states[RequestState.RUNNING]} say so")
        of_programs = sum(request.program is not None for request in self.alive())
        if sum(program.num_alive for program in self.programs) != of_programs:
            raise RuntimeError(f"{of_programs} calls of programs are alive, and their programs count others")
        for replica in self.replicas():
            replica.running_set.check()
            replica.memory.check()


def _to_blame_for(standing: Sequence[Request]) -> Request:
    """Return the request that identifies the policy to blame. Without held requests, return the first request.
    Otherwise return a running request, or a held one if none runs: the others may be waiting for blocks of this
    request.
    """
    states = {one.state for one in standing}
    if RequestState.HELD not in states:
        return standing[0]
    state = RequestState.RUNNING if RequestState.RUNNING in states else RequestState.HELD
    return next(one for one in standing if one.state is state)


def _refused(replica: Replica, request: Request) -> str:
    """Return a sentence about what the builder refused when the replica's policy was last called."""
    refusals = replica.builder.refusals
    if request in refusals:
        refusal = refusals[request]
        return f"The builder had refused it: {refusal.name} ({refusal.value})"
    if refusals:
        counted = Counter(refusals.values())
        others = ", ".join(f"{count} x {refusal.name} ({refusal.value})" for refusal, count in counted.items())
        return f"The builder was not asked for it, and had refused others: {others}"
    return "The builder was asked for nothing that it refused"
