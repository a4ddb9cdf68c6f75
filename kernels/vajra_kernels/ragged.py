# mypy: disable-error-code="no-untyped-call,untyped-decorator,misc"
"""Attention of a ragged batch of prefill chunks and decodes over paged context, in one launch.

One program handles one tile of query rows of one sequence and one KV head. A row is a pair (query token, query head of
the group), so grouped heads share the loaded K and V. Long chunks use 128 rows, which suit Hopper's ``wgmma``, short
ones 64 or 16.

Invariants:
    - Tiles are numbered through the batch: with TOKENS query tokens in a tile, the tiles of sequence i start at
      ``(query_start[i] - query_start[0]) // TOKENS + i``. A program finds its sequence by binary search, so the host
      need not know the lengths; surplus programs return at once.
    - KV tiles that are visible to every row run without masks; the diagonal, the tail and windowed layers run masked.
    - Within a sequence, the last tiles, which attend to the most positions, get the lowest program ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from vajra_kernels.config import DeviceFacts, TileConfig, chunk_splits, ragged_config
from vajra_kernels.launch import Launch
from vajra_kernels.merge import merge_launch
from vajra_kernels.tiles import attend_tiles, finish_softmax, load_queries

if TYPE_CHECKING:
    from vajra_kernels.call import AttentionCall


@triton.jit
def find_sequence(
    query_start_ptr: tl.tensor, tile: tl.tensor, num_seqs: tl.tensor, TOKENS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return (sequence of query tile ``tile``, that sequence's first tile).

    The sequence is the last one whose first tile is at most ``tile``.
    """
    origin = tl.load(query_start_ptr)
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        first_tile = (tl.load(query_start_ptr + middle) - origin) // TOKENS + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle - 1
    return low, (tl.load(query_start_ptr + low) - origin) // TOKENS + low


