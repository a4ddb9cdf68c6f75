"""Measure how far the simulator is from the engine, or from a vLLM, on this machine after `vajra profile`.

`python benchmarks/prediction.py DIR` writes a tiny model to DIR, profiles it, runs every combination of
policies on every workload on the engine, simulates the same requests with the profile, and prints the errors of TTFT, TBT and
E2E, and how both order the policies. `--backend vllm`, in an environment that has vLLM, computes with that. The engine keeps the
time of a machine of steady pace (`steady.py`): a reference batch after each step shows how fast the machine is, and
its pace is taken out of the times; on a clock on the wall (`--wall`), two equal runs on a shared machine differ by more than what is
looked for. One model is loaded for everything that a process measures.

A machine that others use too is not the same after ten minutes, and not all steps slow down alike. So the profile that the
simulation is made with is measured in turns with the runs, some of its shapes before each; the step times that the engine's policies
get come from a short profile made beforehand, in the simulation too. Of several runs the median counts, and of several simulations, whose steps vary differently; how far the runs lie apart is shown; a run beside
other work is repeated. What is in DIR already is not measured again: a comparison that was
broken off resumes, and when all is there, it is only simulated anew. DIR/prediction.json gets all figures, DIR/prediction.md the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import combinations, product
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from loaded_once import LoadedOnce
from machine import processor
from steady import NormalizedClock, SteadyRunner

from vajra_py import __version__
from vajra_py.config import ExperimentConfig, TypedChoice, config_from_mapping
from vajra_py.engine.clock import WallClock
from vajra_py.engine.compute import ModelRunner, RunnerOptions
from vajra_py.engine.tiny import write_tiny_model
from vajra_py.experiment.measured.validation import Assumed, simulate_as_served
from vajra_py.experiment.profiling.bench import Batch, Bench, Reference
from vajra_py.experiment.profiling.other_load import OtherLoad
from vajra_py.experiment.profiling.profile import ProfileSettings, profile_config, profile_model
from vajra_py.experiment.runs.backend import Backend, Run
from vajra_py.experiment.runs.engined import EngineRun
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.latency import read_profile
from vajra_py.metrics.runs.run_data import RunData

FIRST_PROFILE, PROFILE = "first-profile.json", "profile.json"
FIRST_PASSES, SIMULATIONS = 3, 25
KEYS = [(metric, quantile) for metric in ("ttft_s", "tbt_s", "e2e_s") for quantile in ("p50", "p90")]
TOLERANCE = 0.10
_QUIET_CORES = 0.15
_MOST_TRIES = 10
_NOTE = "slowness.json"
REPLICA = {"max_batch_size": 24, "max_batch_tokens": 1024, "max_model_len": 640}
KV_TOKENS = REPLICA["max_batch_size"] * REPLICA["max_model_len"]
"""Room for every request of a batch at its longest: what is loaded, and what a profile measures with."""
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
    """One workload: requests a second, how many in all, and the tokens for whose KV there is room."""

    rate: float
    num_requests: int
    kv_tokens: int


LOADS = {
    "light": Load(rate=1.5, num_requests=40, kv_tokens=9600),
    "heavy": Load(rate=14.0, num_requests=120, kv_tokens=9600),
    "starved": Load(rate=8.0, num_requests=120, kv_tokens=1280),
}


@dataclass(frozen=True, slots=True)
class Computing:
    """A backend: its section of `backend`, a model size that it has kernels for, and its KV block size."""

    kind: str
    section: Mapping[str, Any]
    size: str
    block_size: int
    rates: Mapping[str, float] = field(default_factory=dict)
    """Requests a second of workloads where they are others than usual, so that no percentile lies between two kinds of
    steps."""

    def memory(self, kv_tokens: int) -> dict[str, Any]:
        """Settings of a KV memory."""
        return {"block_size": self.block_size, "num_blocks": kv_tokens // self.block_size}


BACKENDS = {
    "engine": Computing("engine", {"num_threads": 1}, "10m", 16),
    "vllm": Computing("vllm", {"num_threads": 1, "engine_args": {"enforce_eager": True}}, "30m", 32, {"light": 2.0}),
}
VLLM_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""One thread, wherever the machine has room for it."""


def experiment(computing: Computing, model: Path, load_name: str, policy: str) -> ExperimentConfig:
    """One policy combination on one workload, on the engine."""
    load = LOADS[load_name]
    memory = {**computing.memory(load.kv_tokens), "reservation": "incremental", "watermark_fraction": 0.01}
    return config_from_mapping(
        {
            "version": 1,
            "seed": 3,
            "name": f"{load_name}-{list(POLICIES).index(policy)}",
            "scheduling": {"replicaset_scheduler": "round_robin", **POLICIES[policy]},
            "replica": {**REPLICA, "memory": memory},
            "workload": {
                "type": "synthetic",
                "arrivals": {"type": "poisson", "rate": computing.rates.get(load_name, load.rate)},
                "num_requests": load.num_requests,
                "prompt_tokens": {"type": "uniform", "min": 16, "max": 384},
                "output_tokens": {"type": "uniform", "min": 8, "max": 96},
            },
            "backend": {
                computing.kind: {
                    "model": str(model),
                    **computing.section,
                    "latency": {"type": "profiled", "path": str(model / FIRST_PROFILE)},
                }
            },
        }
    )


