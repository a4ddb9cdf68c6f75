"""Helpers of routing policies: replicas that are up, their loads, and the fallback if none is up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

from vajra_py.contract import QueueView, ReplicaLoadView, WakeUps

LoadUnit: TypeAlias = Literal["requests", "tokens"]


def load_in(unit: LoadUnit) -> Callable[[ReplicaLoadView], int]:
    """Return the function that reads a replica's load.

    `requests`: the number of running and waiting requests. `tokens`: the tokens of these requests, computed or not.
    """
    return _num_tokens if unit == "tokens" else _num_requests


def _num_requests(replica: ReplicaLoadView) -> int:
    return replica.num_running + replica.num_waiting


def _num_tokens(replica: ReplicaLoadView) -> int:
    return replica.num_pending_tokens + replica.num_context_tokens


def those_up(replicas: Sequence[ReplicaLoadView]) -> list[ReplicaLoadView]:
    """Return the replicas that take requests."""
    return [replica for replica in replicas if replica.is_up]


def by_pool(replicas: Iterable[ReplicaLoadView]) -> list[list[ReplicaLoadView]]:
    """Return one list of replicas per pool; pools and replicas keep the given order."""
    pools: dict[str, list[ReplicaLoadView]] = {}
    for one in replicas:
        pools.setdefault(one.pool, []).append(one)
    return list(pools.values())


def whole_queue(replica: ReplicaLoadView, queued: QueueView) -> Iterable[str]:
    """Return the ids of all requests of the shared queue, lazily, if the replica has room (`has_room`); otherwise
    nothing.

    A full replica is offered nothing, since it would search the queue in vain at every step. Policies that bind on
    arrival call this function for requests that arrived while no replica was up.
    """
    return (request.request_id for request in queued) if has_room(replica) else ()


class BindsOnArrival:
    """Base class of routers that place requests on arrival; requests that arrive while no replica is up wait in the
    shared queue, from which the first replica that comes up takes them.
    """

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        """Return the ids of requests that arrived while no replica was up, if the replica has room."""
        return whole_queue(replica, queued)


def has_room(replica: ReplicaLoadView) -> bool:
    """Return True for a replica that is up and has a free slot and a free KV block.

    With pipeline stages, a replica has one step in flight per stage, and the slots of all these steps count.
    """
    num_slots = replica.limits.pipeline_stages * replica.max_batch_size
    return replica.is_up and replica.num_running < num_slots and replica.free_blocks > 0


class PeriodicWakeUps:
    """Wakes a policy every `interval_s` seconds while it has work."""

    def __init__(self, wake: WakeUps, interval_s: float, key: str = "") -> None:
        self._wake = wake
        self._interval_s = interval_s
        self._key = key
        self._is_set = False

    def start(self, now: float) -> None:
        """Wake the policy after the interval, unless a wake-up is already set."""
        if not self._is_set:
            self._is_set = True
            self._wake.at(now + self._interval_s, self._key)

    def woken(self, now: float, *, goes_on: bool) -> None:
        """Record that the policy was woken; with `goes_on`, set the next wake-up."""
        self._is_set = False
        if goes_on:
            self.start(now)
