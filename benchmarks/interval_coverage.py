"""Measure how often 95 % intervals hold the long-run value: 1,000 short runs each of an M/M/1 queue and of a replica with chunked prefills.

Run `python benchmarks/interval_coverage.py [--runs 1000]` (about five minutes of one core); it prints a Markdown table and writes `benchmarks/results/interval_coverage.json`.

The queue's long-run values are known: time in system of M/M/1 is exponential with rate 1 - load (service rate 1). Those of the replica come from one run of 200,000 requests.
Every run starts empty, as experiments do.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from vajra_py.config import config_from_mapping
from vajra_py.experiment.backend import Run, make_backend
from vajra_py.experiment.run import load_workload
from vajra_py.metrics.definitions import Floats, quantiles
from vajra_py.metrics.intervals import Interval, batch_means_interval, quantile_interval, replication_interval
from vajra_py.metrics.recorder import Recorder
from vajra_py.plugins import Registry, load_registry
from vajra_py.runtime.support.seeds import SeedTree

RESULTS = Path(__file__).parent / "results" / "interval_coverage.json"
FRACTIONS = {"P50": 0.5, "P90": 0.9, "P95": 0.95, "P99": 0.99}
WITHIN = ("mean", "P50", "P90", "P95")
ACROSS = ("mean", "P50", "P99")
SEEDS_EACH = 5
LONG_REQUESTS = 200_000


@dataclass(frozen=True, slots=True)
class Row:
    """How one kind of interval did."""

    system: str
    requests: int
    method: str
    metric: str
    intervals: int
    coverage: float
    half_width: float
    """Mean half-width over the long-run value."""


def mm1(load: float, num_requests: int, num_runs: int, seed: int) -> Floats:
    """Times in system of M/M/1 queues that start empty, a row a run (Lindley's recursion); service rate 1."""
    rng = np.random.default_rng(seed)
    service, gaps = rng.exponential(1, (num_requests, num_runs)), rng.exponential(1 / load, (num_requests, num_runs))
    times = np.empty((num_requests, num_runs))
    wait = np.zeros(num_runs)
    for i in range(num_requests):
        times[i] = wait + service[i]
        wait = np.maximum(times[i] - gaps[i], 0.0)
    return times.T


def chunked_prefill(num_requests: int, seed: int, registry: Registry) -> Floats:
    """TTFTs of a replica with chunked prefills under Poisson arrivals."""
    config = config_from_mapping(
        {
            "version": 1,
            "seed": seed,
            "scheduling": {
                "request_prioritizer": "fcfs",
                "replicaset_scheduler": "round_robin",
                "replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_size": 512}},
            },
            "workload": {
                "type": "synthetic",
                "arrivals": {"type": "poisson", "rate": 10},
                "num_requests": num_requests,
                "prompt_tokens": {"type": "lognormal", "mu": 6.5, "sigma": 0.8, "max": 4096},
                "output_tokens": {"type": "lognormal", "mu": 3.5, "sigma": 0.5, "max": 256},
            },
            "backend": {
                "simulator": {"latency": {"type": "roofline", "model": "llama-3.1-8b", "device": "a100-80gb-sxm"}}
            },
        }
    )
    run = Run(config, registry, load_workload(config), SeedTree(seed), None)
    backend = make_backend(run)
    recorder = Recorder(lambda name: 1, steps=False)
    backend.controller.watch([recorder])
    backend.start()
    found: Floats = recorder.requests.to_table().column("ttft_s").to_numpy()
    return found


def judged(system: str, runs: Floats, truth: dict[str, float]) -> Iterator[Row]:
    """Coverage within single runs, and over groups of `SEEDS_EACH` of them."""
    size = runs.shape[1]
    for metric in WITHIN:
        found = [
            batch_means_interval(run) if metric == "mean" else quantile_interval(run, FRACTIONS[metric]) for run in runs
        ]
        yield _row((system, size, "one run, batch means", metric), [one for one in found if one], truth[metric])
    for metric in ACROSS:
        values = [float(run.mean()) if metric == "mean" else quantiles(run, (FRACTIONS[metric],))[0] for run in runs]
        groups = [values[i : i + SEEDS_EACH] for i in range(0, len(values) - SEEDS_EACH + 1, SEEDS_EACH)]
        intervals = [one for group in groups if (one := replication_interval(group)) is not None]
        yield _row((system, size, f"{SEEDS_EACH} replications", metric), intervals, truth[metric])


def _row(named: tuple[str, int, str, str], intervals: list[Interval], truth: float) -> Row:
    covered = sum(one.low <= truth <= one.high for one in intervals) / len(intervals)
    return Row(*named, len(intervals), covered, sum(one.half_width for one in intervals) / len(intervals) / truth)


def rows(num_runs: int) -> Iterator[Row]:
    """Every system in turn."""
    for load, num_requests in ((0.5, 3000), (0.7, 5000), (0.8, 10_000), (0.9, 3000)):
        truth = {"mean": 1 / (1 - load)} | {
            name: -math.log(1 - fraction) / (1 - load) for name, fraction in FRACTIONS.items()
        }
        yield from judged(f"M/M/1, load {load:g}", mm1(load, num_requests, num_runs, 7), truth)
    registry = load_registry()
    long_run = chunked_prefill(LONG_REQUESTS, 10**6, registry)[LONG_REQUESTS // 100 :]
    truth = {"mean": float(long_run.mean())}
    truth |= dict(zip(FRACTIONS, quantiles(long_run, tuple(FRACTIONS.values())), strict=True))
    runs = np.stack([chunked_prefill(1000, seed, registry) for seed in range(num_runs)])
    yield from judged("chunked prefill, TTFT", runs, truth)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    found = []
    print("| system | requests a run | interval | metric | intervals | hold the long-run value | mean half-width |")
    print("|---|--:|---|---|--:|--:|--:|")
    for row in rows(parser.parse_args().runs):
        found.append(asdict(row))
        print(
            f"| {row.system} | {row.requests:,} | {row.method} | {row.metric} | {row.intervals:,} | {row.coverage:.1%} | ±{row.half_width:.0%} |",
            flush=True,
        )
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
