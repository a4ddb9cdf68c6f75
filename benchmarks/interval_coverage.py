"""Measure how often 95 % intervals hold the long-run value: thousands of short runs of M/M/1 queues, and 1,000 of a replica with chunked prefills at each of two rates.

Run `python benchmarks/interval_coverage.py` (about half an hour of one core; `--runs` and `--only` make it shorter, `--keep FOLDER` makes it in pieces: simulations are kept there and
not repeated); it prints the table of `docs/metrics.md` and writes it as JSON below `runs/`, or with `--record` into `benchmarks/results/interval_coverage.json`, where the rows of
systems that were left out stay as they are.

The queue's long-run values are known: time in system of M/M/1 is exponential with rate 1 - load (service rate 1). Those of the replica are pooled from all of its runs, without the first
and the last requests of each. Every run starts empty, as experiments do; runs of several lengths are the first requests of the longest. Replications of runs that are too short to tell
the long run say what runs of their length take: those are judged by the mean over all runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from simulate import experiment

from vajra_py.config import config_from_mapping
from vajra_py.experiment.backend import Run, make_backend
from vajra_py.experiment.run import load_workload
from vajra_py.metrics.definitions import Floats, quantiles
from vajra_py.metrics.intervals import (
    Interval,
    LongRun,
    Worth,
    batch_means_interval,
    independent_by_load,
    is_long_enough,
    latency_interval,
    quantile_interval,
)
from vajra_py.metrics.recorder import Recorder
from vajra_py.plugins import Registry, load_registry
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.workload.demand import demand_of

RESULTS = Path(__file__).parent / "results" / "interval_coverage.json"
FRACTIONS = {"P50": 0.5, "P90": 0.9, "P95": 0.95, "P99": 0.99}
WITHIN = ("mean", "P50", "P90", "P95")
ACROSS = ("mean", "P50", "P99")
LATENCIES = {"TTFT": "ttft_s", "TPOT": "tpot_s", "E2E": "e2e_s", "queue": "queue_s"}
SEEDS_EACH = 5
ROUNDS = 50
MIN_INTERVALS = 100
"""Fewer say nothing."""
RUNS_A_FILE = 50
WARM_UP, DRAIN = 800, 100
"""Requests at the start and at the end of a run of the replica that its long-run values leave out."""


@dataclass(frozen=True, slots=True)
class Row:
    """How one kind of interval did."""

    system: str
    requests: int
    method: str
    metric: str
    judged_by: str
    """`long run`, or `this length`: the mean of the metric over all runs."""
    runs: int
    """Or groups of runs."""
    intervals: int
    """That were given: a run that is too short gets none."""
    coverage: float | None
    """Of those given; None of a handful."""
    half_width: float
    """Median half-width over the value."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Latencies of runs of one length, a row a run (NaN: none), and how many independent requests each is worth by its load."""

    latencies: Floats
    by_load: list[Worth]


def worth(arrived_at: Floats, latencies: Floats, work: Floats, rate: float) -> Worth:
    """Independent requests of a run of one server, of whose work so much arrives per second in the long run."""
    demand = rate * float(arrived_at[-1] - arrived_at[0]) / float(work[:-1].sum())
    return independent_by_load(
        arrived_at, arrived_at + latencies, np.zeros(len(latencies), dtype=np.int64), LongRun(demand)
    )


def mm1(load: float, num_requests: int, num_runs: int, seed: int) -> Runs:
    """Times in system of M/M/1 queues that start empty (Lindley's recursion); service rate 1."""
    rng = np.random.default_rng(seed)
    service, gaps = rng.exponential(1, (num_requests, num_runs)), rng.exponential(1 / load, (num_requests, num_runs))
    backlog = np.cumsum(service - gaps, axis=0) - (service - gaps)
    times = backlog - np.minimum.accumulate(backlog) + service
    arrived_at = np.cumsum(gaps, axis=0) - gaps
    return Runs(times.T, [worth(arrived_at[:, i], times[:, i], service[:, i], load) for i in range(num_runs)])


def workload_at(rate: float, num_requests: int) -> dict[str, Any]:
    """What a replica with chunked prefills serves."""
    return {
        "type": "synthetic",
        "arrivals": {"type": "poisson", "rate": rate},
        "num_requests": num_requests,
        "prompt_tokens": {"type": "lognormal", "mu": 6.5, "sigma": 0.8, "max": 4096},
        "output_tokens": {"type": "lognormal", "mu": 3.5, "sigma": 0.5, "max": 256},
    }


