"""Read measured requests from the files that load generators write, and from this project's own runs.

Supported are the detailed results of `vllm bench serve` (--save-result --save-detailed), reports of guidellm (JSON),
runs of this project, and measured runs (`vajra_py.experiment.measured.run`). Files of load generators do not contain
the engine's settings, so the caller states them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vajra_py.config import load_config
from vajra_py.config.single import only_replicaset
from vajra_py.contract.facts import is_number
from vajra_py.errors import ConfigError, Problem, did_you_mean
from vajra_py.experiment.measured.accuracy import requests_of
from vajra_py.experiment.measured.run import (
    MAX_COUNT,
    EngineSettings,
    MeasuredRequests,
    MeasuredRun,
    read_measured_run,
    settings_of,
)
from vajra_py.experiment.runs.run import load_workload
from vajra_py.latency.hardware.catalog import read_json_file
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.workload import RequestSpec

ENGINE_ARGUMENTS = (
    "model",
    "tensor_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "num_gpu_blocks_override",
    "block_size",
    "enable_prefix_caching",
    "async_scheduling",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_cache_dtype",
)
"""Engine settings that a file may lack and a user may state, by vLLM's argument names."""
_PER_REQUEST = ("input_lens", "output_lens", "itls")
"""Lists in a detailed result of `vllm bench serve`, beside `ttfts`."""


def read_measured(path: str | Path, engine: Mapping[str, Any] | None = None) -> MeasuredRun:
    """Read a measured run in any supported format; `engine` has settings that the file lacks, by vLLM's argument names.

    Raises:
        ConfigError: The file has an unknown format or is malformed, or an argument is unknown.
    """
    place, given = Path(path), dict(engine or {})
    unknown = [name for name in given if name not in ENGINE_ARGUMENTS]
    if unknown:
        allowed = did_you_mean(unknown[0], ENGINE_ARGUMENTS)
        raise ConfigError(Problem("--engine", f"is not known ({unknown[0]!r})", allowed))
    if place.is_dir() and (place / "manifest.json").is_file():
        return _own_run(place, given)
    if not place.is_file():
        run = read_measured_run(place)
        return run if not given else replace(run, settings=_changed(run.settings, given, place))
    contents = read_json_file(place)
    if isinstance(contents, dict) and "ttfts" in contents:
        return _vllm_bench(place, contents, given)
    if isinstance(contents, dict) and isinstance(contents.get("benchmarks"), list):
        return _guidellm(place, contents, given)
    allowed = "Allowed: a detailed result of vllm bench serve (--save-detailed), a guidellm report, or a run's folder"
    raise ConfigError(Problem(str(place), "is of no known kind: it has neither ttfts nor benchmarks", allowed))


def _changed(settings: EngineSettings, given: Mapping[str, Any], place: Path) -> EngineSettings:
    """Return the run's settings, with those in `given` replaced."""
    stated = settings_of({"model": given.get("model", settings.model), "engine_kwargs": dict(given)}, place)
    names = {
        "tensor_parallel_size": "tensor_parallel",
        "data_parallel_size": "data_parallel",
        "enable_expert_parallel": "expert_parallel",
        "num_gpu_blocks_override": "num_blocks",
        "enable_prefix_caching": "prefix_caching",
        "async_scheduling": "asynchronous",
        "enforce_eager": "capture_limit",
        "gpu_memory_utilization": "memory_fraction",
        "kv_cache_dtype": "kv_dtype",
    }
    changes = {names.get(name, name): getattr(stated, names.get(name, name)) for name in given}
    return replace(settings, **changes)


def _vllm_bench(place: Path, contents: Mapping[str, Any], given: Mapping[str, Any]) -> MeasuredRun:
    missing = [name for name in _PER_REQUEST if name not in contents]
    if missing:
        message = f"has no {', '.join(missing)}"
        raise ConfigError(Problem(str(place), message, "Run vllm bench serve with --save-result --save-detailed"))
    if not isinstance(contents["ttfts"], list):
        raise ConfigError(Problem(f"{place} ttfts", "is not a list", "Allowed: seconds, one for each request"))
    ttfts, starts = contents["ttfts"], contents.get("start_times")
    if starts is None:
        if contents.get("request_rate") != "inf" or contents.get("max_concurrency") not in (None, len(ttfts)):
            message = "does not say when requests were sent (start_times), and not all were sent at once"
            raise ConfigError(Problem(str(place), message, "A later version of vllm bench serve writes them"))
        starts = [0.0] * len(ttfts)
    failed = contents.get("errors") or [""] * len(ttfts)
    for name, values in (
        ("start_times", starts),
        ("errors", failed),
        *((name, contents[name]) for name in _PER_REQUEST),
    ):
        if not isinstance(values, list) or len(values) != len(ttfts):
            raise ConfigError(
                Problem(f"{place} {name}", "is not one value for each request", f"As in ttfts: {len(ttfts)}")
            )
    rows, gaps = [], []
    for index, start in enumerate(starts):
        if failed[index]:
            continue
        where = f"{place} request {index}"
        gaps_given = contents["itls"][index]
        if not isinstance(gaps_given, list):
            raise ConfigError(Problem(f"{where} itls", f"is not a list ({gaps_given!r})"))
        own = [_seconds(where, "itls", gap) for gap in gaps_given]
        first = _seconds(where, "start_times", start) + _seconds(where, "ttfts", ttfts[index])
        prompt, output = (_count(where, name, contents[name][index]) for name in ("input_lens", "output_lens"))
        rows.append((float(start), first, first + sum(own), prompt, output))
        gaps += own
    kwargs = {"model": contents.get("model_id"), **given}
    return _assembled(place, rows, kwargs, np.array(gaps))


