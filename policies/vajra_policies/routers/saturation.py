"""Filters by load, which keep replicas that are not too busy.

Source: llm-d-router, `scheduling/filter/utilization`, and the saturation detectors of `flowcontrol` used as filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

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


class Condition(PolicyConfig):
    """Upper bound of one load metric of a replica."""

    metric: Literal["active-requests", "running-requests", "waiting-queue", "kv-cache-utilization"]
    max_value: float = Field(ge=0)

    @model_validator(mode="after")
    def _is_a_fraction(self) -> Condition:
        if self.metric == "kv-cache-utilization" and self.max_value > 1:
            raise ValueError(f"max_value of kv-cache-utilization is a fraction, at most 1 (got {self.max_value})")
        return self


class UtilizationConfig(PolicyConfig):
    """Parameters of `utilization-filter`."""

    conditions: list[Condition] = Field(min_length=1, description="Upper bounds; a replica must keep to all.")
    fallback_on_empty: bool = Field(False, description="Keep all replicas where none keeps to the bounds.")
    in_flight_load_producer_name: str = Field(IN_FLIGHT, description="Producer that counts what is in flight.")


class UtilizationFilter:
    """Keeps replicas whose load metrics are within all bounds."""

    def __init__(self, config: UtilizationConfig, load: InFlightLoads | None) -> None:
        self._config = config
        self._load = load

    def keeps(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Sequence[ReplicaLoadView]:
        """Keep the replicas within all bounds. If none is, keep all with `fallback_on_empty`, else none."""
        fits: NDArray[np.bool_] = np.ones(len(replicas), dtype=np.bool_)
        for condition in self._config.conditions:
            fits &= self._values(condition.metric, replicas) <= condition.max_value
        return figures.fitting(replicas, fits, fallback=self._config.fallback_on_empty)

    def _values(self, metric: str, replicas: Sequence[ReplicaLoadView]) -> Floats:
        if metric == "active-requests":
            assert self._load is not None
            return np.asarray(self._load.num_requests(replicas), dtype=np.float64)
        if metric == "running-requests":
            return figures.running(replicas)
        return figures.waiting(replicas) if metric == "waiting-queue" else figures.kv_usage(replicas)


class UtilizationDetectorConfig(PolicyConfig):
    """Parameters of `utilization-detector` as a filter."""

    queue_depth_threshold: int = Field(5, ge=1, description="Waiting requests of a saturated replica.")
    kv_cache_util_threshold: float = Field(
        0.8, gt=0, le=1, description="Used fraction of the KV memory of a saturated replica."
    )
    headroom: float = Field(0.0, ge=0, description="Fraction by which the thresholds may be exceeded.")


class UtilizationDetector:
    """Keeps replicas below both thresholds; keeps all replicas if none is below both."""

    def __init__(self, config: UtilizationDetectorConfig) -> None:
        self._most_waiting = config.queue_depth_threshold * (1.0 + config.headroom)
        self._most_usage = config.kv_cache_util_threshold * (1.0 + config.headroom)

    def keeps(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Sequence[ReplicaLoadView]:
        """Keep the replicas that are not saturated; keep all if every replica is saturated."""
        fits = (figures.waiting(replicas) < self._most_waiting) & (figures.kv_usage(replicas) < self._most_usage)
        return figures.fitting(replicas, fits, fallback=True)


class ConcurrencyDetectorConfig(PolicyConfig):
    """Parameters of `concurrency-detector` as a filter."""

    max_concurrency: int = Field(100, ge=1, description="Requests in flight at a replica.")
    max_token_concurrency: int = Field(1_000_000, ge=1, description="Tokens in flight at a replica.")
    headroom: float = Field(0.0, ge=0, description="Part by which the limits may be exceeded.")
    concurrency_mode: Literal["requests", "tokens", "hybrid"] = Field(
        "requests", description="Quantity that is limited."
    )
    in_flight_load_producer_name: str = Field(IN_FLIGHT, description="Producer that counts what is in flight.")


class ConcurrencyDetector:
    """Keeps replicas whose load in flight is below its limit; may keep none.

    By `concurrency_mode`, the load is the number of requests or of tokens. Mode `hybrid` checks both numbers.
    """

    def __init__(self, config: ConcurrencyDetectorConfig, load: InFlightLoads) -> None:
        self._config = config
        self._load = load

    def keeps(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Sequence[ReplicaLoadView]:
        """Keep the replicas below the limits."""
        config, room = self._config, 1.0 + self._config.headroom
        fits: NDArray[np.bool_] = np.ones(len(replicas), dtype=np.bool_)
        if config.concurrency_mode != "tokens":
            fits &= np.asarray(self._load.num_requests(replicas)) < int(config.max_concurrency * room)
        if config.concurrency_mode != "requests":
            fits &= np.asarray(self._load.num_tokens(replicas)) < int(config.max_token_concurrency * room)
        return figures.fitting(replicas, fits, fallback=False)


def _utilization(config: UtilizationConfig, context: RoutingContext) -> UtilizationFilter:
    needs = any(one.metric == "active-requests" for one in config.conditions)
    return UtilizationFilter(config, loads_of(context, config.in_flight_load_producer_name) if needs else None)


def _utilization_detector(config: UtilizationDetectorConfig, context: RoutingContext) -> UtilizationDetector:
    return UtilizationDetector(config)


def _concurrency_detector(config: ConcurrencyDetectorConfig, context: RoutingContext) -> ConcurrencyDetector:
    return ConcurrencyDetector(config, loads_of(context, config.in_flight_load_producer_name))


SPECS = (
    RoutingPartSpec(
        name="utilization-filter",
        kind=RoutingPartKind.FILTER,
        config=UtilizationConfig,
        build=_utilization,
        summary="Replicas within upper bounds of running requests, waiting requests and KV memory.",
        source="llm-d utilization-filter",
    ),
    RoutingPartSpec(
        name="utilization-detector",
        kind=RoutingPartKind.FILTER,
        config=UtilizationDetectorConfig,
        build=_utilization_detector,
        summary="Replicas whose queue and KV memory are not saturated; all replicas if every one is.",
        source="llm-d utilization-detector, as a filter",
    ),
    RoutingPartSpec(
        name="concurrency-detector",
        kind=RoutingPartKind.FILTER,
        config=ConcurrencyDetectorConfig,
        build=_concurrency_detector,
        summary="Replicas with fewer requests or tokens in flight than their limit.",
        source="llm-d concurrency-detector, as a filter",
    ),
)
