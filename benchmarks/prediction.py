"""How far is the simulator from the engine on this machine, after `vajra profile`?

`python benchmarks/prediction.py DIR` writes a model of about 10 M parameters to DIR, profiles it, runs every combination of
policies on every workload on the engine, simulates the same requests with the profile, and prints the errors of TTFT, TBT and
E2E, and how both order the policies. The engine keeps the time of a machine of steady pace
(`vajra_py.experiment.steady`): a reference batch after each step tells how fast the machine is, and its pace is taken out of
the times; on a clock on the wall (`--wall`), two equal runs on a shared machine differ by more than what is looked for.

A machine that others use too is not the same after ten minutes, and not all steps slow down alike. So the profile that the
simulation is made with is measured in turns with the runs, some of its shapes before each; what the engine's policies are told
that steps will take, they know from a short profile beforehand, and they are told the same in the simulation. Of several runs
the median counts, and of several simulations, whose steps vary differently; how far the runs lie apart is shown; a run beside
other work is repeated. What is in DIR already is not measured again: a broken-off comparison goes on, and when all is there, it is
only simulated anew. DIR/prediction.json gets all figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import combinations, product
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from vajra_py import __version__
from vajra_py.config import ExperimentConfig, TypedChoice, config_from_mapping
from vajra_py.engine.compute import ModelRunner, RunnerOptions, load_runner
from vajra_py.engine.tiny import write_tiny_model
from vajra_py.experiment.backend import Backend, Run
from vajra_py.experiment.bench import Batch, Bench, Reference
from vajra_py.experiment.engined import EngineRun
from vajra_py.experiment.other_load import OtherLoad
from vajra_py.experiment.profiling import ProfileSettings, profile_config, profile_model
from vajra_py.experiment.run import run_experiment
from vajra_py.experiment.steady import NormalizedClock, SteadyRunner
from vajra_py.experiment.validation import METRICS, Assumed, validate
from vajra_py.latency import read_profile
from vajra_py.metrics.run_data import RunData

FIRST_PROFILE, PROFILE = "first-profile.json", "profile.json"
FIRST_PASSES, SIMULATIONS = 3, 25
QUANTILES = ("p50", "p90")
TOLERANCE = 0.10
_QUIET_CORES = 0.15
_MOST_TRIES = 10
_NOTE = "slowness.json"
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
    "light": Load(rate=1.5, num_requests=40, num_blocks=600),
    "heavy": Load(rate=14.0, num_requests=120, num_blocks=600),
    "starved": Load(rate=8.0, num_requests=120, num_blocks=80),
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
                    "latency": {"type": "profiled", "path": str(model / FIRST_PROFILE)},
                }
            },
        }
    )


class _Enough(Exception):
    """So much of the profile is measured for now."""


class Profiles:
    """The model and its two profiles: a short one first, which policies are told, and one in turns with the runs."""

    def __init__(self, folder: Path, size: str, passes: int, wall: bool) -> None:
        self.model = folder / "model"
        if not self.model.exists():
            write_tiny_model(self.model, size=size)
        self._config = profile_config(self.model, {"replica": REPLICA, "backend": {"engine": ENGINE}})
        if not (self.model / FIRST_PROFILE).exists():
            profile_model(ProfileSettings(self._config, FIRST_PASSES), self.model / FIRST_PROFILE)
        self.reference_s = float(read_profile(self.model / FIRST_PROFILE).facts["reference_s"])
        """What the reference takes at the pace that counts, in the profile and in the runs."""
        paced = None if wall else self.reference_s
        self._settings = ProfileSettings(self._config, passes, seed=1, reference_s=paced)
        self.file = self.model / (("wall-" if wall else "steady-") + PROFILE)

    def go_on(self, turns_left: int) -> None:
        """Measure as much of the profile as is due when so many turns are left; with none left, all of it."""
        if self.file.exists():
            return
        first: list[int] = []

        def report(done: int, total: int) -> None:
            first.append(done)
            due = first[0] + (total - first[0]) // (turns_left + 1)
            if turns_left and done >= due:
                raise _Enough

        with suppress(_Enough):
            profile = profile_model(self._settings, self.file, report)
            print(f"profile: errors {json.dumps(profile.errors)}")


# One workload


Figures: TypeAlias = Mapping[tuple[str, str], float]
"""Seconds by (metric, quantile)."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One combination on one workload: what every run of the engine measured, and what simulations of it say."""

    load: str
    policy: str
    runs: Sequence[Figures]
    simulations: Sequence[Figures]
    num_preemptions: int
    slowness: Sequence[float]
    """How slow the machine was in each run, as a multiple of its pace in the profile."""

    @property
    def measured(self) -> Figures:
        """The median of the runs."""
        return medians(self.runs)

    @property
    def simulated(self) -> Figures:
        """The median of the simulations."""
        return medians(self.simulations)

    def error(self, key: tuple[str, str]) -> float:
        """Simulated over measured, less 1."""
        return self.simulated[key] / self.measured[key] - 1.0

    def noise(self, key: tuple[str, str]) -> float:
        """The run that is farthest from the median, over it, less 1."""
        return max((run[key] / self.measured[key] - 1.0 for run in self.runs), key=abs)


