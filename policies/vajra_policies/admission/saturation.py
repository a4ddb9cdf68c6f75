"""Saturation of a replicaset as defined by llm-d's detectors: 1 means full; larger values are possible.

Source: llm-d router, `utilization-detector` and `concurrency-detector`. The saturation of a replicaset is that of its fullest pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from vajra_py.contract import PolicyConfig, ReplicaLoadView, ReplicasetView, RequestView

EMPTY_POOL = 1.0
"""Saturation of a pool without any replica that is up."""


class SaturationConfig(PolicyConfig):
    """Parameters of the saturation detector."""

    detector: Literal["utilization", "concurrency"] = Field(
        "utilization",
        description="utilization: queue length and KV blocks in use, whichever is nearer its threshold; concurrency: what is in flight.",
    )
    queue_threshold_requests: int = Field(
        5, gt=0, description="utilization: waiting requests of a replica at which it is full."
    )
    kv_threshold_fraction: float = Field(
        0.8, gt=0, le=1, description="utilization: fraction of a replica's KV blocks in use at which it is full."
    )
    concurrency: Literal["requests", "tokens", "hybrid"] = Field(
        "requests",
        description=(
            "concurrency: quantity that counts: requests in flight, tokens left to prefill, or, for each replica, "
            "the larger of these two."
        ),
    )
    max_concurrency_requests: int = Field(100, gt=0, description="concurrency: requests in flight that fill a replica.")
    max_concurrency_tokens: int = Field(
        1_000_000, gt=0, description="concurrency: tokens left to prefill that fill a replica."
    )


def saturation_for(config: SaturationConfig, request: RequestView, replicasets: Sequence[ReplicasetView]) -> float:
    """Return the saturation of the replicaset that serves a request: the saturation of its fullest pool."""
    return max(saturation_of(config, pool.replicas) for pool in replicaset_of(request, replicasets).pools)


def replicaset_of(request: RequestView, replicasets: Sequence[ReplicasetView]) -> ReplicasetView:
    """Return the view of the replicaset that serves a request."""
    return next(one for one in replicasets if one.name == request.replicaset)


def saturation_of(config: SaturationConfig, replicas: Sequence[ReplicaLoadView]) -> float:
    """Return the saturation of one pool: the mean over its replicas that are up."""
    up = [one for one in replicas if one.is_up]
    if not up:
        return EMPTY_POOL
    if config.detector == "utilization":
        return sum(_utilization(config, one) for one in up) / len(up)
    if config.concurrency == "requests":
        return sum(map(_in_flight, up)) / (config.max_concurrency_requests * len(up))
    if config.concurrency == "tokens":
        return sum(one.num_pending_tokens for one in up) / (config.max_concurrency_tokens * len(up))
    return sum(_larger(config, one) for one in up) / len(up)


def _utilization(config: SaturationConfig, replica: ReplicaLoadView) -> float:
    used_fraction = 1.0 - replica.free_blocks / replica.num_blocks
    queue = replica.num_waiting / config.queue_threshold_requests
    return max(queue, used_fraction / config.kv_threshold_fraction)


def _in_flight(replica: ReplicaLoadView) -> int:
    return replica.num_running + replica.num_waiting


def _larger(config: SaturationConfig, replica: ReplicaLoadView) -> float:
    requests = _in_flight(replica) / config.max_concurrency_requests
    return max(requests, replica.num_pending_tokens / config.max_concurrency_tokens)
