"""How far is the simulator from the engine on this machine, after `vajra profile`?

`python benchmarks/prediction.py DIR` writes a model of about 10 M parameters to DIR, profiles it, runs every combination of
policies on every workload on the engine, simulates the same requests with the profile, and prints the errors of TTFT, TBT and
E2E, and how both order the policies. The engine keeps the time of a machine of steady pace
(`vajra_py.experiment.steady`): a reference batch after each step tells how fast the machine is, and its pace is taken out of
the times; on a clock on the wall (`--wall`), two equal runs on a shared machine differ by more than what is looked for. Of
several runs the median counts, and how far the others lie from it is shown; a run beside other work is repeated. What is in
DIR already is not measured again, so the phases can be run one by one (`--only profile`, `--only light`, …), and a broken-off
comparison goes on. DIR/prediction.json gets all figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from vajra_py import __version__
from vajra_py.config import ExperimentConfig, config_from_mapping
from vajra_py.engine.compute import ModelRunner, RunnerOptions, load_runner
from vajra_py.engine.tiny import write_tiny_model
from vajra_py.experiment.backend import Backend, Run
from vajra_py.experiment.bench import Batch, Bench, Reference
from vajra_py.experiment.engined import EngineRun
from vajra_py.experiment.other_load import OtherLoad
from vajra_py.experiment.profiling import ProfileSettings, profile_config, profile_model
from vajra_py.experiment.run import run_experiment
from vajra_py.experiment.steady import SteadyClock, SteadyRunner
from vajra_py.experiment.validation import METRICS, validate
from vajra_py.latency import read_profile
from vajra_py.metrics.run_data import RunData

QUANTILES = ("p50", "p90")
TOLERANCE = 0.10
_QUIET_CORES = 0.15
_MOST_TRIES = 10
ENGINE = {"num_threads": 1}
REPLICA = {"max_batch_size": 24, "max_batch_tokens": 1024, "max_model_len": 640}
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "fcfs, fixed_chunk": {
        "request_prioritizer": "fcfs",
        "replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_size": 128}},
    },
    "lrs, dynamic_chunk": {
        "request_prioritizer": "lrs",
        "replica_scheduler": {"policy": "dynamic_chunk", "params": {"target_batch_time_s": 0.03}},
    },
    "fcfs, nano_vllm": {"request_prioritizer": "fcfs", "replica_scheduler": "nano_vllm"},
}

WARM = (Batch((100,)), Batch((100,) * 8), Batch((), ((384, 0),)), Batch((100,) * 4, ((128, 0),)))
"""Computed before a run begins: the first steps of a process take many times as long, and a profile's shapes are warm too."""


@dataclass(frozen=True, slots=True)
class Load:
    """One workload: requests a second, how many in all, and the KV blocks that they share."""

    rate: float
    num_requests: int
    num_blocks: int


LOADS = {
    "light": Load(rate=1.5, num_requests=30, num_blocks=600),
    "heavy": Load(rate=14.0, num_requests=90, num_blocks=600),
    "starved": Load(rate=8.0, num_requests=60, num_blocks=80),
}


def experiment(model: Path, load_name: str, policy: str) -> ExperimentConfig:
    """One policy combination on one workload, on the engine."""
    load = LOADS[load_name]
    memory = {"num_blocks": load.num_blocks, "reservation": "incremental", "watermark_fraction": 0.01}
    return config_from_mapping(
        {
            "version": 1,
            "seed": 3,
            "name": f"{load_name}-{list(POLICIES).index(policy)}",
            "scheduling": {"replicaset_scheduler": "round_robin", **POLICIES[policy]},
            "replica": {**REPLICA, "memory": memory},
            "workload": {
                "type": "synthetic",
                "arrivals": {"type": "poisson", "rate": load.rate},
                "num_requests": load.num_requests,
                "prompt_tokens": {"type": "uniform", "min": 16, "max": 384},
                "output_tokens": {"type": "uniform", "min": 8, "max": 96},
            },
            "backend": {
                "engine": {
                    "model": str(model),
                    **ENGINE,
                    "latency": {"type": "profiled", "path": str(model / "profile.json")},
                }
            },
        }
    )


