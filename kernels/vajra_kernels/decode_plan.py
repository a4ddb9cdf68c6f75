# mypy: disable-error-code="no-untyped-call,untyped-decorator,misc"
"""Divide a batch of decodes into pieces of equal work, on the device and by the actual lengths.

A piece is a range of one sequence's KV positions. The host bounds the number of pieces by the number of sequences and
the size of the GPU, not by the longest possible sequence, so that most programs of a captured launch have a piece.

A plan of N pieces and B sequences is int32 [2 N + B + 2] and contains, in this order: the sequence of each piece (-1:
none); the first position of each piece, relative to the visible part of its sequence; the first piece of each sequence;
the number of pieces; the number of positions per piece.

Invariants:
    - Every sequence has a piece, even one of length 0; pieces of a sequence are adjacent.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vajra_kernels.config import MIN_SPLIT_TOKENS, SPLITS_PER_SM, DeviceFacts, TileConfig
from vajra_kernels.launch import Launch, next_power_of_2
from vajra_kernels.metadata import AttentionMetadata

_COMPARISONS = 4096
"""Largest number of comparisons in one program, which compares each of its pieces with every sequence."""
_MOST_PIECES = 128
"""Largest number of pieces planned by one program, used if there are few sequences."""


@triton.jit(
    do_not_specialize=["num_seqs", "num_pieces", "window", "target"], do_not_specialize_on_alignment=["kv_lens_ptr"]
)
def plan_kernel(
    plan_ptr: tl.tensor,
    kv_lens_ptr: tl.tensor,
    num_seqs: tl.tensor,
    num_pieces: tl.tensor,
    window: tl.tensor,
    target: tl.tensor,
    TILE_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    PAD: tl.constexpr,
    PIECES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> None:
    """Grid (ceil(num_pieces / PIECES),): each program plans PIECES pieces.

    The batch's tiles are divided among about ``target`` pieces.
    """
    seqs = tl.arange(0, PAD)
    is_seq = seqs < num_seqs
    lens = tl.load(kv_lens_ptr + seqs, mask=is_seq, other=0)
    if HAS_WINDOW:
        lens = lens - tl.maximum(lens - window, 0) // TILE_N * TILE_N
    tiles = (lens + TILE_N - 1) // TILE_N
    tiles_per_piece = tl.maximum((tl.sum(tiles, 0) + target - 1) // target, MIN_TILES)
    counts = tl.where(is_seq, tl.maximum((tiles + tiles_per_piece - 1) // tiles_per_piece, 1), 0)
    ends = tl.cumsum(counts, 0)
    starts = ends - counts
    total = tl.sum(counts, 0)
    pieces = tl.program_id(0) * PIECES + tl.arange(0, PIECES)
    has_ended = (ends[None, :] <= pieces[:, None]) & is_seq[None, :]
    seq = tl.sum(has_ended.to(tl.int32), 1)
    start = tl.sum(tl.where(seqs[None, :] == seq[:, None], starts[None, :], 0), 1)
    ok = pieces < num_pieces
    tl.store(plan_ptr + pieces, tl.where(pieces < total, seq, -1), mask=ok)
    tl.store(plan_ptr + num_pieces + pieces, (pieces - start) * tiles_per_piece * TILE_N, mask=ok)
    if tl.program_id(0) == 0:
        tail = plan_ptr + 2 * num_pieces
        tl.store(tail + seqs, starts, mask=is_seq)
        tl.store(tail + num_seqs, total)
        tl.store(tail + num_seqs + 1, tiles_per_piece * TILE_N)


def target_pieces(num_head_tiles: int, device: DeviceFacts) -> int:
    """Return the number of pieces that fill the GPU, with ``num_head_tiles`` programs per piece."""
    return max(1, SPLITS_PER_SM * device.num_sms // num_head_tiles)


def max_pieces(metadata: AttentionMetadata, num_head_tiles: int, tile_n: int, device: DeviceFacts) -> int:
    """Return the largest possible number of pieces in a plan of this batch, given host-side bounds."""
    num_seqs = metadata.num_seqs
    most = (metadata.num_kv_tokens + num_seqs * tile_n) // max(MIN_SPLIT_TOKENS, tile_n) + 1
    return num_seqs + min(target_pieces(num_head_tiles, device), most)


def is_split(
    metadata: AttentionMetadata, num_head_tiles: int, tile_n: int, window: int | None, device: DeviceFacts
) -> bool:
    """Return True if a sequence may have several pieces.

    If only bounds of lengths are known, any sequence longer than the shortest piece may have several.
    """
    longest = metadata.max_kv_len if window is None else min(metadata.max_kv_len, window + tile_n)
    piece = MIN_SPLIT_TOKENS
    if metadata.knows_lengths:
        total = sum(-(-min(length, longest) // tile_n) for length in metadata.memo.cpu_plans.kv_lens or ())
        piece = max(piece, -(-total // target_pieces(num_head_tiles, device)) * tile_n)
    return longest > piece


def plan_launch(
    plan: torch.Tensor,
    metadata: AttentionMetadata,
    num_pieces: int,
    num_head_tiles: int,
    tile_n: int,
    window: int | None,
    device: DeviceFacts,
) -> Launch:
    """Return the launch that writes a plan of ``num_pieces`` pieces (see ``max_pieces``) for ``metadata`` into
    ``plan``.
    """
    pad = next_power_of_2(metadata.num_seqs)
    pieces = max(1, min(_MOST_PIECES, _COMPARISONS // pad))
    arguments = {
        "plan_ptr": plan,
        "kv_lens_ptr": metadata.kv_lens,
        "num_seqs": metadata.num_seqs,
        "num_pieces": num_pieces,
        "window": window or 0,
        "target": target_pieces(num_head_tiles, device),
    }
    constants = {
        "TILE_N": tile_n,
        "MIN_TILES": max(1, MIN_SPLIT_TOKENS // tile_n),
        "PAD": pad,
        "PIECES": pieces,
        "HAS_WINDOW": window is not None,
    }
    grid = (triton.cdiv(num_pieces, constants["PIECES"]), 1, 1)
    return Launch(plan_kernel, grid, arguments, constants, TileConfig(constants["PIECES"], pad, 4, 1))
