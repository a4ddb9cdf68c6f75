"""Scorer for LoRA adapters: prefers replicas that have loaded a request's adapter, then those with room for it.

Source: llm-d-router, `scheduling/scorer/loraaffinity`, whose scorer reads the same figures of each replica.
"""

from __future__ import annotations

from collections.abc import Sequence

from vajra_policies.routers.load_scorers import NoParameters
from vajra_py.contract import ReplicaLoadView, RequestView, RoutingContext, RoutingPartKind, RoutingPartSpec

LOADED, HAS_ROOM, WAITING, FULL = 1.0, 0.8, 0.6, 0.0


class LoraAffinityScorer:
    """Scores a replica 1 if it has loaded the adapter, 0.8 if it has room for another adapter, 0.6 if a request for the
    adapter waits there, else 0.

    For a request of the base model, only room for another adapter counts, as in llm-d: the base model is never among
    the adapters.
    """

    def scores(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Sequence[float]:
        """Return the score of each replica, from its loaded adapters and the adapters of its waiting requests."""
        return [_score(request.adapter, one) for one in replicas]


def _score(name: str, replica: ReplicaLoadView) -> float:
    loaded, waiting = replica.loaded_adapters, replica.waiting_adapters
    if name in loaded:
        return LOADED
    if len(loaded) + len(waiting) < replica.max_loras:
        return HAS_ROOM
    return WAITING if name in waiting else FULL


def _lora_affinity(config: NoParameters, context: RoutingContext) -> LoraAffinityScorer:
    return LoraAffinityScorer()


SPECS = (
    RoutingPartSpec(
        name="lora-affinity-scorer",
        kind=RoutingPartKind.SCORER,
        config=NoParameters,
        build=_lora_affinity,
        summary="Replicas that have the request's adapter loaded, then those with room for it.",
        source="llm-d lora-affinity-scorer",
    ),
)