def chunked_prefill(rate: float, num_requests: int, seed: int, registry: Registry) -> dict[str, Floats]:
    """Arrivals, prompts and latencies of a replica with chunked prefills under Poisson arrivals."""
    config = config_from_mapping({**experiment(workload_at(rate, num_requests), 1), "seed": seed})
    run = Run(config, registry, load_workload(config), SeedTree(seed), None)
    backend = make_backend(run)
    recorder = Recorder(lambda name: 1, steps=False)
    backend.controller.watch([recorder])
    backend.start()
    table = recorder.requests.to_table()
    return {name: table.column(name).to_numpy() for name in ("arrived_at", "num_prompt_tokens", *LATENCIES.values())}


def chunked_prefills(rate: float, num_requests: int, num_runs: int, keep: Path | None) -> dict[str, Floats]:
    """Such columns of many runs, a row a run; with `keep`, files of `RUNS_A_FILE` runs each are read where they are and written where they are not."""
    registry = load_registry()
    parts: list[Mapping[str, Floats]] = []
    for first in range(0, num_runs, RUNS_A_FILE):
        path = None if keep is None else keep / f"{rate:g}-{num_requests}-{first}.npz"
        if path is not None and path.exists():
            parts.append(dict(np.load(path)))
            continue
        last = first + RUNS_A_FILE if keep else min(first + RUNS_A_FILE, num_runs)
        runs = [chunked_prefill(rate, num_requests, seed, registry) for seed in range(first, last)]
        parts.append({name: np.stack([run[name] for run in runs]) for name in runs[0]})
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, **parts[-1])
    return {name: np.concatenate([part[name] for part in parts])[:num_runs].astype(np.float64) for name in parts[0]}


def within(system: str, runs: Runs, truth: dict[str, float]) -> Iterator[Row]:
    """Coverage of intervals of single runs."""
    for metric in WITHIN:
        found = []
        for latencies, by_load in zip(runs.latencies, runs.by_load, strict=True):
            run = latencies[np.isfinite(latencies)]
            found.append(
                batch_means_interval(run, by_load=by_load)
                if metric == "mean"
                else quantile_interval(run, FRACTIONS[metric], by_load=by_load)
            )
        yield _row((system, runs.latencies.shape[1], "one run", metric, "long run"), found, truth[metric])


