"""Select the implementation for the device of the tensors.

Invariants:
    - CUDA tensors take the Triton kernels, CPU tensors torch, and compiled loops where Numba is installed.
    - Compiled loops use one core.
    - With TRITON_INTERPRET=1 (set before the first import) CPU tensors take the Triton kernels too, in Triton's
      interpreter: slow, and good for checking everything above the kernels against them without a GPU.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os

import torch

_NUMBA = (0, 65)
_INTERPRET = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on")


def uses_triton(device: torch.device) -> bool:
    """Whether operations on this device's tensors run as Triton kernels."""
    return device.type != "cpu" or _INTERPRET


@functools.cache
def has_numba() -> bool:
    """Whether Numba is installed, and not older than the extra ``cpu`` asks for."""
    try:
        version = importlib.metadata.version("numba")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(part) for part in version.split(".")[:2]) >= _NUMBA


def fuses_layers(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``layer_ops`` computes what stands between a layer's products, for tensors like these.

    On a CPU where torch uses one thread: it divides its own operations among several, and the loops use one.
    """
    if uses_triton(device):
        return True
    return has_numba() and dtype in (torch.float32, torch.bfloat16) and torch.get_num_threads() == 1
