"""Choose the KV memory for a vLLM's model: this project's memory or vLLM's KV manager. Options that do not work with
vLLM's KV manager are errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vajra_py.errors import ConfigError, Problem
from vajra_py.vllm.managed_kv import ManagedKv, ManagedSizes
from vajra_py.vllm.mechanism import KvMemory, MakeMemory, ReplicaConfig, ReplicaLimits, Retention
from vajra_py.vllm.settings import VajraOptions
from vajra_py.vllm.support import block_size_of, needs_manager

_WHY = "models with sliding windows, states of layers, or several block tables"


def managed_memory(
    vllm_config: Any,
    kv_cache_config: Any,
    block_sizes: tuple[int, int],
    options: VajraOptions,
    num_in_flight: Callable[[str], int],
) -> MakeMemory | None:
    """Return the builder of a memory on vLLM's KV manager; None if the model does not need this manager.

    `block_sizes` are vLLM's block size and the size of hashed blocks, in tokens. Raises `ConfigError` for options that
    cannot be used with this memory.
    """
    if not needs_manager(kv_cache_config, *block_sizes):
        return None
    if options.save_run is not None:
        message = f"a session is not recorded for such a model, since its decisions could not be replayed ({_WHY})"
        raise ConfigError(Problem("--additional-config vajra.save_run", message, "Leave the option out"))
    if vllm_config.kv_events_config is not None and vllm_config.kv_events_config.enable_kv_cache_events:
        message = f"KV events are not published for such a model ({_WHY})"
        raise ConfigError(Problem("--kv-events-config", message, "Leave the option out"))
    if vllm_config.kv_transfer_config is not None and kv_cache_config.needs_kv_cache_zeroing:
        message = f"a connector could load to blocks while they are cleared before a step ({_WHY})"
        raise ConfigError(Problem("--kv-transfer-config", message, "Leave the option out"))
    scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
    sizes = ManagedSizes(
        block_size=block_size_of(kv_cache_config, block_sizes[0]),
        scheduler_block_size=block_sizes[0],
        hash_block_size=block_sizes[1],
        max_model_len=vllm_config.model_config.max_model_len,
        max_step_tokens=scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
        max_in_flight_tokens=vllm_config.max_in_flight_tokens,
        lag_tokens=1 if scheduler.async_scheduling else 0,
        caches=bool(vllm_config.cache_config.enable_prefix_caching),
        drops_last_hit=speculative is not None and bool(speculative.use_eagle_block_drop()),
    )

    def make(settings: ReplicaConfig, limits: ReplicaLimits, retention: Retention | None) -> KvMemory:
        _check(settings, retention)
        return ManagedKv(kv_cache_config, sizes, num_in_flight)

    return make


def _check(settings: ReplicaConfig, retention: Retention | None) -> None:
    """Raise `ConfigError` for settings of the memory that vLLM's manager does not support."""
    if retention is not None:
        message = f"{retention.name!r} orders cached content, which is vLLM's affair here ({_WHY})"
        raise ConfigError(Problem("scheduling.retention", message, "Allowed: null"))
    if settings.memory.reservation == "prompt":
        message = f"a prompt is not given all its blocks at once where its windows leave some behind ({_WHY})"
        raise ConfigError(Problem("replica.memory.reservation", message, "Allowed: incremental"))
    cache = settings.memory.prefix_cache
    followed = {"reuse_order": "lru", "release_order": "tail_first", "retain_freed": True, "duplicates": "keep_first"}
    for name, value in followed.items():
        if cache.enabled and getattr(cache, name) != value:
            message = f"is {getattr(cache, name)!r}, and vLLM's manager follows its own rule ({_WHY})"
            raise ConfigError(Problem(f"replica.memory.prefix_cache.{name}", message, f"Allowed: {value!r}"))
