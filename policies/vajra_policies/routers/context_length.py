"""Context-length awareness, as a scorer and as a filter: each range of prompt lengths has its own replicas.

Source: llm-d-router, `scheduling/scorer/contextlengthaware`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, model_validator

from vajra_py.contract import (
    PolicyConfig,
    ReplicaLoadView,
    RequestView,
    RoutingContext,
    RoutingPartKind,
    RoutingPartSpec,
)

_OUTSIDE = 0.3
"""Lower bound of scores for lengths within the range, and upper bound for lengths outside it."""
_NO_RANGE = 0.5


class LengthRange(PolicyConfig):
    """Range of prompt lengths for which some replicas are reserved."""

    min_tokens: int = Field(0, ge=0, description="Shortest prompt.")
    max_tokens: int = Field(ge=0, description="Longest prompt.")
    pools: list[str] = Field(
        default_factory=list, description=("Pools whose replicas take requests with lengths in this range.")
    )
    replicas: list[int] = Field(
        default_factory=list, description=("Ids of replicas that take requests with lengths in this range.")
    )

    @model_validator(mode="after")
    def _is_a_range(self) -> LengthRange:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens (got {self.min_tokens} and {self.max_tokens})")
        if not self.pools and not self.replicas:
            raise ValueError("names neither pools nor replicas")
        return self


class ContextLengthConfig(PolicyConfig):
    """Parameters of `context-length-aware`; the ranges replace llm-d's labels of endpoints."""

    ranges: list[LengthRange] = Field(
        default_factory=list,
        description=("Ranges of lengths with their replicas; for each replica, the first range that names it counts."),
    )
    enable_filtering: bool = Field(False, description="Keep only replicas whose range fits.")


class ContextLengthAware:
    """Scores or filters replicas by range of prompt lengths; replicas without a range score 0.5 and are always kept."""

    def __init__(self, config: ContextLengthConfig) -> None:
        self._config = config

    def scores(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> list[float]:
        """Return scores: at least 0.3 if the prompt is within the replica's range (more for narrower ranges, and for
        prompts further below the upper end), at most 0.3 otherwise.
        """
        length = request.num_prompt_tokens
        ranges = [self._range_of(one) for one in replicas]
        return [_NO_RANGE if own is None else range_score(length, own.min_tokens, own.max_tokens) for own in ranges]

    def keeps(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Sequence[ReplicaLoadView]:
        """Keep the replicas whose range fits and those without a range, if `enable_filtering` is set; otherwise keep
        all.
        """
        if not self._config.enable_filtering:
            return replicas
        length = request.num_prompt_tokens
        ranges = [(one, self._range_of(one)) for one in replicas]
        return [one for one, own in ranges if own is None or own.min_tokens <= length <= own.max_tokens]

    def _range_of(self, replica: ReplicaLoadView) -> LengthRange | None:
        for one in self._config.ranges:
            if replica.replica_id in one.replicas or replica.pool in one.pools:
                return one
        return None


def range_score(length: int, lowest: int, highest: int) -> float:
    """Return the score of a prompt of `length` tokens on a replica for prompts of `lowest` to `highest` tokens."""
    if lowest <= length <= highest:
        width = highest - lowest
        if not width:
            return 1.0
        raw = 0.7 * (1.0 / (1.0 + width / 10_000.0)) + 0.3 * ((highest - length) / width)
        return _OUTSIDE + raw * (1.0 - _OUTSIDE)
    distance = length - highest if length > highest else lowest - length
    return _OUTSIDE / (1.0 + distance / 1000.0)


def _build(config: ContextLengthConfig, context: RoutingContext) -> ContextLengthAware:
    return ContextLengthAware(config)


SPECS = tuple(
    RoutingPartSpec(
        name="context-length-aware",
        kind=kind,
        config=ContextLengthConfig,
        build=_build,
        summary=summary,
        source="llm-d context-length-aware",
    )
    for kind, summary in (
        (RoutingPartKind.SCORER, "Replicas for prompts of about this length; the tighter their range, the better."),
        (RoutingPartKind.FILTER, "With enable_filtering, only replicas whose range of prompt lengths fits."),
    )
)
