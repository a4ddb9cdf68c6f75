"""Wall clock of an engine run, and waiting for the next event.

Time is read once per turn of the loop, so that decisions depend on recorded ticks only. A tick is a picosecond, as in
the whole package, but the clock returns multiples of a nanosecond. So during the first weeks of a run, a tick can be
written to a file as a number of seconds, and reading that number gives the same tick.
"""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from vajra_py.runtime.support.clock import NEVER, TICKS_PER_SECOND, to_seconds

T = TypeVar("T")
TICKS_PER_NANOSECOND = TICKS_PER_SECOND // 10**9


class EngineClock(Protocol):
    """Clock of the engine's loop."""

    def now(self) -> int:
        """Return the current tick: a multiple of a nanosecond, never smaller than an earlier result."""

    def wait(self, inbox: SimpleQueue[T], until: int) -> T | None:
        """Return the next message; None if no message arrives by tick `until` (`NEVER`: wait without limit)."""


class WallClock:
    """Time since the clock was created, from the machine's monotonic clock."""

    def __init__(self) -> None:
        self._start = time.perf_counter_ns()

    def now(self) -> int:
        """See `EngineClock`."""
        return (time.perf_counter_ns() - self._start) * TICKS_PER_NANOSECOND

    def wait(self, inbox: SimpleQueue[T], until: int) -> T | None:
        """See `EngineClock`."""
        try:
            if until >= NEVER:
                return inbox.get()
            left = self._wall_s(until - self.now())
            return inbox.get(timeout=left) if left > 0 else inbox.get_nowait()
        except Empty:
            return None

    def _wall_s(self, ticks: int) -> float:
        """Return the wall-clock seconds that `ticks` ticks take."""
        return to_seconds(ticks)
