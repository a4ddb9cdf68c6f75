# mypy: disable-error-code="no-untyped-call,untyped-decorator,misc"
"""Merge attention over disjoint parts of a KV sequence into attention over all of it (log-sum-exp).

With outputs o_p and natural log-sum-exps l_p of disjoint parts: l = log(sum_p exp(l_p)), o = sum_p exp(l_p - l) o_p.
Used for the splits of decodes and of chunks, and for the parts that different KV-parallel groups hold (Flash-Decoding;
Medha, section 4).

Invariants:
    - A part with l_p = -inf has no positions; its o_p is not read.
    - If all parts are empty, the result is 0 with lse -inf.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vajra_kernels.config import TileConfig, merge_config
from vajra_kernels.launch import Launch, next_power_of_2


@triton.jit(
    do_not_specialize=["num_parts", "num_rows", "stride_part_lse"],
    do_not_specialize_on_alignment=["lse_ptr", "part_lses_ptr", "starts_ptr"],
)
def merge_kernel(
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    part_lses_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    num_parts: tl.tensor,
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    stride_part: tl.tensor,
    stride_part_row: tl.tensor,
    stride_part_head: tl.tensor,
    stride_part_lse: tl.tensor,
    stride_part_lse_row: tl.tensor,
    stride_out_row: tl.tensor,
    stride_out_head: tl.tensor,
    stride_lse_row: tl.tensor,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
) -> None:
    """Grid (ceil(num_rows * num_heads / ROWS),): one program merges ROWS (token, head) pairs, PARTS parts at a time.

    With HAS_STARTS, row r has the parts from ``starts[r]`` to ``starts[r + 1] - 1``, and rows with a single part are
    skipped.
    """
    pairs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair_ok = pairs < num_rows * num_heads
    row = (pairs // num_heads).to(tl.int64)
    head = pairs % num_heads
    part_lane = tl.arange(0, PARTS)
    begin = tl.zeros([ROWS], tl.int32)
    count = tl.zeros([ROWS], tl.int32) + num_parts
    most = num_parts
    if HAS_STARTS:
        begin = tl.load(starts_ptr + row, mask=pair_ok, other=0)
        count = tl.load(starts_ptr + row + 1, mask=pair_ok, other=0) - begin
        pair_ok = pair_ok & (count > 1)
        count = tl.where(pair_ok, count, 0)
        most = tl.max(count, 0)
    dims = tl.arange(0, DIM_PAD)
    lse_base = part_lses_ptr + row * stride_part_lse_row + head
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for first in tl.range(0, most, PARTS):
        part = (first + part_lane)[:, None]
        ok = (part < count[None, :]) & pair_ok[None, :]
        parts = (part + begin[None, :]).to(tl.int64)
        lses = tl.load(lse_base[None, :] + parts * stride_part_lse, mask=ok, other=float("-inf"))
        top = tl.maximum(top, tl.max(lses, 0))
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    base = parts_ptr + row * stride_part_row + head * stride_part_head
    for first in tl.range(0, most, PARTS):
        part = (first + part_lane)[:, None]
        ok = (part < count[None, :]) & pair_ok[None, :]
        parts = (part + begin[None, :]).to(tl.int64)
        lses = tl.load(lse_base[None, :] + parts * stride_part_lse, mask=ok, other=float("-inf"))
        weights = tl.exp2((lses - shift[None, :]) * 1.4426950408889634)
        pointers = base[None, :, None] + parts[:, :, None] * stride_part + dims[None, None, :]
        used = (lses > float("-inf"))[:, :, None] & (dims < DIM)[None, None, :]
        values = tl.load(pointers, mask=used, other=0.0).to(tl.float32)
        total += tl.sum(weights, 0)
        acc += tl.sum(values * weights[:, :, None], 0)
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    out_ptrs = out_ptr + (row * stride_out_row + head * stride_out_head)[:, None] + dims[None, :]
    out = (acc / safe[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, out, mask=pair_ok[:, None] & (dims < DIM)[None, :])
    if WRITE_LSE:
        lse = tl.where(empty, float("-inf"), shift + tl.log2(safe) * 0.6931471805599453)
        tl.store(lse_ptr + row * stride_lse_row + head, lse, mask=pair_ok)


def merge_launch(
    parts: torch.Tensor,
    part_lses: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    tile: TileConfig | None = None,
) -> Launch:
    """Return the launch that merges ``parts`` [P, T, H, D] and ``part_lses`` [P, T, H] into ``out`` and ``lse``.

    The last dimension of every operand is dense. ``tile.tile_n`` is the number of parts read at a time, ``tile_m`` the
    number of (token, head) pairs per program.
    """
    return _launch(parts, part_lses, None, out, lse, tile or merge_config(parts.shape[0]))


def merge_pieces_launch(
    parts: torch.Tensor, part_lses: torch.Tensor, starts: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> Launch:
    """Return the launch that merges, for each row with several pieces, the pieces into ``out`` [T, H, D] and ``lse``.

    ``parts`` [P, H, D] and ``part_lses`` float32 [P, H] are the pieces of all rows; row t has the pieces from
    ``starts[t]`` to ``starts[t + 1] - 1`` (``starts`` is int32 [T + 1 or more]).
    """
    num_rows = out.shape[0]
    config = merge_config(-(-parts.shape[0] // max(num_rows, 1)))
    shape = (parts.shape[0], num_rows, *parts.shape[1:])
    rows, row_lses = parts[:, None].expand(shape), part_lses[:, None].expand(shape[:3])
    return _launch(rows, row_lses, starts, out, lse, config)


def _launch(
    parts: torch.Tensor,
    part_lses: torch.Tensor,
    starts: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    config: TileConfig,
) -> Launch:
    num_parts, num_rows, num_heads, dim = parts.shape
    lse_out = part_lses[0] if lse is None else lse
    arguments = {
        "out_ptr": out,
        "lse_ptr": lse_out,
        "parts_ptr": parts,
        "part_lses_ptr": part_lses,
        "starts_ptr": part_lses if starts is None else starts,
        "num_parts": num_parts,
        "num_rows": num_rows,
        "num_heads": num_heads,
        "stride_part": parts.stride(0),
        "stride_part_row": parts.stride(1),
        "stride_part_head": parts.stride(2),
        "stride_part_lse": part_lses.stride(0),
        "stride_part_lse_row": part_lses.stride(1),
        "stride_out_row": out.stride(0),
        "stride_out_head": out.stride(1),
        "stride_lse_row": lse_out.stride(0),
    }
    constants = {
        "DIM": dim,
        "DIM_PAD": next_power_of_2(dim),
        "PARTS": config.tile_n,
        "ROWS": config.tile_m,
        "HAS_STARTS": starts is not None,
        "WRITE_LSE": lse is not None,
    }
    grid = (triton.cdiv(num_rows * num_heads, config.tile_m), 1, 1)
    return Launch(merge_kernel, grid, arguments, constants, config)
