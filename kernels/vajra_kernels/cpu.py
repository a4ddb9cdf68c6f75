"""Paged attention of a ragged batch on the CPU, in torch.

Keys and values are gathered (at memory-copy speed, see ``cpu_plan``), then attended in one fused call per decode group
or chunk piece. In a decode group, the query heads of a KV head are the rows of one matrix product. Features that the
fused call lacks (soft cap, values of another width) are computed with separate matrix products.

Invariants:
    - Caches are physically [num_blocks, block_size, num_kv_heads, head_dim], dense.
    - Results depend on other sequences in the batch only through the order of float additions.
"""

from __future__ import annotations

import functools
import threading

import torch
from torch.nn.functional import scaled_dot_product_attention

from vajra_kernels.cpu_plan import Chunk, DecodeGroup, KeyRange
from vajra_kernels.metadata import AttentionMetadata

# The CPU kernel behind scaled_dot_product_attention, called directly for its second result, the log-sum-exp.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@functools.cache
def _widens_chunks(dtype: torch.dtype) -> bool:
    """Return True if chunks in this dtype are computed in float32.

    Chunks in half precision are computed in float32 if the processor has no matrix-tile instructions for their dtype.
    This saves 10 to 15 % of the time of their attention, conversions included (measured with bfloat16 on an AMD EPYC).
    For decodes, conversions cost more than they save.
    """
    if dtype == torch.bfloat16:
        return not torch.cpu._is_amx_tile_supported()
    return dtype == torch.float16 and not torch.cpu._is_amx_fp16_supported()


class _Workspace(threading.local):
    """Reused memory for gathers: new memory costs a page fault per 4 KiB, which is more than the copy itself."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def rows(self, name: str, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor:
        """Return uninitialised memory of ``shape``, valid until the next gather into ``name``."""
        size = shape[0] * shape[1]
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # inference tensors cannot be written outside inference mode
                buffer = self._buffers[name, dtype] = torch.empty(size, dtype=dtype)
        return buffer[:size].view(shape)


_workspace = _Workspace()


class CpuAttention:
    """Operands of one attention layer's call, shared by all groups and chunks of the step."""

    __slots__ = ("group", "k_tokens", "num_kv_heads", "q", "scale", "softcap", "v_tokens", "want_lse")

    def __init__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        softcap: float | None,
        want_lse: bool,
    ) -> None:
        self.q = q
        self.num_kv_heads = k_cache.shape[2]
        self.group = q.shape[1] // self.num_kv_heads
        self.k_tokens = _token_rows(k_cache)
        self.v_tokens = _token_rows(v_cache)
        self.scale = scale
        self.softcap = softcap
        self.want_lse = want_lse

    def decode_group(self, group: DecodeGroup) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (output [n, Hq, Dv], lse [n, Hq] or None) for a group's rows."""
        n = group.keys.num_rows
        _, num_heads, dim = self.q.shape
        if group.rows is not None:
            q = self.q.index_select(0, group.rows)
        else:
            q = self.q if n == self.q.shape[0] else self.q.narrow(0, group.first_row, n)
        k, v = self._gather("k", self.k_tokens, group.keys), self._gather("v", self.v_tokens, group.keys)
        out, lse = self._attend(q.view(n, self.num_kv_heads, self.group, dim), k, v, group.mask)
        return out.reshape(n, num_heads, v.shape[3]), None if lse is None else lse.reshape(n, num_heads)

    def chunks(self, chunks: tuple[Chunk, ...], out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Compute the chunks and write their rows of ``out`` [T, Hq, Dv] and ``lse`` [T, Hq]."""
        num_tokens, _, dim = self.q.shape
        heads = (self.num_kv_heads, self.group)
        q = self.q.float() if _widens_chunks(self.q.dtype) else self.q
        q_by_head = q.view(num_tokens, *heads, dim).permute(1, 2, 0, 3)
        out_by_head = out.view(num_tokens, *heads, out.shape[2]).permute(1, 2, 0, 3)
        lse_by_head = None if lse is None else lse.view(num_tokens, *heads).permute(1, 2, 0)
        for chunk in chunks:
            # K and V get a dimension for the query heads of each KV head, so that one [rows, keys] mask applies to all
            # heads.
            k = self._chunk_rows("k", self.k_tokens, chunk.keys).transpose(0, 1).expand(*heads, -1, -1)
            v = self._chunk_rows("v", self.v_tokens, chunk.keys).transpose(0, 1).expand(*heads, -1, -1)
            for piece in chunk.pieces:
                num_rows, num_keys = piece.row_end - piece.row_begin, piece.key_end - piece.key_begin
                q = q_by_head.narrow(2, piece.row_begin, num_rows)
                if num_keys == chunk.keys.length:
                    part, part_lse = self._attend(q, k, v, piece.mask)
                else:
                    piece_k = k.narrow(2, piece.key_begin, num_keys)
                    piece_v = v.narrow(2, piece.key_begin, num_keys)
                    part, part_lse = self._attend(q, piece_k, piece_v, piece.mask)
                out_by_head.narrow(2, piece.row_begin, num_rows).copy_(part)
                if lse_by_head is not None and part_lse is not None:
                    lse_by_head.narrow(2, piece.row_begin, num_rows).copy_(part_lse)

    def _gather(self, name: str, tokens: torch.Tensor, keys: KeyRange) -> torch.Tensor:
        """Return the gathered token rows as a view [n, Hkv, length, D].

        For consecutive slots, this is a view of the cache itself.
        """
        width = tokens.shape[1]
        shape = (keys.num_rows, keys.length, self.num_kv_heads, width // self.num_kv_heads)
        if keys.slots is None:
            return tokens.narrow(0, keys.first, keys.length).view(shape).transpose(1, 2)
        buffers = keys.buffers.get((name, self.num_kv_heads, width))
        if buffers is None:
            rows = _workspace.rows(name, tokens.dtype, (keys.num_rows * keys.length, width))
            buffers = (rows, rows.view(shape).transpose(1, 2))
            keys.buffers[name, self.num_kv_heads, width] = buffers
        torch.index_select(tokens, 0, keys.slots, out=buffers[0])
        return buffers[1]

    def _chunk_rows(self, name: str, tokens: torch.Tensor, keys: KeyRange) -> torch.Tensor:
        """Return the same as ``_gather``, in the dtype in which chunks are computed.

        The result is valid until the next call for ``name``.
        """
        gathered = self._gather(name, tokens, keys)
        if not _widens_chunks(gathered.dtype):
            return gathered
        by_token = gathered.transpose(1, 2)
        rows = _workspace.rows(f"wide {name}", torch.float32, (by_token.numel(), 1))
        return rows.view(by_token.shape).copy_(by_token).transpose(1, 2)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (output, natural lse) for q [a, b, rows, D] over k, v [a, b, keys, D] with an additive mask."""
        if self.softcap is None and k.shape[3] == v.shape[3]:
            if not self.want_lse:
                return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale), None
            out, lse = _flash(q, k, v, 0.0, False, attn_mask=mask, scale=self.scale)
            return out, lse
        k = k.float().contiguous()
        scores = torch.matmul(q.float() * self.scale, k.transpose(2, 3))
        if self.softcap is not None:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if mask is not None:
            scores += mask
        lse = torch.logsumexp(scores, -1)
        weights = scores.sub_(lse.unsqueeze(-1)).exp_()
        result = torch.matmul(weights, v.float().contiguous()).to(q.dtype)
        return result, lse if self.want_lse else None


