# mypy: disable-error-code="no-untyped-call,untyped-decorator,misc"
"""Copy whole KV blocks between two caches of one device (copy on write, defragmentation, staging for swap).

Invariants:
    - A block is one dense run of memory in both caches (``cache.block_words``), so that a copy is one of raw words,
      whatever the dtype and the order of dimensions inside the block.
    - Pairs run in parallel: no block is both a source and a destination of one call in one cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vajra_kernels.cache import block_words
from vajra_kernels.config import TileConfig
from vajra_kernels.launch import Launch, next_power_of_2


@triton.jit
def copy_blocks_kernel(
    dst_ptr: tl.tensor,
    src_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    stride_dst_layer: tl.tensor,
    stride_src_layer: tl.tensor,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Grid (num_pairs, ceil(WORDS / TILE), num_layers). Pointers are to int32 words; ``pairs`` int64 [n, 2]."""
    pair = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    source = tl.load(pairs_ptr + pair * 2)
    target = tl.load(pairs_ptr + pair * 2 + 1)
    words = tl.program_id(1) * TILE + tl.arange(0, TILE)
    ok = words < WORDS
    values = tl.load(src_ptr + layer * stride_src_layer + source * WORDS + words, mask=ok)
    tl.store(dst_ptr + layer * stride_dst_layer + target * WORDS + words, values, mask=ok)


def copy_blocks_launch(src: torch.Tensor, dst: torch.Tensor, pairs: torch.Tensor) -> Launch:
    """The launch that copies ``src[..., i]`` to ``dst[..., j]`` for every (i, j) of ``pairs`` int64 [n, 2].

    ``src`` and ``dst`` are caches [num_blocks, block, Hkv, D], or with one leading dimension of layers.
    """
    src_words, dst_words = block_words(src), block_words(dst)
    num_layers, _, num_words = src_words.shape
    tile = min(4096, next_power_of_2(num_words))
    arguments = {
        "dst_ptr": dst_words,
        "src_ptr": src_words,
        "pairs_ptr": pairs,
        "stride_dst_layer": dst_words.stride(0),
        "stride_src_layer": src_words.stride(0),
    }
    grid = (pairs.shape[0], triton.cdiv(num_words, tile), num_layers)
    return Launch(copy_blocks_kernel, grid, arguments, {"WORDS": num_words, "TILE": tile}, TileConfig(1, tile, 4, 1))
