"""Filter of replicas that are predicted to meet a request's SLOs.

Source: llm-d-router, `scheduling/filter/sloheadroomtier`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from vajra_policies.routers.latency import LATENCIES, predictions_of
from vajra_py.contract import (
    PolicyConfig,
    PredictsLatencies,
    RandomStream,
    ReplicaLoadView,
    RequestView,
    RoutingContext,
    RoutingPartKind,
    RoutingPartSpec,
)


class HeadroomTierConfig(PolicyConfig):
    """Parameters of `slo-headroom-tier-filter`."""

    epsilon_explore_neg: float = Field(
        0.01,
        ge=0,
        le=1,
        description=("Probability of keeping the replicas that miss an SLO instead of those that meet all."),
    )
    latency_prediction_info_producer_name: str = Field(LATENCIES, description="Producer that predicts latencies.")


class HeadroomTierFilter:
    """Keeps the replicas that are predicted to meet both SLOs or, with a small probability, only the other replicas."""

    def __init__(self, config: HeadroomTierConfig, predictions: PredictsLatencies, stream: RandomStream) -> None:
        self._config = config
        self._predictions = predictions
        self._stream = stream

    def keeps(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Sequence[ReplicaLoadView]:
        """Keep the replicas that meet the SLOs or, with the probability `epsilon_explore_neg`, those that miss them.
        Replicas without a prediction count as missing the SLOs. If only one of the two groups has replicas, all are
        kept.
        """
        if len(replicas) <= 1:
            return replicas
        predicted = self._predictions.latencies(request, replicas, now)
        is_met = [one is not None and one.is_met for one in predicted]
        if all(is_met) or not any(is_met):
            return replicas
        wanted = not self._stream.random() < self._config.epsilon_explore_neg
        return [one for one, met in zip(replicas, is_met, strict=True) if met is wanted]


def _filter(config: HeadroomTierConfig, context: RoutingContext) -> HeadroomTierFilter:
    predictions = predictions_of(context, config.latency_prediction_info_producer_name)
    return HeadroomTierFilter(config, predictions, context.policy.random_stream("slo-headroom-tier-filter"))


SPECS = (
    RoutingPartSpec(
        name="slo-headroom-tier-filter",
        kind=RoutingPartKind.FILTER,
        config=HeadroomTierConfig,
        build=_filter,
        summary="Replicas that are predicted to meet the request's SLOs, if there are any.",
        source="llm-d slo-headroom-tier-filter",
    ),
)
