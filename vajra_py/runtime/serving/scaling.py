"""Scaling of a replicaset: targets by its scaler, and the choice of replicas to start and stop.

A pool is built with its maximum number of replicas; those that are not needed are down. A starting replica takes
requests after `startup_s` plus a random addition. A stopping replica drains: its waiting requests that have not begun
are placed again, its other requests are finished or move to other replicas, and then it goes down with an empty memory.
A lost replica is not started until it is restored; another replica is started in its place if the pool has one that is
down.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING

from msgspec import Struct

from vajra_py.contract import RandomStream, Scaler
from vajra_py.contract.views import ReplicaState
from vajra_py.errors import POLICY_EXCEPTIONS, PolicyError, VajraError, place_of_definition
from vajra_py.runtime.records.input_log import ReplicaChange
from vajra_py.runtime.requests.request import Request, RequestState
from vajra_py.runtime.serving.alarms import MAX_WAKES_PER_TICK, Repeats
from vajra_py.runtime.serving.pools import PoolLoad, pool_loads
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.support.clock import to_seconds, to_ticks

if TYPE_CHECKING:
    from vajra_py.runtime.serving.replicaset import Replicaset

_ACTIVE = (ReplicaState.STARTING, ReplicaState.UP)


class ElasticPool(Struct, frozen=True):
    """A pool whose number of replicas may change."""

    name: str
    replica_ids: range
    num_initial: int
    """Number of replicas that are up at the start; they are the first of `replica_ids`."""
    min_replicas: int
    max_replicas: int
    startup_s: float = 0.0
    startup_spread_s: float = 0.0
    """Maximum random addition to the duration of a start, in seconds."""
    drains_by_migration: bool = False
    """True if running requests of a draining replica move to other replicas; False if the replica finishes them."""


class Start(Struct, eq=False):
    """Event at which a starting replica takes requests."""

    change: ReplicaChange
    is_void: bool = False
    """True if the start was cancelled or has ended, or the replica was lost."""


@dataclass(eq=False, slots=True)
class ReplicasetScaling:
    """Scaler of one replicaset, with its last targets.

    Attributes:
        random: random stream for start-up times.
        wanted: target number of replicas, starting or up, by pool.
        starts: starts under way, by replica, in the order in which they began.
        has_begun: True if observers were notified of the present replicas.
        is_broken: True if the scaler broke the contract, and is no longer called.
    """

    scaler: Scaler
    name: str
    pools: Sequence[ElasticPool]
    random: RandomStream
    wanted: dict[str, int] = field(init=False)
    starts: dict[int, Start] = field(default_factory=dict)
    has_begun: bool = False
    is_broken: bool = False
    _asked: Repeats = field(default_factory=Repeats)
    _views: Sequence[PoolLoad] = ()
    _replicaset: Replicaset | None = None

    def __post_init__(self) -> None:
        """Set the targets to the initial numbers of replicas."""
        self.wanted = {pool.name: pool.num_initial for pool in self.pools}

    def attach(self, replicaset: Replicaset) -> None:
        """Attach the scaler to this replicaset, whose replicas must exist; those beyond the initial numbers go down."""
        self._replicaset = replicaset
        replicaset.scaling = self
        self._views = pool_loads(replicaset)
        for pool in self.pools:
            for replica_id in pool.replica_ids[pool.num_initial :]:
                replicaset.scale(replica_id, ReplicaState.DOWN)

    @property
    def bounds(self) -> Mapping[str, tuple[int, int]]:
        """Minimum and maximum number of replicas that are starting or up, by pool."""
        return {pool.name: (pool.min_replicas, pool.max_replicas) for pool in self.pools}

    @property
    def replicaset(self) -> Replicaset:
        """Replicaset that is scaled."""
        assert self._replicaset is not None
        return self._replicaset

    def ask(self, now: int) -> list[ReplicaChange]:
        """Call the scaler; return the changes of replicas' states that its targets require. Raises `PolicyError`."""
        try:
            if self._asked.are_without_end(now):
                message = f"starts and stops replicas at one time without end ({MAX_WAKES_PER_TICK} times)"
                raise PolicyError(self.name, message, place=place_of_definition(self.scaler.targets))
            answer: object = self.scaler.targets(self._views, to_seconds(now))
            self.wanted.update(self._checked(answer))
        except VajraError:
            self.is_broken = True
            raise
        except POLICY_EXCEPTIONS as error:
            self.is_broken = True
            raise PolicyError.caused_by(self.name, error) from error
        return [change for pool in self.pools for change in self._changes(pool, now)]

    def on_wake(self, key: str, now: int) -> None:
        """Notify the scaler of a wake-up. Raises `PolicyError`."""
        on_wake = getattr(self.scaler, "on_wake", None)
        if on_wake is None:
            return
        try:
            on_wake(key, to_seconds(now))
        except VajraError:
            self.is_broken = True
            raise
        except POLICY_EXCEPTIONS as error:
            self.is_broken = True
            raise PolicyError.caused_by(self.name, error) from error

    def _checked(self, answer: object) -> Iterable[tuple[str, int]]:
        place = place_of_definition(self.scaler.targets)
        where = f"replicaset {self.replicaset.name!r}"
        if not isinstance(answer, Mapping):
            message = f"returned {answer!r} for {where}; expected a mapping of pools to numbers of replicas"
            raise PolicyError(self.name, message, place=place)
        pools = {pool.name: pool for pool in self.pools}
        for name, count in answer.items():
            pool = pools.get(name)
            if pool is None:
                message = (
                    f"requested replicas of pool {name!r}, which {where} does not have. Its pools: {', '.join(pools)}"
                )
                raise PolicyError(self.name, message, place=place)
            is_whole = isinstance(count, Integral) and not isinstance(count, bool)
            if not is_whole or not pool.min_replicas <= count <= pool.max_replicas:
                message = f"requested {count!r} replicas of pool {name!r} of {where}"
                allowed = f"Allowed: whole numbers from {pool.min_replicas} to {pool.max_replicas}"
                raise PolicyError(self.name, f"{message}. {allowed}", place=place)
            yield name, int(count)

    def _changes(self, pool: ElasticPool, now: int) -> list[ReplicaChange]:
        replicaset, wanted = self.replicaset, self.wanted[pool.name]
        states = {one: replicaset.state_of(one) for one in pool.replica_ids}
        active = [one for one, state in states.items() if state in _ACTIVE]
        if len(active) < wanted:
            able = [one for one, state in states.items() if state is ReplicaState.DOWN and one not in replicaset.lost]
            return [self._change(one, ReplicaState.STARTING, now) for one in able[: wanted - len(active)]]
        excess = len(active) - wanted
        cancelled = [one for one in reversed(self.starts) if one in active][:excess]
        up = sorted((one for one in active if states[one] is ReplicaState.UP), key=self._drained_first)
        drained = up[: excess - len(cancelled)]
        return [
            *(self._change(one, ReplicaState.DOWN, now) for one in cancelled),
            *(self._change(one, ReplicaState.DRAINING, now) for one in drained),
        ]

    def _drained_first(self, replica_id: int) -> tuple[int, int]:
        load = self.replicaset.live_loads()[replica_id]
        return load.num_running + load.num_waiting, -replica_id

    def _change(self, replica_id: int, state: ReplicaState, now: int) -> ReplicaChange:
        return ReplicaChange(now, self.replicaset.name, replica_id, state.value)

    def drains_by_migration(self, replica_id: int) -> bool:
        """Return True if running requests of a replica move to other replicas while it drains."""
        return self._pool_of(replica_id).drains_by_migration

    def _pool_of(self, replica_id: int) -> ElasticPool:
        return next(pool for pool in self.pools if replica_id in pool.replica_ids)

    # Start-up

    def begin_start(self, replica_id: int, now: int) -> Start:
        """Record that a replica starts; return the event at which it will be up."""
        pool = self._pool_of(replica_id)
        startup_s = pool.startup_s
        if pool.startup_spread_s > 0:
            startup_s += pool.startup_spread_s * self.random.random()
        start = self.starts[replica_id] = Start(self._change(replica_id, ReplicaState.UP, now + to_ticks(startup_s)))
        return start

    def end_start(self, replica_id: int) -> None:
        """Remove the start of a replica that is up, or will not come up."""
        start = self.starts.pop(replica_id, None)
        if start is not None:
            start.is_void = True


