"""Paged attention of one step's queries on the tensors' device.

Invariants:
    - Causal: the query at position p of its sequence attends to KV positions <= p, and with a window only to those
      > p - window. If ``metadata.causal`` is False, every query attends to all KV positions of its sequence.
    - K and V of the step's own tokens are in the cache already (``ops.write_kv``).
    - CUDA tensors use the Triton kernels, CPU tensors torch (``backend``); Triton is imported on first use only.
"""

from __future__ import annotations

from typing import Literal, overload

import torch

from vajra_kernels.backend import uses_triton
from vajra_kernels.cpu import CpuAttention, paged_attention_cpu
from vajra_kernels.metadata import AttentionMetadata

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@overload
def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float | None = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    return_lse: Literal[False] = ...,
    out: torch.Tensor | None = ...,
) -> torch.Tensor: ...


@overload
def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float | None = ...,
    window: int | None = ...,
    softcap: float | None = ...,
    return_lse: Literal[True],
    out: torch.Tensor | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of every query token over its sequence's KV blocks.

    Args:
        q: [T, Hq, D], the step's flattened query rows; the last dimension must be dense.
        k_cache: [num_blocks, block_size, Hkv, D], Hq a multiple of Hkv (GQA, MQA); see ``cache`` for the layout.
        v_cache: [num_blocks, block_size, Hkv, Dv].
        metadata: the step's lengths and block tables.
        scale: factor of the scores, above 0; None for 1/sqrt(D).
        window: number of positions that a query attends to, including its own; None for all.
        softcap: scores become softcap * tanh(scores / softcap) (Gemma 2); None for no cap.
        return_lse: also return the natural log-sum-exp of the scores, float32 [T, Hq] (for ``ops.merge_partials``).
        out: [T, Hq, Dv], tensor to write to; None to allocate it.

    Returns:
        out [T, Hq, Dv] in q's dtype, or (out, lse). A row that attends to no position gives 0 and -inf.

    Raises:
        ValueError: operands are inconsistent.
    """
    _check(q, k_cache, v_cache, metadata, window, softcap)
    factor = q.shape[2] ** -0.5 if scale is None else scale
    if factor <= 0.0:
        raise ValueError(f"paged attention: scale is not positive (got {scale}).")
    lse: torch.Tensor | None
    if not uses_triton(q.device):
        attention = CpuAttention(q, k_cache, v_cache, factor, softcap, return_lse)
        out, lse = paged_attention_cpu(attention, metadata, window, out)
    else:
        from vajra_kernels.call import AttentionCall
        from vajra_kernels.gpu import run_attention

        if out is None:
            out = torch.empty((*q.shape[:2], v_cache.shape[3]), dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        run_attention(AttentionCall(q, k_cache, v_cache, metadata, factor, window, softcap, out, lse))
    return out if lse is None else (out, lse)


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    window: int | None,
    softcap: float | None,
) -> None:
    if q.dim() != 3 or k_cache.dim() != 4 or v_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"paged attention: q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}. "
            "Shapes are q [T, Hq, D], k_cache [num_blocks, block_size, Hkv, D], v_cache [num_blocks, block_size, Hkv, Dv]."
        )
    if q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[2]:
        raise ValueError(
            f"paged attention: {q.shape[1]} query heads of {q.shape[2]} on {k_cache.shape[2]} KV heads of "
            f"{k_cache.shape[3]}. Head dimensions are equal and query heads a multiple of KV heads."
        )
    if q.dtype not in _DTYPES or k_cache.dtype != q.dtype or v_cache.dtype != q.dtype:
        raise ValueError(
            f"paged attention: dtypes q {q.dtype}, k_cache {k_cache.dtype}, v_cache {v_cache.dtype}. "
            "All three are one of float32, float16, bfloat16."
        )
    if q.shape[0] != metadata.num_query_tokens or k_cache.shape[1] != metadata.block_size:
        raise ValueError(
            f"paged attention: {q.shape[0]} query rows and blocks of {k_cache.shape[1]} for metadata of "
            f"{metadata.num_query_tokens} tokens and blocks of {metadata.block_size}. They agree."
        )
    if (window is not None and window < 1) or (softcap is not None and softcap <= 0.0):
        raise ValueError(f"paged attention: window {window}, softcap {softcap}. Both are positive or None.")
    if window is not None and not metadata.causal:
        raise ValueError(
            f"paged attention: window {window} over an earlier part of a sequence. Windows need causal metadata."
        )