class _Enough(Exception):
    """Ends a profile's measurement at the part that is due."""


class Profiles:
    """The model and its two profiles: a short one first, for the policies, and one in turns with the runs."""

    def __init__(self, folder: Path, computing: Computing, passes: int, wall: bool) -> None:
        self.model = folder / "model"
        if not self.model.exists():
            write_tiny_model(self.model, size=computing.size)
        replica = {**REPLICA, "memory": computing.memory(KV_TOKENS)}
        self._config = profile_config(self.model, {"replica": replica, "backend": {computing.kind: computing.section}})
        self.runner = LoadedOnce(KV_TOKENS)
        self._load = self.runner.loader(self._config)
        if not (self.model / FIRST_PROFILE).exists():
            settings = ProfileSettings(self._config, FIRST_PASSES)
            profile_model(settings, self.model / FIRST_PROFILE, load=self._load)
        self.reference_s = float(read_profile(self.model / FIRST_PROFILE).facts["reference_s"])
        """Duration of the reference computation at the profile's pace, for profile and runs."""
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
            profile = profile_model(self._settings, self.file, report, self._load)
            print(f"profile: errors {json.dumps(profile.errors)}")


# Results of one workload


Figures: TypeAlias = Mapping[tuple[str, str], float]
"""Seconds by (metric, quantile)."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One combination on one workload: what every run of the engine measured, and the results of its simulations."""

    load: str
    policy: str
    runs: Sequence[Figures]
    simulations: Sequence[Figures]
    num_preemptions: int
    slowness: Sequence[float]
    """Slowdown of the machine in each run, relative to the profile."""

    @property
    def measured(self) -> Figures:
        """Return the median of the runs."""
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
    """Return the median of each number."""
    return {key: median(one[key] for one in found) for key in found[0]}


