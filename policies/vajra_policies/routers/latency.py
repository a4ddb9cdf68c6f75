"""Latencies: a producer that predicts them from the run's latency model, a scorer by headroom, and a filter by promises kept.

Source: llm-d-router, `scheduling/scorer/latency` and `scheduling/filter/sloheadroomtier`; the predictor there is a trained model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from vajra_policies.routers import figures
from vajra_policies.routers.figures import Floats
from vajra_policies.routers.prefix_matches import OfPrefixProducer, match_fractions, matches_of
from vajra_py.contract import (
    BatchFeatures,
    PolicyConfig,
    PolicyContext,
    PredictedLatency,
    PredictsLatencies,
    PrefixMatches,
    RandomStream,
    ReplicaLoadView,
    RequestView,
    RoutingContext,
    RoutingPartKind,
    RoutingPartSpec,
)

LATENCIES = "predicted-latency-producer"
_FLAT = 1e-9
"""Ranges of headroom up to which all are equal, milliseconds."""
_CHUNK_TOKENS = 2048
"""Prompt by whose prefill time tokens that wait are turned into seconds, where steps are not limited."""


class LatencyProducerConfig(OfPrefixProducer):
    """Parameters of `predicted-latency-producer`."""

    slo_buffer_factor: float = Field(1.0, gt=0, description="Factor of the promised time per output token.")


class LatencyPredictions:
    """Predicts time to first token and time per output token on each replica.

    - TTFT: what waits there at the rate of a long prompt alone, then the uncached rest of this prompt alone.
    - TPOT: a step of all its running decodes and this request.
    """

    def __init__(self, config: LatencyProducerConfig, context: PolicyContext, matches: PrefixMatches) -> None:
        self._config = config
        self._context = context
        self._matches = matches

    def latencies(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float
    ) -> Sequence[PredictedLatency | None]:
        """A prediction for every replica."""
        prefill_time, latency = self._context.prefill_time, self._context.latency
        chunk = self._context.limits.max_batch_tokens or _CHUNK_TOKENS
        seconds_per_token = prefill_time.total_s(chunk) / chunk
        prompt = request.num_prompt_tokens
        cached = np.asarray(self._matches.matched_blocks(request, replicas)) * self._matches.block_size
        ttft_slo, tpot_slo = request.ttft_slo_s or 0.0, request.tpot_slo_s
        found = []
        for replica, hit in zip(replicas, cached.tolist(), strict=True):
            queued_s = replica.num_pending_tokens * seconds_per_token
            ttft = queued_s + prefill_time.remaining_s(prompt, min(hit, prompt - 1))
            num_running = replica.num_running
            features = BatchFeatures().with_decodes(num_running + 1, replica.num_context_tokens + prompt)
            tpot = latency.batch_time_s(features)
            tpot_headroom = 0.0 if tpot_slo is None else tpot_slo * self._config.slo_buffer_factor - tpot
            dispatched = num_running + replica.num_waiting
            found.append(PredictedLatency(ttft, tpot, ttft_slo - ttft, tpot_headroom, dispatched))
        return found


class LatencyScorerConfig(OfPrefixProducer):
    """Parameters of `latency-scorer`."""

    ttft_weight: float = Field(0.8, ge=0, description="Weight of the time to first token.")
    tpot_weight: float = Field(0.2, ge=0, description="Weight of the time per output token.")
    headroom_selection_strategy: Literal["least", "most"] = Field(
        "least", description="Among replicas that keep the promises: those with the least headroom first, or the most."
    )
    composite_kv_weight: float = Field(1.0, ge=0, description="Weight of free KV memory, without predictions.")
    composite_queue_weight: float = Field(1.0, ge=0, description="Weight of short queues, without predictions.")
    composite_prefix_weight: float = Field(1.0, ge=0, description="Weight of cached prefixes, without predictions.")
    latency_prediction_info_producer_name: str = Field(LATENCIES, description="Producer that predicts latencies.")


class LatencyScorer:
    """Rates replicas by headroom: promised minus predicted times.

    Only the best bucket that is not empty is rated, all others get 0: those that keep both promises; else the idle ones; else
    those that miss only the time per output token; only the time to first token; both. Within it |headroom| is scaled to
    0 .. 1 in both dimensions and weighted; scores are hundredths from 0.01 to 1.01.
    """

    def __init__(self, config: LatencyScorerConfig, predictions: PredictsLatencies, matches: PrefixMatches) -> None:
        self._config = config
        self._predictions = predictions
        self._matches = matches

    def scores(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Floats:
        """See the class."""
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
    """Positions of the best bucket that is not empty, and whether it is that of promises kept (or unpredicted)."""
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


class HeadroomTierConfig(PolicyConfig):
    """Parameters of `slo-headroom-tier-filter`."""

    epsilon_explore_neg: float = Field(
        0.01, ge=0, le=1, description="Probability of keeping those instead that miss a promise."
    )
    latency_prediction_info_producer_name: str = Field(LATENCIES, description="Producer that predicts latencies.")


class HeadroomTierFilter:
    """Keeps the replicas that keep both promises, where there are any; with a small probability the others."""

    def __init__(self, config: HeadroomTierConfig, predictions: PredictsLatencies, stream: RandomStream) -> None:
        self._config = config
        self._predictions = predictions
        self._stream = stream

    def keeps(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Sequence[ReplicaLoadView]:
        """Replicas without a prediction count among those that miss."""
        if len(replicas) <= 1:
            return replicas
        predicted = self._predictions.latencies(request, replicas, now)
        is_met = [one is not None and one.is_met for one in predicted]
        if all(is_met) or not any(is_met):
            return replicas
        wanted = not self._stream.random() < self._config.epsilon_explore_neg
        return [one for one, met in zip(replicas, is_met, strict=True) if met is wanted]


def predictions_of(context: RoutingContext, name: str) -> PredictsLatencies:
    """The router's producer of this name. Raises `ValueError` if it predicts no latencies."""
    found = context.producer(name)
    if not isinstance(found, PredictsLatencies):
        raise ValueError(f"producer {name!r} predicts no latencies; {LATENCIES} does")
    return found


