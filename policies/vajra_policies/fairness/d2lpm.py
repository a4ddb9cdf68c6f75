"""Double deficit longest prefix match: tenants follow their prefixes to a replica for a quantum at a time."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from vajra_policies.fairness.accounts import QuantumConfig
from vajra_policies.fairness.deficits import refill
from vajra_policies.routing import BindsOnArrival, load_in, those_up
from vajra_py.contract import Layer, PolicyContext, PolicySpec, ReplicaId, ReplicaLoadView, RequestView


class D2lpmConfig(QuantumConfig):
    """Parameters of `d2lpm`."""

    output_weight: float = Field(1.0, ge=0, le=1e9, description="Charge for a generated token, when its request ends.")


class D2lpm(BindsOnArrival):
    """Chooses the longest cached prefix among the replicas at which the request's tenant has deficit left.

    q_{u,w} is the deficit of tenant u at replica w, f_u is the share of the tenant, and w_p and w_q are the weights of
    a prompt token and an output token.

    - Placing a request takes w_p * (prompt - cached prefix) / f_u from q_{u,w}; the end of the request takes w_q *
      outputs / f_u.
    - When q_{u,w} <= 0 at all replicas, the quantum Q is added to each q_{u,w}, repeatedly until one of them is above
      0. Among replicas with equally long prefixes, the one with the fewest requests is chosen, then the one with the
      lowest id.

    A tenant thus stays where its prefix is cached, and spreads to other replicas as it uses up its quantum. The
    prioritizer `dlpm`, used on the replicas, is the other half of the paper's scheme.

    Left out: charging outputs per token; they are charged at a request's end. Only the idea was checked; the rest is
    from memory of the paper.

    Source: Cao et al., "Locality-aware Fair Scheduling in LLM Serving" (arXiv:2501.14312), D2LPM.
    """

    def __init__(self, config: D2lpmConfig, num_kv_tokens: int) -> None:
        self._config = config
        self._quantum = config.quantum_for(num_kv_tokens)
        self._load = load_in("requests")
        self._deficits: dict[str, dict[ReplicaId, float]] = {}
        self._placed: dict[RequestView, ReplicaId] = {}

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the replica with the longest prefix hit among those that are up and at which the tenant has deficit
        left.
        """
        up = those_up(replicas)
        if not up:
            return None
        deficits = self._deficits.setdefault(request.tenant, {})
        refill(deficits, [one.replica_id for one in up], self._quantum)
        candidates = [one for one in up if deficits.get(one.replica_id, 0.0) > 0]
        ranked = [(-one.prefix_hit_tokens(request), self._load(one), one.replica_id) for one in candidates]
        minus_hit, _, chosen = min(ranked)
        self._placed[request] = chosen
        self._charge(request, chosen, self._config.prompt_weight * (request.num_prompt_tokens + minus_hit))
        return chosen

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Charge the tenants for the outputs of these requests, at the replicas where the requests were placed."""
        for request in requests:
            replica_id = self._placed.pop(request, None)
            if replica_id is not None:
                self._charge(request, replica_id, self._config.output_weight * request.num_output_tokens)

    def _charge(self, request: RequestView, replica_id: ReplicaId, cost: float) -> None:
        deficits = self._deficits[request.tenant]
        share = self._config.tenant_weights.get(request.tenant, 1.0)
        deficits[replica_id] = deficits.get(replica_id, 0.0) - cost / share


def _build(config: D2lpmConfig, context: PolicyContext) -> D2lpm:
    return D2lpm(config, context.limits.num_blocks * context.limits.block_size)


SPEC = PolicySpec(
    name="d2lpm",
    layer=Layer.REPLICASET_SCHEDULER,
    config=D2lpmConfig,
    build=_build,
    summary="The longest cached prefix among the replicas where the tenant has not used up its quantum.",
    source="D2LPM (Cao et al., arXiv:2501.14312)",
    advice=(
        "Use it with `dlpm` for tenants that each have their own prefixes, on several replicas. Not with one tenant "
        "(`lmetric`)."
    ),
)
