"""In which order does an engine let things happen, so that a simulator can let them happen again?

One thread, in turns. A turn reads the clock once and stamps everything with that tick: at most one step that came back (or
one replica that was lost or restarted), then arrivals, expiries, aborts and swaps of policies, then the steps of the
replicas that these woke, in the order of their places, then of idle ones for a shared queue. Each turn's tick is above the
last one's. This is the order of the simulator's events of one tick (`vajra_py.runtime.serving.events.Phase`), so what was decided here
is decided there.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, SimpleQueue

from sortedcontainers import SortedDict

from vajra_py.contract import EndReason
from vajra_py.engine.clock import TICKS_PER_NANOSECOND, EngineClock
from vajra_py.engine.compute import StepOutput
from vajra_py.engine.outputs import Submission
from vajra_py.engine.supervision import GivenUp, Restarted, Restarter
from vajra_py.engine.units import LoopOptions, Message, Stop, SwapPolicy, TakeBack, Unit
from vajra_py.engine.worker import Finished, ReplicaKey, lost
from vajra_py.errors import ExecutorError, PolicyError, VajraError
from vajra_py.runtime.clock import NEVER, to_seconds, to_ticks
from vajra_py.runtime.collector import what_exists_left_out
from vajra_py.runtime.controller import EXPIRED, TAKEN_BACK, Controller
from vajra_py.runtime.input_log import Abandonment, Abort, Breach, Expiry, Failure, Input, Restart, Swap
from vajra_py.runtime.replica import Replica
from vajra_py.runtime.request import Request, RequestState
from vajra_py.runtime.swapping import PolicyChange, Swapped

_log = logging.getLogger(__name__)


class EngineLoop:
    """Serves requests on the replicas of a controller. `submit`, `abort` and `stop` may be called from any thread."""

    def __init__(
        self,
        controller: Controller,
        units: Mapping[ReplicaKey, Unit],
        clock: EngineClock,
        options: LoopOptions | None = None,
        note: Callable[[Input], None] | None = None,
    ) -> None:
        self.controller = controller
        self.now = 0
        self.num_steps = 0
        self.inbox: SimpleQueue[Message] = SimpleQueue()
        self.on_ended: Callable[[Submission, Request, EndReason], None] | None = None
        """Told of every request that ended, before its own `on_progress` is."""
        self.on_formed: Callable[[str, float], None] | None = None
        """Told how long forming each step took: (replicaset, seconds)."""
        self.last_loss = ""
        """Why the replica that failed last did."""
        self.restarter: Restarter | None = None
        """Who finds workers for replicas that lost theirs; None: nobody."""
        self._units = dict(units)
        self._ranks = {key: rank for rank, key in enumerate(units)}
        self._clock = clock
        self._options = options or LoopOptions()
        self._note = note
        self._timed: list[tuple[int, int, Callable[[], Submission]]] = []
        self._num_timed = 0
        self._expiries: list[tuple[int, int, Request]] = []
        self._arrived: list[Submission] = []
        self._taken_back: list[str] = []
        self._finished: deque[Finished | Restarted | GivenUp] = deque()
        self._swaps: list[SwapPolicy] = []
        self._deferred: list[SwapPolicy] = []
        """Swaps that wait for steps whose plan was dropped."""
        self._restarting: set[ReplicaKey] = set()
        self._abandon_at: dict[str, int] = {}
        """By replicaset without any replica, until when its requests wait for one."""
        self._stops = False
        self._stalled_at = -1
        """After how many steps a server last said that requests stand still."""
        self._pending: list[Unit | str] = []
        self._offers: set[str] = set()
        self._submissions: dict[Request, Submission] = {}
        self._idle: dict[str, SortedDict[int, Unit]] = {name: SortedDict() for name in controller.replicasets}
        for unit in self._units.values():
            self._idle[unit.replica.replicaset][unit.replica.replica_id] = unit

    # From any thread

    def submit(self, submission: Submission) -> None:
        """Take a request in with the next turn."""
        self.inbox.put(submission)

    def abort(self, request_id: str) -> None:
        """Take a request back with the next turn; nothing happens to one that is unknown or has ended."""
        self.inbox.put(TakeBack(request_id))

    def swap_policy(self, change: PolicyChange, done: Callable[[Swapped | VajraError], None]) -> None:
        """Put another policy in force with the next turn; nothing changes when it cannot be. See `SwapPolicy`."""
        self.inbox.put(SwapPolicy(change, done))

    def stop(self) -> None:
        """Let `run` return after the present turn."""
        self.inbox.put(Stop())

    # From the loop's own thread

    def submit_at(self, tick: int, make: Callable[[], Submission]) -> None:
        """Take a request in when the clock says so; it is made then, since its prompt may depend on others' outputs."""
        self._num_timed += 1
        heapq.heappush(self._timed, (tick, self._num_timed, make))

    @property
    def num_restarting(self) -> int:
        """Replicas that failed and are being started again."""
        return len(self._restarting)

    @property
    def num_lost(self) -> int:
        """Replicas that failed and have not come back."""
        return sum(unit.is_lost for unit in self._units.values())

    def run(self) -> None:
        """Serve until nothing is left (or, when serving, until `stop`).

        Raises `PolicyError` when a policy breaks the contract or leaves requests standing for ever.
        """
        try:
            with what_exists_left_out():
                while self._wait():
                    self._turn()
        finally:
            self.refuse_swaps()

    def alive(self) -> Iterator[tuple[Request, Submission]]:
        """Requests taken in and not ended."""
        yield from list(self._submissions.items())

    # Waiting

    def _wait(self) -> bool:
        """Wait until there is something to do; False when there will not be."""
        self._receive()
        while not (self._finished or self._arrived or self._taken_back or self._swaps):
            if self._stops:
                return False
            due = self._next_due()
            if due <= self._clock.now():
                return True
            if due == NEVER and not (self._num_in_flight or self._restarting or self._waits_for_others()):
                return False
            message = self._clock.wait(self.inbox, due)
            if message is not None:
                self._sort(message)
                self._receive()
        return True

    @property
    def _num_in_flight(self) -> int:
        return sum(unit.plan is not None for unit in self._units.values())

    def _next_due(self) -> int:
        while self._expiries and self._expiries[0][2].state is not RequestState.WAITING:
            heapq.heappop(self._expiries)
        return min(
            self._timed[0][0] if self._timed else NEVER,
            self._expiries[0][0] if self._expiries else NEVER,
            min(self._abandon_at.values(), default=NEVER),
        )

    def _receive(self) -> None:
        while True:
            try:
                self._sort(self.inbox.get_nowait())
            except Empty:
                return

    def _sort(self, message: Message) -> None:
        if isinstance(message, Finished | Restarted | GivenUp):
            self._finished.append(message)
        elif isinstance(message, Submission):
            self._arrived.append(message)
        elif isinstance(message, TakeBack):
            self._taken_back.append(message.request_id)
        elif isinstance(message, SwapPolicy):
            self._swaps.append(message)
        else:
            self._stops = True

    def _waits_for_others(self) -> bool:
        """Nothing is under way: whether requests may still come. Raises `PolicyError` when some are left and none will."""
        if not self._options.serves:
            stall = self.controller.stall(self.now)
            if stall is not None:
                raise stall
            return False
        if self._stalled_at != self.num_steps and self.controller.num_alive:
            self._stalled_at = self.num_steps
            standing = Counter(request.replicaset for request in self.controller.alive())
            where = ", ".join(f"{name}: {number}" for name, number in standing.items())
            _log.warning("policies schedule none of the requests, which wait until another comes or goes (%s)", where)
        return True

    # A turn

    def _turn(self) -> None:
        self.now = now = max(self._clock.now(), self.now + TICKS_PER_NANOSECOND)
        touched: dict[Request, None] = {}
        if self._finished:
            self._take_news(self._finished.popleft(), touched)
        for name in [name for name, tick in self._abandon_at.items() if tick <= now]:
            self._abandon(name, f"no replica of {name} came up again within {self._options.wait_s:g} s")
        arrived, self._arrived = self._arrived, []
        while self._timed and self._timed[0][0] <= now:
            tick, _, make = heapq.heappop(self._timed)
            submission = make()
            submission.sent_at = tick
            arrived.append(submission)
        for submission in arrived:
            self._arrive(submission)
        while self._expiries and self._expiries[0][0] <= now:
            request = heapq.heappop(self._expiries)[2]
            if request.state is RequestState.WAITING:
                self._tell(Expiry(now, request.request_id))
                self._end_early(request, EndReason.EXPIRED, EXPIRED)
        taken_back, self._taken_back = self._taken_back, []
        for request_id in taken_back:
            found = self.controller.find(request_id)
            if found is not None:
                self._tell(Abort(now, request_id))
                self._end_early(found, EndReason.ABORTED, TAKEN_BACK)
        swaps, self._swaps = self._swaps, []
        for swap in swaps:
            self._swap(swap)
        pending, self._pending = self._pending, []
        for one in sorted(pending, key=self._rank):
            self._form(one)
        for request in touched:  # after the next steps are on their way
            progressed = self._submissions.get(request)
            if progressed is not None and progressed.on_progress is not None:
                progressed.on_progress(progressed, request, None)

    def _tell(self, entry: Input) -> None:
        if self._note is not None:
            self._note(entry)

    # Arrivals and departures

    def _arrive(self, submission: Submission) -> None:
        facts, sent_at, salted = submission.facts, submission.sent_at, self._options.tenant_salt
        arrived_at = to_seconds(self.now if sent_at is None else sent_at)
        if self._note is not None:
            self._note(submission.arrival(self.now, arrived_at))
        try:
            request, _, replica = self.controller.submit(
                facts, lambda size: submission.keys(size, salted), self.now, arrived_at
            )
        except PolicyError as error:
            taken_in = self.controller.find(facts.request_id)
            assert taken_in is not None
            self._submissions[taken_in] = submission
            self._contain(taken_in.replicaset, error)
            return
        self._submissions[request] = submission
        if request.state is RequestState.ENDED:
            assert request.end_reason is not None
            self._ended(request, request.end_reason)
            return
        if request.expires_at is not None:
            heapq.heappush(self._expiries, (to_ticks(request.expires_at), request.index, request))
        self._waits(request, replica)

    def _waits(self, request: Request, replica: Replica | None) -> None:
        """A request waits for this replica, or for any of its replicaset: let them know what it is, and form steps."""
        replicaset, submission = self.controller.replicasets[request.replicaset], self._submissions[request]
        for one in replicaset.replicas if replica is None else (replica,):
            self._unit(one).executor.expect(request, submission)
        if replica is not None:
            self._wake(self._unit(replica))
        elif replicaset.name not in self._offers:
            self._offers.add(replicaset.name)
            self._pending.append(replicaset.name)

    def _end_early(self, request: Request, reason: EndReason, detail: str) -> None:
        replica = self.controller.replica_of(request)
        try:
            if not self.controller.end_early(request.request_id, reason, self.now, detail):
                return
        except PolicyError as error:
            self._contain(request.replicaset, error)
            return
        self._ended(request, reason)
        if replica is not None:
            self._wake(self._unit(replica))

    def _ended(self, request: Request, reason: EndReason) -> None:
        submission = self._submissions.pop(request)
        for one in self.controller.replicasets[request.replicaset].replicas:
            self._unit(one).executor.release(request)
        submission.collected.finish()
        if self.on_ended is not None:
            self.on_ended(submission, request, reason)
        if submission.on_progress is not None:
            submission.on_progress(submission, request, reason)

    # Steps

    def _unit(self, replica: Replica) -> Unit:
        return self._units[replica.replicaset, replica.replica_id]

    def _wake(self, unit: Unit) -> None:
        if not (unit.form_pending or unit.plan is not None or unit.is_lost or unit.is_stale):
            unit.form_pending = True
            self._pending.append(unit)

    def _rank(self, one: Unit | str) -> int:
        """In which order steps of one turn are formed: replicas by their place, then whoever is idle for a shared queue."""
        if isinstance(one, str):
            return len(self._ranks)
        return self._ranks[one.replica.replicaset, one.replica.replica_id]

    def _form(self, one: Unit | str) -> None:
        if isinstance(one, Unit):
            one.form_pending = False
            self._start(one)
            return
        self._offers.discard(one)
        shared = self.controller.replicasets[one].shared
        idle = self._idle[one]
        for replica_id in list(idle):
            if not len(shared):
                return
            if replica_id in idle and not idle[replica_id].form_pending:
                self._start(idle[replica_id])

    def _start(self, unit: Unit) -> None:
        replica = unit.replica
        idle = self._idle[replica.replicaset]
        started = time.perf_counter()
        try:
            plan = replica.next_plan(self.now)
        except PolicyError as error:
            self._contain(replica.replicaset, error)
            return
        if plan is not None and self.on_formed is not None:
            self.on_formed(replica.replicaset, time.perf_counter() - started)
        if plan is None:
            idle[replica.replica_id] = unit
            return
        idle.pop(replica.replica_id, default=None)
        self.num_steps += 1
        unit.plan = plan
        step = unit.executor.step_input(plan, replica.memory)
        unit.worker.submit(step if unit.ahead is None else unit.ahead.work(plan, step))

    def _take_news(self, news: Finished | Restarted | GivenUp, touched: dict[Request, None]) -> None:
        unit = self._units[news.replica]
        if isinstance(news, Restarted):
            self._restore(unit, news)
        elif isinstance(news, GivenUp):
            self._restarting.discard(news.replica)
            self._abandon_unless_some(news.replica[0], lost(news.replica, news.why))
        elif unit.is_lost:
            return
        elif news.output is None:
            self._lose(unit, lost(news.replica, news.error or "its worker is gone"))
        elif unit.is_stale:
            unit.is_stale = False
            self._idle[news.replica[0]][news.replica[1]] = unit
            self._swaps, self._deferred = [*self._deferred, *self._swaps], []
        else:
            self._take_result(unit, news.output, touched)

    def _take_result(self, unit: Unit, output: StepOutput, touched: dict[Request, None]) -> None:
        plan, unit.plan = unit.plan, None
        assert plan is not None
        unit.compute_s += output.duration_s
        unit.busy_ticks += self.now - plan.formed_at
        result = unit.executor.step_result(output)
        touched.update(dict.fromkeys(request for request, _ in result.tokens or ()))
        try:
            ended = unit.replica.complete_step(plan, result, self.now)
            if ended:
                self.controller.settle(ended, self.now)
        except PolicyError as error:
            self._contain(unit.replica.replicaset, error)
            return
        for request, reason in ended:
            self._ended(request, reason)
        every = self._options.check_every_steps
        if every and self.num_steps % every == 0:
            self.controller.check_conservation()
        self._wake(unit)

    # Replicas and policies come and go

    def _lose(self, unit: Unit, detail: str) -> None:
        replica, name = unit.replica, unit.replica.replicaset
        key = name, replica.replica_id
        unit.is_lost, unit.is_stale, unit.plan, self.last_loss = True, False, None, detail
        self._idle[name].pop(replica.replica_id, None)
        if self.restarter is not None and self.restarter.lost(key, unit.worker):
            self._restarting.add(key)
        replicaset = self.controller.replicasets[name]
        others = replicaset.num_up > 1 or any(one == name for one, _ in self._restarting)
        max_reruns = self._options.max_reruns if others else None
        self._tell(Failure(self.now, name, replica.replica_id, detail, max_reruns))
        try:
            losses = self.controller.lose_replica(replica, detail, max_reruns, self.now)
        except PolicyError as error:
            self._contain(name, error)
            return
        for request, reason in losses.ended:
            self._ended(request, reason)
        for request, place in losses.moved:
            self._waits(request, place)
        if not replicaset.num_up:
            self._abandon_at[name] = self.now + to_ticks(self._options.wait_s)

    def _restore(self, unit: Unit, news: Restarted) -> None:
        name, replica_id = news.replica
        unit.worker, unit.is_lost = news.worker, False
        unit.executor.start_again()
        if unit.ahead is not None:
            unit.ahead.forget()
        self._restarting.discard(news.replica)
        self._abandon_at.pop(name, None)
        self._idle[name][replica_id] = unit
        self._tell(Restart(self.now, name, replica_id))
        self.controller.restore_replica(unit.replica, self.now)
        self._wake(unit)

    def _abandon_unless_some(self, name: str, detail: str) -> None:
        if name in self._abandon_at and not any(one == name for one, _ in self._restarting):
            self._abandon(name, detail)

    def _abandon(self, name: str, detail: str) -> None:
        del self._abandon_at[name]
        self._tell(Abandonment(self.now, name, detail))
        for request, reason in self.controller.abandon(self.controller.replicasets[name], detail, self.now):
            self._ended(request, reason)

    def _swap(self, message: SwapPolicy) -> None:
        change = message.change
        replicaset = self.controller.replicasets[change.replicaset]
        units = [self._unit(replica) for replica in replicaset.replicas]
        if any(unit.is_stale for unit in units):
            self._deferred.append(message)
            return
        try:
            swapped = self.controller.swap_policy(change, self.now)
        except VajraError as error:
            message.done(error)
            return
        choice = change.choice
        self._tell(Swap(self.now, replicaset.name, change.layer.value, choice.policy, choice.params))
        for request, replica in swapped.moved:
            for one in replicaset.replicas if replica is None else (replica,):
                self._unit(one).executor.expect(request, self._submissions[request])
        for unit in units:
            self._wake(unit)
        message.done(swapped)

    def refuse_swaps(self) -> None:
        """Nothing more will happen: whoever waits for a swap is told so."""
        self._receive()
        for message in (*self._swaps, *self._deferred):
            message.done(ExecutorError("engine: it ends; the policy stays as it is"))
        self._swaps, self._deferred = [], []

    def _contain(self, name: str, error: PolicyError) -> None:
        """A policy of this replicaset broke the contract. Raises the error unless breaches are contained."""
        if not self._options.contains_breaches:
            raise error
        _log.error("replicaset %s is out of service: %s", name, error, exc_info=error.__cause__)
        self._tell(Breach(self.now, name, str(error)))
        replicaset = self.controller.replicasets[name]
        self.controller.take_out_of_service(replicaset, error, self.now)
        for replica in replicaset.replicas:
            unit = self._unit(replica)
            if unit.plan is not None:
                unit.plan, unit.is_stale = None, True
            elif not (unit.is_lost or unit.is_stale):
                self._idle[name][replica.replica_id] = unit
        for request in [one for one in self._submissions if one.replicaset == name]:
            assert request.end_reason is not None
            self._ended(request, request.end_reason)
