"""Scorer by headroom: the SLO minus the predicted latency.

Source: llm-d-router, `scheduling/scorer/latency`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from vajra_policies.routers import figures
from vajra_policies.routers.figures import Floats
from vajra_policies.routers.latency import LATENCIES, predictions_of
from vajra_policies.routers.prefix_matches import OfPrefixProducer, match_fractions, matches_of
from vajra_py.contract import (
    PredictedLatency,
    PredictsLatencies,
    PrefixMatches,
    ReplicaLoadView,
    RequestView,
    RoutingContext,
    RoutingPartKind,
    RoutingPartSpec,
)

_FLAT = 1e-9
"""Largest difference of headrooms, in milliseconds, at which they still count as equal."""


class LatencyScorerConfig(OfPrefixProducer):
    """Parameters of `latency-scorer`."""

    ttft_weight: float = Field(0.8, ge=0, description="Weight of the time to first token.")
    tpot_weight: float = Field(0.2, ge=0, description="Weight of the time per output token.")
    headroom_selection_strategy: Literal["least", "most"] = Field(
        "least", description="Order of replicas that meet the SLOs: least headroom first, or most."
    )
    composite_kv_weight: float = Field(1.0, ge=0, description="Weight of free KV memory, without predictions.")
    composite_queue_weight: float = Field(1.0, ge=0, description="Weight of short queues, without predictions.")
    composite_prefix_weight: float = Field(1.0, ge=0, description="Weight of cached prefixes, without predictions.")
    latency_prediction_info_producer_name: str = Field(LATENCIES, description="Producer that predicts latencies.")


class LatencyScorer:
    """Scores replicas by headroom: SLO minus predicted latency.

    Only replicas of the best non-empty bucket get a score above 0. Buckets, best first: replicas that meet both SLOs or
    have no prediction; idle replicas; replicas that miss only the TPOT SLO, only the TTFT SLO, or both. Within a
    bucket, the absolute headrooms for TTFT and for TPOT are each scaled to 0 .. 1, and their weighted sum decides: the
    least sum scores highest. In the first of these buckets, the greatest sum scores highest instead if
    `headroom_selection_strategy` is "most". Scores are multiples of 0.01 from 0.01 to 1.01.
    """

    def __init__(self, config: LatencyScorerConfig, predictions: PredictsLatencies, matches: PrefixMatches) -> None:
        self._config = config
        self._predictions = predictions
        self._matches = matches

    def scores(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Floats:
        """Return the scores by headroom. If no replica has a prediction, the scores depend on free KV memory, queue
        lengths and cached prefixes instead.
        """
        predicted = self._predictions.latencies(request, replicas, now)
        if all(one is None for one in predicted):
            return self._composite(request, replicas)
        score = np.zeros(len(replicas))
        positions, is_met = best_bucket(predicted)
        bucket = [predicted[position] for position in positions]
        score[positions] = self._in_bucket(bucket, is_least=not is_met or self._is_least)
        return score

    @property
    def _is_least(self) -> bool:
        return self._config.headroom_selection_strategy == "least"

    def _in_bucket(self, bucket: Sequence[PredictedLatency | None], is_least: bool) -> Floats:
        ttft = np.array([0.0 if one is None else abs(1000.0 * one.ttft_headroom_s) for one in bucket])
        tpot = np.array([0.0 if one is None else abs(1000.0 * one.tpot_headroom_s) for one in bucket])
        alpha, beta = _normalised(self._config.ttft_weight, self._config.tpot_weight)
        is_ttft_flat, is_tpot_flat = np.ptp(ttft) <= _FLAT, np.ptp(tpot) <= _FLAT
        if is_ttft_flat != is_tpot_flat:
            alpha, beta = (0.0, 1.0) if is_ttft_flat else (1.0, 0.0)
        combined = alpha * _scaled(ttft) + beta * _scaled(tpot)
        score: Floats = (np.trunc((1.0 - combined if is_least else combined) * 100.0) + 1.0) / 100.0
        return score

    def _composite(self, request: RequestView, replicas: Sequence[ReplicaLoadView]) -> Floats:
        config = self._config
        weights = config.composite_kv_weight, config.composite_queue_weight, config.composite_prefix_weight
        total = sum(weights)
        kv, queue, prefix = (weight / total for weight in weights) if total > 0 else (1.0, 0.0, 0.0)
        waiting = figures.waiting(replicas)
        most = waiting.max(initial=0.0)
        short = (most - waiting) / most if most > 0 else np.ones(len(replicas))
        matched = match_fractions(self._matches, request, replicas)
        composite = kv * (1.0 - figures.kv_usage(replicas)) + queue * short + prefix * matched
        score: Floats = np.floor(100.0 * composite + 0.5) / 100.0
        return score


def best_bucket(predicted: Sequence[PredictedLatency | None]) -> tuple[list[int], bool]:
    """Return the positions of the replicas of the best non-empty bucket, and True if they meet both SLOs or have no
    prediction.
    """
    met = [position for position, one in enumerate(predicted) if one is None or one.is_met]
    if met:
        return met, True
    missed = [(position, one) for position, one in enumerate(predicted) if one is not None]
    buckets = (
        [position for position, one in missed if not one.num_dispatched],
        [position for position, one in missed if one.ttft_headroom_s >= 0],
        [position for position, one in missed if one.tpot_headroom_s >= 0],
    )
    return next((bucket for bucket in buckets if bucket), [position for position, _ in missed]), False


def _normalised(one: float, other: float) -> tuple[float, float]:
    total = one + other
    return (one / total, other / total) if total > 0 else (1.0, 0.0)


def _scaled(values: Floats) -> Floats:
    width = np.ptp(values)
    scaled: Floats = (values - values.min()) / width if width > _FLAT else np.full(len(values), 0.5)
    return scaled


def _scorer(config: LatencyScorerConfig, context: RoutingContext) -> LatencyScorer:
    predictions = predictions_of(context, config.latency_prediction_info_producer_name)
    return LatencyScorer(config, predictions, matches_of(context, config.prefix_match_info_producer_name))


SPECS = (
    RoutingPartSpec(
        name="latency-scorer",
        kind=RoutingPartKind.SCORER,
        config=LatencyScorerConfig,
        build=_scorer,
        summary="Headroom: the SLOs minus the predicted latencies.",
        source="llm-d latency-scorer",
    ),
)
