"""Copies whose ends the backend reports, in place of a network model that times them."""

from __future__ import annotations

from collections.abc import Hashable


class ReportedCopies:
    """Copies under way whose duration is not predicted; used in place of a `Network`."""

    def __init__(self) -> None:
        self._ended: list[Hashable] = []

    def start(self, key: Hashable, source: int, target: int, num_bytes: int, now: int) -> None:
        """Do nothing: the backend executes the copy and reports its end."""

    def cancel(self, key: Hashable, now: int) -> None:
        """Do nothing: `report` is called only for copies that a request still waits for."""

    def report(self, key: Hashable) -> None:
        """Record the end of a copy, which the next call of `ended` returns."""
        self._ended.append(key)

    def ended(self, now: int) -> list[Hashable]:
        """Return the keys of the copies whose ends were reported since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def next_change(self) -> int | None:
        """Return None: the backend reports each end as an event."""
        return None

    def remaining_bytes(self, key: Hashable, now: int) -> int:
        """Return 0. Only prefetches from lower tiers need this number, and a backend that executes copies has a single
        tier.
        """
        return 0
