"""Build a controller with its replicas and policies from an experiment's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, cast

from vajra_py.config import PolicyChoice, ReplicaConfig, ReplicasetConfig, SystemConfig
from vajra_py.contract import Layer, PolicyContext, ReplicaLimits, ReplicaScheduler, SharedState
from vajra_py.contract.latency import LatencyModel, OutputLengthPredictor
from vajra_py.errors import ConfigError, Problem
from vajra_py.latency import PrefillTimeTable
from vajra_py.latency.services.output_length import NoLengths, UnansweredLengths
from vajra_py.plugins import Registry, build_policy, routing_part_builder
from vajra_py.runtime.kv import KvGroups, KvMemory, KvParallelMemory, PagedKvMemory, PrefixCacheOptions
from vajra_py.runtime.kv.interface import max_request_tokens
from vajra_py.runtime.queues.shared import SharedAccess
from vajra_py.runtime.records.emitted import PolicyDiary
from vajra_py.runtime.requests.request import RequestFacts
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.serving.policy_binding import Policies
from vajra_py.runtime.serving.prefill_times import PrefillTable, ReplicasetPrefillTime, solo_chunk_rule
from vajra_py.runtime.serving.replica import Replica, ReplicaParts
from vajra_py.runtime.serving.replicaset import AdmissionLimits, Replicaset
from vajra_py.runtime.step.builder_options import BuilderOptions
from vajra_py.runtime.step.plan import Executor
from vajra_py.runtime.support.seeds import SeedTree

DEFAULT_MAX_MODEL_LEN = 131_072


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the model and its device say about sizes, where the settings leave them open."""

    num_blocks: Callable[[int, float], int] | None = None
    """(block size, memory fraction) to KV blocks of a replica; None: must be given."""
    max_model_len: int | None = None
    kv_bytes_per_token: int = 0


@dataclass(frozen=True, slots=True)
class ReplicasetModel:
    """The model of one replicaset: what predicts its steps, and its sizes."""

    latency: LatencyModel
    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class Services:
    """What a run brings along for its policies and replicas."""

    registry: Registry
    latency: LatencyModel
    output_lengths: OutputLengthPredictor
    seeds: SeedTree
    facts: ModelFacts
    executor_of: Callable[[str, int], Executor]
    """(replicaset, replica) to who executes its steps."""
    records_copies: bool = False
    reserves_growth: bool = False
    """See `BuilderOptions`."""
    holds_ended_slots: bool = False
    """See `BuilderOptions`."""
    models: Mapping[str, ReplicasetModel] = field(default_factory=dict)
    """By replicaset, where they are not all of one model; in place of `latency` and `facts`."""
    diary: PolicyDiary = field(default_factory=PolicyDiary)
    """What the policies emit, and what they asked for in vain."""

    def of(self, replicaset: str) -> Services:
        """The same for one replicaset."""
        own = self.models.get(replicaset)
        return self if own is None else replace(self, latency=own.latency, facts=own.facts)


def build_controller(config: SystemConfig, services: Services) -> Controller:
    """Every replicaset of the experiment, empty and ready.

    Raises `ConfigError` where sizes do not fit each other, and what building a policy raises.
    """
    settings = config.effective_replicasets
    admission = AdmissionLimits(config.admission.max_queued_requests, config.admission.max_queued_tokens)
    replicasets = {}
    for name, one in settings.items():
        own, seeds = services.of(name), services.seeds.child("replicasets", name)
        replicasets[name] = build_replicaset(name, one, replica_plans(one, own), admission, seeds, own)
    return Controller(replicasets, _selector(settings), diary=services.diary)


def _selector(settings: Mapping[str, ReplicasetConfig]) -> Callable[[RequestFacts], str]:
    names = list(settings)
    if len(names) == 1 and settings[names[0]].select.takes_all:
        return lambda request: names[0]

    def select(request: RequestFacts) -> str:
        for name, one in settings.items():
            if one.select.matches(cast(Any, request)):
                return name
        raise ConfigError(
            Problem(
                "replicasets",
                f"no replicaset takes request {request.request_id!r} (tenant {request.tenant!r}, class "
                f"{request.slo_class!r}, {request.num_prompt_tokens} prompt tokens)",
                "The last replicaset may leave its `select` out and take the rest",
            )
        )

    return select


