"""Compile every kernel that a run may need before its first request."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch

from vajra_kernels import build_metadata
from vajra_kernels.sampling import Column, sample_tokens
from vajra_py.engine.compute.interface import RunnerOptions
from vajra_py.engine.compute.kv_memory import KvMemory
from vajra_py.engine.compute.prepare import PreparedModel

_log = logging.getLogger(__name__)


def warm_up(model: PreparedModel, memory: KvMemory, options: RunnerOptions) -> None:
    """Run each kernel of the model once in every specialisation that steps can need; KV memory must not be in use yet.

    With several ranks the forward pass, in which they speak to each other, is left to the first step.
    """
    started = time.perf_counter()
    num_programs = _attention(model, memory, options)
    if options.num_ranks == 1:
        _forward_and_sample(model, memory)
    memory.warm_up()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    _log.info("kernels ready after %.1f s (%d programs of attention)", time.perf_counter() - started, num_programs)


def _attention(model: PreparedModel, memory: KvMemory, options: RunnerOptions) -> int:
    from vajra_kernels.warm_up import AttentionKind, Limits, warm_up_attention

    longest = model.facts.max_model_len
    limits = Limits(options.max_requests, min(options.max_step_tokens, longest), longest)
    done: set[str] = set()
    for layer in {replace(one, layer_index=0): one for one in model.layers}.values():
        spreads = options.kv_groups > 1
        kind = AttentionKind(layer.num_query_heads, layer.scale, layer.window, layer.softcap, layer.has_sinks)
        cache = memory.caches[layer.layer_index]
        done |= warm_up_attention(kind, cache, limits)
        if spreads:
            for causal in (True, False):
                done |= warm_up_attention(replace(kind, with_lse=True), cache, replace(limits, causal=causal))
    return len(done)


def _forward_and_sample(model: PreparedModel, memory: KvMemory) -> None:
    """A step of two tokens that are written nowhere, and one row sampled."""
    device = model.device
    metadata = build_metadata([2], [2], [[0]], model.facts.block_size, device)
    metadata.slot_mapping.fill_(-1)
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    logits = model.forward(zeros, torch.arange(2, device=device), zeros[:1], metadata, memory.caches)
    parameters = torch.zeros((1, len(Column)), dtype=torch.float64, device=device)
    parameters[:, Column.HISTORY] = -1.0
    sample_tokens(logits, parameters, torch.zeros((1, logits.shape[1]), dtype=torch.int32, device=device))