def paged_attention_cpu(
    attention: CpuAttention, metadata: AttentionMetadata, window: int | None, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (out [T, Hq, Dv], lse float32 [T, Hq] or None) of one layer; rows without any KV give 0 and -inf."""
    q, k_tokens, v_tokens = attention.q, attention.k_tokens, attention.v_tokens
    num_tokens, num_heads, _ = q.shape
    lse = q.new_empty((num_tokens, num_heads), dtype=torch.float32) if attention.want_lse else None
    shape = (num_tokens, num_heads, v_tokens.shape[1] // attention.num_kv_heads)
    token_bytes = k_tokens.shape[1] * k_tokens.element_size()
    plan = metadata.memo.cpu_plans.get(metadata, window, token_bytes, q.element_size())
    if plan.is_one_group:
        result, result_lse = attention.decode_group(plan.groups[0])
        if out is not None:
            result = out.copy_(result)
        return result, result_lse
    if out is None:
        out = q.new_empty(shape)
    if not plan.covers_all:
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
    for group in plan.groups:
        _store(group, *attention.decode_group(group), out, lse)
    if plan.chunks:
        attention.chunks(plan.chunks, out, lse)
    return out, lse


def write_kv_cpu(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write key [T, Hkv, Dk] and value [T, Hkv, Dv] to non-negative slots int64 [T] of the caches."""
    for new, cache in ((key, k_cache), (value, v_cache)):
        _token_rows(cache).view(-1, *new.shape[1:]).index_copy_(0, slot_mapping, new.to(cache.dtype))


def copy_blocks_cpu(src: torch.Tensor, dst: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy blocks ``pairs`` int64 [n, 2] from ``src`` to ``dst``; the block dimension is the fourth from last."""
    axis = src.dim() - 4
    dst.index_copy_(axis, pairs[:, 1], src.index_select(axis, pairs[:, 0]).to(dst.device))


def merge_partials_cpu(parts: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge outputs [P, T, H, D] of disjoint KV parts by their natural lse float32 [P, T, H]; return (out, lse)."""
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - torch.where(lse == float("-inf"), 0.0, lse)).unsqueeze(-1)
    out = torch.where(weights > 0, parts * weights, 0.0).sum(0)
    return out.to(parts.dtype), lse


def _store(
    group: DecodeGroup, part: torch.Tensor, part_lse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    if group.rows is None:
        rows = slice(group.first_row, group.first_row + part.shape[0])
        out[rows] = part
        if lse is not None and part_lse is not None:
            lse[rows] = part_lse
    else:
        out.index_copy_(0, group.rows, part)
        if lse is not None and part_lse is not None:
            lse.index_copy_(0, group.rows, part_lse)


def _token_rows(cache: torch.Tensor) -> torch.Tensor:
    """Return the cache as [slots, Hkv * D], sharing memory."""
    num_blocks, block_size, num_kv_heads, dim = cache.shape
    try:
        return cache.view(num_blocks * block_size, num_kv_heads * dim)
    except RuntimeError as problem:
        raise ValueError(
            f"KV cache: strides {cache.stride()} on the CPU. "
            "There a cache is dense [num_blocks, block_size, num_kv_heads, head_dim]."
        ) from problem
