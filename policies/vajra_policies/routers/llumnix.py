"""Llumnix: dispatch to the freest replica, and live migration from replicas that are short of memory to those that are not.

Source: Llumnix (OSDI'24, arXiv:2406.03243), section 4.4; code AlibabaPAI/llumnix, `load_computation`, `migration_policy` and
`local_migration_scheduler`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from pydantic import Field

from vajra_policies.routing import those_up, whole_queue
from vajra_py.contract import (
    Layer,
    Move,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    QueueView,
    ReplicaId,
    ReplicaLoadView,
    ReplicaState,
    RequestView,
)

Counted: TypeAlias = Literal["all", "first"]
"""Waiting requests whose demand counts."""
Choice: TypeAlias = Literal["shortest", "longest", "last", "first_waiting", "first_waiting_and_shortest"]


class LlumnixConfig(PolicyConfig):
    """Parameters of `llumnix`."""

    dispatch_counts: Counted = Field(
        "all",
        description=(
            "Waiting requests whose demand for blocks counts when a request is dispatched: all of a replica's, or the first alone. "
            "For migration the first counts, so that one that fits nowhere finds room."
        ),
    )
    migrates: bool = Field(True, description="Move requests between replicas; False: dispatch alone.")
    interval_s: float = Field(0.05, gt=0, description="Time between two looks at all replicas, seconds.")
    migrate_below: float = Field(
        3.0,
        description=(
            "Freeness, in steps, up to which a replica gives a request away, and above which it takes one; a replica with a "
            "preempted request gives one away whatever its freeness."
        ),
    )
    pairs: Literal["defrag", "balanced"] = Field(
        "defrag",
        description=(
            "`defrag`: the least free replica gives to the freest, the next to the next. `balanced`: of these pairs those in which "
            "the target stays above `migrate_below` and the difference of freeness shrinks without changing its sign."
        ),
    )
    moved: Choice = Field(
        "shortest",
        description="Request that a replica gives away: of those that decode the shortest, the longest or the one admitted last; or the "
        "first that waits; or the first that waits and the shortest that decodes.",
    )
    high_priority_below: int = Field(0, description="Requests with a priority below this are of high priority.")
    headroom_blocks: int = Field(
        0, ge=0, description="Blocks that count as used on a replica that runs requests of high priority, KV blocks."
    )


class Llumnix:
    """Binds on arrival to the freest replica that is up, and moves requests from the least free replicas to the freest.

    Freeness of a replica: the steps that its requests can still decode, (free blocks - demand) / requests. The demand is that of the
    waiting requests that count, and the headroom of requests of high priority (the virtual usage of the paper); only the requests
    whose demand counts are counted. Without a request it is infinite, and minus infinity while the replica drains. Ties go to the
    lowest id. A request's demand is the blocks of its known tokens, as if nothing of it were cached.

    Left out: scaling by freeness.
    """

    def __init__(self, config: LlumnixConfig, context: PolicyContext) -> None:
        self._config = config
        self._block_size = context.limits.block_size
        self._wake = context.wake
        self._is_set = False
        self._place: dict[RequestView, ReplicaId] = {}
        self._running: dict[ReplicaId, dict[RequestView, None]] = {}
        """Running requests by replica, in order of admission."""
        self._waiting: dict[ReplicaId, dict[RequestView, None]] = {}

    # Dispatch

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """The freest replica that is up."""
        self._set_alarm(now)
        counted = self._config.dispatch_counts
        best = min(those_up(replicas), key=lambda one: (-self._freeness(one, counted), one.replica_id), default=None)
        if best is None:
            self._forget(request)
            return None
        self._put(self._waiting, request, best.replica_id)
        return best.replica_id

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        """Requests that came while no replica was up."""
        return whole_queue(replica, queued)

    # Freeness

    def _freeness(self, replica: ReplicaLoadView, counted: Counted, moved_blocks: int = 0, num_moved: int = 0) -> float:
        """Freeness, as it would be if running requests with so many blocks came (negative: left)."""
        if replica.state is ReplicaState.DRAINING:
            return -math.inf
        waiting = self._waiting.get(replica.replica_id, {})
        if counted == "first" and waiting:
            waiting = {min(waiting, key=_turn): None}
        num_requests = replica.num_running + len(waiting) + num_moved
        if num_requests <= 0:
            return math.inf
        demand = sum(map(self._blocks, waiting)) + moved_blocks
        running = self._running.get(replica.replica_id, {})
        if self._config.headroom_blocks and any(map(self._is_high, (*running, *waiting))):
            demand += self._config.headroom_blocks
        return (replica.free_blocks - demand) / num_requests

    def _is_high(self, request: RequestView) -> bool:
        return request.priority < self._config.high_priority_below

    def _blocks(self, request: RequestView) -> int:
        return -(-request.num_known_tokens // self._block_size)

    # Migration

    def moves(self, replicas: Sequence[ReplicaLoadView], now: float) -> Iterable[Move]:
        """A request for each pair of a replica that is short of memory and one of its pool that is not."""
        if not self._config.migrates:
            return []
        pools: dict[str, list[ReplicaLoadView]] = {}
        for one in replicas:
            if one.is_up or one.state is ReplicaState.DRAINING:
                pools.setdefault(one.pool, []).append(one)
        return [move for pool in pools.values() for pair in self._pairs(pool) for move in self._moves(*pair)]

    def _pairs(self, pool: Sequence[ReplicaLoadView]) -> Iterator[tuple[ReplicaLoadView, ReplicaLoadView]]:
        """(source, target): the i-th least free of those that give away with the i-th freest of those that take."""
        freeness = {one.replica_id: self._freeness(one, "first") for one in pool}
        gives, takes = [], []
        for one in pool:
            if freeness[one.replica_id] <= self._config.migrate_below or self._has_preempted(one):
                gives.append(one)
            elif one.is_up:
                takes.append(one)
        gives.sort(key=lambda one: (freeness[one.replica_id], one.replica_id))
        takes.sort(key=lambda one: (-freeness[one.replica_id], one.replica_id))
        for source, target in zip(gives, takes, strict=False):
            if self._config.pairs == "defrag" or self._balances(source, target, freeness):
                yield source, target

    def _has_preempted(self, replica: ReplicaLoadView) -> bool:
        return any(one.preempted_index > 0 for one in self._waiting.get(replica.replica_id, ()))

    def _balances(self, source: ReplicaLoadView, target: ReplicaLoadView, freeness: Mapping[ReplicaId, float]) -> bool:
        chosen = (choose(self, source) for choose in _CHOICES[self._config.moved])
        request = next((one for one in chosen if one is not None), None)
        if request is None:
            return False
        blocks = self._blocks(request)
        target_after = self._freeness(target, "first", blocks, 1)
        source_after = self._freeness(source, "first", -blocks, -1)
        before = freeness[target.replica_id] - freeness[source.replica_id]
        return target_after > self._config.migrate_below and 0 < target_after - source_after < before

    def _moves(self, source: ReplicaLoadView, target: ReplicaLoadView) -> Iterator[Move]:
        for choose in _CHOICES[self._config.moved]:
            request = choose(self, source)
            if request is None:
                continue
            if not request.is_resident:
                self._put(self._waiting, request, target.replica_id)
            yield Move(request, target.replica_id)

    def _decoding(self, replica: ReplicaLoadView) -> list[RequestView]:
        running = self._running.get(replica.replica_id, ())
        return [one for one in running if one.is_resident and one.is_prefill_complete]

    def _shortest(self, replica: ReplicaLoadView) -> RequestView | None:
        return min(self._decoding(replica), key=lambda one: one.num_known_tokens, default=None)

    def _longest(self, replica: ReplicaLoadView) -> RequestView | None:
        return max(self._decoding(replica), key=lambda one: one.num_known_tokens, default=None)

    def _last(self, replica: ReplicaLoadView) -> RequestView | None:
        return next(reversed(self._decoding(replica)), None)

    def _first_waiting(self, replica: ReplicaLoadView) -> RequestView | None:
        waiting = [one for one in self._waiting.get(replica.replica_id, ()) if not one.is_swapped]
        return min(waiting, key=_turn, default=None)

    # What is where

    def on_wake(self, key: str, now: float) -> None:
        """Look again after the interval, while there are requests."""
        self._is_set = False
        if self._place:
            self._set_alarm(now)

    def _set_alarm(self, now: float) -> None:
        if self._config.migrates and not self._is_set:
            self._is_set = True
            self._wake.at(now + self._config.interval_s)

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Count the request as running there from now on."""
        self._put(self._running, request, replica_id)

    def on_preemption(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Count the request as waiting there again."""
        self._put(self._waiting, request, replica_id)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget them."""
        for request in requests:
            self._forget(request)

    def _put(
        self, where: dict[ReplicaId, dict[RequestView, None]], request: RequestView, replica_id: ReplicaId
    ) -> None:
        self._forget(request)
        self._place[request] = replica_id
        where.setdefault(replica_id, {})[request] = None

    def _forget(self, request: RequestView) -> None:
        replica_id = self._place.pop(request, None)
        if replica_id is not None:
            for where in (self._running, self._waiting):
                where.get(replica_id, {}).pop(request, None)


def _turn(request: RequestView) -> tuple[float, float, float, int]:
    """Order in which an engine takes waiting requests: those preempted last first, then by priority and arrival."""
    return -request.preempted_index, request.priority, request.arrived_at, request.index


_CHOICES: Mapping[Choice, Sequence[Callable[[Llumnix, ReplicaLoadView], RequestView | None]]] = {
    "shortest": (Llumnix._shortest,),
    "longest": (Llumnix._longest,),
    "last": (Llumnix._last,),
    "first_waiting": (Llumnix._first_waiting,),
    "first_waiting_and_shortest": (Llumnix._first_waiting, Llumnix._shortest),
}


def _build(config: LlumnixConfig, context: PolicyContext) -> Llumnix:
    return Llumnix(config, context)


SPEC = PolicySpec(
    name="llumnix",
    layer=Layer.REPLICASET_SCHEDULER,
    config=LlumnixConfig,
    build=_build,
    summary="Each arriving request to the freest replica; live migration from replicas that are short of KV blocks.",
    source="Llumnix (OSDI'24, arXiv:2406.03243); code AlibabaPAI/llumnix",
    advice=(
        "Use it where outputs differ much and memory is short: running requests move. Not over slow links, or "
        "with one replica."
    ),
)
