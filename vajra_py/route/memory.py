"""KV memory of a server: blocks estimated from the requests sent to it, prefix hits from its KV events if published."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from vajra_py.runtime.kv import BlockHashes, PagedKvMemory
from vajra_py.runtime.kv.content_events import ContentEvents, known_prefix_tokens
from vajra_py.runtime.queues import HitChanges


class ServerMemory(PagedKvMemory):
    """Memory whose prefix hits follow the server's KV events while these are received."""

    __slots__ = ("_recipient", "reported")

    def __init__(self, num_blocks: int, block_size: int, **options: Any) -> None:
        """See `PagedKvMemory`."""
        super().__init__(num_blocks, block_size, **options)
        self.reported: dict[Hashable, None] | None = None
        """Block hashes in the server's cache according to its events.

        None while the events are not followed; the content is then estimated from the prompts sent to the server.
        """
        self._recipient: ContentEvents | None = None

    def begin(self) -> None:
        """From now on, take prefix hits from the server's events instead of the estimated content."""
        self.reported = {}
        self._events = self._pool.events = self._pool.hits = None
        if self._hits is not None:
            self._hits.index.cleared()
        if self._recipient is not None:
            self._recipient.cleared()

    def end(self) -> None:
        """From now on, estimate the content from the prompts sent to the server."""
        self.reported = None
        if self._hits is not None:
            self._hits.index.cleared()
            self._pool.hits = self._hits.index
        if self._recipient is not None:
            self._recipient.cleared()
            super().report_content(self._recipient)

    def change(self, stored: Sequence[Hashable], removed: Sequence[Hashable]) -> None:
        """Remove the hashes in `removed`, then add those in `stored`; ignored while events are not followed."""
        reported, recipient = self.reported, self._recipient
        if reported is None:
            return
        gone = [one for one in removed if one in reported]
        for one in gone:
            del reported[one]
        new = [one for one in stored if one not in reported]
        reported.update(dict.fromkeys(new))
        if self._hits is not None:
            for one in gone:
                self._hits.index.removed(one)
            self._hits.index.stored(new)
        if recipient is not None:
            for one in gone:
                recipient.removed(one)
            recipient.stored(new)

    def lookup_prefix(self, hashes: BlockHashes, num_known_tokens: int) -> int:
        """See `PagedKvMemory`."""
        if self.reported is None:
            return super().lookup_prefix(hashes, num_known_tokens)
        return known_prefix_tokens(self.reported, hashes, num_known_tokens, self.block_size)

    def num_leading_blocks(self, hashes: BlockHashes, limit: int) -> int:
        """See `PagedKvMemory`."""
        if self.reported is None:
            return super().num_leading_blocks(hashes, limit)
        return (
            known_prefix_tokens(self.reported, hashes, limit * self.block_size + 1, self.block_size) // self.block_size
        )

    def follow_hits(self, *, wanted: bool) -> HitChanges | None:
        """See `PagedKvMemory`."""
        hits = super().follow_hits(wanted=wanted)
        if self.reported is not None:
            self._pool.hits = None
        return hits

    def report_content(self, events: ContentEvents) -> None:
        """See `PagedKvMemory`."""
        self._recipient = events
        if self.reported is None:
            super().report_content(events)
        else:
            self.is_watched = True
            events.stored(list(self.reported))

    def clear(self) -> None:
        """See `PagedKvMemory`; also stops following the server's events."""
        super().clear()
        if self.reported is not None:
            self.end()
