"""Scorer of LoRA adapters: replicas that have a request's adapter, or room for it.

Source: llm-d-router, `scheduling/scorer/loraaffinity`; figures are those of its model server protocol.
"""

from __future__ import annotations

from collections.abc import Sequence

from vajra_policies.routers.load_scorers import NoParameters
from vajra_py.contract import ReplicaLoadView, RequestView, RoutingContext, RoutingPartKind, RoutingPartSpec

LOADED, HAS_ROOM, WAITING, FULL = 1.0, 0.8, 0.6, 0.0


class LoraAffinityScorer:
    """Scores 1 if the adapter is loaded, 0.8 if the replica has room for another one, 0.6 if a request waits for it
    there, else 0.

    For a request of the base model, only room for another adapter counts, as in llm-d, since the model's name is not
    among any replica's adapters.
    """

    def scores(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Sequence[float]:
        """Return scores by the adapters that each replica has loaded, and those for which requests wait there."""
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
