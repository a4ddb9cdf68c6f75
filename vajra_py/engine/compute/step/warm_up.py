"""Compile, before the first request, every kernel that a run may need."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from vajra_kernels import merge_partials
from vajra_kernels.operands import Column
from vajra_kernels.sampling import sample_tokens
from vajra_py.engine.compute.batch import BatchState
from vajra_py.engine.compute.interface import Chunk, RunnerOptions, StepInput
from vajra_py.engine.compute.model.kv_memory import KvMemory
from vajra_py.engine.compute.model.prepare import PreparedModel
from vajra_py.engine.compute.model.ranks import Ranks

_log = logging.getLogger(__name__)


def warm_up(model: PreparedModel, memory: KvMemory, options: RunnerOptions, ranks: Ranks) -> None:
    """Run each kernel of the model once in every specialisation that steps can need. KV memory must not be in use yet.

    All ranks of a replica must call this together, since they exchange tensors in a forward pass.
    """
    started = time.perf_counter()
    num_programs = _attention(model, memory, options)
    for step in _steps(model, options, ranks):
        _forward_and_sample(step, model, memory, ranks)
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


def _steps(model: PreparedModel, options: RunnerOptions, ranks: Ranks) -> Iterator[StepInput]:
    """Yield steps that together use every kernel of a forward pass.

    The first step has one request of two tokens, within this rank's KV group. With several groups, a second step also
    has a request spread over as many groups as possible. The kernel that merges the results of fewer groups is run here
    directly.
    """
    if ranks.groups is None:
        yield StepInput([Chunk(0, [0, 0], 0, True)])
        return
    own, size = ranks.groups.own, options.kv_group_tokens
    within = Chunk(0, [0, 0], 0, True, groups=(own,))
    yield StepInput([within])
    most = min(options.kv_groups, -(-model.facts.max_model_len // size))
    if own < most > 1:
        yield StepInput([within, Chunk(1, [0], (most - 1) * size, True, groups=range(most))])
    for shape in {(one.num_query_heads, one.value_dim) for one in model.layers}:
        for count in range(2, most):
            parts = torch.zeros((count, 1, *shape), device=model.device)
            merge_partials(parts, parts[..., 0].contiguous())


def _forward_and_sample(step: StepInput, model: PreparedModel, memory: KvMemory, ranks: Ranks) -> None:
    """Compute a step with all KV in block 0, and sample if this rank computes logits."""
    state = BatchState(2, model.facts.max_model_len, model.facts.block_size, model.device, ranks.groups)
    inputs = state.tensors(state.take(ranks.part(step)))
    logits = model.forward(inputs.token_ids, inputs.positions, inputs.rows, inputs.metadata, memory.caches)
    if logits.shape[0]:
        parameters = torch.zeros((logits.shape[0], len(Column)), dtype=torch.float64, device=model.device)
        parameters[:, Column.HISTORY] = -1.0
        sample_tokens(logits, parameters, torch.zeros((1, logits.shape[1]), dtype=torch.int32, device=model.device))
