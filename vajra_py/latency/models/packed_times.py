"""Run-length encoding of step times: a run of steps is its beginning, its first duration, and how durations change.

Steps of a decode run take nearly linearly longer, so second differences of their ends are tiny and compress to almost nothing.
All arithmetic is on integers, modulo 2**64, so what comes out is what went in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]

RECORD_COLUMNS = ("step_index", "num_steps", "gap", "duration", "drift", "bends", "duration_s")
"""Columns of a file of step records with the times at which steps were formed and ended; `duration_s` is NaN where it follows from the ticks."""

_EXACT = 2**53
"""Whole numbers below this are exact as floats, so that dividing them rounds once."""


@dataclass(frozen=True, slots=True)
class PackedTimes:
    """Runs of steps; the steps of a run follow one another without a pause. Ticks; one value a run, but for `bends`."""

    gap: Ints
    """Time from the end of the previous run in this list (of any replica) to the forming of its first step; for the first run, from 0."""
    num_steps: Ints
    """Number of steps of each, at least 1."""
    duration: Ints
    """Duration of the first step."""
    drift: Ints
    """Duration of the second step less that of the first; 0 where there is none."""
    bends: Ints
    """Change of the drift from step to step, from the third step of each run on, all runs after one another."""

    @classmethod
    def pack(cls, formed: Ints, num_steps: Ints, ends: Ints) -> PackedTimes:
        """Pack runs: `formed` has the tick at which the first step of each was formed, `ends` those at which its steps ended, run by run."""
        stops = np.cumsum(num_steps)
        starts = stops - num_steps
        before = np.empty_like(ends)
        before[1:] = ends[:-1]
        before[starts] = formed
        durations = ends - before
        drifts = np.diff(durations, prepend=0)
        bends = np.diff(drifts, prepend=0)
        has_two = num_steps > 1
        drift, gap = np.zeros_like(formed), formed.copy()
        drift[has_two] = drifts[starts[has_two] + 1]
        gap[1:] -= ends[stops[:-1] - 1]
        return cls(gap, num_steps, durations[starts], drift, bends[_are_bent(len(ends), num_steps, starts)])

    def unpack(self) -> tuple[Ints, Ints]:
        """(ticks at which steps were formed, ticks at which they ended), those of all runs after one another."""
        num_steps = self.num_steps
        stops = np.cumsum(num_steps)
        starts = stops - num_steps
        steps = np.zeros(int(num_steps.sum()), dtype=np.int64)
        steps[_are_bent(len(steps), num_steps, starts)] = self.bends
        has_two = num_steps > 1
        steps[starts[has_two] + 1] = self.drift[has_two]
        steps = _sums(steps, starts, num_steps)  # drifts
        steps[starts] = self.duration
        steps = _sums(steps, starts, num_steps)  # durations
        ends = np.cumsum(steps)
        ends += np.repeat(np.cumsum(self.gap), num_steps)
        return ends - steps, ends


def _are_bent(num_all: int, num_steps: Ints, starts: Ints) -> NDArray[np.bool_]:
    """Mask of the steps that are the third of their run or a later one."""
    bent = np.ones(num_all, dtype=np.bool_)
    bent[starts] = False
    bent[starts[num_steps > 1] + 1] = False
    return bent


def _positions(num_steps: Ints, starts: Ints) -> Ints:
    """Each step's place in its run, from 0."""
    return np.arange(int(num_steps.sum()), dtype=np.int64) - np.repeat(starts, num_steps)


def _sums(values: Ints, starts: Ints, counts: Ints) -> Ints:
    """Running sums that begin anew at each run."""
    if not values.size:
        return values
    sums = np.cumsum(values)
    sums -= np.repeat(sums[starts] - values[starts], counts)
    return sums


def seconds_of(ticks: Ints, ticks_per_second: int) -> NDArray[np.float64]:
    """Times in seconds, correctly rounded, as dividing Python's integers is."""
    if not ticks.size or max(-ticks.min(), ticks.max()) < _EXACT:
        return ticks / float(ticks_per_second)
    return np.array([tick / ticks_per_second for tick in ticks.tolist()], dtype=np.float64)


def steps_of_records(columns: Mapping[str, Any], ticks_per_second: int) -> tuple[Ints, NDArray[np.float64]]:
    """(index, duration in seconds) of every step of a file of step records, by its columns."""
    num_steps = columns["num_steps"].astype(np.int64)
    times = PackedTimes(columns["gap"], num_steps, columns["duration"], columns["drift"], columns["bends"])
    formed_at, ended_at = (seconds_of(ticks, ticks_per_second) for ticks in times.unpack())
    starts = np.cumsum(num_steps) - num_steps
    given_s = np.repeat(columns["duration_s"], num_steps)
    duration_s = np.where(np.isnan(given_s), ended_at - formed_at, given_s)
    return np.repeat(columns["step_index"], num_steps) + _positions(num_steps, starts), duration_s
