"""Select the implementation for the device of the tensors.

Invariants:
    - CUDA tensors take the Triton kernels, CPU tensors torch.
    - With TRITON_INTERPRET=1 (set before the first import) CPU tensors take the Triton kernels too, in Triton's
      interpreter: slow, and good for checking everything above the kernels against them without a GPU.
"""

from __future__ import annotations

import os

import torch

_INTERPRET = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on")


def uses_triton(device: torch.device) -> bool:
    """Return True where operations on this device's tensors run as Triton kernels."""
    return device.type != "cpu" or _INTERPRET
