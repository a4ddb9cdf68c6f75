# mypy: disable-error-code="no-untyped-call,untyped-decorator,misc"
"""Write the keys and values of a step's tokens into the paged cache.

Invariants:
    - Token t goes to slot ``slot_mapping[t]`` = block * block_size + offset; with a negative slot, it is not written.
    - Two tokens of one call never share a slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vajra_kernels.cache import cache_strides
from vajra_kernels.config import TileConfig
from vajra_kernels.launch import Launch, next_power_of_2


@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr"])
def kv_write_kernel(
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    stride_key_row: tl.tensor,
    stride_key_head: tl.tensor,
    stride_value_row: tl.tensor,
    stride_value_head: tl.tensor,
    stride_k_block: tl.tensor,
    stride_k_slot: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_block: tl.tensor,
    stride_v_slot: tl.tensor,
    stride_v_head: tl.tensor,
    NUM_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    ELEMENTS: tl.constexpr,
) -> None:
    """Grid (num_tokens, ceil(NUM_HEADS * max(K_DIM, V_DIM) / ELEMENTS)).

    Each program writes ELEMENTS of one token's K and V.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    block = slot // KV_BLOCK
    offset = slot % KV_BLOCK
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    head = element // K_DIM
    dim = element % K_DIM
    ok = element < NUM_HEADS * K_DIM
    key = tl.load(key_ptr + token * stride_key_row + head * stride_key_head + dim, mask=ok)
    target = k_cache_ptr + block * stride_k_block + offset * stride_k_slot + head * stride_k_head + dim
    tl.store(target, key.to(k_cache_ptr.dtype.element_ty), mask=ok)
    head = element // V_DIM
    dim = element % V_DIM
    ok = element < NUM_HEADS * V_DIM
    value = tl.load(value_ptr + token * stride_value_row + head * stride_value_head + dim, mask=ok)
    target = v_cache_ptr + block * stride_v_block + offset * stride_v_slot + head * stride_v_head + dim
    tl.store(target, value.to(v_cache_ptr.dtype.element_ty), mask=ok)


def kv_write_launch(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> Launch:
    """Return the launch that writes key [T, Hkv, Dk] and value [T, Hkv, Dv] to the slots ``slot_mapping`` int64 [T]."""
    num_tokens, num_heads, k_dim = key.shape
    v_dim = value.shape[2]
    width = num_heads * max(k_dim, v_dim)
    elements = min(2048, next_power_of_2(width))
    arguments = {
        "k_cache_ptr": k_cache,
        "v_cache_ptr": v_cache,
        "key_ptr": key,
        "value_ptr": value,
        "slot_mapping_ptr": slot_mapping,
        "stride_key_row": key.stride(0),
        "stride_key_head": key.stride(1),
        "stride_value_row": value.stride(0),
        "stride_value_head": value.stride(1),
    } | cache_strides(k_cache, v_cache)
    constants = {
        "NUM_HEADS": num_heads,
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "KV_BLOCK": k_cache.shape[1],
        "ELEMENTS": elements,
    }
    grid = (num_tokens, triton.cdiv(width, elements), 1)
    return Launch(kv_write_kernel, grid, arguments, constants, TileConfig(1, elements, 4 if elements > 512 else 2, 1))
