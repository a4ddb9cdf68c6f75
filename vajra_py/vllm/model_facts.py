"""Derive facts about a vLLM's model from its configuration and the specs of its KV cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vajra_py.vllm.support import holds_states


def model_facts_of(vllm_config: Any) -> dict[str, Any]:
    """Return the facts of a vLLM's model, by field name of `vajra_py.engine.compute.ModelFacts`."""
    model = vllm_config.model_config
    return {
        "model_type": model.hf_text_config.model_type,
        "max_model_len": model.max_model_len,
        "vocab_size": model.get_vocab_size(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(vllm_config.device_config.device_type),
    }


def layer_specs_of(kv_cache_config: Any) -> list[Any]:
    """Return the spec of every layer's KV cache, on one device."""
    specs: list[Any] = []
    for group in kv_cache_config.kv_cache_groups:
        unlike = getattr(group.kv_cache_spec, "kv_cache_specs", None)  # set if the layers of a group differ in size
        specs += [group.kv_cache_spec] * len(group.layer_names) if unlike is None else unlike.values()
    return specs


def kv_bytes_per_token_of(layer_specs: Iterable[Any], block_size: int) -> int:
    """Return the bytes of K and V per token, in all layers of one device; layers that keep states count as 0."""
    return int(sum(spec.page_size_bytes for spec in layer_specs if not holds_states(spec))) // block_size
