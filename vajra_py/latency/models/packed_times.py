"""Compact encoding of step times: the start and first duration of each run of steps, and changes of the duration.

A run of steps is a series of steps without pauses. Durations of decode steps grow almost linearly, so their second
differences are tiny and compress well. All arithmetic is on integers modulo 2**64, so decoding is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]

RECORD_COLUMNS = ("step_index", "num_steps", "gap", "duration", "drift", "bends", "duration_s")
"""Columns of a file of step records, besides `replica_id`: the index of a record's first step, the fields of
`PackedTimes`, and the duration of every step of the record in seconds, or NaN if durations follow from the ticks.
"""

EXACT = 2**53
"""Integers below this are exact as floats, so that a division rounds only once."""


class PackedTimes(Struct, frozen=True):
    """Times of runs of steps, in ticks; one value per run except in `bends`."""

    gap: Ints
    """Time from the end of the previous run in this list (of any replica) until this run's first step is formed; for
    the first run, the time since tick 0."""
    num_steps: Ints
    """Number of steps of each run, at least 1."""
    duration: Ints
    """Duration of the run's first step."""
    drift: Ints
    """Duration of the second step minus that of the first; 0 for a run of one step."""
    bends: Ints
    """Second differences of the durations, from the third step of each run on; all runs concatenated."""

    @classmethod
    def pack(cls, formed: Ints, num_steps: Ints, ends: Ints) -> PackedTimes:
        """Pack runs of steps.

        `formed` has the tick at which the first step of each run was formed, `ends` the ticks at which all steps ended,
        run by run.
        """
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
        """Return the ticks at which steps were formed and those at which they ended, all runs concatenated."""
        num_steps = self.num_steps
        stops = np.cumsum(num_steps)
        starts = stops - num_steps
        steps = np.zeros(int(num_steps.sum()), dtype=np.int64)
        steps[_are_bent(len(steps), num_steps, starts)] = self.bends
        has_two = num_steps > 1
        steps[starts[has_two] + 1] = self.drift[has_two]
        steps = _sums(steps, starts, num_steps)  # sums of second differences: first differences
        steps[starts] = self.duration
        steps = _sums(steps, starts, num_steps)  # sums of first differences: durations
        ends = np.cumsum(steps)
        ends += np.repeat(np.cumsum(self.gap), num_steps)
        return ends - steps, ends


def _are_bent(num_all: int, num_steps: Ints, starts: Ints) -> NDArray[np.bool_]:
    """Return a mask of the steps that are the third of their run or later."""
    bent = np.ones(num_all, dtype=np.bool_)
    bent[starts] = False
    bent[starts[num_steps > 1] + 1] = False
    return bent


def _positions(num_steps: Ints, starts: Ints) -> Ints:
    """Return each step's index in its run, from 0."""
    return np.arange(int(num_steps.sum()), dtype=np.int64) - np.repeat(starts, num_steps)


def _sums(values: Ints, starts: Ints, counts: Ints) -> Ints:
    """Return running sums that restart at each run."""
    if not values.size:
        return values
    sums = np.cumsum(values)
    sums -= np.repeat(sums[starts] - values[starts], counts)
    return sums


def seconds_of(ticks: Ints, ticks_per_second: int) -> NDArray[np.float64]:
    """Return times in seconds, rounded correctly, like the division of Python integers."""
    if not ticks.size or max(-ticks.min(), ticks.max()) < EXACT:
        return ticks / float(ticks_per_second)
    return np.array([tick / ticks_per_second for tick in ticks.tolist()], dtype=np.float64)


def steps_of_records(columns: Mapping[str, Any], ticks_per_second: int) -> tuple[Ints, NDArray[np.float64]]:
    """Return (index, duration in seconds) of every step in a file of step records, given its columns."""
    num_steps = columns["num_steps"].astype(np.int64)
    times = PackedTimes(columns["gap"], num_steps, columns["duration"], columns["drift"], columns["bends"])
    formed_at, ended_at = (seconds_of(ticks, ticks_per_second) for ticks in times.unpack())
    starts = np.cumsum(num_steps) - num_steps
    given_s = np.repeat(columns["duration_s"], num_steps)
    duration_s = np.where(np.isnan(given_s), ended_at - formed_at, given_s)
    return np.repeat(columns["step_index"], num_steps) + _positions(num_steps, starts), duration_s