class Engines:
    """Runs experiments on the engine, on the wall's clock or on a steady one."""

    def __init__(self, runner: LoadedOnce, typical_s: float, wall: bool) -> None:
        self._runner = runner
        self._typical_s = typical_s
        self._wall = wall

    @staticmethod
    def is_there(folder: Path) -> bool:
        """Return True if the run is complete and valid."""
        return (folder / _NOTE).exists()

    def run(self, config: ExperimentConfig, folder: Path) -> None:
        """Execute the run of a folder, and record the machine's slowdown."""
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
            raise SystemExit(f"{folder.name}: the machine is never free of other work. Stop it, and run this again.")

    def _backend(self, slowness: list[float], run: Run) -> Backend:
        clocks: list[NormalizedClock] = []

        def load(options: RunnerOptions) -> ModelRunner:
            runner, num_blocks = self._runner.loader(run.config)(options), KV_TOKENS // options.block_size
            bench, reference = Bench(runner, options.block_size, num_blocks), Reference(runner, options, num_blocks)
            for batch in WARM:
                bench.time_s(batch)
            if self._wall:
                runner.close()  # restores the state at the start of a run
                return runner
            reference.frees(bench)
            clock = NormalizedClock(reference.time_s, self._typical_s)
            clock.slowness = slowness
            clocks.append(clock)
            return SteadyRunner(runner, clock)

        return EngineRun(run, load=load, make_clock=lambda: clocks[0].start() if clocks else WallClock())


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of the engine."""

    load: str
    policy: str
    folder: Path


def turns_of(folder: Path, options: argparse.Namespace) -> list[Turn]:
    """Return all runs, so that each combination is spread over the whole time."""
    kind = "wall" if options.wall else "steady"
    return [
        Turn(load, policy, folder / "runs" / f"{load}-{list(POLICIES).index(policy)}-{kind}-{turn}")
        for turn in range(options.rounds)
        for load in LOADS
        for policy in POLICIES
    ]


def measure(turns: Sequence[Turn], computing: Computing, profiles: Profiles, wall: bool) -> None:
    """Make the runs that are not there, and the profile between them."""
    engines = Engines(profiles.runner, profiles.reference_s, wall)
    missing = [turn for turn in turns if not engines.is_there(turn.folder)]
    for number, turn in enumerate(missing):
        profiles.go_on(len(missing) - number)
        print(f"run {number + 1} of {len(missing)}: {turn.folder.name}", file=sys.stderr)
        engines.run(experiment(computing, profiles.model, turn.load, turn.policy), turn.folder)
    profiles.go_on(0)


def compare(computing: Computing, load_name: str, policy: str, folders: Sequence[Path], profiles: Profiles) -> Compared:
    """Return the runs of one combination on one workload, and their simulations."""
    config = experiment(computing, profiles.model, load_name, policy)
    latency = TypedChoice.model_validate({"type": "profiled", "path": str(profiles.file)})
    runs = [RunData.load(folder) for folder in folders]
    simulated = [
        figures(simulate_as_served(runs[0], config, assumed=Assumed(latency, seed))) for seed in range(SIMULATIONS)
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
    """Return the figures to compare."""
    assert run.summary is not None
    return {key: float(run.summary.value(f"overall.{key[0]}.{key[1]}")) for key in KEYS}


@dataclass(frozen=True, slots=True)
class Pair:
    """Two policies that every run of the engine orders alike, by one number; `apart` of one another at the median (relative)."""

    first: str
    second: str
    apart: float
    is_kept: bool
    """True if the simulation gives the same order."""


def ordered(compared: Sequence[Compared], key: tuple[str, str]) -> Iterator[Pair]:
    """The pairs of policies that the engine puts in an order; between others it does not decide."""
    for one, other in combinations(compared, 2):
        signs = {first[key] < second[key] for first, second in zip(one.runs, other.runs, strict=True)}
        if len(signs) == 1:
            apart = abs(one.measured[key] / other.measured[key] - 1.0)
            yield Pair(one.policy, other.policy, apart, (one.simulated[key] < other.simulated[key]) in signs)


# Output


def tables(compared: Sequence[Compared]) -> list[str]:
    """Lines of Markdown: every number, and which orders of policies are kept."""
    heads = [f"{metric.removesuffix('_s').upper()} {quantile.upper()}" for metric, quantile in KEYS]
    lines = [
        "Each cell: measured (median of the runs), error of the simulation, (farthest run from the median).",
        "",
        f"| workload | policies | preempted | pace | {' | '.join(heads)} |",
        f"|---|---|--:|--:|{'--:|' * len(heads)}",
    ]
    for one in compared:
        cells = [f"{one.measured[key] * 1e3:.1f} ms {one.error(key):+.1%} ({one.noise(key):+.1%})" for key in KEYS]
        pace = "" if None in one.slowness else f"{median(one.slowness):.2f}"
        lines.append(f"| {one.load} | {one.policy} | {one.num_preemptions} | {pace} | {' | '.join(cells)} |")
    lines.append("")
    for load in LOADS:
        chosen = [one for one in compared if one.load == load]
        pairs = [(head, pair) for key, head in zip(KEYS, heads, strict=True) for pair in ordered(chosen, key)]
        swapped = [
            f"{head}: {pair.first} and {pair.second} ({pair.apart:.1%} apart)"
            for head, pair in pairs
            if not pair.is_kept
        ]
        kept = f"{len(pairs) - len(swapped)} of the {len(pairs)} orders that every run shows are kept"
        lines.append(f"- {load}: {'; swapped: '.join([kept, *swapped])}")
    errors = [abs(one.error(key)) for one in compared for key in KEYS]
    num_within = sum(error <= TOLERANCE for error in errors)
    lines.append(f"- {num_within} of {len(errors)} errors are within {TOLERANCE:.0%}, the largest is {max(errors):.1%}")
    return lines


def write(
    folder: Path, profiles: Profiles, compared: Sequence[Compared], printed: str, options: argparse.Namespace
) -> None:
    """Write all figures as JSON, and the printed tables with their provenance."""
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
    facts = profile.facts
    data = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "backend": facts["forward"],
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "clock": "wall" if options.wall else "steady",
        "rounds": options.rounds,
        "profile": {"facts": dict(facts), "errors": profile.errors},
        "rows": rows,
    }
    (folder / "prediction.json").write_text(json.dumps(data, indent=1) + "\n")
    told = [f"{name}: {data[name]}" for name in ("at", "backend", "machine", "clock", "rounds")]
    (folder / "prediction.md").write_text(f"{', '.join(told)}.\n\n{printed}\n")


def main() -> int:
    """Measure, simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where model, profile and runs are kept")
    parser.add_argument("--backend", choices=BACKENDS, default="engine", help="what computes")
    parser.add_argument("--passes", type=int, default=8, help="measurements of each shape in the profile")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each combination on the engine")
    parser.add_argument("--wall", action="store_true", help="the engine keeps the wall's time")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    computing = BACKENDS[options.backend]
    if computing.kind == "vllm":
        os.environ.update(VLLM_ENVIRONMENT)
    profiles = Profiles(options.folder, computing, options.passes, options.wall)
    turns = turns_of(options.folder, options)
    measure(turns, computing, profiles, options.wall)
    compared = [
        compare(
            computing, load, policy, [one.folder for one in turns if (one.load, one.policy) == (load, policy)], profiles
        )
        for load, policy in product(LOADS, POLICIES)
    ]
    printed = "\n".join(tables(compared))
    print(printed)
    write(options.folder, profiles, compared, printed, options)
    print(f"written: {options.folder / 'prediction.json'}, {options.folder / 'prediction.md'}")
    return 0 if all(abs(one.error(key)) <= TOLERANCE for one in compared for key in KEYS) else 1


if __name__ == "__main__":
    sys.exit(main())
