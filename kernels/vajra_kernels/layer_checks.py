"""Compare the kernels of ``layer_ops`` with float64 references, on random inputs.

Tests run these cases in Triton's interpreter, and ``benchmarks/gpu_check.py`` runs them on a GPU. Errors are relative
to max(1, the largest magnitude of the reference).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from vajra_kernels.layer_ops import add_norm, gated_activation, rotate_and_write
from vajra_kernels.operands import Rotation
from vajra_kernels.reference import write_kv_reference

LAYER_TOLERANCES = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest allowed error, by dtype of the result."""


@dataclass(frozen=True, slots=True)
class RotationCase:
    """One random case of rotating queries and keys, and writing keys and values.

    Attributes:
        heads: (query heads, KV heads).
        dim: head dimension.
        rotary: number of rotated dimensions.
        has_norm: True if each query and key head is normalised.
        head_major: physical order of the caches, as in ``checks.AttentionCase``.
    """

    heads: tuple[int, int]
    dim: int
    rotary: int
    has_norm: bool = False
    head_major: bool = True


def norm_error(kind: str, shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator, device: str) -> float:
    """Return the larger of two errors: of a norm, and of the addition before it, on rows of a wider tensor.

    ``kind`` is "norm", "add" (a part is added first) or "add normed" (the part is normalised and added first). Weights
    are float32.
    """
    num_rows, width = shape
    hidden = torch.randn((num_rows, width + 8), generator=generator).to(device, dtype)[:, :width]
    part = torch.randn((num_rows, width), generator=generator).to(device, dtype)
    weights = (torch.rand((2, width), generator=generator) + 0.5).to(device)
    residual = before = hidden.double()
    if kind != "norm":
        residual = before + (
            _normed(part.double(), weights[1].double(), 1e-3) if kind == "add normed" else part.double()
        )
    extra = () if kind == "norm" else (part,) if kind == "add" else (part, (weights[1], 1e-3))
    out = add_norm(hidden, (weights[0], 1e-5), *extra)
    assert out.dtype == dtype
    if kind == "norm":
        assert torch.equal(hidden.double(), before)
    return max(_error(hidden, residual), _error(out, _normed(residual, weights[0].double(), 1e-5)))


def rotation_error(case: RotationCase, dtype: torch.dtype, generator: torch.Generator, device: str) -> float:
    """Return the largest error of the queries and the K cache; infinity if the V cache is not bit for bit as expected.

    A token without a slot must leave both caches unchanged.
    """
    num_query, num_kv = case.heads
    num_tokens, dim, eps = 7, case.dim, 1e-5
    caches = [torch.full((6, 4, num_kv, dim), 9.0, dtype=dtype, device=device) for _ in range(2)]
    if case.head_major:
        caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]
    wanted_caches = [cache.cpu() for cache in caches]
    qkv = torch.randn((num_tokens, (num_query + 2 * num_kv) * dim), generator=generator).to(dtype)
    slots = torch.randperm(24, generator=generator)[:num_tokens]
    slots[2] = -1
    positions = torch.randint(0, 50, (num_tokens,), generator=generator)
    angles = torch.rand((50, case.rotary // 2), generator=generator) * 7
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weight = torch.rand((num_query + num_kv, dim), generator=generator) + 0.5
    query = rotate_and_write(
        qkv.to(device),
        (caches[0], caches[1]),
        slots.to(device),
        Rotation(cos.to(device), sin.to(device), positions.to(device)),
        (weight.to(device), eps) if case.has_norm else None,
    )
    rows = qkv.double().view(num_tokens, -1, dim)
    turned = rows[:, : num_query + num_kv]
    if case.has_norm:
        turned = _normed(turned, weight.double(), eps)
    cosines, sines = (table.double()[positions].unsqueeze(1) for table in (cos, sin))
    first, second = turned[..., : case.rotary].chunk(2, -1)
    rest = turned[..., case.rotary :]
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines, rest), -1)
    write_kv_reference(turned[:, num_query:].to(dtype), wanted_caches[0], slots)
    write_kv_reference(qkv.view(num_tokens, -1, dim)[:, num_query + num_kv :], wanted_caches[1], slots)
    if not torch.equal(caches[1].cpu(), wanted_caches[1]):
        return float("inf")
    return max(_error(query, turned[:, :num_query]), _error(caches[0], wanted_caches[0].double()))


def gated_error(
    activation: str, shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator, device: str
) -> float:
    """Return the largest error of act(gate) * up, with gate and up in one row of 2 * width."""
    num_rows, width = shape
    gate_up = (torch.randn((num_rows, 2 * width), generator=generator) * 3).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    active = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    return _error(gated_activation(gate_up.to(device), activation), active * up)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference relative to max(1, the largest magnitude); infinite if a value is NaN."""
    difference = (found.cpu().double() - wanted.cpu()).abs().nan_to_num(nan=torch.inf).max()
    return float(difference) / max(1.0, float(wanted.abs().max()))
