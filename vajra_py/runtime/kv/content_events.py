"""Events about the content of prefix caches: content was stored, removed or cleared.

The events correspond to vLLM's `BlockStored`, `BlockRemoved` and `AllBlocksCleared`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Hashable, Sequence
from enum import Enum
from typing import NamedTuple

from vajra_py.runtime.kv.block_hashes import FIRST_LOOKUP_BLOCKS, LOOKUP_GROWTH, BlockHashes, reads_cache


class ContentChange(Enum):
    """Kind of change of cached content."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


class ContentEvent(NamedTuple):
    """One change of the cached content of a replica."""

    at: float
    """Time of the change, in seconds on the run's clock."""
    replica_id: int
    change: ContentChange
    hashes: list[Hashable]
    tier: str = ""
    """Memory tier below the device; empty: the device."""


class ContentEvents:
    """Writes the events of one replica to a record; the writers of several replicas may share one record."""

    def __init__(
        self, replica_id: int, clock: Callable[[], float], record: deque[ContentEvent], tier: str = ""
    ) -> None:
        """Create the writer. `clock` returns the present time in seconds on the run's clock; `tier` is the memory tier
        whose content is reported (empty: the device).
        """
        self._replica_id = replica_id
        self._tier = tier
        self._clock = clock
        self._events = record

    def entered(self, hashes: Sequence[Hashable], known: Container[Hashable], request: object) -> None:
        """Report the content of a request's consecutive blocks, which enter the cache. Content whose hash is in `known`
        is already cached and not reported.
        """
        self.stored([one for one in hashes if one not in known])

    def copy_left(self, block_hash: Hashable) -> None:
        """Do nothing for a removed block whose content another block still holds: lookups still find the content."""

    def stored(self, hashes: Sequence[Hashable]) -> None:
        """Report content that lookups can find from now on."""
        if hashes:
            self._events.append(
                ContentEvent(self._clock(), self._replica_id, ContentChange.STORED, list(hashes), self._tier)
            )

    def removed(self, block_hash: Hashable) -> None:
        """Report that lookups no longer find this content."""
        at = self._clock()
        last = self._events[-1] if self._events else None
        if last is not None and last[:3] == (at, self._replica_id, ContentChange.REMOVED) and last.tier == self._tier:
            last.hashes.append(block_hash)
        else:
            self._events.append(ContentEvent(at, self._replica_id, ContentChange.REMOVED, [block_hash], self._tier))

    def cleared(self) -> None:
        """Report that the cache was emptied."""
        self._events.append(ContentEvent(self._clock(), self._replica_id, ContentChange.CLEARED, [], self._tier))


def known_prefix_tokens(
    known: Collection[Hashable], hashes: BlockHashes, num_known_tokens: int, block_size: int
) -> int:
    """Return the number of leading tokens whose blocks are all in `known`, always less than `num_known_tokens`."""
    limit = min(num_known_tokens - 1, hashes.num_hashed_tokens) // block_size
    found, width = 0, FIRST_LOOKUP_BLOCKS
    if not known or not reads_cache(hashes):
        return 0
    while found < limit:
        wanted = hashes.block_hashes(found, min(found + width, limit))
        held = next((index for index, one in enumerate(wanted) if one not in known), len(wanted))
        found += held
        if held < len(wanted):
            break
        width *= LOOKUP_GROWTH
    return found * block_size
