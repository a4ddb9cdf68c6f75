"""Operations of a decoder layer between its products and its attention, one launch each.

Triton alone (``backend.uses_triton``): on a CPU a layer's own arithmetic in torch is faster.
"""

from __future__ import annotations

import torch

from vajra_kernels.activation import ACTIVATIONS, gated_launch
from vajra_kernels.norm import norm_launch
from vajra_kernels.rotate import Rotation, rotate_launch

__all__ = ["ACTIVATIONS", "Rotation", "add_norm", "gated_activation", "rotate_and_write"]

Norm = tuple[torch.Tensor, float]
"""(weight, epsilon) of a root-mean-square norm; the weight may be wider than what it multiplies."""


def add_norm(
    hidden: torch.Tensor, norm: Norm, part: torch.Tensor | None = None, part_norm: Norm | None = None
) -> torch.Tensor:
    """Norm of hidden [T, W] after ``hidden += part_norm(part)``, which is in place. Rows are dense."""
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
        slot_mapping: int64 [T], -1 for nowhere.
        rotation: of queries and keys.
        norm: over each query and key head before, with a weight [Hq + Hkv, D].
    """
    num_kv_heads, dim = caches[0].shape[2:]
    num_query_heads = qkv.shape[1] // dim - 2 * num_kv_heads
    query = torch.empty((qkv.shape[0], num_query_heads, dim), dtype=qkv.dtype, device=qkv.device)
    rotate_launch(query, qkv, caches, slot_mapping, rotation, norm).run()
    return query


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """``act(gate) * up`` [T, W] of gate_up [T, 2 W], rows dense; ``activation`` is one of ``ACTIVATIONS``."""
    out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device)
    gated_launch(out, gate_up, activation).run()
    return out
