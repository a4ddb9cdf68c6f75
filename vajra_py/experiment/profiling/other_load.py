"""Share of the machine that other processes used during a measurement.

Not part of `profile`, since benchmarks, which profile nothing, read it too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)
"""User, nice, system, interrupts and stolen time: of `/proc/stat`'s first line."""


class OtherLoad:
    """Counts what other processes use, from when it is made."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._others_s = _others_s()

    def cores(self) -> float | None:
        """Cores that other processes used on average; None where the system does not show it."""
        now = _others_s()
        elapsed_s = time.perf_counter() - self._started
        if now is None or self._others_s is None or elapsed_s <= 0.0:
            return None
        return max(0.0, (now - self._others_s) / elapsed_s)


def _others_s() -> float | None:
    """Seconds of processor time that the machine has spent, less this process's own and its ended children's."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    except OSError:
        return None
    machine_s = sum(int(fields[index]) for index in _BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")
    return machine_s - sum(os.times()[:4])
