"""Memory that is available for KV blocks.

Invariants:
    - On a CPU, the usable memory is the configured share of the memory that was free before the weights were loaded,
      less the weights. On CUDA, it is the configured share of the whole device, less the memory already in use.
    - KV blocks take the usable memory less the memory that the largest step needs.
"""

from __future__ import annotations

from typing import Any

import torch

from vajra_kernels.config import MAX_PIECES
from vajra_kernels.swap import BUFFER_BYTES, NUM_BUFFERS
from vajra_py.engine.compute.interface import ModelFacts, RunnerOptions
from vajra_py.engine.compute.model.inspect import free_host_bytes

_LOGIT_COPIES = 6
"""Number of float32 copies of the logits that sampling with every feature holds at once."""
_WIDTH_COPIES = 8
"""Number of copies of a layer's widest activation held at once in a forward pass (measured on tested families: at most
6)."""

_NUM_COPIES = 3
"""Number of concurrent transfers between device and host, each with its own buffers: one in order with the steps, and
one concurrent with them in each direction."""


def usable_bytes(device: torch.device, fraction: float, weight_bytes: int) -> int:
    """Return the number of bytes that KV memory and a step's buffers may take together."""
    if device.type == "cpu":
        # The weights are loaded, so they are not free memory: their bytes are added before the fraction is taken.
        return int((free_host_bytes() + weight_bytes) * fraction) - weight_bytes
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(total * fraction) - (total - free)


def step_bytes(facts: ModelFacts, config: Any, options: RunnerOptions, device: torch.device) -> int:
    """Return the number of bytes that the largest step holds at once, estimated from the model's widths."""
    activations = options.max_step_tokens * _token_bytes(facts, config)
    rows = min(options.max_requests * (1 + options.max_drafts), options.max_step_tokens)
    logits = rows * facts.vocab_size * _LOGIT_COPIES * 4
    if device.type == "cpu":
        return activations + logits
    # A GPU also holds partial results of attention. CUDA graphs have a memory pool of their own, with a second set of
    # activations, logits and partial results.
    partial_results = (MAX_PIECES + options.max_requests) * facts.num_query_heads * (facts.head_dim + 1) * 4
    graph_rows = min(options.max_graph_rows, options.max_requests)
    graphs = graph_rows * (_token_bytes(facts, config) + facts.vocab_size * 2 * 4)
    partial_results *= 2 if graph_rows else 1
    return activations + logits + graphs + partial_results + _NUM_COPIES * NUM_BUFFERS * BUFFER_BYTES


def _token_bytes(facts: ModelFacts, config: Any) -> int:
    """Return the number of bytes of one token's activations."""
    itemsize = 4 if facts.dtype == "float32" else 2
    hidden = int(config.hidden_size)
    experts = int(getattr(config, "num_experts_per_tok", None) or 1)
    inner = int(
        getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None) or 4 * hidden
    )
    width = max(hidden, inner * experts, facts.num_query_heads * facts.head_dim)
    return (width * _WIDTH_COPIES + hidden * 4) * itemsize
