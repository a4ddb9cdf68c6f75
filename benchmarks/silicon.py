"""Compare closed-loop simulations with the measured points that `aiconfigurator-core` ships (`silicon_sample.csv`).

python benchmarks/silicon.py [--every N] [--csv FILE] [--tables FOLDER]

Every aggregated point of a dense model whose engine and GPU the operator tables cover is simulated: its concurrency and lengths, steps timed
by `type: aiconfigurator`. Nothing is fitted to the points. What the file does not have is assumed, the same for all points of a
kind: see `latency_of` and `lengths_of`. Prints the distribution of the errors by GPU, model and engine, and the ten worst points.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vajra_py.config import config_from_mapping
from vajra_py.errors import VajraError
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.latency import AiconfiguratorConfig, OperatorTablesModel
from vajra_py.latency.hardware.model_spec import DTYPE_BYTES
from vajra_py.latency.operators.operator_tables import OperatorTables, tables_folder

MODELS = {"Llama-3.1-70B": "Llama-3.1-70B", "Llama-3.1-8B": "Llama-3.1-8B", "Qwen3-32B": "Qwen3-32B"}
STEP_TOKENS = 8192
"""Prompt tokens a step: InferenceMAX's (its README), and the default of SGLang's server on GPUs of this size."""
SPARE_TOKENS = 1500
"""Tokens that aiconfigurator's generator adds to the longest prompt to get the token budget of a step (generator/rule_plugin/*.rule)."""
TURNS = 10
"""Requests of each user: InferenceMAX's `--num-prompts`, and the request count of aiconfigurator's own benchmark runner."""
BLOCK = 16
VARIED = 0.8
"""Shortest prompts and outputs over the longest where InferenceMAX measured: its README has `RANDOM_RANGE_RATIO` 0.8, and the client that it names
(github.com/kimbochen/bench_serving, benchmark_serving.py) draws evenly from that part of the length to all of it."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measured point."""

    name: str
    system: str
    engine: str
    version: str
    model: str
    precision: str
    tensor: int
    users: int
    prompt: int
    output: int
    ttft_ms: float
    tpot_ms: float
    is_inferencemax: bool
    """Measured by InferenceMAX; the others are taken to be servers that aiconfigurator's generator set up."""

    @property
    def release(self) -> tuple[int, ...]:
        """Major, minor and patch number of the engine."""
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:3])


def points(path: Path) -> Iterator[Point]:
    """The points of dense models, in the file's order."""
    table = pd.read_csv(path)
    rows: Any = table[table["mode"] == "agg"].itertuples()
    for row in rows:
        model = next((short for part, short in MODELS.items() if part in row.model_path), None)
        if model is None:
            continue
        yield Point(
            name=row.id,
            system=row.system,
            engine=row.backend,
            version=row.backend_version,
            model=model,
            precision=row.gemm_quant_mode if isinstance(row.gemm_quant_mode, str) else "bfloat16",
            tensor=int(row.tp_size),
            users=int(row.batch_size),  # of one replica; the concurrency that the source names is that of all
            prompt=row.isl,
            output=row.osl,
            ttft_ms=row.silicon_ttft_ms,
            tpot_ms=row.silicon_tpot_ms,
            is_inferencemax="wip=" in row.silicon_data_source,
        )


def latency_of(point: Point, folder: Path) -> dict[str, Any]:
    """Return the `latency:` section.

    Caches are of 8 bits where the weights have 8 or 4. Activation scales are known (from the checkpoints); TensorRT-LLM, and vLLM as
    InferenceMAX starts it on Blackwell, convert within the operator before. TensorRT-LLM's all-reduce computes the norm.
    """
    is_fused = point.engine == "trtllm" or point.system.startswith(("b200", "gb200"))
    return {
        "type": "aiconfigurator",
        "path": str(folder),
        "system": point.system,
        "engine": point.engine,
        "model": point.model,
        "precision": point.precision,
        "conversion": "fused" if is_fused else "static",
        "fused_norms": point.engine == "trtllm",
        "kv_dtype": "fp8" if point.precision in ("fp8", "nvfp4") else "bfloat16",
        "tensor_parallel": point.tensor,
        "host": "vllm-0.19-sync" if is_synchronous(point) else "vllm-0.19-async",
    }