def states_placed_anew(replicaset: Replicaset, replica_id: int) -> Sequence[RequestState]:
    """Return the states of the requests that are placed again when their replica drains.

    A request that has begun continues on the replica; a preempted one is placed again if running requests move away
    (`drains_by_migration`).
    """
    scaling = replicaset.scaling
    all_leave = scaling is not None and scaling.drains_by_migration(replica_id)
    return (RequestState.WAITING, RequestState.PREEMPTED) if all_leave else (RequestState.WAITING,)


def place_anew(replicaset: Replicaset, replica: Replica, now: int) -> list[tuple[Request, Replica | None]]:
    """Place the waiting requests of a draining replica again, like arrivals, except requests that will continue on that
    replica (`states_placed_anew`).

    Return the placed requests, each with the replica to which it is bound now (None: the shared queue). Raises
    `PolicyError`.
    """
    states = states_placed_anew(replicaset, replica.replica_id)
    waiting = [one for one in replica.queue.ordered(to_seconds(now)) if isinstance(one, Request)]
    waiting += [one for one in replicaset.held_back if one.replica_id == replica.replica_id]
    moving = [one for one in waiting if one.state in states and one not in replica.to_end]
    for request in moving:
        replicaset.unbind(request)
    return [(request, replicaset.place(request, now)) for request in moving]


def place_shared(replicaset: Replicaset, now: int) -> list[tuple[Request, Replica | None]]:
    """Place the requests of the shared queue like arrivals, and return them like `place_anew`. Raises `PolicyError`."""
    moving = [one for one in replicaset.shared.ordered(to_seconds(now)) if isinstance(one, Request)]
    for request in moving:
        replicaset.unbind(request)
    return [(request, replicaset.place(request, now)) for request in moving]
