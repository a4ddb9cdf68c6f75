"""Messages for copies of KV blocks: from one replica's memory to another's, and between device and host memory.

Between replicas, each rank of the source's worker copies blocks into a buffer, and the same rank of the target's worker
copies the buffer into its own blocks. Workers make these copies in order with their steps: a copy reads what earlier
steps have written, and later steps read what the copy has written. Copies between device and host memory are concurrent
with steps (`kv_copier`).

Invariants:
    - Ranks with the same number hold the same part of the model at both ends, so block contents have the same layout.
    - A buffer that is never copied into a target is freed with its last reference.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from vajra_py.engine.compute.interface import KvRunner
from vajra_py.runtime.kv import BlockCopy, CopyDirection

KvContent: TypeAlias = Sequence[Any]
"""Buffer of each rank: an array in this process, a `SharedBuffer`, or a reference to an object of a cluster."""


@dataclass(frozen=True, slots=True)
class KvExport:
    """Message to copy KV blocks out of a worker's memory; `number` names the transfer."""

    number: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class KvImport:
    """Message to copy another worker's KV into the same number of blocks of this one.

    Attributes:
        number: number of the transfer.
        block_ids: blocks to copy into.
        content: buffers that the other worker exported.
        copies: blocks to copy between device and host first, since former content of the target blocks may still have
            to be swapped out.
    """

    number: int
    block_ids: Sequence[int]
    content: KvContent
    copies: Sequence[BlockCopy] = ()


@dataclass(frozen=True, slots=True)
class KvMove:
    """Message to copy KV blocks between a worker's device and its own host memory, concurrently with its steps.

    Attributes:
        number: number of the copy.
        copies: blocks to copy, at least one, all in one direction.
        before: blocks to copy first, in order with the steps, since former content of the blocks in `copies` may still
            have to be swapped out.
    """

    number: int
    copies: Sequence[BlockCopy]
    before: Sequence[BlockCopy] = ()

    @property
    def is_upward(self) -> bool:
        """True if the copy goes from the host to the device."""
        return self.copies[0].direction is CopyDirection.TO_DEVICE


@dataclass(frozen=True, slots=True)
class RankMove:
    """Message that a rank has finished its part of a `KvMove`."""

    number: int


@dataclass(frozen=True, slots=True)
class RankCopy:
    """Message that a rank has finished its part of a copy between replicas.

    Attributes:
        part: buffer of an export; None for an import.
        is_lost: True if the buffer of an import was lost with the source, so that nothing was copied.
    """

    number: int
    part: Any = None
    is_lost: bool = False


def exported(runner: KvRunner, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
    """Return the contents of these blocks of a runner in this process."""
    buffer = np.empty(len(block_ids) * runner.kv_block_bytes, np.uint8)
    runner.export_kv(block_ids, buffer)
    return buffer


class SharedBuffer:
    """Anonymous memory that processes share by its descriptor. It is freed with its last descriptor and mapping."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def of_size(cls, num_bytes: int) -> Self:
        """Allocate `num_bytes` bytes, set to zero. Raises `OSError`."""
        buffer = cls(_anonymous_file())
        os.truncate(buffer._descriptor, num_bytes)
        return buffer

    @classmethod
    def receive(cls, pipe: Connection) -> Self:
        """Receive a buffer that was sent through a pipe. Raises `EOFError` or `OSError` if the sender has died."""
        try:
            return cls(recv_handle(pipe))
        except RuntimeError as error:  # raised by multiprocessing if the message has no descriptor
            raise EOFError(str(error)) from error

    def send(self, pipe: Connection) -> None:
        """Give another process access to the buffer. Raises `OSError` if that process has died."""
        send_handle(pipe, self._descriptor, None)  # None instead of the process id, which is needed on Windows only

    def array(self) -> npt.NDArray[np.uint8]:
        """Map the memory; the mapping lives as long as the array."""
        return np.frombuffer(mmap.mmap(self._descriptor, 0), np.uint8)

    def close(self) -> None:
        """Close this descriptor. May be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def _anonymous_file() -> int:
    """Return the descriptor of an unnamed file, which cannot outlive its processes.

    The file is in memory if the system supports that.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("vajra-kv", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
