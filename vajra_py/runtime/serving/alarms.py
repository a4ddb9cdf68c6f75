"""Wake-ups of policies: the policy, the time and the key of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from msgspec import Struct, field

from vajra_py.contract import Layer
from vajra_py.contract.latency import LAST_S
from vajra_py.errors import PolicyError
from vajra_py.runtime.support.clock import to_ticks

MAX_WAKES_PER_TICK = 1000
"""Maximum number of calls of one policy at one tick or at consecutive ticks; more calls count as an endless loop."""


class Repeats(Struct, eq=False):
    """Counter of the calls of one policy at one tick, or at consecutive ticks."""

    last_tick: int = -1
    num_calls: int = 0

    def are_without_end(self, now: int) -> bool:
        """Count a call at tick `now`; return True if the limit is exceeded."""
        if now > self.last_tick + 1:
            self.num_calls = 0
        self.last_tick = now
        self.num_calls += 1
        return self.num_calls > MAX_WAKES_PER_TICK


class Sleeper(Struct, eq=False):
    """A policy that may set wake-ups."""

    replicaset: str
    """Name of the policy's replicaset; empty for policies of the whole system."""
    slot: str
    """Key of the policy under `scheduling:` in YAML."""
    policy_name: str
    index: int = 0
    """Position of the policy in its layer; for a replica scheduler, the replica's id."""
    policy: Any = None
    """The policy object; None while it is being built."""
    wakes: Repeats = field(default_factory=Repeats)

    def count(self, now: int) -> None:
        """Count a wake-up. Raises `PolicyError` for a policy that wakes itself endlessly."""
        if self.wakes.are_without_end(now):
            message = f"sets alarms for one time without end ({MAX_WAKES_PER_TICK} times)"
            error = PolicyError(self.policy_name, message)
            raise error.at(self.index, 0) if self.slot == Layer.REPLICA_SCHEDULER.value else error


class Alarm(Struct, eq=False):
    """One future wake-up."""

    sleeper: Sleeper
    key: str | None
    """Key given by the policy; None: the policy's replica is to form a step (`BatchBuilder.idle_until`)."""
    tick: int
    is_void: bool = False


class AlarmClock(Struct, eq=False):
    """The wake-ups of a run, at most one for each policy and key."""

    _pending: dict[tuple[Sleeper, str | None], Alarm] = field(default_factory=dict)
    _push: Callable[[Alarm], None] | None = None

    def connect(self, push: Callable[[Alarm], None]) -> None:
        """Pass each wake-up, including those set before, to `push`; the driver calls `rang` when the time of a wake-up
        has come.
        """
        self._push = push
        for alarm in self._pending.values():
            push(alarm)

    def set(self, sleeper: Sleeper, key: str | None, tick: int) -> None:
        """Set the policy's wake-up with this key to a tick; an earlier wake-up with this key is replaced."""
        old = self._pending.get((sleeper, key))
        if old is not None:
            if old.tick == tick:
                return
            old.is_void = True
        alarm = self._pending[sleeper, key] = Alarm(sleeper, key, tick)
        if self._push is not None:
            self._push(alarm)

    def cancel(self, sleeper: Sleeper, key: str | None) -> None:
        """Cancel the policy's wake-up with this key, if there is one."""
        alarm = self._pending.pop((sleeper, key), None)
        if alarm is not None:
            alarm.is_void = True

    def rang(self, alarm: Alarm) -> None:
        """Remove a wake-up whose time has come."""
        del self._pending[alarm.sleeper, alarm.key]


class PolicyWakeUps:
    """`WakeUps` of one policy."""

    __slots__ = ("_clock", "_sleeper")

    def __init__(self, clock: AlarmClock, sleeper: Sleeper) -> None:
        self._clock = clock
        self._sleeper = sleeper

    def at(self, time_s: float, key: str = "") -> None:
        """See `WakeUps`."""
        self._clock.set(self._sleeper, _checked(key), wake_tick(time_s))

    def cancel(self, key: str = "") -> None:
        """See `WakeUps`."""
        self._clock.cancel(self._sleeper, _checked(key))


def wake_tick(time_s: float) -> int:
    """Convert a policy's time in seconds to a tick, after limiting the time to the range from -`LAST_S` to `LAST_S`.
    Raises `ValueError` unless the time is finite.
    """
    if not math.isfinite(time_s):
        raise ValueError(f"the time of an alarm must be finite (got {time_s!r})")
    return to_ticks(min(max(float(time_s), -LAST_S), LAST_S))


def _checked(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"the key of an alarm must be a string (got {key!r})")
    return key
