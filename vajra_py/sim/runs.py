"""How long do steps take that are known in advance? Ticks at which each step of a run of decodes ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from vajra_py.contract import BatchShape, LatencyModel
from vajra_py.latency import PredictsDecodeRuns
from vajra_py.runtime.clock import TICKS_PER_SECOND

Ticks = npt.NDArray[np.int64]

MAX_STEPS = 4096
"""Steps that are worked out at once; a longer run goes on in another."""


@runtime_checkable
class TimesRuns(Protocol):
    """A step timer that knows the durations of several steps in advance."""

    def run_ticks(self, num_decodes: int, first_context_tokens: int, num_steps: int) -> Ticks:
        """Ticks of each step, equal to `stage_ticks` asked step by step."""


def decode_run_times_s(latency: LatencyModel) -> Callable[[int, int, int], npt.NDArray[np.float64]]:
    """How this model's decode runs are predicted: (decodes, their context tokens at first, steps) to seconds of each step."""
    if isinstance(latency, PredictsDecodeRuns):
        return latency.decode_run_times_s

    def one_by_one(num_decodes: int, first_context_tokens: int, num_steps: int) -> npt.NDArray[np.float64]:
        contexts = range(first_context_tokens, first_context_tokens + num_steps * num_decodes, num_decodes)
        return np.array([latency.stage_time_s(BatchShape(num_decodes, context)) for context in contexts])

    return one_by_one


def run_ticks_of(seconds: npt.NDArray[np.float64], overhead_ticks: int) -> Ticks:
    """Ticks of steps predicted to last so long, with a fixed overhead each; at least one tick."""
    ticks: Ticks = np.rint(seconds * TICKS_PER_SECOND).astype(np.int64)
    if overhead_ticks:
        ticks += overhead_ticks
    return np.maximum(ticks, 1)