def prepare(folder: Path, size: str, passes: int) -> Path:
    """The model and its profile; made where they are not there."""
    model = folder / "model"
    if not model.exists():
        write_tiny_model(model, size=size)
    target = model / "profile.json"
    if not target.exists():
        made = profile_config(model, {"replica": REPLICA, "backend": {"engine": ENGINE}})
        settings = ProfileSettings(made, passes)
        profile = profile_model(settings, target)
        print(
            f"profile: others took {profile.facts['other_load_cores']:.2f} cores, errors {json.dumps(profile.errors)}"
        )
    return model


# One workload


Figures: TypeAlias = Mapping[tuple[str, str], float]
"""Seconds by (metric, quantile)."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One combination on one workload: what every run of the engine measured, and the simulation of one of them."""

    load: str
    policy: str
    runs: Sequence[Figures]
    simulated: Figures
    num_preemptions: int
    slowness: Sequence[float]
    """How slow the machine was in each run, as a multiple of its pace in the profile."""

    @property
    def measured(self) -> Figures:
        """The median of the runs."""
        return {key: median(run[key] for run in self.runs) for key in self.simulated}

    def error(self, key: tuple[str, str]) -> float:
        """Simulated over measured, less 1."""
        return self.simulated[key] / self.measured[key] - 1.0

    def noise(self, key: tuple[str, str]) -> float:
        """The run that is farthest from the median, over it, less 1."""
        return max((run[key] / self.measured[key] - 1.0 for run in self.runs), key=abs)


class Engines:
    """Runs experiments on the engine, on the wall's clock or on a steady one."""

    def __init__(self, model: Path, wall: bool) -> None:
        self._typical_s = float(read_profile(model / "profile.json").facts["reference_s"])
        self._wall = wall

    def run(self, config: ExperimentConfig, folder: Path) -> tuple[RunData, float]:
        """The run of a folder, and how slow the machine was; made where it is not there."""
        note = folder / "slowness.json"
        for _ in range(_MOST_TRIES):
            if note.exists():
                break
            others = OtherLoad()
            slowness: list[float] = []
            backend = partial(self._backend, slowness)
            run_experiment(config, folder=folder, overwrite=True, backend=backend)
            cores = others.cores()
            if cores is None or cores < _QUIET_CORES:
                note.write_text(json.dumps(median(slowness) if slowness else None))
            else:
                print(f"{folder.name}: other processes took {cores:.2f} cores, and it is run again", file=sys.stderr)
        if not note.exists():
            raise SystemExit(f"{folder.name}: other work never leaves the machine alone. Stop it, and run this again.")
        return RunData.load(folder), json.loads(note.read_text())

    def _backend(self, slowness: list[float], run: Run) -> Backend:
        if self._wall:
            return EngineRun(run)
        clocks: list[SteadyClock] = []

        def load(options: RunnerOptions) -> ModelRunner:
            memory = run.config.replica.memory
            assert memory.num_blocks is not None
            runner = load_runner(Reference.room(options))
            runner.allocate(memory.num_blocks + Reference.num_blocks(options), memory.host_blocks)
            reference = Reference(runner, options, memory.num_blocks)
            bench = Bench(runner, options.block_size, memory.num_blocks)
            for batch in WARM:
                bench.time_s(batch)
            reference.frees(bench)
            clock = SteadyClock(reference.time_s, self._typical_s)
            clock.slowness = slowness
            clocks.append(clock)
            return SteadyRunner(runner, clock)

        return EngineRun(run, load=load, make_clock=lambda: clocks[0].start())


def compare(folder: Path, model: Path, load_name: str, options: argparse.Namespace) -> Iterator[Compared]:
    """Run and simulate every combination; runs that are there are not repeated, simulations are."""
    engines = Engines(model, options.wall)
    runs: dict[str, list[tuple[RunData, float]]] = {policy: [] for policy in POLICIES}
    for turn in range(options.rounds):
        for policy, found in runs.items():
            config = experiment(model, load_name, policy)
            name = f"{config.name}-{'wall' if options.wall else 'steady'}-{turn}"
            found.append(engines.run(config, folder / "runs" / name))
    for policy, found in runs.items():
        first = found[0][0]
        yield Compared(
            load_name,
            policy,
            [figures(run) for run, _ in found],
            figures(validate(first, experiment(model, load_name, policy)).simulated),
            sum(first.requests().column("num_preemptions").to_pylist()),
            [slowness for _, slowness in found],
        )


def figures(run: RunData) -> Figures:
    """What is compared."""
    assert run.summary is not None
    keys = [(metric, quantile) for metric in METRICS for quantile in QUANTILES]
    return {key: float(run.summary.value(f"overall.{key[0]}.{key[1]}")) for key in keys}


