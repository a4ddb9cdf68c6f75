"""Consistent hashing with bounded loads: sessions keep their replicas when other replicas come up or go down."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from math import ceil
from typing import Literal

from pydantic import Field

from vajra_policies.routing import BindsOnArrival, load_in, those_up
from vajra_py.contract import Layer, PolicyConfig, PolicyContext, PolicySpec, ReplicaId, ReplicaLoadView, RequestView


class ConsistentHashingConfig(PolicyConfig):
    """Parameters of `consistent_hashing`."""

    by: Literal["session", "tenant"] = Field(
        "session",
        description="Key that is hashed: the session or the tenant; requests without one are hashed by their id.",
    )
    virtual_nodes: int = Field(100, ge=1, description="Number of points of each replica on the ring.")
    max_load_factor: float | None = Field(
        1.25,
        gt=1,
        le=1e6,
        description="Maximum number of requests of a replica, as a multiple of the mean with the new one; null: any number (plain consistent hashing).",
    )


class ConsistentHashing(BindsOnArrival):
    """Chooses, clockwise from the hash of the request's key, the first replica that is up and below the bound.

    The bound is ceil(c * mean) requests, with c = `max_load_factor`. The mean is the number of requests per replica
    that is up, the new request included.

    When a replica goes down, only its keys move, to the next replicas on the ring; they return when it is up again.
    With the bound c, no replica takes a request beyond c times the mean; further requests go to the next replica.

    Left out: nothing.

    Source: Karger et al., STOC'97; Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA'18
    (arXiv:1608.01350).
    """

    def __init__(self, config: ConsistentHashingConfig, num_replicas: int) -> None:
        self._by_tenant = config.by == "tenant"
        self._factor = config.max_load_factor
        self._load = load_in("requests")
        places = ((f"{one}/{copy}", one) for one in range(num_replicas) for copy in range(config.virtual_nodes))
        self._ring = sorted((_hash(place), one) for place, one in places)

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the first replica that is up and below the bound, clockwise from the hash of the request's key; None
        if no replica is up.
        """
        up = {one.replica_id: one for one in those_up(replicas)}
        if not up:
            return None
        if self._factor is None:
            return next(one for one in self._clockwise(request) if one in up)
        loads = {replica_id: self._load(one) for replica_id, one in up.items()}
        bound = ceil(self._factor * (sum(loads.values()) + 1) / len(up))
        return next(one for one in self._clockwise(request) if one in up and loads[one] < bound)

    def _clockwise(self, request: RequestView) -> Iterator[ReplicaId]:
        name = (request.tenant if self._by_tenant else request.session_id) or request.request_id
        first = bisect_left(self._ring, (_hash(name), 0))
        for index in range(len(self._ring)):
            yield self._ring[(first + index) % len(self._ring)][1]


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def _build(config: ConsistentHashingConfig, context: PolicyContext) -> ConsistentHashing:
    return ConsistentHashing(config, context.num_replicas)


SPEC = PolicySpec(
    name="consistent_hashing",
    layer=Layer.REPLICASET_SCHEDULER,
    config=ConsistentHashingConfig,
    build=_build,
    summary="Each session to its position on a ring of replicas, or to the next replica with room.",
    source="Karger et al. (STOC'97); bounded loads (Mirrokni et al., SODA'18)",
    advice=(
        "Use it where several routers must make the same choice without communication, or cannot see the caches. Not "
        "with few sessions and long prefixes on many replicas, where `lmetric`, which reads the caches, is better."
    ),
)
