"""Router that prefers replicas with cached prefixes and avoids replicas with full KV memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import Field
from vajra_py.contract import (
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    QueueView,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
)


class PrefixAffinityConfig(PolicyConfig):
    """Parameters of `example_prefix_affinity`."""

    min_hit_fraction: float = Field(
        0.5, gt=0, le=1, description="Least part of the prompt that must be cached for the cache to decide, fraction."
    )
    max_kv_fraction: float = Field(
        0.9,
        gt=0,
        le=1,
        description="A replica that uses more of its KV blocks than this is not followed for its cache, fraction.",
    )


class PrefixAffinityPolicy:
    """Assigns a request to the replica with the longest cached prefix, or to the one that uses the least of its memory.

    The cache decides if the prefix is long enough, and if the replica has free memory.
    """

    def __init__(self, config: PrefixAffinityConfig) -> None:
        self._config = config

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the replica for an arriving request; None while no replica is up.

        Ties go to the replica with fewer pending tokens, then to the lower id.
        """
        up = [replica for replica in replicas if replica.is_up]
        if not up:
            return None
        hits = {
            replica.replica_id: replica.prefix_hit_tokens(request)
            for replica in up
            if _kv_fraction(replica) <= self._config.max_kv_fraction
        }
        longest = max(hits.values(), default=0)
        if longest >= max(1.0, self._config.min_hit_fraction * request.num_prompt_tokens):
            up = [replica for replica in up if hits.get(replica.replica_id) == longest]
        return min(up, key=_load).replica_id

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        """Assign requests that arrived while no replica was up to the first replica that pulls."""
        return (request.request_id for request in queued)


def _kv_fraction(replica: ReplicaLoadView) -> float:
    return 1.0 - replica.free_blocks / replica.num_blocks


def _load(replica: ReplicaLoadView) -> tuple[float, int, ReplicaId]:
    return _kv_fraction(replica), replica.num_pending_tokens, replica.replica_id


def _build(config: PrefixAffinityConfig, context: PolicyContext) -> PrefixAffinityPolicy:
    return PrefixAffinityPolicy(config)


SPEC = PolicySpec(
    name="example_prefix_affinity",
    layer=Layer.REPLICASET_SCHEDULER,
    config=PrefixAffinityConfig,
    build=_build,
    summary="The replica that has the prompt's prefix cached, unless its memory is nearly full; else the emptiest.",
    source="Cache-aware routing as in SGLang's router.",
)
