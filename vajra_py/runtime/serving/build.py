"""Building of a controller with its replicas and policies from an experiment's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, cast

from msgspec import Struct, field, structs

from vajra_py.config import DEFAULT_POOL, PolicyChoice, ReplicaConfig, ReplicasetConfig, SystemConfig
from vajra_py.config.adapters import AdaptersConfig
from vajra_py.config.drafts import DraftConfig
from vajra_py.config.replica import ElasticConfig
from vajra_py.contract import (
    AdmissionPolicy,
    Layer,
    PolicyContext,
    PoolRole,
    ReplicaLimits,
    ReplicaScheduler,
    SharedState,
)
from vajra_py.contract.latency import LatencyModel, OutputLengthPredictor
from vajra_py.errors import ConfigError, Problem
from vajra_py.latency import PrefillTimeTable
from vajra_py.latency.services.output_length import NoLengths, UnansweredLengths
from vajra_py.plugins import (
    ADMISSION,
    SCALER,
    Registry,
    build_admission_policy,
    build_policy,
    build_retention,
    build_scaler,
    routing_part_builder,
)
from vajra_py.runtime.kv import KvGroups, KvMemory, KvParallelMemory, PagedKvMemory, PrefixCacheOptions, Retention
from vajra_py.runtime.kv.interface import max_request_tokens
from vajra_py.runtime.kv.tiers import KvTiers
from vajra_py.runtime.movement.links import LinkOptions
from vajra_py.runtime.movement.rules import HandOffRules
from vajra_py.runtime.queues.shared import SharedAccess
from vajra_py.runtime.records.emitted import PolicyDiary
from vajra_py.runtime.requests.adapters import Adapters, MergeRules
from vajra_py.runtime.requests.any_adapters import AnyAdapters
from vajra_py.runtime.requests.programs import Programs
from vajra_py.runtime.requests.request import RequestFacts
from vajra_py.runtime.serving.admission import AdmissionGate
from vajra_py.runtime.serving.alarms import AlarmClock, PolicyWakeUps, Sleeper
from vajra_py.runtime.serving.build_tiers import TiersOfReplicaset, tier_rules
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.serving.eligibility import AdmissionLimits
from vajra_py.runtime.serving.load import LiveLoad
from vajra_py.runtime.serving.policy_binding import Policies
from vajra_py.runtime.serving.prefill_times import PrefillTable, ReplicasetPrefillTime, solo_chunk_rule
from vajra_py.runtime.serving.replica import Replica, ReplicaParts
from vajra_py.runtime.serving.replicaset import Replicaset
from vajra_py.runtime.serving.scaling import ElasticPool, ReplicasetScaling
from vajra_py.runtime.serving.swap_moves import swap_rules
from vajra_py.runtime.step.builder_options import BuilderOptions, DraftRules
from vajra_py.runtime.step.plan import Executor
from vajra_py.runtime.support.seeds import SeedTree

DEFAULT_MAX_MODEL_LEN = 131_072


class ModelFacts(Struct, frozen=True):
    """Sizes that follow from the model and its device, used if the settings do not state them."""

    num_blocks: Callable[[int, float], int] | None = None
    """Function of (block size, memory fraction) that returns the number of KV blocks of a replica; None: the settings
    must state it.
    """
    max_model_len: int | None = None
    kv_bytes_per_token: int = 0
    num_layers: int | None = None


class ReplicasetModel(Struct, frozen=True):
    """Model of one replicaset: its latency model and its sizes."""

    latency: LatencyModel
    facts: ModelFacts
    pools: Mapping[str, ReplicasetModel] = field(default_factory=dict)
    """Models by pool, if the pools' devices differ."""


