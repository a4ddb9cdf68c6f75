"""Observers that turn moves of requests between replicas into rows of the transfers table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from vajra_py.contract import ReplicaId, RequestView
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.metrics.tables.transfers import (
    CALLED_OFF,
    DONE,
    ENDED,
    HAND_OFF,
    MIGRATION,
    MOVE,
    RECOMPUTED,
    STAYED,
    UNFINISHED,
    TransfersBuilder,
)
from vajra_py.runtime.serving.transfers import KV_LOST, REQUEST_ENDED

if TYPE_CHECKING:
    from vajra_py.runtime.serving.controller import Controller

_NEVER = float("nan")
_NO_REPLICA = -1
GIVEN_UP = "its blocks were given to others"
COMPUTING, AT_SOURCE, IN_TRANSFER, AT_TARGET = STAGES = "computing", "held", "in_transfer", "at_target"
"""Stages of a request's journey: running while its KV is copied, held at the source, KV in transfer, waiting at the
target to be admitted.
"""


class Paths(Struct, frozen=True):
    """Links between the replicas of one replicaset."""

    pools: Sequence[str]
    """Pool of each replica."""
    bytes_per_token: int
    has_own_links: bool
    """True if each replica's own links have limited bandwidth."""
    has_shared_link: bool

    def link(self, source: int, target: int) -> str:
        """Return the names of the bandwidth-limited links that a transfer uses, separated by commas."""
        own = [f"out {source}", f"in {target}"] if self.has_own_links else []
        return ", ".join([*own, *(["shared"] if self.has_shared_link else [])])

    def pool(self, replica_id: int) -> str:
        """Return the name of a replica's pool; empty if it has none."""
        return self.pools[replica_id] if replica_id >= 0 else ""


def paths_of(controller: Controller) -> dict[str, Paths]:
    """Return the paths of each replicaset whose requests may move, by name."""
    found = {}
    for name, replicaset in controller.replicasets.items():
        rules = replicaset.hand_off
        if rules is not None:
            pools = [replica.parts.pool for replica in replicaset.replicas]
            links = rules.links
            own, shared = links.bandwidth is not None, links.shared_bandwidth is not None
            found[name] = Paths(pools, rules.bytes_per_token, own, shared)
    return found


class _Journey(Struct):
    """State of a request that is moving: the fields of its current row of the transfers table, and the number of its
    transfers that have begun (`stage`).
    """

    request: RequestView
    kind: str
    source: int
    target: int = _NO_REPLICA
    held_at: float = _NEVER
    start_at: float = _NEVER
    end_at: float = _NEVER
    arrived_at: float = _NEVER
    num_tokens: int = 0
    stage: int = 0
    asked_for: str = ""
    """Reason given by the replicaset scheduler."""
    was_cut: bool = False
    """True if a copy was cancelled and its row has been written."""

    @property
    def is_live(self) -> bool:
        """True while the request continues to run at its source."""
        return self.held_at != self.held_at

    @property
    def is_sent(self) -> bool:
        """True if a transfer of its KV has begun."""
        return self.start_at == self.start_at

    @property
    def has_arrived(self) -> bool:
        """True if all of the request's KV has arrived at the target."""
        return self.arrived_at == self.arrived_at

    @property
    def stage_now(self) -> str:
        """Current stage, one of `STAGES`."""
        if self.is_live:
            return COMPUTING
        return AT_TARGET if self.has_arrived else IN_TRANSFER if self.is_sent else AT_SOURCE


