"""How long does it take until something happens? Whole processes, the fastest of several."""

from __future__ import annotations

import subprocess
import sys
import time

RUNS = 5
COMMANDS = {
    "startup_help_s": [sys.executable, "-c", "from vajra_py.cli.main import main; main(['--help'])"],
    "startup_import_s": [sys.executable, "-c", "import vajra_py"],
    "startup_python_s": [sys.executable, "-c", "pass"],
}


def measure() -> dict[str, float]:
    """Every figure, by name."""
    return {name: min(_wall_s(command) for _ in range(RUNS)) for name, command in COMMANDS.items()}


def _wall_s(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started
