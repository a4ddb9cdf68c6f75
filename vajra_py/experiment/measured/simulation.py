"""Simulate a measured run: the same requests under vLLM's scheduler and the engine's settings, with steps timed by a
latency model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vajra_py.config import ExperimentConfig, config_from_mapping
from vajra_py.errors import ConfigError, Problem
from vajra_py.experiment.measured.run import MeasuredRun
from vajra_py.experiment.runs.folder import SIMULATED
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.latency import AiconfiguratorConfig, ProfileBundleConfig, read_bundle
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.workload import RequestSpec, write_jsonl

PRESET = "vllm-v1"
WORKLOAD_FILE = "workload.jsonl.gz"


def bundle_latency(
    run: MeasuredRun, profile: str | Path, calibration: str | Path | None = None, **changes: Any
) -> dict[str, Any]:
    """Return the section `latency:` for simulating a measured run with a profile bundle; `changes` override its
    settings.

    Parallelism, CUDA graphs and asynchronous scheduling are those of the run, and contexts vary as much as those of the
    run's requests. If the engine recorded the token times, the simulated tokens reach the client without delay, because
    the recorded times do not include the way to a client.

    Raises:
        ConfigError: The bundle was measured with another model or another data type of the KV cache.
    """
    bundle = read_bundle(profile, run.settings.tensor_parallel)
    if _bare(bundle.model) != _bare(run.settings.model):
        message = f"is of {bundle.model}, and the run of {run.settings.model}"
        raise ConfigError(Problem(str(profile), message, "Allowed: a bundle of the same model"))
    if bundle.variant.endswith("-kvfp8") != (run.settings.kv_dtype == "fp8"):
        message = f"is {bundle.variant}, and the run's KV cache is {run.settings.kv_dtype or 'of 16 bits'}"
        raise ConfigError(Problem(str(profile), message, "Allowed: a bundle measured with the same KV cache"))
    latency = {"type": "profile_bundle", "path": str(Path(profile).resolve()), **_deployed(run)}
    return _changed(latency, run, calibration, changes)


def tables_latency(run: MeasuredRun, calibration: str | Path | None = None, **changes: Any) -> dict[str, Any]:
    """Return the section `latency:` for the operator tables of aiconfigurator; `changes` must contain `system` and may
    override other settings.

    Raises:
        ConfigError: No system is named.
    """
    if "system" not in changes:
        allowed = "--profile FOLDER for a profile bundle, or --latency system=NAME for the tables of aiconfigurator"
        raise ConfigError(Problem("latency", "nothing says where step times come from", allowed))
    latency = {"type": "aiconfigurator", "model": run.settings.model.rsplit("/", 1)[-1], **_deployed(run)}
    return _changed(latency, run, calibration, changes)


def _deployed(run: MeasuredRun) -> dict[str, Any]:
    """Return the settings of a latency model that follow from the engine's settings and the run's requests."""
    settings = run.settings
    latency: dict[str, Any] = {
        "tensor_parallel": settings.tensor_parallel,
        "host": "vllm-0.19-async" if settings.asynchronous else "vllm-0.19-sync",
        "context_variation": round(run.context_variation, 4),
    }
    if run.has_engine_times:
        latency["first_token_us"] = 0.0
    if settings.capture_limit == 0:
        latency["cuda_graphs"] = False
    else:
        limit = settings.capture_limit or min(512, 2 * settings.max_num_seqs, settings.max_num_batched_tokens)
        latency["capture_limit"] = limit
    if settings.expert_parallel:
        latency["expert_parallel"] = True
    return latency


def _changed(
    latency: dict[str, Any], run: MeasuredRun, calibration: str | Path | None, changes: Mapping[str, Any]
) -> dict[str, Any]:
    latency |= changes
    # Data-parallel ranks that share experts run their steps in lockstep, so one latency model covers all of them.
    if run.settings.data_parallel > 1 and measured_config(latency).model_spec().experts is not None:
        latency.setdefault("data_parallel", run.settings.data_parallel)
    if calibration is not None:
        latency["calibration"] = str(Path(calibration).resolve())
    return latency


def measured_config(latency: Mapping[str, Any]) -> ProfileBundleConfig | AiconfiguratorConfig:
    """Return the validated settings of a latency model with measured operators.

    Raises:
        ConfigError: The latency model has another type, or its settings are invalid.
    """
    kinds: dict[str, type[ProfileBundleConfig] | type[AiconfiguratorConfig]] = {
        "profile_bundle": ProfileBundleConfig,
        "aiconfigurator": AiconfiguratorConfig,
    }
    kind = kinds.get(str(latency.get("type")))
    if kind is None:
        message = f"is not made of measured operators ({latency.get('type')!r})"
        raise ConfigError(Problem("latency.type", message, f"Allowed: {', '.join(kinds)}"))
    try:
        return kind.model_validate(dict(latency))
    except ValidationError as error:
        problems = [
            Problem(".".join(["latency", *map(str, one["loc"])]), f"{one['msg']} ({one['input']!r})")
            for one in error.errors()
        ]
        raise ConfigError(problems) from error


def _bare(model: str) -> str:
    return model.rsplit("/", 1)[-1].lower()


def simulation_of(run: MeasuredRun, latency: Mapping[str, Any], workload_file: Path) -> ExperimentConfig:
    """Return the experiment that serves the run's requests as its engine did.

    Data-parallel ranks that share experts run in lockstep; they are simulated as one replica with the batch size and
    token budget of all ranks, in which a prompt hits only blocks cached by its own rank. Ranks that do not share
    experts are separate replicas.
    """
    settings = run.settings
    together = int(latency.get("data_parallel", 1))
    memory: dict[str, Any] = {
        "block_size": settings.block_size,
        "prefix_cache": {"enabled": settings.prefix_caching},
    }
    if together > 1:
        memory["tenant_salt"] = True  # ranks do not share cached blocks, and each is a tenant: see `ranked`
    if settings.memory_fraction is not None:
        memory["memory_fraction"] = settings.memory_fraction
    if settings.num_blocks is not None:
        memory["num_blocks"] = together * (settings.num_blocks - 1)  # the first block of a rank is vLLM's null block
    replica: dict[str, Any] = {
        "max_batch_size": together * settings.max_num_seqs,
        "max_batch_tokens": together * settings.max_num_batched_tokens,
        "memory": memory,
    }
    if settings.max_model_len is not None:
        replica["max_model_len"] = settings.max_model_len
    mapping: dict[str, Any] = {
        "version": 1,
        "name": SIMULATED,
        "preset": PRESET,
        "replica": replica,
        "num_replicas": settings.data_parallel // together,
        "workload": {"type": "jsonl", "path": str(workload_file)},
        "backend": {"simulator": {"latency": dict(latency)}},
        "output": {"decision_log": False},
    }
    if together > 1:
        # Each prompt is computed by a single rank, so a chunk must not exceed the token budget of one rank.
        params = {"long_prefill_threshold_tokens": settings.max_num_batched_tokens}
        mapping["scheduling"] = {"replica_scheduler": {"policy": "vllm_v1", "params": params}}
    return config_from_mapping(mapping)


def ranked(workload: Sequence[RequestSpec], num_ranks: int) -> Sequence[RequestSpec]:
    """Return the requests with data-parallel ranks as tenants, assigned round-robin by arrival.

    Each rank of vLLM has its own prefix cache; `tenant_salt` likewise keeps tenants of a replica from sharing blocks.
    """
    if num_ranks == 1:
        return workload
    order = sorted(range(len(workload)), key=lambda index: workload[index].arrived_at)
    rank_of = {index: turn % num_ranks for turn, index in enumerate(order)}
    return [replace(spec, tenant=f"rank-{rank_of[index]}") for index, spec in enumerate(workload)]


def simulate_measured(run: MeasuredRun, latency: Mapping[str, Any], folder: Path) -> RunData:
    """Simulate the run with this latency model and write the results below `folder`.

    Raises:
        ConfigError: The latency model or the sizes cannot be used.
    """
    folder.mkdir(parents=True, exist_ok=True)
    workload_file = (folder / WORKLOAD_FILE).resolve()
    write_jsonl(ranked(run.workload, int(latency.get("data_parallel", 1))), workload_file)
    return run_experiment(simulation_of(run, latency, workload_file), folder=folder / SIMULATED, overwrite=True)
