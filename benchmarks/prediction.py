"""How far is the simulator from the engine on this machine, after `vajra profile`?

`python benchmarks/prediction.py DIR` writes a model of about 10 M parameters to DIR, profiles it, runs every combination of
policies on every workload on the engine, simulates the same requests with the profile, and prints the errors of TTFT, TBT and
E2E, and how both order the policies. What is in DIR already is not measured again, so the phases can be run one by one
(`--only profile`, `--only light`, …). Before and after each run of the engine the profile's reference batch is timed: of several
runs the one counts during which the machine was most nearly as fast as while it was profiled. How far the others lie from it
shows what the machine adds by itself. DIR/prediction.json gets all figures.
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
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from vajra_py import __version__
from vajra_py.config import ExperimentConfig, config_from_mapping
from vajra_py.engine.compute import load_runner
from vajra_py.engine.tiny import write_tiny_model
from vajra_py.experiment.profiling import Bench, ProfileSettings, profile_config, profile_model
from vajra_py.experiment.run import run_experiment
from vajra_py.experiment.validation import METRICS, validate
from vajra_py.latency import read_profile
from vajra_py.metrics.run_data import RunData

QUANTILES = ("p50", "p90")
TOLERANCE = 0.10
_REFERENCES = 9
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


@dataclass(frozen=True, slots=True)
class Load:
    """One workload: requests a second, how many in all, and the KV blocks that they share."""

    rate: float
    num_requests: int
    num_blocks: int


LOADS = {
    "light": Load(rate=4.0, num_requests=25, num_blocks=600),
    "heavy": Load(rate=14.0, num_requests=60, num_blocks=600),
    "starved": Load(rate=8.0, num_requests=36, num_blocks=80),
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


@dataclass(frozen=True, slots=True)
class Compared:
    """Seconds by (metric, quantile) of one combination on one workload: every run of the engine (best first), simulated."""

    load: str
    policy: str
    runs: Sequence[Mapping[tuple[str, str], float]]
    simulated: Mapping[tuple[str, str], float]
    num_preemptions: int
    slowness: Sequence[float]
    """What the reference batch took about each run, as a multiple of what it took in the profile."""

    @property
    def measured(self) -> Mapping[tuple[str, str], float]:
        """The run on the least disturbed machine."""
        return self.runs[0]

    def error(self, key: tuple[str, str]) -> float:
        """Simulated over measured, less 1."""
        return self.simulated[key] / self.measured[key] - 1.0

    def noise(self, key: tuple[str, str]) -> float:
        """The run that is farthest from the one that counts, over that one, less 1."""
        return max((run[key] / self.measured[key] - 1.0 for run in self.runs), key=abs)


class Machine:
    """How fast is the machine now, against when the profile was made?"""

    def __init__(self, model: Path) -> None:
        made = profile_config(model, {"replica": REPLICA, "backend": {"engine": ENGINE}})
        options = made.backend.settings.runner_options(made.replica, ENGINE["num_threads"])
        runner = load_runner(options)
        runner.allocate(64)
        self._bench = Bench(runner, options, 64)
        self._best_s = float(read_profile(model / "profile.json").facts["reference_s"])

    def slowness(self) -> float:
        """Time of the reference batch as a multiple of what it took at its best in the profile."""
        return median(self._bench.reference_s() for _ in range(_REFERENCES)) / self._best_s


def compare(folder: Path, model: Path, load_name: str, rounds: int) -> Iterator[Compared]:
    """Run and simulate every combination; runs that are there are not repeated, simulations are."""
    machine = Machine(model)
    runs: dict[str, list[tuple[float, RunData]]] = {policy: [] for policy in POLICIES}
    for turn in range(rounds):
        for policy, found in runs.items():
            config = experiment(model, load_name, policy)
            found.append(run_noted(config, folder / "runs" / f"{config.name}-{turn}", machine))
    for policy, found in runs.items():
        found.sort(key=lambda one: abs(one[0] - 1.0))
        best = found[0][1]
        yield Compared(
            load_name,
            policy,
            [figures(run) for _, run in found],
            figures(validate(best, experiment(model, load_name, policy)).simulated),
            sum(best.requests().column("num_preemptions").to_pylist()),
            [slowness for slowness, _ in found],
        )


def run_noted(config: ExperimentConfig, folder: Path, machine: Machine) -> tuple[float, RunData]:
    """How slow the machine was about the run of a folder, and the run; made where it is not there."""
    note = folder / "slowness.json"
    if not note.exists():
        before = machine.slowness()
        run_experiment(config, folder=folder, overwrite=True)
        after = machine.slowness()
        note.write_text(json.dumps(max(before, after, key=lambda one: abs(one - 1.0))))
    return float(json.loads(note.read_text())), RunData.load(folder)


def figures(run: RunData) -> dict[tuple[str, str], float]:
    """What is compared."""
    assert run.summary is not None
    keys = [(metric, quantile) for metric in METRICS for quantile in QUANTILES]
    return {key: float(run.summary.value(f"overall.{key[0]}.{key[1]}")) for key in keys}


def swapped(compared: Sequence[Compared], key: tuple[str, str]) -> list[tuple[str, str, float]]:
    """Pairs of policies that the simulation orders the other way, and how far apart the engine has them (relative)."""
    found = []
    for one, other in combinations(compared, 2):
        measured = one.measured[key] / other.measured[key] - 1.0
        if measured * (one.simulated[key] / other.simulated[key] - 1.0) < 0:
            found.append((one.policy, other.policy, abs(measured)))
    return found


# What is shown and kept


def show(compared: Sequence[Compared]) -> bool:
    """Print the tables; whether every error is within the tolerance."""
    keys = [(metric, quantile) for metric in METRICS for quantile in QUANTILES]
    heads = [f"{metric.removesuffix('_s').upper()} {quantile}" for metric, quantile in keys]
    print("Each cell: measured, error of the simulation, (farthest other run of the engine against it)")
    print("".join(["workload policies            preempted  speed", *(f"{head:>27}" for head in heads)]))
    within = True
    for one in compared:
        cells = []
        for key in keys:
            within &= abs(one.error(key)) <= TOLERANCE
            cells.append(f"{one.measured[key] * 1e3:.1f} ms {one.error(key):+.1%} ({one.noise(key):+.1%})".rjust(27))
        print(f"{one.load:8} {one.policy:20} {one.num_preemptions:8} {one.slowness[0]:6.2f}" + "".join(cells))
    for load in LOADS:
        chosen = [one for one in compared if one.load == load]
        for key, head in zip(keys, heads, strict=True):
            for first, second, apart in swapped(chosen, key):
                print(f"{load}, {head}: {first} and {second} are swapped ({apart:.1%} apart on the engine)")
    return within


def write(file: Path, model: Path, compared: Sequence[Compared]) -> None:
    """All figures, as JSON."""
    profile = read_profile(model / "profile.json")

    def named(values: Mapping[tuple[str, str], float] | None) -> dict[str, float] | None:
        return (
            None if values is None else {f"{metric}.{quantile}": value for (metric, quantile), value in values.items()}
        )

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
    parser.add_argument("--profile-anew", action="store_true", help="measure the profile again")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.profile_anew:
        (options.folder / "model" / "profile.json").unlink(missing_ok=True)
        shutil.rmtree(options.folder / "runs", ignore_errors=True)
    model = prepare(options.folder, options.size, options.passes)
    loads = [name for name in LOADS if not options.only or name in options.only]
    compared = [one for name in loads for one in compare(options.folder, model, name, options.rounds)]
    if not compared:
        return 0
    within = show(compared)
    if not options.only:
        write(options.folder / "prediction.json", model, compared)
        print(f"written: {options.folder / 'prediction.json'}")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
