"""Paged attention of decodes on one CPU core, compiled by Numba: keys and values are read where they are, block by block.

Four query heads of a KV head share the keys they read. Chunks are left to torch, whose products are faster there.

Invariants:
    - A sequence's own slots alone are read, never the rest of its last block.
    - Scores that are not numbers give a row that is not: no flag here lets the compiler assume that there are none.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.extending import intrinsic

if TYPE_CHECKING:
    from vajra_kernels.metadata import AttentionMetadata

HEADS = 4
"""Query heads that are computed together."""
_LOG2_E = math.log2(math.e)
_NO_LSE = np.empty((0, 0), np.float32)


def attend_decodes(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """Attention [n, Hq, Dv] of the leading ``num_decodes`` rows of q [T, Hq, D]; their ``lse`` float32 [T, Hq] is written, if given."""
    k, v = caches
    n = metadata.num_decodes
    out = torch.empty((n, q.shape[1], v.shape[3]), dtype=torch.float32)
    _kernel(k.shape[3], v.shape[3])(
        _array(q[:n]),
        _array(k),
        _array(v),
        out.numpy(),
        _NO_LSE if lse is None else lse.numpy(),
        metadata.kv_lens[:n].numpy(),
        metadata.block_table[:n].numpy(),
        np.float32(scale * _LOG2_E),
        metadata.max_kv_len if window is None else window,
    )
    return out.to(q.dtype)


def _array(tensor: torch.Tensor) -> Any:
    """The elements, bfloat16 as their bits."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def _compiled(function: Any) -> Any:
    """The function in machine code, which runs without Python's lock and is kept on disk where that can be written."""
    options: dict[str, Any] = {
        "nogil": True,
        "fastmath": {"reassoc", "contract", "arcp", "nsz"},
        "error_model": "numpy",
    }
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        return numba.njit(**options)(function)


def _widen(_: Any, value: Any) -> Any:
    """float32 of an element: of float32, or of the bits of a bfloat16."""
    if value == numba.types.float32:
        return numba.types.float32(value), lambda _context, _builder, _signature, args: args[0]

    def widened(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(args[0], bits), ir.Constant(bits, 16)), ir.FloatType())

    return numba.types.float32(numba.types.uint16), widened


_as_float: Any = intrinsic(_widen)


def _exponentiate(scores: Any, exponents: Any, powers: Any) -> tuple[Any, Any]:
    """Turns scores into 2 ** (score - largest): (the largest, their sum). ``powers`` is the memory of ``exponents`` as float32."""
    count = scores.shape[0]
    top = np.float32(-np.inf)
    for j in range(count):
        top = max(top, scores[j])
    for j in range(count):
        t = scores[j] - top
        if t < np.float32(-126.0):
            t = np.float32(-126.0)
        whole = np.int32(t - np.float32(0.5))
        f = t - np.float32(whole)
        # Taylor's series of 2 ** f for |f| <= 0.5.
        p = np.float32(1.5403530e-4)
        p = p * f + np.float32(1.3333558e-3)
        p = p * f + np.float32(9.6181291e-3)
        p = p * f + np.float32(5.5504109e-2)
        p = p * f + np.float32(2.4022651e-1)
        p = p * f + np.float32(6.9314718e-1)
        scores[j] = p * f + np.float32(1.0)
        exponents[j] = (whole + np.int32(127)) << np.int32(23)
    total = np.float32(0)
    for j in range(count):
        scores[j] *= powers[j]
        total += scores[j]
    return top, total


_powers = _compiled(_exponentiate)


@cache
def _kernel(dim: int, value_dim: int) -> Any:
    """The loops for heads of this width: short loops are vectorised only where their length is a constant.

    One function with nothing but numbers around it, or else it could not be kept on disk.
    """

    def attend(q: Any, k: Any, v: Any, out: Any, lse: Any, kv_lens: Any, table: Any, scale: float, window: int) -> None:
        """Writes out [n, Hq, Dv] and, where it has rows, lse; ``scale`` gives scores to the base 2."""
        block_size, num_kv_heads = k.shape[1], k.shape[2]
        group = q.shape[1] // num_kv_heads
        longest = 0
        for row in range(kv_lens.shape[0]):
            longest = max(longest, kv_lens[row])
        scores = np.empty((HEADS, longest), np.float32)
        powers = np.empty(longest, np.float32)
        exponents = powers.view(np.int32)
        queries = np.zeros((HEADS, dim), np.float32)
        sums = np.empty((HEADS, value_dim), np.float32)
        for row in range(kv_lens.shape[0]):
            end = kv_lens[row]
            begin = max(0, end - window)
            for kv_head in range(num_kv_heads):
                for head in range(kv_head * group, (kv_head + 1) * group, HEADS):
                    count = min(HEADS, (kv_head + 1) * group - head)
                    for one in range(count):
                        for i in range(dim):
                            queries[one, i] = _as_float(q[row, head + one, i]) * scale
                    for place in range(begin // block_size, -(-end // block_size)):
                        block, first = table[row, place], place * block_size
                        for j in range(max(begin, first), min(end, first + block_size)):
                            s0 = s1 = s2 = s3 = np.float32(0)
                            for i in range(dim):
                                x = _as_float(k[block, j - first, kv_head, i])
                                s0 += queries[0, i] * x
                                s1 += queries[1, i] * x
                                s2 += queries[2, i] * x
                                s3 += queries[3, i] * x
                            scores[0, j], scores[1, j], scores[2, j], scores[3, j] = s0, s1, s2, s3
                    for one in range(count):
                        top, total = _powers(scores[one, begin:end], exponents, powers)
                        for j in range(begin, end):
                            scores[one, j] /= total
                        if lse.shape[0]:
                            lse[row, head + one] = (top + math.log2(total)) / _LOG2_E if end > begin else -np.inf
                    sums[:] = 0
                    for place in range(begin // block_size, -(-end // block_size)):
                        block, first = table[row, place], place * block_size
                        low, high = max(begin, first), min(end, first + block_size)
                        # Four keys at once: sums are loaded and stored a quarter as often.
                        for j in range(low, high - 3, 4):
                            a0, a1, a2, a3 = scores[0, j], scores[0, j + 1], scores[0, j + 2], scores[0, j + 3]
                            b0, b1, b2, b3 = scores[1, j], scores[1, j + 1], scores[1, j + 2], scores[1, j + 3]
                            c0, c1, c2, c3 = scores[2, j], scores[2, j + 1], scores[2, j + 2], scores[2, j + 3]
                            d0, d1, d2, d3 = scores[3, j], scores[3, j + 1], scores[3, j + 2], scores[3, j + 3]
                            n = j - first
                            for i in range(value_dim):
                                x0, x1 = _as_float(v[block, n, kv_head, i]), _as_float(v[block, n + 1, kv_head, i])
                                x2, x3 = _as_float(v[block, n + 2, kv_head, i]), _as_float(v[block, n + 3, kv_head, i])
                                sums[0, i] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
                                sums[1, i] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
                                sums[2, i] += c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
                                sums[3, i] += d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3
                        for j in range(high - (high - low) % 4, high):
                            for one in range(HEADS):
                                weight = scores[one, j]
                                for i in range(value_dim):
                                    sums[one, i] += weight * _as_float(v[block, j - first, kv_head, i])
                    out[row, head : head + count] = sums[:count]

    return _compiled(attend)
