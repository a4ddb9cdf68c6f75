"""Filter by prefix: keep only replicas that cache most of the prompt, unless the prompt would wait too long there.

Source: llm-d-router, `scheduling/filter/prefixcacheaffinity`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from vajra_policies.routers.in_flight import IN_FLIGHT, loads_of
from vajra_policies.routers.latency import LATENCIES, predictions_of
from vajra_policies.routers.prefix_matches import OfPrefixProducer, match_fractions, matches_of
from vajra_py.contract import (
    InFlightLoads,
    PredictsLatencies,
    PrefixMatches,
    RandomStream,
    ReplicaLoadView,
    RequestView,
    RoutingContext,
    RoutingPartKind,
    RoutingPartSpec,
)


class PrefixAffinityFilterConfig(OfPrefixProducer):
    """Parameters of `prefix-cache-affinity-filter`."""

    affinity_threshold: float = Field(
        0.8, ge=0, le=1, description="Cached fraction of the prompt from which a replica is sticky; 0: keep all."
    )
    exploration_probability: float = Field(0.0, ge=0, le=1, description="Probability of keeping all.")
    max_ttft_penalty_ms: float = Field(
        18_000.0,
        ge=0,
        description=(
            "Maximum time by which the best sticky replica may be slower than the best of the other replicas, "
            "milliseconds; 0: any time."
        ),
    )
    ttft_source: Literal["prefillThroughput", "latencyPredictor"] = Field(
        "prefillThroughput", description="Source of times to first token: tokens in flight, or predictions."
    )
    peak_prefill_throughput: float = Field(15_928.0, ge=0, description="Prompt tokens per second of a replica.")
    latency_prediction_info_producer_name: str = Field(LATENCIES, description="Producer that predicts latencies.")
    in_flight_load_producer_name: str = Field(IN_FLIGHT, description="Producer that counts what is in flight.")

    @model_validator(mode="after")
    def _has_throughput(self) -> PrefixAffinityFilterConfig:
        needs = self.ttft_source == "prefillThroughput" and self.max_ttft_penalty_ms > 0
        if needs and not self.peak_prefill_throughput:
            raise ValueError("peak_prefill_throughput must be above 0 with ttft_source prefillThroughput")
        return self


class PrefixAffinityFilter:
    """Keeps the sticky replicas: those that cache at least the fraction `affinity_threshold` of the prompt.

    Keeps all replicas in three cases: if no replica is sticky; if the predicted TTFT of the best sticky replica exceeds
    the TTFT of the best other replica by more than `max_ttft_penalty_ms`; and at random, with the probability
    `exploration_probability`.
    """

    def __init__(
        self,
        config: PrefixAffinityFilterConfig,
        matches: PrefixMatches,
        times: PredictsLatencies | InFlightLoads | None,
        stream: RandomStream,
    ) -> None:
        self._config = config
        self._matches = matches
        self._times = times
        self._stream = stream

    def keeps(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Sequence[ReplicaLoadView]:
        """Return the sticky replicas or all replicas, by the rule in the class docstring."""
        config = self._config
        if len(replicas) <= 1 or not config.affinity_threshold:
            return replicas
        if config.exploration_probability and self._stream.random() < config.exploration_probability:
            return replicas
        is_sticky = (match_fractions(self._matches, request, replicas) >= config.affinity_threshold).tolist()
        sticky = [one for one, sticks in zip(replicas, is_sticky, strict=True) if sticks]
        if not sticky:
            return replicas
        others = [one for one, sticks in zip(replicas, is_sticky, strict=True) if not sticks]
        if config.max_ttft_penalty_ms and others:
            penalty_ms = self._best_ms(request, sticky, now) - self._best_ms(request, others, now)
            if penalty_ms > config.max_ttft_penalty_ms:
                return replicas
        return sticky

    def _best_ms(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> float:
        if isinstance(self._times, PredictsLatencies):
            predicted = [one for one in self._times.latencies(request, replicas, now) if one is not None]
            return min((1000.0 * one.ttft_s for one in predicted), default=math.inf)
        assert self._times is not None
        return 1000.0 * min(self._times.num_tokens(replicas)) / self._config.peak_prefill_throughput


def _build(config: PrefixAffinityFilterConfig, context: RoutingContext) -> PrefixAffinityFilter:
    times: PredictsLatencies | InFlightLoads | None = None
    if config.max_ttft_penalty_ms:
        if config.ttft_source == "latencyPredictor":
            times = predictions_of(context, config.latency_prediction_info_producer_name)
        else:
            times = loads_of(context, config.in_flight_load_producer_name)
    matches = matches_of(context, config.prefix_match_info_producer_name)
    stream = context.policy.random_stream("prefix-cache-affinity-filter")
    return PrefixAffinityFilter(config, matches, times, stream)


SPECS = (
    RoutingPartSpec(
        name="prefix-cache-affinity-filter",
        kind=RoutingPartKind.FILTER,
        config=PrefixAffinityFilterConfig,
        build=_build,
        summary="Replicas that have most of the prompt cached, unless waiting for them takes too long.",
        source="llm-d prefix-cache-affinity-filter",
    ),
)