class Services(Struct, frozen=True):
    """Services of a run for its policies and replicas."""

    registry: Registry
    latency: LatencyModel
    output_lengths: OutputLengthPredictor
    seeds: SeedTree
    facts: ModelFacts
    executor_of: Callable[[str, int], Executor]
    """Function of (replicaset, replica) that returns the executor of its steps."""
    records_copies: bool = False
    reserves_growth: bool = False
    """See `BuilderOptions`."""
    holds_ended_slots: bool = False
    """See `BuilderOptions`."""
    models: Mapping[str, ReplicasetModel] = field(default_factory=dict)
    """Models by replicaset, if they differ; they replace `latency` and `facts`."""
    pools: Mapping[str, ReplicasetModel] = field(default_factory=dict)
    """Models of one replicaset by pool, if its pools have different devices."""
    served_models: Mapping[str, object] | None = None
    """Model of each replicaset, if the admission policy may send a request only to replicasets of the request's model;
    None: it may send a request to any replicaset.
    """
    diary: PolicyDiary = field(default_factory=PolicyDiary)
    """Figures that the policies emit, and the names of policies that read unknown output lengths."""
    alarms: AlarmClock = field(default_factory=AlarmClock)
    """Wake-ups that the policies set."""
    draft_times_s: tuple[float, float] = (0.0, 0.0)
    """Seconds that drafting adds to a step with drafts: (fixed time per step, time per draft)."""
    make_memory: Callable[[ReplicaConfig, ReplicaLimits, Retention | None], KvMemory] | None = None
    """Function that builds the KV memory of a replica; None: `build_memory`."""
    make_replica: Callable[[ReplicaParts], Replica] = Replica
    make_load: Callable[[Replica], LiveLoad] = LiveLoad
    """Function that creates a replica's load view. A router replaces both this function and `make_replica`, because its
    replicas are servers.
    """

    def of(self, replicaset: str) -> Services:
        """Return the services for one replicaset."""
        own = self.models.get(replicaset)
        return self if own is None else structs.replace(self, latency=own.latency, facts=own.facts, pools=own.pools)

    def of_pool(self, pool: str) -> Services:
        """Return the services for one pool of the replicaset."""
        own = self.pools.get(pool)
        return self if own is None else structs.replace(self, latency=own.latency, facts=own.facts)


def build_controller(config: SystemConfig, services: Services) -> Controller:
    """Build every replicaset of the experiment, empty and ready.

    Raises `ConfigError` if sizes are inconsistent, and the errors of building a policy.
    """
    settings = config.effective_replicasets
    admission = AdmissionLimits(config.admission.max_queued_requests, config.admission.max_queued_tokens)
    replicasets = {}
    for name, one in settings.items():
        own, seeds = services.of(name), services.seeds.child("replicasets", name)
        replicasets[name] = build_replicaset(name, one, replica_plans(one, own), admission, seeds, own)
    programs = Programs(config.programs.idle_s)
    controller = Controller(
        replicasets, _selector(settings), diary=services.diary, alarms=services.alarms, programs=programs
    )
    if config.admission_policy is not None:
        controller.gate = _build_gate(config.admission_policy, replicasets, services)
    return controller


