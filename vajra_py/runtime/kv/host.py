"""Host memory for swapped KV blocks, and the copies that swapping needs.

Copies are listed in the order in which they were decided and must be carried out in that order before the step's
computation: a device block that a swap frees may be handed out again in the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from vajra_py.runtime.kv.block_pool import BlockPool


class CopyDirection(Enum):
    """Direction of a block copy."""

    TO_HOST = "to_host"
    TO_DEVICE = "to_device"


class BlockCopy(NamedTuple):
    """Copy of one block from block id `source` to block id `target`, in this `direction`."""

    source: int
    target: int
    direction: CopyDirection
    group: int = 0
    """KV-parallel group to which the device block of the copy belongs."""


class HostSpace:
    """Host blocks, and the copies between them and the device."""

    __slots__ = ("_copies", "_pool", "_records_copies", "has_copies")

    def __init__(self, num_blocks: int, records_copies: bool) -> None:
        self._pool = BlockPool(num_blocks)
        self._records_copies = records_copies
        self._copies: list[BlockCopy] = []
        self.has_copies = False
        """True if copies were listed since the last `take_copies`."""

    @property
    def num_blocks(self) -> int:
        """Number of host blocks in all."""
        return self._pool.num_blocks

    @property
    def free_blocks(self) -> int:
        """Number of host blocks that hold nothing."""
        return self._pool.num_free

    def store(self, blocks: Sequence[int], groups: Sequence[int]) -> list[int] | None:
        """Allocate a host block for each of these device blocks (`groups`: the group of each device block), list the
        copies, and return the host blocks; return None if too few are free.
        """
        if len(blocks) > self._pool.num_free:
            return None
        targets = self._pool.take(len(blocks))
        if self._records_copies:
            to_host = CopyDirection.TO_HOST
            self.has_copies = True
            self._copies.extend(BlockCopy(s, t, to_host, g) for s, t, g in zip(blocks, targets, groups, strict=True))
        return targets

    def take_back(self, stored: list[int], blocks: Sequence[int], groups: Sequence[int]) -> None:
        """Add copies to the list that move the `stored` host blocks, in order, to the first device blocks in `blocks`;
        free the host blocks.
        """
        if self._records_copies:
            to_device = CopyDirection.TO_DEVICE
            self.has_copies = True
            self._copies.extend(BlockCopy(s, t, to_device, g) for s, t, g in zip(stored, blocks, groups, strict=False))
        self._pool.release(stored)

    def drop(self, stored: list[int]) -> None:
        """Free host blocks without copying them back."""
        self._pool.release(stored)

    def clear(self) -> None:
        """Free all host blocks and drop the listed copies."""
        self._pool = BlockPool(self._pool.num_blocks)
        self._copies, self.has_copies = [], False

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies listed since the last call, in order."""
        copies = self._copies
        self._copies, self.has_copies = [], False
        return copies

    def check(self, stored: Sequence[Sequence[int]]) -> None:
        """Raise AssertionError unless exactly these host blocks are in use."""
        self._pool.check({block: 1 for blocks in stored for block in blocks})
        if sum(map(len, stored)) + self._pool.num_free != self._pool.num_blocks:
            raise AssertionError("HostSpace: a host block belongs to two requests")