@dataclass(frozen=True, slots=True)
class Pair:
    """Two policies that every run of the engine orders alike, by one number; `apart` of one another at the median (relative)."""

    first: str
    second: str
    apart: float
    is_kept: bool
    """Whether the simulation orders them so too."""


def ordered(compared: Sequence[Compared], key: tuple[str, str]) -> Iterator[Pair]:
    """The pairs of policies that the engine puts in an order; between others it does not decide."""
    for one, other in combinations(compared, 2):
        signs = {first[key] < second[key] for first, second in zip(one.runs, other.runs, strict=True)}
        if len(signs) == 1:
            apart = abs(one.measured[key] / other.measured[key] - 1.0)
            yield Pair(one.policy, other.policy, apart, (one.simulated[key] < other.simulated[key]) in signs)


# What is shown and kept


def show(compared: Sequence[Compared]) -> bool:
    """Print the tables; whether every error is within the tolerance."""
    keys = [(metric, quantile) for metric in METRICS for quantile in QUANTILES]
    heads = [f"{metric.removesuffix('_s').upper()} {quantile}" for metric, quantile in keys]
    print(
        "Each cell: measured (median of the runs), error of the simulation, (farthest run of the engine from the median)"
    )
    print("".join(["workload policies            preempted  pace", *(f"{head:>27}" for head in heads)]))
    within = True
    for one in compared:
        cells = []
        for key in keys:
            within &= abs(one.error(key)) <= TOLERANCE
            cells.append(f"{one.measured[key] * 1e3:.1f} ms {one.error(key):+.1%} ({one.noise(key):+.1%})".rjust(27))
        pace = "" if None in one.slowness else f"{median(one.slowness):.2f}"
        print(f"{one.load:8} {one.policy:20} {one.num_preemptions:8} {pace:>6}" + "".join(cells))
    for load in LOADS:
        chosen = [one for one in compared if one.load == load]
        pairs = {head: list(ordered(chosen, key)) for key, head in zip(keys, heads, strict=True)}
        num_kept = sum(pair.is_kept for found in pairs.values() for pair in found)
        print(
            f"{load}: {num_kept} of the {sum(map(len, pairs.values()))} orders that every run of the engine shows are kept"
        )
        for head, found in pairs.items():
            for pair in found:
                if not pair.is_kept:
                    print(
                        f"  {head}: {pair.first} and {pair.second} are swapped ({pair.apart:.1%} apart on the engine)"
                    )
    return within


def write(file: Path, model: Path, compared: Sequence[Compared], wall: bool) -> None:
    """All figures, as JSON."""
    profile = read_profile(model / "profile.json")

    def named(values: Figures) -> dict[str, float]:
        return {f"{metric}.{quantile}": value for (metric, quantile), value in values.items()}

    rows = [
        {
            "workload": one.load,
            "policies": one.policy,
            "measured_s": [named(run) for run in one.runs],
            "simulated_s": named(one.simulated),
            "num_preemptions": one.num_preemptions,
            "slowness": one.slowness,
        }
        for one in compared
    ]
    data = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "clock": "wall" if wall else "steady",
        "profile": {"facts": dict(profile.facts), "errors": profile.errors},
        "rows": rows,
    }
    file.write_text(json.dumps(data, indent=1) + "\n")


def main() -> int:
    """Measure, simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where model, profile and runs are kept")
    parser.add_argument("--size", default="10m", help="of the model: 1m, 10m or 30m")
    parser.add_argument("--only", choices=("profile", *LOADS), action="append", help="this phase alone")
    parser.add_argument("--passes", type=int, default=5, help="measurements of each shape in the profile")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each combination on the engine")
    parser.add_argument("--wall", action="store_true", help="the engine keeps the wall's time")
    parser.add_argument("--profile-anew", action="store_true", help="measure the profile again")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.profile_anew:
        (options.folder / "model" / "profile.json").unlink(missing_ok=True)
        shutil.rmtree(options.folder / "runs", ignore_errors=True)
    model = prepare(options.folder, options.size, options.passes)
    loads = [name for name in LOADS if not options.only or name in options.only]
    compared = [one for name in loads for one in compare(options.folder, model, name, options)]
    if not compared:
        return 0
    within = show(compared)
    if not options.only:
        write(options.folder / "prediction.json", model, compared, options.wall)
        print(f"written: {options.folder / 'prediction.json'}")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
