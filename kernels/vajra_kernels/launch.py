"""One Triton kernel launch as a value that can be run, listed, or compiled without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

from vajra_kernels.config import H200, DeviceFacts, TileConfig


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch; ``aot`` compiles exactly the code that ``run`` would start.

    Attributes:
        kernel: function decorated with ``triton.jit``.
        grid: number of programs along each of the three axes.
        arguments: run-time arguments by parameter name (tensors, ints, floats).
        constants: ``tl.constexpr`` arguments by parameter name.
        tile: warps and pipeline stages (the tile's shape is also part of ``constants``).
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    tile: TileConfig

    def run(self) -> None:
        """Start the kernel on the arguments' device; an empty grid starts nothing."""
        if 0 in self.grid:
            return
        self.kernel[self.grid](**self.arguments, **self.constants, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options; multiply-add fusion is enabled explicitly, since its default differs between Triton versions."""
        return {"num_warps": self.tile.num_warps, "num_stages": self.tile.num_stages, "enable_fp_fusion": True}


def interpreted() -> bool:
    """Return True if kernels run in Triton's interpreter on the CPU (TRITON_INTERPRET=1 before the first import)."""
    return bool(triton.knobs.runtime.interpret)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least ``n`` (n >= 1)."""
    return 1 << (n - 1).bit_length()


def dot_mode(dtype: torch.dtype) -> tuple[bool, str | None]:
    """Return (True to convert operands to float32, input precision) for the matrix products of a kernel on ``dtype``.

    float32 is multiplied in full precision ("ieee"), never as tf32. bfloat16 is converted only in the interpreter,
    which cannot multiply it.
    """
    return interpreted() and dtype == torch.bfloat16, "ieee" if dtype == torch.float32 or interpreted() else None


def device_facts(device: torch.device) -> DeviceFacts:
    """Return the properties of a device on which kernel configurations depend; they are read once per device.

    For CPU tensors (in the interpreter), these are the properties of an H200.
    """
    if device.type != "cuda":
        return H200
    return _cuda_facts(device.index)


@cache
def _cuda_facts(index: int) -> DeviceFacts:
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return DeviceFacts(
        torch.cuda.get_device_capability(index), properties["multiprocessor_count"], properties["max_shared_mem"]
    )
