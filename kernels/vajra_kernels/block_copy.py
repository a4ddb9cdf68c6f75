# mypy: disable-error-code="no-untyped-call,untyped-decorator,misc"
"""Copy whole KV blocks between two tensors on one device.

Used for the buffers of a swap, and for decodes that were started ahead, which write their KV into spare blocks first.

Invariants:
    - A block of one layer is one dense run of memory in both tensors (``cache.block_words``), so raw words are copied,
      independent of the dtype and the order of dimensions inside the block.
    - Pairs are copied in parallel: within one call and cache, no block is both a source and a destination.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vajra_kernels.config import TileConfig
from vajra_kernels.launch import Launch, next_power_of_2


@triton.jit
def copy_blocks_kernel(
    dst_ptr: tl.tensor,
    src_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    stride_dst_layer: tl.tensor,
    stride_dst_block: tl.tensor,
    stride_src_layer: tl.tensor,
    stride_src_block: tl.tensor,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Grid (num_pairs, ceil(WORDS / TILE), num_layers). ``dst`` and ``src`` are int32 words, ``pairs`` int64 [n, 2]."""
    pair = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    source = tl.load(pairs_ptr + pair * 2)
    target = tl.load(pairs_ptr + pair * 2 + 1)
    words = tl.program_id(1) * TILE + tl.arange(0, TILE)
    ok = words < WORDS
    values = tl.load(src_ptr + layer * stride_src_layer + source * stride_src_block + words, mask=ok)
    tl.store(dst_ptr + layer * stride_dst_layer + target * stride_dst_block + words, values, mask=ok)


def copy_words_launch(src: torch.Tensor, dst: torch.Tensor, pairs: torch.Tensor) -> Launch:
    """Return the launch that copies ``src[:, i]`` to ``dst[:, j]`` for every (i, j) of ``pairs`` int64 [n, 2].

    ``src`` and ``dst`` are int32 words [num_layers, num_blocks, words per block], dense in the last dimension
    (``cache.block_words``).
    """
    num_layers, _, num_words = src.shape
    tile = min(4096, next_power_of_2(num_words))
    arguments = {
        "dst_ptr": dst,
        "src_ptr": src,
        "pairs_ptr": pairs,
        "stride_dst_layer": dst.stride(0),
        "stride_dst_block": dst.stride(1),
        "stride_src_layer": src.stride(0),
        "stride_src_block": src.stride(1),
    }
    grid = (pairs.shape[0], triton.cdiv(num_words, tile), num_layers)
    return Launch(copy_blocks_kernel, grid, arguments, {"WORDS": num_words, "TILE": tile}, TileConfig(1, tile, 4, 1))
