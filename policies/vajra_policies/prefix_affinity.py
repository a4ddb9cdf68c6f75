"""Route to the replica that caches the prompt's prefix, unless that would unbalance the load too far."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from vajra_policies.routing import BindsOnArrival, load_in, those_up
from vajra_py.contract import Layer, PolicyConfig, PolicyContext, PolicySpec, ReplicaId, ReplicaLoadView, RequestView


class PrefixAffinityConfig(PolicyConfig):
    """Parameters of `prefix_affinity`."""

    min_hit_fraction: float = Field(
        0.1, ge=0, le=1, description="Cached fraction of a prompt from which its replica is preferred."
    )
    max_imbalance_requests: int = Field(
        10,
        ge=0,
        description="Maximum number of requests that the replica with the prefix may have above the least loaded one.",
    )


class PrefixAffinity(BindsOnArrival):
    """Binds on arrival to the replica that caches the longest prefix of the prompt, if hit and load allow it.

    The replica with the longest hit gets the request (if hits are equal, the less loaded replica, then the lower id),
    provided that the hit covers `min_hit_fraction` of the prompt and the replica has at most `max_imbalance_requests`
    requests more than the least loaded one. Otherwise the least loaded replica gets it. While no replica is up,
    requests stay in the shared queue.

    Source: exploit-or-explore as in Preble (arXiv:2407.00023); the two thresholds are those of Ray Serve's
    prefix-affinity router.
    """

    def __init__(self, config: PrefixAffinityConfig) -> None:
        self._config = config
        self._load = load_in("requests")

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the replica with the prefix, or the least loaded one."""
        up = those_up(replicas)
        if not up:
            return None
        loads = [(self._load(one), one.replica_id) for one in up]
        least = min(loads)
        hits = [one.prefix_hit_tokens(request) for one in up]
        longest = max(hits)
        if longest and longest >= self._config.min_hit_fraction * request.num_prompt_tokens:
            holder = min(load for load, hit in zip(loads, hits, strict=True) if hit == longest)
            if holder[0] - least[0] <= self._config.max_imbalance_requests:
                return holder[1]
        return least[1]


def _build(config: PrefixAffinityConfig, context: PolicyContext) -> PrefixAffinity:
    return PrefixAffinity(config)


SPEC = PolicySpec(
    name="prefix_affinity",
    layer=Layer.REPLICASET_SCHEDULER,
    config=PrefixAffinityConfig,
    build=_build,
    summary="Each arriving request to the replica that caches its prefix, unless load is too uneven.",
    source="Preble (arXiv:2407.00023); Ray Serve's prefix-affinity router",
    advice=(
        "Use it where conversations or agents share prefixes, on replicas with prefix caches. Not where one prefix is "
        "much more frequent than all others."
    ),
)
