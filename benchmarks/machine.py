"""What a benchmark's figures belong to."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path


def processor() -> str:
    """The CPU's name, or its architecture where the system does not tell the name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
