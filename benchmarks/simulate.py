"""How fast is the simulator? Times the event loop, per-request metrics included, on a CSV of requests or on drawn ones.

python benchmarks/simulate.py --workload file.csv --replicas 4
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path
from typing import Any

from vajra_py.config import config_from_mapping
from vajra_py.experiment.backend import Run
from vajra_py.experiment.simulated import SimulatedRun
from vajra_py.metrics.recorder import Recorder
from vajra_py.plugins import load_registry
from vajra_py.runtime.seeds import SeedTree
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
    sizes = {name: one.replicas[0].memory.num_blocks for name, one in backend.controller.replicasets.items()}
    backend.controller.watch([Recorder(sizes.__getitem__, steps=False)])
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
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def drawn(num_requests: int, rate: float) -> dict[str, Any]:
    """Lengths of the Azure conversation trace, Poisson arrivals."""
    return {"type": "profile", "profile": "azure2023_conv", "num_requests": num_requests, "rate": rate}


def measure(large: bool = False) -> dict[str, float]:
    """Every figure, by name; `large` adds the million requests on a thousand replicas (minutes)."""
    cases = {
        "1_replica_2000": (1, 2_000, 5.5),
        "8_replicas_16000": (8, 16_000, 44.5),
        "64_replicas_16000": (64, 16_000, 356.0),
    }
    if large:
        cases["1000_replicas_1000000"] = (1_000, 1_000_000, 5_560.0)
    figures: dict[str, float] = {}
    for name, (num_replicas, num_requests, rate) in cases.items():
        result = measure_run(experiment(drawn(num_requests, rate), num_replicas))
        for key in ("cpu_s", "requests_per_cpu_s", "steps_per_cpu_s", "num_output_tokens", "peak_memory_mb"):
            figures[f"sim_{name}_{key}"] = result[key]
    return figures


def main() -> int:
    """Time one CSV of arrivals, prompt and output tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", required=True, help="CSV of arrivals (s), prompt and output tokens")
    parser.add_argument("--replicas", type=int, default=1)
    options = parser.parse_args()
    from vajra_py.errors import VajraError

    try:
        figures = measure_run(experiment({"type": "csv", "path": options.workload}, options.replicas))
    except VajraError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for name, value in figures.items():
        print(f"{name:24} {value:,.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
