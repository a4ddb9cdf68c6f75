"""Plain reference implementations of the kernels.

Each function computes one kernel's result with loops over sequences or tokens, in the dtype of its inputs (float64 in
tests). Shapes are those of ``attention`` and ``ops``.

Invariants:
    - Slots that a sequence does not own, and blocks beyond its length, are never read.
"""

from __future__ import annotations

import math

import torch

from vajra_kernels.metadata import AttentionMetadata


def sequence_kv(cache: torch.Tensor, blocks: torch.Tensor, kv_len: int) -> torch.Tensor:
    """Return one sequence's rows of a paged cache in order, [kv_len, Hkv, D]."""
    num_blocks = -(-kv_len // cache.shape[1])
    return cache[blocks[:num_blocks].long()].flatten(0, 1)[:kv_len]


def attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out [T, Hq, Dv], natural lse [T, Hq]) of ``attention.paged_attention``."""
    factor = 1.0 / math.sqrt(q.shape[2]) if scale is None else scale
    group = q.shape[1] // k_cache.shape[2]
    out = q.new_zeros((q.shape[0], q.shape[1], v_cache.shape[3]))
    lse = q.new_full(q.shape[:2], float("-inf"))
    starts, kv_lens = metadata.query_start.tolist(), metadata.kv_lens.tolist()
    for seq, kv_len in enumerate(kv_lens):
        begin, end = starts[seq], starts[seq + 1]
        if kv_len == 0 or begin == end:
            continue
        k = sequence_kv(k_cache, metadata.block_table[seq], kv_len).repeat_interleave(group, 1)
        v = sequence_kv(v_cache, metadata.block_table[seq], kv_len).repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", q[begin:end], k) * factor
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query_at = torch.arange(kv_len - (end - begin), kv_len, device=q.device)[:, None]
        key_at = torch.arange(kv_len, device=q.device)[None, :]
        hidden = (key_at > query_at) & metadata.causal
        if window is not None:
            hidden |= key_at <= query_at - window
        scores = scores.masked_fill(hidden, float("-inf"))
        lse[begin:end] = torch.logsumexp(scores, -1).transpose(0, 1)
        out[begin:end] = torch.einsum("hts,shd->thd", torch.softmax(scores, -1), v)
    return out, lse


def write_kv_reference(new: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write ``new`` [T, Hkv, D] to ``cache``, one of the two caches of ``ops.write_kv``; negative slots are skipped."""
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            cache[slot // cache.shape[1], slot % cache.shape[1]] = new[row].to(cache.dtype)


def merge_reference(parts: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of ``ops.merge_partials``."""
    lse = torch.logsumexp(lses, 0)
    out = parts.new_zeros(parts.shape[1:])
    for part, part_lse in zip(parts, lses, strict=True):
        seen = part_lse > float("-inf")
        out[seen] += part[seen] * torch.exp(part_lse - lse)[seen].unsqueeze(-1)
    return out, lse


def copy_blocks_reference(src: torch.Tensor, dst: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy blocks of ``src`` to ``dst`` (``ops.copy_blocks``)."""
    taken = [(target, src[..., source, :, :, :].clone()) for source, target in pairs.tolist()]
    for target, block in taken:
        dst[..., target, :, :, :] = block.to(dst.device)


def sample_reference(logits: torch.Tensor, parameters: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return tokens int64 [R], computed by sorting in float64; arguments as for ``sampling.sample_tokens``."""
    return torch.stack(
        [_sampled(row.double(), facts, seen) for row, facts in zip(logits, parameters.double(), strict=True)]
    )


def _sampled(logits: torch.Tensor, facts: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    temperature, top_p, min_p, top_k, repetition, frequency, presence, history, number = facts.tolist()
    if history >= 0:
        own = seen[int(history)]
        counts = own >> 1
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(own > 0, scaled, logits) - frequency * counts - presence * (counts > 0)
    if not logits.max().isfinite():  # the maximum is NaN if any logit is
        return torch.tensor(-1)
    if temperature == 0:
        return logits.argmax()
    weights = ((logits - logits.max()) / temperature).exp()
    ranked, order = logits.sort(descending=True, stable=True)
    kept = logits >= ranked[int(top_k) - 1]
    in_order = (weights * kept)[order]
    before = (in_order.cumsum(0) - in_order) / in_order.sum()
    kept &= logits >= ranked[max(int((before < top_p).sum()), 1) - 1]
    kept &= weights >= min_p
    cumulated = (weights * kept).cumsum(0)
    return torch.searchsorted(cumulated, number * cumulated[-1], right=True)