def _guidellm(place: Path, contents: Mapping[str, Any], given: Mapping[str, Any]) -> MeasuredRun:
    """Read the requests of a report with a single benchmark; a report with several must be split, since each has its
    own load.
    """
    benchmarks = contents["benchmarks"]
    if len(benchmarks) != 1:
        message = f"has {len(benchmarks)} benchmarks, each with a different load"
        raise ConfigError(Problem(str(place), message, "Allowed: a report of one (one rate)"))
    requests = benchmarks[0].get("requests") or {}
    successful = requests.get("successful", []) if isinstance(requests, dict) else requests
    rows = []
    for index, one in enumerate(successful):
        where = f"{place} request {index}"
        start = _named(where, one, "request_start_time", "start_time")
        first = one.get("first_token_time", one.get("first_token_iteration"))
        if first is None:
            first = start + _named(where, one, "time_to_first_token_ms") / 1e3
        last = one.get("last_token_time", one.get("last_token_iteration"))
        last = _named(where, one, "request_end_time", "end_time") if last is None else last
        prompt, output = _named(where, one, "prompt_tokens"), _named(where, one, "output_tokens")
        sizes = _count(where, "prompt_tokens", prompt), _count(where, "output_tokens", output)
        rows.append((start, _seconds(where, "first token", first), _seconds(where, "last token", last), *sizes))
    return _assembled(place, rows, dict(given), None)


def _assembled(
    place: Path,
    rows: Sequence[tuple[float, float, float, int, int]],
    kwargs: Mapping[str, Any],
    gaps: np.ndarray[Any, np.dtype[np.float64]] | None,
) -> MeasuredRun:
    if not rows:
        raise ConfigError(Problem(str(place), "has no request that was served"))
    if not isinstance(kwargs.get("model"), str):
        raise ConfigError(Problem(str(place), "does not name the model", "Give it: --engine model=NAME"))
    arrived, first, last, prompts, outputs = np.array(sorted(rows), dtype=np.float64).T
    bad = np.flatnonzero((first < arrived) | (last < first))
    if bad.size:
        raise ConfigError(
            Problem(f"{place} request {bad[0]}", "its times do not ascend", "Sent, first token, last token")
        )
    start = arrived.min()
    names = tuple(f"r{index}" for index in range(len(rows)))
    requests = MeasuredRequests(
        names,
        prompts.astype(np.int64),
        outputs.astype(np.int64),
        arrived - start,
        first - start,
        last - start,
        tbt_s=gaps,
    )
    workload = tuple(
        RequestSpec(name, float(at), int(prompt), int(output), max_tokens=int(output))
        for name, at, prompt, output in zip(names, requests.arrived_at, prompts, outputs, strict=True)
    )
    settings = settings_of({"model": kwargs["model"], "engine_kwargs": dict(kwargs)}, place)
    return MeasuredRun(place, settings, requests, workload)


def _own_run(place: Path, given: Mapping[str, Any]) -> MeasuredRun:
    """Read a run of this project: its requests as served, with the prompt contents of its workload."""
    data = RunData.load(place)
    gaps = data.tbt("gap_s", "weight")
    tbt_s = np.repeat(gaps.column("gap_s").to_numpy(), gaps.column("weight").to_numpy())
    requests = replace(requests_of(data), tbt_s=tbt_s)
    config = load_config(place / "config.yaml")
    specs = {spec.request_id: spec for spec in load_workload(config)}
    replicaset = only_replicaset(config)
    if replicaset.pools:
        raise ConfigError(Problem(str(place), "has pools, which are not simulated here", "Allowed: equal replicas"))
    replica = replicaset.replica
    num_blocks = replica.memory.num_blocks
    settings = EngineSettings(
        model=str(given.get("model", "")),
        engine="vajra-py",
        data_parallel=replicaset.num_replicas,
        num_blocks=None if num_blocks is None else num_blocks + 1,  # vLLM's null block is included
        memory_fraction=replica.memory.memory_fraction,
        max_num_seqs=replica.max_batch_size,
        max_num_batched_tokens=replica.max_batch_tokens or 1 << 30,
        max_model_len=replica.max_model_len,
        block_size=replica.memory.block_size,
        prefix_caching=replica.memory.prefix_cache.enabled,
        asynchronous=False,
        capture_limit=0,
    )
    workload = tuple(
        replace(
            specs[name],
            arrived_at=float(at),
            num_output_tokens=int(output),
            max_tokens=int(output),
            follows=None,
            think_time_s=0.0,
        )
        for name, at, output in zip(requests.request_id, requests.arrived_at, requests.num_output_tokens, strict=True)
    )
    others = {name: value for name, value in given.items() if name != "model"}
    return MeasuredRun(place, _changed(settings, others, place) if others else settings, requests, workload)


def _named(where: str, record: Mapping[str, Any], *names: str) -> float:
    for name in names:
        if record.get(name) is not None:
            return _seconds(where, name, record[name])
    raise ConfigError(Problem(where, f"has no {' or '.join(names)}", f"Found: {', '.join(sorted(record))}"))


def _seconds(where: str, name: str, value: Any) -> float:
    if not is_number(value) or value < 0:
        raise ConfigError(Problem(f"{where} {name}", f"is not a number of 0 or more ({value!r})"))
    return float(value)


def _count(where: str, name: str, value: Any) -> int:
    number = _seconds(where, name, value)
    if number != int(number) or not 1 <= number <= MAX_COUNT:
        raise ConfigError(Problem(f"{where} {name}", f"is not a count from 1 to {MAX_COUNT} ({value!r})"))
    return int(number)