def _producer(config: LatencyProducerConfig, context: RoutingContext) -> LatencyPredictions:
    return LatencyPredictions(config, context.policy, matches_of(context, config.prefix_match_info_producer_name))


def _scorer(config: LatencyScorerConfig, context: RoutingContext) -> LatencyScorer:
    predictions = predictions_of(context, config.latency_prediction_info_producer_name)
    return LatencyScorer(config, predictions, matches_of(context, config.prefix_match_info_producer_name))


def _filter(config: HeadroomTierConfig, context: RoutingContext) -> HeadroomTierFilter:
    predictions = predictions_of(context, config.latency_prediction_info_producer_name)
    return HeadroomTierFilter(config, predictions, context.policy.random_stream("slo-headroom-tier-filter"))


SPECS = (
    RoutingPartSpec(
        name=LATENCIES,
        kind=RoutingPartKind.PRODUCER,
        config=LatencyProducerConfig,
        build=_producer,
        summary="Times to first token and per output token on each replica, by the run's latency model.",
        source="llm-d predicted-latency-producer, with a latency model in place of a trained one",
    ),
    RoutingPartSpec(
        name="latency-scorer",
        kind=RoutingPartKind.SCORER,
        config=LatencyScorerConfig,
        build=_scorer,
        summary="By headroom between promised and predicted latencies.",
        source="llm-d latency-scorer",
    ),
    RoutingPartSpec(
        name="slo-headroom-tier-filter",
        kind=RoutingPartKind.FILTER,
        config=HeadroomTierConfig,
        build=_filter,
        summary="Replicas that are predicted to keep the request's promises, where there are any.",
        source="llm-d slo-headroom-tier-filter",
    ),
)