@dataclass(slots=True)
class Replications:
    """Values of many runs, to be taken in groups of `SEEDS_EACH`."""

    system: str
    num_requests: int = 0
    values: dict[str, list[float]] = field(default_factory=lambda: {metric: [] for metric in ACROSS})
    num_long: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ACROSS, 0))

    def add(self, runs: Runs) -> None:
        """Further runs."""
        self.num_requests = runs.latencies.shape[1]
        for metric in ACROSS:
            fraction = FRACTIONS.get(metric)
            self.values[metric] += [float(run.mean()) if fraction is None else quantiles(run, (fraction,))[0] for run in runs.latencies]  # fmt: skip
            self.num_long[metric] += sum(
                is_long_enough(run, fraction, by_load=by_load)
                for run, by_load in zip(runs.latencies, runs.by_load, strict=True)
            )

    def rows(self, truth: dict[str, float]) -> Iterator[Row]:
        """Coverage of their intervals: of the long-run value where most runs are long enough, else of the mean over all runs."""
        for metric, values in self.values.items():
            groups = self._groups(values)
            is_long = self.num_long[metric] > 0.5 * len(values)
            judge, target = ("long run", truth[metric]) if is_long else ("this length", float(np.mean(values)))
            named = (self.system, self.num_requests, f"{SEEDS_EACH} replications", metric, judge)
            yield _row(named, [latency_interval(group) for group in groups], target)

    def _groups(self, values: Sequence[float]) -> Iterator[Floats]:
        """Every run in `ROUNDS` groups, each time with others, so that chance has less to say which runs meet."""
        for seed in range(ROUNDS):
            mixed = np.random.default_rng(seed).permutation(np.asarray(values))
            yield from mixed[: len(mixed) // SEEDS_EACH * SEEDS_EACH].reshape(-1, SEEDS_EACH)


def _row(named: tuple[str, int, str, str, str], found: list[Interval | None], truth: float) -> Row:
    intervals = [one for one in found if one is not None]
    if len(intervals) < MIN_INTERVALS:
        return Row(*named, len(found), len(intervals), None, math.nan)
    covered = sum(one.low <= truth <= one.high for one in intervals) / len(intervals)
    return Row(
        *named, len(found), len(intervals), covered, float(np.median([one.half_width for one in intervals])) / truth
    )


def mm1_rows(load: float, num_requests: int, num_runs: int) -> Iterator[Row]:
    """An M/M/1 queue, whose long-run values are known: `SEEDS_EACH` times as many runs, so that there are as many groups of replications."""
    truth = {"mean": 1 / (1 - load)} | {
        name: -math.log(1 - fraction) / (1 - load) for name, fraction in FRACTIONS.items()
    }
    batches = [mm1(load, num_requests, num_runs, 7 + batch) for batch in range(SEEDS_EACH)]
    together = Runs(
        np.concatenate([runs.latencies for runs in batches]), [one for runs in batches for one in runs.by_load]
    )
    yield from within(_mm1_name(load), together, truth)
    replications = Replications(_mm1_name(load))
    replications.add(together)
    yield from replications.rows(truth)


def chunked_prefill_rows(rate: float, lengths: Sequence[int], num_runs: int, keep: Path | None) -> Iterator[Row]:
    """A replica with chunked prefills, whose long-run values are pooled."""
    columns = chunked_prefills(rate, max(lengths), num_runs, keep)
    demand = demand_of(workload_at(rate, max(lengths)))
    assert demand is not None
    for num_requests in lengths:
        told = [columns[name][:, :num_requests] for name in ("arrived_at", "ttft_s", "num_prompt_tokens")]
        by_load = [worth(*one, demand.prompt_tokens_per_s) for one in zip(*told, strict=True)]
        for name, column in LATENCIES.items():
            pooled = columns[column][:, WARM_UP:-DRAIN]
            pooled = pooled[np.isfinite(pooled)]
            truth = {"mean": float(pooled.mean())}
            truth |= dict(zip(FRACTIONS, quantiles(pooled, tuple(FRACTIONS.values())), strict=True))
            runs = Runs(columns[column][:, :num_requests], by_load)
            yield from within(_chunked_prefill_name(rate, name), runs, truth)
            if name == "TTFT":
                replications = Replications(_chunked_prefill_name(rate, name))
                replications.add(runs)
                yield from replications.rows(truth)


def _mm1_name(load: float) -> str:
    return f"M/M/1, load {load:g}"


def _chunked_prefill_name(rate: float, latency: str) -> str:
    return f"chunked prefill, {rate:g} requests/s, {latency}"


MM1 = (
    *((0.5, length) for length in (650, 730, 900, 3000)),
    *((0.7, length) for length in (2250, 2500, 3100, 5000, 10_000)),
    *((0.8, length) for length in (5000, 5500, 6000, 6200, 7500, 10_000, 20_000)),
    (0.9, 3000),
)
CHUNKED_PREFILL = ((7, (1000, 2000)), (10, (1000, 2600, 2800, 3000, 3500, 4000)))


def rows(num_runs: int, only: str, keep: Path | None) -> Iterator[Row]:
    """Every system whose name contains `only`, in turn."""
    for load, num_requests in MM1:
        if only in _mm1_name(load):
            yield from mm1_rows(load, num_requests, num_runs)
    for rate, lengths in CHUNKED_PREFILL:
        if only in _chunked_prefill_name(rate, ""):
            yield from chunked_prefill_rows(rate, lengths, num_runs, keep)


def table_row(group: Sequence[Row]) -> str:
    """One kind of interval of one system and length, as a row of the table in `docs/metrics.md`."""
    shown = dict.fromkeys(("mean", *FRACTIONS), "–")
    for row in group:
        mark = "†" if row.judged_by == "this length" else ""
        is_known = row.coverage is not None
        shown[row.metric] = f"{row.coverage:.1%}{mark} (±{row.half_width:.0%})" if is_known else "too short"
    given = group[0].intervals / group[0].runs
    cells = (group[0].system, f"{group[0].requests:,}", group[0].method, f"{given:.0%}", shown.pop("mean"))
    return "| " + " | ".join((*cells, *shown.values())) + " |"


def write(path: Path, found: Sequence[Row]) -> None:
    """Put the rows into the results, in place of those of the same systems."""
    measured = {row.system for row in found}
    kept = [row for row in json.loads(path.read_text()) if row["system"] not in measured] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*kept, *map(asdict, found)], indent=1) + "\n")
    print(f"written: {path}")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="of each system and length (default 1,000)")
    parser.add_argument("--only", default="", help="systems whose name contains this, such as 'chunked prefill, 10'")
    parser.add_argument("--output", type=Path, default=Path("runs") / RESULTS.name, help="where the JSON goes")
    parser.add_argument("--record", action="store_true", help=f"write it to results/{RESULTS.name} instead")
    parser.add_argument("--keep", type=Path, help="folder in which the replica's simulations are kept, and looked for")
    arguments = parser.parse_args()
    print("| system | requests a run | interval | given | mean (half-width) | P50 | P90 | P95 | P99 |")
    print("|---|--:|---|--:|--:|--:|--:|--:|--:|", flush=True)
    found: list[Row] = []
    by_table_row = itertools.groupby(
        rows(arguments.runs, arguments.only, arguments.keep), key=lambda row: (row.system, row.requests, row.method)
    )
    for _, group in by_table_row:
        found += (members := list(group))
        print(table_row(members), flush=True)
    if not found:
        parser.error(f"--only: no such system ({arguments.only}). Allowed: a part of a name in docs/metrics.md")
    write(RESULTS if arguments.record else arguments.output, found)


if __name__ == "__main__":
    main()
