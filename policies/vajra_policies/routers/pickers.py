"""Pickers: the best score, a random candidate, or a random one weighted by score.

Source: llm-d-router, `scheduling/picker`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from vajra_policies.routers.figures import Floats
from vajra_py.contract import (
    PolicyConfig,
    RandomStream,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
    RoutingContext,
    RoutingPartKind,
    RoutingPartSpec,
)


class PickerConfig(PolicyConfig):
    """Parameters of the pickers."""

    max_num_of_endpoints: int = Field(1, ge=1, description="Replicas to pick; only the first one is used here.")


class MaxScorePicker:
    """Picks the candidate with the highest score; ties are broken uniformly at random."""

    def __init__(self, stream: RandomStream) -> None:
        self._stream = stream

    def pick(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], scores: Sequence[float], now: float
    ) -> ReplicaId:
        """Return the best candidate; the random stream is used only for ties."""
        values: Floats = np.asarray(scores, dtype=np.float64)
        best = np.flatnonzero(values == values.max())
        chosen = best[0] if len(best) == 1 else best[int(self._stream.integers(0, len(best)))]
        return replicas[int(chosen)].replica_id


class RandomPicker:
    """Picks any candidate with equal probability."""

    def __init__(self, stream: RandomStream) -> None:
        self._stream = stream

    def pick(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], scores: Sequence[float], now: float
    ) -> ReplicaId:
        """Return a random candidate; the scores are not read."""
        return replicas[int(self._stream.integers(0, len(replicas)))].replica_id


class WeightedRandomPicker:
    """Picks each candidate with a probability proportional to its score; any with equal probability if no score is
    above 0.

    Source: weighted random sampling, in llm-d by the largest U^(1/score) (Efraimidis and Spirakis 2006), which has the
    same probabilities.
    """

    def __init__(self, stream: RandomStream) -> None:
        self._stream = stream
        self._any = RandomPicker(stream)

    def pick(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], scores: Sequence[float], now: float
    ) -> ReplicaId:
        """Return a candidate, with a single draw from the random stream."""
        sums = np.cumsum(np.maximum(np.asarray(scores, dtype=np.float64), 0.0))
        if not sums[-1] > 0:
            return self._any.pick(request, replicas, scores, now)
        drawn = np.searchsorted(sums, self._stream.random() * sums[-1], side="right")
        return replicas[min(int(drawn), len(replicas) - 1)].replica_id


def _max_score(config: PickerConfig, context: RoutingContext) -> MaxScorePicker:
    return MaxScorePicker(context.policy.random_stream("max-score-picker"))


def _random(config: PickerConfig, context: RoutingContext) -> RandomPicker:
    return RandomPicker(context.policy.random_stream("random-picker"))


def _weighted_random(config: PickerConfig, context: RoutingContext) -> WeightedRandomPicker:
    return WeightedRandomPicker(context.policy.random_stream("weighted-random-picker"))


SPECS = (
    RoutingPartSpec(
        name="max-score-picker",
        kind=RoutingPartKind.PICKER,
        config=PickerConfig,
        build=_max_score,
        summary="The highest score, ties uniformly at random.",
        source="llm-d max-score-picker",
    ),
    RoutingPartSpec(
        name="random-picker",
        kind=RoutingPartKind.PICKER,
        config=PickerConfig,
        build=_random,
        summary="Any candidate, with equal probability.",
        source="llm-d random-picker",
    ),
    RoutingPartSpec(
        name="weighted-random-picker",
        kind=RoutingPartKind.PICKER,
        config=PickerConfig,
        build=_weighted_random,
        summary="Any candidate, with a probability proportional to its score.",
        source="llm-d weighted-random-picker",
    ),
)
