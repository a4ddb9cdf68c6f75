"""One large simulation divided over workers, against the same in one process: wall time, CPU time, largest process, equal bytes.

Round robin over many replicas, with every file that a run writes by default, or with `--plain` without steps and decisions.
`python benchmarks/divided_run.py [--requests N] [--replicas N] [--plain] [--only divided]`; `--only` runs one of the two and compares nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

REQUESTS_PER_S = 3.0
"""Arrival rate per replica."""
EXPERIMENT = """\
version: 1
name: large
seed: 1
scheduling:
  request_prioritizer: fcfs
  replicaset_scheduler: round_robin
  replica_scheduler: {{policy: fixed_chunk, params: {{chunk_size: 512}}}}
num_replicas: {replicas}
workload: {{type: profile, profile: azure2023_conv, num_requests: {requests}, rate: {rate}}}
backend: {{simulator: {{latency: {{type: roofline, model: llama-3-8b, device: a100-80gb-sxm}}}}}}
"""
PLAIN = "output: {steps: false, decision_log: false}\n"


class Cost(NamedTuple):
    """Resources that a command used."""

    wall_s: float
    cpu_s: float
    largest_gib: float
    """Memory of its largest process."""


def cost_of(folder: Path, output: str, *arguments: str) -> Cost:
    """Run the experiment into an output folder of its own."""
    command = [sys.executable, "-c", "from vajra_py.cli.main import main; main()", "run", "large.yaml", "-q"]
    started = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--set", f"output.dir={output}", *arguments], cwd=folder, stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(arguments)} failed")
    return Cost(time.perf_counter() - started, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20)


def digests(folder: Path) -> dict[str, str]:
    """Digest every file of a run, without machine, time and the name of its folder."""
    return {
        path.name: hashlib.blake2b(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name not in ("environment.json", "config.yaml", "manifest.json")
    }


def main() -> None:
    """Print the cost of each way, and compare the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--plain", action="store_true", help="write neither steps nor the decision log")
    parser.add_argument("--only", choices=("whole", "divided"), help="run this way alone")
    given = parser.parse_args()
    rate = REQUESTS_PER_S * given.replicas
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = EXPERIMENT.format(requests=given.requests, replicas=given.replicas, rate=rate)
        (folder / "large.yaml").write_text(text + PLAIN * given.plain)
        ways = {"whole": [], "divided": ["--workers", str(given.workers)]}
        for way in [given.only] if given.only else ways:
            cost = cost_of(folder, way, *ways[way])
            print(
                f"{way}: {cost.wall_s:.1f} s, {cost.cpu_s:.1f} s of CPU, largest process {cost.largest_gib:.2f} GiB",
                flush=True,
            )
        if not given.only:
            whole, divided = digests(folder / "whole/large"), digests(folder / "divided/large")
            print("same bytes" if whole == divided else f"files differ: {whole} {divided}")


if __name__ == "__main__":
    main()
