"""Dynamo's KV router: the replica of least cost, in blocks to compute and blocks to hold.

Left out: host and disk tiers, Dynamo's router queue, and its expiry of stale bookings.

Source: Dynamo 1.6.1, `lib/kv-router/src/scheduling/selector/default.rs`.
"""

from __future__ import annotations

from pydantic import Field

from vajra_py.contract import Layer, PolicyConfig, PolicyContext, PolicySpec, ReplicasetScheduler


class CostRouterConfig(PolicyConfig):
    """Parameters of `dynamo_kv_router`, under Dynamo's names; it draws ties from the run's stream of that name."""

    overlap_score_credit: float = Field(1.0, ge=0, description="Blocks that a cached block spares.")
    overlap_score_credit_decay: float = Field(
        0.0, ge=0, description="Loss of that credit on replicas with more to compute than the least loaded one."
    )
    prefill_load_scale: float = Field(1.0, ge=0, description="Weight of the blocks to compute beside those to hold.")
    decode_active_request_weight: float = Field(0.0, ge=0, description="Blocks that each active request counts for.")
    router_temperature: float = Field(
        0.0, ge=0, description="0: the least cost. Above: by chance, e^(-(cost - min) / ((max - min) * temperature))."
    )
    router_track_prefill_tokens: bool = Field(
        True, description="Whether blocks to compute count; without, the credit is taken from the blocks to hold."
    )
    router_assume_kv_reuse: bool = Field(True, description="Whether blocks that requests share count once.")
    router_track_output_blocks: bool = Field(False, description="Whether generated blocks count.")
    use_kv_events: bool = Field(
        True, description="True: cached blocks are what the replicas hold. False: what was sent there of late."
    )
    router_ttl_secs: float = Field(120.0, gt=0, description="Seconds that sent blocks count as cached, without events.")


def _build(config: CostRouterConfig, context: PolicyContext) -> ReplicasetScheduler:
    from vajra_policies.routers.cost_router import CostRouter

    return CostRouter(config, context)


SPEC = PolicySpec(
    name="dynamo_kv_router",
    layer=Layer.REPLICASET_SCHEDULER,
    config=CostRouterConfig,
    build=_build,
    summary="Each arriving request to the replica of least cost: blocks to compute, less cached ones, and blocks to hold.",
    source="NVIDIA Dynamo 1.6.1, KV router",
    advice=(
        "Use it to compare with Dynamo, and where caches and loads count in one figure. Not without prefix caches."
    ),
)
