"""Build a controller with its replicas and policies from an experiment's settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from vajra_py.config import PolicyChoice, ReplicaConfig, ReplicasetConfig, SystemConfig
from vajra_py.contract import Layer, PolicyContext, PrefillTime, ReplicaLimits, ReplicaScheduler, SharedState
from vajra_py.contract.latency import LatencyModel, OutputLengthPredictor
from vajra_py.errors import ConfigError, Problem
from vajra_py.latency import PrefillTimeTable
from vajra_py.latency.services.output_length import NoLengths, UnansweredLengths
from vajra_py.plugins import Registry, build_policy
from vajra_py.runtime.kv import KvGroups, KvMemory, KvParallelMemory, PagedKvMemory, PrefixCacheOptions
from vajra_py.runtime.queues.shared import SharedAccess
from vajra_py.runtime.records.emitted import PolicyDiary
from vajra_py.runtime.requests.request import RequestFacts
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.serving.policy_binding import LatePrefillTime, Policies, solo_chunk_rule
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
    replicasets = {
        name: _build_replicaset(name, one, config, services.seeds.child("replicasets", name), services.of(name))
        for name, one in settings.items()
    }
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


def _build_replicaset(
    name: str, settings: ReplicasetConfig, config: SystemConfig, seeds: SeedTree, services: Services
) -> Replicaset:
    limits = replica_limits(settings.replica, services.latency, services.facts)
    prefill_time = LatePrefillTime()
    shared = SharedState()
    context = PolicyContext(
        limits=limits,
        num_replicas=settings.num_replicas,
        latency=services.latency,
        prefill_time=prefill_time,
        output_lengths=services.output_lengths,
        random_stream=seeds.stream,
        shared=shared,
    )

    def make_policy(layer: Layer, choice: PolicyChoice) -> Any:
        own = replace(context, emit=services.diary.emitted.of(name, choice.policy))
        if isinstance(services.output_lengths, NoLengths):
            own = replace(own, output_lengths=UnansweredLengths(choice.policy, services.diary.asked_for_lengths))
        return build_policy(layer, choice.policy, choice.parameters, own, services.registry)

    def predict(scheduler: ReplicaScheduler) -> PrefillTime:
        return PrefillTimeTable(services.latency, solo_chunk_rule(scheduler, limits), limits.pipeline_stages)

    choices = {layer: settings.scheduling.choice(layer) for layer in Layer}
    policies = Policies(choices, settings.num_replicas, make_policy, prefill_time, predict)
    policies.shared = shared
    replicaset = Replicaset(
        name,
        policies.replicaset_scheduler,
        policies.name(Layer.REPLICASET_SCHEDULER),
        policies.new_queue(),
        AdmissionLimits(config.admission.max_queued_requests, config.admission.max_queued_tokens),
        settings.view_interval_s,
    )
    replicaset.policies = policies
    replicaset.listeners = policies.listeners()
    options = _builder_options(settings.replica, limits, services)

    def make(replica_id: int, shared: SharedAccess) -> Replica:
        return Replica(
            ReplicaParts(
                replicaset=name,
                replica_id=replica_id,
                limits=limits,
                memory=build_memory(settings.replica, limits, services.records_copies),
                queue=policies.new_queue(),
                shared=shared,
                policy=policies.schedulers[replica_id],
                policy_name=policies.name(Layer.REPLICA_SCHEDULER),
                latency=services.latency,
                options=options,
                executor=services.executor_of(name, replica_id),
                listeners=policies.listeners_of(replica_id),
            )
        )

    for replica_id in range(settings.num_replicas):
        replicaset.add_replica(lambda shared, replica_id=replica_id: make(replica_id, shared))  # type: ignore[misc]
    return replicaset


def _builder_options(settings: ReplicaConfig, limits: ReplicaLimits, services: Services) -> BuilderOptions:
    return BuilderOptions(
        reserve_prompt=settings.memory.reservation == "prompt",
        watermark_blocks=int(settings.memory.watermark_fraction * limits.num_blocks),
        cache_at_schedule=settings.memory.prefix_cache.publish == "schedule",
        reserves_growth=services.reserves_growth,
        holds_ended_slots=services.holds_ended_slots,
        busy_group_tokens=settings.kv_parallel.busy_tokens,
    )
