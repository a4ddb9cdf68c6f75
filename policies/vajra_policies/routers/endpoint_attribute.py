"""Scorer and filter by any attribute of the replicas.

Source: llm-d-router, `scheduling/scorer/endpointattribute` and `scheduling/filter/endpointattribute`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from pydantic import Field, model_validator

from vajra_policies.routers import figures
from vajra_policies.routers.figures import Floats
from vajra_py.contract import (
    PolicyConfig,
    ReplicaLoadView,
    RequestView,
    RoutingContext,
    RoutingPartKind,
    RoutingPartSpec,
)

Attribute: TypeAlias = Literal[
    "num_running",
    "num_waiting",
    "num_pending_tokens",
    "num_context_tokens",
    "free_blocks",
    "num_blocks",
    "max_batch_size",
    "kv_cache_utilization",
]


class FixedRange(PolicyConfig):
    """Fixed range: its ends score 0 and 1, and values outside it are clamped."""

    min: float
    max: float

    @model_validator(mode="after")
    def _is_a_range(self) -> FixedRange:
        if self.min >= self.max:
            raise ValueError(f"min must be less than max (got {self.min} and {self.max})")
        return self


class AdaptiveRange(PolicyConfig):
    """Range from the smallest to the largest value of the candidates; if all values are equal, each scores 1."""


class Normalization(PolicyConfig):
    """Range by which values are normalised, fixed or adaptive; adaptive if neither is given."""

    fixed_range: FixedRange | None = None
    adaptive_range: AdaptiveRange | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Normalization:
        if self.fixed_range is not None and self.adaptive_range is not None:
            raise ValueError("sets both fixed_range and adaptive_range; at most one is allowed")
        return self


class ScoreAlgorithm(PolicyConfig):
    """Direction of the score (low or high values are good), and the range by which values are normalised."""

    type: Literal["linear_lower_is_better", "linear_higher_is_better"]
    normalization: Normalization = Normalization()


class AttributeScorerConfig(PolicyConfig):
    """Parameters of `endpoint-attribute-scorer`."""

    attribute_key: Attribute = Field(description="Attribute of the replicas.")
    algorithm: ScoreAlgorithm = Field(description="Direction of good values, low or high, and their range.")


class EndpointAttributeScorer:
    """Scores replicas by one attribute, linearly."""

    def __init__(self, config: AttributeScorerConfig) -> None:
        self._config = config

    def scores(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Floats:
        """Return scores: 1 at the good end of the attribute's range, 0 at the bad end, linear between them."""
        values = figures.figure(replicas, self._config.attribute_key)
        is_lower_better = self._config.algorithm.type == "linear_lower_is_better"
        fixed = self._config.algorithm.normalization.fixed_range
        if fixed is None:
            return figures.min_max(values, lower_is_better=is_lower_better)
        part = np.clip((values - fixed.min) / (fixed.max - fixed.min), 0.0, 1.0)
        score: Floats = 1.0 - part if is_lower_better else part
        return score


_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "LessThan": operator.lt,
    "LessThanOrEqual": operator.le,
    "GreaterThan": operator.gt,
    "GreaterThanOrEqual": operator.ge,
    "Equal": operator.eq,
    "NotEqual": operator.ne,
}


class Threshold(PolicyConfig):
    """Comparison of an attribute with a value."""

    operator: Literal["LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "Equal", "NotEqual"]
    value: float


class FilterAlgorithm(PolicyConfig):
    """Condition that a replica must fulfil to be kept."""

    type: Literal["threshold"] = "threshold"
    threshold: Threshold


class AttributeFilterConfig(PolicyConfig):
    """Parameters of `endpoint-attribute-filter`."""

    attribute: Attribute = Field(description="Attribute of the replicas.")
    algorithm: FilterAlgorithm = Field(description="Condition on which a replica is kept.")
    fallback_on_empty: bool = Field(False, description="Keep all replicas where none fulfils the condition.")


class EndpointAttributeFilter:
    """Keeps replicas that fulfil a condition on one attribute."""

    def __init__(self, config: AttributeFilterConfig) -> None:
        self._config = config

    def keeps(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Sequence[ReplicaLoadView]:
        """Keep the replicas that fulfil the condition."""
        threshold = self._config.algorithm.threshold
        holds = _OPERATORS[threshold.operator](figures.figure(replicas, self._config.attribute), threshold.value)
        return figures.fitting(replicas, holds, fallback=self._config.fallback_on_empty)


def _scorer(config: AttributeScorerConfig, context: RoutingContext) -> EndpointAttributeScorer:
    return EndpointAttributeScorer(config)


def _filter(config: AttributeFilterConfig, context: RoutingContext) -> EndpointAttributeFilter:
    return EndpointAttributeFilter(config)


SPECS = (
    RoutingPartSpec(
        name="endpoint-attribute-scorer",
        kind=RoutingPartKind.SCORER,
        config=AttributeScorerConfig,
        build=_scorer,
        summary="Any figure of the replicas, scaled linearly over a fixed range or over that of the candidates.",
        source="llm-d endpoint-attribute-scorer",
    ),
    RoutingPartSpec(
        name="endpoint-attribute-filter",
        kind=RoutingPartKind.FILTER,
        config=AttributeFilterConfig,
        build=_filter,
        summary="Replicas with a figure that fulfils a condition.",
        source="llm-d endpoint-attribute-filter",
    ),
)
