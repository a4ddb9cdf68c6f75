"""Run policies step by step on small replicas.

A harness runs policies on the real mechanism (queues, KV memory, batch builder, replicas) with chosen sizes. Either the
caller drives it (`submit`, `step`), or the simulator does (`run`); both return every step as a `Step`.

    harness = Harness("fcfs", "round_robin", MyScheduler(...), HarnessOptions(num_blocks=8, max_batch_size=4))
    harness.submit("a", num_prompt_tokens=100, num_output_tokens=3)
    assert harness.step().tokens == {"a": 100}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, TypeAlias, cast

from vajra_py.config.adapters import AdaptersConfig
from vajra_py.config.hand_off import HandOffConfig
from vajra_py.contract import (
    AdmissionSpec,
    Layer,
    PolicyContext,
    PolicySpec,
    ReplicaLimits,
    RequestView,
    SchedulingPolicy,
)
from vajra_py.contract.latency import LatencyModel, OutputLengthPredictor
from vajra_py.contract.observer import Observer, StepEnd, StepRecord
from vajra_py.latency import AffineModel, PrefillTimeTable
from vajra_py.latency.services.output_length import NoLengths
from vajra_py.plugins import (
    ADMISSION,
    build_admission_policy,
    build_policy,
    check_admission_shape,
    check_policy_shape,
    routing_part_builder,
)
from vajra_py.plugins.watchdog import no_endless_calls
from vajra_py.runtime.kv import KvGroups, KvMemory, KvParallelMemory, PagedKvMemory, PrefixCacheOptions
from vajra_py.runtime.movement.links import LinkOptions
from vajra_py.runtime.movement.rules import HandOffRules
from vajra_py.runtime.queues import make_queue
from vajra_py.runtime.queues.shared import SharedAccess
from vajra_py.runtime.requests.listeners import Listeners, listeners_among
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.serving.admission import AdmissionGate
from vajra_py.runtime.serving.alarms import AlarmClock, PolicyWakeUps, Sleeper
from vajra_py.runtime.serving.build import adapters_of
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.serving.eligibility import AdmissionLimits
from vajra_py.runtime.serving.policy_binding import check_slack, slack_reader
from vajra_py.runtime.serving.prefill_times import PrefillTable, ReplicasetPrefillTime, solo_chunk_rule
from vajra_py.runtime.serving.replica import Replica, ReplicaParts
from vajra_py.runtime.serving.replicaset import Replicaset
from vajra_py.runtime.serving.workload_adapter import facts_of, hashes_of
from vajra_py.runtime.step.builder_options import BuilderOptions, DraftRules
from vajra_py.runtime.support.clock import to_seconds, to_ticks
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.sim.acceptance import AcceptanceModel
from vajra_py.sim.executor import SimulatedExecutor, predicted_timers
from vajra_py.sim.simulator import SimulationOptions, Simulator
from vajra_py.testing.arguments import policy_of, require_tokens
from vajra_py.workload.request import RequestSpec

_Named: TypeAlias = str | PolicySpec | AdmissionSpec
PolicySource: TypeAlias = _Named | tuple[_Named, Mapping[str, Any]] | SchedulingPolicy | Callable[[PolicyContext], Any]
"""A policy: the name of an installed one or a spec (either with parameters, if any), an object, or a function that
builds one.

