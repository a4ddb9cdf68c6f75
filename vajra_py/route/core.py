"""The router's decisions, without clock and network: a backend of the driver whose replicas are servers.

The owner of the clock calls one method per event, each at a later tick than the one before. Every event that affects
decisions is recorded as an input, so that a replay with the same inputs makes the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from msgspec import structs

from vajra_py.contract.latency import BatchFeatures
from vajra_py.contract.observer import EndReason
from vajra_py.errors import PolicyError
from vajra_py.route.mechanism import Answered, RemoteReplica
from vajra_py.route.memory import ServerMemory
from vajra_py.runtime.kv import TokenBlockHashes
from vajra_py.runtime.records.input_log import (
    Abandonment,
    Answer,
    Arrival,
    CacheReport,
    Failure,
    Input,
    Restart,
    ServerReport,
    TransferEnd,
)
from vajra_py.runtime.requests.adapters import AdapterLoad
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.serving.backend import Backend, BackendReplica, Transfer
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.serving.driver import Driver, DriverOptions
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.step.plan import StepPlan, StepResult
from vajra_py.runtime.support.clock import NEVER, TICKS_PER_SECOND

AGAIN = "again"
"""`Answer.end` of a request that is placed again because its server failed before the first token."""
PROMPT = "prompt"
"""`Answer.end` of a request that is done at its prefill server and continues at its decode server."""
_NANOSECOND = TICKS_PER_SECOND // 10**9
_NOTHING = StepPlan(0, 0, 0, BatchFeatures(), (), None, 0)
_NO_RESULT = StepResult()


@dataclass(frozen=True, slots=True)
class Submitted:
    """An arrived request, with the object that the caller associates with it."""

    arrival: Arrival
    payload: Any = None


class RouteCore(Backend[BackendReplica]):
    """Selects servers for requests. Not thread-safe."""

    def __init__(
        self,
        controller: Controller,
        max_tries: int,
        note: Callable[[Input], None] | None = None,
        *,
        is_replay: bool = False,
        tenant_salt: bool = False,
    ) -> None:
        """Create the core.

        Args:
            controller: replicasets with policies.
            max_tries: maximum number of attempts to send a request.
            note: called with each input, for recording.
            is_replay: True if all events come from recorded inputs, none from the clock.
            tenant_salt: True if tenants do not share cached prefixes.
        """
        self.controller = controller
        self.on_send: Callable[[Request, str, int], None] | None = None
        """Called for each request that is to be sent to a server, with the replicaset's name and the replica's id."""
        self.on_taken_in: Callable[[Request, Any], None] | None = None
        """Called for each arrived request, with its `Submitted.payload`; the request may have ended already."""
        self.on_ended: Callable[[Request, EndReason], None] | None = None
        """Called for each ended request, for any reason."""
        self._note = note
        self._max_tries = max_tries
        self._tenant_salt = tenant_salt
        self._ones: dict[tuple[str, int], BackendReplica] = {}
        for name, replicaset in controller.replicasets.items():
            for replica in replicaset.replicas:
                self._ones[name, replica.replica_id] = BackendReplica(replica)
                assert isinstance(replica, RemoteReplica)
                replica.on_sent = self._send_to(name)
        options = DriverOptions(
            expires=not is_replay, times_transfers=False, wakes=not is_replay, serves=True, isolates_policies=True
        )
        self._driver: Driver[BackendReplica] = Driver(controller, self, self._ones.values(), options, note)
        self._driver.form_through(_send_waiting)
        self._is_replay = is_replay
        self._on_their_way: list[TransferEnd] = []
        """Hand-offs that complete when the next event is applied."""

    def _send_to(self, replicaset: str) -> Callable[[Request, int], None]:
        def send(request: Request, replica_id: int) -> None:
            if self.on_send is not None:
                self.on_send(request, replicaset, replica_id)

        return send

    @property
    def now(self) -> int:
        """Tick of the last event."""
        return self._driver.now

    def next_due(self) -> int:
        """Return the tick of the next scheduled event, at which `advance` must be called; `NEVER` if there is none."""
        if self._on_their_way:
            return self.now
        return self._driver.next_due()

    # Events

    def advance(self, clock: int, *events: tuple[Phase, Any]) -> int:
        """Apply `events`, and all scheduled events that are due, at `clock` or at the first free tick after it; return
        that tick.
        """
        driver, now = self._driver, self._begin(clock)
        for phase, payload in events:
            driver.events.push(now, phase, payload)
        driver.events.bring_forward(now)
        driver.run_until(now)
        return now

    def _begin(self, clock: int) -> int:
        """Advance to `clock`, or to the first tick after the last event if that is later; return the tick."""
        now = max(clock, self._driver.now + _NANOSECOND)
        self._driver.advance_to(now)
        on_their_way, self._on_their_way = self._on_their_way, []
        for one in on_their_way:
            self._driver.events.push(now, Phase.TRANSFER, structs.replace(one, tick=now))
        return now

    def at(self, tick: int, inputs: Sequence[Input]) -> None:
        """Apply recorded inputs at their recorded tick."""
        self._driver.advance_to(tick)
        for one in inputs:
            if isinstance(one, ServerReport):
                self._apply_report(one)
            elif isinstance(one, CacheReport):
                self._apply_kv_report(one)
            elif isinstance(one, Arrival):
                self._driver.events.push(tick, Phase.ARRIVAL, Submitted(one))
            elif isinstance(one, Answer):
                self._push_answer(one, tick)
            else:
                phase, payload = _event_of(one)
                self._driver.events.push(tick, phase, payload)
        self._driver.run_until(tick)

    def answer(self, clock: int, request: Request, num_tokens: int, end: str = "", detail: str = "") -> None:
        """Record the progress of a request at its server; ignored if the request has ended or left the server."""
        now = self._begin(clock)
        self._push_answer(Answer(now, request.request_id, request.replica_id, num_tokens, end, detail), now)
        self._driver.events.bring_forward(now)
        self._driver.run_until(now)

    def report(self, clock: int, replicaset: str, replica_id: int, figures: tuple[int, int, float]) -> None:
        """Record a server's figures: running requests, waiting requests, fraction of KV memory in use (0 to 1)."""
        now = self._begin(clock)
        self._apply_report(ServerReport(now, replicaset, replica_id, *figures))
        self._driver.events.bring_forward(now)
        self._driver.run_until(now)

    def report_kv(self, clock: int, report: CacheReport) -> None:
        """Apply reported changes of a server's prefix cache.

        The report is ignored if the server is down, or if no report with `begins` has come from the server yet.
        """
        if not self.controller.replicasets[report.replicaset].is_up(report.replica_id):
            return
        now = self._begin(clock)
        self._apply_kv_report(structs.replace(report, tick=now))
        self._driver.events.bring_forward(now)
        self._driver.run_until(now)

    def lose(
        self, clock: int, replicaset: str, replica_id: int, detail: str, sent: Sequence[str] | None = None
    ) -> None:
        """Take a server out of service, and assign its requests without output to servers again. Does nothing if the
        server is already down.

        `sent` lists the ids of the requests that had been sent to the server; for these, the failure counts as an
        attempt. None means that all of the server's requests had been sent.
        """
        if self.controller.replicasets[replicaset].is_up(replica_id):
            failure = Failure(0, replicaset, replica_id, detail, self._max_tries - 1, sent)
            self._happen(clock, failure)

    def restore(self, clock: int, replicaset: str, replica_id: int) -> None:
        """Put a server back into service. Does nothing if the server is up."""
        if not self.controller.replicasets[replicaset].is_up(replica_id):
            self._happen(clock, Restart(0, replicaset, replica_id))

    def abandon(self, clock: int, replicaset: str, detail: str) -> None:
        """End the waiting requests of a replicaset, because too few of its servers are up to serve them."""
        self._happen(clock, Abandonment(0, replicaset, detail))

    def _happen(self, clock: int, what: Failure | Restart | Abandonment) -> None:
        now = max(clock, self._driver.now + _NANOSECOND)
        self.advance(now, (Phase.FAILURE, structs.replace(what, tick=now)))

    def _apply_report(self, report: ServerReport) -> None:
        replica = self._ones[report.replicaset, report.replica_id].replica
        self._driver.record(report)
        cast(RemoteReplica, replica).record_report(report.num_running, report.num_waiting, report.kv_fraction)
        gate = self.controller.gate
        if gate is not None and gate.waits_for_change:
            self._driver.ask_deferred()

    def _apply_kv_report(self, report: CacheReport) -> None:
        memory = self._ones[report.replicaset, report.replica_id].replica.memory
        if not isinstance(memory, ServerMemory) or (memory.reported is None and not report.begins):
            return
        self._driver.record(report)
        if report.begins:
            memory.begin()
        if report.ends:
            memory.end()
        stored, removed = ([bytes.fromhex(one) for one in names] for names in (report.stored, report.removed))
        memory.change(stored, removed)

    def _push_answer(self, answer: Answer, now: int) -> bool:
        request = self.controller.find(answer.request_id)
        if request is None or request.state is not RequestState.RUNNING or request.replica_id != answer.replica_id:
            return False
        one = self._ones[request.replicaset, answer.replica_id]
        self._driver.events.push(now, Phase.STEP_END, (one, answer, one.epoch), one.rank)
        return True

    # Called by the driver

    def on_step_end(self, replica: BackendReplica, payload: Any) -> None:
        """See `Backend`."""
        answer: Answer = payload
        request = self.controller.find(answer.request_id)
        if request is None or request.state is not RequestState.RUNNING:
            return
        self._driver.record(answer)
        remote = cast(RemoteReplica, replica.replica)
        end, detail = answer.end, answer.detail
        if end == AGAIN:
            request.num_losses += 1
            if request.num_losses < self._max_tries and not request.num_output_tokens:
                self.controller.replicasets[request.replicaset].avoid(request, remote.replica_id)
                self._place_again(remote, request)
                self._driver.wake(replica)
                return
            end = EndReason.FAILED.value
        reason = None if end in ("", PROMPT) else EndReason(end)
        remote.news = Answered(request, answer.num_tokens, reason, detail)
        self._driver.complete(replica, _NOTHING, _NO_RESULT, at_once=False)

    def _place_again(self, remote: RemoteReplica, request: Request) -> None:
        replicaset = self.controller.replicasets[request.replicaset]
        remote.take_back(request)
        now = self._driver.now
        try:
            placed = replicaset.place_again(request, remote.replica_id, was_admitted=True, now=now)
            self._driver.announce_all(replicaset.name, ((request, placed),))
        except PolicyError as error:
            self._driver.isolate(replicaset.name, error)

    def on_arrival(self, payload: Any) -> None:
        """See `Backend`."""
        submitted: Submitted = payload
        arrival = submitted.arrival
        self._driver.record(arrival)
        salt = arrival.salt if arrival.salt is not None else arrival.facts.tenant if self._tenant_salt else ""
        tokens = arrival.prompt_token_ids or ()
        self._driver.submit(
            arrival.facts,
            lambda block_size: TokenBlockHashes(tokens, block_size, salt) if tokens else None,
            submitted.payload,
            arrival.arrived_at,
        )

    def on_submitted(self, request: Request, payload: Any) -> None:
        """See `Backend`."""
        if self.on_taken_in is not None:
            self.on_taken_in(request, payload)

    def on_adapter_load(self, replica: BackendReplica, load: AdapterLoad) -> None:
        """See `Backend`; servers load adapters by themselves."""
        raise AssertionError("a router loads no adapter")

    def on_requests_ended(self, ended: Sequence[tuple[Request, EndReason]]) -> None:
        """See `Backend`."""
        if self.on_ended is not None:
            for request, reason in ended:
                self.on_ended(request, reason)

    def launch(self, replica: BackendReplica, plan: StepPlan) -> int:
        """See `Backend`; never called, since servers form their own steps."""
        raise AssertionError("a router launches no steps")

    def cancel(self, replica: BackendReplica) -> int:
        """See `Backend`."""
        remote = cast(RemoteReplica, replica.replica)
        remote.reported = None
        for request in remote.running_set.running():
            self.controller.replicasets[remote.replicaset].avoid(request, remote.replica_id)
        return self._driver.now

    def on_placed(self, request: Request, replicas: Sequence[BackendReplica]) -> None:
        """See `Backend`."""

    def on_transfer(self, transfer: Transfer[Any]) -> None:
        """See `Backend`; servers move KV by themselves, once the request has been sent to the target."""
        if self._is_replay:
            return
        replica: Replica = transfer.target.replica
        end = TransferEnd(0, replica.replicaset, transfer.number, transfer.request.request_id)
        self._on_their_way.append(end)

    def on_transfer_cancelled(self, transfer: Transfer[Any]) -> None:
        """See `Backend`."""

    def on_isolated(self, replicaset: str, error: PolicyError) -> None:
        """See `Backend`."""

    def on_policy_change(self, payload: Any) -> None:
        """See `Backend`."""
        self._driver.swap_policy(payload)


def _send_waiting(replica: Replica, now: int) -> None:
    """Send the waiting requests of a server; called in place of forming a step."""
    cast(RemoteReplica, replica).send_waiting(now)


def _event_of(one: Input) -> tuple[Phase, Any]:
    """Return phase and payload of the driver event for an input that needs no handling by the core."""
    kinds: Mapping[str, tuple[Phase, str | None]] = {
        "Abort": (Phase.ABORT, "request_id"),
        "Expiry": (Phase.EXPIRY, "request_id"),
        "Readmission": (Phase.ADMISSION, "request_id"),
        "ProgramIdle": (Phase.PROGRAM, "program_id"),
        "WakeUp": (Phase.WAKE, None),
        "TransferEnd": (Phase.TRANSFER, None),
        "Retry": (Phase.TRANSFER, None),
    }
    phase, field = kinds.get(type(one).__name__, (Phase.FAILURE, None))
    return phase, one if field is None else getattr(one, field)


__all__ = ["AGAIN", "NEVER", "PROMPT", "RouteCore", "Submitted"]
