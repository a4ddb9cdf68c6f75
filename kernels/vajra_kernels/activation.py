# mypy: disable-error-code="no-untyped-call,untyped-decorator,misc"
"""Activation of a gated MLP: act(gate) * up, in float32, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vajra_kernels.config import TileConfig
from vajra_kernels.launch import Launch, next_power_of_2


@triton.jit
def gated_kernel(
    out_ptr: tl.tensor,
    gate_up_ptr: tl.tensor,
    stride_gate_up_row: tl.tensor,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    IS_SILU: tl.constexpr,
) -> None:
    """Grid (num_rows, ceil(WIDTH / TILE)): write out [T, WIDTH] (dense) from gate_up [T, 2 * WIDTH], gate first."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    ok = columns < WIDTH
    source = gate_up_ptr + row * stride_gate_up_row + columns
    gate = tl.load(source, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=ok, other=0.0).to(tl.float32)
    # SiLU and the tanh form of GELU are both gate * sigmoid(z), since (1 + tanh(y)) / 2 is the sigmoid of 2 y.
    z = gate if IS_SILU else 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = gate / (1.0 + tl.exp2(tl.minimum(z * -1.4426950408889634, 126.0)))
    tl.store(out_ptr + row * WIDTH + columns, (active * up).to(out_ptr.dtype.element_ty), mask=ok)


def gated_launch(out: torch.Tensor, gate_up: torch.Tensor, activation: str) -> Launch:
    """Return the launch for ``out`` [T, W] = act(gate) * up of ``gate_up`` [T, 2 W].

    ``activation`` is one of ``layer_ops.ACTIVATIONS``.
    """
    num_rows, width = out.shape
    tile = min(1024, next_power_of_2(width))
    arguments = {"out_ptr": out, "gate_up_ptr": gate_up, "stride_gate_up_row": gate_up.stride(0)}
    constants = {"WIDTH": width, "TILE": tile, "IS_SILU": activation == "silu"}
    grid = (num_rows, triton.cdiv(width, tile), 1)
    return Launch(gated_kernel, grid, arguments, constants, TileConfig(1, tile, 4, 1))
