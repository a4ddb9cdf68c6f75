# mypy: disable-error-code="no-untyped-call,untyped-decorator,misc"
"""Norm of each head, rotary embedding and cache write of a step's queries, keys and values, in one launch.

Invariants:
    - The heads of ``qkv`` are query heads, then key heads, then value heads; value heads are written unchanged.
    - Dimension i < HALF of a query or key head is rotated with dimension i + HALF; dimensions from 2 * HALF on are not
      rotated.
    - Keys and values go to slot ``slot_mapping[t]``; for a negative slot they are not written, but the query is
      rotated.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vajra_kernels.cache import cache_strides
from vajra_kernels.config import TileConfig
from vajra_kernels.launch import Launch, next_power_of_2
from vajra_kernels.operands import Rotation

_ELEMENTS = 1024
"""Number of elements per program."""


@triton.jit
def store_heads(
    pointers: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    rest: tl.tensor,
    ok: tl.tensor,
    HALF: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
) -> None:
    """Store heads at ``pointers`` [HEADS, 1], which point to the first dimension of each head.

    ``first`` and ``second`` are the two rotated halves, ``rest`` has the dimensions that are not rotated. Only heads
    with ``ok`` are stored.
    """
    lanes = tl.arange(0, HALF_PAD)[None, :]
    half_ok = ok[:, None] & (lanes < HALF)
    tl.store(pointers + lanes, first.to(pointers.dtype.element_ty), mask=half_ok)
    tl.store(pointers + HALF + lanes, second.to(pointers.dtype.element_ty), mask=half_ok)
    if DIM > 2 * HALF:
        lanes = tl.arange(0, REST_PAD)[None, :]
        rest_ok = ok[:, None] & (lanes < DIM - 2 * HALF)
        tl.store(pointers + 2 * HALF + lanes, rest.to(pointers.dtype.element_ty), mask=rest_ok)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slot_mapping_ptr"])
def rotate_kernel(
    query_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    qkv_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    eps: tl.tensor,
    stride_qkv_row: tl.tensor,
    stride_k_block: tl.tensor,
    stride_k_slot: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_block: tl.tensor,
    stride_v_slot: tl.tensor,
    stride_v_head: tl.tensor,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> None:
    """Grid (num_tokens, ceil((QUERY_HEADS + 2 * KV_HEADS) / HEADS)): HEADS heads of one token per program.

    qkv [T, (QUERY_HEADS + 2 * KV_HEADS) * DIM]; query [T, QUERY_HEADS, DIM] dense; cos and sin [positions, HALF]; the
    norm's weight [QUERY_HEADS + KV_HEADS, DIM].
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    exists = head < QUERY_HEADS + 2 * KV_HEADS
    is_rotated = head < QUERY_HEADS + KV_HEADS
    position = tl.load(positions_ptr + token)
    slot = tl.load(slot_mapping_ptr + token)
    low = tl.arange(0, HALF_PAD)[None, :]
    low_ok = exists[:, None] & (low < HALF)
    source = qkv_ptr + token * stride_qkv_row + head[:, None] * DIM
    first = tl.load(source + low, mask=low_ok, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + low, mask=low_ok, other=0.0).to(tl.float32)
    rest = tl.zeros([HEADS, REST_PAD], tl.float32)
    high = tl.arange(0, REST_PAD)[None, :]
    if DIM > 2 * HALF:
        rest = tl.load(source + 2 * HALF + high, mask=exists[:, None] & (high < DIM - 2 * HALF), other=0.0)
        rest = rest.to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
        factor = tl.where(is_rotated, tl.rsqrt(squares / DIM + eps), 1.0)[:, None]
        weights = weight_ptr + head[:, None] * DIM
        ok = is_rotated[:, None] & (low < HALF)
        first = first * factor * tl.load(weights + low, mask=ok, other=1.0).to(tl.float32)
        second = second * factor * tl.load(weights + HALF + low, mask=ok, other=1.0).to(tl.float32)
        if DIM > 2 * HALF:
            ok = is_rotated[:, None] & (high < DIM - 2 * HALF)
            rest = rest * factor * tl.load(weights + 2 * HALF + high, mask=ok, other=1.0).to(tl.float32)
    cos = tl.load(cos_ptr + position * HALF + low, mask=low < HALF, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * HALF + low, mask=low < HALF, other=0.0).to(tl.float32)
    cos = tl.where(is_rotated[:, None], cos, 1.0)
    sin = tl.where(is_rotated[:, None], sin, 0.0)
    turned = first * cos - second * sin
    second = second * cos + first * sin
    query = query_ptr + token * (QUERY_HEADS * DIM) + head[:, None] * DIM
    store_heads(query, turned, second, rest, head < QUERY_HEADS, HALF, DIM, HALF_PAD, REST_PAD)
    block = slot // KV_BLOCK
    offset = slot % KV_BLOCK
    key = k_cache_ptr + block * stride_k_block + offset * stride_k_slot + (head - QUERY_HEADS)[:, None] * stride_k_head
    first_written = tl.where(slot >= 0, QUERY_HEADS, QUERY_HEADS + 2 * KV_HEADS)
    ok = is_rotated & (head >= first_written)
    store_heads(key, turned, second, rest, ok, HALF, DIM, HALF_PAD, REST_PAD)
    kv_head = head - QUERY_HEADS - KV_HEADS
    value = v_cache_ptr + block * stride_v_block + offset * stride_v_slot + kv_head[:, None] * stride_v_head
    ok = exists & (head >= tl.maximum(first_written, QUERY_HEADS + KV_HEADS))
    store_heads(value, turned, second, rest, ok, HALF, DIM, HALF_PAD, REST_PAD)


def rotate_launch(
    query: torch.Tensor,
    qkv: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
    rotation: Rotation,
    norm: tuple[torch.Tensor, float] | None,
) -> Launch:
    """Return the launch that computes query [T, Hq, D] and cache entries from qkv [T, (Hq + 2 Hkv) * D].

    ``norm`` is (weight [Hq + Hkv, D], epsilon) of a norm of each query and key head, or None.
    """
    num_tokens, num_query_heads, dim = query.shape
    k_cache, v_cache = caches
    num_kv_heads, half = k_cache.shape[2], rotation.cos.shape[1]
    weight, eps = norm or (rotation.cos, 0.0)
    half_pad, rest_pad = next_power_of_2(half), next_power_of_2(max(1, dim - 2 * half))
    num_heads = num_query_heads + 2 * num_kv_heads
    heads = max(1, min(next_power_of_2(num_heads), _ELEMENTS // next_power_of_2(dim)))
    arguments = {
        "query_ptr": query,
        "k_cache_ptr": k_cache,
        "v_cache_ptr": v_cache,
        "qkv_ptr": qkv,
        "cos_ptr": rotation.cos,
        "sin_ptr": rotation.sin,
        "positions_ptr": rotation.positions,
        "slot_mapping_ptr": slot_mapping,
        "weight_ptr": weight,
        "eps": eps,
        "stride_qkv_row": qkv.stride(0),
    } | cache_strides(k_cache, v_cache)
    constants = {
        "QUERY_HEADS": num_query_heads,
        "KV_HEADS": num_kv_heads,
        "DIM": dim,
        "HALF": half,
        "HALF_PAD": half_pad,
        "REST_PAD": rest_pad,
        "KV_BLOCK": k_cache.shape[1],
        "HEADS": heads,
        "HAS_NORM": norm is not None,
    }
    grid = (num_tokens, triton.cdiv(num_heads, heads), 1)
    return Launch(rotate_kernel, grid, arguments, constants, TileConfig(heads, half_pad, 4, 1))
