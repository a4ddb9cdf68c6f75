"""dLoRA's placement: requests go to the replica with the fewest batches to run, and move away from overloaded replicas."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

from pydantic import Field

from vajra_policies.routing import BindsOnArrival, PeriodicWakeUps, by_pool, those_up
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


class DloraMigrationConfig(PolicyConfig):
    """Parameters of `dlora_migration`; the defaults are those of the authors' code."""

    merged_ratio: float = Field(
        0.6, gt=0, description="Ratio of the cost of a batch with a single adapter to the cost of a mixed batch."
    )
    load_cost: float = Field(0.01, ge=0, description="Cost added for a replica that lacks the request's adapter.")
    interval_s: float = Field(10.0, gt=0, description="Interval between searches for requests to move, seconds.")
    more_requests: int = Field(
        16, ge=1, description="Number of requests above the mean from which a replica moves some away."
    )
    full_fraction: float = Field(
        0.9, gt=0, le=1, description="Fraction of the KV memory in use from which a replica moves requests away."
    )
    move_s: float = Field(0.05, ge=0, description="Cost of a move to its target, seconds.")
    default_s: float = Field(
        5.0, gt=0, description="Time of a request whose adapter has no ended requests yet, seconds."
    )


class DloraMigration(BindsOnArrival):
    """Binds on arrival to the replica of least cost, and moves requests between two replicas of uneven load.

    The cost is the sum over adapters of floor(n_a / B) * `merged_ratio`, plus floor(rest / B), plus `load_cost` if the
    replica lacks the request's adapter. B is the batch limit, and n_a requests with adapter a wait or run on the
    replica; the rest are the requests that do not fill a batch of one adapter. Ties go to the replica with the fewest
    requests.

    In every interval, a source and a target are chosen: the replicas with the most and the least memory in use, if the
    source is full and the target is not; otherwise the replicas with the most and the fewest requests, if the source
    exceeds the mean by `more_requests`. Requests move while this reduces the longer of the two replicas' times. A
    replica's time is the sum over its requests of the mean time of their adapter, plus `move_s` for each request that
    moves there. Requests whose adapter is loaded at the target move first. The others follow by adapter, the adapter
    with the fewest requests at the source first; the target loads these adapters afterwards, at most as many as it has
    slots.

    Left out: the integer program, replaced by this greedy choice; more than one target; and the placement of adapters
    ahead of requests, since a load begins with the first request.

    Source: Wu et al., "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving" (OSDI'24); code LLMServe/dLoRA-artifact.
    """

    def __init__(self, config: DloraMigrationConfig, context: PolicyContext) -> None:
        self._config = config
        self._max_batch = context.limits.max_batch_size
        self._looks = PeriodicWakeUps(context.wake, config.interval_s)
        self._place: dict[RequestView, ReplicaId] = {}
        """Replica of each live request; the requests are in the order in which they were first placed."""
        self._counts: defaultdict[ReplicaId, Counter[str]] = defaultdict(Counter)
        """Number of requests at each replica, by adapter; entries of 0 are removed."""
        self._began_at: dict[RequestView, float] = {}
        self._times: dict[str, tuple[int, float]] = {}
        """Number of ended requests of each adapter, and the sum of their times from first admission to end, in seconds.
        """

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the replica of least cost among those that are up; None if no replica is up."""
        self._looks.start(now)

        def cost(replica: ReplicaLoadView) -> tuple[float, int, ReplicaId]:
            there = self._counts[replica.replica_id]
            is_absent = (
                request.adapter and request.adapter not in there and request.adapter not in replica.loaded_adapters
            )
            extra = self._config.load_cost if is_absent else 0.0
            return (self.cost(there) + extra, sum(there.values()), replica.replica_id)

        best = min(those_up(replicas), key=cost, default=None)
        if best is None:
            return None
        self._put(request, best.replica_id)
        return best.replica_id

    def cost(self, counts: Counter[str]) -> float:
        """Return the cost of running these numbers of requests by adapter: a weighted number of batches. Each adapter's
        requests first fill batches of their own; the rest fills mixed batches. Requests that fill no batch cost
        nothing.
        """
        full = sum(count // self._max_batch for count in counts.values())
        rest = sum(count % self._max_batch for count in counts.values())
        return full * self._config.merged_ratio + rest // self._max_batch

    def moves(self, replicas: Sequence[ReplicaLoadView], now: float) -> Iterable[Move]:
        """Return moves of requests within pools; in each pool, all moves have the same source and the same target."""
        return [move for pool in by_pool(those_up(replicas)) for move in self._moves(pool)]

    def on_wake(self, key: str, now: float) -> None:
        """Set the next wake-up, one interval later, if there are requests."""
        self._looks.woken(now, goes_on=bool(self._place))

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Record the request's replica, and the time of its first admission."""
        self._put(request, replica_id)
        self._began_at.setdefault(request, now)

    def on_moved(self, request: RequestView, source: ReplicaId, target: ReplicaId, now: float) -> None:
        """Record that the request is at its target."""
        self._put(request, target)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Record the requests' times from first admission to end, and forget the requests."""
        for request in requests:
            if request in self._place:
                self._count(self._place.pop(request), request, -1)
            began_at = self._began_at.pop(request, None)
            if began_at is not None:
                count, total = self._times.get(request.adapter, (0, 0.0))
                self._times[request.adapter] = count + 1, total + now - began_at

    def _put(self, request: RequestView, replica_id: ReplicaId) -> None:
        before = self._place.get(request)
        if before is not None:
            self._count(before, request, -1)
        self._place[request] = replica_id
        self._count(replica_id, request, 1)

    def _count(self, replica_id: ReplicaId, request: RequestView, change: int) -> None:
        counts = self._counts[replica_id]
        counts[request.adapter] += change
        if not counts[request.adapter]:
            del counts[request.adapter]

    def _pair(self, pool: Sequence[ReplicaLoadView]) -> tuple[ReplicaLoadView, ReplicaLoadView] | None:
        """Return (source, target), the replicas between which requests move; None if neither the memory in use nor the
        number of requests is too uneven.
        """
        config, counts = self._config, self._counts
        used = {one.replica_id: 1.0 - one.free_blocks / one.num_blocks for one in pool}
        fullest, emptiest = (choose(pool, key=lambda one: used[one.replica_id]) for choose in (max, min))
        if used[fullest.replica_id] >= config.full_fraction > used[emptiest.replica_id]:
            return fullest, emptiest
        numbers = {one.replica_id: sum(counts[one.replica_id].values()) for one in pool}
        most, fewest = (choose(pool, key=lambda one: numbers[one.replica_id]) for choose in (max, min))
        is_uneven = numbers[most.replica_id] - fmean(numbers.values()) >= config.more_requests
        return (most, fewest) if is_uneven else None

    def _moves(self, pool: Sequence[ReplicaLoadView]) -> Iterable[Move]:
        pair = self._pair(pool) if len(pool) > 1 else None
        if pair is None:
            return []
        source, target = pair
        here, there = (self._counts[one.replica_id].copy() for one in (source, target))
        source_s, target_s = (sum(self._time_s(name) * count for name, count in one.items()) for one in (here, there))
        names = {name for name in (*there, *target.loaded_adapters) if name}
        movable = [one for one, place in self._place.items() if place == source.replica_id and _can_move(one)]
        movable.sort(key=lambda one: (one.adapter not in names, here[one.adapter], one.adapter))
        moved = []
        for request in movable:
            is_new = bool(request.adapter) and request.adapter not in names
            if is_new and target.max_loras and len(names) >= target.max_loras:
                continue
            time_s = self._time_s(request.adapter)
            if target_s + time_s + self._config.move_s >= source_s:
                break
            source_s, target_s = source_s - time_s, target_s + time_s + self._config.move_s
            names.add(request.adapter)
            if not request.is_resident:  # `on_moved` counts a running request at the target
                self._put(request, target.replica_id)
            moved.append(Move(request, target.replica_id, "fewer batches there"))
        return moved

    def _time_s(self, adapter: str) -> float:
        count, total = self._times.get(adapter, (0, 0.0))
        return total / count if count else self._config.default_s


def _can_move(request: RequestView) -> bool:
    return request.is_prefill_complete if request.is_resident else not request.is_swapped


SPEC = PolicySpec(
    name="dlora_migration",
    layer=Layer.REPLICASET_SCHEDULER,
    config=DloraMigrationConfig,
    build=DloraMigration,
    summary=(
        "Each arriving request to the replica with the fewest batches to run; requests, and then their adapters, move "
        "when loads become uneven."
    ),
    source="dLoRA (Wu et al., OSDI'24); code LLMServe/dLoRA-artifact",
    advice=(
        "Use it with adapters on several replicas whose requests differ in length: migration corrects placements made "
        "without knowing the lengths. Not with short requests, which end before the next check, or over slow links."
    ),
)
