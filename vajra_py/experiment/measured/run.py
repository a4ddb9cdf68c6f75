"""Read a measured run of a real engine: its settings, the requests as they were sent, and the times of their tokens.

A run is a folder with `meta.json` (the engine's settings), `workload.jsonl.gz` (prompts, lengths and arrivals),
`requests.jsonl` (measured times) and, optionally, `timeseries.csv` (running and waiting requests and throughput by
second).
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vajra_py.contract.facts import is_number
from vajra_py.errors import ConfigError, Problem, WorkloadError
from vajra_py.latency.hardware.catalog import read_json_file
from vajra_py.workload import RequestSpec
from vajra_py.workload.files import iter_json_lines

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FILES = ("meta.json", "requests.jsonl", "workload.jsonl.gz or workload.jsonl")
ASYNC_SINCE = (0, 14)
"""First version of vLLM that schedules asynchronously by default."""
LONGEST_S = 7 * 86400.0
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings with which the engine was started."""

    model: str
    engine: str
    tensor_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    num_blocks: int | None = None
    """Number of KV blocks of one data-parallel rank, including vLLM's null block; None if unknown."""
    block_size: int = 16
    prefix_caching: bool = True
    asynchronous: bool = True
    capture_limit: int | None = None
    """Number of tokens that the largest CUDA graph covers in one step; 0 for eager execution; None if unknown."""
    memory_fraction: float | None = None
    """Fraction of the GPU's memory that the engine may use; None if unknown."""
    kv_dtype: str | None = None
    """Data type of the KV cache; None if it is the model's data type."""


