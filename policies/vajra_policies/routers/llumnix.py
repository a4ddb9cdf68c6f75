"""Llumnix: dispatch to the freest replica, and live migration away from replicas that are short of memory.

Source: Llumnix (OSDI'24, arXiv:2406.03243), section 4.4; code AlibabaPAI/llumnix, `load_computation`, `migration_policy` and
`local_migration_scheduler`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from pydantic import Field

from vajra_policies.routers.request_places import RequestPlaces
from vajra_policies.routing import BindsOnArrival, PeriodicWakeUps, by_pool, those_up
from vajra_py.contract import (
    Layer,
    Move,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    ReplicaId,
    ReplicaLoadView,
    ReplicaState,
    RequestView,
)

Counted: TypeAlias = Literal["all", "first"]
"""Waiting requests that count towards a replica's demand for blocks: all, or only the first in the replica's queue."""


class LlumnixConfig(PolicyConfig):
    """Parameters of `llumnix`."""

    dispatch_counts: Counted = Field(
        "all",
        description=(
            "Waiting requests whose blocks count at dispatch: all of a replica's, or only its first. For migration "
            "only the first counts, so that a request that fits on no replica gets free blocks."
        ),
    )
    migrates: bool = Field(True, description="Migrate requests between replicas; false: only dispatch them.")
    interval_s: float = Field(0.05, gt=0, description="Interval at which migrations are decided, seconds.")
    migrate_below: float = Field(
        3.0,
        description=(
            "Freeness, in steps, up to which requests migrate away from a replica, and above which a replica can be "
            "a target; a request migrates away from a replica with a preempted request at any freeness."
        ),
    )
    pairs: Literal["defrag", "balanced"] = Field(
        "defrag",
        description=(
            "`defrag`: the least free replica with the freest, the next with the next. `balanced`: of these pairs, those "
            "whose target stays above `migrate_below` and whose difference of freeness shrinks and keeps its sign."
        ),
    )
    moved: Literal["shortest", "longest", "last", "first_waiting", "first_waiting_and_shortest"] = Field(
        "shortest",
        description="Request that migrates: the shortest, the longest or the latest admitted decode; the first waiting "
        "request; or the first waiting request and the shortest decode.",
    )
    high_priority_below: int = Field(0, description="Requests with a priority below this are of high priority.")
    headroom_blocks: int = Field(
        0, ge=0, description="Blocks that count as used on a replica that runs requests of high priority, KV blocks."
    )


class Llumnix(BindsOnArrival):
    """Binds on arrival to the freest replica that is up, and moves requests from the least free replicas to the freest.

    Freeness of a replica: (free blocks - demand) / requests, the number of steps for which its requests can still
    decode. The demand is the blocks of the known tokens, cached or not, of the counted waiting requests (`Counted`),
    plus the headroom of requests of high priority (the paper's virtual usage). The requests are the running ones and
    the counted waiting ones. Freeness is infinite without requests, and minus infinity while the replica drains. Ties
    go to the lowest id.

    Left out: scaling by freeness.
    """

    def __init__(self, config: LlumnixConfig, context: PolicyContext) -> None:
        self._config = config
        self._block_size = context.limits.block_size
        self._looks = PeriodicWakeUps(context.wake, config.interval_s)
        self._places = RequestPlaces()

    # Dispatch

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the freest replica that is up."""
        if self._config.migrates:
            self._looks.start(now)
        counted = self._config.dispatch_counts
        best = min(those_up(replicas), key=lambda one: (-self._freeness(one, counted), one.replica_id), default=None)
        if best is None:
            self._places.forget(request)
            return None
        self._places.wait(request, best.replica_id)
        return best.replica_id

    # Freeness

    def _freeness(self, replica: ReplicaLoadView, counted: Counted, moved_blocks: int = 0, num_moved: int = 0) -> float:
        """Return the freeness after adding `num_moved` requests with `moved_blocks` blocks in total, or after removing
        them if the numbers are negative.
        """
        if replica.state is ReplicaState.DRAINING:
            return -math.inf
        waiting = self._places.waiting[replica.replica_id]
        if counted == "first" and waiting:
            waiting = {min(waiting, key=_turn): None}
        num_requests = replica.num_running + len(waiting) + num_moved
        if num_requests <= 0:
            return math.inf
        demand = sum(map(self._blocks, waiting)) + moved_blocks
        if self._config.headroom_blocks:
            here = (*self._places.running[replica.replica_id], *waiting)
            is_high = any(one.priority < self._config.high_priority_below for one in here)
            demand += self._config.headroom_blocks if is_high else 0
        return (replica.free_blocks - demand) / num_requests

    def _blocks(self, request: RequestView) -> int:
        return -(-request.num_known_tokens // self._block_size)

    # Migration

    def moves(self, replicas: Sequence[ReplicaLoadView], now: float) -> Iterable[Move]:
        """Return moves from replicas that are short of memory, each to a freer replica of the same pool."""
        if not self._config.migrates:
            return []
        able = [one for one in replicas if one.is_up or one.state is ReplicaState.DRAINING]
        return [move for pool in by_pool(able) for pair in self._pairs(pool) for move in self._moves(*pair)]

    def _pairs(self, pool: Sequence[ReplicaLoadView]) -> Iterator[tuple[ReplicaLoadView, ReplicaLoadView]]:
        """Yield (source, target) pairs: the i-th least free source with the i-th freest target."""
        by_id = {one.replica_id: one for one in pool}
        freeness = {one.replica_id: self._freeness(one, "first") for one in pool}
        least_free = sorted(by_id, key=lambda one: (freeness[one], one))
        freest = sorted(by_id, key=lambda one: (-freeness[one], one))
        below, has_preempted = self._config.migrate_below, self._places.has_preempted
        gives = dict.fromkeys(one for one in least_free if freeness[one] <= below or has_preempted(one))
        takes = [one for one in freest if by_id[one].is_up and one not in gives]
        for source, target in zip(gives, takes, strict=False):
            if self._config.pairs == "defrag" or self._balances(by_id[source], by_id[target], freeness):
                yield by_id[source], by_id[target]

    def _balances(self, source: ReplicaLoadView, target: ReplicaLoadView, freeness: Mapping[ReplicaId, float]) -> bool:
        chosen = self._chosen(source)
        if not chosen:
            return False
        blocks = self._blocks(chosen[0])
        target_after = self._freeness(target, "first", blocks, 1)
        source_after = self._freeness(source, "first", -blocks, -1)
        before = freeness[target.replica_id] - freeness[source.replica_id]
        return target_after > self._config.migrate_below and 0 < target_after - source_after < before

    def _moves(self, source: ReplicaLoadView, target: ReplicaLoadView) -> Iterator[Move]:
        for request in self._chosen(source):
            if not request.is_resident:
                self._places.wait(request, target.replica_id)
            yield Move(request, target.replica_id)

    def _chosen(self, source: ReplicaLoadView) -> list[RequestView]:
        """Return the requests to move away from the replica `source`, at most two."""
        moved = self._config.moved
        running = self._places.running[source.replica_id]
        decoding = [one for one in running if one.is_resident and one.is_prefill_complete]
        waiting = self._places.waiting[source.replica_id] if moved.startswith("first_waiting") else ()
        movable = [one for one in waiting if not one.is_swapped]
        first = [min(movable, key=_turn)] if movable else []
        if moved == "first_waiting" or not decoding:
            return first
        if moved == "last":
            return [decoding[-1]]
        best = max if moved == "longest" else min
        return [*first, best(decoding, key=lambda one: one.num_known_tokens)]

    # Locations of requests

    def on_wake(self, key: str, now: float) -> None:
        """Set the next wake-up, one interval later, if there are requests."""
        self._looks.woken(now, goes_on=bool(self._places))

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Count the request as running on the replica."""
        self._places.run(request, replica_id)

    def on_preemption(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Count the request as waiting at the replica again."""
        self._places.wait(request, replica_id)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget these requests."""
        self._places.forget(*requests)


def _turn(request: RequestView) -> tuple[float, float, float, int]:
    """Return the key by which an engine orders waiting requests: the latest preempted first, then by priority and
    arrival.
    """
    return -request.preempted_index, request.priority, request.arrived_at, request.index


SPEC = PolicySpec(
    name="llumnix",
    layer=Layer.REPLICASET_SCHEDULER,
    config=LlumnixConfig,
    build=Llumnix,
    summary="Each arriving request to the freest replica; live migration from replicas that are short of KV blocks.",
    source="Llumnix (OSDI'24, arXiv:2406.03243); code AlibabaPAI/llumnix",
    advice=(
        "Use it where output lengths differ much and memory is short: running requests migrate to other replicas. Not "
        "over slow links, or with one replica."
    ),
)
