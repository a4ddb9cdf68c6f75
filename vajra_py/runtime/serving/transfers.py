"""KV on its way between the replicas of a replicaset, and actions that wait until a replica is between two of its steps."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from operator import itemgetter
from typing import Generic

from vajra_py.runtime.movement.links import Network
from vajra_py.runtime.movement.rules import HandOffRules
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.backend import R
from vajra_py.runtime.serving.events import Phase
from vajra_py.runtime.serving.replicaset import Replicaset
from vajra_py.runtime.serving.services import DriverServices
from vajra_py.runtime.support.clock import to_seconds, to_ticks


class Transfers(Generic[R]):
    """Transfers of one replicaset over its links."""

    def __init__(self, replicaset: Replicaset, rules: HandOffRules, driver: DriverServices[R]) -> None:
        self._replicaset = replicaset
        self._rules = rules
        self._driver = driver
        self._network = Network(rules.links)
        self._done: dict[Hashable, Callable[[], None]] = {}
        """Callback of each transfer under way."""
        self._ended: dict[Hashable, None] = {}
        """Transfers that have ended now and were not called back yet."""
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        """(tick, number, action) of what happens at a time."""
        self._num_timers = 0
        self._scheduled_at: int | None = None
        self._waiting: dict[int, list[tuple[int, Callable[[], None]]]] = {}
        """Actions by replica, in order of number."""

    def start(
        self, key: Hashable, request: Request, ends: tuple[R, R], num_tokens: int, done: Callable[[], None]
    ) -> None:
        """Send KV of so many tokens from the first replica to the second; `done` is called when it has arrived."""
        source, target = (one.replica.replica_id for one in ends)
        now = self._driver.now
        for observer in self._replicaset.observers:
            observer.on_transfer(request, source, target, num_tokens, to_seconds(now))
        self._driver.transfer(request, ends)
        self._done[key] = done
        self._network.start(key, source, target, num_tokens * self._rules.bytes_per_token, now)
        self._schedule()

    def cancel(self, key: Hashable) -> None:
        """Call a transfer off, if it is under way."""
        if self._done.pop(key, None) is None:
            return
        if key in self._ended:
            del self._ended[key]
        else:
            self._network.cancel(key, self._driver.now)
            self._schedule()

    @property
    def is_busy(self) -> bool:
        """True if KV is on its way."""
        return bool(self._done)

    def due(self) -> None:
        """Call back for the transfers that have ended by now."""
        now = self._driver.now
        if self._scheduled_at is not None and self._scheduled_at <= now:
            self._scheduled_at = None
        self._ended.update(dict.fromkeys(self._network.ended(now)))
        while self._ended:
            key = next(iter(self._ended))
            del self._ended[key]
            self._done.pop(key)()
        while self._timers and self._timers[0][0] <= now:
            heappop(self._timers)[2]()
        self._schedule()

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` after so many seconds, when transfers that end then have ended."""
        tick = self._driver.now + to_ticks(delay_s)
        heappush(self._timers, (tick, self._num_timers, action))
        self._num_timers += 1
        self._driver.events.push(tick, Phase.TRANSFER, self._replicaset.name)

    def _schedule(self) -> None:
        tick = self._network.next_change()
        if tick is not None and (self._scheduled_at is None or tick < self._scheduled_at):
            self._scheduled_at = tick
            self._driver.events.push(max(tick, self._driver.now), Phase.TRANSFER, self._replicaset.name)

    # Between two steps

    def between_steps(self, one: R, number: int, action: Callable[[], None]) -> None:
        """Call `action` when the replica has no step in flight: now, or after its step, the lowest number first."""
        if one.replica.num_in_flight:
            insort(self._waiting.setdefault(one.replica.replica_id, []), (number, action), key=itemgetter(0))
        else:
            action()

    def step_ended(self, one: R) -> None:
        """Call the actions that waited for the replica's step."""
        waiting = self._waiting.get(one.replica.replica_id)
        while waiting and not one.replica.num_in_flight:
            _, action = waiting.pop(0)
            action()

    def has_waiting(self, one: R) -> bool:
        """Return True if an action waits for the replica's step."""
        return bool(self._waiting.get(one.replica.replica_id))

    def forget_waiting(self, one: R) -> None:
        """Drop the actions that wait for the step of a lost replica."""
        self._waiting.pop(one.replica.replica_id, None)

    def clear(self) -> None:
        """Call everything off."""
        for key in list(self._done):
            self.cancel(key)
        self._waiting.clear()
        self._timers.clear()
