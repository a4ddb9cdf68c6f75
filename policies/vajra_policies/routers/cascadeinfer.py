"""CascadeInfer: replicas for ranges of lengths, and running requests that move on to the next range as they grow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

from pydantic import Field

from vajra_policies.routers.length_ranges import Stage, partition
from vajra_policies.routing import BindsOnArrival, PeriodicWakeUps, by_pool, load_in, those_up
from vajra_py.contract import (
    Layer,
    Move,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
)


class CascadeinferConfig(PolicyConfig):
    """Parameters of `cascadeinfer`."""

    interval_s: float = Field(
        0.1, gt=0, description="Interval at which requests that have outgrown their range are searched, seconds."
    )
    plan_s: float = Field(10.0, gt=0, description="Interval at which ranges are recomputed, seconds.")
    own_tokens: float = Field(
        500.0, ge=0, description="Cost of a request in a step besides its context, in context tokens."
    )


class Cascadeinfer(BindsOnArrival):
    """Binds on arrival to the least loaded replica (by tokens) for the request's length; a request that has outgrown
    the range of its replica moves, with its KV, to a replica for longer requests.

    `partition` computes the ranges, and the number of replicas of each, from the lengths (known tokens) of the present
    requests. It is called every `plan_s`, and when a replica comes up or goes down. Replicas with lower ids serve
    shorter requests. A request moves only within its pool, and only when the target has room.

    Left out: bids of replicas for requests, and the paper's cost of a range, which is fitted to a GPU. Written from the
    abstract alone: the cost and the defaults of the three parameters are ours.

    Source: Yuan et al., "CascadeInfer: Length-Aware Scheduling of LLM Serving with Low Latency and Load Balancing" (arXiv:2512.19179).
    """

    def __init__(self, config: CascadeinferConfig, context: PolicyContext) -> None:
        self._config = config
        self._block_size = context.limits.block_size
        self._looks = PeriodicWakeUps(context.wake, config.interval_s)
        self._load = load_in("tokens")
        self._at: dict[RequestView, ReplicaId] = {}
        self._plans: dict[str, tuple[float, list[ReplicaId], list[Stage]]] = {}
        """(time, replicas, ranges) of the last plan of each pool."""

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the least loaded replica for the request's length."""
        self._looks.start(now)
        members = [one for pool in _pools(replicas) for one in self._members(pool, request.num_known_tokens, now)]
        best = min(members, key=lambda one: (self._load(one), one.replica_id), default=None)
        if best is None:
            self._at.pop(request, None)
            return None
        self._at[request] = best.replica_id
        return best.replica_id

    def moves(self, replicas: Sequence[ReplicaLoadView], now: float) -> Iterable[Move]:
        """Return moves of running requests that have outgrown the range of their replica."""
        moves = []
        for pool in _pools(replicas):
            load = {one.replica_id: self._load(one) for one in pool}
            for request, source in self._at.items():
                if source not in load or not (request.is_resident and request.is_prefill_complete):
                    continue
                length = request.num_known_tokens
                members = self._members(pool, length, now)
                if source >= members[0].replica_id:
                    continue
                target = min(members, key=lambda one: (load[one.replica_id], one.replica_id))
                if target.free_blocks * self._block_size > length:
                    load[target.replica_id] += length
                    moves.append(Move(request, target.replica_id, "outgrew its range"))
        return moves

    def on_wake(self, key: str, now: float) -> None:
        """Set the next wake-up, one interval later, if there are requests."""
        self._looks.woken(now, goes_on=bool(self._at))

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Record that the request runs on this replica."""
        self._at[request] = replica_id

    def on_moved(self, request: RequestView, source: ReplicaId, target: ReplicaId, now: float) -> None:
        """Record that the request is at the replica `target` now."""
        self._at[request] = target

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget these requests."""
        for request in requests:
            self._at.pop(request, None)

    def _members(self, pool: Sequence[ReplicaLoadView], length: int, now: float) -> Sequence[ReplicaLoadView]:
        """Return the replicas for requests of this length, in order of id. `pool`: replicas of one pool that are up, in
        order of id.
        """
        stages = self._stages(pool, now)
        ends = accumulate(stage.num_replicas for stage in stages)
        return next(
            pool[end - stage.num_replicas : end]
            for stage, end in zip(stages, ends, strict=True)
            if length <= stage.up_to
        )

    def _stages(self, pool: Sequence[ReplicaLoadView], now: float) -> list[Stage]:
        ids = [one.replica_id for one in pool]
        made_at, for_ids, stages = self._plans.get(pool[0].pool, (-math.inf, [], []))
        if ids != for_ids or now >= made_at + self._config.plan_s:
            lengths = [one.num_known_tokens for one, place in self._at.items() if place in ids]
            stages = partition(lengths, len(ids), self._config.own_tokens)
            self._plans[pool[0].pool] = (now, ids, stages)
        return stages


def _pools(replicas: Sequence[ReplicaLoadView]) -> list[list[ReplicaLoadView]]:
    """Return, for each pool, its replicas that are up, in order of their ids."""
    return by_pool(sorted(those_up(replicas), key=lambda one: one.replica_id))


SPEC = PolicySpec(
    name="cascadeinfer",
    layer=Layer.REPLICASET_SCHEDULER,
    config=CascadeinferConfig,
    build=Cascadeinfer,
    summary="Replicas for ranges of lengths, chosen for the least cost; requests move on to the next range as they grow.",
    source="CascadeInfer (arXiv:2512.19179)",
    advice=(
        "Use it where a batch takes as long as its longest context, and lengths differ by factors. Not over slow "
        "links, or where a step's time depends on the sum of its contexts (`least_loaded`)."
    ),
)
