"""Asynchronous transfers of small host arrays to the device and of results back, and marks in the device's stream.

Invariants:
    - Host memory of a copy to or from a GPU is pinned and comes from torch's own pool, which reuses it only when the
      copy is complete.
    - On the CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy the array to the device; on the CPU the returned tensor shares its memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def all_to_device(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Copy flat arrays of one dtype to the device in one transfer."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    joined = to_device(np.concatenate(arrays), device)
    return list(torch.split(joined, [array.size for array in arrays]))


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the tensor to the host; the copy is complete once the device's stream has reached it.

    On the CPU, return the tensor.
    """
    if tensor.device.type == "cpu":
        return tensor
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copied.copy_(tensor, non_blocking=True)


def marked() -> torch.cuda.Event:
    """Record an event on the current stream of the current GPU, and return it."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
