"""Links of a network and the transfers on them, for `Network`.

A grain is 2^-20 bytes. Rates are in grains per second. Work, the amount of data to send, is rate times ticks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence

from msgspec import Struct, field


class Link:
    """One direction of a replica's link, or the fabric."""

    __slots__ = ("capacity", "number", "transfers")

    def __init__(self, number: int, capacity: int) -> None:
        self.number = number
        self.capacity = capacity
        """Grains per second."""
        self.transfers: dict[Flow, None] = {}
        """Transfers that use the link or wait for it (`exclusive`), in the order in which they joined."""


class Flow(Struct, eq=False):
    """One transfer under way."""

    transfer_id: Hashable
    number: int
    links: Sequence[Link]
    """Links of limited bandwidth that the transfer uses."""
    work_left: int
    """Work that was left at the tick `since`."""
    since: int
    rate: int | None = 0
    """Grains per second now; None: no limit."""
    version: int = 0
    """Version of this transfer's valid events; events with another version are ignored."""
    is_flowing: bool = False
    """True once the latency has passed; False while an open transfer has nothing to send."""
    has_ended: bool = False
    feed: Feed | None = None
    """Bytes that become available over time; None: all bytes were available at the start."""

    def work_left_at(self, now: int) -> int:
        """Return the work left at a tick, if the rate has not changed since `since`."""
        if not self.is_flowing:
            return self.work_left
        if self.rate is None:
            return 0
        return max(0, self.work_left - self.rate * (now - self.since))


class Release(Struct):
    """Work that becomes available in equal parts, the last of them after `ticks`."""

    start: int
    ticks: int
    work: int
    num_parts: int
    num_done: int = 0

    def next_at(self) -> int:
        """Return the tick at which the next part becomes available."""
        return self.start - (-self.ticks * (self.num_done + 1) // self.num_parts)

    def take(self) -> int:
        """Return the work of the next part, and advance to the part after it."""
        before = self.work * self.num_done // self.num_parts
        self.num_done += 1
        return self.work * self.num_done // self.num_parts - before

    @property
    def work_left(self) -> int:
        """Work of the remaining parts."""
        return self.work - self.work * self.num_done // self.num_parts


class Feed(Struct, eq=False):
    """Bytes of a transfer that become available while it is under way."""

    transfer: Flow
    number: int
    releases: deque[Release] = field(default_factory=deque)
    is_open: bool = True
    """True while further releases may be announced."""
    version: int = 0

    @property
    def goes_on(self) -> bool:
        """True if more bytes may become available."""
        return self.is_open or bool(self.releases)

    def take_due(self, now: int) -> int:
        """Return the work of the parts that have become available and were not taken yet."""
        work, releases = 0, self.releases
        while releases and releases[0].next_at() <= now:
            work += releases[0].take()
            if releases[0].num_done == releases[0].num_parts:
                releases.popleft()
        return work


def alone_on(links: Iterable[Link]) -> dict[Flow, None] | None:
    """Return the transfers on these links if each of them is alone on all of its links; else None."""
    found: dict[Flow, None] = {}
    for link in links:
        for one in link.transfers:
            if one not in found:
                if any(len(each.transfers) > 1 for each in one.links):
                    return None
                found[one] = None
    return found
