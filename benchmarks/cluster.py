"""A sweep of 64 points on a Ray cluster of two workers, against two processes: wall time of whole commands, in turns.

The cluster (a head without CPUs, two nodes of one CPU) is started before, as a user's is. `python benchmarks/cluster.py [--rounds N] [--requests N]`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ray.cluster_utils import Cluster

STORE_BYTES = 200_000_000
EXPERIMENT = """\
version: 1
name: points
seed: 1
scheduling:
  request_prioritizer: fcfs
  replicaset_scheduler: round_robin
  replica_scheduler: {{policy: fixed_chunk, params: {{chunk_size: 512}}}}
num_replicas: 2
workload: {{type: profile, profile: azure2023_conv, num_requests: {requests}, rate: 8}}
backend: {{simulator: {{latency: {{type: roofline, model: llama-3-8b, device: a100-80gb-sxm}}}}}}
sweep:
  scheduling.request_prioritizer: [fcfs, edf, lrs, priority]
  scheduling.replica_scheduler.params.chunk_size: [256, 512, 1024, 2048]
  workload.rate: [4, 6, 8, 10]
"""


def command_s(folder: Path, output: str, *arguments: str) -> float:
    """Wall seconds of a sweep into an output folder of its own."""
    command = [sys.executable, "-c", "from vajra_py.cli.main import main; main()", "run", "points.yaml", "-q"]
    started = time.perf_counter()
    subprocess.run(
        [*command, "--set", f"output.dir={output}", *arguments], check=True, cwd=folder, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - started


def main() -> None:
    """Print the times of each round and the ratio of their medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4000)
    given = parser.parse_args()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False},
    )
    processes, ray = [], []
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "points.yaml").write_text(EXPERIMENT.format(requests=given.requests))
            for index in range(given.rounds):
                processes.append(command_s(folder, f"processes{index}", "--workers", "2"))
                ray.append(command_s(folder, f"ray{index}", "--on", cluster.address))
                print(f"--workers 2: {processes[-1]:.1f} s; two nodes of Ray: {ray[-1]:.1f} s")
    finally:
        cluster.shutdown()
    print(f"ratio of the medians: {statistics.median(ray) / statistics.median(processes):.3f}")


if __name__ == "__main__":
    main()
