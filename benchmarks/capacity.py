"""Compare `vajra capacity` with a fine grid of rates: the answers and the CPU time, for three policies on the Azure conversation lengths.

python benchmarks/capacity.py [--requests 400] [--seeds 5] [--step 0.02]

The grid runs every rate from 0.6 to 1.6 times the first policy's answer under the same seeds. Its answer is the least over the conditions of the geometric mean over seeds of the rate at
which the condition ends to hold.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from functools import partial
from typing import Any

from vajra_py.config import config_from_mapping
from vajra_py.config.slo import parse_slo
from vajra_py.experiment.capacity.seeds import crossing
from vajra_py.experiment.capacity.study import find_capacity, metric_value
from vajra_py.experiment.runs.run import run_experiment

POLICIES: list[dict[str, Any]] = [
    {"policy": "fixed_chunk", "params": {"chunk_size": 512}},
    {"policy": "dynamic_chunk", "params": {"target_batch_time_s": 0.05}},
    {"policy": "vllm_v1"},
]
SLO = "p99(ttft) <= 1 and attainment >= 0.9"


def experiment(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The experiment that both run."""
    return {
        "version": 1,
        "name": "search",
        "seed": 1,
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": "round_robin",
            "replica_scheduler": "fixed_chunk",
        },
        "workload": {
            "type": "profile",
            "profile": "azure2023_conv",
            "num_requests": arguments.requests,
            "rate": 4.0,
            "slo_classes": [{"name": "chat", "ttft_slo_s": 1.0, "tpot_slo_s": 0.05}],
        },
        "backend": {"simulator": {"latency": {"type": "roofline", "model": "llama-3.1-8b", "device": "a100-80gb-sxm"}}},
        "output": {"dir": folder, "decision_log": False},
    }


def grid_answer(mapping: dict[str, Any], policy: dict[str, Any], rates: list[float], seeds: int) -> float:
    """The least over conditions of the geometric mean of the seeds' capacities, each between two of the grid's rates."""
    slo = parse_slo(SLO)
    logs = []
    for seed in range(1, seeds + 1):
        slacks = []
        for rate in rates:
            one = {**mapping, "name": f"grid-{policy['policy']}-{rate:.4g}-{seed}", "seed": seed}
            one["scheduling"] = {**mapping["scheduling"], "replica_scheduler": policy}
            one["workload"] = {**mapping["workload"], "rate": rate}
            summary = run_experiment(config_from_mapping(one)).summary
            slacks.append(slo.slacks(partial(metric_value, summary)))
        found = [crossing(rates, list(own)) for own in zip(*slacks, strict=True)]
        if any(one.capacity.side != "exact" for one in found):
            return math.nan  # a seed's capacity lies outside the grid
        logs.append([math.log(one.rate) for one in found])
    return math.exp(min(sum(own) / seeds for own in zip(*logs, strict=True)))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--step", type=float, default=0.02)
    arguments = parser.parse_args()
    rates: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        mapping = experiment(arguments, folder)
        print(
            "| policy | search, requests/s | 95 % interval | grid, requests/s | difference | CPU, search | CPU, grid |"
        )
        print("|---|---|---|---|---|---|---|")
        for policy in POLICIES:
            asked = {"slo": SLO, "replications": arguments.seeds, "max_replications": arguments.seeds, "curve": []}
            one = {**mapping, "name": f"search-{policy['policy']}", "capacity": asked}
            one["scheduling"] = {**mapping["scheduling"], "replica_scheduler": policy}
            begun = time.process_time()
            (found,) = find_capacity(config_from_mapping(one), workers=1)
            search_s = time.process_time() - begun
            assert found.answer is not None, found.error
            assert found.answer.interval is not None
            (rate,), interval = found.answer.setting, found.answer.interval
            if not rates:
                steps = int(math.log(1.6 / 0.6) / math.log(1 + arguments.step)) + 1
                rates = [0.6 * rate * (1 + arguments.step) ** k for k in range(steps)]
            begun = time.process_time()
            other = grid_answer(mapping, policy, rates, arguments.seeds)
            grid_s = time.process_time() - begun
            print(
                f"| {policy['policy']} | {rate:.3f} | {interval.low:.2f} to {interval.high:.2f} | {other:.3f} "
                f"| {rate / other - 1:+.1%} | {search_s:.1f} s | {grid_s:.1f} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
