"""Scorers of load: queues, running requests, KV memory, and requests in flight.

Source: llm-d-router, `scheduling/scorer`: queuedepth, runningrequests, kvcacheutilization, activerequest, loadaware, tokenload.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from vajra_policies.routers import figures
from vajra_policies.routers.figures import Floats
from vajra_policies.routers.in_flight import IN_FLIGHT, loads_of
from vajra_py.contract import (
    InFlightLoads,
    PolicyConfig,
    ReplicaLoadView,
    RequestView,
    RoutingContext,
    RoutingPartKind,
    RoutingPartSpec,
)


class NoParameters(PolicyConfig):
    """Empty parameters, for routing parts that have no parameters."""


class QueueScorer:
    """Scores (max - waiting) / (max - min) over the candidates; 1 for all if they are equal."""

    def scores(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Floats:
        """Return 1 for the replica with the shortest queue, 0 for the one with the longest."""
        return figures.min_max(figures.waiting(replicas))


class RunningRequestsScorer:
    """Scores (max - running) / (max - min) over the candidates; 1 for all if they are equal."""

    def scores(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Floats:
        """Return 1 for the replica with the fewest running requests, 0 for the one with the most."""
        return figures.min_max(figures.running(replicas))


class KvCacheUtilizationScorer:
    """Scores 1 - the fraction of the KV blocks in use."""

    def scores(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Floats:
        """Return the free fraction of each replica's KV memory."""
        free: Floats = 1.0 - figures.kv_usage(replicas)
        return free


class LoadAwareConfig(PolicyConfig):
    """Parameters of `load-aware-scorer`."""

    threshold: int = Field(128, ge=1, description="Number of waiting requests from which the score is 0.")


class LoadAwareScorer:
    """Scores 0.5 * (1 - min(waiting, threshold) / threshold). The maximum is 0.5, so the weight counts only half."""

    def __init__(self, config: LoadAwareConfig) -> None:
        self._threshold = config.threshold

    def scores(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Floats:
        """Return scores: 0.5 if no request waits, 0 if at least `threshold` requests wait."""
        share: Floats = 0.5 * (1.0 - np.minimum(figures.waiting(replicas), self._threshold) / self._threshold)
        return share


class _OfProducer(PolicyConfig):
    in_flight_load_producer_name: str = Field(IN_FLIGHT, description="Producer that counts what is in flight.")


class ActiveRequestConfig(_OfProducer):
    """Parameters of `active-request-scorer`."""

    idle_threshold: int = Field(
        0, ge=0, description="Number of requests in flight up to which a replica counts as idle."
    )
    max_busy_score: float = Field(1.0, ge=0, le=1, description="Factor of the scores of replicas that are not idle.")


class ActiveRequestScorer:
    """Scores 1 for an idle replica, (max - n) / max * `max_busy_score` for any other replica.

    n is the number of requests in flight at the replica. max is the largest n of all candidates.
    """

    def __init__(self, config: ActiveRequestConfig, load: InFlightLoads) -> None:
        self._config = config
        self._load = load

    def scores(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Floats:
        """Return scores by the number of requests that this router has sent to each replica and that have not ended."""
        counts = np.asarray(self._load.num_requests(replicas), dtype=np.float64)
        most = max(float(counts.max(initial=0.0)), 1.0)
        busy = (most - counts) / most * self._config.max_busy_score
        score: Floats = np.where(counts <= self._config.idle_threshold, 1.0, busy)
        return score


class TokenLoadConfig(_OfProducer):
    """Parameters of `token-load-scorer`."""

    queue_threshold_tokens: int = Field(
        4_194_304,
        ge=1,
        description="Number of tokens in flight from which the score is 0 (128 requests of 32 Ki tokens).",
    )


class TokenLoadScorer:
    """Scores 1 - min(n, threshold) / threshold; n is the number of tokens in flight at the replica, with this request
    included.
    """

    def __init__(self, config: TokenLoadConfig, load: InFlightLoads) -> None:
        self._threshold = config.queue_threshold_tokens
        self._load = load

    def scores(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Floats:
        """Return scores by the tokens in flight at each replica plus those that this request would add there."""
        in_flight = np.asarray(self._load.num_tokens(replicas), dtype=np.float64)
        tokens = in_flight + np.asarray(self._load.request_tokens(request, replicas), dtype=np.float64)
        score: Floats = 1.0 - np.clip(tokens, 0.0, self._threshold) / self._threshold
        return score


def _queue(config: NoParameters, context: RoutingContext) -> QueueScorer:
    return QueueScorer()


def _running(config: NoParameters, context: RoutingContext) -> RunningRequestsScorer:
    return RunningRequestsScorer()


def _kv_cache(config: NoParameters, context: RoutingContext) -> KvCacheUtilizationScorer:
    return KvCacheUtilizationScorer()


def _load_aware(config: LoadAwareConfig, context: RoutingContext) -> LoadAwareScorer:
    return LoadAwareScorer(config)


def _active(config: ActiveRequestConfig, context: RoutingContext) -> ActiveRequestScorer:
    return ActiveRequestScorer(config, loads_of(context, config.in_flight_load_producer_name))


def _token_load(config: TokenLoadConfig, context: RoutingContext) -> TokenLoadScorer:
    return TokenLoadScorer(config, loads_of(context, config.in_flight_load_producer_name))


SPECS = (
    RoutingPartSpec(
        name="queue-scorer",
        kind=RoutingPartKind.SCORER,
        config=NoParameters,
        build=_queue,
        summary="The shorter the queue relative to the other candidates', the better.",
        source="llm-d queue-scorer",
    ),
    RoutingPartSpec(
        name="running-requests-size-scorer",
        kind=RoutingPartKind.SCORER,
        config=NoParameters,
        build=_running,
        summary="The fewer running requests relative to the other candidates', the better.",
        source="llm-d running-requests-size-scorer",
    ),
    RoutingPartSpec(
        name="kv-cache-utilization-scorer",
        kind=RoutingPartKind.SCORER,
        config=NoParameters,
        build=_kv_cache,
        summary="The free part of the KV memory.",
        source="llm-d kv-cache-utilization-scorer",
    ),
    RoutingPartSpec(
        name="load-aware-scorer",
        kind=RoutingPartKind.SCORER,
        config=LoadAwareConfig,
        build=_load_aware,
        summary="The shorter the queue, up to a threshold, the better; at most 0.5.",
        source="llm-d load-aware-scorer",
    ),
    RoutingPartSpec(
        name="active-request-scorer",
        kind=RoutingPartKind.SCORER,
        config=ActiveRequestConfig,
        build=_active,
        summary="The fewer requests of this router in flight, the better.",
        source="llm-d active-request-scorer",
    ),
    RoutingPartSpec(
        name="token-load-scorer",
        kind=RoutingPartKind.SCORER,
        config=TokenLoadConfig,
        build=_token_load,
        summary="The fewer uncached prompt tokens in flight, this request's included, the better.",
        source="llm-d token-load-scorer",
    ),
)
