"""Machine and versions of a benchmark's figures."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path


def processor() -> str:
    """Return the CPU's name, or its architecture if the name is not available."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def tree_cpu_s() -> float:
    """CPU seconds so far of this process and all that descend from it and live, in steps of the system's clock (10 ms)."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # ended meanwhile
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)], ticks[int(entry.name)] = int(fields[1]), int(fields[11]) + int(fields[12])

    def is_own(process: int) -> bool:
        while process in parents and process != os.getpid():
            process = parents[process]
        return process == os.getpid()

    return sum(count for process, count in ticks.items() if is_own(process)) / os.sysconf("SC_CLK_TCK")
