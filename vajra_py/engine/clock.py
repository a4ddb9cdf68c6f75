"""Wall clock of an engine run, and waiting for the next event.

Time is read once for everything that is handled together, so that decisions depend on recorded ticks alone. Ticks are
whole nanoseconds (written in picoseconds, as everywhere): a time in seconds that was read back from a file gives the same
tick for weeks.
"""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from vajra_py.runtime.support.clock import NEVER, TICKS_PER_SECOND, to_seconds

T = TypeVar("T")
TICKS_PER_NANOSECOND = TICKS_PER_SECOND // 10**9


class EngineClock(Protocol):
    """Time as the loop sees it."""

    def now(self) -> int:
        """The tick of now; a multiple of a nanosecond, never below an earlier answer."""

    def wait(self, inbox: SimpleQueue[T], until: int) -> T | None:
        """The next message; None when none has come by tick `until` (`NEVER`: wait for ever)."""


class WallClock:
    """Time since it was made, from the machine's monotonic clock."""

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
        """Return the wall-clock seconds until `ticks` ticks have passed."""
        return to_seconds(ticks)
