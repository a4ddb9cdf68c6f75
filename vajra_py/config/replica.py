"""Schema of `replica:` and `pools:`: sizes and memory of replicas, and the pools that form a replicaset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from vajra_py.config.adapters import AdaptersConfig
from vajra_py.config.drafts import DraftConfig
from vajra_py.config.sections import (
    NAME_PATTERN,
    BlockSize,
    Count,
    PolicyChoice,
    PositiveCount,
    ReplicaCount,
    SchedulingConfig,
    Seconds,
    Section,
    StageCount,
    Switch,
)
from vajra_py.config.tiers import SwapLinkConfig, TiersConfig
from vajra_py.contract import PoolRole


class PrefixCacheConfig(Section):
    """Sharing of KV blocks between requests with equal prefixes."""

    enabled: Switch = Field(True, description="Share KV blocks of equal prefixes.")
    publish: Literal["schedule", "step_end"] = Field(
        "schedule", description="When a full block can be hit: once its step is formed, or once the step has come back."
    )
    reuse_order: Literal["lru", "fifo"] = Field(
        "lru",
        description="Which idle block is overwritten first: the least recently used, or the first that was freed.",
    )
    release_order: Literal["tail_first", "head_first"] = Field(
        "tail_first", description="In which order a request's blocks become idle; tail first keeps prefixes longest."
    )
    retain_freed: Switch = Field(True, description="Freed blocks can still be hit until they are overwritten.")
    drop_last_hit: Switch = Field(
        False,
        description="Compute the last block that a lookup finds anew, for drafters that need what the model computes there (vLLM with EAGLE).",
    )
    duplicates: Literal["keep_first", "keep_last"] = Field(
        "keep_first", description="Which of two blocks with the same content answers later hits."
    )
    unscheduled: Literal["withdraw", "keep"] = Field(
        "withdraw",
        description=(
            "What becomes of blocks published by a request that is preempted before its step runs; `keep` is vLLM's way and lets "
            "others read blocks that were never computed."
        ),
    )
    max_pinned_fraction: float = Field(
        0.5, strict=True, ge=0, le=1, description="Part of the KV blocks that pins of policies may hold, fraction."
    )


class MemoryConfig(Section):
    """KV memory of one replica."""

    block_size: BlockSize = Field(16, description="Tokens of a KV block.")
    num_blocks: PositiveCount | None = Field(
        None, description="KV blocks of a replica; null: what model and device leave."
    )
    memory_fraction: float = Field(
        0.9,
        strict=True,
        gt=0,
        le=1,
        description="Part of the device's memory that weights and KV blocks may take, fraction.",
    )
    reservation: Literal["prompt", "incremental"] = Field(
        "prompt",
        description="Blocks taken at admission: for the whole known sequence, or for the tokens of the first step.",
    )
    watermark_fraction: float = Field(
        0.01, strict=True, ge=0, lt=1, description="Part of the KV blocks that admission leaves free, fraction."
    )
    host_blocks: Count = Field(0, description="KV blocks in host memory that preempted requests can be swapped to.")
    tenant_salt: Switch = Field(False, description="Tenants never share cached prefixes with each other.")
    prefix_cache: PrefixCacheConfig = Field(default_factory=PrefixCacheConfig, description="Sharing of equal prefixes.")
    tiers: TiersConfig | None = Field(
        None, description="Memory below the device for cached content: host, disk, a store of all replicas; null: none."
    )

    swap_link: SwapLinkConfig | None = Field(
        None,
        description="Link over which swapped blocks are copied beside steps; null: between steps, which wait for them.",
    )

    @model_validator(mode="after")
    def _swaps(self) -> Self:
        if self.swap_link is not None and not self.host_blocks:
            raise ValueError(
                "swap_link is for preemption by swapping (got host_blocks: 0). Allowed: host_blocks above 0"
            )
        return self

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit unset `tiers` and `swap_link`, so that the written form (and run ids) of older files stays the same."""
        data: dict[str, Any] = handler(self)
        for name in ("tiers", "swap_link"):
            if getattr(self, name) is None:
                data.pop(name, None)
        return data


class KvParallelConfig(Section):
    """KV parallelism: one long sequence spread over several groups of devices."""

    groups: PositiveCount = Field(1, description="KV-parallel groups of a replica; 1: none.")
    group_tokens: PositiveCount | None = Field(
        None, description="Tokens of one request that one group holds, tokens; needed with more than one group."
    )
    busy_tokens: PositiveCount = Field(
        500, description="Query tokens in a step from which on a group takes no further request, tokens."
    )

    @model_validator(mode="after")
    def _sized(self) -> Self:
        if self.groups > 1 and self.group_tokens is None:
            raise ValueError(f"group_tokens is needed with more than one group (got groups: {self.groups})")
        return self