@triton.jit
def seen_by(
    token: tl.tensor,
    first_token: tl.tensor,
    query_len: tl.tensor,
    kv_len: tl.tensor,
    TOKENS: tl.constexpr,
    CAUSAL: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return (last position of each row, last position of the tile's first token, end of the tile's positions).

    The positions of a row, token or tile are the KV positions that it attends to. The last positions are inclusive, the
    end is exclusive.
    """
    if CAUSAL:
        first_position = kv_len - query_len + first_token
        return kv_len - query_len + token, first_position, tl.minimum(first_position + TOKENS, kv_len)
    else:
        return kv_len - 1 + token * 0, kv_len - 1, kv_len


@triton.jit(
    do_not_specialize=["window", "num_seqs", "split_tokens", "stride_table", "stride_lse_split"],
    do_not_specialize_on_alignment=["query_start_ptr", "kv_lens_ptr", "table_ptr", "lse_ptr"],
)
def ragged_kernel(
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    kv_lens_ptr: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    num_seqs: tl.tensor,
    split_tokens: tl.tensor,
    stride_out_split: tl.tensor,
    stride_lse_split: tl.tensor,
    stride_out_row: tl.tensor,
    stride_out_head: tl.tensor,
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
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    SPLIT: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Grid (num_query_tokens // TOKENS + num_seqs, num_kv_heads * ceil(GROUP / HEADS), splits), TOKENS = TILE_M // HEADS.

    q [T, Hq, K_DIM]; out [T, Hq, V_DIM]; lse float32 [T, Hq]. With SPLIT, out and lse have a leading dimension of
    splits, each of ``split_tokens`` KV positions; a split without positions only writes lse = -inf. ``query_start``
    [num_seqs + 1] counts rows of q and may start above 0. HEADS is the number of a group's query heads in one tile.
    """
    TOKENS: tl.constexpr = TILE_M // HEADS
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    seq, first_tile = find_sequence(query_start_ptr, tl.program_id(0), num_seqs, TOKENS)
    query_begin = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - query_begin
    tile_in_seq = (query_len + TOKENS - 1) // TOKENS - 1 - (tl.program_id(0) - first_tile)
    if tile_in_seq < 0:
        return
    kv_head = tl.program_id(1) // HEAD_TILES
    rows = tl.arange(0, TILE_M)
    head_in_group = (tl.program_id(1) % HEAD_TILES) * HEADS + rows % HEADS
    token = tile_in_seq * TOKENS + rows // HEADS
    row_ok = (rows < TOKENS * HEADS) & (token < query_len) & (head_in_group < GROUP)
    heads = kv_head * GROUP + head_in_group
    kv_len = tl.load(kv_lens_ptr + seq)
    positions, first_position, end = seen_by(token, tile_in_seq * TOKENS, query_len, kv_len, TOKENS, CAUSAL)
    tokens = (query_begin + token).to(tl.int64)
    begin = 0
    if SPLIT:
        split = tl.program_id(2).to(tl.int64)
        out_ptr += split * stride_out_split
        lse_ptr += split * stride_lse_split
        begin = tl.program_id(2) * split_tokens
        if begin >= end:
            empty = tl.full([TILE_M], float("-inf"), tl.float32)
            tl.store(lse_ptr + tokens * stride_lse_row + heads, empty, mask=row_ok)
            return
        end = tl.minimum(end, begin + split_tokens)
    q = load_queries(q_ptr, tokens, heads, row_ok, stride_q_row, stride_q_head, K_DIM, K_PAD, UPCAST)
    k_base = k_ptr + kv_head.to(tl.int64) * stride_k_head
    v_base = v_ptr + kv_head.to(tl.int64) * stride_v_head
    table_row = table_ptr + seq.to(tl.int64) * stride_table
    acc = tl.zeros([TILE_M, V_PAD], tl.float32)
    row_max = tl.full([TILE_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)
    if HAS_WINDOW:
        masked_from = tl.maximum(first_position - window + 1, 0) // TILE_N * TILE_N
    else:
        masked_from = (first_position + 1) // TILE_N * TILE_N
        if SPLIT:
            masked_from = tl.maximum(tl.minimum(masked_from, end // TILE_N * TILE_N), begin)
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
    out_ptrs = out_ptr + tokens[:, None] * stride_out_row + heads[:, None] * stride_out_head + v_dims[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & (v_dims < V_DIM)[None, :])
    if WRITE_LSE:
        tl.store(lse_ptr + tokens * stride_lse_row + heads, lse, mask=row_ok)


def ragged_launches(call: AttentionCall, device: DeviceFacts, tile: TileConfig | None = None) -> list[Launch]:
    """Return the launches for sequences of any query length (including 0); ``tile`` overrides the built-in choice.

    There is one launch, or, if few programs would read a long context, a launch with KV splits and the merge.
    """
    metadata = call.metadata
    num_heads = call.q.shape[1]
    num_kv_heads = call.k_cache.shape[2]
    group = num_heads // num_kv_heads
    config = tile or ragged_config(group, metadata.max_query_len, call.head_pad, call.q.element_size(), device)
    heads = min(group, config.tile_m)
    num_tiles = metadata.num_query_tokens // (config.tile_m // heads) + metadata.num_seqs if metadata.num_seqs else 0
    grid = (num_tiles, num_kv_heads * triton.cdiv(group, heads))
    split_tokens, num_splits = 0, 1
    if call.window is None:
        split_tokens, num_splits = chunk_splits(grid[0] * grid[1], metadata.max_kv_len, config.tile_n, device)
    out = call.out[None]
    lse = (call.lse if call.lse is not None else metadata.kv_lens[:, None])[None]
    if num_splits > 1:
        out = torch.empty((num_splits, *call.out.shape), dtype=torch.float32, device=call.q.device)
        lse = torch.empty((num_splits, *call.out.shape[:2]), dtype=torch.float32, device=call.q.device)
    arguments = call.arguments() | {
        "out_ptr": out,
        "lse_ptr": lse,
        "query_start_ptr": metadata.query_start,
        "num_seqs": metadata.num_seqs,
        "split_tokens": split_tokens,
        "stride_out_split": out.stride(0),
        "stride_lse_split": lse.stride(0),
        "stride_out_row": out.stride(1),
        "stride_out_head": out.stride(2),
        "stride_lse_row": lse.stride(1),
    }
    constants = call.constants() | {
        "GROUP": group,
        "HEADS": heads,
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        "SPLIT": num_splits > 1,
        "WRITE_LSE": num_splits > 1 or call.lse is not None,
        "CAUSAL": metadata.causal,
    }
    launch = Launch(ragged_kernel, (*grid, num_splits), arguments, constants, config)
    if num_splits == 1:
        return [launch]
    own = slice(call.q.shape[0] - metadata.num_query_tokens, None)  # the preceding rows are decodes of a mixed batch
    merged = None if call.lse is None else call.lse[own]
    return [launch, merge_launch(out[:, own], lse[:, own], call.out[own], merged)]
