"""Memory layout of the paged KV cache.

A cache has the logical shape [num_blocks, block_size, num_kv_heads, head_dim] with a dense last dimension; kernels take
its strides. On the CPU, the physical order is the same: a token's heads are adjacent, so gathering tokens copies whole
rows. On CUDA, it is [num_blocks, num_kv_heads, block_size, head_dim]: a program reads one KV head, whose part of a
block is one run of memory (4 KiB for 16 tokens of dimension 128 in 16 bits).

Invariants:
    - A KV block is one dense run of memory in either order.
    - New caches are zero, and slots without a written token never affect a result.
"""

from __future__ import annotations

import torch

WORD_BYTES = 4


def allocate_kv_cache(
    num_layers: int,
    num_blocks: int,
    block_shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (k_cache, v_cache), each zero, [num_layers, num_blocks, block_size, num_kv_heads, head_dim].

    Args:
        num_layers: number of attention layers that share the block tables.
        num_blocks: number of KV blocks per layer.
        block_shape: (block_size in tokens, num_kv_heads, head_dim).
        dtype: element type of both caches.
        device: device of both caches, which determines the physical order.
    """
    block_size, num_kv_heads, head_dim = block_shape
    if torch.device(device).type == "cpu":
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
    shape = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)
    keys, values = (torch.zeros(shape, dtype=dtype, device=device).transpose(2, 3) for _ in range(2))
    return keys, values


def kv_block_bytes(num_layers: int, block_shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Return the number of bytes of one KV block, K and V, over all layers."""
    block_size, num_kv_heads, head_dim = block_shape
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


def block_words(cache: torch.Tensor) -> torch.Tensor:
    """Return the cache as int32 words [num_layers, num_blocks, words per block] that share its memory.

    Raises:
        ValueError: a block is not one dense run of memory, or is not a multiple of 4 bytes.
    """
    layered = cache if cache.dim() == 5 else cache[None]
    if layered.dim() != 5:
        raise ValueError(
            f"KV cache: wrong number of dimensions ({cache.dim()}). "
            "A cache is [num_blocks, block_size, num_kv_heads, head_dim], or has a leading dimension of layers."
        )
    for order in ((0, 1, 2, 3, 4), (0, 1, 3, 2, 4)):
        physical = layered.permute(order)
        if physical[0].is_contiguous():
            num_layers, num_blocks = physical.shape[:2]
            elements = physical[0, 0].numel()
            if elements * cache.element_size() % WORD_BYTES:
                break
            flat = physical.as_strided((num_layers, num_blocks, elements), (layered.stride(0), elements, 1))
            return flat.view(torch.int32)
    raise ValueError(
        f"KV cache: cannot copy blocks of shape {tuple(layered.shape[2:])} and strides {layered.stride()[2:]}. "
        "A block must be one dense run of memory of a multiple of 4 bytes."
    )


def cache_strides(k_cache: torch.Tensor, v_cache: torch.Tensor) -> dict[str, int]:
    """Return the strides of both caches by the names of the kernels' arguments."""
    names = ("block", "slot", "head")
    return {
        f"stride_{cache}_{name}": tensor.stride(axis)
        for cache, tensor in (("k", k_cache), ("v", v_cache))
        for axis, name in enumerate(names)
    }