@dataclass(frozen=True, slots=True)
class MeasuredRequests:
    """Token counts and times of requests, one entry per request in order of arrival; times in seconds from the first
    arrival.
    """

    request_id: tuple[str, ...]
    num_prompt_tokens: Ints
    num_output_tokens: Ints
    arrived_at: Floats
    first_token_at: Floats
    last_token_at: Floats
    scheduled_at: Floats | None = None
    """Time at which the request was first scheduled; None if not measured."""
    tbt_s: Floats | None = None
    """Gaps between tokens of all requests, in seconds; None if not measured."""

    @property
    def ttft_s(self) -> Floats:
        """Time to first token of each request, in seconds."""
        return self.first_token_at - self.arrived_at

    @property
    def e2e_s(self) -> Floats:
        """End-to-end latency of each request, in seconds."""
        return self.last_token_at - self.arrived_at

    @property
    def tpot_s(self) -> Floats:
        """Mean time between output tokens of each request (TPOT), in seconds; NaN for answers of one token."""
        after = self.num_output_tokens - 1
        spent = self.last_token_at - self.first_token_at
        return np.where(after > 0, spent / np.maximum(after, 1), np.nan)

    def first(self, count: int) -> MeasuredRequests:
        """Return the first `count` requests, without `tbt_s`."""
        return self._rows(np.arange(min(count, len(self.request_id))))

    def in_order(self, request_ids: Sequence[str]) -> MeasuredRequests:
        """Return the requests in the order of these ids, without `tbt_s`."""
        place = {name: row for row, name in enumerate(self.request_id)}
        return self._rows(np.array([place[name] for name in request_ids], np.int64))

    def _rows(self, rows: Ints) -> MeasuredRequests:
        return MeasuredRequests(
            tuple(self.request_id[row] for row in rows.tolist()),
            self.num_prompt_tokens[rows],
            self.num_output_tokens[rows],
            self.arrived_at[rows],
            self.first_token_at[rows],
            self.last_token_at[rows],
            None if self.scheduled_at is None else self.scheduled_at[rows],
        )


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One run of a real engine."""

    path: Path
    settings: EngineSettings
    requests: MeasuredRequests
    workload: tuple[RequestSpec, ...]
    """Requests as they were sent, with prompts if the run has them."""
    series: Mapping[str, Floats] | None = None
    """Columns of `timeseries.csv`; None if there is no such file."""

    @property
    def has_engine_times(self) -> bool:
        """True if the engine recorded the token times, which is inferred from the presence of scheduling times. Times
        recorded by a client include the transmission of tokens.
        """
        return self.requests.scheduled_at is not None

    @property
    def context_variation(self) -> float:
        """Coefficient of variation of the decodes' context lengths, assuming that all requests' tokens were computed at
        equal rates.
        """
        prompt = self.requests.num_prompt_tokens.astype(np.float64)
        output = self.requests.num_output_tokens.astype(np.float64)
        mean = float((output * (prompt + output / 2)).sum() / output.sum())
        square = float((output * (prompt**2 + prompt * output + output**2 / 3)).sum() / output.sum())
        return float(np.sqrt(max(0.0, square - mean**2)) / mean)


def read_measured_run(path: str | Path) -> MeasuredRun:
    """Read the run in a folder.

    Raises:
        ConfigError: A file is missing or malformed, a time is impossible, or the files do not belong together; the
            error names file and line.
    """
    folder = Path(path)
    meta_file, requests_file = folder / "meta.json", folder / "requests.jsonl"
    workload_file = next(
        (one for one in (folder / "workload.jsonl.gz", folder / "workload.jsonl") if one.is_file()), None
    )
    if not meta_file.is_file() or not requests_file.is_file() or workload_file is None:
        there = ", ".join(sorted(one.name for one in folder.iterdir())) if folder.is_dir() else "no such folder"
        message = f"is not a measured run: it needs {', '.join(FILES)}"
        raise ConfigError(Problem(str(folder), message, f"Found: {there or 'nothing'}"))
    settings = _settings(meta_file)
    requests = _requests(requests_file)
    workload = _workload(workload_file, requests)
    series = folder / "timeseries.csv"
    return MeasuredRun(folder, settings, requests, workload, _series(series) if series.is_file() else None)


def _settings(file: Path) -> EngineSettings:
    meta = read_json_file(file)
    if not isinstance(meta, dict) or not isinstance(meta.get("engine_kwargs"), dict):
        raise ConfigError(Problem(str(file), "has no engine_kwargs", "An object with the engine's arguments"))
    return settings_of(meta, file)


def settings_of(meta: Mapping[str, Any], file: Path) -> EngineSettings:
    """Return the engine settings in a description: its `engine_kwargs`, and `resolved_config` and `kv_cache` if
    present.

    Raises:
        ConfigError: A setting has an invalid value or cannot be simulated, or the model is not named; the error names
            `file`.
    """
    given = meta["engine_kwargs"]
    resolved = meta.get("resolved_config") or {}
    if not isinstance(resolved, Mapping):
        raise ConfigError(Problem(f"{file} resolved_config", f"is not a mapping ({resolved!r})"))
    scheduler, cache = resolved.get("scheduler_config") or {}, resolved.get("cache_config") or {}
    kv_cache = {**cache, **(meta.get("kv_cache") or {})}
    compilation = resolved.get("compilation_config") or {}
    version = str(meta.get("vllm_version", ""))
    model = meta.get("model", given.get("model"))
    if not isinstance(model, str):
        raise ConfigError(Problem(str(file), f"does not name the model (got {model!r})"))
    usual = EngineSettings(model, "")

    def count(key: str, otherwise: Any, *places: Mapping[str, Any]) -> Any:
        value = next((one[key] for one in places if one.get(key) is not None), None)
        if value is None:
            return otherwise
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(Problem(f"{file} {key}", f"is not a count ({value!r})", "Allowed: whole numbers from 1"))
        return value

    def switch(key: str, otherwise: bool | None, *places: Mapping[str, Any]) -> bool | None:
        value = next((one[key] for one in places if one.get(key) is not None), otherwise)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(Problem(f"{file} {key}", f"is not a switch ({value!r})", "Allowed: true, false, null"))
        return value

    if count("pipeline_parallel_size", 1, given) > 1:
        message = f"is not simulated ({given['pipeline_parallel_size']})"
        raise ConfigError(Problem(f"{file} pipeline_parallel_size", message, "Allowed: 1"))
    num_blocks = count("num_gpu_blocks", None, kv_cache, meta, given)
    eager = switch("enforce_eager", False, given)
    captured = count("max_cudagraph_capture_size", None, compilation, given)
    return EngineSettings(
        model=model,
        engine=f"vLLM {version}".strip(),
        tensor_parallel=count("tensor_parallel_size", 1, given),
        data_parallel=count("data_parallel_size", 1, given),
        expert_parallel=bool(switch("enable_expert_parallel", False, given)),
        max_num_seqs=count("max_num_seqs", usual.max_num_seqs, given, scheduler),
        max_num_batched_tokens=count("max_num_batched_tokens", usual.max_num_batched_tokens, given, scheduler),
        max_model_len=count("max_model_len", None, given),
        num_blocks=count("num_gpu_blocks_override", num_blocks, given),
        block_size=count("block_size", usual.block_size, kv_cache, given),
        prefix_caching=bool(switch("enable_prefix_caching", True, given, kv_cache)),
        asynchronous=_is_asynchronous(version, switch("async_scheduling", None, given, scheduler)),
        capture_limit=0 if eager else captured,
        memory_fraction=_fraction(file, given),
        kv_dtype=_kv_dtype(file, {**cache, **given}),
    )


def _fraction(file: Path, given: Mapping[str, Any]) -> float | None:
    value = given.get("gpu_memory_utilization")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        where = f"{file} gpu_memory_utilization"
        raise ConfigError(Problem(where, f"is not a part of the memory ({value!r})", "Allowed: above 0, up to 1"))
    return float(value)


def _kv_dtype(file: Path, given: Mapping[str, Any]) -> str | None:
    value = given.get("kv_cache_dtype", given.get("cache_dtype"))
    if value in (None, "auto", "bfloat16", "float16"):
        return None
    if not isinstance(value, str) or not value.startswith("fp8"):
        message = f"is not known ({value!r})"
        raise ConfigError(Problem(f"{file} kv_cache_dtype", message, "Allowed: auto, bfloat16, float16, fp8"))
    return "fp8"


def _is_asynchronous(version: str, stated: bool | None) -> bool:
    if stated is not None:
        return stated
    try:
        parts = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return True
    return parts >= ASYNC_SINCE


def _requests(file: Path) -> MeasuredRequests:
    rows: list[tuple[float, ...]] = []
    scheduled: list[float] = []
    names: list[str] = []
    for line, record in iter_json_lines(file):
        arrived = _number(file, line, record, "arrival_time")
        first, last = (_number(file, line, record, key) for key in ("first_token_ts", "last_token_ts"))
        queued = _number(file, line, record, "queued_ts") if "queued_ts" in record else float("nan")
        prompt, output = (_count(file, line, record, key) for key in ("input_toks", "output_toks"))
        if last < first or (queued == queued and first < queued):
            message = f"its times do not ascend (queued {queued}, first token {first}, last token {last})"
            raise WorkloadError(file, line, message)
        if last - first > LONGEST_S or (output > 1 and (last - first) / (output - 1) > 10.0):
            message = f"{output} tokens took {last - first:g} s, which is more than 10 s each"
            raise WorkloadError(file, line, message, "Times are seconds")
        names.append(str(record.get("request_id", len(names))))
        rows.append((arrived, queued, first, last, prompt, output))
        has_time = record.get("scheduled_ts") is not None
        scheduled.append(_number(file, line, record, "scheduled_ts") if has_time else float("nan"))
    if not rows:
        raise ConfigError(Problem(str(file), "has no requests"))
    arrived_at, queued_at, first_at, last_at, prompts, outputs = np.array(rows, dtype=np.float64).T
    # Align the client's clock (arrivals) with the engine's by the largest offset with which no request is queued before
    # it arrives.
    known = np.isfinite(queued_at)
    offset = float(np.min(queued_at[known] - arrived_at[known])) if known.any() else 0.0
    if (first_at < arrived_at + offset - 1e-6).any():
        line = int(np.flatnonzero(first_at < arrived_at + offset - 1e-6)[0]) + 1
        raise WorkloadError(
            file, line, "its first token is before its arrival", "With queued_ts the clocks are matched"
        )
    start = float(arrived_at.min()) + offset
    order = np.argsort(arrived_at, kind="stable")
    scheduled_at = np.array(scheduled)[order] - start
    return MeasuredRequests(
        request_id=tuple(names[index] for index in order),
        num_prompt_tokens=prompts[order].astype(np.int64),
        num_output_tokens=outputs[order].astype(np.int64),
        arrived_at=arrived_at[order] + offset - start,
        first_token_at=first_at[order] - start,
        last_token_at=last_at[order] - start,
        scheduled_at=scheduled_at if np.isfinite(scheduled_at).all() else None,
    )


def _workload(file: Path, requests: MeasuredRequests) -> tuple[RequestSpec, ...]:
    """Read the requests that were sent, with their measured arrival times."""
    records = sorted(iter_json_lines(file), key=lambda one: _number(file, one[0], one[1], "arrival_time_ns"))
    if len(records) != len(requests.request_id):
        message = f"has {len(records)} requests, and {len(requests.request_id)} were measured"
        raise ConfigError(Problem(str(file), message))
    specs = []
    for index, (line, record) in enumerate(records):
        prompt, output = _count(file, line, record, "input_toks"), _count(file, line, record, "output_toks")
        measured = int(requests.num_prompt_tokens[index]), int(requests.num_output_tokens[index])
        if (prompt, output) != measured:
            message = (
                f"has {prompt} prompt and {output} output tokens, and {measured[0]} and {measured[1]} were measured"
            )
            raise WorkloadError(file, line, message)
        token_ids = record.get("input_tok_ids")
        if token_ids is not None and (not isinstance(token_ids, list) or len(token_ids) != prompt):
            raise WorkloadError(file, line, "input_tok_ids are not as many as input_toks")
        specs.append(
            RequestSpec(
                request_id=requests.request_id[index],
                arrived_at=float(requests.arrived_at[index]),
                num_prompt_tokens=prompt,
                num_output_tokens=output,
                max_tokens=output,
                prompt_token_ids=None if token_ids is None else tuple(token_ids),
            )
        )
    return tuple(specs)


def _series(file: Path) -> Mapping[str, Floats]:
    with file.open(newline="", encoding="utf-8") as text:
        reader = csv.reader(text)
        header = [name.strip() for name in next(reader, [])]
        missing = [name for name in ("t", "running", "waiting", "gen_throughput") if name not in header]
        if missing:
            raise ConfigError(
                Problem(f"{file}:1", f"has no column {', '.join(missing)}", f"Found: {', '.join(header)}")
            )
        rows = []
        for row in reader:
            if not row:
                continue
            try:
                rows.append([float(value) for _, value in zip(header, row, strict=True)])
            except ValueError:
                raise ConfigError(Problem(f"{file}:{reader.line_num}", f"is not a row of numbers ({row})")) from None
    columns = np.array(rows, dtype=np.float64).reshape(len(rows), len(header)).T
    return dict(zip(header, columns, strict=True))


def _number(file: Path, line: int, record: Mapping[str, Any], key: str) -> float:
    value = record.get(key)
    if not is_number(value):
        raise WorkloadError(file, line, f"{key} is not a number ({value!r})", f"Found: {', '.join(record)}")
    return float(value)


def _count(file: Path, line: int, record: Mapping[str, Any], key: str) -> int:
    value = _number(file, line, record, key)
    if value != int(value) or not 1 <= value <= MAX_COUNT:
        raise WorkloadError(file, line, f"{key} is not a count from 1 to {MAX_COUNT} ({value:g})")
    return int(value)
