"""Attribute the durations of a simulated run's steps to the figures of a calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vajra_py.contract.latency import BatchFeatures
from vajra_py.latency import ProfileBundleModel
from vajra_py.metrics.runs.run_data import RunData

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ATTENTION = ("decode_attention", "prefill_attention")
_TOLERANCE_S = 1e-9
"""Tolerance for comparing times of steps, in seconds."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Number to fit: a scale factor, or a part of the host overhead.

    Its prior is a normal distribution (mean `prior`, standard deviation `width`) truncated at `low`.
    """

    name: str
    prior: float
    width: float
    low: float
    is_scale: bool


class StepCosts:
    """Steps of a simulation with these `values` of the fitted parameters (`figures`), and each parameter's contribution
    to the steps' durations.
    """

    def __init__(self, data: RunData, model: ProfileBundleModel, figures: Sequence[Figure], values: Floats) -> None:
        names = ("formed_at", "duration_s", "num_decodes", "decode_context_tokens", "num_prefills", "prefill_tokens")
        table = data.steps(*names)
        columns = {name: table.column(name).to_numpy() for name in names}
        self.num_replicas = len(set(data.steps("replica_id").column(0).to_pylist()))
        ends = columns["formed_at"] + columns["duration_s"]
        order = np.argsort(ends, kind="stable")
        counts = zip(*(columns[name][order].astype(int).tolist() for name in names[2:]), strict=True)
        known: dict[tuple[int, ...], list[float]] = {}
        costs = np.array([_unit_costs(model, features, figures, known) for features in counts]).reshape(
            -1, len(figures)
        )
        self._values = values
        self._ends = ends[order]
        self._sums = np.concatenate([np.zeros((1, len(figures))), np.cumsum(costs, axis=0)])

    def between(self, start: Floats, stop: Floats, which: Ints) -> tuple[Floats, Floats]:
        """Return (seconds per unit of each figure, remaining seconds) of the time between two step ends.

        There is one row for each index in `which`, which selects a pair of step ends from `start` and `stop`. The
        remaining seconds include idle time. With several replicas, seconds per unit are means over the replicas.
        """
        start, stop = start[which], stop[which]
        first, last = (np.searchsorted(self._ends, at + _TOLERANCE_S, side="right") for at in (start, stop))
        parts: Floats = (self._sums[last] - self._sums[first]) / self.num_replicas
        return parts, stop - start - parts @ self._values


def _unit_costs(
    model: ProfileBundleModel,
    counts: tuple[int, ...],
    figures: Sequence[Figure],
    known: dict[tuple[int, ...], list[float]],
) -> list[float]:
    """Return the seconds that one unit of each figure adds to a step.

    `counts` describes the step: numbers of decodes, of their context tokens, of prefill chunks, and of prefill tokens.
    """
    found = known.get(counts)
    if found is None:
        decodes, context, chunks, tokens = counts
        # Chunks are assumed equal and without earlier context. This affects only how a step's duration is divided
        # between attention and the rest.
        pairs = tokens * (tokens // max(1, chunks) + 1) // 2
        features = BatchFeatures(decodes, context, chunks, tokens, prefill_attention_pairs=pairs)
        parts = model.breakdown_s(features) if features.num_tokens else {}
        found = known[counts] = [_unit_cost(one.name, parts, features) for one in figures]
    return found


def _unit_cost(name: str, parts: Mapping[str, float], features: BatchFeatures) -> float:
    if name in ("decode_attention", "mixed_attention"):
        in_force = (name == "mixed_attention") == bool(features.prefill_tokens)
        return sum(parts.get(part, 0.0) for part in ATTENTION) if in_force else 0.0
    if name == "step_per_request_s":
        return float(features.num_requests)
    return 1.0 if name.endswith("_s") else parts.get(name, 0.0)
