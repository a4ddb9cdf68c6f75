"""End times of a run of decode steps, computed in advance."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from vajra_py.contract import BatchFeatures
from vajra_py.contract.latency import LAST_S, LatencyModel
from vajra_py.errors import ExecutorError
from vajra_py.latency import PredictsDecodeRuns
from vajra_py.runtime.support.clock import NEVER, TICKS_PER_SECOND

FIRST_STEPS, MAX_STEPS = 32, 4096
"""Initial and largest value of `SimReplica.run_limit`, the maximum number of decode steps computed at once."""

StepTimes: TypeAlias = Sequence[float] | npt.NDArray[np.float64]


@runtime_checkable
class TimesRuns(Protocol):
    """Step timer that can compute the durations of several steps in advance."""

    def run_ends(self, now: int, num_decodes: int, first_context_tokens: int, num_steps: int) -> array[int]:
        """Return the end ticks of consecutive steps that begin at `now`, with the durations that `stage_ticks` would
        return.

        Steps that would end after the clock's last tick are left out.
        """


def decode_run_times_s(latency: LatencyModel) -> Callable[[int, int, int], StepTimes]:
    """Return a function that computes the durations of consecutive decode steps, in seconds.

    The function takes the number of decodes, the sum of their contexts (tokens) in the first step, and the number of
    steps.
    """
    if isinstance(latency, PredictsDecodeRuns):
        return latency.decode_run_times_s

    def one_by_one(num_decodes: int, first_context_tokens: int, num_steps: int) -> StepTimes:
        contexts = range(first_context_tokens, first_context_tokens + num_steps * num_decodes, num_decodes)
        return [latency.stage_time_s(BatchFeatures(num_decodes, context)) for context in contexts]

    return one_by_one


def check_step_time(seconds: float) -> None:
    """Raise `ExecutorError` if a step, or a run of steps, cannot last this number of seconds."""
    if not 0.0 <= seconds <= LAST_S:
        raise ExecutorError(f"latency model: a step cannot last {seconds} s. Allowed: 0 to {LAST_S:,.0f} s.")


def run_ends_of(now: int, seconds: StepTimes, overhead_ticks: int) -> array[int]:
    """Return the end ticks of consecutive steps that begin at `now`.

    `seconds` holds the steps' durations without the overhead, which is added to each. A step lasts at least one tick.
    """
    if isinstance(seconds, np.ndarray):
        shortest, longest = float(np.minimum.reduce(seconds)), float(np.maximum.reduce(seconds))
        check_step_time(shortest)
        check_step_time(longest)
        if now + len(seconds) * (longest * TICKS_PER_SECOND + overhead_ticks + 1) < NEVER:
            ticks: npt.NDArray[np.int64] = np.rint(seconds * TICKS_PER_SECOND).astype(np.int64)
            if overhead_ticks:
                ticks += overhead_ticks
            if shortest * TICKS_PER_SECOND + overhead_ticks < 1:
                np.maximum(ticks, 1, out=ticks)
            ticks[0] += now
            return array("q", ticks.cumsum().tobytes())
        seconds = seconds.tolist()
    shortest = min(seconds)
    check_step_time(shortest)
    check_step_time(sum(seconds))  # also rejects a NaN, which `min` may miss
    durations = [round(time * TICKS_PER_SECOND) + overhead_ticks for time in seconds]
    if shortest * TICKS_PER_SECOND + overhead_ticks < 1:
        durations = [max(1, duration) for duration in durations]
    return ends_of(now, durations)


def ends_of(now: int, durations: Sequence[int]) -> array[int]:
    """Return the end ticks of consecutive steps with these durations from `now`, up to the clock's last tick."""
    ends = list(accumulate(durations, initial=now))
    return array("q", ends[1:] if ends[-1] <= NEVER else ends[1 : bisect_right(ends, NEVER)])
