"""Build a server's system from flags with vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from vajra_py.config import SystemConfig, system_from_mapping
from vajra_py.engine.llm import CPU_MEMORY_FRACTION
from vajra_py.errors import ConfigError, Problem, did_you_mean
from vajra_py.plugins import Registry

PRESETS = {"fcfs": "vllm-v1", "priority": "vllm-v1-priority"}
DEFAULT_MAX_QUEUED = 1024


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """Flags of `vajra serve --model DIR`, with vLLM's names; None: the default of the preset or of the server."""

    model: str
    preset: str | None = None
    scheduling_policy: str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float | None = None
    enable_prefix_caching: bool | None = None
    tensor_parallel_size: int | None = None
    data_parallel_size: int | None = None
    dtype: str | None = None
    device: str | None = None
    load_format: str | None = None
    seed: int | None = None
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None

    def mapping(self) -> dict[str, Any]:
        """Return the settings in the form of a system file. Raises `ConfigError`."""
        replicas = self.data_parallel_size or 1
        is_cpu = self.device in (None, "cpu")
        fraction = self.gpu_memory_utilization
        if fraction is None and is_cpu:
            fraction = CPU_MEMORY_FRACTION
        memory = {
            "block_size": self.block_size,
            "num_blocks": self.num_gpu_blocks_override,
            "memory_fraction": fraction,
            "prefix_cache": _given(enabled=self.enable_prefix_caching),
        }
        engine = _given(
            model=self.model,
            device=self.device,
            dtype=self.dtype,
            tensor_parallel=self.tensor_parallel_size,
            random_weights=True if self.load_format == "dummy" else None,
            workers="process" if replicas > 1 else None,
        )
        queued = self.max_num_queued_reqs
        return {
            "version": 1,
            "name": "serve",
            "preset": self._preset(),
            **_given(seed=self.seed),
            "replica": _given(
                max_batch_size=self.max_num_seqs,
                max_batch_tokens=self.max_num_batched_tokens,
                max_model_len=self.max_model_len,
                memory=_given(**memory),
            ),
            "num_replicas": replicas,
            "admission": _given(
                max_queued_requests=DEFAULT_MAX_QUEUED if queued is None else queued,
                max_queued_tokens=self.max_num_queued_tokens,
            ),
            "backend": {"engine": engine},
        }

    def _preset(self) -> str:
        policy = self.scheduling_policy
        if policy is None:
            return self.preset or PRESETS["fcfs"]
        if self.preset is not None:
            raise ConfigError(Problem("--preset", "does not go with --scheduling-policy", "Allowed: one of the two"))
        if policy not in PRESETS:
            raise ConfigError(Problem("--scheduling-policy", f"is unknown ({policy!r})", did_you_mean(policy, PRESETS)))
        return PRESETS[policy]


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def config_of_flags(flags: ModelFlags, overrides: Sequence[str], registry: Registry) -> SystemConfig:
    """Return the system defined by flags, with `overrides` (`a.b=c`) applied. Raises `ConfigError`."""
    return system_from_mapping(flags.mapping(), overrides, registry)


FLAG_NAMES = tuple(one.name for one in fields(ModelFlags))
