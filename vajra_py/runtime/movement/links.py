"""Transfers over the links of a network: the bandwidth and the end of each transfer.

Each replica (or each memory, for copies between memories) has an outgoing and an incoming link, and there may be one
fabric that all transfers pass through. Rates change only when a transfer starts to flow, ends or is cancelled; in
between nothing is computed. A change affects only transfers that share a link with the changed transfer, directly or
through a chain of shared links; a transfer that is always alone on its links ends at the tick that was computed at its
start.

The bytes of a transfer are available at its start, or become available while it is under way (`Network.open`). A
transfer of the second kind takes a share of its links' bandwidth only while it has bytes to send.

Bytes are conserved exactly: rates are multiples of 2^-20 bytes per second and times are whole ticks, so the amount sent
is a whole number of these units times ticks. Rates are rounded down and ends are rounded up to a tick: no transfer ends
early, and no link exceeds its bandwidth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from msgspec import Struct

from vajra_py.runtime.movement.flows import Feed, Flow, Link, Release, alone_on
from vajra_py.runtime.support.clock import TICKS_PER_SECOND, to_ticks

if TYPE_CHECKING:
    from vajra_py.config.links import LinksConfig

Contention: TypeAlias = Literal["max_min", "none", "fixed_share", "exclusive"]

_GRAIN = 1 << 20
"""Number of grains per byte; rates are whole numbers of grains per second."""
_WORK_PER_BYTE = _GRAIN * TICKS_PER_SECOND
_GIGA = 10**9
_MIN_EVENTS = 64

_ENDS, _FLOWS, _RELEASES = 0, 1, 2


class LinkOptions(Struct, frozen=True):
    """Bandwidths and latency of a network, and its rule for sharing bandwidth."""

    bandwidth: float | None = None
    """Bandwidth of each replica's outgoing link, and of its incoming link, in bytes per second; None: no limit."""
    shared_bandwidth: float | None = None
    """Bandwidth of the fabric that all transfers pass through, in bytes per second; None: no limit."""
    latency_ticks: int = 0
    """Ticks from a transfer's start until its first byte flows; the transfer uses no bandwidth meanwhile."""
    contention: Contention = "max_min"
    """max_min: max-min fair shares at every moment. none: each transfer gets the full bandwidth. fixed_share: the
    links' bandwidth divided by the number of transfers under way on them, fixed when a transfer starts. exclusive: one
    transfer at a time on a link, in order of start.
    """

    def __post_init__(self) -> None:
        """Raise `ValueError` if a bandwidth or the latency is invalid."""
        for name in ("bandwidth", "shared_bandwidth"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < inf:
                raise ValueError(f"{name}: not a bandwidth ({value!r}). Allowed: at least 1 byte/s, or None")
        if self.latency_ticks < 0:
            raise ValueError(f"latency_ticks: negative ({self.latency_ticks}). Allowed: at least 0")

    @classmethod
    def of(cls, config: LinksConfig) -> Self:
        """Return the options of a `links:` section."""
        own, shared = config.bandwidth_gb_s, config.shared_bandwidth_gb_s
        return cls(
            bandwidth=None if own is None else own * _GIGA,
            shared_bandwidth=None if shared is None else shared * _GIGA,
            latency_ticks=to_ticks(config.latency_s),
            contention=config.contention,
        )


class Network:
    """Links of replicas and the transfers on them. Ticks must not decrease from call to call."""

    def __init__(self, options: LinkOptions | None = None) -> None:
        self._options = options = options or LinkOptions()
        self._latency = options.latency_ticks
        self._has_fixed_shares = options.contention == "fixed_share"
        self._has_no_contention = options.contention == "none"
        self._capacity = _grains(options.bandwidth)
        self._now = 0
        self._num_started = 0
        self._num_final = 0
        """Number of transfers under way to which no more bytes can be added, because they are not open."""
        self._out: dict[int, Link] = {}
        """Outgoing link of each replica."""
        self._in: dict[int, Link] = {}
        """Incoming link of each replica."""
        shared = _grains(options.shared_bandwidth)
        self._shared = () if shared is None else (Link(0, shared),)
        self._num_links = 1
        self._rate_alone = min((each for each in (shared, self._capacity) if each is not None), default=None)
        """Rate, in grains per second, of a transfer that is alone on its links; None: no limit."""
        self._transfers: dict[Hashable, Flow] = {}
        self._events: list[tuple[int, int, int, int, Any]] = []
        """Heap of events (tick, kind, number, version, transfer or feed); within a tick, ends of transfers come first
        and releases last.
        """
        self._starting: deque[tuple[int, int, int, int, Any]] = deque()
        """Events, in order, of transfers whose latency has not passed yet."""
        self._ended: list[Flow] = []
        """Transfers that have ended and were not returned by `ended` yet."""
        self._touched: dict[Link, None] = {}
        """Links whose transfers have changed since rates were last computed."""

    def __len__(self) -> int:
        """Number of transfers under way, including ended ones that `ended` has not returned yet."""
        return len(self._transfers)

    # Life of a transfer

    def start(self, transfer_id: Hashable, source: int, target: int, num_bytes: int, now: int) -> None:
        """Begin a transfer between two replicas. Raises ValueError if the id is in use, if source and target are the
        same, or if the number of bytes is negative.
        """
        one = self._begin(transfer_id, source, target, num_bytes, now)
        self._num_final += 1
        flows_at = now + self._latency
        self._expect_end(one, flows_at)
        if not num_bytes:
            return
        if flows_at > now:
            self._starting.append((flows_at, _FLOWS, one.number, one.version, one))
        else:
            self._flow(one)

    def open(self, transfer_id: Hashable, source: int, target: int, now: int) -> None:
        """Begin a transfer whose bytes are announced by `release`. Raises the errors of `start`.

        The transfer ends when all announced bytes have arrived and `close` was called.
        """
        one = self._begin(transfer_id, source, target, 0, now)
        one.feed = Feed(one, one.number)

    def release(self, transfer_id: Hashable, num_bytes: int, now: int, ticks: int = 0, num_parts: int = 1) -> None:
        """Announce more bytes of an open transfer, which become available in equal parts, the last of them `ticks` from
        now.

        Each part flows after the links' latency. Releases of one transfer must be announced in order of time.
        """
        one = self._known(transfer_id)
        feed = one.feed
        if feed is None or not feed.is_open:
            raise ValueError(f"Network: transfer {transfer_id!r} is not open")
        self._advance(now)
        if num_bytes:
            start = now + self._latency
            feed.releases.append(Release(start, ticks, num_bytes * _WORK_PER_BYTE, num_parts))
            if len(feed.releases) == 1 and not one.is_flowing:
                self._push(feed, feed.releases[0].next_at(), _RELEASES)

    def close(self, transfer_id: Hashable, now: int) -> None:
        """Close an open transfer: it ends when all released bytes have arrived."""
        one = self._known(transfer_id)
        self._advance(now)
        if one.feed is not None and one.feed.is_open:
            one.feed.is_open = False
            self._num_final += 1
            if not one.feed.releases and not one.is_flowing:
                self._push(one, now, _ENDS)

    def _begin(self, transfer_id: Hashable, source: int, target: int, num_bytes: int, now: int) -> Flow:
        if transfer_id in self._transfers:
            raise ValueError(f"Network: transfer {transfer_id!r} is in flight already")
        if source == target:
            raise ValueError(f"Network: replica {source} has no link to itself")
        if num_bytes < 0:
            raise ValueError(f"Network: a negative number of bytes ({num_bytes})")
        self._advance(now)
        links = self._links_between(source, target)
        one = Flow(transfer_id, self._num_started, links, num_bytes * _WORK_PER_BYTE, now)
        self._num_started += 1
        self._transfers[transfer_id] = one
        if self._has_fixed_shares:
            for link in links:
                link.transfers[one] = None
            one.rate = min((max(1, link.capacity // len(link.transfers)) for link in links), default=None)
        return one

    def cancel(self, transfer_id: Hashable, now: int) -> None:
        """Cancel a transfer; other transfers get its bandwidth. A transfer that has ended is no longer returned by
        `ended`.
        """
        self._known(transfer_id)
        self._advance(now)
        one = self._transfers.pop(transfer_id)
        if one.has_ended:
            self._ended.remove(one)
            return
        self._leave(one)
        if one.feed is not None:
            one.feed.version += 1
        if one.feed is None or not one.feed.is_open:
            self._num_final -= 1

    def next_change(self) -> int | None:
        """Return a lower bound on the tick at which the next transfer ends, valid until a transfer is started, closed
        or cancelled; None if no end is in sight.

        If links are shared or transfers are open, the next end may be later than this tick.
        """
        if self._touched:
            self._settle()
        if self._ended:
            return self._now
        if not self._num_final:
            return None
        events = self._events
        while events and events[0][3] != events[0][4].version:
            heappop(events)
        return events[0][0] if events else None

    def ended(self, now: int) -> list[Hashable]:
        """Return the ids of transfers that have ended by `now` and were not returned before, in order of end, and
        within a tick in order of start.
        """
        self._advance(now)
        if not self._ended:
            return []
        ended = [one.transfer_id for one in self._ended]
        self._ended = []
        for transfer_id in ended:
            del self._transfers[transfer_id]
        return ended

    # Queries

    def remaining_bytes(self, transfer_id: Hashable, now: int) -> int:
        """Return the number of bytes that have not arrived yet, including announced bytes and bytes in flight."""
        one = self._known(transfer_id)
        self._advance(now)
        self._settle()
        if one.has_ended:
            return 0
        to_come = 0 if one.feed is None else sum(each.work_left for each in one.feed.releases)
        return -(-(one.work_left_at(now) + to_come) // _WORK_PER_BYTE)

    def rate(self, transfer_id: Hashable) -> float:
        """Return the present rate of a transfer in bytes per second: 0 while it waits, inf without any limit."""
        one = self._known(transfer_id)
        self._settle()
        if not one.is_flowing or one.has_ended:
            return 0.0
        return inf if one.rate is None else one.rate / _GRAIN

    def _known(self, transfer_id: Hashable) -> Flow:
        one = self._transfers.get(transfer_id)
        if one is None:
            raise ValueError(f"Network: no transfer {transfer_id!r} is in flight")
        return one

    # Time

    def _advance(self, now: int) -> None:
        """Handle all events up to and including the tick `now`."""
        if now < self._now:
            raise ValueError(f"Network: time goes back (from tick {self._now} to {now})")
        if self._touched and now > self._now:
            self._settle()
        events, starting = self._events, self._starting
        while events or starting:
            if starting and (not events or starting[0] < events[0]):
                if starting[0][0] > now:
                    break
                tick, kind, _, version, one = starting.popleft()
            else:
                if events[0][0] > now:
                    break
                tick, kind, _, version, one = heappop(events)
            if version != one.version:
                continue
            if tick > self._now:
                self._now = tick
            if kind == _RELEASES:
                self._resume(one)
            elif kind == _FLOWS:
                self._flow(one)
            elif one.feed is not None and one.feed.goes_on:
                self._go_on(one, one.feed)
            else:
                self._end(one)
            if self._touched and not (events and events[0][0] == tick) and not (starting and starting[0][0] == tick):
                self._settle()
        self._now = now

    def _expect_end(self, one: Flow, flows_at: int) -> None:
        """Schedule the end of a transfer that flows from tick `flows_at` on, at its fixed share or as if alone on its
        links.
        """
        rate = one.rate or self._rate_alone
        ticks = 0 if rate is None else -(-one.work_left // rate)
        self._push(one, flows_at + ticks, _ENDS)

    def _push(self, one: Flow | Feed, tick: int, kind: int) -> None:
        events = self._events
        heappush(events, (tick, kind, one.number, one.version, one))
        if len(events) > _MIN_EVENTS and len(events) > 4 * len(self._transfers):
            events[:] = [event for event in events if event[3] == event[4].version]
            heapify(events)

    def _flow(self, one: Flow) -> None:
        """Handle the end of a transfer's latency: it flows, and its end is scheduled."""
        one.is_flowing, one.since = True, self._now
        if self._has_fixed_shares:
            return
        rate = self._rate_alone
        if not self._has_no_contention:
            for link in one.links:
                users = link.transfers
                if users:
                    rate = 0
                users[one] = None
            if rate == 0:
                one.version += 1
                for link in one.links:
                    self._touched[link] = None
        one.rate = rate

    def _resume(self, feed: Feed) -> None:
        """Resume an open transfer that had nothing to send."""
        one = feed.transfer
        one.work_left = feed.take_due(self._now)
        self._expect_end(one, self._now)
        self._flow(one)

    def _go_on(self, one: Flow, feed: Feed) -> None:
        """Continue an open transfer whose previous bytes are sent: with the bytes that are available now, or else by
        waiting for more.

        While it waits, other transfers use the full bandwidth of its links.
        """
        one.version += 1
        one.work_left, one.since = feed.take_due(self._now), self._now
        if one.work_left:
            self._push_end(one)
            return
        one.is_flowing = False
        if not self._has_fixed_shares:
            one.rate = 0
            self._leave(one)
        if feed.releases:
            self._push(feed, feed.releases[0].next_at(), _RELEASES)

    def _end(self, one: Flow) -> None:
        self._num_final -= 1
        self._leave(one)
        one.has_ended = True
        self._ended.append(one)

    def _leave(self, one: Flow) -> None:
        """Remove a transfer from its links, and discard its pending events."""
        one.version += 1
        for link in one.links:
            users = link.transfers
            if one in users:
                del users[one]
                if users:
                    self._touched[link] = None

    def _push_end(self, one: Flow) -> None:
        ticks = 0 if one.rate is None else -(-one.work_left // one.rate)
        self._push(one, self._now + ticks, _ENDS)

    # Rates

    def _links_between(self, source: int, target: int) -> tuple[Link, ...]:
        if self._capacity is None:
            return self._shared
        link_out = self._out.get(source) or self._new_link(self._out, source, self._capacity)
        link_in = self._in.get(target) or self._new_link(self._in, target, self._capacity)
        return (*self._shared, link_out, link_in)

    def _new_link(self, links: dict[int, Link], replica_id: int, capacity: int) -> Link:
        link = links[replica_id] = Link(self._num_links, capacity)
        self._num_links += 1
        return link

    def _settle(self) -> None:
        """Recompute the rates on links whose transfers have changed."""
        touched = self._touched
        if not touched:
            return
        self._touched = {}
        rule, rate_alone = self._options.contention, self._rate_alone
        assert rate_alone is not None
        if rule == "max_min":
            alone = alone_on(touched)
            rates = self._fair_rates(touched) if alone is None else dict.fromkeys(alone, rate_alone)
            for one, rate in rates.items():
                self._set_rate(one, rate)
        elif rule == "exclusive":
            for link in touched:
                head = next(iter(link.transfers), None)
                if (
                    head is not None
                    and not head.rate
                    and all(next(iter(each.transfers)) is head for each in head.links)
                ):
                    self._set_rate(head, rate_alone)

    def _set_rate(self, one: Flow, rate: int) -> None:
        if rate == one.rate:
            return
        one.work_left, one.since = one.work_left_at(self._now), self._now
        one.rate = rate
        one.version += 1
        self._push_end(one)

    @staticmethod
    def _fair_rates(touched: Iterable[Link]) -> dict[Flow, int]:
        """Return max-min fair rates of all transfers connected with these links, by progressive filling.

        All shares grow together until a link is full; that link's transfers keep their share, and the other shares keep
        growing.
        """
        users = {link: [*link.transfers] for link in touched}
        unseen = list(users)
        while unseen:
            for one in users[unseen.pop()]:
                for link in one.links:
                    if link not in users:
                        users[link] = [*link.transfers]
                        unseen.append(link)
        left = {link: (link.capacity, len(who)) for link, who in users.items() if who}
        shares = [(capacity // count, link.number, link) for link, (capacity, count) in left.items()]
        heapify(shares)
        rates: dict[Flow, int] = {}
        while shares:
            share, number, link = heappop(shares)
            capacity, count = left[link]
            if not count:
                continue
            # The share is outdated if some of the link's transfers have got their rates from other links since.
            if capacity // count != share:
                heappush(shares, (capacity // count, number, link))
                continue
            for one in users[link]:
                if one not in rates:
                    rates[one] = rate = max(1, share)
                    for each in one.links:
                        capacity, count = left[each]
                        left[each] = (capacity - rate, count - 1)
        return rates


def _grains(bandwidth: float | None) -> int | None:
    return None if bandwidth is None else round(bandwidth * _GRAIN)