class MovementRows(Observer):
    """Builds rows of the transfers table from events of moving requests, and passes each complete row to `on_row`."""

    wants_step_ends = False

    def __init__(self, paths: Mapping[str, Paths]) -> None:
        self._paths = paths
        self._journeys: dict[int, _Journey] = {}
        """Current journeys, by request index."""

    def on_row(self, request_id: str, row: Mapping[str, Any]) -> None:
        """Receive a complete row, which has a value for each column except `request_id`."""

    def num_on_their_way(self, replicaset: str) -> Counter[str]:
        """Return the number of a replicaset's moving requests by stage (one of `STAGES`)."""
        return Counter(one.stage_now for one in list(self._journeys.values()) if one.request.replicaset == replicaset)

    # Departure and transfer

    def on_held(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Record that a request stopped running at its source. If the request was not moving yet, a hand-off begins."""
        journey = self._journeys.get(request.index)
        if journey is None:
            journey = self._journeys[request.index] = _Journey(request, HAND_OFF, replica_id)
        journey.held_at = now

    def on_migration_begun(
        self, request: RequestView, source: ReplicaId, target: ReplicaId, reason: str, now: float
    ) -> None:
        """Begin a migration."""
        self._journeys[request.index] = _Journey(request, MIGRATION, source, target, asked_for=reason)

    def on_transfer(
        self, request: RequestView, source: ReplicaId, target: ReplicaId, num_tokens: int, now: float
    ) -> None:
        """Record the start of a KV transfer or, if the transfer has begun before, its new number of tokens. If the
        request's prompt is still being computed (`hand_off.overlap`), the transfer begins a journey.
        """
        journey = self._journeys.get(request.index)
        if journey is None:
            journey = self._journeys[request.index] = _Journey(request, HAND_OFF, source)
        # `on_transfer` is called again for an open transfer (`end_at` is NaN) if the request leaves with fewer tokens
        # than announced.
        if journey.is_sent and journey.end_at != journey.end_at:
            journey.num_tokens = num_tokens
            return
        journey.target, journey.start_at, journey.num_tokens = target, now, num_tokens
        journey.stage += 1

    def on_transfer_end(
        self, request: RequestView, source: ReplicaId, target: ReplicaId, failure: str, now: float
    ) -> None:
        """Record the end of a transfer. Write its row if it copied a running request's KV, or if it was cancelled or
        failed. Exception: if a transfer failed because a held request ended, `on_ended` writes the row.
        """
        journey = self._journeys.get(request.index)
        if journey is None:
            return
        if not failure:
            journey.end_at = now
        if journey.is_live:
            self._row(journey, CALLED_OFF if failure else DONE, failure or journey.asked_for, now)
            journey.was_cut = bool(failure)
            if journey.kind == HAND_OFF:  # the request's next transfer or hold begins a new journey
                del self._journeys[request.index]
        elif failure and failure != REQUEST_ENDED:
            self._hold_again(journey, failure, now)

    def on_arrived(self, request: RequestView, source: ReplicaId, target: ReplicaId, now: float) -> None:
        """Record that all of the request's KV has arrived at the target."""
        journey = self._journeys.get(request.index)
        if journey is not None:
            journey.arrived_at = now

    def on_admitted(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Write the row of a request that was admitted at its target."""
        journey = self._journeys.get(request.index)
        if journey is not None and journey.has_arrived:
            self._close(journey, DONE, journey.asked_for, now)

    def on_moved(
        self, request: RequestView, source: ReplicaId | None, target: ReplicaId | None, reason: str, now: float
    ) -> None:
        """Write the row of the move of a waiting request."""
        came_from, goes_to = (_NO_REPLICA if one is None else one for one in (source, target))
        journey = _Journey(request, MOVE, came_from, goes_to, start_at=now, end_at=now, arrived_at=now)
        self._row(journey, DONE, reason, now)

    # Interruptions

    def on_stayed(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Write the row of a request that stays at its source, if a transfer had begun or the request was held for some
        time.
        """
        journey = self._journeys.get(request.index)
        if journey is None:
            return
        if journey.is_sent or now > journey.held_at:
            self._row(journey, STAYED, KV_LOST if journey.is_sent else "", now)
        del self._journeys[request.index]

    def on_migration_aborted(
        self, request: RequestView, source: ReplicaId, target: ReplicaId, reason: str, now: float
    ) -> None:
        """End an aborted migration, and write its row unless a row was already written for its cancelled copy
        (`was_cut`).
        """
        journey = self._journeys.pop(request.index, None)
        if journey is not None and not journey.was_cut:
            self._row(journey, CALLED_OFF, reason, now)

    def on_preempted(self, request: RequestView, mode: str, now: float) -> None:
        """Write the row of a request whose KV was given up at the target before the request was admitted. A migrating
        request that is preempted at its source gets its row from a later event.
        """
        journey = self._journeys.get(request.index)
        if journey is not None and journey.has_arrived:
            self._close(journey, RECOMPUTED, GIVEN_UP, now)

    def on_requeued(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Write the row of a request whose replica failed."""
        journey = self._journeys.get(request.index)
        if journey is not None:
            self._close(journey, RECOMPUTED, KV_LOST, now)

    def on_replica_lost(self, replicaset: str, replica_id: ReplicaId, detail: str, now: float) -> None:
        """Write the rows of requests whose KV was in transfer to the lost replica, and mark the requests as held
        again.
        """
        for journey in self._at(replicaset):
            if journey.is_sent and not journey.has_arrived and journey.target == replica_id:
                self._hold_again(journey, KV_LOST, now)

    def on_cache_reset(
        self, replicaset: str, replica_id: ReplicaId, requests: Sequence[RequestView], now: float
    ) -> None:
        """Write the rows of the requests whose KV was on the replica or in transfer to it."""
        self.on_replica_lost(replicaset, replica_id, "", now)
        for journey in self._at(replicaset):
            is_there = replica_id == (journey.target if journey.has_arrived else journey.source)
            if is_there and not journey.is_live:
                self._close(journey, RECOMPUTED, KV_LOST, now)

    def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
        """Write the row of a request that ended while moving."""
        journey = self._journeys.pop(request.index, None)
        if journey is not None:
            self._row(journey, ENDED, f"{reason.value}: {detail}" if detail else reason.value, now)

    def on_run_end(self, now: float) -> None:
        """Write the rows of requests that are still moving."""
        for journey in self._journeys.values():
            self._row(journey, UNFINISHED, "", now)
        self._journeys.clear()

    # Rows

    def _at(self, replicaset: str) -> list[_Journey]:
        return [one for one in self._journeys.values() if one.request.replicaset == replicaset]

    def _hold_again(self, journey: _Journey, failure: str, now: float) -> None:
        self._row(journey, CALLED_OFF, failure, now)
        journey.held_at = now
        if journey.kind is HAND_OFF:
            journey.target = _NO_REPLICA

    def _close(self, journey: _Journey, outcome: str, reason: str, now: float) -> None:
        self._row(journey, outcome, reason, now)
        del self._journeys[journey.request.index]

    def _row(self, journey: _Journey, outcome: str, reason: str, now: float) -> None:
        """Pass a complete row to `on_row`, and reset the journey's transfer (times and number of tokens) for the next
        row.
        """
        request, source, target = journey.request, journey.source, journey.target
        paths = self._paths[request.replicaset]
        self.on_row(
            request.request_id,
            {
                "index": request.index,
                "replicaset": request.replicaset,
                "kind": journey.kind,
                "stage": journey.stage,
                "is_live": journey.is_live and journey.kind is MIGRATION,
                "source_replica_id": source,
                "source_pool": paths.pool(source),
                "target_replica_id": target,
                "target_pool": paths.pool(target),
                "held_at": journey.held_at,
                "start_at": journey.start_at,
                "end_at": journey.end_at,
                "arrived_at": journey.arrived_at,
                "over_at": now,
                "num_tokens": journey.num_tokens,
                "num_bytes": journey.num_tokens * paths.bytes_per_token,
                "link": paths.link(source, target) if journey.is_sent and journey.kind is not MOVE else "",
                "outcome": outcome,
                "reason": reason,
            },
        )
        journey.start_at = journey.end_at = journey.arrived_at = _NEVER
        journey.num_tokens = 0


class MovementLog(MovementRows):
    """Collects rows into a table; `on_run_end` completes the rows of requests that are still moving."""

    def __init__(self, paths: Mapping[str, Paths]) -> None:
        super().__init__(paths)
        self.table = TransfersBuilder()

    def on_row(self, request_id: str, row: Mapping[str, Any]) -> None:
        """Append the row to the table."""
        self.table.append(request_id, row)
