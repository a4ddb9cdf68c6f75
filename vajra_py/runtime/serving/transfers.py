"""Transfers of KV between the replicas of a replicaset, and actions that wait until a replica is between two of its
steps.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any, Generic, Protocol, TypeVar

from vajra_py.runtime.movement.links import Network
from vajra_py.runtime.movement.rules import HandOffRules
from vajra_py.runtime.records.input_log import Retry
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.backend import R, Transfer
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.serving.replicaset import Replicaset
from vajra_py.runtime.serving.services import DriverServices
from vajra_py.runtime.support.clock import to_seconds, to_ticks

_TRANSFER = Phase.TRANSFER  # in Python 3.11 the lookup of an enum member costs more than a function call

REQUEST_ENDED = "the request ended"
KV_LOST = "a replica lost its KV"
PREEMPTED = "the request was preempted"
"""Reasons for cancelling transfers, as reported to observers."""


class Moving(Protocol):
    """Hand-off or migration under way; this object is the key of its transfer."""

    request: Request

    def __hash__(self) -> int:
        """Return a hash by identity."""


M = TypeVar("M", bound=Moving)


class Transfers(Generic[R]):
    """Transfers of one replicaset, either timed or untimed. A model of the links determines when a timed transfer ends;
    an untimed one ends when the backend reports its end.
    """

    def __init__(
        self, replicaset: Replicaset, rules: HandOffRules, driver: DriverServices[R], *, is_timed: bool, asks: bool
    ) -> None:
        """Create the transfers. `is_timed`: True if the links are modelled. `asks` (for untimed transfers): True if
        full targets are checked again at a scheduled time; False: only when an input (`Retry`) arrives.
        """
        self._replicaset = replicaset
        self._bytes_per_token = rules.bytes_per_token
        self._driver = driver
        self._network = Network(rules.links) if is_timed else None
        self._asks = asks
        self._num_started = 0
        self._sent: dict[Hashable, tuple[Transfer[R], Callable[[Any], None]]] = {}
        """Each transfer under way with its callback, by the transfer's key."""
        self._keys: dict[int, Hashable] = {}
        """Keys of the untimed transfers under way, by number."""
        self._ended: dict[Hashable, None] = {}
        """Keys of transfers that have ended and whose callback was not called yet."""
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        """Scheduled actions as (tick, number, action)."""
        self._num_timers = 0
        self._scheduled_at: int | None = None
        self.waiting: dict[int, list[tuple[int, Callable[[], None]]]] = {}
        """Actions that wait for the end of a step, by replica, as (number, action) in order of number."""

    def start(
        self,
        key: M,
        ends: tuple[R, R],
        lacking: tuple[int, int],
        num_moved: int,
        done: Callable[[M], None],
        *,
        is_computed: bool = True,
    ) -> None:
        """Send KV from the first replica in `ends` to the second; when the KV has arrived, `done` is called with the
        key.

        `lacking`: (first, end) of the tokens whose KV the target lacks; `num_moved`: number of tokens whose KV is sent.
        `is_computed`: if False (only with modelled links), KV is sent as `release` announces it, until `close` is
        called.
        """
        sender, receiver = ends
        source, target = sender.replica.replica_id, receiver.replica.replica_id
        request, now, network = key.request, self._driver.now, self._network
        for observer in self._replicaset.hand_off_watchers:
            observer.on_transfer(request, source, target, num_moved, to_seconds(now))
        number = self._num_started
        self._num_started += 1
        one = Transfer(number, request, sender, receiver, *lacking)
        self._sent[key] = one, done
        if network is None:
            self._keys[number] = key
            sender.replica.running_set.materialize()  # the copy needs complete block tables
        self._driver.transfer(one)
        if network is None:
            return
        if is_computed:
            network.start(key, source, target, num_moved * self._bytes_per_token, now)
            self._schedule(network)
        else:
            network.open(key, source, target, now)

    # KV that is sent while it is computed (only with modelled links)

    def release(self, key: Hashable, num_tokens: int, ticks: int = 0, num_parts: int = 1) -> None:
        """Announce KV of an open transfer. The KV is computed in `num_parts` equal parts, the last of which is complete
        `ticks` from now; each part is then sent.
        """
        assert self._network is not None
        num_bytes = num_tokens * self._bytes_per_token
        self._network.release(key, num_bytes, self._driver.now, ticks, num_parts)
        self._schedule(self._network)

    def close(self, key: Hashable, num_moved: int | None = None) -> None:
        """Close an open transfer: it ends when all released KV has arrived. `num_moved`: number of tokens sent, if
        different from the announced number.
        """
        assert self._network is not None
        if num_moved is not None:
            one, _ = self._sent[key]
            source, target = (end.replica.replica_id for end in (one.source, one.target))
            for observer in self._replicaset.hand_off_watchers:
                observer.on_transfer(one.request, source, target, num_moved, to_seconds(self._driver.now))
        self._network.close(key, self._driver.now)
        self._schedule(self._network)

    def cancel(self, key: Hashable, why: str) -> None:
        """Cancel a transfer, if it is under way."""
        entry = self._sent.pop(key, None)
        if entry is None:
            return
        one, _ = entry
        self._driver.cancel_transfer(one)
        if self._network is None:
            del self._keys[one.number]
        elif key in self._ended:
            del self._ended[key]
        else:
            self._network.cancel(key, self._driver.now)
            self._schedule(self._network)
        self._notify_end(one, why)

    def is_under_way(self, number: int) -> bool:
        """Return True if the untimed transfer with this number is under way."""
        return number in self._keys

    def ended(self, number: int) -> None:
        """Handle the end of an untimed transfer: call its callback."""
        self._arrived(self._keys.pop(number))

    def _arrived(self, key: Hashable) -> None:
        one, done = self._sent.pop(key)
        if self._replicaset.hand_off_watchers:
            self._notify_end(one)
        done(key)

    def _notify_end(self, one: Transfer[R], failure: str = "") -> None:
        source, target = one.source.replica.replica_id, one.target.replica.replica_id
        for observer in self._replicaset.hand_off_watchers:
            observer.on_transfer_end(one.request, source, target, failure, to_seconds(self._driver.now))

    @property
    def is_busy(self) -> bool:
        """True if a transfer is under way."""
        return bool(self._sent)

    def due(self) -> None:
        """Call the callbacks of timed transfers that have ended, and postponed actions that are due."""
        network, now = self._network, self._driver.now
        assert network is not None
        scheduled_at = self._scheduled_at
        if scheduled_at is not None:
            if scheduled_at <= now:
                self._scheduled_at = None
            elif not self._timers:
                return  # an earlier event handled everything for which this one was scheduled
        ended = network.ended(now)
        for key in ended:
            self._ended[key] = None
        for key in ended:
            if key in self._ended:  # otherwise an earlier callback has cancelled the transfer
                del self._ended[key]
                self._arrived(key)
        if self._timers:
            self.retry()
        self._schedule(network)

    @property
    def has_retry(self) -> bool:
        """True if an action that `after` postponed is due."""
        return bool(self._timers) and self._timers[0][0] <= self._driver.now

    def retry(self) -> None:
        """Call the actions that `after` postponed and that are due."""
        while self.has_retry:
            heappop(self._timers)[2]()

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` after this many seconds, and after all transfers that end at that time."""
        tick = self._driver.now + to_ticks(delay_s)
        heappush(self._timers, (tick, self._num_timers, action))
        self._num_timers += 1
        name = self._replicaset.name
        if self._network is not None:
            self._driver.events.push(tick, _TRANSFER, name)
        elif self._asks:
            self._driver.events.push(tick, _TRANSFER, Retry(tick, name))

    def _schedule(self, network: Network) -> None:
        tick = network.next_change()
        if tick is not None and (self._scheduled_at is None or tick < self._scheduled_at):
            self._scheduled_at = tick
            self._driver.events.push(tick, _TRANSFER, self._replicaset.name)

    # Between two steps

    def between_steps(self, one: R, number: int, action: Callable[[], None]) -> None:
        """Call `action` when the replica has no step in flight: now, or after its step. Actions that wait for the same
        step are called in order of `number`.
        """
        if one.replica.num_in_flight:
            insort(self.waiting.setdefault(one.replica.replica_id, []), (number, action), key=itemgetter(0))
        else:
            action()

    def step_ended(self, one: R) -> None:
        """Call the actions that waited for the end of the replica's step."""
        waiting = self.waiting.get(one.replica.replica_id)
        while waiting and not one.replica.num_in_flight:
            _, action = waiting.pop(0)
            action()

    def has_waiting(self, one: R) -> bool:
        """Return True if an action waits for the end of the replica's step."""
        return bool(self.waiting.get(one.replica.replica_id))

    def forget_waiting(self, one: R) -> None:
        """Drop the actions that wait for the end of a lost replica's step."""
        self.waiting.pop(one.replica.replica_id, None)

    def clear(self, why: str) -> None:
        """Cancel all transfers and actions."""
        for key in list(self._sent):
            self.cancel(key, why)
        self.waiting.clear()
        self._timers.clear()
