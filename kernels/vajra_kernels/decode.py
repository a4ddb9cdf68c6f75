# mypy: disable-error-code="no-untyped-call,untyped-decorator,misc"
"""Decode attention: single-token queries over long paged sequences, limited by memory bandwidth.

One program handles one KV head and one piece of one sequence's KV. The query heads that share the KV head are the rows
of one tile, so K and V are read once for all of them; more than 64 query heads take several programs. Pieces are
planned on the device (``decode_plan``) once per step, and their results are merged by log-sum-exp (``merge``).

Invariants:
    - The grid depends on host-side bounds only, so that a launch can be captured in a CUDA graph and replayed with
      other lengths.
    - A sequence with a single piece writes its result directly, and the merge skips it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from vajra_kernels.config import DeviceFacts, TileConfig, decode_config
from vajra_kernels.decode_plan import is_split, max_pieces, plan_launch
from vajra_kernels.launch import Launch
from vajra_kernels.merge import merge_pieces_launch
from vajra_kernels.tiles import attend_tiles, finish_softmax, load_queries

if TYPE_CHECKING:
    from vajra_kernels.call import AttentionCall


@triton.jit(
    do_not_specialize=["window", "num_pieces", "num_seqs", "stride_table"],
    do_not_specialize_on_alignment=["plan_ptr", "kv_lens_ptr", "table_ptr", "lse_ptr", "part_lses_ptr"],
)
def decode_kernel(
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    part_lses_ptr: tl.tensor,
    plan_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    kv_lens_ptr: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    num_pieces: tl.tensor,
    num_seqs: tl.tensor,
    stride_out_row: tl.tensor,
    stride_out_head: tl.tensor,
    stride_lse_row: tl.tensor,
    stride_part: tl.tensor,
    stride_part_head: tl.tensor,
    stride_part_lse: tl.tensor,
    stride_q_row: tl.tensor,
    stride_q_head: tl.tensor,
    stride_k_block: tl.tensor,
    stride_k_slot: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_block: tl.tensor,
    stride_v_slot: tl.tensor,
    stride_v_head: tl.tensor,
    stride_table: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    SPLIT: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Grid (num_kv_heads * HEAD_TILES, num_pieces with SPLIT, else num_seqs).

    q [B, Hq, K_DIM]; out [B, Hq, V_DIM]; lse float32 [B, Hq]; with SPLIT, parts float32 [num_pieces, Hq, V_DIM] and
    part_lses float32 [num_pieces, Hq] receive the partial results of split sequences. Caches are [num_blocks, KV_BLOCK,
    Hkv, dim] with any strides and a dense last dimension.
    """
    kv_head = tl.program_id(0) // HEAD_TILES
    head_in_group = (tl.program_id(0) % HEAD_TILES) * TILE_M + tl.arange(0, TILE_M)
    piece = tl.program_id(1).to(tl.int64)
    row = piece
    start = 0
    is_alone = True
    if SPLIT:
        row = tl.load(plan_ptr + piece).to(tl.int64)
        if row < 0:
            return
        start = tl.load(plan_ptr + num_pieces + piece)
        first_piece = plan_ptr + 2 * num_pieces + row
        is_alone = tl.load(first_piece + 1) - tl.load(first_piece) == 1
    heads = kv_head * GROUP + head_in_group
    head_ok = head_in_group < GROUP
    kv_len = tl.load(kv_lens_ptr + row)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(kv_len - window, 0) // TILE_N * TILE_N
    begin = first + start
    end = kv_len
    if SPLIT:
        end = tl.minimum(kv_len, begin + tl.load(plan_ptr + 2 * num_pieces + num_seqs + 1))
    q = load_queries(q_ptr, row, heads, head_ok, stride_q_row, stride_q_head, K_DIM, K_PAD, UPCAST)
    k_base = k_ptr + kv_head.to(tl.int64) * stride_k_head
    v_base = v_ptr + kv_head.to(tl.int64) * stride_v_head
    table_row = table_ptr + row * stride_table
    positions = tl.full([TILE_M], 0, tl.int32) + (kv_len - 1)
    acc = tl.zeros([TILE_M, V_PAD], tl.float32)
    row_max = tl.full([TILE_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)
    masked_from = begin
    if not HAS_WINDOW:
        masked_from = begin + tl.maximum(end - begin, 0) // TILE_N * TILE_N
        acc, row_max, row_sum = attend_tiles(
            acc, row_max, row_sum, q, positions, begin, masked_from, k_base, v_base, table_row, scale, softcap, window,
            stride_k_block, stride_k_slot, stride_v_block, stride_v_slot, K_DIM, V_DIM, K_PAD, V_PAD, KV_BLOCK, TILE_N,
            False, HAS_WINDOW, HAS_SOFTCAP, UPCAST, PRECISION,
        )  # fmt: skip
    acc, row_max, row_sum = attend_tiles(
        acc, row_max, row_sum, q, positions, masked_from, end, k_base, v_base, table_row, scale, softcap, window,
        stride_k_block, stride_k_slot, stride_v_block, stride_v_slot, K_DIM, V_DIM, K_PAD, V_PAD, KV_BLOCK, TILE_N,
        True, HAS_WINDOW, HAS_SOFTCAP, UPCAST, PRECISION,
    )  # fmt: skip
    out, lse = finish_softmax(acc, row_max, row_sum)
    v_dims = tl.arange(0, V_PAD)
    ok = head_ok[:, None] & (v_dims < V_DIM)[None, :]
    if is_alone:
        out_ptrs = out_ptr + row * stride_out_row + heads[:, None] * stride_out_head + v_dims[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=ok)
        if WRITE_LSE:
            tl.store(lse_ptr + row * stride_lse_row + heads, lse, mask=head_ok)
    else:
        tl.store(parts_ptr + piece * stride_part + heads[:, None] * stride_part_head + v_dims[None, :], out, mask=ok)
        tl.store(part_lses_ptr + piece * stride_part_lse + heads, lse, mask=head_ok)


def decode_launches(call: AttentionCall, device: DeviceFacts, tile: TileConfig | None = None) -> list[Launch]:
    """Return the kernel launches for a batch in which every sequence has one query token.

    There is one launch if no sequence can be split; else there are launches for the plan (on its first use in a step),
    the pieces and the merge. ``tile`` overrides the built-in choice (for benchmarks).
    """
    metadata = call.metadata
    num_seqs, num_heads, _ = call.q.shape
    num_kv_heads, v_dim = call.v_cache.shape[2:]
    group = num_heads // num_kv_heads
    config = tile or decode_config(group, call.head_pad, call.q.element_size(), device)
    head_tiles = triton.cdiv(group, config.tile_m)
    launches = []
    shape = (num_kv_heads * head_tiles, config.tile_n, call.window)
    splits = is_split(metadata, *shape, device)
    num_pieces = max_pieces(metadata, *shape[:2], device) if splits else num_seqs
    lse = call.lse if call.lse is not None else metadata.kv_lens[:, None]
    plan, parts, part_lses = metadata.kv_lens, call.out, lse
    if splits:
        known = metadata.memo.decode_plans.get(shape)
        if known is None:
            known = torch.empty(2 * num_pieces + num_seqs + 2, dtype=torch.int32, device=call.q.device)
            metadata.memo.decode_plans[shape] = known
            launches.append(plan_launch(known, metadata, num_pieces, *shape, device))
        plan = known
        parts = torch.empty((num_pieces, num_heads, v_dim), dtype=torch.float32, device=call.q.device)
        part_lses = torch.empty((num_pieces, num_heads), dtype=torch.float32, device=call.q.device)
    arguments = call.arguments() | {
        "out_ptr": call.out,
        "lse_ptr": lse,
        "parts_ptr": parts,
        "part_lses_ptr": part_lses,
        "plan_ptr": plan,
        "num_pieces": num_pieces,
        "num_seqs": num_seqs,
        "stride_out_row": call.out.stride(0),
        "stride_out_head": call.out.stride(1),
        "stride_lse_row": lse.stride(0),
        "stride_part": parts.stride(0),
        "stride_part_head": parts.stride(1),
        "stride_part_lse": part_lses.stride(0),
    }
    constants = call.constants() | {
        "GROUP": group,
        "HEAD_TILES": head_tiles,
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        "SPLIT": splits,
        "WRITE_LSE": call.lse is not None,
    }
    launches.append(Launch(decode_kernel, (shape[0], num_pieces, 1), arguments, constants, config))
    if splits:
        starts = plan[2 * num_pieces :]
        launches.append(merge_pieces_launch(parts, part_lses, starts, call.out, call.lse))
    return launches
