"""Operations of a decoder layer between its matrix products and its attention, one launch each.

These are Triton kernels, for tensors on devices for which ``backend.uses_triton`` is True. They compute in float32 and
round each result once.
"""

from __future__ import annotations

import torch

from vajra_kernels.operands import Norm, Rotation

ACTIVATIONS = ("silu", "gelu_tanh")
"""Activations that ``gated_activation`` supports; ``gelu_tanh`` is the approximation by tanh (Hendrycks and Gimpel 2016)."""


def add_norm(
    hidden: torch.Tensor, norm: Norm, part: torch.Tensor | None = None, part_norm: Norm | None = None
) -> torch.Tensor:
    """Add ``part`` [T, W] to ``hidden`` [T, W] in place, and return the norm of the sum. Rows must be dense.

    With ``part_norm``, the norm of ``part`` is added instead; without ``part``, nothing is added.
    """
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
    """Return the rotated queries [T, Hq, D] of qkv [T, (Hq + 2 Hkv) * D], and write keys and values to the caches.

    Args:
        qkv: heads of queries, keys and values, with dense rows.
        caches: (K, V), each [num_blocks, block_size, Hkv, D], in qkv's dtype.
        slot_mapping: int64 [T]; keys and values of a token with slot -1 are not written.
        rotation: rotary embedding of queries and keys.
        norm: norm of each query and key head before the rotation, with a weight [Hq + Hkv, D]; None for no norm.
    """
    from vajra_kernels.rotate import rotate_launch

    num_kv_heads, dim = caches[0].shape[2:]
    num_query_heads = qkv.shape[1] // dim - 2 * num_kv_heads
    query = torch.empty((qkv.shape[0], num_query_heads, dim), dtype=qkv.dtype, device=qkv.device)
    rotate_launch(query, qkv, caches, slot_mapping, rotation, norm).run()
    return query


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return ``act(gate) * up`` [T, W] of gate_up [T, 2 W] with dense rows.

    ``activation`` is one of ``ACTIVATIONS``.
    """
    from vajra_kernels.activation import gated_launch

    out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device)
    gated_launch(out, gate_up, activation).run()
    return out
