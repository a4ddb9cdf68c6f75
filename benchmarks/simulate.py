"""Measure the speed of the simulator: times the event loop, per-request metrics included, on a CSV of requests or on drawn ones.

python benchmarks/simulate.py --workload file.csv --replicas 4
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from vajra_py.config import config_from_mapping
from vajra_py.errors import VajraError
from vajra_py.experiment.runs.backend import Run
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.experiment.runs.simulated import SimulatedRun
from vajra_py.metrics.tables.recorder import Recorder
from vajra_py.plugins import load_registry
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.workload import Workload, build_workload


def experiment(workload: dict[str, Any], num_replicas: int, latency: dict[str, Any] | None = None) -> dict[str, Any]:
    """The measured situation: Llama-3-8B on A100s, fixed chunks of 512 tokens, at most 128 requests a step."""
    return {
        "version": 1,
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": "round_robin",
            "replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_size": 512}},
        },
        "replica": {"max_batch_size": 128},
        "num_replicas": num_replicas,
        "workload": workload,
        "backend": {
            "simulator": {"latency": latency or {"type": "roofline", "model": "llama-3-8b", "device": "a100-80gb-sxm"}}
        },
    }


def measure_run(mapping: dict[str, Any]) -> dict[str, float]:
    """CPU seconds of the event loop with per-request metrics, without reading or drawing the workload before it."""
    config = config_from_mapping(mapping)
    seeds = SeedTree(config.seed)
    workload: Workload = build_workload(config.workload, seeds.child("workload").stream, Path.cwd())
    backend = SimulatedRun(Run(config, load_registry(), workload, seeds))
    backend.controller.watch([Recorder(backend.controller.num_blocks_of, steps=False)])
    started = time.process_time()
    outcome = backend.start()
    seconds = time.process_time() - started
    output_tokens = int(workload.columns.num_output_tokens.sum())
    return {
        "cpu_s": seconds,
        "num_requests": float(len(workload)),
        "num_steps": float(outcome.num_steps),
        "num_output_tokens": float(output_tokens),
        "requests_per_cpu_s": len(workload) / seconds,
        "steps_per_cpu_s": outcome.num_steps / seconds,
        "simulated_s": outcome.ended_at,
        "peak_memory_mb": _peak_memory_mb(),
    }


def measure_outputs(num_requests: int = 19_366, rate: float = 5.5, rounds: int = 5) -> dict[str, float]:
    """Measure the cost of decision log and steps table: time and CPU time of a whole run with both, over one without, in alternating rounds.

    As many requests at the rate of the Azure conversation trace of 2023 on four replicas, as in `examples/azure.yaml`.
    """
    mapping = experiment(drawn(num_requests, rate), 4)
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    size = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for written in (True, False):
                config = config_from_mapping({**mapping, "output": {"decision_log": written, "steps": written}})
                place = Path(folder) / f"{number}-{written}"
                began, started = time.perf_counter(), time.process_time()
                run_experiment(config, folder=place)
                times[written].append((time.perf_counter() - began, time.process_time() - started))
                if written:
                    size = sum(file.stat().st_size for file in place.iterdir())
    wall, cpu = (
        median(one[which] / other[which] for one, other in zip(times[True], times[False], strict=True))
        for which in range(2)
    )
    return {"sim_outputs_x_none": wall, "sim_outputs_cpu_x_none": cpu, "sim_outputs_mb": size / 1e6}


def in_two_pools(mapping: dict[str, Any]) -> dict[str, Any]:
    """The same replicas, three of eight for prompts and the others for decodes; every request is handed off."""
    num_replicas = mapping["num_replicas"]
    num_prefill = 3 * num_replicas // 8
    pools = {"prefill": {"num_replicas": num_prefill}, "decode": {"num_replicas": num_replicas - num_prefill}}
    rest = {key: value for key, value in mapping.items() if key != "num_replicas"}
    return {**rest, "pools": pools, "hand_off": "distserve", "links": {"bandwidth_gb_s": 50, "latency_s": 0.0005}}


def measure_pools(rounds: int = 3) -> dict[str, float]:
    """Measure the cost of hand-offs: CPU time of 16,000 requests on 64 replicas in two pools, over one pool, in alternating rounds."""
    one_pool = experiment(drawn(16_000, 356.0), 64)
    two_pools = in_two_pools(one_pool)
    runs = [(measure_run(one_pool), measure_run(two_pools)) for _ in range(rounds)]
    one, two = (min((pair[which] for pair in runs), key=lambda run: run["cpu_s"]) for which in range(2))
    return {
        "sim_two_pools_x_one": two["cpu_s"] / one["cpu_s"],
        "sim_two_pools_cpu_s": two["cpu_s"],
        "sim_two_pools_steps_x_one": two["num_steps"] / one["num_steps"],
    }


def _peak_memory_mb() -> float:
    """Return the peak memory of this process, without that of its parent where the system reports it."""
    status = Path("/proc/self/status")
    text = status.read_text() if status.exists() else ""
    found = re.search(r"VmHWM:\s*(\d+) kB", text)
    return (int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 1024


def drawn(num_requests: int, rate: float) -> dict[str, Any]:
    """Lengths of the Azure conversation trace, Poisson arrivals."""
    return {"type": "profile", "profile": "azure2023_conv", "num_requests": num_requests, "rate": rate}


def of_file(path: str) -> dict[str, Any]:
    """A CSV of arrivals, prompt and output tokens under any of the names in use; arrivals in seconds, or dates and times."""
    workload: dict[str, Any] = {"type": "csv", "path": path}
    if not Path(path).is_dir() and _has_dates(Path(path)):
        workload["time_unit"] = "datetime"
    return workload


def _has_dates(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return bool(re.search(r"\d{4}-\d\d-\d\d", "".join(file.readline() for _ in range(2))))
    except (OSError, UnicodeError):
        return False  # the reader raises the error


def agents(num_programs: int) -> dict[str, Any]:
    """Programs of 30 calls on average, at the pace of 10,000 a day on 16 replicas: loops, rounds of fork and join, and searches."""
    latency = {"type": "roofline", "model": "llama-3.1-8b", "device": "a100-80gb-sxm"}
    mapping = experiment({}, 16, latency)
    constant = {"type": "constant"}
    mapping["workload"] = {
        "type": "programs",
        "arrivals": {"type": "poisson", "rate": DAY_PROGRAMS / 86_400},
        "num_programs": num_programs,
        "shapes": [
            {"type": "chain", "share": 6, "calls": {"type": "lognormal", "mu": 2.9, "sigma": 0.9, "max": 200}},
            {
                "type": "fork_join",
                "share": 3,
                "rounds": {"type": "uniform", "min": 2, "max": 6},
                "width": {"type": "uniform", "min": 2, "max": 10},
            },
            {
                "type": "tree",
                "share": 1,
                "depth": {**constant, "value": 3},
                "branching": {"type": "uniform", "min": 2, "max": 4},
            },
        ],
        "task_tokens": {"type": "lognormal", "mu": 7.5, "sigma": 0.8},
        "call_tokens": {"type": "lognormal", "mu": 5.8, "sigma": 1.2, "max": 20_000},
        "output_tokens": {"type": "lognormal", "mu": 5.4, "sigma": 0.8, "max": 4_000},
        "delay_s": {"type": "lognormal", "mu": 1.5, "sigma": 1.2, "max": 300},
        "system_prompts": {"count": 20, "tokens": {**constant, "value": 8_000}},
        "max_context_tokens": 120_000,
    }
    mapping["scheduling"]["replicaset_scheduler"] = "thunderagent"
    memory = {"num_blocks": 2_500, "block_size": 256, "prefix_cache": {"enabled": True}}
    mapping["replica"] = {"max_batch_size": 256, "max_batch_tokens": 8192, "memory": memory}
    return mapping


DAY_PROGRAMS, DAY_CALLS = 10_000, 300_000


def measure_agents(num_programs: int = 1_500) -> dict[str, float]:
    """CPU seconds of a day of agents, by its first programs: the event loop of these, over their calls, times a day's calls.

    With fewer programs the load has not built up: 300 would measure a sixth less.
    """
    figures = measure_run(agents(num_programs))
    return {
        "sim_agents_cpu_s_a_day": figures["cpu_s"] / figures["num_requests"] * DAY_CALLS,
        "sim_agents_calls_per_program": figures["num_requests"] / num_programs,
        "sim_agents_steps_per_cpu_s": figures["steps_per_cpu_s"],
    }


CASES = {
    "1_replica_2000": (1, 2_000, 5.5, 5),
    "8_replicas_16000": (8, 16_000, 44.5, 2),
    "64_replicas_16000": (64, 16_000, 356.0, 1),
}
LARGE_CASES = {"1000_replicas_1000000": (1_000, 1_000_000, 5_560.0, 1)}
"""(replicas, requests, requests a second, how often it is measured: the fastest counts, since noise only adds)."""


def measure(large: bool = False) -> dict[str, float]:
    """Every figure, by name, each case in a process of its own; `large` adds a million requests (minutes)."""
    figures: dict[str, float] = {}
    for name, case in {**CASES, **(LARGE_CASES if large else {})}.items():
        command = [sys.executable, __file__, "--drawn", *map(str, case)]
        answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for key in ("cpu_s", "requests_per_cpu_s", "steps_per_cpu_s", "num_output_tokens", "peak_memory_mb"):
            figures[f"sim_{name}_{key}"] = answer[key]
    return figures | measure_agents() | measure_pools() | measure_outputs()


def main() -> int:
    """Time one CSV of arrivals, prompt and output tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="", help="CSV of arrivals, prompt and output tokens")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--drawn", nargs=4, metavar=("REPLICAS", "REQUESTS", "RATE", "TIMES"), help="as JSON")
    options = parser.parse_args()
    if options.drawn is not None:
        num_replicas, num_requests, rate, times = options.drawn
        mapping = experiment(drawn(int(num_requests), float(rate)), int(num_replicas))
        print(json.dumps(min((measure_run(mapping) for _ in range(int(times))), key=lambda result: result["cpu_s"])))
        return 0
    if not options.workload:
        print(
            "simulate.py: no workload. --workload FILE: a CSV of arrivals, prompt and output tokens.", file=sys.stderr
        )
        return 2
    try:
        figures = measure_run(experiment(of_file(options.workload), options.replicas))
    except VajraError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for name, value in figures.items():
        print(f"{name:24} {value:,.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