def is_synchronous(point: Point) -> bool:
    """Return True if the engine schedules a step only after the previous one has ended.

    vLLM does until 0.14, whose release notes turn asynchronous scheduling on; InferenceMAX turns it on. TensorRT-LLM and SGLang overlap.
    """
    return point.engine == "vllm" and not point.is_inferencemax and point.release < (0, 14)


def limits_of(point: Point) -> dict[str, Any]:
    """Return the `replica:` and `scheduling:` sections of the servers' setup.

    aiconfigurator's generator has vLLM and TensorRT-LLM compute as many tokens in a step as the longest prompt has, 1,500 more, and one for
    each request; SGLang as many prompt tokens, beside decodes (`--enable-mixed-chunk`), and no more than 8,192. TensorRT-LLM does not cut
    prompts (`enable_chunked_prefill: false`). The generator has known SGLang since December 2025; the older one is taken to have SGLang's
    defaults: prompts first, without decodes beside them.
    """
    replica: dict[str, Any] = {"max_batch_size": 1024, "max_batch_tokens": STEP_TOKENS}
    if point.is_inferencemax:
        return {"replica": replica}
    if point.engine != "sglang":
        replica["max_batch_tokens"] = point.prompt + SPARE_TOKENS + point.users
        if point.engine == "trtllm":
            whole = {"policy": "vllm_v1", "params": {"chunked_prefill": False}}
            return {"replica": replica, "scheduling": {"replica_scheduler": whole}}
    elif point.release >= (0, 5, 3):
        replica["max_batch_tokens"] = min(STEP_TOKENS, point.prompt + SPARE_TOKENS) + point.users
    else:
        params = {"prefill": "chunk_first", "prefill_budget_tokens": STEP_TOKENS}
        return {"replica": replica, "scheduling": {"replica_scheduler": {"policy": "nano_vllm", "params": params}}}
    return {"replica": replica}


def lengths_of(longest: int, point: Point) -> dict[str, Any]:
    """Lengths of prompts or outputs.

    Those that are not InferenceMAX's are equal, as aiconfigurator's benchmark runner has them (genai_perf_runner.py: standard deviations of 0). That
    the points were measured by it is an assumption.
    """
    if point.is_inferencemax:
        return {"type": "uniform", "min": int(VARIED * longest), "max": longest}
    return {"type": "constant", "value": longest}


def blocks_of(model: OperatorTablesModel, folder: Path, point: Point) -> int:
    """KV blocks in nine tenths of the memory beside the weights, where the GPU is not in the package's catalogue."""
    memory = OperatorTables(folder, point.system, point.engine).figures().memory_bytes
    spec = model.model
    free = 0.9 * memory * point.tensor - spec.parameters * DTYPE_BYTES[spec.dtype] - 4e9 * point.tensor
    return int(free / (BLOCK * spec.kv_bytes_per_token))


def simulated(point: Point, model: OperatorTablesModel, folder: Path) -> tuple[float, float, float]:
    """(mean TTFT, mean TPOT in milliseconds, share of the step time by rule) of a simulation."""
    limits = limits_of(point)
    if model.device is None:
        limits["replica"]["memory"] = {"num_blocks": blocks_of(model, folder, point)}
    mapping: dict[str, Any] = {
        "version": 1,
        "name": "point",
        "preset": "vllm-v1",
        **limits,
        "workload": {
            "type": "synthetic",
            "num_requests": TURNS * point.users,
            "arrivals": {"type": "closed_loop", "num_users": point.users},
            "prompt_tokens": lengths_of(point.prompt, point),
            "output_tokens": lengths_of(point.output, point),
            "max_tokens": point.output,
        },
        "backend": {"simulator": {"latency": latency_of(point, folder)}},
        "output": {"decision_log": False},
    }
    with tempfile.TemporaryDirectory() as place:
        run = run_experiment(config_from_mapping(mapping), folder=Path(place) / "run")
        filled = float(run.summary.value("step_times.filled_fraction"))
        table = run.requests("arrived_at", "first_token_at", "ended_at", "num_output_tokens").to_pandas()
    ttft = table["first_token_at"] - table["arrived_at"]
    tpot = (table["ended_at"] - table["first_token_at"]) / (table["num_output_tokens"] - 1)
    return 1e3 * float(ttft.mean()), 1e3 * float(tpot.mean()), filled


