"""Settings for scheduling a vLLM: an experiment file, completed with the sizes that vLLM determines.

The file is named by `--additional-config '{"vajra": {"experiment": "FILE"}}'` or by the environment variable
`VAJRA_VLLM_EXPERIMENT`; both reach vLLM's scheduling process. Without a file, vLLM's own algorithm schedules (preset
`vllm-v1`), with vLLM's own options. A folder for recording the session is set in the same way (`save_run`,
`VAJRA_VLLM_SAVE_RUN`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vajra_py.config import PolicyChoice, SystemConfig, load_system, system_from_mapping
from vajra_py.config.drafts import DraftConfig
from vajra_py.config.single import only_replicaset
from vajra_py.config.yaml_file import read_mapping
from vajra_py.contract import Layer
from vajra_py.errors import ConfigError, Problem, did_you_mean
from vajra_py.plugins import Registry
from vajra_py.vllm.config import problems_of
from vajra_py.vllm.drafting import DraftSizes, draft_sizes_of
from vajra_py.vllm.lora import max_loras_of
from vajra_py.vllm.support import policy_options

EXPERIMENT_VARIABLE = "VAJRA_VLLM_EXPERIMENT"
_MANAGED = (
    "KV memory is vLLM's own manager, for sliding windows or several block tables: see docs/vllm.md for its price"
)
SAVE_RUN_VARIABLE = "VAJRA_VLLM_SAVE_RUN"
_VARIABLES = {"experiment": EXPERIMENT_VARIABLE, "save_run": SAVE_RUN_VARIABLE}
"""Keys under `vajra` of `--additional-config`, and the environment variables with the same meaning."""


@dataclass(frozen=True, slots=True)
class VajraOptions:
    """This scheduler's own options, in addition to vLLM's.

    Attributes:
        experiment: path of the experiment file; None selects vLLM's own algorithm.
        save_run: folder in which the session is recorded as a run; None records nothing.
    """

    experiment: Path | None = None
    save_run: Path | None = None


def vajra_options_of(additional: Any, environment: Mapping[str, str] = os.environ) -> VajraOptions:
    """Return the options; each is read from `--additional-config` or else from the environment. Raises `ConfigError`
    for an unknown or malformed option.
    """
    given = additional.get("vajra", {}) if isinstance(additional, Mapping) else {}
    where = "--additional-config vajra"
    if not isinstance(given, Mapping):
        raise ConfigError(Problem(where, f"is not a mapping ({given!r})", ", ".join(_VARIABLES)))
    for name in given:
        if name not in _VARIABLES:
            raise ConfigError(Problem(where, f"is not known ({name!r})", did_you_mean(name, list(_VARIABLES))))
    for name, value in given.items():
        if not isinstance(value, str) or not value:
            raise ConfigError(Problem(f"{where}.{name}", f"is not a name ({value!r})", "A text"))
    stated = {name: given.get(name) or environment.get(variable) for name, variable in _VARIABLES.items()}
    return VajraOptions(**{name: Path(value) for name, value in stated.items() if value})


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a vLLM.

    Attributes:
        num_blocks: number of KV blocks, without vLLM's unused null block.
        max_input_tokens: capacity of the workers' buffers in tokens; None if it is `max_step_tokens`.
        max_loras: maximum number of LoRA adapters in a step; 0 if adapters are disabled.
        drafts: sizes of drafts (speculative decoding).
    """

    model: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_step_tokens: int
    max_model_len: int
    prefix_caching: bool
    max_input_tokens: int | None = None
    version: tuple[int, int] = (0, 33)
    max_loras: int = 0
    drafts: DraftSizes = field(default_factory=DraftSizes)


def sizes_of(vllm_config: Any, block_size: int, num_blocks: int, version: tuple[int, int]) -> Sizes:
    """Return the sizes that follow from vLLM's options; `num_blocks` excludes the null block."""
    scheduler = vllm_config.scheduler_config
    return Sizes(
        model=str(vllm_config.model_config.model),
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=scheduler.max_num_seqs,
        max_step_tokens=scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
        max_model_len=vllm_config.model_config.max_model_len,
        prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
        max_input_tokens=scheduler.max_num_batched_tokens if scheduler.max_num_scheduled_tokens else None,
        version=version,
        max_loras=max_loras_of(vllm_config),
        drafts=draft_sizes_of(vllm_config, version),
    )


def fallback_of(config: SystemConfig, registry: Registry) -> dict[Layer, PolicyChoice] | None:
    """Return the policies of the preset `backend.vllm.fallback`; None without a fallback.

    Raises `ConfigError` if this preset cannot be used.
    """
    settings = config.backend.settings
    if settings.fallback is None:
        return None
    given = {
        "version": 1,
        "name": "fallback",
        "preset": settings.fallback,
        "backend": {"vllm": {"model": str(settings.model)}},
    }
    other = system_from_mapping(given, (), registry)
    scheduling = only_replicaset(other).scheduling
    return {layer: scheduling.choice(layer) for layer in Layer}


def orders_by_priority(config: SystemConfig) -> bool:
    """Return whether requests are ordered by priority, so that the arrival times stated by front ends are kept."""
    scheduling = only_replicaset(config).scheduling
    return scheduling.choice(Layer.REQUEST_PRIORITIZER).policy == "priority"


