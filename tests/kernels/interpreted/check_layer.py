"""Norms, rotary embedding with cache write, and gated activations in Triton's interpreter, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from vajra_kernels.layer_ops import Rotation, add_norm, gated_activation, rotate_and_write
from vajra_kernels.reference import write_kv_reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCES = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def close(one: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((one.double() - wanted.double()).abs().max() <= TOLERANCES[dtype] * max(1.0, float(wanted.abs().max())))


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 200])
@pytest.mark.parametrize("kind", ["norm", "add", "add normed"])
def test_norm(dtype: torch.dtype, width: int, kind: str, generator: torch.Generator) -> None:
    """Rows of a wider tensor, weights wider than the rows (Gemma's), and a residual that is changed in place."""
    hidden = torch.randn((5, width + 8), generator=generator).to(dtype)[:, :width]
    part = torch.randn((5, width), generator=generator).to(dtype)
    weights = torch.rand((2, width), generator=generator) + 0.5
    before, residual = hidden.double(), hidden.double()
    if kind != "norm":
        added = normed(part.double(), weights[1].double(), 1e-3) if kind == "add normed" else part.double()
        residual = before + added
    extra = () if kind == "norm" else (part,) if kind == "add" else (part, (weights[1], 1e-3))
    out = add_norm(hidden, (weights[0], 1e-5), *extra)
    assert out.dtype == dtype
    assert close(hidden, residual, dtype)
    assert close(out, normed(residual, weights[0].double(), 1e-5), dtype)
    if kind == "norm":
        assert torch.equal(hidden.double(), before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "dim", "rotary"), [((4, 2), 16, 16), ((3, 1), 80, 80), ((6, 2), 48, 24), ((33, 33), 64, 64)]
)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("head_major", [False, True])
def test_rotate_and_write(
    dtype: torch.dtype,
    heads: tuple[int, int],
    dim: int,
    rotary: int,
    has_norm: bool,
    head_major: bool,
    generator: torch.Generator,
) -> None:
    num_query, num_kv = heads
    num_tokens, eps = 7, 1e-5
    shape = (6, 4, num_kv, dim)
    caches = [torch.full(shape, 9.0, dtype=dtype) for _ in range(2)]
    if head_major:
        caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]
    wanted_caches = [cache.clone() for cache in caches]
    qkv = torch.randn((num_tokens, (num_query + 2 * num_kv) * dim), generator=generator).to(dtype)
    slots = torch.randperm(24, generator=generator)[:num_tokens]
    slots[2] = -1
    positions = torch.randint(0, 50, (num_tokens,), generator=generator)
    angles = torch.rand((50, rotary // 2), generator=generator) * 7
    rotation = Rotation(angles.cos().to(dtype), angles.sin().to(dtype), positions)
    weight = torch.rand((num_query + num_kv, dim), generator=generator) + 0.5
    query = rotate_and_write(qkv, (caches[0], caches[1]), slots, rotation, (weight, eps) if has_norm else None)

    rows = qkv.double().view(num_tokens, -1, dim)
    turned = rows[:, : num_query + num_kv]
    if has_norm:
        turned = normed(turned, weight.double(), eps)
    cos, sin = (table.double()[positions].unsqueeze(1) for table in (rotation.cos, rotation.sin))
    first, second = turned[..., :rotary].chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin, turned[..., rotary:]), -1)
    assert close(query, turned[:, :num_query], dtype)
    write_kv_reference(turned[:, num_query:].to(dtype), wanted_caches[0], slots)
    write_kv_reference(qkv.view(num_tokens, -1, dim)[:, num_query + num_kv :], wanted_caches[1], slots)
    assert close(caches[0], wanted_caches[0], dtype)
    assert torch.equal(caches[1], wanted_caches[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 1500])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_activation(dtype: torch.dtype, width: int, activation: str, generator: torch.Generator) -> None:
    gate_up = (torch.randn((5, 2 * width), generator=generator) * 3).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    active = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    assert close(gated_activation(gate_up, activation), active * up, dtype)
