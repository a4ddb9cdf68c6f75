# mypy: disable-error-code="no-untyped-call,untyped-decorator,misc"
"""Attention of one tile of query rows over a range of a paged KV sequence.

The decode and the ragged kernel share these device functions: a running (flash) softmax in base 2 over KV tiles of
``TILE_N`` positions, located through the sequence's row of the block table.

Invariants:
    - Scores are in log2 units, so that the exponential is one ``ex2`` instruction.
    - Positions from ``end`` on do not contribute: their scores become -inf and their V rows read as zero, so stale or
      NaN contents of a block's unused slots cannot affect a result.
    - Every tile starts at a multiple of ``TILE_N``; if ``KV_BLOCK % TILE_N == 0``, a tile lies in one KV block, and its
      block id is one scalar load.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Return the hyperbolic tangent using ``exp2`` only, since libdevice is not available in the interpreter."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))


@triton.jit
def tile_pointers(
    base: tl.tensor,
    blocks: tl.tensor,
    start: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    DIM_PAD: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    TILE_N: tl.constexpr,
) -> tl.tensor:
    """Return pointers [TILE_N, DIM_PAD] of one tile.

    ``blocks`` has the id of the KV block of each position [TILE_N], or one id for all positions if ``KV_BLOCK % TILE_N
    == 0``.
    """
    lanes = tl.arange(0, TILE_N)
    dims = tl.arange(0, DIM_PAD)
    if KV_BLOCK % TILE_N == 0:
        tile = base + blocks * stride_block + (start % KV_BLOCK) * stride_slot
        return tile + (lanes[:, None] * stride_slot + dims[None, :])
    rows = blocks * stride_block + ((start + lanes) % KV_BLOCK) * stride_slot
    return base + rows[:, None] + dims[None, :]


@triton.jit
def load_queries(
    q_ptr: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    ok: tl.tensor,
    stride_row: tl.tensor,
    stride_head: tl.tensor,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tl.tensor:
    """Return queries [TILE_M, DIM_PAD] of (row, head) pairs, zero where ``ok`` is false and in padded dimensions."""
    dims = tl.arange(0, DIM_PAD)
    pointers = q_ptr + (rows * stride_row + heads * stride_head)[:, None] + dims[None, :]
    q = tl.load(pointers, mask=ok[:, None] & (dims < DIM)[None, :], other=0.0)
    return q.to(tl.float32) if UPCAST else q


@triton.jit
def load_tile(
    pointers: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE_N: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Return one tile of K or V, zero in padded dimensions and, with ``MASKED``, at positions from ``end`` on."""
    in_range = (start + tl.arange(0, TILE_N) < end)[:, None]
    in_head = (tl.arange(0, DIM_PAD) < DIM)[None, :]
    if MASKED and DIM != DIM_PAD:
        return tl.load(pointers, mask=in_range & in_head, other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=in_range, other=0.0)
    elif DIM != DIM_PAD:
        return tl.load(pointers, mask=in_head, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def softmax_update(
    row_max: tl.tensor,
    row_sum: tl.tensor,
    scores: tl.tensor,
    multiplier: tl.tensor,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Update the running softmax with one more tile.

    Return (new max, new sum, weights, factor for the accumulated output).
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * multiplier)
    # A row without any position so far keeps -inf; exp2(-inf - 0) is 0, while exp2(-inf + inf) would be NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weights = tl.exp2(scores * multiplier - shift[:, None])
    factor = tl.exp2(row_max - shift)
    return new_max, row_sum * factor + tl.sum(weights, 1), weights, factor


@triton.jit
def attend_tiles(
    acc: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    q: tl.tensor,
    row_positions: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    k_base: tl.tensor,
    v_base: tl.tensor,
    table_row: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    stride_k_block: tl.tensor,
    stride_k_slot: tl.tensor,
    stride_v_block: tl.tensor,
    stride_v_slot: tl.tensor,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    TILE_N: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return (acc, row_max, row_sum) after including KV positions [begin, end).

    ``begin`` is a multiple of TILE_N. Without ``MASKED``, so is ``end``, and every row attends to every position. With
    ``MASKED``, row i attends to position p if p < end, p <= row_positions[i] and, with ``HAS_WINDOW``, p >
    row_positions[i] - window. ``UPCAST`` multiplies in float32 (the interpreter cannot multiply bfloat16).
    """
    lanes = tl.arange(0, TILE_N)
    for start in tl.range(begin, end, TILE_N):
        positions = start + lanes
        if KV_BLOCK % TILE_N == 0:
            blocks = tl.load(table_row + start // KV_BLOCK).to(tl.int64)
        elif MASKED:
            blocks = tl.load(table_row + positions // KV_BLOCK, mask=positions < end, other=0).to(tl.int64)
        else:
            blocks = tl.load(table_row + positions // KV_BLOCK).to(tl.int64)
        k_pointers = tile_pointers(k_base, blocks, start, stride_k_block, stride_k_slot, K_PAD, KV_BLOCK, TILE_N)
        v_pointers = tile_pointers(v_base, blocks, start, stride_v_block, stride_v_slot, V_PAD, KV_BLOCK, TILE_N)
        k = load_tile(k_pointers, start, end, K_DIM, K_PAD, TILE_N, MASKED)
        v = load_tile(v_pointers, start, end, V_DIM, V_PAD, TILE_N, MASKED)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if HAS_SOFTCAP:
            scores = softcap * 1.4426950408889634 * tanh(scores * (scale / softcap))
            multiplier = 1.0
        else:
            multiplier = scale * 1.4426950408889634
        if MASKED:
            visible = (positions[None, :] < end) & (positions[None, :] <= row_positions[:, None])
            if HAS_WINDOW:
                visible = visible & (positions[None, :] > row_positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        row_max, row_sum, weights, factor = softmax_update(row_max, row_sum, scores, multiplier, MASKED)
        acc = tl.dot(weights.to(v.dtype), v, acc * factor[:, None], input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit
def finish_softmax(acc: tl.tensor, row_max: tl.tensor, row_sum: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return (output, natural log-sum-exp) of a running softmax; a row without any position gives (0, -inf)."""
    empty = row_sum == 0.0
    safe_sum = tl.where(empty, 1.0, row_sum)
    lse = tl.where(empty, float("-inf"), (row_max + tl.log2(safe_sum)) * 0.6931471805599453)
    return acc / safe_sum[:, None], lse
