"""Operations of a decoder layer between its products and its attention, one launch each.

Triton kernels, for tensors that ``backend.uses_triton`` allows. Everything is computed in float32 and rounded once.
"""

from __future__ import annotations

import torch

from vajra_kernels.operands import Norm, Rotation

ACTIVATIONS = ("silu", "gelu_tanh")
"""Activations that ``gated_activation`` supports; ``gelu_tanh`` is the approximation by tanh (Hendrycks and Gimpel 2016)."""


def add_norm(
    hidden: torch.Tensor, norm: Norm, part: torch.Tensor | None = None, part_norm: Norm | None = None
) -> torch.Tensor:
    """Norm of hidden [T, W] after ``hidden += part_norm(part)``, which is in place. Rows are dense."""
    from vajra_kernels.norm import norm_launch

    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    norm_launch(out, hidden, norm, part, part_norm).run()
    return out


def rotate_and_write(
    qkv: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
    rotation: Rotation,
    norm: Norm | None = None,
) -> torch.Tensor:
    """Rotated queries [T, Hq, D] of qkv [T, (Hq + 2 Hkv) * D]; keys and values go to their slots of the caches.

    Args:
        qkv: heads of queries, keys and values, rows dense.
        caches: (K, V), each [num_blocks, block_size, Hkv, D], in qkv's dtype.
        slot_mapping: int64 [T]; a token with slot -1 is not written.
        rotation: of queries and keys.
        norm: over each query and key head before, with a weight [Hq + Hkv, D].
    """
    from vajra_kernels.rotate import rotate_launch

    num_kv_heads, dim = caches[0].shape[2:]
    num_query_heads = qkv.shape[1] // dim - 2 * num_kv_heads
    query = torch.empty((qkv.shape[0], num_query_heads, dim), dtype=qkv.dtype, device=qkv.device)
    rotate_launch(query, qkv, caches, slot_mapping, rotation, norm).run()
    return query


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """``act(gate) * up`` [T, W] of gate_up [T, 2 W], rows dense; ``activation`` is one of ``ACTIVATIONS``."""
    from vajra_kernels.activation import gated_launch

    out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device)
    gated_launch(out, gate_up, activation).run()
    return out
