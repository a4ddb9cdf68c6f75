"""Start vLLM's workers without its engine core: load the model, measure and allocate KV memory.

Importing this loads neither vLLM nor a tensor library.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vajra_py.engine.compute import ModelFacts, RunnerOptions
from vajra_py.engine.compute.model.inspect import free_host_bytes, readable_bytes
from vajra_py.errors import ConfigError, ExecutorError, Problem
from vajra_py.vllm.model_facts import kv_bytes_per_token_of, model_facts_of
from vajra_py.vllm.options import VllmOptions
from vajra_py.vllm.support import check_cache, check_options, check_version, installed_version

if TYPE_CHECKING:
    from vajra_py.vllm.runner import VllmRunner

_PLACEHOLDER_BYTES = 1 << 20
"""Bytes of KV memory configured for a vLLM on a CPU until `allocate` sets the number of blocks."""


def load_vllm(options: RunnerOptions) -> VllmRunner:
    """Return a runner on vLLM's workers, with weights loaded and KV memory not yet allocated.

    Raises `ConfigError` if vLLM is not installed, or does not support the settings.
    """
    assert isinstance(options, VllmOptions)
    version = installed_version()
    check_version(version)
    # vLLM's second model runner expects requests in another form than `VllmRunner` sends.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vajra_py.vllm.runner import VllmRunner

    return VllmRunner(VllmWorkers(options, version), options)


class VllmWorkers:
    """The workers of one vLLM, in this process or, with several shards, in vLLM's own processes.

    Attributes:
        facts: facts of the loaded model.
        is_cpu: True if this vLLM computes on a CPU.
    """

    def __init__(self, options: VllmOptions, version: str) -> None:
        from vllm.platforms import current_platform
        from vllm.v1.executor import Executor

        self.is_cpu = current_platform.is_cpu()
        self._options = options
        self._config = _engine_config(options, self.is_cpu)
        check_options(self._config, has_core=False)
        if self.is_cpu and options.num_threads is not None and options.shards == 1:
            import torch

            torch.set_num_threads(options.num_threads)
        try:
            self._executor: Any = Executor.get_class(self._config)(self._config)
        except Exception as error:
            _clean_up()
            raise ConfigError(Problem(f"model {options.model}", f"vLLM cannot load it ({_line(error)})")) from error
        self._available: list[int] | None = None
        try:
            self._specs = self._executor.get_kv_cache_specs()
            self.facts = self._facts(version)
        except Exception:
            self.close()
            raise

    def _facts(self, version: str) -> ModelFacts:
        from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

        config, specs = self._config, self._specs
        every = [spec for each in specs for spec in each.values()]
        layout = resolve_kv_cache_layout(config, self._executor.get_supported_kv_cache_layouts(), every)
        self._executor.set_kv_cache_layout(layout.name)
        block_size = self._options.block_size
        for spec in every:
            if spec.block_size != block_size:
                message = f"this vLLM computes with KV blocks of {spec.block_size} tokens (got {block_size})"
                raise ConfigError(Problem("replica.memory.block_size", message, f"Allowed: {spec.block_size}"))
        model, parallel = config.model_config, config.parallel_config
        num_elements, weight_bytes = self._executor.collective_rpc("apply_model", args=(_size_of,))[0]
        return ModelFacts(
            **model_facts_of(config),
            num_parameters=num_elements * self._options.shards,
            weight_bytes=weight_bytes,
            num_layers=len(specs[0]),
            num_query_heads=model.get_num_attention_heads(parallel),
            num_kv_heads=model.get_num_kv_heads(parallel),
            head_dim=model.get_head_size(),
            kv_bytes_per_token=kv_bytes_per_token_of(specs[0].values(), block_size),
            block_size=block_size,
            eos_token_ids=_eos_tokens(model),
            forward=f"vllm {version}",
        )

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a KV block on one device."""
        return self.facts.kv_bytes_per_token * self.facts.block_size

    def num_blocks_in(self, memory_fraction: float) -> int:
        """Return the number of KV blocks that fit into this fraction of device memory.

        On GPUs, `memory_fraction` is ignored: the fraction in the options, with which vLLM was configured, applies.
        Raises `ConfigError` if the blocks cannot hold a single sequence of the maximum length.
        """
        if self.is_cpu:
            num_bytes = int(free_host_bytes() * memory_fraction) // self._options.shards
        else:
            num_bytes = min(self._measure())
        num_blocks = num_bytes // self.bytes_per_block - 1
        needed = -(-self.facts.max_model_len // self.facts.block_size)
        if num_blocks < needed:
            message = (
                f"{readable_bytes(max(0, num_bytes))} are left for KV memory, and one sequence of "
                f"{self.facts.max_model_len} tokens needs {readable_bytes(needed * self.bytes_per_block)}"
            )
            raise ConfigError(
                Problem("replica.memory.memory_fraction", message, "A larger share, or a smaller max_model_len")
            )
        return num_blocks

    def _measure(self) -> list[int]:
        """Return the bytes available for KV memory on each device. vLLM's profiling run measures them, and also
        compiles the model.
        """
        if self._available is None:
            self._available = self._executor.determine_available_memory()
        return self._available

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV memory, and warm up.

        Raises `ConfigError` for a model that does not have a single block table of full attention, and `ExecutorError`
        if the blocks cannot be allocated.
        """
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

        config = self._config
        config.cache_config.num_gpu_blocks_override = config.cache_config.num_gpu_blocks = num_blocks + 1
        try:
            available = self._measure()
            caches = get_kv_cache_configs(config, self._specs, available)
            for cache in caches:
                check_cache(cache)
                cache.kv_cache_layout = config.cache_config.kv_cache_layout
                cache.hash_block_size = cache.cache_hit_alignment_tokens = self.facts.block_size
            config.validate_block_size()
            self._executor.initialize_from_config(caches)
            self._executor.compile_or_warm_up_model()
        except ConfigError:
            raise
        except Exception as error:
            raise ExecutorError(f"vllm: {num_blocks} KV blocks cannot be allocated ({_line(error)}).") from error

    def execute(self, message: Any) -> Any:
        """Return the output of vLLM's model runner for one `SchedulerOutput`."""
        output = self._executor.execute_model(message)
        return self._executor.sample_tokens(None) if output is None else output

    def close(self) -> None:
        """Release memory and processes; may be called twice."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()
            _clean_up()


def _clean_up() -> None:
    """Destroy vLLM's global process groups, so that another vLLM can be started in this process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


def _engine_config(options: VllmOptions, is_cpu: bool) -> Any:
    """Return the configuration of a vLLM. Raises `ConfigError` with vLLM's message if it rejects the settings."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    if options.device.partition(":")[0] != ("cpu" if is_cpu else "cuda"):
        built = "a CPU" if is_cpu else "GPUs"
        message = f"the installed vLLM is built for {built} (got {options.device})"
        raise ConfigError(Problem("backend.vllm.device", message, f"Allowed: {'cpu' if is_cpu else 'cuda'}"))
    arguments: dict[str, Any] = {
        "model": str(Path(options.model).expanduser()),
        "skip_tokenizer_init": True,
        "dtype": "float32" if is_cpu and options.dtype == "auto" else options.dtype,
        "seed": options.seed,
        "max_num_seqs": options.max_batch_size,
        "max_num_batched_tokens": options.max_step_tokens,
        "block_size": options.block_size,
        "enable_prefix_caching": False,
        "tensor_parallel_size": options.shards,
        "distributed_executor_backend": UniProcExecutor if options.shards == 1 else "mp",
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **({} if options.max_model_len is None else {"max_model_len": options.max_model_len}),
        **({"load_format": "dummy"} if options.random_weights else {}),
        **(
            {"kv_cache_memory_bytes": _PLACEHOLDER_BYTES}
            if is_cpu
            else {"gpu_memory_utilization": options.memory_fraction}
        ),
        **options.engine_args,
    }
    _check_names(options.engine_args, EngineArgs)
    try:
        return EngineArgs(**arguments).create_engine_config()
    except Exception as error:  # vLLM raises many types of exceptions
        raise ConfigError(Problem("backend.vllm", f"vLLM does not take these settings ({_line(error)})")) from error


def _check_names(given: Mapping[str, Any], arguments: Any) -> None:
    from dataclasses import fields

    from vajra_py.errors import did_you_mean

    known = [one.name for one in fields(arguments)]
    wrong = [name for name in given if name not in known]
    if wrong:
        raise ConfigError(
            [Problem(f"backend.vllm.engine_args.{name}", "vLLM has none of that name", did_you_mean(name, known))
             for name in wrong]
        )  # fmt: skip


def _size_of(model: Any) -> tuple[int, int]:
    """Return (number of elements, number of bytes) of a model's weights."""
    weights = list(model.parameters())
    return sum(one.numel() for one in weights), sum(one.numel() * one.element_size() for one in weights)


def _eos_tokens(model: Any) -> tuple[int, ...]:
    """Return the model's end-of-sequence tokens, from its generation settings or else its configuration."""
    value = model.try_get_generation_config().get("eos_token_id")
    if value is None:
        value = getattr(model.hf_text_config, "eos_token_id", None)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _line(error: BaseException) -> str:
    """Return an error's text, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