A replica scheduler given as an object is shared by all replicas; otherwise each replica gets its own, as in a run.
"""

_QUESTION = {
    Layer.REQUEST_PRIORITIZER: "key",
    Layer.REPLICASET_SCHEDULER: "assign",
    Layer.REPLICA_SCHEDULER: "schedule",
}
_NAME = "harness"


def _affine() -> LatencyModel:
    return AffineModel(base_s=0.005, per_token_s=0.0001)


@dataclass(frozen=True, slots=True)
class HarnessOptions:
    """Sizes of the replicas, and services for the policies; small by default, so that steps are easy to follow."""

    num_replicas: int = 1
    block_size: int = 16
    num_blocks: int = 64
    max_batch_size: int = 8
    max_batch_tokens: int | None = None
    max_model_len: int = 1 << 22
    pipeline_stages: int = 1
    kv_parallel_groups: int = 1
    kv_group_tokens: int | None = None
    """Maximum number of tokens of one request in one KV-parallel group; required with several groups."""
    host_blocks: int = 0
    bytes_per_block: int = 0
    watermark_blocks: int = 0
    reserve_prompt: bool = True
    """True if admission allocates blocks for the whole known sequence; False: only for the first step's tokens."""
    prefix_cache: PrefixCacheOptions | None = None
    cache_at_schedule: bool = True
    """True if a full block can be hit once the step that fills it is formed; False: once that step has ended."""
    reserves_growth: bool = False
    """True if blocks for growing decodes are at first only counted as reserved, and added to block tables later, as in
    a simulation."""
    holds_ended_slots: bool = False
    """True if a request that ends keeps its slot and blocks for one more step, as with async scheduling."""
    latency: LatencyModel = field(default_factory=_affine)
    """Latency model for both the policies and the clock; by default 5 ms per step plus 0.1 ms per token."""
    output_lengths: OutputLengthPredictor = field(default_factory=NoLengths)
    adapters: AdaptersConfig | None = None
    """LoRA adapters of each replica; their slots take no memory here. None: no adapters."""
    drafts: DraftRules | None = None
    """Rules for drafts; None: no drafts."""
    acceptance: AcceptanceModel | None = None
    """Model of the acceptance of drafts; None: no drafts."""
    seed: int = 0
    check_conservation: bool = True
    """True if every step is followed by a check that no request and no KV block is lost."""
    keeps_steps: bool = True
    """True if `Harness.steps` is filled; the simulator then forms every step separately. False: the simulator
    fast-forwards if its option `fast_forward` is set."""
    policy_timeout_s: float | None = 60.0
    """Real seconds after which a policy call counts as a violation of the contract, in `run` and `steps_until_idle`;
    None: no limit."""

    def limits(self) -> ReplicaLimits:
        """Return the limits of a replica with these sizes, as policies see them."""
        return ReplicaLimits(
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_batch_size=self.max_batch_size,
            max_batch_tokens=self.max_batch_tokens,
            max_model_len=self.max_model_len,
            pipeline_stages=self.pipeline_stages,
            kv_parallel_groups=self.kv_parallel_groups,
            kv_group_tokens=self.kv_group_tokens,
            bytes_per_block=self.bytes_per_block,
            host_blocks=self.host_blocks,
            max_draft_tokens=0 if self.drafts is None else self.drafts.max_tokens,
        )


@dataclass(frozen=True, slots=True)
class StepEntry:
    """Tokens of one request in a step."""

    request_id: str
    num_tokens: int
    num_computed_before: int
    """Number of tokens in KV memory before the step, including the cached prefix."""
    kind: str
    """Kind of entry: "running", "admitted", "resumed", or "moved" if the request arrived with its KV."""


@dataclass(frozen=True, slots=True)
class Step:
    """Decisions of one replica for one step, and the step's times in seconds."""

    replica_id: int
    formed_at: float
    ended_at: float
    entries: tuple[StepEntry, ...]
    """Entries in batch order."""
    preempted: tuple[tuple[str, str], ...]
    """Preempted requests in order: (request id, "recompute" or "swap")."""
    ended: tuple[str, ...]
    """Ids of the requests that ended with this step."""
    free_blocks: int
    """Free KV blocks right after the step was formed."""
    num_waiting: int
    notes: Mapping[str, Mapping[str, float | int | str]]

    @property
    def tokens(self) -> dict[str, int]:
        """Number of query tokens by request id, in batch order."""
        return {entry.request_id: entry.num_tokens for entry in self.entries}

    @property
    def admitted(self) -> list[str]:
        """Ids of the requests that got memory in this step, for the first time or again."""
        return [entry.request_id for entry in self.entries if entry.kind != "running"]

    @property
    def num_tokens(self) -> int:
        """Total query tokens of the step."""
        return sum(entry.num_tokens for entry in self.entries)

    @property
    def duration_s(self) -> float:
        """Seconds from forming the step until its end."""
        return self.ended_at - self.formed_at


