"""Norms, rotary embedding with cache write, and gated activations in Triton's interpreter, against plain torch."""

from __future__ import annotations

import pytest
import torch

from vajra_kernels.layer_checks import LAYER_TOLERANCES, RotationCase, gated_error, norm_error, rotation_error

each_dtype = pytest.mark.parametrize("dtype", LAYER_TOLERANCES)


@each_dtype
@pytest.mark.parametrize("width", [64, 200])
@pytest.mark.parametrize("kind", ["norm", "add", "add normed"])
def test_norm(dtype: torch.dtype, width: int, kind: str, generator: torch.Generator) -> None:
    assert norm_error(kind, (5, width), dtype, generator, "cpu") <= LAYER_TOLERANCES[dtype]


@each_dtype
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
    case = RotationCase(heads, dim, rotary, has_norm, head_major)
    assert rotation_error(case, dtype, generator, "cpu") <= LAYER_TOLERANCES[dtype]


@each_dtype
@pytest.mark.parametrize("width", [48, 1500])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_activation(dtype: torch.dtype, width: int, activation: str, generator: torch.Generator) -> None:
    assert gated_error(activation, (5, width), dtype, generator, "cpu") <= LAYER_TOLERANCES[dtype]