def replica_limits(settings: ReplicaConfig, latency: LatencyModel, facts: ModelFacts) -> ReplicaLimits:
    """The sizes of a replica: what the settings say, else what the model and its device leave."""
    memory = settings.memory
    groups = settings.kv_parallel
    num_blocks = memory.num_blocks
    if num_blocks is None:
        if facts.num_blocks is None:
            message = "is not given, and this latency model does not know how much memory a device has"
            raise ConfigError(Problem("replica.memory.num_blocks", message, "A number of KV blocks"))
        num_blocks = facts.num_blocks(memory.block_size, memory.memory_fraction) * groups.groups
    if groups.groups > 1 and (groups.group_tokens or 0) % memory.block_size:
        message = f"is not a multiple of the block size ({groups.group_tokens} of {memory.block_size})"
        raise ConfigError(Problem("replica.kv_parallel.group_tokens", message))
    if groups.groups > 1 and memory.prefix_cache.enabled:
        message = "there is no prefix cache with KV parallelism (enabled: true with several groups)"
        raise ConfigError(Problem("replica.memory.prefix_cache.enabled", message, "Allowed: false"))
    return ReplicaLimits(
        block_size=memory.block_size,
        num_blocks=num_blocks,
        max_batch_size=settings.max_batch_size,
        max_batch_tokens=settings.max_batch_tokens,
        max_model_len=settings.max_model_len or facts.max_model_len or DEFAULT_MAX_MODEL_LEN,
        pipeline_stages=settings.pipeline_stages or latency.num_stages,
        kv_parallel_groups=groups.groups,
        kv_group_tokens=groups.group_tokens if groups.groups > 1 else None,
        bytes_per_block=facts.kv_bytes_per_token * memory.block_size,
        host_blocks=memory.host_blocks,
    )


def build_memory(settings: ReplicaConfig, limits: ReplicaLimits, records_copies: bool = False) -> KvMemory:
    """An empty KV memory of these sizes."""
    cache = settings.memory.prefix_cache
    options = PrefixCacheOptions(
        reuse_order=cache.reuse_order,
        release_order=cache.release_order,
        retain_freed=cache.retain_freed,
        duplicates=cache.duplicates,
        unscheduled=cache.unscheduled,
    )
    if limits.kv_group_tokens is not None:
        groups = KvGroups(
            num_groups=limits.kv_parallel_groups,
            group_tokens=limits.kv_group_tokens,
            blocks_per_group=limits.num_blocks // limits.kv_parallel_groups,
        )
        return KvParallelMemory(
            groups, limits.block_size, host_blocks=limits.host_blocks, records_copies=records_copies
        )
    return PagedKvMemory(
        limits.num_blocks,
        limits.block_size,
        prefix_cache=options if cache.enabled else None,
        host_blocks=limits.host_blocks,
        records_copies=records_copies,
    )


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """Settings, limits, latency model and scheduler of one replica."""

    settings: ReplicaConfig
    limits: ReplicaLimits
    latency: LatencyModel
    scheduler: PolicyChoice
    """Its replica scheduler."""


def replica_plans(settings: ReplicasetConfig, services: Services) -> Sequence[ReplicaPlan]:
    """Return the plan of each replica of a replicaset, by id. Raises `ConfigError` where sizes do not fit each other."""
    limits = replica_limits(settings.replica, services.latency, services.facts)
    scheduler = settings.scheduling.choice(Layer.REPLICA_SCHEDULER)
    return [ReplicaPlan(settings.replica, limits, services.latency, scheduler)] * settings.num_replicas


