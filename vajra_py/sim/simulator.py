"""A discrete-event simulation: the backend of a driver whose clock jumps to the next event.

State changes only at events, and the cost of simulating a step depends on how much the step changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from msgspec import Struct, structs

from vajra_py.contract.latency import LAST_S
from vajra_py.contract.observer import EndReason
from vajra_py.errors import ExecutorError, PolicyError
from vajra_py.plugins.watchdog import no_endless_calls
from vajra_py.runtime.kv.block_hashes import RecentPrompts
from vajra_py.runtime.records.input_log import (
    Abandonment,
    AdapterEnd,
    Control,
    Failure,
    PolicyChange,
    ReplicaChange,
    Restart,
    Retry,
    TierEnd,
    TransferEnd,
    WakeUp,
)
from vajra_py.runtime.requests.adapters import AdapterLoad
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.backend import Backend, TierCopy, Transfer
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.serving.driver import Driver, DriverOptions
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.serving.workload_adapter import facts_of, hashes_of
from vajra_py.runtime.step.plan import StepPlan
from vajra_py.runtime.support.clock import NEVER, to_seconds, to_ticks
from vajra_py.runtime.support.gc_control import infrequent_collections
from vajra_py.sim.decode_runs import TimesRuns
from vajra_py.sim.executor import SimulatedExecutor, StepTimer, TimesFirstStage
from vajra_py.sim.fast_forward import DecodeFastForward
from vajra_py.sim.replica import SimReplica
from vajra_py.workload import RequestSpec, Workload
from vajra_py.workload.followers import Followers

_STEP_END, _ARRIVAL = Phase.STEP_END, Phase.ARRIVAL


class SimulationOptions(Struct, frozen=True):
    """Options of one simulation."""

    horizon_s: float | None = None
    """Time in seconds after which no request arrives; None: the whole workload arrives."""
    drain: bool = True
    """True if the simulation continues after the last arrival (or the horizon) until every request has ended."""
    tenant_salt: bool = False
    fast_forward: bool = True
    """True if steps that policies declare to be repetitions are computed at once; results are the same either way."""
    check_every_steps: int = 0
    """Number of steps between conservation checks; 0: no checks."""
    expires: bool = True
    """True if requests expire by the clock; False: only by injected inputs."""
    arrival_delay_s: float = 0.0
    """Delay in seconds from a request's arrival until it is in the scheduler's queue."""
    asynchronous: bool = False
    """True if requests are scheduled as in an engine with async scheduling: a request that arrives during a step is not
    in the next step. The replicas must then be built with `BuilderOptions.holds_ended_slots`.
    """
    times_transfers: bool = True
    """True if durations of KV transfers and adapter loads are modelled; False: transfers and loads end by injected
    inputs.
    """
    wakes: bool = True
    """True if policies are woken at the times that they set; False: only by injected inputs."""
    isolates_policies: bool = False
    """True if a policy that breaks the contract takes its replicaset out of service instead of ending the
    simulation."""
    policy_timeout_s: float | None = 60.0
    """Real seconds after which a policy call counts as a violation of the contract; None: no limit."""


class Acceptance(Struct, frozen=True):
    """A request whose time of acceptance differs from the time at which the client sent it."""

    spec: RequestSpec
    arrived_at: float
    """Time in seconds at which the client sent the request."""
    is_queued: bool = True
    """True if the request is submitted at once; False if it is submitted when the next step is scheduled."""
    salt: str | None = None
    """Prefixes are shared only among requests with the same salt; None: as in the settings."""
    reads_cache: bool = True
    """True if the request may use the contents of the prefix cache."""


Injected: TypeAlias = (
    Acceptance
    | Failure
    | Restart
    | Abandonment
    | Control
    | PolicyChange
    | WakeUp
    | ReplicaChange
    | TransferEnd
    | AdapterEnd
    | TierEnd
    | Retry
    | str
)
"""Payload of `Simulator.inject`. Its type determines the phase: ARRIVAL, FAILURE, POLICY, WAKE, SCALING, TRANSFER or
TIER. Only a text has several possible phases: ADMISSION, EXPIRY or ABORT for the id of a request, PROGRAM for the id of
a program.
"""


class Simulator(Backend[SimReplica]):
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
        self.violations: list[tuple[int, str, str]] = []
        """Policies that were isolated: (tick, replicaset, violation)."""
        self._executor = executor
        self._options = options
        self._progress = progress
        self._followers = Followers()
        self._recent_prompts = RecentPrompts()
        self._arrivals: Iterator[RequestSpec] = iter(())
        self._horizon = NEVER if options.horizon_s is None else to_ticks(options.horizon_s)
        replicas = [self._replica(replica, timer_of(replica)) for replica in controller.replicas()]
        self._sim_replicas = replicas
        self._num_delayed = 0
        rules = DriverOptions(
            options.check_every_steps,
            options.expires,
            times_transfers=options.times_transfers,
            wakes=options.wakes,
            isolates_policies=options.isolates_policies,
        )
        self._driver = Driver(controller, self, replicas, rules)
        self._fast_forward = DecodeFastForward(self._driver, self._end_now)
        self._driver.use(self._fast_forward)

    def _replica(self, replica: Replica, timer: StepTimer) -> SimReplica:
        runs = timer if self._options.fast_forward and isinstance(timer, TimesRuns) else None
        num_stages = replica.limits.pipeline_stages
        if runs is not None:
            replica.join_at_once()
        return SimReplica(replica, timer, runs, [0] * num_stages if num_stages > 1 else [])

    @property
    def now(self) -> int:
        """The present tick."""
        return self._driver.now

    @property
    def num_steps(self) -> int:
        """Number of steps launched so far."""
        return self._driver.num_steps

    # Clock

    def run(self, workload: Iterable[RequestSpec]) -> None:
        """Simulate a workload until all requests have ended, or without `drain` until the last arrival or the horizon.
        Raises `PolicyError` if a policy leaves requests waiting forever or breaks the contract in another way.
        """
        with infrequent_collections(), no_endless_calls(self._options.policy_timeout_s):
            self._arrivals = self._timed(workload)
            self._next_arrival()
            self._run(NEVER if self._options.drain else self._horizon)

    def _run(self, until: int) -> None:
        driver = self._driver
        while True:
            driver.run_until(until)
            if not driver.events.heap:
                stall = self.controller.stall(driver.now)
                if stall is not None:
                    raise stall.at_time(to_seconds(driver.now))
                return
            if driver.until == NEVER:
                raise ExecutorError(f"simulator: the clock ends after {LAST_S:,.0f} s, and requests are left.")
            until = driver.until
            driver.advance_to(until)
            for name in self.controller.replicasets:
                self._fast_forward.interrupt_all(name)
            if driver.events.heap[0][0] > until:  # no event is left now, not even the end of an interrupted run
                self._submit_arrived()
                return

    def _submit_arrived(self) -> None:
        """Submit the requests that have arrived, but that the scheduler would see only after the simulation's end."""
        for _, _, _, _, payload in sorted(self._driver.events.heap, key=lambda event: event[:4]):
            if isinstance(payload, Acceptance):
                self.on_arrival(structs.replace(payload, is_queued=True))

    def abort_at(self, seconds: float, request_id: str) -> None:
        """Schedule the abort of a request by its client, at a time in seconds."""
        self.inject(to_ticks(seconds), Phase.ABORT, request_id)

    def inject(self, tick: int, phase: Phase, payload: Injected) -> None:
        """Schedule an event of a recorded run."""
        self._driver.events.push(tick, phase, payload)

    # Arrivals and departures

    def _timed(self, workload: Iterable[RequestSpec]) -> Iterator[RequestSpec]:
        """Return the requests with an arrival time of their own; the other requests arrive after the requests that they
        follow.
        """
        if isinstance(workload, Workload) and not workload.has_followers:
            return iter(workload)
        if isinstance(workload, Iterator):  # the workload is iterated over twice
            workload = list(workload)
        for spec in workload:
            self._followers.add(spec)
        if isinstance(workload, Workload):
            # `leaders` creates only the requests without parents: creating requests with long prompts is slow.
            return iter(workload.leaders())
        return (spec for spec in workload if not spec.parents)

    def _next_arrival(self) -> None:
        spec = next(self._arrivals, None)
        if spec is not None:
            self._driver.events.push(to_ticks(spec.arrived_at), _ARRIVAL, spec)
        elif not self._options.drain and self._horizon == NEVER:
            self._driver.stop_now()

    def on_arrival(self, payload: RequestSpec | Acceptance) -> None:
        """See `Backend`."""
        if isinstance(payload, Acceptance):
            spec, arrived_at, salt, reads = payload.spec, payload.arrived_at, payload.salt, payload.reads_cache
            if not payload.is_queued and (seen_at := self._next_scheduling()) > self.now:
                self.inject(seen_at, Phase.ARRIVAL, structs.replace(payload, is_queued=True))
                return
        else:
            if self.now > self._horizon:
                return
            spec, arrived_at, salt, reads = payload, None, None, True
            if not spec.parents:  # push the next arrival first: no step may be formed between arrivals of a tick
                self._next_arrival()
            options = self._options
            if options.asynchronous or options.arrival_delay_s:
                acceptance = Acceptance(spec, to_seconds(self.now), is_queued=not options.asynchronous)
                self.inject(self.now + to_ticks(options.arrival_delay_s), Phase.ARRIVAL, acceptance)
                return
        if salt is None:
            salt = spec.tenant if self._options.tenant_salt else ""
        recent = self._recent_prompts
        self._driver.submit(
            facts_of(spec),
            lambda size: hashes_of(spec, size, salt, reads_cache=reads, recent=recent),
            spec,
            arrived_at,
        )

    def _next_scheduling(self) -> int:
        """Return the tick at which an async engine schedules a request that arrives now.

        This is the present tick if a replica is idle. Otherwise, it is the tick after a busy replica's step in flight
        ends; successive calls use the busy replicas in turn.
        """
        replicas = self._sim_replicas
        if any(one.is_idle for one in replicas):
            return self.now
        replicas = [one for one in replicas if one.run_ends or one.stage_free_at or one.free_at != NEVER]
        if not replicas:
            return self.now
        one = replicas[self._num_delayed % len(replicas)]
        self._num_delayed += 1
        ends = one.run_ends or one.stage_free_at[:1] or [one.free_at]
        return next((end for end in ends if end >= self.now), self.now) + 1

    def on_submitted(self, request: Request, payload: RequestSpec) -> None:
        """See `Backend`."""
        self._executor.expect(request, payload.num_output_tokens)

    def on_placed(self, request: Request, replicas: Sequence[SimReplica]) -> None:
        """See `Backend`; one executor serves all replicas."""

    def on_transfer(self, transfer: Transfer[SimReplica]) -> None:
        """See `Backend`; the end is an event that comes from the driver's model of the links or from a recorded run."""

    def on_transfer_cancelled(self, transfer: Transfer[SimReplica]) -> None:
        """See `Backend`."""

    def on_adapter_load(self, replica: SimReplica, load: AdapterLoad) -> None:
        """See `Backend`; the end is an event of a recorded run."""

    def on_tier_copy(self, copy: TierCopy[SimReplica]) -> None:
        """See `Backend`; the end is an event of a recorded run."""

    def on_tier_copy_cancelled(self, copy: TierCopy[SimReplica]) -> None:
        """See `Backend`."""

    def on_requests_ended(self, ended: Sequence[tuple[Request, EndReason]]) -> None:
        """See `Backend`; requests whose last parent has ended arrive after their think time."""
        for request, _ in ended:
            self._executor.release(request)
            for spec in self._followers.released_by(request.request_id):
                self._driver.events.push(self.now + to_ticks(spec.think_time_s), Phase.ARRIVAL, spec)
        if self._progress is not None:
            self._progress(len(ended), to_seconds(self.now))

    def on_policy_change(self, payload: PolicyChange) -> None:
        """See `Backend`."""
        self._driver.swap_policy(payload)

    def on_isolated(self, replicaset: str, error: PolicyError) -> None:
        """See `Backend`."""
        self.violations.append((self.now, replicaset, str(error)))

    # Steps

    def launch(self, replica: SimReplica, plan: StepPlan) -> int:
        """See `Backend`. The end of the step becomes an event; if repetitions are launched with the step, only the end
        of the last repetition does.
        """
        if replica.num_stages > 1:
            return self._launch_in_stages(replica, plan)
        replica.plan = plan
        end = None if replica.runs is None or plan.num_apart else self._fast_forward.launch(replica, plan)
        if end is None:
            ticks = replica.timer.stage_ticks(plan)
            end = self._driver.now + (ticks if ticks > 1 else 1)
        self._driver.events.push(end, _STEP_END, (replica, None, replica.epoch), replica.rank)
        return end

    def _launch_in_stages(self, one: SimReplica, plan: StepPlan) -> int:
        free_at, timer = one.stage_free_at, one.timer
        if isinstance(timer, TimesFirstStage):
            leaves_at = self.now + timer.stage_ticks(plan)
            free_at[0] = min(self.now + timer.first_stage_ticks(plan), leaves_at)
        else:
            ticks = max(1, timer.stage_ticks(plan))
            leaves_at = self.now
            for stage, free in enumerate(free_at):
                leaves_at = max(leaves_at, free) + ticks
                free_at[stage] = leaves_at
        events = self._driver.events
        events.push(free_at[0], Phase.STAGE_END, (one, plan, one.epoch), one.rank)
        events.push(leaves_at, _STEP_END, (one, plan, one.epoch), one.rank)
        return free_at[0]

    def cancel(self, replica: SimReplica) -> int:
        """See `Backend`; the replica is free at once."""
        replica.plan = None
        replica.stage_free_at[:] = [self.now] * len(replica.stage_free_at)
        self._fast_forward.forget(replica)
        return self.now

    def on_step_end(self, replica: SimReplica, payload: StepPlan | None, *, at_once: bool = True) -> None:
        """See `Backend`; `payload` is the plan if there are several pipeline stages.

        `at_once`: see `Driver.complete`.
        """
        plan = payload
        if plan is None:
            if replica.run_ends is not None:
                self._fast_forward.finish(replica)
            plan, replica.plan = replica.plan, None
            assert plan is not None
        self._driver.complete(replica, plan, self._executor.result(plan), at_once=at_once)

    def _end_now(self, one: SimReplica) -> None:
        self.on_step_end(one, None, at_once=False)
