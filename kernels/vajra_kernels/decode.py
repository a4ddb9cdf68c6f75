# mypy: disable-error-code="no-untyped-call,untyped-decorator,misc"
"""Decode attention: single-token queries over long paged sequences, bound by memory bandwidth.

One program handles one sequence, one KV head and one split of the KV length: the query heads that share the KV head
are the rows of one 16-row tile, so K and V are read once for all of them. The splits' results are merged by
log-sum-exp (``merge``).

Invariants:
    - Split s of a sequence covers ``split_tokens`` positions from the (window's) start; the grid depends on host-side
      bounds only, so a launch can be captured in a CUDA graph and replayed with other lengths.
    - A split without positions writes lse = -inf and leaves its output row as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from vajra_kernels.config import DeviceFacts, TileConfig, decode_config, decode_splits
from vajra_kernels.launch import Launch
from vajra_kernels.merge import merge_launch
from vajra_kernels.tiles import attend_tiles, finish_softmax

if TYPE_CHECKING:
    from vajra_kernels.call import AttentionCall


@triton.jit(do_not_specialize=["window", "split_tokens"])
def decode_kernel(
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    kv_lens_ptr: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    split_tokens: tl.tensor,
    stride_out_split: tl.tensor,
    stride_out_row: tl.tensor,
    stride_out_head: tl.tensor,
    stride_lse_split: tl.tensor,
    stride_lse_row: tl.tensor,
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
    """Grid (num_kv_heads * HEAD_TILES, num_splits, num_seqs).

    q [B, Hq, K_DIM]; out [B, Hq, V_DIM], or with SPLIT float32 [num_splits, B, Hq, V_DIM]; lse float32, likewise without
    the last dimension. Caches [num_blocks, KV_BLOCK, Hkv, dim] by strides, the last dimension dense.
    """
    kv_head = tl.program_id(0) // HEAD_TILES
    head_in_group = (tl.program_id(0) % HEAD_TILES) * TILE_M + tl.arange(0, TILE_M)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    heads = kv_head * GROUP + head_in_group
    head_ok = head_in_group < GROUP
    kv_len = tl.load(kv_lens_ptr + row)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(kv_len - window, 0) // TILE_N * TILE_N
    begin = first + split * split_tokens
    end = tl.minimum(kv_len, begin + split_tokens)
    lse_ptrs = lse_ptr + split.to(tl.int64) * stride_lse_split + row * stride_lse_row + heads
    if SPLIT:  # noqa: SIM102 - a compile-time condition around a run-time one
        if begin >= kv_len:
            tl.store(lse_ptrs, tl.full([TILE_M], float("-inf"), tl.float32), mask=head_ok)
            return
    k_dims = tl.arange(0, K_PAD)
    q_ptrs = q_ptr + row * stride_q_row + heads[:, None] * stride_q_head + k_dims[None, :]
    q = tl.load(q_ptrs, mask=head_ok[:, None] & (k_dims < K_DIM)[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
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
    out_ptrs = out_ptr + split.to(tl.int64) * stride_out_split + row * stride_out_row
    out_ptrs = out_ptrs + heads[:, None] * stride_out_head + v_dims[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=head_ok[:, None] & (v_dims < V_DIM)[None, :])
    if WRITE_LSE:
        tl.store(lse_ptrs, lse, mask=head_ok)


def decode_launches(call: AttentionCall, device: DeviceFacts, tile: TileConfig | None = None) -> list[Launch]:
    """The kernel launches for a batch in which every sequence has one query token.

    One launch when the KV length is not split, else the split launch and the merge. ``tile`` overrides the built-in
    choice (for benchmarks).
    """
    num_seqs, num_heads, _ = call.q.shape
    num_kv_heads, v_dim = call.v_cache.shape[2:]
    group = num_heads // num_kv_heads
    config = tile or decode_config(group, call.head_pad, call.q.element_size(), device)
    head_tiles = triton.cdiv(group, config.tile_m)
    split_tokens, num_splits = decode_splits(
        call.metadata, num_kv_heads * head_tiles, config.tile_n, call.window, device
    )
    if num_splits > 1:
        out = torch.empty((num_splits, num_seqs, num_heads, v_dim), dtype=torch.float32, device=call.q.device)
        lse = torch.empty((num_splits, num_seqs, num_heads), dtype=torch.float32, device=call.q.device)
    else:
        out = call.out[None]
        lse = (call.lse if call.lse is not None else call.metadata.kv_lens[:, None])[None]
    arguments = call.arguments() | {
        "out_ptr": out,
        "lse_ptr": lse,
        "split_tokens": split_tokens,
        "stride_out_split": out.stride(0),
        "stride_out_row": out.stride(1),
        "stride_out_head": out.stride(2),
        "stride_lse_split": lse.stride(0),
        "stride_lse_row": lse.stride(1),
    }
    constants = call.constants() | {
        "GROUP": group,
        "HEAD_TILES": head_tiles,
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        "SPLIT": num_splits > 1,
        "WRITE_LSE": num_splits > 1 or call.lse is not None,
    }
    launch = Launch(decode_kernel, (num_kv_heads * head_tiles, num_splits, num_seqs), arguments, constants, config)
    return [launch, merge_launch(out, lse, call.out, call.lse)] if num_splits > 1 else [launch]
