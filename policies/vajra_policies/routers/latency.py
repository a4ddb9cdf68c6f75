"""Producer of latencies, predicted from the run's latency model.

Source: llm-d-router, `predicted-latency-producer`, whose predictor is a trained model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from vajra_policies.routers.prefix_matches import OfPrefixProducer, matches_of
from vajra_py.contract import (
    BatchFeatures,
    PolicyContext,
    PredictedLatency,
    PredictsLatencies,
    PrefixMatches,
    ReplicaLoadView,
    RequestView,
    RoutingContext,
    RoutingPartKind,
    RoutingPartSpec,
)

LATENCIES = "predicted-latency-producer"
_CHUNK_TOKENS = 2048
"""Prompt length in tokens, used if steps have no token budget: pending tokens are converted to seconds at the mean
prefill time per token of a prompt of this length.
"""


class LatencyProducerConfig(OfPrefixProducer):
    """Parameters of `predicted-latency-producer`."""

    slo_buffer_factor: float = Field(1.0, gt=0, description="Factor of the TPOT SLO.")


class LatencyPredictions:
    """Predicts time to first token and time per output token on each replica.

    - TTFT: time of the replica's pending tokens, at the rate of a long prompt that is alone on a replica, plus prefill
      time of the uncached rest of this prompt.
    - TPOT: duration of a step with all running requests of the replica and this request as decodes.

    As in llm-d, a missing TTFT SLO counts as 0. No replica meets it then, and the least predicted TTFT is the best,
    even if the request has a TPOT SLO. A missing TPOT SLO counts as met, as in llm-d without its streaming mode.
    """

    def __init__(self, config: LatencyProducerConfig, context: PolicyContext, matches: PrefixMatches) -> None:
        self._config = config
        self._context = context
        self._matches = matches

    def latencies(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float
    ) -> Sequence[PredictedLatency | None]:
        """Return a prediction for every replica."""
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


def predictions_of(context: RoutingContext, name: str) -> PredictsLatencies:
    """Return the router's producer of this name. Raises `ValueError` if it predicts no latencies."""
    found = context.producer(name)
    if not isinstance(found, PredictsLatencies):
        raise ValueError(f"producer {name!r} does not predict latencies; {LATENCIES} does")
    return found


def _producer(config: LatencyProducerConfig, context: RoutingContext) -> LatencyPredictions:
    return LatencyPredictions(config, context.policy, matches_of(context, config.prefix_match_info_producer_name))


SPECS = (
    RoutingPartSpec(
        name=LATENCIES,
        kind=RoutingPartKind.PRODUCER,
        config=LatencyProducerConfig,
        build=_producer,
        summary="Times to first token and per output token on each replica, by the run's latency model.",
        source="llm-d predicted-latency-producer, with a latency model in place of a trained one",
    ),
)
