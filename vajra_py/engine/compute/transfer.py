"""Asynchronous transfers of small host arrays to the device and of results back.

Invariants:
    - Host memory of a copy to or from a GPU is pinned, and comes from torch's own pool, which hands it out again only when
      the copy has happened.
    - On the CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device; on the CPU they share memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def all_to_device(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Flat arrays of one type as tensors on the device, in one copy."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    joined = to_device(np.concatenate(arrays), device)
    return list(torch.split(joined, [array.size for array in arrays]))


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor on the host, complete once the device's stream has got there; on the CPU the tensor itself."""
    if tensor.device.type == "cpu":
        return tensor
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copied.copy_(tensor, non_blocking=True)
