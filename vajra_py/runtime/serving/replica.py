"""One replica: calls its policy to form steps and applies the steps' results."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, TypeAlias, cast

from msgspec import Struct

from vajra_py.config import DEFAULT_POOL
from vajra_py.contract import (
    EndedRun,
    EndedStep,
    Layer,
    PoolRole,
    PreemptionMode,
    Refusal,
    ReplicaLimits,
    ReplicaScheduler,
)
from vajra_py.contract.latency import LatencyModel
from vajra_py.contract.observer import EndReason, Observer, ScheduledChunk, StepEnd, StepRecord
from vajra_py.errors import POLICY_EXCEPTIONS, ConfigError, PolicyError, Problem, VajraError
from vajra_py.runtime.kv import KvMemory, TokenBlockHashes
from vajra_py.runtime.kv.interface import max_request_tokens
from vajra_py.runtime.kv.retention_order import CachedEntry
from vajra_py.runtime.queues import RequestQueue
from vajra_py.runtime.queues.keys import SlackReader
from vajra_py.runtime.queues.shared import SharedAccess
from vajra_py.runtime.records.input_log import Gate
from vajra_py.runtime.records.step_log import PlanRepeats, StepLog
from vajra_py.runtime.requests.adapters import Adapters
from vajra_py.runtime.requests.connector import ConnectedKv, ConnectorRules, FailedLoads, KvConnector, KvReport
from vajra_py.runtime.requests.decode_pool import DecodePool
from vajra_py.runtime.requests.kv_inputs import KvNews
from vajra_py.runtime.requests.lifecycle import MOVED, Lifecycle, PinSeconds
from vajra_py.runtime.requests.listeners import NOBODY, Listeners
from vajra_py.runtime.requests.request import DraftedOutputs, Request, RequestState, num_known_of
from vajra_py.runtime.requests.running_set import RunningSet, StateView, Unverified
from vajra_py.runtime.step.builder import Builder
from vajra_py.runtime.step.builder_options import BuilderOptions, IllegalPlan
from vajra_py.runtime.step.fast_forward import Repeats, run_of
from vajra_py.runtime.step.plan import Executor, PlannedChunk, StepPlan, StepResult
from vajra_py.runtime.support.clock import TICKS_PER_SECOND, to_seconds

# Module constants, because in Python 3.11 the lookup of an enum member costs more than a function call; these members
# are needed for every request.
_RUNNING, _ENDED = RequestState.RUNNING, RequestState.ENDED
_STOP, _LENGTH, _FAILED = EndReason.STOP, EndReason.LENGTH, EndReason.FAILED
_PREFILL = PoolRole.PREFILL
_KV_BLOCKS = Refusal.KV_BLOCKS
_is_padding = attrgetter("is_padding")


MAX_EMPTY_STEPS = 1000
"""Maximum number of consecutive attempts at a step that only preempt requests; then the policy counts as stuck."""


Around: TypeAlias = Callable[[str, Layer, str, Callable[..., Any]], Callable[..., Any]]
"""Function of (replicaset, layer, policy, method) that returns the function to call instead of that method, for
instance to time it.
"""


class ReplicaParts(Struct, frozen=True):
    """Parts from which a replica is built."""

    replicaset: str
    replica_id: int
    limits: ReplicaLimits
    memory: KvMemory
    queue: RequestQueue
    shared: SharedAccess
    policy: ReplicaScheduler
    policy_name: str
    latency: LatencyModel
    options: BuilderOptions
    executor: Executor
    listeners: Listeners = NOBODY
    slack: SlackReader | None = None
    """Reader of the slack that the prioritizer predicts; None if it predicts none."""
    pins: PinSeconds | None = None
    """Function of the retention policy that returns how long an ended request's content is pinned; None: nothing is
    pinned.
    """
    pool: str = DEFAULT_POOL
    role: PoolRole = PoolRole.MIXED
    adapters: Adapters | None = None
    """LoRA adapters; None if the replica has none, so that requests that name an adapter are rejected."""


class Replica:
    """One model instance: its queue, its memory, its running requests, and the policy that forms its steps."""

    __slots__ = (  # CPython reads the attributes of an object slowly if its `__dict__` has more than 30 entries
        "_awaits_reports",
        "_cache_at_end",
        "_connected",
        "_drafted_outputs",
        "_end_watchers",
        "_ends_seen_in",
        "_eviction_watchers",
        "_has_drafts",
        "_inherited",
        "_joins_at_once",
        "_late_tokens",
        "_listener_error",
        "_num_waiting_in_run",
        "_output_limits",
        "_over",
        "_publishes_late",
        "_schedule",
        "_step_logs",
        "_step_watchers",
        "_to_abort",
        "_view",
        "adapters",
        "around",
        "builder",
        "drains_by_migration",
        "expects_kv",
        "forms_steps",
        "gives_first_token",
        "hands_off",
        "has_tiers",
        "lifecycle",
        "limits",
        "max_request_tokens",
        "memory",
        "newly_held",
        "num_in_flight",
        "num_steps",
        "parts",
        "queue",
        "repeats",
        "replica_id",
        "replicaset",
        "running_set",
    )

    migrates = True
    """True if running requests can move to other replicas; False if their KV cannot be read."""

    def __init__(self, parts: ReplicaParts) -> None:
        self.parts = parts
        self.replicaset = parts.replicaset
        self.replica_id = parts.replica_id
        self.limits = parts.limits
        self.max_request_tokens = max_request_tokens(parts.limits, parts.memory)
        """Maximum number of prompt and output tokens together of one request on this replica."""
        self.memory = parts.memory
        self.queue = parts.queue
        self.running_set = RunningSet(parts.limits, parts.memory, parts.queue, parts.shared)
        self.running_set.adapters = self.adapters = parts.adapters
        self.lifecycle = Lifecycle(parts.replica_id, self.running_set, parts.replicaset, parts.pins)
        self.builder = Builder(self.running_set, parts.latency, self.lifecycle, parts.options)
        drafts = parts.options.drafts
        self._has_drafts = drafts is not None
        self._drafted_outputs = DraftedOutputs()
        self._publishes_late = drafts is not None and drafts.publishes_late and parts.options.cache_at_schedule
        if self._has_drafts:
            self.builder.use_drafts(parts.executor)
            self.lifecycle.keeps_as_cached = self._publishes_late
        self.num_steps = self.num_in_flight = 0
        self.has_tiers = parts.memory.tiers is not None
        """True if there are memory tiers below the device."""
        self._connected: ConnectedKv | None = None
        self._awaits_reports = False
        """True if each step's results also report events outside the replica, such as ended KV transfers."""
        self._late_tokens: deque[Sequence[tuple[Request, int]]] = deque()
        """Tokens of ended steps whose connector report or accepted drafts have not arrived yet; one entry per step."""
        self._joins_at_once = False
        """True if requests that arrive with their KV join the decode pool before their first step, not after it."""
        self.forms_steps = True
        """False while the backend accepts no steps."""
        self.around: Around | None = None
        self._view = StateView(parts.replica_id, self.running_set)
        self._step_watchers: list[Observer] = []
        self._end_watchers: list[Observer] = []
        self._eviction_watchers: list[Observer] = []
        self._step_logs: list[StepLog] = []
        self._output_limits: dict[Request, int] = {}
        self._to_abort: dict[Request, tuple[EndReason, str]] = {}
        self._over: set[Request] = set()
        """Requests that have reached their output limit but are part of a step that was formed before; the step's
        results for these requests are dropped.
        """
        self.hands_off = parts.role is _PREFILL
        """True if requests leave this replica when their prompt is computed, unless they must stay."""
        self.gives_first_token = True
        """True if the token sampled at the end of a prompt is an output even if the request then leaves."""
        self.newly_held: list[Request] = []
        """Requests that entered the state HELD since `take_newly_held` was last called."""
        self.drains_by_migration = False
        """True while the replica's running requests are moved away; a step with an admission is then not repeated."""
        self.expects_kv = False
        """True if requests wait for blocks of this replica; one of them gets blocks after each step."""
        self._cache_at_end = not parts.options.cache_at_schedule
        self.repeats = Repeats(self.running_set)
        self._num_waiting_in_run = 0
        self._ends_seen_in = -1  # index of the latest step formed before ended requests released their blocks
        self._inherited: list[Request] = []
        """Running requests of an earlier policy, in order of admission; the present policy might never run them."""
        self.bind_policy(parts)

    def bind_policy(self, parts: ReplicaParts) -> None:
        """Replace policy, listeners or queue; the caller has already put the waiting requests into a new queue."""
        if parts.policy is not self.parts.policy:
            self._inherited = [*self.running_set.running(), *self.running_set.in_flight]
        self.parts = parts
        self._listener_error: PolicyError | None = None
        """Error of a policy that was notified of a run of steps; it is raised only when the step in flight ends, not
        during other events.
        """
        self.queue = self.running_set.queue = parts.queue
        self.queue.use_hits(self.memory.follow_hits(wanted=self.queue.reads_hits))
        self.lifecycle.listeners = parts.listeners
        self.builder.bind_policy(parts.policy_name)
        self._view.slack = parts.slack
        if self.adapters is not None:
            self.adapters.chooses = getattr(parts.policy, "evict_adapter", None)
        schedule = parts.policy.schedule
        around, name = self.around, parts.policy_name
        self._schedule = (
            schedule if around is None else around(self.replicaset, Layer.REPLICA_SCHEDULER, name, schedule)
        )
        self.repeats.read_traits(parts.policy, listens=parts.listeners.listen_to_each_step)

    def watch(self, observers: Sequence[Observer]) -> None:
        """Notify these observers of all events of this replica from now on."""
        self._step_watchers = [one for one in observers if one.wants_steps]
        self._end_watchers = [one for one in observers if one.wants_step_ends]
        self._step_logs = [one for one in observers if isinstance(one, StepLog) and one.wants_plans]
        self.running_set.log_pool(on=bool(self._step_logs))
        self.lifecycle.observers = self.lifecycle.pinning.observers = observers
        self._eviction_watchers = [one for one in observers if type(one).on_evicted is not Observer.on_evicted]
        self.memory.report_evictions(self._show_evicted if self._eviction_watchers else None)
        self.builder.keep_notes(on=bool(self._step_watchers or self._step_logs))

    def join_at_once(self) -> None:
        """Let requests that arrive with their KV join the decode pool when their first step is formed; allowed only
        if the executor reads only the features of a plan. Without effect with several pipeline stages or KV groups,
        drafts, or caching at the end of steps.
        """
        is_plain = self.limits.pipeline_stages == self.memory.num_groups == 1 and not self._has_drafts
        self._joins_at_once = is_plain and not self._cache_at_end

    def use_connector(self, connector: KvConnector, rules: ConnectorRules) -> ConnectedKv:
        """From now on, load and save KV of requests through a connector; return the state of its loads.

        Raises `ConfigError` if the memory has KV parallelism.
        """
        if self.memory.num_groups > 1:
            message = f"a connector supports a single group of blocks ({self.memory.num_groups} groups)"
            raise ConfigError(Problem("replica.kv_parallel.groups", message, "Allowed: 1"))
        running_set, builder = self.running_set, self.builder

        def is_full() -> bool:
            return builder.tokens_left <= 0 or running_set.num_running >= self.limits.max_batch_size

        connected = ConnectedKv(connector, rules, running_set, self.lifecycle, is_full, self._to_abort)
        self._awaits_reports = rules.reports_with_steps
        self._connected = running_set.connected = self.lifecycle.connected = connected
        builder.use_connector(connected)
        return connected

    # Arrivals and departures

    def enqueue(self, request: Request, now: float) -> None:
        """Queue a request that was bound to this replica."""
        request.replica_id = self.replica_id
        self.lifecycle.register(request, now)
        self.queue.add(request, now)

    # Arrivals and departures of KV

    def take_newly_held(self) -> list[Request]:
        """Return the requests that entered the state HELD since this was last called."""
        held = self.newly_held
        if held:
            self.newly_held = []
        return held

    def release_held(self, request: Request) -> None:
        """Free the blocks of a held request that has ended, or whose KV another replica has received."""
        self._output_limits.pop(request, None)
        self.lifecycle.release_held(request)

    def resume_held(self, request: Request, now: int) -> list[tuple[Request, EndReason]]:
        """Continue a held request on this replica; if it ends with its first token, return it with the reason, else
        return no request.
        """
        self.lifecycle.resume_held(request)
        result = StepResult()
        if not request.num_remaining_tokens:
            result = self.parts.executor.withheld_token(request)
            self._append_tokens(result.tokens or ())
            if request.add_output(now) == 1:
                self.lifecycle.first_token(request, now)
        num_left = self._output_limit(request) - request.num_output_tokens
        if num_left <= 0 or request in result.stopped:
            reason = self._end_reason(request, result)
            self._finish(request, reason, to_seconds(now))
            return [(request, reason)]
        if not self.lifecycle.can_resume(request):
            self.lifecycle.wait_with_kv(request, to_seconds(now))
        elif request.num_remaining_tokens == 1 and request.num_output_tokens:
            self._begin_decode(request, num_left)
        return []

    def abort(self, request: Request, reason: EndReason, now: float, detail: str = "") -> bool:
        """Abort a request of this replica; return False if the request ends only with the step in flight."""
        if request.state is not _RUNNING:
            self._output_limits.pop(request, None)
            self.lifecycle.end_waiting(request, reason, now, detail)
        elif self.num_in_flight:
            self._to_abort[request] = (reason, detail)
            return False
        else:
            self._finish(request, reason, now, detail)
        return True

    def lose(self, detail: str, now: float) -> list[tuple[Request, EndReason]]:
        """End every request of a lost replica; the requests keep their output so far."""
        running_set, reason = self.running_set, _FAILED
        self.num_in_flight = 0
        held = [*running_set.running(), *running_set.in_flight]
        queued = [cast(Request, one) for one in self.queue.ordered(now)]
        for request in held:
            self._finish(request, reason, now, detail)
        for request in queued:
            self.abort(request, reason, now, detail)
        leaving = [one for one in self.lifecycle.held if one.state is not _ENDED and one.replica_id == self.replica_id]
        for request in leaving:
            self.lifecycle.end_held(request, reason, now, detail)
        self.clear()
        return [(request, reason) for request in (*held, *queued, *leaving)]

    def set_gate(self, gate: Gate) -> None:
        """Apply the backend's limits on the work that this replica may do."""
        self.forms_steps = gate.forms
        self.running_set.admits = gate.admits
        self.running_set.bars_preempted = gate.bars_preempted
        self.lifecycle.keeps_as_cached = self._publishes_late or (self._has_drafts and gate.bars_preempted)

    @property
    def to_end(self) -> Mapping[Request, tuple[EndReason, str]]:
        """Aborted requests that end with their present step, and the reasons."""
        return self._to_abort

    def clear(self) -> None:
        """Drop all requests and the content of all KV blocks; the caller accounts for the requests."""
        self.num_in_flight = 0
        self._output_limits.clear()
        self._to_abort.clear()
        self._over.clear()
        self._late_tokens.clear()
        self._inherited = []
        self.lifecycle.held.clear()
        self.newly_held = []
        self.running_set.clear()
        self.memory.clear()
        self.lifecycle.holding.clear()
        if self._connected is not None:
            self._connected.clear()
        self.builder.reset()

    @property
    def is_empty(self) -> bool:
        """True if no request runs, waits, is part of a step or holds KV blocks on this replica."""
        keeps = self._connected is not None and any(self._connected.kept)
        return not (
            self.num_in_flight or self.running_set.num_running or len(self.queue) or self.lifecycle.held or keeps
        )

    def can_hold(self, request: Request) -> bool:
        """Return True if the replica serves the request's adapter, and the limits and an empty memory have room for the
        request at its maximum length.
        """
        if not self.has_adapter(request):
            return False
        num_tokens = request.num_prompt_tokens + request.max_tokens
        # A prefill replica needs room only for known tokens, because the request leaves before it decodes. The known
        # tokens include output if the request is recomputed.
        if self.parts.role is _PREFILL:
            return num_tokens <= self.limits.max_model_len and self.memory.fits(request.num_known_tokens)
        return num_tokens <= self.limits.max_model_len and self.memory.fits(num_tokens - 1)

    def has_adapter(self, request: Request) -> bool:
        """Return True if the request names no adapter, or one that the replica serves."""
        return not request.adapter or (self.adapters is not None and self.adapters.serves(request.adapter))

    def has_room_for(self, request: Request) -> bool:
        """Return True if there are a free batch slot and enough free blocks for the request's known tokens."""
        is_free = self.running_set.num_running < self.limits.max_batch_size
        return is_free and self.memory.blocks_for(request.num_known_tokens) <= self.memory.free_blocks

    @property
    def lacks_blocks_to_run(self) -> bool:
        """True if no step could be formed at the policy's last call, and a running request was refused for lack of KV
        blocks. False if the policy is idle on purpose or the backend accepts no steps.
        """
        builder = self.builder
        if self.num_in_flight or not self.forms_steps or builder.idle_at is not None:
            return False
        return any(
            refusal is _KV_BLOCKS and one.state is _RUNNING and one.replica_id == self.replica_id
            for one, refusal in builder.refusals.items()
        )

    @property
    def num_pending_tokens(self) -> int:
        """Number of tokens left to prefill, summed over waiting and running requests."""
        # `in_flight` may also contain decodes, which have no token left to compute.
        prefills = chain(self.running_set.partial, self.running_set.in_flight)
        return self.queue.num_tokens + sum(one.num_remaining_tokens for one in prefills)

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens whose KV is held for running requests."""
        running_set = self.running_set
        others = (*running_set.skipped, *running_set.partial, *running_set.in_flight)
        return running_set.pool.context_tokens + sum(one.num_computed_tokens for one in others)

    # Forming steps

    def next_plan(self, now: int) -> StepPlan | None:
        """Form the next step that computes something; return None if nothing can run until the state changes."""
        builder, running_set = self.builder, self.running_set
        running_set.barred.clear()
        if not running_set.num_running and not running_set.may_admit:
            if builder.slots_held:
                self._see_ends()
            return None
        if not self.forms_steps:
            return None
        if builder.num_preempted_before:
            builder.begin_attempts()
        for _ in range(MAX_EMPTY_STEPS):
            plan = self.form_step(now)
            if plan is None and builder.slots_held:
                plan = self._form_after_held_slots(now)
            while plan is None and self._release_pin(now):
                plan = self.form_step(now)
            if plan is None:
                if self._waits(now) or not (self._give_way(now) or self._give_up_kv(now)):
                    return None
                builder.count_preempted(1)
                continue
            if plan.chunks or plan.num_pool_decodes:
                return plan
            builder.count_preempted(len(plan.preempted))
        stuck = PolicyError(self.parts.policy_name, "preempts in every step and never runs a request")
        raise stuck.at(self.replica_id, self.num_steps)

    def _form_after_held_slots(self, now: int) -> StepPlan | None:
        """Free the slots that ended requests still hold, and call the policy again: too few free slots may be the
        reason why no step was formed.
        """
        self._see_ends()
        return self.form_step(now)

    def _see_ends(self) -> None:
        """Free the slots and blocks that ended requests still hold (`BuilderOptions.holds_ended_slots`)."""
        self.builder.hold_slots(0)
        self.lifecycle.release_ended()

    def _release_pin(self, now: int) -> bool:
        """End a pin, because the policy can run no request; return False if the policy is idle on purpose, a step is in
        flight, an adapter is being loaded, or the end of a pin would free no block.
        """
        if self.num_in_flight or self._waits(now):
            return False
        return self.lifecycle.pinning.release_one(to_seconds(now))

    def _waits(self, now: int) -> bool:
        """Return True if the policy is idle on purpose, or an adapter is being loaded."""
        adapters = self.adapters
        return self.builder.idle_at is not None or (adapters is not None and adapters.is_loading())

    def _give_way(self, now: int) -> bool:
        """Preempt a running request that an earlier policy admitted, the latest one first, because the present policy
        runs nothing; return False if there is no such request, or a step is in flight.
        """
        while self._inherited and not self.num_in_flight:
            request = self._inherited.pop()
            if request.state is _RUNNING and request.replica_id == self.replica_id:
                self.lifecycle.preempt(request, PreemptionMode.RECOMPUTE, to_seconds(now))
                return True
        return False

    def _give_up_kv(self, now: int) -> bool:
        """Free the KV of the least urgent waiting request that has KV, because the policy can run no request; return
        False if no waiting request has KV, a step is in flight, or a connector's report may still let a request run.
        """
        running_set, connected, seconds = self.running_set, self._connected, to_seconds(now)
        if self.num_in_flight:
            return False
        if connected is not None:
            if self._awaits_reports and connected.is_awaited:
                return False  # a report may free blocks, or make a request runnable
            connected.end_loads(seconds)
        if not running_set.arrived:
            return False
        last = max(running_set.arrived, key=lambda one: self.queue.urgency(one, seconds))
        self.lifecycle.give_up_kv(last, seconds)
        if self.parts.role is not _PREFILL:
            last.stays_at = self.replica_id  # otherwise replicas could move the request back and forth forever
        return True

    def form_step(self, now: int) -> StepPlan | None:
        """Call the policy once and return the plan: None if the policy did nothing, a plan without entries if it only
        preempted.
        """
        builder, view = self.builder, self._view
        view.now = seconds = now / TICKS_PER_SECOND
        builder.start(seconds)
        if self.queue.is_arbitrary:
            self.running_set.read_keys_again()
        try:
            if self.memory.is_watched and self.memory.policy_error is not None:
                raise self.memory.policy_error
            self._schedule(view, builder, seconds)
        except PolicyError as error:
            error.at(self.replica_id, self.num_steps)
            raise
        except VajraError:
            raise
        except IllegalPlan as error:
            name = self.parts.policy_name
            violation = PolicyError.caused_by(name, error, message=str(error), request_id=error.request_id)
            raise violation.at(self.replica_id, self.num_steps) from error
        except POLICY_EXCEPTIONS as error:
            raise PolicyError.caused_by(self.parts.policy_name, error).at(self.replica_id, self.num_steps) from error
        plan = builder.finish(self.num_steps, now)
        if plan is None:
            return None
        if plan.chunks or plan.num_pool_decodes:
            self.num_in_flight += 1
            self.num_steps += 1
            if self._connected is not None:
                self._connected.step_formed(plan)
            if builder.slots_held:
                self._see_ends()
                self._ends_seen_in = plan.step_index
        if self._step_logs:
            changes = self.running_set.take_pool_changes()
            for log in self._step_logs:
                log.on_plan(self.replicaset, plan, changes)
        if self._step_watchers:
            self._show(plan)
        if builder.num_moved and self._joins_at_once:
            self._let_join(plan)
        return plan

    def _let_join(self, plan: StepPlan) -> None:
        """Let requests that arrived with their KV join the decode pool if this plan computes their last known token."""
        pool = self.running_set.pool
        if plan.num_pool_decodes < len(pool) or plan.notes or self.parts.listeners.step_runs:
            return  # the step leaves out decodes, or must be reported separately from the steps after it
        for request, num_tokens, _, kind in plan.chunks:
            num_outputs = request.num_output_tokens
            if kind is not MOVED or num_tokens > 1 or not num_outputs or request.num_remaining_tokens:
                continue
            if plan.pool is None:
                pool.commit()
                plan.pool = pool
            plan.num_apart -= 1
            self._begin_decode(request, self._output_limit(request) - num_outputs)

    def _show_evicted(self, block: CachedEntry, now: float) -> None:
        for observer in self._eviction_watchers:
            observer.on_evicted(self.replicaset, self.replica_id, block, now)

    def take_dropped(self) -> list[tuple[Request, EndReason]]:
        """Return the requests that the policy has dropped since the last call, with the reasons; the caller settles
        them.
        """
        dropped = self.builder.take_dropped()
        for request, _ in dropped:
            self._output_limits.pop(request, None)
            self.parts.executor.release(request)
        return dropped

    def _show(self, plan: StepPlan) -> None:
        record = StepRecord(
            step_index=plan.step_index,
            replicaset=self.replicaset,
            replica_id=self.replica_id,
            formed_at=to_seconds(plan.formed_at),
            chunks=[ScheduledChunk(*entry) for entry in plan.entries()],
            preempted=plan.preempted,
            features=plan.features,
            free_blocks=plan.free_blocks,
            num_waiting=plan.num_waiting,
            num_running=plan.num_running,
            notes=plan.notes,
        )
        for observer in self._step_watchers:
            observer.on_step_begin(record)

    # Repeated decode steps

    def num_repeats(self, plan: StepPlan) -> int:
        """Return the number of further steps that are certain to repeat this one (`Repeats.num_alike`). Return 0 if an
        observer gets every step, if a request may move to or from this replica after this step, if a connector report
        may arrive, or if ended requests held slots and blocks while this step was formed.
        """
        # A request handed off while this step was formed may have to stay; the next step then has one more decode.
        is_awaited = self.expects_kv or self._awaits_reports or self.builder.hands_off
        # If the replica drains by migration, the requests that this step admits move to others after the step.
        moves_on = self.drains_by_migration and plan.chunks
        # The next step has the slots and blocks that were freed after this one was formed.
        next_has_more_room = plan.step_index == self._ends_seen_in
        return (
            0 if self._step_watchers or is_awaited or moves_on or next_has_more_room else self.repeats.num_alike(plan)
        )

    def note_waiting(self) -> None:
        """Store the present number of waiting requests; observers get this number for repeated steps from now on."""
        if self._end_watchers or self._step_logs:
            self._num_waiting_in_run = self.running_set.num_waiting

    def complete_repeats(self, plan: StepPlan, ended_at: array[int], now: int) -> None:
        """Complete `plan` and its repetitions, which ended at these ticks; `plan` then represents the next repetition,
        which is in flight.
        """
        if plan.chunks and self._step_logs and len(ended_at) > 1:  # a step with chunks is logged alone
            self.complete_repeats(plan, ended_at[:1], now)
            ended_at = ended_at[1:]
        pool, has_joined = plan.pool, bool(plan.chunks)
        assert pool is not None
        if self._end_watchers:
            run = run_of(self.replicaset, plan, ended_at, self._num_waiting_in_run)
            for observer in self._end_watchers:
                observer.on_step_run(run)
        step_index, formed_at = plan.step_index, plan.formed_at
        if self._step_logs:
            repeats = PlanRepeats(ended_at, pool.growth_cycle(len(ended_at) - 1))
            for log in self._step_logs:
                log.on_plan_repeats(self.replicaset, plan, repeats, self._num_waiting_in_run, now)
        self.builder.repeat(plan, len(ended_at), ended_at[-1], self._num_waiting_in_run)
        pool.advance(ended_at)
        self.num_steps += len(ended_at)
        if has_joined and self._step_logs:
            changes = self.running_set.take_pool_changes()
            for log in self._step_logs:
                log.on_plan(self.replicaset, plan, changes)
        if self.parts.listeners.step_runs:
            self._notify_run(step_index, formed_at, pool, ended_at)

    def _notify_run(self, step_index: int, formed_at: int, pool: DecodePool, ended_at: Sequence[int]) -> None:
        seconds = [tick / TICKS_PER_SECOND for tick in ended_at]
        run = EndedRun(self.replica_id, step_index, to_seconds(formed_at), seconds, list(pool.in_admission_order()))
        try:
            for notify in self.parts.listeners.step_runs:
                notify(run)
        except PolicyError as error:
            self._listener_error = self._listener_error or error

    # Completing steps

    def first_stage_completed(self, plan: StepPlan) -> None:
        """When a step has left the first pipeline stage, make the step's unfinished prompts available to the next step,
        so that chunks of one prompt are pipelined.
        """
        for chunk in plan.chunks:
            request = chunk.request
            if request.in_flight and request.num_remaining_tokens > 0 and request not in self._to_abort:
                self._land(request)

    def may_end(self, plan: StepPlan, result: StepResult) -> bool:
        """Return True if a request may end with this step, False if certainly none does; the step's result is not
        applied yet.
        """
        if result.stopped or result.failed or result.report is not None or self._to_abort or plan.drafts:
            return True
        if plan.pool is not None and plan.pool.ending_in_flight():
            return True
        return any(self._output_limit(one.request) - one.request.num_output_tokens <= 1 for one in plan.chunks)

    def complete_step(self, plan: StepPlan, result: StepResult, now: int) -> list[tuple[Request, EndReason]]:
        """Apply a step's result; return the requests that ended: those that the step completed, in order of admission,
        then aborted ones, then those whose KV could not be loaded.
        """
        self.num_in_flight -= 1
        listeners = self.parts.listeners.step_ends
        work = plan.work() if listeners else None
        lost: FailedLoads | None = None
        if result.report is not None and self._connected is not None:
            lost = self._find_failed(result.report, plan)
        if result.tokens is not None:
            void = () if lost is None else lost.running
            tokens = [one for one in result.tokens if one[0] not in void] if void else result.tokens
            is_late = self._connected is not None and self._connected.rules.forms_ahead and result.report is None
            if is_late or result.is_ahead:
                self._late_tokens.append(tokens)
            else:
                self._append_tokens(tokens)
        done = plan.pool.emit(now) if plan.pool is not None else []
        if plan.drafts:
            done += self._apply_drafts(plan, result, now, () if lost is None else lost.running)
        if lost is not None and lost.running:
            done = [one for one in done if one not in lost.running]
        if self._cache_at_end:
            self._cache_computed(plan)
        if plan.num_apart:
            done += self._apply_chunks(plan, result, now, lost)
        if result.stopped or result.failed:
            known = done if lost is None else [*done, *lost.running]
            done += [one for one in dict.fromkeys((*result.stopped, *result.failed)) if one not in known]
        # First free the blocks of requests that were aborted while the step was computed: they left earlier than the
        # requests that end with the step.
        aborted = self._abort_pending(set(done), to_seconds(now)) if self._to_abort else []
        finished = self._finish_all(plan, done, result, to_seconds(now)) if done else []
        if work is not None:
            if self._listener_error is not None:
                raise self._listener_error
            step = EndedStep(self.replica_id, plan.step_index, to_seconds(plan.formed_at), to_seconds(now), *work)
            for notify in listeners:
                notify(step)
        finished += aborted
        if result.report is not None:
            finished += self._apply_report(result.report, lost, plan, to_seconds(now))
        if self.memory.is_watched and self.memory.policy_error is not None:
            raise self.memory.policy_error.at(self.replica_id, plan.step_index)
        if finished and self.parts.options.holds_ended_slots:
            self.builder.hold_slots(len(finished))
        if self._end_watchers:
            self._show_end(plan, finished, to_seconds(now))
        for log in self._step_logs:
            log.on_plan_end(self.replicaset, plan, finished, now)
        return finished

    def take_report(self, report: KvReport, now: int) -> list[tuple[Request, EndReason]]:
        """Apply a connector report that comes without a step's result; return the requests that ended."""
        lost = None if self._connected is None else self._find_failed(report, None)
        for _ in range(min(report.num_returned, len(self._late_tokens))):
            tokens = self._late_tokens.popleft()
            self._append_tokens(tokens if lost is None else [one for one in tokens if one[0] not in lost.running])
        return self._apply_report(report, lost, None, to_seconds(now))

    def accepted_of(self, counts: Sequence[tuple[int, int]]) -> dict[Request, int]:
        """Return the number of accepted drafts by request, given (index of the request, number of accepted drafts);
        requests that are not in `unverified` are left out.
        """
        known = dict(counts)
        return {one: known[one.index] for one in self.running_set.unverified if one.index in known}

    def verify(self, accepted: Mapping[Request, int], now: int) -> list[tuple[Request, EndReason]]:
        """Count the accepted drafts of an earlier step, which were not known when that step ended; return the requests
        that end now.

        A request that has reached its output limit and is part of a step formed meanwhile ends with that step.
        """
        if self._late_tokens:
            self._append_tokens(self._late_tokens.popleft())
        before, ended = self.running_set.unverified, list[tuple[Request, EndReason]]()
        self.running_set.unverified = {}
        requests, num_accepted = list(before), list(map(accepted.get, before, repeat(0)))
        num_drafts = [0 if one.is_padding else one.num_drafts for one in before.values()]
        # Positions in `requests` of those that may have stopped running or may end now. All others continue to decode
        # outside the pool, and their drafts are counted in bulk.
        apart = [
            place
            for place, (one, count) in enumerate(zip(requests, num_accepted, strict=True))
            if not (one.is_skipped and count < one.end_epoch)
        ]
        begin = 0
        for place in (*apart, len(requests)):
            if begin < place:
                usual = slice(begin, place)
                counts = num_accepted[usual]
                self._drafted_outputs.add(requests[usual], num_drafts[usual], counts, 0, now)
                self._publish(requests[usual], counts)
            if place < len(requests):
                ended += self._verify_apart(requests[place], num_drafts[place], num_accepted[place], now)
            begin = place + 1
        return ended

    def _verify_apart(
        self, request: Request, num_drafts: int, num_accepted: int, now: int
    ) -> list[tuple[Request, EndReason]]:
        """Count the verified drafts of a request that may no longer run or may reach its output limit. Return the
        request with the reason if it ends now, else no request. If it has ended already, no drafts are counted.
        """
        if request.state is _ENDED:
            return []
        num_left = self._output_limit(request) - request.num_output_tokens
        num_accepted = min(num_accepted, num_left)
        self.lifecycle.verified(request, num_drafts, num_accepted, now)
        request.end_epoch = num_left = num_left - num_accepted
        if num_left > 0:
            return []
        is_running = request.state is _RUNNING
        if is_running and not request.num_remaining_tokens:
            self._over.add(request)
        reason = self._end_reason(request, StepResult())
        if not self.abort(request, reason, to_seconds(now)):
            return []
        if not is_running:
            self.parts.executor.release(request)
        return [(request, reason)]

    def report_of(self, news: KvNews) -> KvReport:
        """Return the report that a recorded input describes."""
        return KvReport() if self._connected is None else self._connected.report_of(news)

    def _find_failed(self, report: KvReport, plan: StepPlan | None) -> FailedLoads | None:
        """Return the requests whose loads failed according to this report; `plan`: the step with which the report came,
        which is not completed yet (None: no step).
        """
        if self._connected is None or not (report.failed or report.bad_blocks):
            return None
        entries, drafts = ((), {}) if plan is None else (plan.entries(), plan.drafts)
        scheduled = {one.request: 1 if one.request in drafts else one.num_tokens for one in entries}
        return self._connected.find_failed(report, lambda request: scheduled.get(request, 0))

    def _apply_report(
        self, report: KvReport, lost: FailedLoads | None, plan: StepPlan | None, now: float
    ) -> list[tuple[Request, EndReason]]:
        """Recompute or end the requests whose loads failed, then record the completed loads and saves.

        If steps are formed ahead, running requests whose loads failed always end, because a step that was formed
        meanwhile is invalid as well.
        """
        connected = self._connected
        if connected is None:
            return []
        ended: list[tuple[Request, EndReason]] = []
        if lost is not None:
            fails, all_end = connected.rules.on_failure == "fail", connected.rules.forms_ahead
            for request, num_valid in lost.running.items():
                if plan is not None and plan.pool is not None:
                    self.running_set.take_back_token(request)
                if not all_end:
                    self.running_set.compute_again(request, num_valid)
                    if request.num_remaining_tokens == 1 and request.num_output_tokens:
                        self._begin_decode(request, self._output_limit(request) - request.num_output_tokens)
            if fails or all_end:
                for request, num_valid in lost.running.items():
                    self.memory.withdraw_blocks(request, num_valid)
                for request in sorted((*(lost.waiting if fails else ()), *lost.running), key=lambda one: one.index):
                    is_running = request in lost.running
                    if self.abort(request, _FAILED, now, "its KV could not be loaded"):
                        if not is_running:  # `abort` has released running requests already, in `_finish`
                            self.parts.executor.release(request)
                        ended.append((request, _FAILED))
        if report.bad_blocks and connected.rules.forms_ahead:
            self._withdraw_kept(connected, report.bad_blocks)
        connected.take_report(report)
        return ended

    def _withdraw_kept(self, connected: ConnectedKv, bad_blocks: frozenset[int]) -> None:
        """Remove from the prefix cache all blocks of each ended request that still holds a block whose load failed."""
        for request in connected.kept:
            if not bad_blocks.isdisjoint(self.memory.block_table(request)):
                self.memory.withdraw_blocks(request, 0)

    def _finish_all(
        self, plan: StepPlan, done: list[Request], result: StepResult, now: float
    ) -> list[tuple[Request, EndReason]]:
        if len(done) > 1:
            done.sort(key=lambda one: one.admitted_index)
        finished = [(one, self._end_reason(one, result)) for one in done]
        keeps_blocks = self.parts.options.holds_ended_slots
        for request, reason in finished:
            if reason is _FAILED:
                self.memory.withdraw_blocks(request, 0)  # otherwise requests that hit its blocks would fail too
                if plan.pool is not None:
                    self.running_set.take_back_token(request)
            self._finish(request, reason, now, result.failed.get(request, ""), keeps_blocks=keeps_blocks)
        return finished

    def _append_tokens(self, tokens: Sequence[tuple[Request, int]]) -> None:
        for request, token in tokens:
            if isinstance(request.hashes, TokenBlockHashes):
                request.hashes.append(token)

    def _cache_computed(self, plan: StepPlan) -> None:
        """Cache the blocks that this step has filled; the newest token of a request is not computed yet."""
        if not plan.chunks and (plan.pool is None or not plan.pool.num_public):
            return
        touched = [chunk.request for chunk in plan.chunks]
        if plan.pool is not None and plan.pool.num_public:
            self.running_set.materialize()
            touched.extend(sorted(plan.pool.needing_blocks(), key=lambda one: one.admitted_index))
        for request in touched:
            if request.state is _RUNNING:
                self.memory.cache_blocks(request, request.num_computed_tokens)

    def _apply_chunks(self, plan: StepPlan, result: StepResult, now: int, lost: FailedLoads | None) -> list[Request]:
        memory, drafts = self.memory, plan.drafts
        done: list[Request] = []
        if plan.drafted is not None or (len(drafts) == len(plan.chunks) and not any(map(_is_padding, drafts.values()))):
            return done
        is_split = memory.num_groups > 1
        chunks: Sequence[PlannedChunk] = plan.chunks
        if plan.num_apart < len(chunks):
            chunks = [one for one in chunks if one.request not in self.running_set.pool]
        for request, num_tokens, computed_before, kind in chunks:
            planned = drafts.get(request)
            if planned is not None and not planned.is_padding:
                continue
            if plan.admissions is not None and not _is_current(request, plan.admissions[request]):
                continue  # the request was preempted or has ended since this chunk was planned
            if is_split:
                memory.on_chunk_done(request, computed_before, num_tokens)
            end = computed_before + num_tokens
            if planned is not None:
                end -= planned.num_tokens
            if request.in_flight and end == request.num_computed_tokens:
                self._land(request)
            if end < request.num_known_tokens or request in result.failed:
                continue
            if result.is_ahead and self._has_drafts:
                is_padded = planned is not None
                self.running_set.unverified[request] = Unverified(num_tokens - 1 if is_padded else 0, is_padded)
            if lost is not None and request in lost.running:
                continue  # its token was computed from KV that was not loaded
            if self.hands_off and self._leaves(request, kind) and request not in result.stopped:
                self._hold(request, now, done)
                continue
            num_outputs = request.add_output(now)
            if num_outputs == 1:
                self.lifecycle.first_token(request, now)
            num_left = self._output_limit(request) - num_outputs
            if num_left <= 0:
                done.append(request)
            else:
                self._begin_decode(request, num_left)
        return done

    def _begin_decode(self, request: Request, num_left: int) -> None:
        """Turn a request whose prompt has been computed into a decode with `num_left` tokens to generate."""
        if self._has_drafts:
            self.running_set.decode_alone(request, num_left)
        else:
            del self.running_set.partial[request]
            self.running_set.pool.join(request, num_left)

    def _apply_drafts(self, plan: StepPlan, result: StepResult, now: int, void: Collection[Request]) -> list[Request]:
        """Count the tokens of decodes with drafts, and free the blocks of rejected drafts; return the requests that
        end.
        """
        rules, drafted = self.parts.options.drafts, plan.drafted
        without = {*result.failed, *self._over, *void}
        if drafted is not None and not without:
            requests, num_drafts = drafted.requests, drafted.num_drafts
        else:
            entries = [(one, each) for one, each in plan.drafts.items() if not each.is_padding and one not in without]
            requests, num_drafts = [one for one, _ in entries], [each.num_tokens for _, each in entries]
        num_left = [one.end_epoch - 1 for one in requests]
        num_accepted = [0] * len(requests)
        if result.accepted and requests:
            num_accepted = list(map(result.accepted.get, requests, repeat(0)))
            if max(num_accepted) > min(num_left):
                num_accepted = list(map(min, num_accepted, num_left))
        opened: dict[Request, Unverified] = {}  # requests whose accepted drafts are counted later, by `verify`
        if result.is_ahead:
            made = {count: Unverified(count) for count in set(num_drafts)}
            opened = dict(zip(requests, map(made.__getitem__, num_drafts), strict=True))
            for one in [one for one, left in zip(requests, num_left, strict=True) if left <= 0]:
                if one not in result.stopped:
                    del opened[one]
            if len(opened) == len(requests):
                num_drafts = [0] * len(requests)
            else:
                num_drafts = [0 if one in opened else n for one, n in zip(requests, num_drafts, strict=True)]
            self.running_set.unverified.update(opened)
        self._drafted_outputs.add(requests, num_drafts, num_accepted, 1, now)
        if not (result.is_ahead or (rules is not None and rules.keeps_blocks)):
            for request, (_, num_kept_blocks, is_padding, _) in plan.drafts.items():
                if request not in without:
                    num_blocks = 0 if is_padding else self.memory.blocks_for(request.num_computed_tokens)
                    self.memory.shrink(request, max(num_kept_blocks, num_blocks))
        if not self._publishes_late and len(opened) < len(requests):
            num_accepted = [-1 if one in opened else count for one, count in zip(requests, num_accepted, strict=True)]
            self._publish(requests, num_accepted)
        return [one for one in requests if one.end_epoch <= 0 and one not in opened]

    def _publish(self, requests: Sequence[Request], num_accepted: Sequence[int]) -> None:
        """Cache the blocks that accepted drafts have filled; the newest known token of each request is not computed
        yet.
        """
        size = self.memory.block_size
        filled = [  # requests with a block that may be full now
            (request, known - 1)
            for request, accepted, known in zip(requests, num_accepted, num_known_of(requests), strict=True)
            if (known - 1) % size <= accepted
        ]
        if filled:
            self.memory.cache_each(*zip(*filled, strict=True))

    def withholds_token(self, chunk: PlannedChunk) -> bool:
        """Return True if the token sampled at the end of a chunk is not an output, because the request leaves and its
        target samples this token again.
        """
        return self.hands_off and self._leaves(chunk.request, chunk.kind) and not self.gives_first_token

    def _leaves(self, request: Request, kind: str) -> bool:
        """Return True if a request leaves once the last chunk of its prompt is computed; a request that arrived with
        its KV stays.
        """
        return kind != MOVED and request.stays_at != self.replica_id and request not in self._to_abort

    def _hold(self, request: Request, now: int, done: list[Request]) -> None:
        """Set the state of a request to HELD after its prompt, so that the request is handed off. If the request ends
        with its first token, add it to `done` instead.
        """
        if self.gives_first_token:
            num_outputs = request.add_output(now)
            if num_outputs == 1:
                self.lifecycle.first_token(request, now)
            if num_outputs >= self._output_limit(request):
                done.append(request)
                return
        self.lifecycle.hold(request)
        self.newly_held.append(request)

    def _land(self, request: Request) -> None:
        del self.running_set.in_flight[request]
        request.in_flight = False
        self.running_set.partial[request] = None

    def _output_limit(self, request: Request) -> int:
        limit = self._output_limits.get(request)
        if limit is None:
            known = self.parts.executor.known_output_tokens(request)
            limit = request.max_tokens if known is None else min(max(1, known), request.max_tokens)
            self._output_limits[request] = limit
        return limit

    def _end_reason(self, request: Request, result: StepResult) -> EndReason:
        if request in result.failed:
            return _FAILED
        if request in result.stopped:
            return _STOP
        return _LENGTH if self._output_limit(request) >= request.max_tokens else _STOP

    def _finish(
        self, request: Request, reason: EndReason, now: float, detail: str = "", *, keeps_blocks: bool = False
    ) -> None:
        self._output_limits.pop(request, None)
        self._to_abort.pop(request, None)
        self._over.discard(request)
        before = self.running_set.unverified.pop(request, None)
        if before is not None:  # count its unverified drafts; none becomes output
            request.add_verified(0 if before.is_padding else before.num_drafts, 0, 0)
        self.lifecycle.finish(request, reason, now, detail, keeps_blocks=keeps_blocks)
        self.parts.executor.release(request)

    def _abort_pending(self, done: set[Request], now: float) -> list[tuple[Request, EndReason]]:
        ended: list[tuple[Request, EndReason]] = []
        for request, (reason, detail) in list(self._to_abort.items()):
            if request.in_flight or request in done:
                continue
            del self._to_abort[request]
            if request.state is _RUNNING:
                self._finish(request, reason, now, detail, keeps_blocks=self.parts.options.holds_ended_slots)
            else:
                self._output_limits.pop(request, None)
                self.lifecycle.end_waiting(request, reason, now, detail)
                self.parts.executor.release(request)
            ended.append((request, reason))
        return ended

    def _show_end(self, plan: StepPlan, finished: Sequence[tuple[Request, EndReason]], now: float) -> None:
        end = StepEnd(
            plan.step_index,
            self.replicaset,
            self.replica_id,
            to_seconds(plan.formed_at),
            now,
            finished,
            plan.free_blocks,
            plan.features,
            plan.num_waiting,
            plan.num_running,
            len(plan.preempted) + plan.num_preempted_before,
        )
        for observer in self._end_watchers:
            observer.on_step_end(end)


def _is_current(request: Request, admitted_index: int) -> bool:
    """Return True if the request has run without interruption since this admission."""
    return request.state is _RUNNING and request.admitted_index == admitted_index
