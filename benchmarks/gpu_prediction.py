"""Measure how far the simulator is from the engine on this GPU, after a profile that `vajra profile` would make.

Makes a model of random weights, profiles its steps, serves Poisson workloads under several policies on the wall's clock, with
captured graphs and look-ahead, and simulates the same requests with the profile. The loads are shares of what the profile
reports that the model can serve. Beside the errors of latencies are those of the profile on each run's own steps.

Writes one JSON file after each part, so that a broken-off measurement keeps what it had; model, profile and runs lie in the
folder `NAME-files` beside it, with which `--again` simulates without a device. Exit code 0, 1 where a run failed, 2 when there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from math import inf
from pathlib import Path
from typing import Any

from gpu_facts import machine, output_arguments, require_gpu, use_checkout, write_results

use_checkout()

from gpu_engine import LLAMA_8B, QWEN3_600M, Shape, write_model  # noqa: E402
from loaded_once import LoadedOnce  # noqa: E402
from machine import processor  # noqa: E402

from vajra_py import __version__  # noqa: E402
from vajra_py.config import ExperimentConfig, SystemConfig, config_from_mapping  # noqa: E402
from vajra_py.contract import BatchFeatures  # noqa: E402
from vajra_py.experiment.measured.accuracy import Accuracy  # noqa: E402
from vajra_py.experiment.measured.validation import validate  # noqa: E402
from vajra_py.experiment.profiling.profile import ProfileSettings, profile_config, profile_model  # noqa: E402
from vajra_py.experiment.runs.engined import EngineRun  # noqa: E402
from vajra_py.experiment.runs.run import run_experiment  # noqa: E402
from vajra_py.latency.models.fitting import Measured, errors_of  # noqa: E402
from vajra_py.latency.models.profiled import Profile, read_profile  # noqa: E402
from vajra_py.metrics.runs.run_data import RunData  # noqa: E402

PASSES, NUM_RANDOM = 3, 20
LOADS = {"heavy": 1.0, "moderate": 0.5}
"""Requests a second as a share of `Expected.requests_per_s`, which is a little less than what whole batches reach."""
FEWEST_REQUESTS = 8
NAMES = tuple(f"{metric}_{which}_ms" for metric in ("ttft", "tbt", "tpot", "e2e") for which in ("mean", "p50", "p90"))
METRICS = (*NAMES, "output_tokens_per_s")
KINDS = ("decode", "prefill", "mixed")
APART = 0.05
"""Relative difference of two runs from which on they order their policies: less may be chance."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A model, the sizes of its replica, and lengths of prompts and outputs (least, most)."""

    shape: Shape
    prompt: tuple[int, int]
    output: tuple[int, int]
    max_batch_size: int
    max_batch_tokens: int
    chunk_size: int
    block_size: int = 64
    dtype: str = "bfloat16"

    @property
    def max_model_len(self) -> int:
        """Length of the longest request."""
        return self.prompt[1] + self.output[1]

    @property
    def kv_tokens(self) -> int:
        """Room for a whole batch of the longest requests, so that memory decides nothing."""
        return self.max_batch_size * -(-self.max_model_len // self.block_size) * self.block_size

    @property
    def replica(self) -> dict[str, Any]:
        """Settings of the replica."""
        return {
            "max_batch_size": self.max_batch_size,
            "max_batch_tokens": self.max_batch_tokens,
            "max_model_len": self.max_model_len,
            "memory": {"block_size": self.block_size, "num_blocks": self.kv_tokens // self.block_size},
        }


SETUPS = {
    "8b": Setup(LLAMA_8B, (128, 2048), (32, 256), 128, 2048, 512),
    "small": Setup(QWEN3_600M, (128, 2048), (32, 256), 128, 2048, 512),
    "tiny": Setup(Shape("llama", 64, 128, 2, 512, 4, 2, 16), (8, 48), (4, 12), 4, 64, 16, 16, "float32"),
}


@dataclass(frozen=True, slots=True)
class Combination:
    """Policies of a run, by name, and whether its decodes begin ahead."""

    name: str
    scheduling: Mapping[str, Any]
    look_ahead: bool = True


@dataclass(frozen=True, slots=True)
class Expected:
    """Rate and step time of a setup's workload by the profile.

    Attributes:
        requests_per_s: when prompts are computed one by one, and decodes with half the largest batch.
        target_s: of a step that decodes half the largest batch, and computes one chunk.
    """

    requests_per_s: float
    target_s: float

    @classmethod
    def of(cls, setup: Setup, profile: Profile) -> Expected:
        """Compute it from the means of the lengths."""
        prompt, output = sum(setup.prompt) // 2, sum(setup.output) // 2
        rows = setup.max_batch_size // 2
        decodes = BatchFeatures().with_decodes(rows, rows * (prompt + output // 2))
        prompt_s = profile.fit.time_s(BatchFeatures().with_chunk(prompt, 0))
        request_s = prompt_s + output * profile.fit.time_s(decodes) / rows
        return cls(1.0 / request_s, profile.fit.time_s(decodes.with_chunk(setup.chunk_size, 0)))


def combinations_of(setup: Setup, expected: Expected) -> list[Combination]:
    """The policies; the last one is the first without look-ahead, for what that is worth."""

    def scheduling(prioritizer: str, policy: str, **params: Any) -> dict[str, Any]:
        replica_scheduler = {"policy": policy, "params": params}
        return {
            "replicaset_scheduler": "round_robin",
            "request_prioritizer": prioritizer,
            "replica_scheduler": replica_scheduler,
        }

    v1 = scheduling("fcfs", "vllm_v1")
    return [
        Combination("fcfs, vllm_v1", v1),
        Combination("fcfs, fixed_chunk", scheduling("fcfs", "fixed_chunk", chunk_size=setup.chunk_size)),
        Combination(
            "lrs, dynamic_chunk", scheduling("lrs", "dynamic_chunk", target_batch_time_s=round(expected.target_s, 4))
        ),
        Combination("fcfs, vllm_v1, no look-ahead", v1, look_ahead=False),
    ]


class Prediction:
    """One model on one device: its profile, its runs and their simulations, below one folder."""

    def __init__(self, setup: Setup, device: str, folder: Path, again: bool = False) -> None:
        self._setup = setup
        self._folder = folder
        self._again = again
        self.model, self.profile_file = folder / "model", folder / "profile.json"
        self._engine = {
            "device": device,
            "dtype": setup.dtype,
            "random_weights": True,
            "self_check": False,
            "num_threads": 1 if device == "cpu" else None,
        }
        self._runner = LoadedOnce(setup.kv_tokens)

    def load(self) -> None:
        """Make the model, load it and capture its graphs."""
        shutil.rmtree(self._folder, ignore_errors=True)  # of an earlier measurement
        self.model.mkdir(parents=True)
        write_model(str(self.model), self._setup.shape, self._setup.max_model_len)
        config = self._profile_config()
        engine = config.backend.settings
        options = engine.runner_options(config.replica, 1, engine.num_threads)
        self._runner.loader(config)(options)

    def profile(self, passes: int, num_random: int) -> Profile:
        """Measure and fit step times."""
        config, started, told = self._profile_config(), time.perf_counter(), [0]

        def report(done: int, total: int) -> None:
            if done * 10 // total > told[0]:
                told[0] = done * 10 // total
                print(f"profile: {done} of {total} in {time.perf_counter() - started:.0f} s", file=sys.stderr)

        settings = ProfileSettings(config, passes, num_random)
        return profile_model(settings, self.profile_file, report, self._runner.loader(config))

    def can_run(self, name: str) -> bool:
        """Return False if the run is to be there already and is not."""
        return not self._again or (self._folder / "runs" / name).exists()

    def run(self, name: str, combination: Combination, rate: float, num_requests: int) -> tuple[RunData, Accuracy]:
        """Serve on the engine, unless the run is there already; returns the run and the errors of its simulation."""
        config = self._experiment(name, combination, rate, num_requests)
        folder = self._folder / "runs" / name
        if self._again:
            served = RunData.load(folder)
        else:
            load = self._runner.loader(config)
            served = run_experiment(
                config, folder=folder, overwrite=True, backend=lambda run: EngineRun(run, load=load)
            )
        return served, validate(served, config)

    def _profile_config(self) -> SystemConfig:
        return profile_config(self.model, {"replica": self._setup.replica, "backend": {"engine": self._engine}})

    def _experiment(self, name: str, combination: Combination, rate: float, num_requests: int) -> ExperimentConfig:
        setup = self._setup
        lengths = {
            f"{what}_tokens": {"type": "uniform", "min": least, "max": most}
            for what, (least, most) in (("prompt", setup.prompt), ("output", setup.output))
        }
        engine = {
            **self._engine,
            "model": str(self.model),
            "look_ahead": combination.look_ahead,
            "latency": {"type": "profiled", "path": str(self.profile_file)},
        }
        arrivals = {"type": "poisson", "rate": rate}
        return config_from_mapping(
            {
                "version": 1,
                "seed": 3,
                "name": name,
                "scheduling": combination.scheduling,
                "replica": setup.replica,
                "workload": {"type": "synthetic", "arrivals": arrivals, "num_requests": num_requests, **lengths},
                "backend": {"engine": engine},
            }
        )


# Results


def compared(served: RunData, accuracy: Accuracy, profile: Profile) -> dict[str, Any]:
    """Figures of one run."""
    engine = served.manifest["engine"]
    return {
        "errors": {
            one.name: {"measured": one.measured, "simulated": one.simulated, "error": one.relative}
            for one in accuracy.errors
        },
        "series": {one.name: one.relative for one in accuracy.series},
        "steps": step_errors(list(measured_steps(served)), profile),
        "engine": {name: value for name, value in engine.items() if isinstance(value, int | float)},
    }


def measured_steps(served: RunData) -> Iterator[Measured]:
    """The steps of a run with the time from forming each to taking in its tokens."""
    table = served.requests("request_id", "num_prompt_tokens")
    prompts = dict(zip(*(table.column(name).to_pylist() for name in table.column_names), strict=True))
    for step in served.decisions():
        features = BatchFeatures()
        for request_id, num_tokens, before, _ in step["chunks"]:
            if before >= prompts[request_id]:
                features = features.with_decodes(1, before)
            else:
                features = features.with_chunk(num_tokens, before)
        yield Measured(features, step["ended_at"] - step["formed_at"])


def step_errors(steps: Sequence[Measured], profile: Profile) -> dict[str, dict[str, float]]:
    """Errors of the profile on a run's own steps, by kind; `total` is that of the sum of their times."""
    found = errors_of(profile.fit.time_s, steps)
    for kind, errors in found.items():
        chosen = [one for one in steps if kind in ("all", one.kind)]
        measured_s = sum(one.time_s for one in chosen)
        errors["measured_s"] = measured_s
        errors["total"] = sum(profile.fit.time_s(one.features) for one in chosen) / measured_s - 1.0
        errors["num_steps"] = errors.pop("num_shapes")
    return found


def orders(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Pairs of policies that are apart under one load, by each metric: the second over the first, less 1, measured and simulated."""
    found = []
    done = [row for row in rows if "errors" in row and row["look_ahead"]]
    for one, other in combinations(done, 2):
        shared = set(one["errors"]) & set(other["errors"]) if one["load"] == other["load"] else ()
        for name in (metric for metric in METRICS if metric in shared):
            measured, simulated = (
                other["errors"][name][kind] / one["errors"][name][kind] - 1.0 for kind in ("measured", "simulated")
            )
            if abs(measured) >= APART:
                pair = {"load": one["load"], "policies": [one["policy"], other["policy"]], "metric": name}
                kept = (measured > 0) == (simulated > 0)
                found.append(pair | {"measured": measured, "simulated": simulated, "kept": kept})
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Measured values (latencies in milliseconds) with the simulation's errors, a line for each run; then the orders of policies."""
    heads = [*(f"{kind} steps" for kind in KINDS), *(name.removesuffix("_ms").replace("_", " ") for name in METRICS)]
    lines = [f"| load | policies | {' | '.join(heads)} |", f"|---|---|{'--:|' * len(heads)}"]
    for row in rows:
        errors, steps = row.get("errors", {}), row.get("steps", {})
        cells = [f"{steps[kind]['total']:+.1%}" if kind in steps else "" for kind in KINDS]
        measured = [errors.get(name) for name in METRICS]
        cells += ["" if one is None else f"{one['measured']:.1f} {one['error']:+.1%}" for one in measured]
        if not errors:
            cells[0] = "failed" if "failed" in row else row["left_out"]
        lines.append(f"| {row['load']} | {row['policy']} | {' | '.join(cells)} |")
    pairs = orders(rows)
    lines.append(f"\n{sum(one['kept'] for one in pairs)} of {len(pairs)} orders of policies are kept; others:")
    lines += [
        f"- {one['load']}, {one['metric']}: {one['policies'][1]} over {one['policies'][0]} {one['measured']:+.1%}, "
        f"simulated {one['simulated']:+.1%}"
        for one in pairs
        if not one["kept"]
    ]
    return "\n".join(lines)


# Program


class Report:
    """The JSON file, written after each part, with the seconds that each took."""

    def __init__(self, path: Path, content: dict[str, Any], seconds: float) -> None:
        self.path = path
        self._begun = self._last = time.perf_counter()
        self._seconds = seconds
        self.content = {"seconds": {}} | content | {"rows": []}
        self.rows: list[dict[str, Any]] = self.content["rows"]

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self._seconds - (time.perf_counter() - self._begun)

    def done(self, part: str, **found: Any) -> float:
        """Write what was found; returns the part's seconds."""
        now = time.perf_counter()
        took, self._last = now - self._last, now
        self.content["seconds"].setdefault(part, took)  # the engine's, of what is simulated again
        self.content |= found
        write_results(self.path, self.content)
        print(f"{part}: {took:.1f} s", file=sys.stderr)
        return took


def measure_runs(
    setup: Setup, prediction: Prediction, profile: Profile, report: Report, arrivals_s: float
) -> Iterator[bool]:
    """Make every run and its simulation while there is time; yields False for each that failed."""
    expected = Expected.of(setup, profile)
    report.content["expected"] = asdict(expected)
    policies = combinations_of(setup, expected)
    longest_s = 0.0
    for number, (load, one) in enumerate(product(LOADS, policies)):
        rate = LOADS[load] * expected.requests_per_s
        num_requests = max(FEWEST_REQUESTS, round(rate * arrivals_s))
        name = f"{number}-{load}"
        row: dict[str, Any] = {"load": load, "policy": one.name, "scheduling": one.scheduling}
        row |= {"look_ahead": one.look_ahead, "rate": rate, "num_requests": num_requests, "folder": name}
        report.rows.append(row)
        if report.left_s < longest_s or not prediction.can_run(name):
            row["left_out"] = "no time was left"
            continue
        try:
            row |= compared(*prediction.run(name, one, rate, num_requests), profile)
        except Exception:
            row["failed"] = traceback.format_exc()
            print(row["failed"], file=sys.stderr)
        yield "failed" not in row
        longest_s = max(longest_s, report.done(name, orders=orders(report.rows)))


def main() -> int:
    """Profile, run, simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    output_arguments(parser, "gpu_prediction.json")
    parser.add_argument("--model", choices=SETUPS, default="8b", help="its shape")
    parser.add_argument("--device", default="cuda", help="cpu is for rehearsals")
    parser.add_argument("--passes", type=int, default=PASSES, help="measurements of each shape in the profile")
    parser.add_argument("--random", type=int, default=NUM_RANDOM, help="random shapes in the profile")
    parser.add_argument("--arrivals", type=float, default=6.0, help="how long requests arrive in each run, seconds")
    parser.add_argument("--seconds", type=float, default=125.0, help="no run is begun that would end later")
    parser.add_argument(
        "--again", action="store_true", help="simulate the runs that are there, with the same other options"
    )
    options = parser.parse_args()
    setup, folder = SETUPS[options.model], options.output.with_name(f"{options.output.stem}-files")
    prediction = Prediction(setup, options.device, folder, options.again)
    if options.again:
        options.seconds = inf
        before = json.loads(options.output.read_text(encoding="utf-8"))
        report = Report(options.output, {**before, "version": __version__}, options.seconds)
        return finish(setup, prediction, read_profile(prediction.profile_file), report, options.arrivals)
    on_gpu = options.device != "cpu"
    if on_gpu:
        require_gpu("gpu_prediction")
    where = machine() if on_gpu else {"chip": processor()}
    content = {"machine": where, "model": options.model, "version": __version__, **asdict(setup)}
    report = Report(options.output, content, options.seconds)
    prediction.load()
    report.done("loaded")
    profile = prediction.profile(options.passes, options.random)
    facts = {"facts": dict(profile.facts), "errors": profile.errors, "shapes": profile.num_shapes}
    report.done("profile", profile=facts)
    return finish(setup, prediction, profile, report, options.arrivals)


def finish(setup: Setup, prediction: Prediction, profile: Profile, report: Report, arrivals_s: float) -> int:
    """Make the runs and print; returns the exit code."""
    passed = list(measure_runs(setup, prediction, profile, report, arrivals_s))
    report.done("end")
    print(table(report.rows))
    print(f"written: {report.path}")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