def medians(found: Sequence[Figures]) -> Figures:
    """Of each number."""
    return {key: median(one[key] for one in found) for key in found[0]}


class Engines:
    """Runs experiments on the engine, on the wall's clock or on a steady one."""

    def __init__(self, typical_s: float, wall: bool) -> None:
        self._typical_s = typical_s
        self._wall = wall

    @staticmethod
    def is_there(folder: Path) -> bool:
        """Whether the run was made and counts."""
        return (folder / _NOTE).exists()

    def run(self, config: ExperimentConfig, folder: Path) -> None:
        """Make the run of a folder, with a note of how slow the machine was."""
        note = folder / _NOTE
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

    def _backend(self, slowness: list[float], run: Run) -> Backend:
        if self._wall:
            return EngineRun(run)
        clocks: list[NormalizedClock] = []

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
            clock = NormalizedClock(reference.time_s, self._typical_s)
            clock.slowness = slowness
            clocks.append(clock)
            return SteadyRunner(runner, clock)

        return EngineRun(run, load=load, make_clock=lambda: clocks[0].start())


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of the engine."""

    load: str
    policy: str
    folder: Path


def turns_of(folder: Path, options: argparse.Namespace) -> list[Turn]:
    """All runs, so that each combination is spread over the whole time."""
    kind = "wall" if options.wall else "steady"
    return [
        Turn(load, policy, folder / "runs" / f"{load}-{list(POLICIES).index(policy)}-{kind}-{turn}")
        for turn in range(options.rounds)
        for load in LOADS
        for policy in POLICIES
    ]


def measure(turns: Sequence[Turn], profiles: Profiles, wall: bool) -> None:
    """Make the runs that are not there, and the profile between them."""
    engines = Engines(profiles.reference_s, wall)
    missing = [turn for turn in turns if not engines.is_there(turn.folder)]
    for number, turn in enumerate(missing):
        profiles.go_on(len(missing) - number)
        print(f"run {number + 1} of {len(missing)}: {turn.folder.name}", file=sys.stderr)
        engines.run(experiment(profiles.model, turn.load, turn.policy), turn.folder)
    profiles.go_on(0)


def compare(load_name: str, policy: str, folders: Sequence[Path], profiles: Profiles) -> Compared:
    """The runs of one combination on one workload, and their simulations."""
    config = experiment(profiles.model, load_name, policy)
    latency = TypedChoice.model_validate({"type": "profiled", "path": str(profiles.file)})
    runs = [RunData.load(folder) for folder in folders]
    simulated = [
        figures(validate(runs[0], config, assumed=Assumed(latency, seed)).simulated) for seed in range(SIMULATIONS)
    ]
    return Compared(
        load_name,
        policy,
        [figures(run) for run in runs],
        simulated,
        sum(runs[0].requests().column("num_preemptions").to_pylist()),
        [json.loads((folder / _NOTE).read_text()) for folder in folders],
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


def write(file: Path, profiles: Profiles, compared: Sequence[Compared], wall: bool) -> None:
    """All figures, as JSON."""
    profile = read_profile(profiles.file)

    def named(values: Figures) -> dict[str, float]:
        return {f"{metric}.{quantile}": value for (metric, quantile), value in values.items()}

    rows = [
        {
            "workload": one.load,
            "policies": one.policy,
            "measured_s": [named(run) for run in one.runs],
            "simulated_s": [named(run) for run in one.simulations],
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
    parser.add_argument("--passes", type=int, default=8, help="measurements of each shape in the profile")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each combination on the engine")
    parser.add_argument("--wall", action="store_true", help="the engine keeps the wall's time")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    profiles = Profiles(options.folder, options.size, options.passes, options.wall)
    turns = turns_of(options.folder, options)
    measure(turns, profiles, options.wall)
    compared = [
        compare(load, policy, [one.folder for one in turns if (one.load, one.policy) == (load, policy)], profiles)
        for load, policy in product(LOADS, POLICIES)
    ]
    within = show(compared)
    write(options.folder / "prediction.json", profiles, compared, options.wall)
    print(f"written: {options.folder / 'prediction.json'}")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
