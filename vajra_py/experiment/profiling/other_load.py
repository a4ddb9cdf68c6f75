"""Share of the machine that other processes used during a measurement.

It is separate from `profile` because benchmarks use it as well.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)
"""Positions of user, nice, system, interrupt and stolen time in the first line of `/proc/stat`."""


class OtherLoad:
    """Measures the processor time used by other processes since its creation."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._others_s = _others_s()

    def cores(self) -> float | None:
        """Return the mean number of cores used by other processes; None if the system does not provide it."""
        now = _others_s()
        elapsed_s = time.perf_counter() - self._started
        if now is None or self._others_s is None or elapsed_s <= 0.0:
            return None
        return max(0.0, (now - self._others_s) / elapsed_s)


def _others_s() -> float | None:
    """Return the machine's processor seconds without those of this process and its ended children; None if unknown."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    except OSError:
        return None
    machine_s = sum(int(fields[index]) for index in _BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")
    return machine_s - sum(os.times()[:4])