def described(config: SystemConfig, options: VajraOptions, *, is_async: bool, is_managed: bool = False) -> str:
    """Return a line for the log: the policies that schedule a vLLM, and the file that selects them."""
    scheduling = only_replicaset(config).scheduling
    policies = ", ".join(f"{layer.value} {scheduling.choice(layer).policy}" for layer in Layer)
    source = (
        f"by {options.experiment}" if options.experiment else "by vLLM's own algorithm (no experiment file is named)"
    )
    fallback = f"; fallback {config.backend.settings.fallback}" if config.backend.settings.fallback else ""
    recorded = f"; recorded in {options.save_run}" if options.save_run else ""
    mode = "asynchronous" if is_async else "synchronous"
    memory = f"; {_MANAGED}" if is_managed else ""
    return f"vajra-py schedules {source}: {policies}{fallback}{recorded}; scheduling is {mode}{memory}"


def experiment_of(sizes: Sizes, options: VajraOptions, scheduler: Any, registry: Registry) -> SystemConfig:
    """Return the configuration of the system, with all sizes of the vLLM filled in. Raises `ConfigError` if it is
    invalid.
    """
    replica: dict[str, Any] = {
        "max_batch_size": sizes.max_num_seqs,
        "max_batch_tokens": sizes.max_step_tokens,
        "max_model_len": sizes.max_model_len,
        "memory.block_size": sizes.block_size,
        "memory.num_blocks": sizes.num_blocks,
        "memory.prefix_cache.enabled": sizes.prefix_caching,
    }
    if sizes.max_loras:
        replica["adapters"] = {"max_loras": sizes.max_loras, "models": None}
    if sizes.drafts.num_tokens:
        replica["draft"] = sizes.drafts.config.model_dump()
        replica["memory.prefix_cache.drop_last_hit"] = sizes.drafts.drops_last_hit
    overrides = [f"replica.{name}={json.dumps(value)}" for name, value in replica.items()]
    if options.experiment is None:
        return system_from_mapping(_vllms_own(sizes, policy_options(scheduler)), overrides, registry)
    return _experiment_of_file(options.experiment, sizes, scheduler, overrides, registry)


def _experiment_of_file(
    path: Path, sizes: Sizes, scheduler: Any, overrides: list[str], registry: Registry
) -> SystemConfig:
    own = policy_options(scheduler)
    if own:
        name, value = next(iter(own.items()))
        message = f"is set ({value!r}), but the policies of {path} decide instead of vLLM"
        raise ConfigError(Problem(f"--{name.replace('_', '-')}", message, "Set it in the experiment file"))
    entries = read_mapping(path)
    if "replicasets" in entries:
        message = "has several replicasets, and a vLLM is one replica"
        raise ConfigError(Problem(str(path), message, "Allowed: `scheduling` or `preset` at the top of the file"))
    scheduling = entries.get("scheduling")
    if isinstance(scheduling, dict) and "preset" not in entries and "replicaset_scheduler" not in scheduling:
        overrides = ["scheduling.replicaset_scheduler=round_robin", *overrides]  # any policy will do for one replica
    backend = entries.get("backend")
    section = backend.get("vllm") if isinstance(backend, dict) else None
    if not isinstance(section, dict):
        overrides = [f"backend={json.dumps({'vllm': {'model': sizes.model}})}", *overrides]
    elif "model" not in section:
        overrides = [f"backend.vllm.model={json.dumps(sizes.model)}", *overrides]
    config = load_system(path, overrides, registry)
    replica = only_replicaset(config).replica
    if sizes.max_loras:  # vLLM loads and computes the adapters, so the check below must not reject them
        replica = replica.model_copy(update={"adapters": None})
    if sizes.drafts.num_tokens:  # vLLM proposes and verifies the drafts, so the check below must not reject them
        replica = replica.model_copy(update={"draft": DraftConfig()})
    problems = problems_of(f"{path} replica", replica)
    if problems:
        raise ConfigError(problems)
    return config


def _vllms_own(sizes: Sizes, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a system that runs vLLM's own algorithm; `options` holds vLLM's options that differ
    from their defaults.
    """
    params = {
        "long_prefill_threshold_tokens": options.get("long_prefill_token_threshold", 0),
        "adaptive_share_tokens": sizes.max_input_tokens,
        "adaptive_long_prefill_threshold": options.get("long_prefill_token_threshold_adaptive", False),
        "watermark_fraction": options.get("watermark", 0.0),
        "prefill_interval_steps": options.get("prefill_schedule_interval", 1) if sizes.version >= (0, 33) else 1,
        "max_num_active_requests": options.get("max_num_active_seqs"),
        "reserve_full_prompt": options.get("scheduler_reserve_full_isl", True),
        "chunked_prefill": options.get("enable_chunked_prefill", True),
    }
    by_priority = options.get("policy") == "priority"
    params["continues_after_own_preemption"] = sizes.version >= (0, 33)
    # vLLM puts a victim at the front of its queue, unless the queue is ordered by priority, arrival and request id.
    order = ("priority", {"ties": "request_id"}) if by_priority else ("fcfs", {"preempted": "first"})
    params["victim"] = "lowest_priority" if by_priority else "latest_admitted"
    return {
        "version": 1,
        "name": "vllm",
        "preset": "vllm-v1-priority" if by_priority else "vllm-v1",
        "scheduling": {
            "replica_scheduler": {"policy": "vllm_v1", "params": params},
            "request_prioritizer": dict(zip(("policy", "params"), order, strict=True)),
        },
        "backend": {"vllm": {"model": sizes.model}},
    }
