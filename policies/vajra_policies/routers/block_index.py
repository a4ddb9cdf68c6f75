"""A router's own index of the blocks that each replica holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from vajra_policies.routers.figures import Integers


class BlockHolders:
    """Set of replicas that hold each block, as bits of an integer; consecutive blocks with equal sets are counted
    together.
    """

    def __init__(self, num_replicas: int) -> None:
        self._size = (num_replicas + 7) // 8
        self._num_replicas = num_replicas
        self._holders: dict[Hashable, int] = {}

    def add(self, block: Hashable, replica_id: int) -> None:
        """Record that a replica holds the block."""
        self._holders[block] = self._holders.get(block, 0) | (1 << replica_id)

    def remove(self, block: Hashable, replica_id: int) -> None:
        """Record that a replica no longer holds the block."""
        left = self._holders.get(block, 0) & ~(1 << replica_id)
        if left:
            self._holders[block] = left
        else:
            self._holders.pop(block, None)

    def counts(self, blocks: Iterable[Hashable]) -> Integers:
        """Return for each replica, by id, how many of the blocks it holds, up to the first block that no replica holds.

        If a replica holds a block only together with all blocks before it, this is the length of the common prefix. For
        a replica that has lost early blocks, later ones still count, as in llm-d's index.
        """
        total = np.zeros(self._num_replicas, dtype=np.int64)
        holders, run = self._holders, 0
        before = 0
        for block in blocks:
            now = holders.get(block, 0)
            if now == before:
                run += 1
            else:
                if run:
                    total += run * self._expanded(before)
                before, run = now, 1
            if not now:
                return total
        if run:
            total += run * self._expanded(before)
        return total

    def _expanded(self, holders: int) -> Integers:
        raw = np.frombuffer(holders.to_bytes(self._size, "little"), dtype=np.uint8)
        return np.unpackbits(raw, count=self._num_replicas, bitorder="little").astype(np.int64)


class RecentBlocks:
    """Blocks of the prompts sent to each replica, up to an assumed capacity in blocks: the least recently sent ones are
    dropped first.
    """

    def __init__(self, num_replicas: int, capacity: int) -> None:
        self._holders = BlockHolders(num_replicas)
        self._capacity = capacity
        self._recent: list[OrderedDict[Hashable, None]] = [OrderedDict() for _ in range(num_replicas)]

    def add(self, blocks: Sequence[Hashable], replica_id: int) -> None:
        """Record that a request with these blocks was sent to the replica."""
        recent, holders = self._recent[replica_id], self._holders
        for block in blocks:
            if block in recent:
                recent.move_to_end(block)
            else:
                recent[block] = None
                holders.add(block, replica_id)
        while len(recent) > self._capacity:
            oldest, _ = recent.popitem(last=False)
            holders.remove(oldest, replica_id)

    def counts(self, blocks: Iterable[Hashable]) -> Integers:
        """See `BlockHolders.counts`."""
        return self._holders.counts(blocks)


class ExpiringBlocks:
    """Blocks of the prompts that were sent to each replica within the last `ttl_s` seconds."""

    def __init__(self, num_replicas: int, ttl_s: float) -> None:
        self._holders = BlockHolders(num_replicas)
        self._ttl_s = ttl_s
        self._sent_at: OrderedDict[tuple[Hashable, int], float] = OrderedDict()

    def add(self, blocks: Sequence[Hashable], replica_id: int, now: float) -> None:
        """Record that a request with these blocks was sent to the replica."""
        for block in blocks:
            key = (block, replica_id)
            if key not in self._sent_at:
                self._holders.add(block, replica_id)
            self._sent_at[key] = now
            self._sent_at.move_to_end(key)

    def counts(self, blocks: Iterable[Hashable], now: float) -> Integers:
        """See `BlockHolders.counts`."""
        while self._sent_at:
            (block, replica_id), sent_at = next(iter(self._sent_at.items()))
            if now - sent_at <= self._ttl_s:
                break
            self._sent_at.popitem(last=False)
            self._holders.remove(block, replica_id)
        return self._holders.counts(blocks)