def build_replicaset(
    name: str,
    settings: ReplicasetConfig,
    plans: Sequence[ReplicaPlan],
    admission: AdmissionLimits,
    seeds: SeedTree,
    services: Services,
) -> Replicaset:
    """A replicaset with a replica for each plan, empty and ready.

    Raises `ConfigError` where replicas or policies do not go together, and what building a policy raises.
    """
    prefill_time, shared = ReplicasetPrefillTime(), SharedState()
    context = PolicyContext(
        limits=largest_limits([plan.limits for plan in plans]),
        num_replicas=len(plans),
        latency=services.latency,
        prefill_time=prefill_time,
        output_lengths=services.output_lengths,
        random_stream=seeds.stream,
        shared=shared,
        build_part=routing_part_builder(services.registry),
    )

    def make_policy(layer: Layer, choice: PolicyChoice, replica_id: int | None) -> Any:
        own = replace(context, emit=services.diary.emitted.of(name, choice.policy))
        if replica_id is not None:
            own = replace(own, limits=plans[replica_id].limits, latency=plans[replica_id].latency)
        if isinstance(services.output_lengths, NoLengths):
            own = replace(own, output_lengths=UnansweredLengths(choice.policy, services.diary.asked_for_lengths))
        return build_policy(layer, choice.policy, choice.parameters, own, services.registry)

    def predict(choices: Sequence[PolicyChoice], schedulers: Sequence[ReplicaScheduler]) -> Sequence[PrefillTable]:
        in_force = [replace(plan, scheduler=choice) for plan, choice in zip(plans, choices, strict=True)]
        return _prefill_tables(in_force, schedulers)

    choices = {layer: settings.scheduling.choice(layer) for layer in Layer}
    policies = Policies(choices, [plan.scheduler for plan in plans], make_policy, prefill_time, predict)
    policies.shared = shared
    replicaset = Replicaset(
        name,
        policies.replicaset_scheduler,
        policies.name(Layer.REPLICASET_SCHEDULER),
        policies.new_queue(),
        admission,
        settings.view_interval_s,
    )
    replicaset.policies = policies
    replicaset.listeners = policies.listeners()
    for replica_id, plan in enumerate(plans):
        replicaset.add_replica(partial(_build_replica, name, replica_id, plan, policies, services))
    return replicaset


def _build_replica(
    replicaset: str, replica_id: int, plan: ReplicaPlan, policies: Policies, services: Services, shared: SharedAccess
) -> Replica:
    return Replica(
        ReplicaParts(
            replicaset=replicaset,
            replica_id=replica_id,
            limits=plan.limits,
            memory=build_memory(plan.settings, plan.limits, services.records_copies),
            queue=policies.new_queue(),
            shared=shared,
            policy=policies.schedulers[replica_id],
            policy_name=policies.scheduler_name(replica_id),
            latency=plan.latency,
            options=_builder_options(plan.settings, plan.limits, services),
            executor=services.executor_of(replicaset, replica_id),
            listeners=policies.listeners_of(replica_id),
            slack=policies.slack(),
        )
    )


def largest_limits(limits: Sequence[ReplicaLimits]) -> ReplicaLimits:
    """Limits of which each is the largest that some replica has: what policies of the whole replicaset are built with."""

    def largest(values: Iterable[int | None]) -> int | None:
        found = list(values)
        return None if None in found else max(one for one in found if one is not None)

    sizes = {one.name: largest(getattr(each, one.name) for each in limits) for one in fields(ReplicaLimits)}
    return ReplicaLimits(**sizes)  # type: ignore[arg-type]  # None where a field allows it


def _prefill_tables(plans: Sequence[ReplicaPlan], schedulers: Sequence[ReplicaScheduler]) -> Sequence[PrefillTable]:
    """Prefill times on each kind of replica: of those that are built from equal plans one is asked."""
    kinds: list[ReplicaPlan] = []
    tables = []
    for plan, scheduler in zip(plans, schedulers, strict=True):
        if not any(_are_equal(plan, one) for one in kinds):
            kinds.append(plan)
            rule = solo_chunk_rule(scheduler, plan.limits)
            times = PrefillTimeTable(plan.latency, rule, plan.limits.pipeline_stages)
            tables.append(PrefillTable(max_request_tokens(plan.limits), times))
    return tables


def _are_equal(one: ReplicaPlan, other: ReplicaPlan) -> bool:
    is_same_model = one.latency is other.latency
    return is_same_model and one.limits == other.limits and one.scheduler == other.scheduler


def _builder_options(settings: ReplicaConfig, limits: ReplicaLimits, services: Services) -> BuilderOptions:
    return BuilderOptions(
        reserve_prompt=settings.memory.reservation == "prompt",
        watermark_blocks=int(settings.memory.watermark_fraction * limits.num_blocks),
        cache_at_schedule=settings.memory.prefix_cache.publish == "schedule",
        reserves_growth=services.reserves_growth,
        holds_ended_slots=services.holds_ended_slots,
        busy_group_tokens=settings.kv_parallel.busy_tokens,
    )
