"""Tensor operations around attention: cache writes, block copies, merging of partial results.

Invariants:
    - Each operation runs on its tensors' device: by Triton on CUDA, by torch on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vajra_kernels.backend import uses_triton
from vajra_kernels.cpu import copy_blocks_cpu, merge_partials_cpu, write_kv_cpu


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write this step's keys [T, Hkv, D] and values [T, Hkv, Dv] into the cache.

    Args:
        key: any strides with a dense last dimension; converted to the cache's dtype.
        value: any strides with a dense last dimension; converted to the cache's dtype.
        k_cache: [num_blocks, block_size, Hkv, D].
        v_cache: [num_blocks, block_size, Hkv, Dv].
        slot_mapping: int64 [T], block * block_size + offset, distinct. On CUDA, a token with a negative slot is not
            written (for padding rows of a graph); on the CPU, which has no padding, such a slot raises IndexError.
    """
    if not uses_triton(key.device):
        write_kv_cpu(key, value, k_cache, v_cache, slot_mapping)
    else:
        from vajra_kernels.kv_write import kv_write_launch

        kv_write_launch(key, value, k_cache, v_cache, slot_mapping).run()


def merge_partials(
    parts: torch.Tensor | Sequence[torch.Tensor], lses: torch.Tensor | Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over a whole KV sequence from attention over disjoint parts of it (KV parallelism).

    Args:
        parts: P outputs [T, Hq, D], stacked as [P, T, Hq, D] or as a sequence.
        lses: natural log-sum-exps of the parts, float32 [P, T, Hq] or a sequence of [T, Hq]; -inf for a part without
            positions.

    Returns:
        (out [T, Hq, D] in the parts' dtype, lse float32 [T, Hq]).
    """
    stacked = parts if isinstance(parts, torch.Tensor) else torch.stack(list(parts))
    stacked_lses = lses if isinstance(lses, torch.Tensor) else torch.stack(list(lses))
    if stacked.shape[:3] != stacked_lses.shape or stacked.dim() != 4:
        raise ValueError(
            f"merge_partials: outputs {tuple(stacked.shape)}, log-sum-exps {tuple(stacked_lses.shape)}. "
            "Shapes are [P, T, Hq, D] and [P, T, Hq]."
        )
    if not uses_triton(stacked.device):
        return merge_partials_cpu(stacked, stacked_lses)
    from vajra_kernels.merge import merge_launch

    out = torch.empty(stacked.shape[1:], dtype=stacked.dtype, device=stacked.device)
    lse = torch.empty(stacked_lses.shape[1:], dtype=torch.float32, device=stacked.device)
    merge_launch(stacked, stacked_lses, out, lse).run()
    return out, lse


def copy_blocks(src: torch.Tensor, dst: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy whole KV blocks between two caches on one device, or within one; on a GPU in one launch.

    Args:
        src: [num_blocks, block_size, Hkv, D], or with a leading dimension of layers; blocks dense in memory.
        dst: as ``src``, with any number of blocks; or ``src`` itself, if no block is both a source and a destination.
        pairs: int64 [n, 2] of (block of src, block of dst), with distinct destinations; on the host or on the device.
    """
    _check_pairs(src, dst, pairs)
    if not uses_triton(src.device):
        copy_blocks_cpu(src, dst, pairs)
    else:
        from vajra_kernels.cache import block_words

        copy_words(block_words(src), block_words(dst), pairs.to(src.device, non_blocking=True).contiguous())


def copy_words(src: torch.Tensor, dst: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy blocks of words from ``src`` to ``dst``, each [num_layers, num_blocks, words], dense in the last dimension.

    ``pairs`` is int64 [n, 2], as for ``copy_blocks``, and on the same device.
    """
    if pairs.shape[0] == 0:
        return
    if not uses_triton(src.device):
        dst[:, pairs[:, 1]] = src[:, pairs[:, 0]]
    else:
        from vajra_kernels.block_copy import copy_words_launch

        copy_words_launch(src, dst, pairs.contiguous()).run()


def _check_pairs(src: torch.Tensor, dst: torch.Tensor, pairs: torch.Tensor) -> None:
    if src.device != dst.device:
        raise ValueError(
            f"copy_blocks: caches on {src.device} and {dst.device}. Both are on one device (swap: SwapSpace)."
        )
    if src.dim() not in (4, 5) or src.dim() != dst.dim() or src.dtype != dst.dtype or src.shape[-3:] != dst.shape[-3:]:
        raise ValueError(
            f"copy_blocks: caches {tuple(src.shape)} {src.dtype} and {tuple(dst.shape)} {dst.dtype}. "
            "Both have the same dtype and the same shape but for the number of blocks."
        )
    if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.dtype != torch.int64:
        raise ValueError(f"copy_blocks: pairs {tuple(pairs.shape)} {pairs.dtype}. They are int64 [n, 2].")
