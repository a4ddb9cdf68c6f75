"""A scheduling profile (filters, weighted scorers and a picker), and the construction of a router's parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vajra_policies.routers.figures import Candidates, Floats, candidates, position_of
from vajra_py.contract import (
    LeavesOutPools,
    PolicyContext,
    ProducerChoice,
    ReplicaFilter,
    ReplicaId,
    ReplicaLoadView,
    ReplicaPicker,
    ReplicaScorer,
    RequestView,
    RoutingContext,
    RoutingPartChoice,
    Scores,
)

LISTENING = (
    *("on_arrivals", "on_admission", "on_preemption", "on_moved", "on_step_end", "on_departures", "on_program_end"),
    *("on_wake", "on_blocks_stored", "on_blocks_removed", "on_cache_cleared"),
    *("on_tier_blocks_stored", "on_tier_blocks_removed", "on_tier_cleared"),
)
"""Callbacks that the router forwards to its parts. `on_step_run` is left out: for a policy without `on_step_run`, the
backend reports every single step by `on_step_end`.
"""


class Parts:
    """Builds the parts of one router; each producer is built once, on first use."""

    def __init__(self, producers: Sequence[ProducerChoice], context: PolicyContext) -> None:
        self._choices = {one.name: one for one in producers}
        if len(self._choices) < len(producers):
            names = [one.name for one in producers]
            raise ValueError(f"the same producer is given twice ({', '.join(names)})")
        self._context = context
        self._producers: dict[str, Any] = {}
        self.built: list[Any] = []
        """All parts built so far, each after the parts that it reads."""

    def build(self, choice: RoutingPartChoice) -> Any:
        """Build one part."""
        part = self._context.build_part(choice, RoutingContext(self._context, self.producer))
        self.built.append(part)
        return part

    def producer(self, name: str) -> Any:
        """Return the producer of this name."""
        if name not in self._producers:
            choice = self._choices.get(name) or ProducerChoice(producer=name)
            self._producers[name] = self.build(choice)
        return self._producers[name]

    def listeners(self) -> Mapping[str, Callable[..., None]]:
        """Return for each callback name a function that calls the callback of this name in every part that has it."""
        found = {name: [getattr(part, name) for part in self.built if hasattr(part, name)] for name in LISTENING}
        return {name: _notify_all(methods) for name, methods in found.items() if methods}

    def learners(self) -> list[Callable[..., None]]:
        """Return the callbacks `on_placement` of the parts. A part's callback comes before the callbacks of the
        producers that the part reads.
        """
        return [part.on_placement for part in reversed(self.built) if hasattr(part, "on_placement")]


def _notify_all(methods: Sequence[Callable[..., None]]) -> Callable[..., None]:
    if len(methods) == 1:
        return methods[0]

    def notify(*facts: Any) -> None:
        for method in methods:
            method(*facts)

    return notify


@dataclass(frozen=True, slots=True)
class WeightedScorer:
    """A scorer with its name and weight."""

    name: str
    scorer: ReplicaScorer
    weight: float


class Profile:
    """Chooses a replica with filters, the weighted sum of clamped scores, and a picker."""

    def __init__(
        self, filters: Sequence[ReplicaFilter], scorers: Sequence[WeightedScorer], picker: ReplicaPicker
    ) -> None:
        self._filters = filters
        self._scorers = scorers
        self._picker = picker

    def choose(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the replica chosen by the picker; None if the filters leave none."""
        left = self.filtered(request, replicas, now)
        if not left:
            return None
        total = self.totals(request, left, now)
        chosen = self._picker.pick(request, left, total, now)  # type: ignore[arg-type]  # an array is a sequence of numbers
        if position_of(chosen, left) < 0:
            raise ValueError(f"the picker chose replica {chosen!r}; candidates: {[one.replica_id for one in left]}")
        return chosen

    def may_take(self, pool: str, role: str) -> bool:
        """Return False if the filters always reject replicas of this pool and role."""
        return all(one.may_take(pool, role) for one in self._filters if isinstance(one, LeavesOutPools))

    def filtered(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> Candidates:
        """Return the replicas that the filters leave."""
        left = candidates(replicas)
        for one in self._filters:
            if not left:
                break
            left = candidates(one.keeps(request, left, now))
        return left

    def totals(self, request: RequestView, replicas: Candidates, now: float) -> Floats:
        """Return for each replica the sum of its scores, each clamped to 0 .. 1 and multiplied by the scorer's weight.

        Raises `ValueError` if a scorer returns NaN or a wrong number of scores.
        """
        total: Floats = np.zeros(len(replicas))
        for one in self._scorers:
            total += one.weight * _clamped(one, one.scorer.scores(request, replicas, now), len(replicas))
        return total


def _clamped(one: WeightedScorer, scores: Scores, num_replicas: int) -> Floats:
    if len(scores) != num_replicas:
        raise ValueError(f"scorer {one.name!r} returned {len(scores)} scores for {num_replicas} replicas")
    values: Floats = np.asarray(scores, dtype=np.float64)
    low, high = values.min(), values.max()  # both are NaN if any score is None or NaN
    if low >= 0.0 and high <= 1.0:
        return values
    if low != low:
        if any(score is not None and score != score for score in scores):
            raise ValueError(f"scorer {one.name!r} returned a score that is not a number")
        values = np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf)
    clamped: Floats = np.clip(values, 0.0, 1.0)
    return clamped