def _build_gate(choice: PolicyChoice, replicasets: Mapping[str, Replicaset], services: Services) -> AdmissionGate:
    """Build the admission gate of these replicasets. The policy's context has the largest value of each limit over all
    replicas, and the latency model and prefill times of the first replicaset.
    """
    first = next(iter(replicasets.values()))
    replicas = [replica for one in replicasets.values() for replica in one.replicas]
    assert first.policies is not None
    context = PolicyContext(
        limits=largest_limits([one.limits for one in replicas]),
        num_replicas=len(replicas),
        latency=services.of(first.name).latency,
        prefill_time=first.policies.prefill_time,
        output_lengths=services.output_lengths,
        random_stream=services.seeds.child("admission").stream,
        emit=services.diary.emitted.of("", choice.policy),
    )
    if isinstance(services.output_lengths, NoLengths):
        lengths = UnansweredLengths(choice.policy, services.diary.asked_for_lengths)
        context = replace(context, output_lengths=lengths)

    def make() -> AdmissionPolicy:
        sleeper = Sleeper("", ADMISSION.key, choice.policy)
        own = replace(context, wake=PolicyWakeUps(services.alarms, sleeper))
        policy = build_admission_policy(choice.policy, choice.parameters, own, services.registry)
        sleeper.policy = policy
        return policy

    return AdmissionGate(make, choice.policy, replicasets, services.served_models)


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
    """Return the sizes of a replica: those that the settings state, else those that follow from model and device."""
    memory = settings.memory
    groups = settings.kv_parallel
    num_blocks = memory.num_blocks
    if num_blocks is None:
        if facts.num_blocks is None:
            message = "is missing, and this latency model does not know the memory size of a device"
            raise ConfigError(Problem("replica.memory.num_blocks", message, "A number of KV blocks"))
        num_blocks = facts.num_blocks(memory.block_size, memory.memory_fraction) * groups.groups
    if settings.adapters is not None:
        taken, num_blocks = settings.adapters.num_blocks, num_blocks - settings.adapters.num_blocks
        if num_blocks < 1:
            message = f"the slots leave no KV block (they take {taken} of {num_blocks + taken})"
            raise ConfigError(Problem("replica.adapters", message, "Allowed: fewer slots, or smaller adapters"))
    if groups.groups > 1 and (groups.group_tokens or 0) % memory.block_size:
        message = f"is not a multiple of the block size ({groups.group_tokens} of {memory.block_size})"
        raise ConfigError(Problem("replica.kv_parallel.group_tokens", message))
    group_size = num_blocks // groups.groups * memory.block_size
    if groups.groups > 1 and (groups.group_tokens or 0) > group_size:
        message = f"is more than the KV memory of a group holds (got {groups.group_tokens})"
        allowed = f"Allowed: at most {group_size}, or more KV blocks"
        raise ConfigError(Problem("replica.kv_parallel.group_tokens", message, allowed))
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
        max_draft_tokens=settings.draft.most_tokens,
    )


def _check_drafts(where: str, limits: ReplicaLimits) -> None:
    """Raise `ConfigError` if drafts are enabled and cannot be used on a replica of these sizes."""
    if not limits.max_draft_tokens:
        return
    if limits.max_draft_tokens >= limits.max_model_len:
        message = f"allows more drafts than fit a sequence of the model (got {limits.max_draft_tokens})"
        raise ConfigError(Problem(f"{where}.draft", message, f"Allowed: 0 to {limits.max_model_len - 1}"))
    if limits.pipeline_stages > 1 or limits.kv_parallel_groups > 1:
        what = "pipeline stages" if limits.pipeline_stages > 1 else "KV-parallel groups"
        message = f"decodes have no drafts where there are several {what} (got {limits.max_draft_tokens})"
        raise ConfigError(Problem(f"{where}.draft", message, "Allowed: num_tokens: 0, max_tokens: null"))


