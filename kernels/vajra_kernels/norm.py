# mypy: disable-error-code="no-untyped-call,untyped-decorator,misc"
"""Root-mean-square norm of rows, with the preceding addition to the residual.

Invariants:
    - Values are computed in float32. The normalised part and the sum are rounded to their tensors' dtypes before they
      are used, as with separate operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vajra_kernels.config import TileConfig
from vajra_kernels.launch import Launch, next_power_of_2


@triton.jit
def norm_kernel(
    out_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    part_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    part_weight_ptr: tl.tensor,
    eps: tl.tensor,
    part_eps: tl.tensor,
    stride_hidden_row: tl.tensor,
    stride_part_row: tl.tensor,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS_PART: tl.constexpr,
) -> None:
    """Grid (num_rows,): out [T, WIDTH] dense, hidden and part [T, WIDTH] with dense rows; weights of any float dtype."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PAD)
    ok = columns < WIDTH
    hidden = tl.load(hidden_ptr + row * stride_hidden_row + columns, mask=ok, other=0.0).to(tl.float32)
    if ADDS:
        part = tl.load(part_ptr + row * stride_part_row + columns, mask=ok, other=0.0)
        wide = part.to(tl.float32)
        if NORMS_PART:
            weight = tl.load(part_weight_ptr + columns, mask=ok, other=0.0).to(tl.float32)
            wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + part_eps) * weight
            wide = wide.to(part.dtype).to(tl.float32)
        added = (hidden + wide).to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + row * stride_hidden_row + columns, added, mask=ok)
        hidden = added.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=ok, other=0.0).to(tl.float32)
    out = hidden * tl.rsqrt(tl.sum(hidden * hidden, 0) / WIDTH + eps) * weight
    tl.store(out_ptr + row * WIDTH + columns, out.to(out_ptr.dtype.element_ty), mask=ok)


def norm_launch(
    out: torch.Tensor,
    hidden: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    part: torch.Tensor | None = None,
    part_norm: tuple[torch.Tensor, float] | None = None,
) -> Launch:
    """Return the launch for ``hidden += part_norm(part)``, then ``out = norm(hidden)``.

    Norms are (weight [WIDTH], epsilon). Without ``part_norm``, ``part`` is added as it is; without ``part``, nothing is
    added.
    """
    num_rows, width = hidden.shape
    weight, eps = norm
    part_weight, part_eps = part_norm or norm
    arguments = {
        "out_ptr": out,
        "hidden_ptr": hidden,
        "part_ptr": hidden if part is None else part,
        "weight_ptr": weight,
        "part_weight_ptr": part_weight,
        "eps": eps,
        "part_eps": part_eps,
        "stride_hidden_row": hidden.stride(0),
        "stride_part_row": hidden.stride(0) if part is None else part.stride(0),
    }
    pad = next_power_of_2(width)
    constants = {"WIDTH": width, "PAD": pad, "ADDS": part is not None, "NORMS_PART": part_norm is not None}
    num_warps = min(16, max(1, pad // 512))
    return Launch(norm_kernel, (num_rows, 1, 1), arguments, constants, TileConfig(1, pad, num_warps, 1))
