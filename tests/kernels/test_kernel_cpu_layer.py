"""Norms, rotary embedding with cache write, and gated activations in compiled loops, against plain torch."""

from __future__ import annotations

import pytest
import torch

from vajra_kernels.backend import fuses_layers
from vajra_kernels.layer_checks import LAYER_TOLERANCES, RotationCase, gated_error, norm_error, rotation_error
from vajra_kernels.layer_ops import gated_activation

pytest.importorskip("numba")
CPU = torch.device("cpu")
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@each_dtype
@pytest.mark.parametrize("width", [64, 200])
@pytest.mark.parametrize("kind", ["norm", "add", "add normed"])
def test_norm(dtype: torch.dtype, width: int, kind: str, generator: torch.Generator) -> None:
    assert norm_error(kind, (5, width), dtype, generator, "cpu") <= LAYER_TOLERANCES[dtype]


@each_dtype
@pytest.mark.parametrize(("heads", "dim", "rotary"), [((4, 2), 16, 16), ((3, 1), 80, 80), ((6, 2), 48, 24)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rotate_and_write(
    dtype: torch.dtype, heads: tuple[int, int], dim: int, rotary: int, has_norm: bool, generator: torch.Generator
) -> None:
    case = RotationCase(heads, dim, rotary, has_norm, head_major=False)
    assert rotation_error(case, dtype, generator, "cpu") <= LAYER_TOLERANCES[dtype]


@each_dtype
@pytest.mark.parametrize("width", [48, 1500])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_activation(dtype: torch.dtype, width: int, activation: str, generator: torch.Generator) -> None:
    assert gated_error(activation, (5, width), dtype, generator, "cpu") <= LAYER_TOLERANCES[dtype]


@each_dtype
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_far_out_stay_numbers_and_what_is_none_stays_none(dtype: torch.dtype, activation: str) -> None:
    gates = torch.tensor([[-1e30, -300.0, -88.0, 0.0, 88.0, 300.0, 1e12, float("nan")]], dtype=dtype)
    out = gated_activation(torch.cat((gates, torch.ones_like(gates)), 1), activation)[0].float()
    assert torch.equal(out[3:7], gates[0, 3:7].float())
    assert (out[1:3].abs() < 1e-30).all()
    assert out[0] > -1e-5
    assert out[7].isnan()


def test_they_are_for_one_thread_and_types_that_the_loops_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert fuses_layers(CPU, torch.float32)
    assert fuses_layers(CPU, torch.bfloat16)
    assert not fuses_layers(CPU, torch.float16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not fuses_layers(CPU, torch.float32)
