"""Measure a step under each prioritizer with 10,000 waiting requests of 1,000 tenants, over the same step under `fcfs`.

Both run alternately in one process, and CPU time counts, so that the ratio bears other load. Every step computes 256 decodes and
admits one request; `--scheduler preemptive` compares those that run with those that wait as well. With `--prefixes 1000` each prompt
begins with one of so many prefixes, so that keys move with what the prefix cache holds.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from steps import Case, build, stepping

from vajra_py.contract import Layer
from vajra_py.plugins import load_registry

NUM_WAITING = 10_000
NUM_TENANTS = 1_000


def measure(name: str, scheduler: str, num_steps: int, num_rounds: int, num_prefixes: int = 0) -> tuple[float, float]:
    """(median ratio of CPU time to that of `fcfs`, median milliseconds a step)."""
    params = (("chunk_size", 2048),) if scheduler == "fixed_chunk" else ()
    case = Case(256, NUM_WAITING, True, name, NUM_TENANTS, scheduler, params, num_prefixes)
    runs = [stepping(build(one)[1]) for one in (case, replace(case, prioritizer="fcfs"))]
    for run in runs:
        run(2)
    ratios, times = [], []
    gc.collect()
    gc.disable()
    for _ in range(num_rounds):
        own, fcfs = (_cpu_ms(run, num_steps) for run in runs)
        ratios.append(own / fcfs)
        times.append(own)
    gc.enable()
    return median(ratios), median(times)


def _cpu_ms(run: Callable[[int], None], num_steps: int) -> float:
    started = time.process_time_ns()
    run(num_steps)
    return (time.process_time_ns() - started) / num_steps / 1e6


def main() -> None:
    """Print a row for each prioritizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="prioritizers; all without any")
    parser.add_argument("--scheduler", default="fixed_chunk")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefixes", type=int, default=0)
    given = parser.parse_args()
    names = given.names or list(load_registry().policies(Layer.REQUEST_PRIORITIZER))
    for name in names:
        ratio, step_ms = measure(name, given.scheduler, given.steps, given.rounds, given.prefixes)
        print(f"{name:24s} {ratio:8.1f} x fcfs {step_ms:9.2f} ms of CPU time a step", flush=True)


if __name__ == "__main__":
    main()