class _StepRecorder(Observer):
    """Records steps in the order of their ends."""

    def __init__(self, *, keeps_steps: bool) -> None:
        self.wants_steps = self.wants_step_ends = keeps_steps
        self.steps: list[Step] = []
        self.requests: dict[str, Request] = {}
        self._begun: dict[tuple[int, int], StepRecord] = {}
        self._entries: dict[tuple[int, int], tuple[StepEntry, ...]] = {}
        self._preempted: dict[tuple[int, int], tuple[tuple[str, str], ...]] = {}

    def on_arrival(self, request: RequestView, now: float) -> None:
        self.requests[request.request_id] = cast(Request, request)

    def on_step_begin(self, step: StepRecord) -> None:
        key = (step.replica_id, step.step_index)
        self._begun[key] = step
        self._entries[key] = tuple(
            StepEntry(chunk.request.request_id, chunk.num_tokens, chunk.num_computed_before, chunk.kind)
            for chunk in step.chunks
        )
        earlier = self._preempted.pop(key, ())  # a step that only preempted has the same index as the next one
        self._preempted[key] = earlier + tuple((request.request_id, mode) for request, mode in step.preempted)

    def on_step_end(self, step: StepEnd) -> None:
        key = (step.replica_id, step.step_index)
        begun = self._begun.pop(key)
        self.steps.append(
            Step(
                step.replica_id,
                begun.formed_at,
                step.ended_at,
                self._entries.pop(key),
                self._preempted.pop(key),
                tuple(request.request_id for request, _ in step.finished),
                begun.free_blocks,
                begun.num_waiting,
                begun.notes,
            )
        )


