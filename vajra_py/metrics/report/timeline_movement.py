"""Moves of requests in a timeline: transfers as spans on both replicas with a flow between them, and the times in which
requests do not run because they are moving.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from vajra_py.metrics.report.timeline_events import Event, ReplicaKey, free_lane, meta, nanoseconds, span
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.metrics.tables.transfers import MOVE

Row: TypeAlias = Mapping[str, Any]
_OUT, _IN = 1_000_000, 2_000_000
"""First thread ids of outgoing and incoming transfers of a replica; smaller ids belong to steps."""
_STATED = ("kind", "stage", "num_tokens", "num_bytes", "link", "outcome", "reason")


@dataclass(frozen=True, slots=True)
class Stop:
    """Interval in which a request did not run because it was moving, in nanoseconds."""

    name: str
    start: int
    end: int


def stops_of(rows: list[Row]) -> list[Stop]:
    """Return the intervals in which a request was held, in transfer, or waiting at a target, given its rows of the
    transfers table.
    """
    found = []
    for row in rows:
        held_at, start_at, arrived_at, over_at = (row[key] for key in ("held_at", "start_at", "arrived_at", "over_at"))
        if math.isnan(held_at):
            continue
        sent_at = over_at if math.isnan(start_at) else max(start_at, held_at)
        there_at = over_at if math.isnan(arrived_at) else arrived_at
        target = row["target_replica_id"]
        for name, start, end in (
            ("held", held_at, sent_at),
            (f"in transfer to replica {target}", sent_at, there_at),
            (f"waiting at replica {target}", there_at, over_at),
        ):
            if nanoseconds(end) > nanoseconds(start):
                found.append(Stop(name, nanoseconds(start), nanoseconds(end)))
    return found


def replicas_of(rows: list[Row]) -> set[ReplicaKey]:
    """Return the sources and targets of the KV transfers."""
    sent = [row for row in rows if _is_sent(row)]
    return {(row["replicaset"], row[f"{end}_replica_id"]) for row in sent for end in ("source", "target")}


def transfer_events(
    rows: list[Row], processes: Mapping[ReplicaKey, int], start_at: float, end_at: float
) -> Iterator[Event]:
    """Yield, for each transfer between `start_at` and `end_at` (seconds), a span on both replicas and a flow between
    them.

    Simultaneous transfers of a replica are on separate lanes, like steps.
    """
    lanes: dict[tuple[int, int], list[int]] = {}
    sent = sorted((row for row in rows if _is_sent(row)), key=lambda row: float(row["start_at"]))
    for number, row in enumerate(sent):
        over_at = row["over_at"] if math.isnan(row["arrived_at"]) else row["arrived_at"]
        if over_at < start_at or row["start_at"] > end_at:
            continue
        start, over = nanoseconds(row["start_at"]), nanoseconds(over_at)
        stated = {name: row[name] for name in _STATED if row[name] != ""}
        ends = (("source", _OUT, "to", "target"), ("target", _IN, "from", "source"))
        tracks = []
        for end, first, word, other in ends:
            pid = processes[row["replicaset"], row[f"{end}_replica_id"]]
            own = lanes.setdefault((pid, first), [])
            lane = free_lane(own, start)
            if lane == len(own):
                own.append(0)
                what = "KV out" if first == _OUT else "KV in"
                yield meta("thread_name", pid, first + lane, {"name": what + (f", lane {lane + 1}" if lane else "")})
                yield meta("thread_sort_index", pid, first + lane, {"sort_index": first + lane})
            own[lane] = max(over, start + 1)
            tracks.append((pid, first + lane))
            name = f"{row['request_id']} {word} replica {row[f'{other}_replica_id']}"
            yield span(name, tracks[-1], start, over, stated)
        yield from _flow(number, tracks, start, max(start, over - 1))


def _flow(number: int, tracks: list[tuple[int, int]], start: int, end: int) -> Iterator[Event]:
    """Yield the start and end of a flow arrow; its end lies within the target's span."""
    for phase, (pid, tid), at in (("s", tracks[0], start), ("f", tracks[1], end)):
        event = {"ph": phase, "cat": "kv", "name": "KV", "id": number, "pid": pid, "tid": tid, "ts": at / 1000}
        yield event if phase == "s" else {**event, "bp": "e"}


def _is_sent(row: Row) -> bool:
    return row["kind"] != MOVE and not math.isnan(row["start_at"])


def transfer_rows(run: RunData) -> list[Row]:
    """Return the rows of the run's transfers table, in its order."""
    rows: list[Row] = run.transfers().to_pylist()
    return rows
