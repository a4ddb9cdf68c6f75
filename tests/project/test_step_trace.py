"""How much a reader has to follow to understand one decode step of the simulator."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

MAX_FILES = 13
"""Twelve of the framework, and the policy's own."""
MAX_FUNCTIONS = 40


def test_a_decode_step_stays_short(repository_root: Path) -> None:
    command = [sys.executable, str(repository_root / "benchmarks" / "trace_step.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=repository_root).stdout
    total = re.search(r"^(\d+) files, (\d+) functions", printed, re.MULTILINE)
    assert total is not None, printed
    num_files, num_functions = map(int, total.groups())
    assert "Driver.complete" in printed
    assert "FixedChunk.schedule" in printed
    assert num_files <= MAX_FILES, printed
    assert num_functions <= MAX_FUNCTIONS, printed
