"""Select the implementation for the device of the tensors.

Invariants:
    - CUDA tensors use the Triton kernels, CPU tensors torch.
    - With TRITON_INTERPRET=1 (set before the first import), CPU tensors also use the Triton kernels, in Triton's
      interpreter. This is slow, but allows testing the code that calls the kernels without a GPU.
"""

from __future__ import annotations

import os

import torch

_INTERPRET = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on")


def uses_triton(device: torch.device) -> bool:
    """Return True if operations on this device's tensors run as Triton kernels."""
    return device.type != "cpu" or _INTERPRET
