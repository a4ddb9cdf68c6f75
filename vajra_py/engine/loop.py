"""The engine's loop: a driver's backend that computes steps with workers, on the wall clock.

One thread works in turns. A turn reads the clock once, and the ticks of turns strictly increase. A turn handles what
has become known by its tick, in the driver's order: at most one message about a worker (such as a completed step, a
finished copy of KV or a lost replica), then all arrivals, expiries, aborts and policy changes, then the forming of
steps. So a simulator that gets the same events at the same ticks makes the same decisions.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from queue import Empty, SimpleQueue
from typing import TypeAlias

from vajra_py.contract.observer import EndReason
from vajra_py.engine.clock import TICKS_PER_NANOSECOND, EngineClock
from vajra_py.engine.compute import LoadAdapter, StepOutput
from vajra_py.engine.executor import joined
from vajra_py.engine.kv_transfers import KvTransfers
from vajra_py.engine.outages import Outages
from vajra_py.engine.outputs import Submission, detokenize
from vajra_py.engine.replica import (
    AbortRequest,
    EngineReplica,
    LoopOptions,
    Message,
    StepUnderWay,
    Stop,
    SwapPolicy,
    Timed,
)
from vajra_py.engine.supervision import GivenUp, Restarted, Restarter
from vajra_py.engine.tier_copies import TierCopies
from vajra_py.engine.worker import (
    AdapterLoaded,
    Finished,
    KvExported,
    KvImported,
    KvMoved,
    LeftFirstStage,
    ReplicaKey,
    lost,
)
from vajra_py.errors import ExecutorError, PolicyError, VajraError
from vajra_py.plugins.watchdog import no_endless_calls
from vajra_py.runtime.records.input_log import Abandonment, AdapterEnd, Failure, Input, PolicyChange, Restart, StageEnd
from vajra_py.runtime.requests.adapters import AdapterLoad
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.serving.backend import Backend, TierCopy, Transfer
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.serving.driver import Driver, DriverOptions
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.serving.policy_swap import Swapped
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.step.plan import StepPlan, StepResult
from vajra_py.runtime.support.clock import NEVER, to_seconds
from vajra_py.runtime.support.gc_control import existing_objects_frozen

_log = logging.getLogger(__name__)

WorkerMessage: TypeAlias = LeftFirstStage | Finished | KvImported | KvMoved | AdapterLoaded | Restarted | GivenUp


class EngineLoop(Backend[EngineReplica]):
    """Serve requests on the replicas of a controller. `submit`, `abort` and `stop` may be called from any thread."""

    def __init__(
        self,
        controller: Controller,
        replicas: Mapping[ReplicaKey, EngineReplica],
        clock: EngineClock,
        options: LoopOptions | None = None,
        note: Callable[[Input], None] | None = None,
    ) -> None:
        self.controller = controller
        self.inbox: SimpleQueue[Message] = SimpleQueue()
        self.on_ended: Callable[[Submission, Request, EndReason], None] | None = None
        """Called for every request that ended, before the request's own `on_progress`."""
        self.on_formed: Callable[[str, float], None] | None = None
        """Called after a step was formed, with the name of the step's replicaset and the seconds that forming took."""
        self.last_loss = ""
        """Reason for the last failure of a replica."""
        self.failed: str | None = None
        """Reason why no request can ever be served again (every replica was lost and given up); else None."""
        self.on_failed: Callable[[str], None] | None = None
        """Called once, in the loop's thread, when `failed` is set."""
        self.blocked = ""
        """Description of a policy call that exceeds its time limit and cannot be interrupted; empty if there is
        none."""
        self.restarter: Restarter | None = None
        """Restarts workers of replicas that lost theirs; None: lost replicas stay lost."""
        self._replicas = dict(replicas)
        self._clock = clock
        self._options = options = options or LoopOptions()
        self._note = note
        rules = DriverOptions(
            options.check_every_steps,
            times_transfers=False,
            serves=options.serves,
            isolates_policies=options.isolates_policies,
        )
        self._driver = Driver(controller, self, self._replicas.values(), rules, note)
        self._driver.form_through(self._form_step)
        self._events = self._driver.events
        self._finished: deque[WorkerMessage] = deque()
        self._transfers = KvTransfers(self.inbox.put)
        self._tier_copies = TierCopies()
        self._suspects: dict[Request, int] = {}
        """Requests that were being computed when a replica was lost, and the number of tokens that each must still get
        while it is computed alone (see `EngineExecutor.parts`)."""
        self._num_suspected: dict[Request, int] = {}
        self._progressed: dict[Request, None] = {}
        """Requests that got a token in this turn."""
        self._deferred: list[SwapPolicy] = []
        """Policy changes that wait for workers to finish cancelled steps."""
        self._outages = Outages(controller, self._replicas, options.wait_s)
        self._stops = False
        self._stalled_at = -1
        """Value of `num_steps` at the latest log message about requests without progress; -1 before the first one."""
        self._submissions: dict[Request, Submission] = {}

    @property
    def now(self) -> int:
        """Tick of the current turn."""
        return self._driver.now

    @property
    def num_steps(self) -> int:
        """Number of steps so far."""
        return self._driver.num_steps

    # Thread-safe

    def submit(self, submission: Submission) -> None:
        """Submit a request; it arrives in the next turn."""
        self.inbox.put(submission)

    def abort(self, request_id: str) -> None:
        """Abort a request in the next turn; unknown and ended requests are ignored."""
        self.inbox.put(AbortRequest(request_id))

    def swap_policy(self, change: PolicyChange, done: Callable[[Swapped | VajraError], None]) -> None:
        """Swap a policy in the next turn, but not before workers have finished cancelled steps. See `SwapPolicy`.

        Nothing changes if the swap is not possible.
        """
        self.inbox.put(SwapPolicy(change, done))

    def stop(self) -> None:
        """Make `run` return once it has handled all messages that it has received."""
        self.inbox.put(Stop())

    # Called only from the loop's own thread

    def submit_at(self, tick: int, make: Callable[[], Submission]) -> None:
        """Submit a request at a tick of the clock.

        `make` is called at that time, since the prompt may depend on outputs of other requests.
        """
        self._events.push(tick, Phase.ARRIVAL, Timed(tick, make))

    @property
    def num_restarting(self) -> int:
        """Number of failed replicas that are being restarted."""
        return len(self._outages.restarting)

    @property
    def num_lost(self) -> int:
        """Number of failed replicas that are not up again."""
        return sum(one.is_lost for one in self._replicas.values())

    def run(self) -> None:
        """Serve until no request is left (or, as a server, until `stop`).

        Raises `PolicyError` if a policy breaks the contract (unless policies are isolated) or leaves requests waiting
        forever.
        """
        try:
            limit_s = self._options.policy_timeout_s
            with existing_objects_frozen(), no_endless_calls(limit_s, self._note_blocked):
                while self._wait():
                    self._turn()
        finally:
            self.refuse_swaps()

    def _note_blocked(self, what: str) -> None:
        self.blocked = what

    def alive(self) -> Iterator[tuple[Request, Submission]]:
        """Yield the accepted requests that have not ended."""
        yield from list(self._submissions.items())

    # Waiting

    def _wait(self) -> bool:
        """Wait until there is something to do; return False if the loop is finished."""
        self._receive()
        while not self._finished:
            due = min(self._driver.next_due(), self._outages.next_due())
            if due <= self.now:  # a message that was just received became an event that is already due
                return True
            if self._stops:
                return False
            if due <= self._clock.now():
                return True
            is_loading = self._is_loading or self._awaits_tiers
            is_busy = self._num_in_flight or len(self._transfers) or self._awaits_restart or is_loading
            if due == NEVER and not (is_busy or self._waits_for_others()):
                return False
            message = self._clock.wait(self.inbox, due)
            if message is not None:
                self._sort(message)
                self._receive()
        return True

    @property
    def _awaits_restart(self) -> bool:
        """True if a replica is being restarted and the loop has to wait for it.

        The loop has to wait on a server. Otherwise, it has to if requests are unfinished or all replicas are lost.
        """
        is_needed = self._options.serves or self.controller.num_alive > 0 or self.num_lost == len(self._replicas)
        return bool(self._outages.restarting) and is_needed

    @property
    def _is_loading(self) -> bool:
        """True if an adapter is being loaded."""
        adapters = (one.replica.adapters for one in self._replicas.values())
        return any(one is not None and one.is_loading() for one in adapters)

    @property
    def _awaits_tiers(self) -> bool:
        """True if a copy between memory tiers is in flight and unfinished requests may wait for it."""
        return len(self._tier_copies) > 0 and self.controller.num_alive > 0

    @property
    def _num_in_flight(self) -> int:
        return sum(len(one.under_way) for one in self._replicas.values())

    def _receive(self) -> None:
        while True:
            try:
                self._sort(self.inbox.get_nowait())
            except Empty:
                return

    def _sort(self, message: Message) -> None:
        """Turn a message into an event of the next turn.

        Most messages of workers are queued, since a turn handles only one.
        """
        if isinstance(message, KvExported):
            self._transfers.exported(message)
        elif isinstance(message, WorkerMessage):
            self._finished.append(message)
        elif isinstance(message, Submission):
            self._events.push(self.now, Phase.ARRIVAL, message)
        elif isinstance(message, AbortRequest):
            self._events.push(self.now, Phase.ABORT, message.request_id)
        elif isinstance(message, SwapPolicy):
            self._events.push(self.now, Phase.POLICY, message)
        else:
            self._stops = True

    def _waits_for_others(self) -> bool:
        """Return True on a server, where new requests may arrive; else False. Called when nothing is in flight or due.

        Raises `PolicyError` if this is no server and a policy leaves requests waiting, since nothing else will happen.
        """
        if not self._options.serves:
            stall = self.controller.stall(self.now)
            if stall is not None:
                raise stall.at_time(to_seconds(self.now))
            return False
        if self._stalled_at != self.num_steps and self.controller.num_alive:
            self._stalled_at = self.num_steps
            standing = Counter(request.replicaset for request in self.controller.alive())
            where = ", ".join(f"{name}: {number}" for name, number in standing.items())
            _log.warning("policies schedule none of the requests, which wait until another comes or goes (%s)", where)
        return True

    # A turn

    def _turn(self) -> None:
        driver = self._driver
        now = max(self._clock.now(), driver.now + TICKS_PER_NANOSECOND)
        driver.advance_to(now)
        if self._finished:
            self._take_worker_message(self._finished.popleft())
        for name in self._outages.over(now):
            self._abandon(name, f"no replica of {name} came up again within {self._options.wait_s:g} s")
        self._events.bring_forward(now)
        driver.run_until(now)
        self._tier_copies.load_rest()
        self._report_progress()

    def _report_progress(self) -> None:
        """Call `on_progress` of each request with `follows_steps` that got a token in this turn."""
        progressed, self._progressed = self._progressed, {}
        followed = []
        for request in progressed:
            submission = self._submissions.get(request)
            if submission is not None and submission.follows_steps and submission.on_progress is not None:
                followed.append((request, submission, submission.on_progress))
        detokenize(submission.output for _, submission, _ in followed)
        for request, submission, on_progress in followed:
            on_progress(submission, request, None)

    def _take_worker_message(self, message: WorkerMessage) -> None:
        """Handle a message about a worker; most messages become an event of this turn."""
        one = self._replicas[message.replica]
        if isinstance(message, KvImported):
            end = self._transfers.imported(message, self.now)
            if end is not None:
                self._events.push(self.now, Phase.TRANSFER, end)
        elif isinstance(message, KvMoved):
            copied = self._tier_copies.moved(message, self.now)
            if copied is not None:
                self._events.push(self.now, Phase.TIER, copied)
        elif isinstance(message, Restarted):
            self._restore(one, message)
        elif isinstance(message, GivenUp):
            is_hopeless, why = self._outages.given_up(message.replica), lost(message.replica, message.why)
            # `_check_failed` may set `failed`, which clients read when `_abandon` ends their requests.
            self._check_failed(why)
            if is_hopeless:
                self._abandon(message.replica[0], why)
        elif one.is_lost:
            return
        elif isinstance(message, LeftFirstStage):
            self._left_first_stage(one)
        elif isinstance(message, AdapterLoaded):
            self._events.push(self.now, Phase.TIER, AdapterEnd(self.now, *message.replica, message.number))
        elif message.output is None:
            self._lose(one, lost(message.replica, message.error or "its worker is gone"))
        elif one.num_stale:
            one.num_stale -= 1
            if not one.num_stale:
                self._driver.freed(one)
                self._take_up_deferred()
        else:
            self._part_came_back(one, message.output)

    def _part_came_back(self, one: EngineReplica, output: StepOutput) -> None:
        step = one.under_way[0]
        step.outputs.append(output)
        step.parts.popleft()
        if not step.parts:
            output = output if len(step.outputs) == 1 else joined(step.outputs)
            self._events.push(self.now, Phase.STEP_END, (one, output, one.epoch), one.rank)
        elif one.num_stages == 1:
            one.submit(step.parts[0])
            one.send_exports()

    def _left_first_stage(self, one: EngineReplica) -> None:
        if one.num_stale:
            return
        step = one.under_way[-1]  # earlier steps have left the first stage already
        step.num_entering -= 1
        if not step.num_entering:
            plan, replica = step.plan, one.replica
            if self._note is not None:
                self._note(StageEnd(self.now, replica.replicaset, replica.replica_id, plan.step_index))
            self._events.push(self.now, Phase.STAGE_END, (one, plan, one.epoch), one.rank)

    # Requests

    def on_transfer(self, transfer: Transfer[EngineReplica]) -> None:
        """See `Backend`."""
        self._transfers.begin(transfer)

    def on_transfer_cancelled(self, transfer: Transfer[EngineReplica]) -> None:
        """See `Backend`."""
        self._transfers.cancel(transfer)

    def on_adapter_load(self, replica: EngineReplica, load: AdapterLoad) -> None:
        """See `Backend`; the worker's answer arrives as a message."""
        replica.load_adapter(LoadAdapter(load.number, load.name, load.slot))

    def on_tier_copy(self, copy: TierCopy[EngineReplica]) -> None:
        """See `Backend`."""
        self._tier_copies.begin(copy)

    def on_tier_copy_cancelled(self, copy: TierCopy[EngineReplica]) -> None:
        """See `Backend`."""
        self._tier_copies.cancel(copy)

    def on_arrival(self, payload: Submission | Timed) -> None:
        """See `Backend`."""
        if isinstance(payload, Timed):
            submission = payload.make()
            submission.sent_at = payload.tick
        else:
            submission = payload
        sent_at, salted = submission.sent_at, self._options.tenant_salt
        arrived_at = to_seconds(self.now if sent_at is None else sent_at)
        if self._note is not None:
            self._note(submission.arrival(self.now, arrived_at))
        self._driver.submit(
            submission.facts, lambda size: submission.block_hashes(size, salted), submission, arrived_at
        )

    def on_submitted(self, request: Request, payload: Submission) -> None:
        """See `Backend`."""
        self._submissions[request] = payload

    def on_placed(self, request: Request, replicas: Sequence[EngineReplica]) -> None:
        """See `Backend`."""
        for one in replicas:
            one.executor.expect(request, self._submissions[request])
        if request.state is RequestState.ARRIVED:  # its KV was transferred: the other replicas may forget the request
            for one in self._driver.replicas_of(request.replicaset):
                if one not in replicas:
                    one.executor.leave(request)

    def on_requests_ended(self, ended: Sequence[tuple[Request, EndReason]]) -> None:
        """See `Backend`; the requests' submitters are notified."""
        for request, reason in ended:
            submission = self._submissions.pop(request)
            if self._num_suspected:
                self._suspects.pop(request, None)
                self._num_suspected.pop(request, None)
            for replica in self.controller.replicasets[request.replicaset].replicas:
                self._replicas[replica.replicaset, replica.replica_id].executor.release(request)
            submission.output.finish()
            if self.on_ended is not None:
                self.on_ended(submission, request, reason)
            if submission.on_progress is not None:
                submission.on_progress(submission, request, reason)

    # Steps

    def _form_step(self, replica: Replica, now: int) -> StepPlan | None:
        started = time.perf_counter()
        plan = replica.next_plan(now)
        if plan is not None and self.on_formed is not None:
            self.on_formed(replica.replicaset, time.perf_counter() - started)
        return plan

    def launch(self, replica: EngineReplica, plan: StepPlan) -> int:
        """See `Backend`: sends the worker the changes; the result arrives as a message."""
        step = replica.executor.step_input(plan, replica.replica.memory)
        if self._tier_copies.load(replica, step.copies):
            step = replace(step, copies=())
        parts = deque(replica.executor.parts(step, self._suspects) if self._suspects else [step])
        replica.under_way.append(StepUnderWay(plan, parts, len(parts)))
        if replica.num_stages > 1:
            for part in parts:
                replica.submit(part)
        elif len(parts) > 1 or replica.ahead is None:
            replica.submit(parts[0])
            if replica.ahead is not None:
                replica.ahead.forget()
        else:
            replica.submit(replica.ahead.work(plan, step))
        return NEVER

    def on_step_end(self, replica: EngineReplica, payload: StepOutput) -> None:
        """See `Backend`."""
        plan = replica.under_way.popleft().plan
        replica.has_computed = True
        replica.compute_s += payload.duration_s
        replica.busy_ticks += self.now - plan.formed_at
        result = replica.executor.step_result(payload, _withheld(replica.replica, plan))
        self._progressed.update(dict.fromkeys(request for request, _ in result.tokens or ()))
        if self._suspects:
            self._clear_suspects(result)
        self._driver.complete(replica, plan, result)

    def cancel(self, replica: EngineReplica) -> int:
        """See `Backend`: the replica is free once its worker has finished the steps that it has already received."""
        if replica.ahead is not None:
            replica.ahead.forget()
        if not replica.is_lost:
            sent = [step.parts if replica.num_stages > 1 else list(step.parts)[:1] for step in replica.under_way]
            replica.num_stale += sum(map(len, sent))
        replica.under_way.clear()
        replica.executor.forget_steps()
        return NEVER if replica.num_stale else self.now

    # Lost and restored replicas, policy changes

    def _lose(self, one: EngineReplica, detail: str) -> None:
        name, replica_id = one.replica.replicaset, one.replica.replica_id
        one.is_lost, one.num_stale, self.last_loss = True, 0, detail
        _log.warning("%s", detail)
        computed = [one.executor.requests_of(step.parts[0]) for step in one.under_way]
        blamed = list(dict.fromkeys(chain.from_iterable(computed)))
        self._take_up_deferred()
        key, restarter = (name, replica_id), self.restarter
        if restarter is not None and restarter.lost(key, one.worker, has_computed=one.has_computed):
            self._outages.restarting.add(key)
        self._check_failed(detail)
        max_reruns = self._options.max_reruns if self._outages.could_serve(name) else None
        # If only one request was being computed, it has caused the failure. Each request that was being computed is a
        # suspect until it has produced a number of tokens, which doubles with each further failure.
        guilty = [request.request_id for request in blamed] if len(blamed) == 1 else []
        if max_reruns is not None:
            for request in blamed:
                self._num_suspected[request] = count = self._num_suspected.get(request, 0) + 1
                self._suspects[request] = 1 << min(count - 1, 30)
        self._events.push(self.now, Phase.FAILURE, Failure(self.now, name, replica_id, detail, max_reruns, guilty))
        self._outages.begin(name, self.now)

    def _clear_suspects(self, result: StepResult) -> None:
        """Count the tokens of suspects; after enough of them, a request is no longer a suspect."""
        for request, _ in result.tokens or ():
            num_left = self._suspects.get(request)
            if num_left == 1:
                del self._suspects[request]
            elif num_left is not None:
                self._suspects[request] = num_left - 1

    def _restore(self, one: EngineReplica, message: Restarted) -> None:
        one.start_again(message.worker)
        self._outages.restored(message.replica)
        self._events.push(self.now, Phase.FAILURE, Restart(self.now, *message.replica))

    def _check_failed(self, detail: str) -> None:
        if self.failed is None and not self._outages.restarting and self.num_lost == len(self._replicas):
            self.failed = detail
            _log.error("no replica is left, and none is started again: %s", detail)
            if self.on_failed is not None:
                self.on_failed(detail)

    def _abandon(self, name: str, detail: str) -> None:
        self._outages.end(name)
        self._events.push(self.now, Phase.FAILURE, Abandonment(self.now, name, detail))

    def on_policy_change(self, payload: SwapPolicy) -> None:
        """See `Backend`; the change waits until workers have finished cancelled steps."""
        name = payload.change.replicaset
        if any(one.num_stale for one in self._replicas.values() if one.replica.replicaset == name):
            self._deferred.append(payload)
            return
        try:
            swapped = self._driver.swap_policy(payload.change)
        except VajraError as error:
            payload.done(error)
            return
        payload.done(swapped)

    def _take_up_deferred(self) -> None:
        for swap in self._deferred:
            # With rank -1, deferred changes precede those requested later.
            self._events.push(self.now, Phase.POLICY, swap, rank=-1)
        self._deferred = []

    def refuse_swaps(self) -> None:
        """Refuse the policy changes that are still waiting, since the loop has ended."""
        self._receive()
        for message in (*self._events.remove(Phase.POLICY), *self._deferred):
            message.done(ExecutorError("engine: it is shutting down; the policy is unchanged"))
        self._deferred = []

    def on_isolated(self, replicaset: str, error: PolicyError) -> None:
        """See `Backend`."""
        _log.error("replicaset %s is out of service: %s", replicaset, error, exc_info=error.__cause__)


def _withheld(replica: Replica, plan: StepPlan) -> Collection[Request]:
    """Return the requests of a step whose sampled tokens do not count as output.

    Such a request will leave for another replica, which samples the same token again. If it stays after all, the token
    counts.
    """
    if not replica.hands_off or replica.gives_first_token:
        return ()
    return {chunk.request for chunk in plan.chunks if replica.withholds_token(chunk)}
