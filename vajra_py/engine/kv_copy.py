"""Copies of KV blocks that workers are asked for: from one replica's to another's, and between device and host memory.

Between replicas, the source's worker copies blocks into a buffer, rank by rank; the target's worker copies the buffer into its own blocks. Workers
take these copies in turn with their steps: a copy reads what the steps before it have written, and steps after it read what it has written.
Copies between device and host memory are made beside steps (`kv_copier`).

Invariants:
    - Ranks of one number hold the same part of the model at both ends, so that block contents are equal.
    - A buffer that is not taken is freed with its last reference.
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
    """Copy of KV blocks out of a worker's memory; `number` names the transfer."""

    number: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class KvImport:
    """Copy of another worker's KV into as many blocks of this one.

    Attributes:
        content: what the other one has exported.
        copies: blocks to move between device and host before: what these blocks held may have been swapped out since the last step.
    """

    number: int
    block_ids: Sequence[int]
    content: KvContent
    copies: Sequence[BlockCopy] = ()


@dataclass(frozen=True, slots=True)
class KvMove:
    """Copies of KV blocks between a worker's device and its own host memory, beside its steps; `number` names them.

    Attributes:
        copies: one or more, all of one direction.
        before: blocks to move in turn with its steps, before: what the blocks of `copies` held may be swapped out.
    """

    number: int
    copies: Sequence[BlockCopy]
    before: Sequence[BlockCopy] = ()

    @property
    def is_upward(self) -> bool:
        """Return True if it goes from the host to the device."""
        return self.copies[0].direction is CopyDirection.TO_DEVICE


@dataclass(frozen=True, slots=True)
class RankMove:
    """A rank's part of a `KvMove` is done."""

    number: int


@dataclass(frozen=True, slots=True)
class RankCopy:
    """A rank's part of a copy is done.

    Attributes:
        part: the buffer of an export; None for an import.
        is_lost: an import found that its buffer is lost with the source, and has copied nothing.
    """

    number: int
    part: Any = None
    is_lost: bool = False


def exported(runner: KvRunner, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
    """Return the contents of these blocks of a runner of this process."""
    buffer = np.empty(len(block_ids) * runner.kv_block_bytes, np.uint8)
    runner.export_kv(block_ids, buffer)
    return buffer


class SharedBuffer:
    """Anonymous memory that processes share by its descriptor. It is freed with the last descriptor and mapping of it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def of_size(cls, num_bytes: int) -> Self:
        """Allocate so many bytes, zero. Raises `OSError`."""
        buffer = cls(_anonymous_file())
        os.truncate(buffer._descriptor, num_bytes)
        return buffer

    @classmethod
    def receive(cls, pipe: Connection) -> Self:
        """Receive the buffer that was sent through a pipe. Raises `EOFError` or `OSError` when its sender is gone."""
        try:
            return cls(recv_handle(pipe))
        except RuntimeError as error:  # as multiprocessing calls it when nothing comes
            raise EOFError(str(error)) from error

    def send(self, pipe: Connection) -> None:
        """Give another process access to it. Raises `OSError` when that is gone."""
        send_handle(pipe, self._descriptor, None)  # a process id is for Windows

    def array(self) -> npt.NDArray[np.uint8]:
        """Map it; the mapping lives as long as the array."""
        return np.frombuffer(mmap.mmap(self._descriptor, 0), np.uint8)

    def close(self) -> None:
        """Give up this descriptor. May be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def _anonymous_file() -> int:
    """Return the descriptor of a file without a name, which no process can leave behind: in memory, where the system has that."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("vajra-kv", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