def least_busy(point: Point, model: OperatorTablesModel) -> float:
    """Share of a second that the point's throughput needs of the fastest measured matrix products; above 1 it cannot be one replica's."""
    seconds = sum(
        model.model.num_layers * 1e-6 * float((one.times_us / one.sizes).min())
        for name, one in model.bundle.dense.items()
        if name.endswith("_proj")
    )
    duration = 1e-3 * (point.ttft_ms + point.tpot_ms * (point.output - 1))
    return seconds * point.users * (point.prompt + point.output) / duration


def measure(folder: Path, every: int) -> pd.DataFrame:
    """A row for each point."""
    rows = []
    for index, point in enumerate(points(folder / "silicon_sample.csv")):
        if index % every:
            continue
        sys.stderr.write(f"\r{index}")
        try:
            model = AiconfiguratorConfig.model_validate(latency_of(point, folder)).build()
        except VajraError as error:
            sys.stderr.write(f"\n{point.name}: {error}\n")
            continue
        try:
            ttft, tpot, filled = simulated(point, model, folder)
        except VajraError as error:
            sys.stderr.write(f"\n{point.name}: {error}\n")
            continue
        if not np.isfinite(ttft + tpot):
            sys.stderr.write(f"\n{point.name}: not every request was served\n")
            continue
        rows.append(
            {
                **{name: getattr(point, name) for name in Point.__slots__},
                "ttft": ttft / point.ttft_ms - 1.0,
                "tpot": tpot / point.tpot_ms - 1.0,
                "filled": filled,
                "is_possible": least_busy(point, model) <= 1.0,
            }
        )
    return pd.DataFrame(rows)


def percent(value: float) -> str:
    """A signed share."""
    return f"{100 * value:+.0f} %".replace("-", "−")


def line(name: str, group: pd.DataFrame) -> str:
    """One row of the table."""
    cells = [name, str(len(group))]
    for metric in ("tpot", "ttft"):
        errors = group[metric]
        cells += [percent(errors.median()), *(f"{100 * errors.abs().quantile(q):.0f} %" for q in (0.5, 0.9))]
    cells.append(f"{100 * group['filled'].median():.0f} %")
    return f"| {' | '.join(cells)} |"


def report(rows: pd.DataFrame) -> None:
    """Print the tables."""
    print("| points | number | TPOT median | absolute, median | p90 | TTFT median | absolute, median | p90 | by rule |")
    print("|---|---|---|---|---|---|---|---|---|")
    print(line("**all**", rows))
    for is_inferencemax, part in rows.groupby("is_inferencemax", sort=False):
        title = "InferenceMAX" if is_inferencemax else "others"
        print(line(f"**{title}**", part))
        for engine, group in part.groupby("engine"):
            print(line(f"{title}, {engine}", group))
        if not part.is_possible.all():
            print(line(f"{title}, without what cannot be", part[part.is_possible]))
        for key, group in part.groupby(["system", "model", "engine", "precision"]):
            print(line(", ".join(map(str, key)), group))
    for metric in ("tpot", "ttft"):
        print(f"\nWorst ten by {metric.upper()}:\n")
        worst = rows.reindex(rows[metric].abs().sort_values(ascending=False).index).head(10)
        for row in worst.itertuples():
            note = "" if row.is_possible else ", more than one replica can compute"
            print(f"- {row.name}: {percent(getattr(row, metric))} of {getattr(row, f'{metric}_ms'):.1f} ms{note}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", help="Folder with the tables; default: of the installed package.")
    parser.add_argument("--every", type=int, default=1, help="Take every so many-th point only.")
    parser.add_argument("--csv", type=Path, help="Write a row for each point here.")
    options = parser.parse_args()
    rows = measure(tables_folder(options.tables), options.every)
    if options.csv is not None:
        rows.to_csv(options.csv, index=False)
    report(rows)


if __name__ == "__main__":
    main()
