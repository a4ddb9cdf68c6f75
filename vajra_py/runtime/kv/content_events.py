"""Record of the content of one replica's prefix cache: what can be found since when, and what no longer can.

The events are vLLM's `BlockStored`, `BlockRemoved` and `AllBlocksCleared`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from typing import NamedTuple


class ContentChange(Enum):
    """Kind of a change."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


class ContentEvent(NamedTuple):
    """One change of what can be found."""

    at: float
    """Seconds on the run's clock."""
    change: ContentChange
    hashes: list[Hashable]


class ContentEvents:
    """Events that nobody has taken yet, in order of time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns the present time, seconds on the run's clock."""
        self._clock = clock
        self._events: deque[ContentEvent] = deque()

    def stored(self, hashes: Sequence[Hashable]) -> None:
        """Content can be found that could not."""
        if hashes:
            self._events.append(ContentEvent(self._clock(), ContentChange.STORED, list(hashes)))

    def removed(self, block_hash: Hashable, at: float | None = None) -> None:
        """Content can no longer be found, since `at` (None: since now)."""
        at = self._clock() if at is None else at
        last = self._events[-1] if self._events else None
        if last is not None and last.change is ContentChange.REMOVED and last.at == at:
            last.hashes.append(block_hash)
        else:
            self._events.append(ContentEvent(at, ContentChange.REMOVED, [block_hash]))

    def cleared(self) -> None:
        """No content can be found any more."""
        self._events.append(ContentEvent(self._clock(), ContentChange.CLEARED, []))

    def take(self, until: float) -> list[ContentEvent]:
        """Return the events up to a time, each once."""
        events, due = self._events, []
        while events and events[0].at <= until:
            due.append(events.popleft())
        return due