def build_memory(
    settings: ReplicaConfig,
    limits: ReplicaLimits,
    records_copies: bool = False,
    retention: Retention | None = None,
    tiers: KvTiers | None = None,
    kind: type[PagedKvMemory] = PagedKvMemory,
) -> KvMemory:
    """Build an empty KV memory of these sizes.

    `retention`: determines the order in which cached blocks that no request uses are evicted (None: the settings
    determine it). `tiers`: memory tiers below the memory. `kind`: class of the memory; ignored with KV parallelism.
    """
    cache = settings.memory.prefix_cache
    options = PrefixCacheOptions(
        reuse_order=cache.reuse_order,
        release_order=cache.release_order,
        retain_freed=cache.retain_freed,
        drop_last_hit=cache.drop_last_hit,
        duplicates=cache.duplicates,
        unscheduled=cache.unscheduled,
        max_pinned_fraction=cache.max_pinned_fraction,
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
    memory = kind(
        limits.num_blocks,
        limits.block_size,
        prefix_cache=options if cache.enabled else None,
        host_blocks=limits.host_blocks,
        records_copies=records_copies,
        retention=retention,
    )
    if tiers is not None:
        memory.put_above(tiers)
    return memory


class ReplicaPlan(Struct, frozen=True):
    """Settings, limits, latency model, scheduler and retention policy of one replica."""

    settings: ReplicaConfig
    limits: ReplicaLimits
    latency: LatencyModel
    scheduler: PolicyChoice
    """Choice of the policy that is the replica scheduler."""
    pool: str = DEFAULT_POOL
    role: PoolRole = PoolRole.MIXED
    retention: PolicyChoice | None = None
    num_layers: int | None = None
    """Number of layers of the replica's model; None: unknown."""
    tiers: KvTiers | None = None
    """Memory tiers below the replica's device; None if there are none, or if they are not built yet."""


def replica_plans(settings: ReplicasetConfig, services: Services) -> Sequence[ReplicaPlan]:
    """Return the plan of each replica of a replicaset, by id. Raises `ConfigError` if sizes are inconsistent."""
    plans: list[ReplicaPlan] = []
    for name, pool in settings.effective_pools.items():
        own = services.of_pool(name)
        limits = replica_limits(pool.replica, own.latency, own.facts)
        _check_drafts("replica", limits)
        scheduler = pool.replica_scheduler or settings.scheduling.choice(Layer.REPLICA_SCHEDULER)
        retention = pool.retention or settings.scheduling.retention
        role, num_layers = settings.role_of(name), own.facts.num_layers
        plan = ReplicaPlan(pool.replica, limits, own.latency, scheduler, name, role, retention, num_layers)
        plans += [plan] * pool.most_replicas
    return plans


def _context_of(
    plans: Sequence[ReplicaPlan],
    seeds: SeedTree,
    services: Services,
    prefill_time: ReplicasetPrefillTime,
    shared: SharedState,
) -> PolicyContext:
    """Return the services and facts with which all policies of a replicaset are built."""
    return PolicyContext(
        limits=largest_limits([plan.limits for plan in plans]),
        num_replicas=len(plans),
        latency=services.latency,
        prefill_time=prefill_time,
        output_lengths=services.output_lengths,
        random_stream=seeds.stream,
        shared=shared,
        build_part=routing_part_builder(services.registry),
    )


def build_replicaset(
    name: str,
    settings: ReplicasetConfig,
    plans: Sequence[ReplicaPlan],
    admission: AdmissionLimits,
    seeds: SeedTree,
    services: Services,
) -> Replicaset:
    """Build a replicaset with a replica for each plan, empty and ready.

    Raises `ConfigError` if replicas or policies are incompatible, and the errors of building a policy.
    """
    prefill_time, shared = ReplicasetPrefillTime(), SharedState()
    context = _context_of(plans, seeds, services, prefill_time, shared)

    def make_policy(layer: Layer, choice: PolicyChoice, index: int) -> Any:
        own = replace(context, emit=services.diary.emitted.of(name, choice.policy))
        if layer is Layer.REPLICA_SCHEDULER:
            own = replace(own, limits=plans[index].limits, latency=plans[index].latency)
        elif index:  # the second replicaset scheduler, for requests after their prompts
            own = replace(own, random_stream=seeds.child("after_prompt").stream)
        if isinstance(services.output_lengths, NoLengths):
            own = replace(own, output_lengths=UnansweredLengths(choice.policy, services.diary.asked_for_lengths))
        sleeper = Sleeper(name, layer.value, choice.policy, index)
        own = replace(own, wake=PolicyWakeUps(services.alarms, sleeper))
        sleeper.policy = build_policy(layer, choice.policy, choice.parameters, own, services.registry)
        return sleeper.policy

    def predict(choices: Sequence[PolicyChoice], schedulers: Sequence[ReplicaScheduler]) -> Sequence[PrefillTable]:
        in_force = [structs.replace(plan, scheduler=choice) for plan, choice in zip(plans, choices, strict=True)]
        return _prefill_tables(in_force, schedulers)

    choices = {layer: settings.scheduling.choice(layer) for layer in Layer}
    schedulers = [plan.scheduler for plan in plans]
    policies = Policies(choices, schedulers, make_policy, prefill_time, predict, is_split=_is_split(plans))
    policies.shared = shared
    policies.beside = ((services.output_lengths, "output_length"),)
    scaling = _build_scaling(name, settings, context, seeds, services)
    policies.beside += () if scaling is None else ((scaling.scaler, scaling.name),)
    policies.retention = [
        _build_retention(name, plan, context, seeds.child("retention", str(replica_id)), services)
        for replica_id, plan in enumerate(plans)
    ]
    replicaset = Replicaset(
        name,
        policies.replicaset_scheduler,
        policies.name(Layer.REPLICASET_SCHEDULER),
        policies.new_queue(),
        admission,
        settings.view_interval_s,
    )
    replicaset.policies = policies
    replicaset.bind_policy(policies.replicaset_scheduler, policies.name(Layer.REPLICASET_SCHEDULER))
    replicaset.listeners = policies.listeners()
    plans = _with_memory_below(replicaset, plans, TiersOfReplicaset(context, seeds, services.registry))
    makes = (partial(_build_replica, name, index, plan, policies, services) for index, plan in enumerate(plans))
    replicaset.add_replicas(makes, services.make_load)
    _let_requests_move(replicaset, settings, plans, scaling)
    replicaset.kv_event_lag_s = settings.kv_event_lag_s
    replicaset.bind_content()
    if scaling is not None:
        scaling.attach(replicaset)
    return replicaset


def _with_memory_below(
    replicaset: Replicaset, plans: Sequence[ReplicaPlan], makes: TiersOfReplicaset
) -> Sequence[ReplicaPlan]:
    """Set the replicaset's rules for memory tiers, and for swaps while steps run; return the plans with their tiers.
    Raises `ConfigError`.
    """
    sizes = [(plan.settings, plan.limits) for plan in plans]
    replicaset.tiers, replicaset.swaps = tier_rules(sizes), swap_rules(sizes)
    if replicaset.tiers is None:
        return plans
    return [structs.replace(one, tiers=makes.of(index, one.settings, one.limits)) for index, one in enumerate(plans)]


def _is_split(plans: Sequence[ReplicaPlan]) -> bool:
    """Return True if some replicas compute only prompts, or only decodes."""
    return any(plan.role is not PoolRole.MIXED for plan in plans)


def _let_requests_move(
    replicaset: Replicaset, settings: ReplicasetConfig, plans: Sequence[ReplicaPlan], scaling: ReplicasetScaling | None
) -> None:
    """Set the rules for moving requests between replicas, if requests may move. Raises `ConfigError`."""
    drains = scaling is not None and any(pool.drains_by_migration for pool in scaling.pools)
    if _is_split(plans) or replicaset.places_itself or replicaset.moves_requests or drains:
        replicaset.hand_off = _hand_off_rules(replicaset.name, settings, plans)
        for replica in replicaset.replicas:
            replica.gives_first_token = settings.hand_off.first_token == "source"


def _build_scaling(
    replicaset: str, settings: ReplicasetConfig, context: PolicyContext, seeds: SeedTree, services: Services
) -> ReplicasetScaling | None:
    """Return the scaler of a replicaset with the bounds of its pools; None if the settings name no scaler. Raises the
    errors of building a scaler.
    """
    choice = settings.scheduling.scaling
    if choice is None:
        return None
    sleeper = Sleeper(replicaset, SCALER.key, choice.policy)
    emit = services.diary.emitted.of(replicaset, choice.policy)
    own = replace(context, emit=emit, wake=PolicyWakeUps(services.alarms, sleeper))
    sleeper.policy = build_scaler(choice.policy, choice.parameters, own, services.registry)
    pools: list[ElasticPool] = []
    for name, pool in settings.effective_pools.items():
        first = pools[-1].replica_ids.stop if pools else 0
        ids, count = range(first, first + pool.most_replicas), pool.num_replicas
        bounds = pool.elastic or ElasticConfig(min_replicas=count, max_replicas=count)
        startup = bounds.startup_s, bounds.startup_spread_s
        pools.append(ElasticPool(name, ids, count, bounds.min_replicas, len(ids), *startup, bounds.drain == "migrate"))
    return ReplicasetScaling(sleeper.policy, choice.policy, pools, seeds.stream("replica_starts"))


def _build_retention(
    replicaset: str, plan: ReplicaPlan, context: PolicyContext, seeds: SeedTree, services: Services
) -> Retention | None:
    """Return the retention policy of one replica; None if the settings name no such policy. Raises `ConfigError`, and
    the errors of building a policy.
    """
    choice = plan.retention
    if choice is None:
        return None
    cache = plan.settings.memory.prefix_cache
    if not cache.enabled:
        message = f"{choice.policy!r} orders cached content, and there is no prefix cache"
        raise ConfigError(Problem("scheduling.retention", message, "Allowed: null, or prefix_cache.enabled: true"))
    ordered = {
        "reuse_order": "lru",
        "release_order": "tail_first",
        "retain_freed": True,
        "duplicates": "keep_first",
        "drop_last_hit": False,
    }
    for name, value in ordered.items():
        if getattr(cache, name) != value:
            message = f"cannot be combined with the retention policy {choice.policy!r} (got {getattr(cache, name)!r})"
            raise ConfigError(Problem(f"replica.memory.prefix_cache.{name}", message, f"Allowed: {value!r}"))
    own = replace(
        context,
        limits=plan.limits,
        latency=plan.latency,
        random_stream=seeds.child("retention").stream,
        emit=services.diary.emitted.of(replicaset, choice.policy),
    )
    return Retention(build_retention(choice.policy, choice.parameters, own, services.registry), choice.policy)


def _order_of(retention: Retention | None, registry: Registry) -> Retention | None:
    """Return the retention policy that the memory must call to choose the blocks to evict. None if there is no policy,
    or if the policy evicts blocks in the order of their release: the memory does this by itself.
    """
    if retention is None or registry.retention_policy(retention.name).spec.follows_release:
        return None
    return retention


def _hand_off_rules(name: str, settings: ReplicasetConfig, plans: Sequence[ReplicaPlan]) -> HandOffRules:
    """Return the rules for moving requests. Raises `ConfigError` if they are incompatible with the replicas."""
    where = f"replicasets.{name}"
    links = LinkOptions.of(settings.links)
    num_bytes = settings.hand_off.kv_bytes_per_token
    if num_bytes is None:
        num_bytes = max(plan.limits.bytes_per_block // plan.limits.block_size for plan in plans)
    if not num_bytes and (links.bandwidth is not None or links.shared_bandwidth is not None):
        message = "is missing, and the latency model does not know the KV size of a token"
        raise ConfigError(Problem(f"{where}.hand_off.kv_bytes_per_token", message, "A number of bytes"))
    if any(plan.limits.kv_parallel_groups > 1 for plan in plans):
        message = "KV that is spread over KV-parallel groups does not move between replicas"
        raise ConfigError(Problem(f"{where}.pools", message, "Allowed: kv_parallel.groups: 1"))
    return HandOffRules(
        settings.hand_off, links, num_bytes, settings.migration, _parts_of_steps(where, settings, plans)
    )


def _parts_of_steps(where: str, settings: ReplicasetConfig, plans: Sequence[ReplicaPlan]) -> int:
    """Return `HandOffRules.num_parts`: the number of layers if KV is sent layer by layer, else 1. Raises `ConfigError`
    if the settings require KV to be sent while the prompt is computed, but this is impossible.
    """
    overlap, num_layers = settings.hand_off.overlap, settings.hand_off.num_layers
    if overlap != "none" and any(plan.limits.pipeline_stages > 1 for plan in plans):
        message = f"KV is not sent while its prompt goes through pipeline stages (got {overlap})"
        raise ConfigError(Problem(f"{where}.hand_off.overlap", message, "Allowed: none, or replica.pipeline_stages: 1"))
    if overlap != "by_layer":
        return 1
    if num_layers is None:
        num_layers = next((plan.num_layers for plan in plans if plan.num_layers is not None), None)
    if num_layers is None:
        message = "is missing, and the latency model does not know the model's number of layers"
        raise ConfigError(Problem(f"{where}.hand_off.num_layers", message, "A number of layers"))
    return num_layers


def _build_replica(
    replicaset: str,
    replica_id: int,
    plan: ReplicaPlan,
    policies: Policies,
    services: Services,
    shared: SharedAccess,
) -> Replica:
    return services.make_replica(
        ReplicaParts(
            replicaset=replicaset,
            replica_id=replica_id,
            limits=plan.limits,
            memory=_build_memory(plan, _order_of(policies.retention[replica_id], services.registry), services),
            queue=policies.new_queue(),
            shared=shared,
            policy=policies.schedulers[replica_id],
            policy_name=policies.scheduler_name(replica_id),
            latency=plan.latency,
            options=_builder_options(plan.settings, plan.limits, services),
            executor=services.executor_of(replicaset, replica_id),
            listeners=policies.listeners_of(replica_id),
            slack=policies.slack(),
            pins=policies.pins(replica_id),
            pool=plan.pool,
            role=plan.role,
            adapters=adapters_of(replica_id, plan.settings.adapters),
        )
    )


def _build_memory(plan: ReplicaPlan, retention: Retention | None, services: Services) -> KvMemory:
    if services.make_memory is not None:
        return services.make_memory(plan.settings, plan.limits, retention)
    return build_memory(plan.settings, plan.limits, services.records_copies, retention, plan.tiers)


def adapters_of(replica_id: int, settings: AdaptersConfig | None) -> Adapters | None:
    """Return the adapters of one replica, none of them loaded; None if the replica has no adapters."""
    if settings is None:
        return None
    if settings.models is None:
        adapters: Adapters = AnyAdapters(replica_id, settings.max_loras)
    else:
        load_s = {one.name: one.load_s for one in settings.models}
        num_blocks = {one.name: one.num_blocks for one in settings.models}
        adapters = Adapters(replica_id, settings.max_loras, load_s, num_blocks)
    if settings.unmerged_factor > 1.0:
        adapters.merging = MergeRules(settings.unmerged_factor, settings.switch_s)
    return adapters


def largest_limits(limits: Sequence[ReplicaLimits]) -> ReplicaLimits:
    """Return the limits for policies that serve all replicas: the largest value of each limit, or None (no limit) if a
    replica has no such limit.
    """

    def largest(values: Iterable[int | None]) -> int | None:
        found = list(values)
        return None if None in found else max(one for one in found if one is not None)

    sizes = {one.name: largest(getattr(each, one.name) for each in limits) for one in fields(ReplicaLimits)}
    return ReplicaLimits(**sizes)  # type: ignore[arg-type]  # None where a field allows it


def _prefill_tables(plans: Sequence[ReplicaPlan], schedulers: Sequence[ReplicaScheduler]) -> Sequence[PrefillTable]:
    """Return the table of prefill times of each kind of replica; replicas of equal model, limits and scheduler are one
    kind.
    """
    kinds: list[ReplicaPlan] = []
    tables = []
    for plan, scheduler in zip(plans, schedulers, strict=True):
        if not any(_are_equal(plan, one) for one in kinds):
            kinds.append(plan)
            rule = solo_chunk_rule(scheduler, plan.limits, plan.scheduler.policy)
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
        drafts=_draft_rules(settings.draft, services.draft_times_s),
    )


def _draft_rules(draft: DraftConfig, times_s: tuple[float, float]) -> DraftRules | None:
    if not draft.most_tokens:
        return None
    return DraftRules(
        num_tokens=draft.num_tokens,
        max_tokens=draft.most_tokens,
        lookahead_tokens=draft.lookahead_tokens,
        keeps_blocks=draft.rejected_blocks == "keep",
        past_max_tokens=draft.past_max_tokens,
        publishes_late=draft.publish == "schedule",
        pads_admitted=draft.pad_admitted,
        step_s=times_s[0],
        token_s=times_s[1],
    )
