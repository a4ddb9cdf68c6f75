"""Measure start-up: time of whole processes, and CPU time of a run of ten requests, the least of several, with compiled bytecode."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

RUNS = 5
TEN_REQUESTS = """
version: 1
scheduling:
  request_prioritizer: fcfs
  replicaset_scheduler: round_robin
  replica_scheduler: {policy: fixed_chunk, params: {chunk_size: 512}}
workload: {type: profile, profile: azure2023_conv, num_requests: 10, rate: 5}
backend: {simulator: {latency: {type: roofline, model: llama-3-8b, device: a100-80gb-sxm}}}
"""
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
PYTHON = [sys.executable, "-c", "pass"]
COMMANDS = {
    "startup_help_s": [sys.executable, "-c", "from vajra_py.cli.main import main; main(['--help'])"],
    "startup_import_s": [sys.executable, "-c", "import vajra_py"],
    "startup_first_event_s": [sys.executable, "-c", FIRST_EVENT],
    "startup_python_s": PYTHON,
}


def measure() -> dict[str, float]:
    """Every figure, by name."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        file = Path(folder) / "ten.yaml"
        file.write_text(TEN_REQUESTS)
        arguments = ["run", str(file), "--overwrite", "--set", f"output.dir={folder}"]
        run = [sys.executable, "-c", f"from vajra_py.cli.main import main; main({arguments!r})"]

        def least(measured: Callable[[Sequence[str], Mapping[str, str]], float], command: Sequence[str]) -> float:
            return min(measured(command, environment) for _ in range(RUNS + 1))

        figures = {name: least(_wall_s, command) for name, command in COMMANDS.items()}
        figures["startup_run_cpu_s"] = least(_cpu_s, run)
        figures["startup_run_cpu_x_python"] = figures["startup_run_cpu_s"] / least(_cpu_s, PYTHON)
        return figures


def _wall_s(command: Sequence[str], environment: Mapping[str, str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - started


def _cpu_s(command: Sequence[str], environment: Mapping[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
