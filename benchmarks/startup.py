"""Measure start-up time: whole processes, the fastest of several, with compiled bytecode as after a first start."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

RUNS = 5
FIRST_EVENT = """
import os
from vajra_py.config import config_from_mapping
from vajra_py.contract.observer import Observer
from vajra_py.experiment.runs.backend import Run
from vajra_py.experiment.runs.run import load_workload
from vajra_py.experiment.runs.simulated import SimulatedRun
from vajra_py.plugins import load_registry
from vajra_py.runtime.support.seeds import SeedTree

class First(Observer):
    def on_arrival(self, request, now):
        os._exit(0)

config = config_from_mapping({
    "version": 1,
    "scheduling": {"request_prioritizer": "lrs", "replicaset_scheduler": "pull", "replica_scheduler": "dynamic_chunk"},
    "workload": {"type": "profile", "profile": "azure2023_conv", "num_requests": 100, "rate": 5},
    "backend": {"simulator": {"latency": {"type": "roofline", "model": "llama-3-8b", "device": "a100-80gb-sxm"}}},
})
run = SimulatedRun(Run(config, load_registry(), load_workload(config), SeedTree(0)))
run.controller.watch([First()])
run.start()
"""
COMMANDS = {
    "startup_help_s": [sys.executable, "-c", "from vajra_py.cli.main import main; main(['--help'])"],
    "startup_import_s": [sys.executable, "-c", "import vajra_py"],
    "startup_first_event_s": [sys.executable, "-c", FIRST_EVENT],
    "startup_python_s": [sys.executable, "-c", "pass"],
}


def measure() -> dict[str, float]:
    """Every figure, by name."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        return {name: min(_wall_s(command, environment) for _ in range(RUNS + 1)) for name, command in COMMANDS.items()}


def _wall_s(command: list[str], environment: Mapping[str, str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - started
