"""Paged attention on one CPU core, compiled by Numba.

Decodes read keys and values where they are, block by block, with the next block on its way; four query heads of a KV head
share what they read. For chunks, the keys and values of a KV head are laid side by side, and four rows at a time are
multiplied with them.

Invariants:
    - A sequence's own slots alone are read, never the rest of its last block.
    - Scores that are not numbers give a row that is not.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vajra_kernels.cpu_loops import TILE, as_element, as_float, ask_for, compiled, elements, exp2, multiply

if TYPE_CHECKING:
    from vajra_kernels.metadata import AttentionMetadata

HEADS = 4
"""Query heads that are computed together."""
_LOG2_E = math.log2(math.e)
_NO_LSE = np.empty((0, 0), np.float32)


def attend(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    chunks: bool,
) -> None:
    """Writes attention out [T, Hq, Dv] of q [T, Hq, D], and ``lse`` float32 [T, Hq]: of decodes, and of all rows with ``chunks``."""
    k, v = caches
    n = metadata.num_decodes
    arrays = (*map(elements, (q, k, v, out)), _NO_LSE if lse is None else lse.numpy())
    lens, table = metadata.kv_lens.numpy(), metadata.block_table.numpy()
    factor, reach = np.float32(scale * _LOG2_E), metadata.max_kv_len if window is None else window
    if n:
        _decode_kernel(k.shape[3], v.shape[3])(*arrays, lens[:n], table, factor, reach)
    if chunks:
        starts = metadata.query_start.numpy()
        kernel = _chunk_kernel(k.shape[3], v.shape[3])
        kernel(*arrays, starts[n:], lens[n:], table[n:], factor, reach, metadata.causal)


def _exponentiate(scores: Any) -> tuple[Any, Any]:
    """Turns scores into 2 ** (score - largest): (the largest, their sum)."""
    count = scores.shape[0]
    top = np.float32(-np.inf)
    for j in range(count):
        top = max(top, scores[j])
    total = np.float32(0)
    for j in range(count):
        scores[j] = exp2(scores[j] - top)
        total += scores[j]
    return top, total


_powers = compiled(_exponentiate)


@cache
def _decode_kernel(dim: int, value_dim: int) -> Any:
    """The loops for heads of this width: short loops are vectorised only where their length is a constant.

    One function with nothing but numbers around it, or else it could not be kept on disk.
    """

    def attend(q: Any, k: Any, v: Any, out: Any, lse: Any, kv_lens: Any, table: Any, scale: float, window: int) -> None:
        """Writes out [n, Hq, Dv] and, where it has rows, lse; ``scale`` gives scores to the base 2."""
        block_size, num_kv_heads, num_heads = k.shape[1], k.shape[2], q.shape[1]
        group = num_heads // num_kv_heads
        padded = -(-group // HEADS) * HEADS  # rows of a group's heads, of which the last may stand for none
        num_rows = num_kv_heads * padded
        longest = 0
        for row in range(kv_lens.shape[0]):
            longest = max(longest, kv_lens[row])
        scores = np.empty((num_rows, longest), np.float32)
        queries = np.zeros((num_rows, dim), np.float32)
        sums = np.empty((num_rows, value_dim), np.float32)
        totals = np.empty(num_rows, np.float32)
        for row in range(kv_lens.shape[0]):
            end = kv_lens[row]
            begin = max(0, end - window)
            first_place, end_place = begin // block_size, -(-end // block_size)
            for head in range(num_heads):
                one = head // group * padded + head % group
                for i in range(dim):
                    queries[one, i] = as_float(q[row, head, i]) * scale
            for place in range(first_place, end_place):
                block, first = table[row, place], place * block_size
                following = table[row, min(place + 1, end_place - 1)]
                for j in range(max(begin, first), min(end, first + block_size)):
                    ask_for(k, following, j - first)
                    for kv_head in range(num_kv_heads):
                        for head in range(kv_head * padded, (kv_head + 1) * padded, HEADS):
                            s0 = s1 = s2 = s3 = np.float32(0)
                            for i in range(dim):
                                x = as_float(k[block, j - first, kv_head, i])
                                s0 += queries[head, i] * x
                                s1 += queries[head + 1, i] * x
                                s2 += queries[head + 2, i] * x
                                s3 += queries[head + 3, i] * x
                            scores[head, j], scores[head + 1, j] = s0, s1
                            scores[head + 2, j], scores[head + 3, j] = s2, s3
                    ask_for(v, block, j - first)
            for head in range(num_heads):
                one = head // group * padded + head % group
                top, total = _powers(scores[one, begin:end])
                totals[one] = total
                if lse.shape[0]:
                    lse[row, head] = (top + math.log2(total)) / _LOG2_E if end > begin else -np.inf
            if row + 1 < kv_lens.shape[0] and kv_lens[row + 1] > 0:
                following = table[row + 1, max(0, kv_lens[row + 1] - window) // block_size]
                for j in range(block_size):
                    ask_for(k, following, j)
            sums[:] = 0
            for place in range(first_place, end_place):
                block, first = table[row, place], place * block_size
                low, high = max(begin, first), min(end, first + block_size)
                for kv_head in range(num_kv_heads):
                    for head in range(kv_head * padded, (kv_head + 1) * padded, HEADS):
                        # Four keys at once: sums are loaded and stored a quarter as often.
                        for j in range(low, high - 3, 4):
                            a0, a1 = scores[head, j], scores[head, j + 1]
                            a2, a3 = scores[head, j + 2], scores[head, j + 3]
                            b0, b1 = scores[head + 1, j], scores[head + 1, j + 1]
                            b2, b3 = scores[head + 1, j + 2], scores[head + 1, j + 3]
                            c0, c1 = scores[head + 2, j], scores[head + 2, j + 1]
                            c2, c3 = scores[head + 2, j + 2], scores[head + 2, j + 3]
                            d0, d1 = scores[head + 3, j], scores[head + 3, j + 1]
                            d2, d3 = scores[head + 3, j + 2], scores[head + 3, j + 3]
                            n = j - first
                            for i in range(value_dim):
                                x0, x1 = as_float(v[block, n, kv_head, i]), as_float(v[block, n + 1, kv_head, i])
                                x2, x3 = as_float(v[block, n + 2, kv_head, i]), as_float(v[block, n + 3, kv_head, i])
                                sums[head, i] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
                                sums[head + 1, i] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
                                sums[head + 2, i] += c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
                                sums[head + 3, i] += d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3
                        for j in range(high - (high - low) % 4, high):
                            for one in range(head, head + HEADS):
                                weight = scores[one, j]
                                for i in range(value_dim):
                                    sums[one, i] += weight * as_float(v[block, j - first, kv_head, i])
            for head in range(num_heads):
                one = head // group * padded + head % group
                share = np.float32(1) / totals[one] if end > begin else np.float32(0)
                for i in range(value_dim):
                    out[row, head, i] = as_element(sums[one, i] * share, out)

    return compiled(attend)


@cache
def _chunk_kernel(dim: int, value_dim: int) -> Any:
    """The loops for queries of several tokens: some rows of one head at a time, over keys that are laid side by side."""
    rows, lanes = TILE
    padded_dim = -(-value_dim // lanes) * lanes

    def attend(
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        starts: Any,
        kv_lens: Any,
        table: Any,
        scale: float,
        window: int,
        causal: bool,
    ) -> None:
        """Writes out [T, Hq, Dv] and, where it has rows, lse; ``scale`` gives scores to the base 2."""
        block_size, num_kv_heads = k.shape[1], k.shape[2]
        group = q.shape[1] // num_kv_heads
        longest = 0
        for seq in range(kv_lens.shape[0]):
            longest = max(longest, kv_lens[seq])
        longest = -(-longest // lanes) * lanes + lanes  # what is multiplied begins anywhere, and is a number of tiles
        keys = np.zeros((dim, longest), np.float32)
        values = np.zeros((longest, padded_dim), np.float32)
        scores = np.zeros((rows, longest), np.float32)
        queries = np.zeros((rows, dim), np.float32)
        sums = np.zeros((rows, padded_dim), np.float32)
        totals = np.empty(rows, np.float32)
        for seq in range(kv_lens.shape[0]):
            begin_row, end_row, kv_len = starts[seq], starts[seq + 1], kv_lens[seq]
            if kv_len == 0:
                out[begin_row:end_row] = 0
                if lse.shape[0]:
                    lse[begin_row:end_row] = -np.inf
                continue
            context = kv_len - (end_row - begin_row)
            base = max(0, context + 1 - window) if causal else 0
            for kv_head in range(num_kv_heads if end_row > begin_row else 0):
                for place in range(base // block_size, -(-kv_len // block_size)):
                    block, first = table[seq, place], place * block_size
                    for j in range(max(base, first), min(kv_len, first + block_size)):
                        for i in range(dim):
                            keys[i, j - base] = as_float(k[block, j - first, kv_head, i])
                        for i in range(value_dim):
                            values[j - base, i] = as_float(v[block, j - first, kv_head, i])
                for head in range(kv_head * group, (kv_head + 1) * group):
                    for row in range(begin_row, end_row, rows):
                        count = min(rows, end_row - row)
                        for one in range(count):
                            for i in range(dim):
                                queries[one, i] = as_float(q[row + one, head, i]) * scale
                        position = context + row - begin_row
                        low = max(0, position + 1 - window - base) if causal else 0
                        high = (position + count if causal else kv_len) - base
                        for column in range(low, high, lanes):
                            multiply(queries, keys, scores, column, dim)
                        for one in range(count):
                            begin = max(0, position + one + 1 - window - base) if causal else 0
                            end = (position + one + 1 if causal else kv_len) - base
                            top, total = _powers(scores[one, begin:end])
                            scores[one, low:begin] = 0
                            scores[one, end:high] = 0
                            totals[one] = total
                            if lse.shape[0]:
                                lse[row + one, head] = (top + math.log2(total)) / _LOG2_E
                        for column in range(0, padded_dim, lanes):
                            multiply(scores[:, low:], values[low:], sums, column, high - low)
                        for one in range(count):
                            share = np.float32(1) / totals[one]
                            for i in range(value_dim):
                                out[row + one, head, i] = as_element(sums[one, i] * share, out)

    return compiled(attend)
