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

    enabled: Switch = Field(True, description="Share the KV blocks of common prefixes.")
    publish: Literal["schedule", "step_end"] = Field(
        "schedule",
        description="Time from which a full block can be hit: once its step is formed, or once the step has ended.",
    )
    reuse_order: Literal["lru", "fifo"] = Field(
        "lru",
        description="Idle block that is evicted first: the least recently used, or the one freed first.",
    )
    release_order: Literal["tail_first", "head_first"] = Field(
        "tail_first", description="Order in which a request's blocks become idle; tail first keeps prefixes longest."
    )
    retain_freed: Switch = Field(True, description="Keep freed blocks available for hits until they are evicted.")
    drop_last_hit: Switch = Field(
        False,
        description="Recompute the last block that a lookup finds, for drafters that need the model's activations there (vLLM with EAGLE).",
    )
    duplicates: Literal["keep_first", "keep_last"] = Field(
        "keep_first", description="Block that later hits get where two have the same content."
    )
    unscheduled: Literal["withdraw", "keep"] = Field(
        "withdraw",
        description=(
            "Treatment of blocks published by a request that is preempted before its step runs; `keep` is vLLM's, and lets others read blocks that were never computed."
        ),
    )
    max_pinned_fraction: float = Field(
        0.5, strict=True, ge=0, le=1, description="Fraction of the KV blocks that pins of policies may hold."
    )


class MemoryConfig(Section):
    """KV memory of one replica."""

    block_size: BlockSize = Field(16, description="Number of tokens in a KV block.")
    num_blocks: PositiveCount | None = Field(
        None, description="Number of KV blocks of a replica; null: as many as model and device leave room for."
    )
    memory_fraction: float = Field(
        0.9,
        strict=True,
        gt=0,
        le=1,
        description="Fraction of the device's memory that weights and KV blocks may take.",
    )
    reservation: Literal["prompt", "incremental"] = Field(
        "prompt",
        description="Blocks allocated at admission: for the whole known sequence, or for the tokens of the first step.",
    )
    watermark_fraction: float = Field(
        0.01, strict=True, ge=0, lt=1, description="Fraction of the KV blocks that admission leaves free."
    )
    host_blocks: Count = Field(0, description="Number of KV blocks in host memory for swapped requests.")
    tenant_salt: Switch = Field(False, description="Keep the cached prefixes of each tenant apart.")
    prefix_cache: PrefixCacheConfig = Field(default_factory=PrefixCacheConfig, description="Prefix caching.")
    tiers: TiersConfig | None = Field(
        None,
        description="Tiers of memory below the device for cached content: host, disk, a store that replicas share; null: none.",
    )

    swap_link: SwapLinkConfig | None = Field(
        None,
        description="Link over which swapped blocks are copied beside steps; null: between steps, which wait for them.",
    )

    @model_validator(mode="after")
    def _swaps(self) -> Self:
        if self.swap_link is not None and not self.host_blocks:
            raise ValueError(
                "swap_link applies only to preemption by swapping (got host_blocks: 0). Allowed: host_blocks above 0"
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
        None,
        description="Maximum number of tokens of one request that a group holds; required with more than one group.",
    )
    busy_tokens: PositiveCount = Field(
        500, description="Number of query tokens in a step from which a group takes no further request."
    )

    @model_validator(mode="after")
    def _sized(self) -> Self:
        if self.groups > 1 and self.group_tokens is None:
            raise ValueError(f"group_tokens is needed with more than one group (got groups: {self.groups})")
        return self


class ReplicaConfig(Section):
    """Sizes of each replica."""

    max_batch_size: PositiveCount = Field(128, description="Maximum number of requests in one step.")
    max_batch_tokens: PositiveCount | None = Field(
        None, description="Maximum number of tokens in one step; null: no limit."
    )
    max_model_len: PositiveCount | None = Field(
        None, description="Maximum length of a request, prompt and output, tokens; null: the model's."
    )
    pipeline_stages: StageCount | None = Field(
        None, description="Number of pipeline stages; null: that of the latency model."
    )
    kv_parallel: KvParallelConfig = Field(default_factory=KvParallelConfig, description="KV parallelism.")
    memory: MemoryConfig = Field(default_factory=MemoryConfig, description="KV memory.")
    adapters: AdaptersConfig | None = Field(None, description="LoRA adapters that the replica serves; null: none.")
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

    min_replicas: Count = Field(
        1, description="Minimum number of replicas, starting or up; 0 lets a scaler stop them all."
    )
    max_replicas: ReplicaCount | None = Field(
        None, description="Maximum number of replicas, starting or up; null: `num_replicas`."
    )
    startup_s: Seconds = Field(0.0, description="Time from starting a replica until it takes requests, seconds.")
    startup_spread_s: Seconds = Field(
        0.0, description="Maximum extra time of each start, drawn uniformly from 0, seconds."
    )
    drain: Literal["wait", "migrate"] = Field(
        "wait",
        description=(
            "Treatment of running requests on a replica that stops: they finish there; or they migrate live to other replicas that have room, by the rules of `migration` and `links`."
        ),
    )


class PoolConfig(Section):
    """One pool of a replicaset: replicas of one kind. Missing keys of `replica` are taken from the replicaset."""

    role: Literal["mixed", "prefill", "decode"] | None = Field(
        None,
        description=(
            "Work of its replicas: prefill, after which requests leave with their KV; decode, to which they come with it; or both (mixed). null: the pool's name, if it is one of the three, else mixed."
        ),
    )
    num_replicas: ReplicaCount = Field(1, description="Number of replicas; with a scaler, at the start.")
    replica: ReplicaConfig = Field(default_factory=ReplicaConfig, description="Sizes of its replicas.")
    replica_scheduler: PolicyChoice | None = Field(
        None, description="Replica scheduler of its replicas; null: the replicaset's."
    )
    retention: PolicyChoice | None = Field(
        None, description="Retention policy of its replicas; null: the replicaset's."
    )
    elastic: ElasticConfig | None = Field(
        None,
        description="Range of the number of replicas that the replicaset's scaler may choose; null: always `num_replicas`.",
    )

    @property
    def most_replicas(self) -> int:
        """Maximum number of replicas that can be up at once, which is also the number of replicas that are built."""
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
    """Raise `ValueError` if no pool computes prompts, if no pool decodes, or if `num_replicas` is set as well."""
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
    """Raise `ValueError` if a scaler lacks bounds, if bounds are set without a scaler, or if bounds exclude the initial
    number of replicas.

    `own`: bounds of the replicaset as a whole, which are allowed only if the replicaset defines no pools.
    """
    bounded = {name: pool.elastic for name, pool in pools.items() if pool.elastic is not None}
    if own is not None and not any(own is one for one in bounded.values()):
        raise ValueError("elastic applies to one kind of replicas; give each pool its own")
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