class Harness:
    """Policies on the real mechanism, with a clock that advances by predicted step times.

    Each policy is a `PolicySource`. Unless disabled in the options, every step is checked for conservation of requests
    and KV blocks. Raises `RuntimeError` if a request is lost, `AssertionError` if a block is lost, and `PolicyError` if
    a policy breaks the contract.
    """

    def __init__(
        self,
        prioritizer: PolicySource,
        replicaset_scheduler: PolicySource,
        replica_scheduler: PolicySource,
        options: HarnessOptions | None = None,
        *,
        admission: PolicySource | None = None,
    ) -> None:
        """Build the replicas and policies; `admission`: an admission policy, or None to accept every request."""
        self.options = options = options or HarnessOptions()
        self._limits = limits = options.limits()
        self._now = 0
        self._executor = SimulatedExecutor(options.acceptance)
        self._timer_of = cache(predicted_timers(options.latency, SeedTree(options.seed)))
        prefill_time = ReplicasetPrefillTime()
        self.context = PolicyContext(
            limits=limits,
            num_replicas=options.num_replicas,
            latency=options.latency,
            prefill_time=prefill_time,
            output_lengths=options.output_lengths,
            random_stream=SeedTree(options.seed).stream,
            build_part=routing_part_builder(),
        )
        self._alarms = AlarmClock()
        schedulers = [
            self._policy(Layer.REPLICA_SCHEDULER, replica_scheduler, one) for one in range(options.num_replicas)
        ]
        prefill_time.follow([self._prefill_table(one) for one in schedulers[:1]])  # all schedulers have the same table
        self.prioritizer = self._policy(Layer.REQUEST_PRIORITIZER, prioritizer)
        prioritizer_name = type(self.prioritizer).__name__
        check_slack(self.prioritizer, prioritizer_name, [(type(one).__name__, one) for one in schedulers])
        self._slack = slack_reader(self.prioritizer, prioritizer_name)
        self.replicaset_scheduler = self._policy(Layer.REPLICASET_SCHEDULER, replicaset_scheduler)
        self.replica_schedulers: list[Any] = schedulers
        self.replicaset = Replicaset(
            _NAME, self.replicaset_scheduler, "replicaset scheduler", make_queue(self.prioritizer), AdmissionLimits()
        )
        self.admission: Any = None if admission is None else self._admission_policy(admission)
        self._beside = [options.output_lengths, *([] if admission is None else [self.admission])]
        self.replicaset.listeners = _listeners(self.prioritizer, self.replicaset_scheduler, *schedulers, *self._beside)
        self.replicaset.add_replicas(partial(self._replica, one) for one in range(options.num_replicas))
        for replica in self.replicaset.replicas:
            replica.memory.use_clock(lambda: self.now)
        self.replicaset.bind_content()
        if self.replicaset.places_itself or self.replicaset.moves_requests:
            self.replicaset.hand_off = HandOffRules(HandOffConfig(), LinkOptions(), 0)
        self.controller = Controller({_NAME: self.replicaset}, lambda request: _NAME, alarms=self._alarms)
        if admission is not None:
            name = type(self.admission).__name__
            self.controller.gate = AdmissionGate(lambda: self.admission, name, self.controller.replicasets)
        self._recorder = _StepRecorder(keeps_steps=options.keeps_steps)
        self.controller.watch((self._recorder,))

    def _policy(self, layer: Layer, source: PolicySource, index: int = 0) -> Any:
        sleeper = Sleeper(_NAME, layer.value, source if isinstance(source, str) else _NAME, index)
        context = replace(self.context, wake=PolicyWakeUps(self._alarms, sleeper))
        own, params = source if isinstance(source, tuple) else (source, {})
        if isinstance(own, str):
            policy: Any = build_policy(layer, own, params, context)
        else:
            policy = policy_of(own, params, context, layer.value, _QUESTION[layer])
            check_policy_shape(layer, policy, f"{layer.value} {policy!r}", _NAME)
        sleeper.policy, sleeper.policy_name = policy, type(policy).__name__
        return policy

    def _admission_policy(self, source: PolicySource) -> Any:
        sleeper = Sleeper("", ADMISSION.key, source if isinstance(source, str) else _NAME)
        context = replace(self.context, wake=PolicyWakeUps(self._alarms, sleeper))
        own, params = source if isinstance(source, tuple) else (source, {})
        if isinstance(own, str):
            policy: Any = build_admission_policy(own, params, context)
        else:
            policy = policy_of(own, params, context, ADMISSION.key, "admit")
            check_admission_shape(policy, f"admission policy {policy!r}", _NAME)
        sleeper.policy, sleeper.policy_name = policy, type(policy).__name__
        return policy

    def _prefill_table(self, scheduler: Any) -> PrefillTable:
        limits = self._limits
        rule = solo_chunk_rule(scheduler, limits)
        times = PrefillTimeTable(self.options.latency, rule, limits.pipeline_stages)
        return PrefillTable(limits.max_model_len, times)

    def _replica(self, replica_id: int, shared: SharedAccess) -> Replica:
        options = self.options
        scheduler = self.replica_schedulers[replica_id]
        return Replica(
            ReplicaParts(
                replicaset=_NAME,
                replica_id=replica_id,
                limits=self._limits,
                memory=self._memory(),
                queue=make_queue(self.prioritizer),
                shared=shared,
                policy=scheduler,
                policy_name=type(scheduler).__name__,
                latency=options.latency,
                options=BuilderOptions(
                    reserve_prompt=options.reserve_prompt,
                    watermark_blocks=options.watermark_blocks,
                    cache_at_schedule=options.cache_at_schedule,
                    reserves_growth=options.reserves_growth,
                    holds_ended_slots=options.holds_ended_slots,
                    drafts=options.drafts,
                ),
                executor=self._executor,
                listeners=_listeners(self.prioritizer, self.replicaset_scheduler, scheduler, *self._beside),
                slack=self._slack,
                adapters=adapters_of(replica_id, options.adapters),
            )
        )

    def _memory(self) -> KvMemory:
        options = self.options
        if options.kv_group_tokens is None:
            return PagedKvMemory(
                options.num_blocks,
                options.block_size,
                prefix_cache=options.prefix_cache,
                host_blocks=options.host_blocks,
            )
        groups = KvGroups(
            num_groups=options.kv_parallel_groups,
            group_tokens=options.kv_group_tokens,
            blocks_per_group=options.num_blocks // options.kv_parallel_groups,
        )
        return KvParallelMemory(groups, options.block_size, host_blocks=options.host_blocks)

    # State

    @property
    def now(self) -> float:
        """Current time, in seconds."""
        return to_seconds(self._now)

    @property
    def steps(self) -> Sequence[Step]:
        """Steps that have ended, in the order of their ends."""
        return self._recorder.steps

    def request(self, request_id: str) -> Request:
        """Return a submitted request, ended or not. It has attributes that policies do not see: state, end, times."""
        return self._recorder.requests[request_id]

    def replica(self, replica_id: int = 0) -> Replica:
        """Return one of the replicas."""
        return self.replicaset.replicas[replica_id]

    def waiting(self, replica_id: int = 0) -> list[str]:
        """Return ids of the requests that the replica could admit now, most urgent first."""
        running_set = self.replica(replica_id).running_set
        own = [request.request_id for request in running_set.queue.ordered(self.now)]
        return [*own, *(request.request_id for request in running_set.shared.pulled(self.now))]

    # Driven by the caller

    def submit(self, request_id: str, num_prompt_tokens: int, num_output_tokens: int = 1, **facts: Any) -> Request:
        """Submit a request that arrives now.

        `facts` are further fields of `RequestSpec` (priority, tenant, content, …).
        """
        return self.submit_spec(RequestSpec(request_id, self.now, num_prompt_tokens, num_output_tokens, **facts))

    def submit_spec(self, spec: RequestSpec) -> Request:
        """Submit a workload's request as one that arrives now; `spec.arrived_at` is ignored. Raises `ConfigError` if a
        number of tokens is not at least 1.
        """
        require_tokens(spec)
        facts = facts_of(spec)
        replicaset = self.controller.replicaset_for(facts)
        request, _ = self.controller.submit(facts, replicaset, lambda size: hashes_of(spec, size, ""), self._now)
        if request.state is not RequestState.ENDED:
            self._executor.expect(request, spec.num_output_tokens)
        return request

    def wait(self, seconds: float) -> None:
        """Advance the clock without running a step."""
        self._now += to_ticks(seconds)

    def step(self, replica_id: int = 0) -> Step | None:
        """Form and run one step of a replica, and advance the clock to its end.

        Return None if it has nothing to run.
        """
        replica = self.replica(replica_id)
        plan = replica.next_plan(self._now)
        self.controller.settle(replica.take_dropped(), self._now)
        if plan is None:
            return None
        self._now += max(1, self._timer_of(replica).stage_ticks(plan))
        ended = replica.complete_step(plan, self._executor.result(plan), self._now)
        self.controller.settle(ended, self._now)
        if self.options.check_conservation:
            self.controller.check_conservation()
        return self.steps[-1]

    def steps_until_idle(self, replica_id: int = 0, at_most: int = 10_000) -> list[Step]:
        """Run steps of one replica until it has nothing to run. Raises `RuntimeError` after `at_most` steps."""
        steps: list[Step] = []
        with no_endless_calls(self.options.policy_timeout_s):
            while (step := self.step(replica_id)) is not None:
                steps.append(step)
                if len(steps) > at_most:
                    raise RuntimeError(f"replica {replica_id} is still busy after {at_most} steps")
        return steps

    # Driven by the simulator

    def simulator(self, options: SimulationOptions) -> Simulator:
        """Return a simulator of these replicas with the given options. It starts at time 0 and can be run once."""
        return Simulator(self.controller, self._executor, self._timer_of, options)

    def run(self, workload: Iterable[RequestSpec]) -> Sequence[Step]:
        """Simulate a workload to its end and return the steps, in the order of their ends.

        Raises `PolicyError` if the policies leave requests waiting forever.
        """
        first = len(self.steps)
        options = SimulationOptions(
            check_every_steps=1 if self.options.check_conservation else 0,
            policy_timeout_s=self.options.policy_timeout_s,
        )
        simulator = self.simulator(options)
        simulator.run(list(workload))
        self._now = simulator.now
        return self.steps[first:]


def _listeners(*policies: Any) -> Listeners:
    """Return the policies that listen to events; an object in several layers is listed once."""
    distinct = {id(one): one for one in policies}
    return listeners_among((one, type(one).__name__) for one in distinct.values())