class ReplicaConfig(Section):
    """Sizes of each replica."""

    max_batch_size: PositiveCount = Field(128, description="Most requests in one step.")
    max_batch_tokens: PositiveCount | None = Field(None, description="Most tokens in one step; null: no limit.")
    max_model_len: PositiveCount | None = Field(
        None, description="Most tokens of a request, prompt and output; null: what the model was trained for."
    )
    pipeline_stages: StageCount | None = Field(None, description="Pipeline stages; null: what the latency model has.")
    kv_parallel: KvParallelConfig = Field(default_factory=KvParallelConfig, description="KV parallelism.")
    memory: MemoryConfig = Field(default_factory=MemoryConfig, description="KV memory.")
    adapters: AdaptersConfig | None = Field(None, description="LoRA adapters that it serves; null: none.")
    draft: DraftConfig = Field(
        default_factory=DraftConfig, description="Draft tokens that steps verify (speculative decoding)."
    )

    @property
    def adapter_blocks(self) -> int:
        """Number of KV blocks that slots for adapters occupy."""
        return 0 if self.adapters is None else self.adapters.num_blocks

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit `draft` and `adapters` if unset, so that the written form of older files stays the same."""
        data: dict[str, Any] = handler(self)
        if not self.draft.most_tokens:
            data.pop("draft", None)
        if self.adapters is None:
            data.pop("adapters", None)
        return data


class ElasticConfig(Section):
    """Bounds on the number of replicas that a scaler may choose, and how replicas start and stop."""

    min_replicas: Count = Field(1, description="Fewest replicas, starting or up; 0 lets a scaler stop them all.")
    max_replicas: ReplicaCount | None = Field(None, description="Most replicas, starting or up; null: `num_replicas`.")
    startup_s: Seconds = Field(0.0, description="Time from starting a replica until it takes requests, seconds.")
    startup_spread_s: Seconds = Field(
        0.0, description="Each start takes up to so much longer, drawn uniformly, seconds."
    )
    drain: Literal["wait", "migrate"] = Field(
        "wait",
        description=(
            "What becomes of requests that have begun on a replica that stops: they are finished there; or they move to other replicas, "
            "live, by the rules of `migration` and `links`, as far as these have room."
        ),
    )


class PoolConfig(Section):
    """One pool of a replicaset: replicas of one kind. Missing keys of `replica` are taken from the replicaset."""

    role: Literal["mixed", "prefill", "decode"] | None = Field(
        None,
        description=(
            "Work that its replicas take: prompts, whose requests then leave with their KV; decodes, which come with it; or both. "
            "null: as its name says, if it is one of the three; else mixed."
        ),
    )
    num_replicas: ReplicaCount = Field(1, description="Replicas; with a scaler those at the start.")
    replica: ReplicaConfig = Field(default_factory=ReplicaConfig, description="Sizes of its replicas.")
    replica_scheduler: PolicyChoice | None = Field(
        None, description="What runs in a step of its replicas; null: the replicaset's replica scheduler."
    )
    retention: PolicyChoice | None = Field(
        None, description="Which idle cached content its replicas overwrite first; null: as the replicaset's say."
    )
    elastic: ElasticConfig | None = Field(
        None, description="Number of replicas that the replicaset's scaler may choose; null: always `num_replicas`."
    )

    @property
    def most_replicas(self) -> int:
        """Largest number of replicas that can be up at once; so many are built."""
        most = None if self.elastic is None else self.elastic.max_replicas
        return most or self.num_replicas


Pools: TypeAlias = dict[Annotated[str, Field(pattern=NAME_PATTERN)], PoolConfig]

DEFAULT_POOL = "default"
"""Name of the only pool of a replicaset without `pools:`."""


def role_of(name: str, pool: PoolConfig) -> PoolRole:
    """Return the role of the pool: its own, or the one that its name implies."""
    roles = {one.value: one for one in PoolRole}
    return roles[pool.role] if pool.role is not None else roles.get(name, PoolRole.MIXED)


def check_pools(pools: Pools, num_replicas: int) -> None:
    """Raise `ValueError` if no pool serves prompts or decodes, or if replicas are counted twice."""
    if num_replicas != 1:
        raise ValueError("num_replicas is the sum over the pools; give each pool its own")
    roles = {role_of(name, pool) for name, pool in pools.items()}
    if PoolRole.PREFILL in roles and not roles & {PoolRole.DECODE, PoolRole.MIXED}:
        raise ValueError("no pool takes the requests that leave the prefill pool; add one with role decode or mixed")
    if PoolRole.DECODE in roles and not roles & {PoolRole.PREFILL, PoolRole.MIXED}:
        raise ValueError("no pool computes prompts for the decode pool; add one with role prefill or mixed")


def check_elastic(
    scheduling: SchedulingConfig | None, own: ElasticConfig | None, pools: Mapping[str, PoolConfig]
) -> None:
    """Raise `ValueError` if a scaler lacks bounds, or if bounds exclude the initial number of replicas.

    `own` holds the replicaset's bounds, which apply if it defines no pools.
    """
    bounded = {name: pool.elastic for name, pool in pools.items() if pool.elastic is not None}
    if own is not None and not any(own is one for one in bounded.values()):
        raise ValueError("elastic is for one kind of replicas; give each pool its own")
    has_scaler = scheduling is not None and scheduling.scaling is not None
    if bounded and not has_scaler:
        raise ValueError("elastic has bounds for a scaler, and scheduling.scaling names none")
    if has_scaler and not bounded:
        raise ValueError("scheduling.scaling names a scaler, and elastic has no bounds for it")
    for name, elastic in bounded.items():
        where = "" if name == DEFAULT_POOL else f"pools.{name}."
        low, high, count = elastic.min_replicas, pools[name].most_replicas, pools[name].num_replicas
        if not low <= count <= high:
            raise ValueError(f"{where}num_replicas is not within {where}elastic ({count} of {low} to {high})")
