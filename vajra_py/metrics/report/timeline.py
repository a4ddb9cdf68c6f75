"""Export replicas and requests over time in the trace-event format of ui.perfetto.dev.

Tracks, from the tables and the decision log of a run:

* per replica its steps, with their contents as arguments; steps in flight at the same time (pipeline stages) are on
  separate lanes;
* per replica its outgoing and incoming transfers, connected by flow arrows;
* per replica counters: waiting and running requests, KV blocks in use, decode and prefill tokens;
* per replicaset (or pool) with a scaler a counter of replicas that are starting, up, or draining;
* marks for swapped policies, lost and restored replicas, cache resets, and replicasets that went out of service;
* per request one line with a span for the whole request; inside it are spans for the time deferred by admission, the
  time in the queue, each prefill chunk, each unbroken sequence of decode steps, each preemption, and, if the request
  moves, each period in which it is held at the source, in transfer, or waiting at the target.

Times are microseconds on the run's clock with nanosecond precision. Spans of a track nest: an inner span ends no later
than its outer span. For a run without a decision log, the spans of requests (queue, prefill, decode) come from the
requests table.
"""

from __future__ import annotations

import gzip
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from vajra_py.errors import RunError
from vajra_py.metrics.report.timeline_events import Event, ReplicaKey, free_lane, meta, nanoseconds, span
from vajra_py.metrics.report.timeline_movement import (
    Stop,
    replicas_of,
    stops_of,
    transfer_events,
    transfer_rows,
)
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.metrics.tables.replicas import ACTIVE

_REQUEST_COLUMNS = (
    "request_id",
    "index",
    "replicaset",
    "replica_id",
    "tenant",
    "slo_class",
    "num_prompt_tokens",
    "num_output_tokens",
    "num_cached_tokens",
    "num_preemptions",
    "arrived_at",
    "admitted_at",
    "first_token_at",
    "ended_at",
    "reason",
)


_ADMISSION_COLUMNS = ("admission", "num_deferrals", "deferred_at", "deferred_s")


@dataclass(frozen=True, slots=True)
class TimelineOptions:
    """Selection of the part of a run to write."""

    start_at: float = -math.inf
    end_at: float = math.inf
    """End of the displayed interval, in seconds on the run's clock."""
    max_requests: int = 5000
    """Maximum number of requests, in order of arrival; 0 leaves requests out. Viewers become slow with more than some
    thousands.
    """

    def __post_init__(self) -> None:
        if not self.start_at < self.end_at:
            raise RunError(
                f"timeline: an empty stretch of time ([{self.start_at}, {self.end_at}]). Its start must lie before its end."
            )
        if self.max_requests < 0:
            raise RunError(f"timeline: a negative number of requests ({self.max_requests}). Allowed: 0 or more.")


def write_timeline(run: RunData, path: str | Path, options: TimelineOptions | None = None) -> int:
    """Write a run's timeline and return the number of its events. The file is gzipped if its name ends in `.gz`;
    viewers can open gzipped files.

    Equal runs give equal bytes. Events are streamed to the file, so memory grows with the number of requests, not of
    steps.
    """
    count = 0
    with _open(Path(path)) as out:
        out.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for event in timeline_events(run, options):
            out.write(",\n" if count else "")
            out.write(json.dumps(event, separators=(",", ":"), allow_nan=False))
            count += 1
        out.write("\n]}\n")
    return count


def timeline_events(run: RunData, options: TimelineOptions | None = None) -> Iterator[Event]:
    """Yield the events that `write_timeline` writes."""
    chosen = options or TimelineOptions()
    requests = _requests(run, chosen)
    transfers = transfer_rows(run)
    replicas = sorted(_replicas(run, requests) | replicas_of(transfers))
    processes = {key: 2 * i + 1 for i, key in enumerate(replicas)}
    yield from _process_names(run, processes)
    yield from _step_events(run, processes, chosen)
    yield from transfer_events(transfers, processes, chosen.start_at, chosen.end_at)
    yield from _marks(run, processes, chosen)
    yield from _replica_counts(run, 2 * len(processes) + 1, chosen)
    if not requests:
        return
    moved: dict[str, list[Any]] = {}
    for row in transfers:
        moved.setdefault(row["request_id"], []).append(row)
    lines = {
        request_id: _Line(facts, processes, stops_of(moved.get(request_id, [])))
        for request_id, facts in requests.items()
    }
    for line in lines.values():
        yield from line.opening()
    until = _run_end(run)
    if run.has_decisions:
        for record in run.decisions():
            yield from _decided(record, lines, until)
        for line in lines.values():
            yield from line.closing(until)
    else:
        for line in lines.values():
            yield from line.from_table(until)


@dataclass(slots=True)
class _Line:
    """Spans of one request, built from its steps in order; `facts` is the request's row in the requests table."""

    facts: Mapping[str, Any]
    processes: Mapping[ReplicaKey, int]
    stops: Sequence[Stop] = ()
    """Intervals, in order, in which the request did not run because it was moving."""
    decode: list[int] | None = None
    """[start, end, number of steps] of the current unbroken sequence of decode steps; times in nanoseconds."""
    preempted: tuple[int, str] | None = None
    """(Start in nanoseconds, mode) of the current preemption; None if not preempted."""
    is_admitted: bool = False
    furthest: int = 0
    """Largest number of computed tokens with which a step began; a step that begins with fewer recomputes tokens."""
    ended_ns: int | None = field(default=None)

    def __post_init__(self) -> None:
        ended_at = self.facts["ended_at"]
        self.ended_ns = nanoseconds(ended_at) if math.isfinite(ended_at) else None

    @property
    def pid(self) -> int:
        """Trace process id of the request's replica; requests that never reached a replica share one id."""
        key = (self.facts["replicaset"], self.facts["replica_id"])
        return self.processes.get(key, -1) + 1

    def opening(self) -> Iterator[Event]:
        """Yield the events that name the line, and a span for each of `stops`."""
        tid = self.facts["index"] + 1
        yield meta("thread_name", self.pid, tid, {"name": str(self.facts["request_id"])})
        yield meta("thread_sort_index", self.pid, tid, {"sort_index": tid})
        for stop in self.stops:
            yield self._span(stop.name, stop.start, stop.end, {})

    def chunk(self, step: tuple[int, int, int], num_tokens: int, computed_before: int) -> Iterator[Event]:
        """Record a step (start and end in nanoseconds, index) that computed `num_tokens` tokens of the request, and
        yield the spans that this step completes.
        """
        start, end, step_index = step
        if not self.is_admitted:
            self.is_admitted = True
            yield from self._queue(start)
        if self.preempted is not None:
            since, mode = self.preempted
            self.preempted = None
            yield self._span(f"preempted ({mode})", since, start, {})
        if self.decode is not None and any(self.decode[1] <= stop.start < start for stop in self.stops):
            yield from self._flush_decode()
        is_decode = computed_before >= max(self.facts["num_prompt_tokens"], self.furthest)
        self.furthest = max(self.furthest, computed_before)
        if is_decode:
            if self.decode is None:
                self.decode = [start, end, 0]
            self.decode[1] = max(self.decode[1], end)
            self.decode[2] += 1
            return
        yield from self._flush_decode()
        arguments = {"tokens": num_tokens, "computed before": computed_before, "step": step_index}
        yield self._span(f"prefill {num_tokens}", start, end, arguments)

    def preempt(self, at: int, mode: str) -> Iterator[Event]:
        """Record a preemption, and yield the span of the decode steps that the preemption interrupts."""
        yield from self._flush_decode(at)
        self.preempted = (at, mode)

    def closing(self, until: int) -> Iterator[Event]:
        """Yield the spans that are still open and the span of the whole request; they end with the request or, if it
        has not ended, with the run (`until`).
        """
        end = self.ended_ns if self.ended_ns is not None else max(until, self._arrived())
        if not self.is_admitted:
            yield from self._queue(end)
        if self.preempted is not None:
            yield self._span(f"preempted ({self.preempted[1]})", self.preempted[0], end, {})
        yield from self._flush_decode()
        yield self._whole(end)

    def from_table(self, until: int) -> Iterator[Event]:
        """Yield coarse spans, from the request's row of the requests table alone."""
        end = self.ended_ns if self.ended_ns is not None else max(until, self._arrived())
        admitted, first = self.facts["admitted_at"], self.facts["first_token_at"]
        admitted_ns = nanoseconds(admitted) if math.isfinite(admitted) else end
        first_ns = nanoseconds(first) if math.isfinite(first) else end
        yield from self._queue(admitted_ns)
        if admitted_ns < first_ns:
            yield self._span("prefill", admitted_ns, first_ns, {"tokens": self.facts["num_prompt_tokens"]})
        if first_ns < end:
            yield self._span("decode", first_ns, end, {"tokens": self.facts["num_output_tokens"]})
        yield self._whole(end)

    def _queue(self, until: int) -> Iterator[Event]:
        since = self._arrived()
        deferred_at, deferred_s = self.facts.get("deferred_at"), self.facts.get("deferred_s")
        if deferred_at is not None and math.isfinite(deferred_at):
            start = nanoseconds(deferred_at)
            since = (
                until if deferred_s is None or not math.isfinite(deferred_s) else nanoseconds(deferred_at + deferred_s)
            )
            yield self._span("deferred", start, since, {"times": self.facts["num_deferrals"]})
        if until > since and self.facts.get("admission") != "deferred":
            yield self._span("queue", since, until, {})

    def _flush_decode(self, before: int | None = None) -> Iterator[Event]:
        if self.decode is not None:
            start, end, steps = self.decode
            self.decode = None
            yield self._span("decode", start, end if before is None else min(end, before), {"steps": steps})

    def _whole(self, end: int) -> Event:
        names = (
            "tenant",
            "slo_class",
            "num_prompt_tokens",
            "num_output_tokens",
            "num_cached_tokens",
            "num_preemptions",
            "reason",
        )
        return self._span(
            str(self.facts["request_id"]), self._arrived(), end, {name: self.facts[name] for name in names}
        )

    def _span(self, name: str, start: int, end: int, arguments: Event) -> Event:
        return span(name, (self.pid, self.facts["index"] + 1), start, end, arguments)

    def _arrived(self) -> int:
        return nanoseconds(self.facts["arrived_at"])


def _decided(record: Mapping[str, Any], lines: Mapping[str, _Line], until: int) -> Iterator[Event]:
    """Yield the spans that one record of the decision log (a step) completes. A step without recorded end lasts until
    `until`, the end of the run.
    """
    ended_at = record["ended_at"]
    step = (nanoseconds(record["formed_at"]), until if ended_at is None else nanoseconds(ended_at), int(record["step"]))
    for request_id, mode in record["preempted"]:
        line = lines.get(request_id)
        if line is not None:
            yield from line.preempt(step[0], mode)
    for request_id, tokens, before, _ in record["chunks"]:
        line = lines.get(request_id)
        if line is not None:
            yield from line.chunk(step, tokens, before)


def _requests(run: RunData, options: TimelineOptions) -> dict[str, Mapping[str, Any]]:
    """Return the rows of the selected requests, by id, in order of arrival."""
    if not options.max_requests:
        return {}
    table = run.requests(*_REQUEST_COLUMNS, *(_ADMISSION_COLUMNS if run.has_admission else ()))
    arrived_at, ended_at = (table.column(name).to_numpy() for name in ("arrived_at", "ended_at"))
    inside = (arrived_at <= options.end_at) & ~(ended_at < options.start_at)
    chosen = inside.nonzero()[0][: options.max_requests]
    return {str(facts["request_id"]): facts for facts in table.take(chosen).to_pylist()}


def _replicas(run: RunData, requests: Mapping[str, Mapping[str, Any]]) -> set[ReplicaKey]:
    table = run.steps("replicaset", "replica_id").group_by(["replicaset", "replica_id"]).aggregate([])
    found = {(row["replicaset"], row["replica_id"]) for row in table.to_pylist()}
    found |= {(row["replicaset"], row["replica_id"]) for row in requests.values() if row["replica_id"] >= 0}
    return found


def _process_names(run: RunData, processes: Mapping[ReplicaKey, int]) -> Iterator[Event]:
    yield meta("process_name", 0, 0, {"name": f"{run.name}: requests that reached no replica"})
    yield meta("process_sort_index", 0, 0, {"sort_index": 2 * len(processes) + 2})
    pools = run.pool_of_replica()
    for (replicaset, replica_id), pid in processes.items():
        pool = pools.get((replicaset, replica_id))
        place = replicaset if pool is None else f"{replicaset}/{pool}"
        for own, what in ((pid, "steps"), (pid + 1, "requests")):
            yield meta("process_name", own, 0, {"name": f"{place} replica {replica_id}: {what}"})
            yield meta("process_sort_index", own, 0, {"sort_index": own})


def _step_events(run: RunData, processes: Mapping[ReplicaKey, int], options: TimelineOptions) -> Iterator[Event]:
    """Yield steps and counters, in the order of the steps table."""
    lanes: dict[int, list[int]] = {}
    for batch in run.steps().to_batches(max_chunksize=8192):
        for row in batch.to_pylist():
            start, end = row["formed_at"], row["formed_at"] + row["duration_s"]
            if end < options.start_at or start > options.end_at:
                continue
            pid = processes[row["replicaset"], row["replica_id"]]
            own = lanes.setdefault(pid, [])
            lane = free_lane(own, nanoseconds(start))
            if lane == len(own):
                own.append(0)
                yield meta("thread_name", pid, lane + 1, {"name": "steps" if not lane else f"steps, lane {lane + 1}"})
            own[lane] = nanoseconds(end)
            names = ("step_index", "num_decodes", "num_prefills", "prefill_tokens", "num_preempted", "num_finished")
            yield span(
                _step_name(row),
                (pid, lane + 1),
                nanoseconds(start),
                nanoseconds(end),
                {name: row[name] for name in names},
            )
            yield from _counters(row, pid)


def _marks(run: RunData, processes: Mapping[ReplicaKey, int], options: TimelineOptions) -> Iterator[Event]:
    """Yield marks on the affected replicas for the changes listed in the manifest."""
    for row in run.manifest.get("changes", ()):
        at_s, replicaset = row["at_s"], row["replicaset"]
        if not options.start_at <= at_s <= options.end_at:
            continue
        name, replica_id = row["what"], row.get("replica_id")
        if name == "policy":
            name = f"{row['layer']}: {row['was']['policy']} → {row['now']['policy']}"
        arguments = {key: value for key, value in row.items() if key not in ("at_s", "what")}
        for key, pid in processes.items():
            if key[0] == replicaset and replica_id in (None, key[1]):
                mark = {"ph": "i", "s": "p", "name": name, "pid": pid, "tid": 0, "ts": nanoseconds(at_s) / 1000}
                yield {**mark, "args": arguments}


def _replica_counts(run: RunData, pid: int, options: TimelineOptions) -> Iterator[Event]:
    """Yield a counter of replicas by state for each replicaset (or pool) with a scaler, at each change."""
    rows = run.replicas().to_pylist()
    if not rows:
        return
    yield meta("process_name", pid, 0, {"name": f"{run.name}: replicas"})
    yield meta("process_sort_index", pid, 0, {"sort_index": 0})
    changes: dict[tuple[float, str], dict[str, int]] = {}
    pools = run.pool_of_replica()
    for row in rows:
        pool = pools.get((row["replicaset"], row["replica_id"]))
        place = row["replicaset"] if pool is None else f"{row['replicaset']}/{pool}"
        for at, step in ((row["start_at"], 1), (row["end_at"], -1)):
            own = changes.setdefault((at, place), dict.fromkeys(ACTIVE, 0))
            if row["state"] in own:
                own[row["state"]] += step
    counts: dict[str, dict[str, int]] = {}
    for (at, place), steps in sorted(changes.items()):
        count = counts.setdefault(place, dict.fromkeys(ACTIVE, 0))
        for state, step in steps.items():
            count[state] += step
        if options.start_at <= at <= options.end_at:
            name = f"replicas of {place}"
            yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": nanoseconds(at) / 1000, "args": dict(count)}


def _counters(row: Mapping[str, Any], pid: int) -> Iterator[Event]:
    at = nanoseconds(row["formed_at"]) / 1000
    values: Mapping[str, Event] = {
        "requests": {"waiting": row["num_waiting"], "running": row["num_running"]},
        "KV blocks in use (%)": {"used": round(100 * row["used_fraction"], 3)},
        "tokens of the step": {"decode": row["decode_tokens"], "prefill": row["prefill_tokens"]},
    }
    for name, arguments in values.items():
        yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": at, "args": arguments}


def _step_name(row: Mapping[str, Any]) -> str:
    parts = []
    if row["num_decodes"]:
        parts.append(f"{row['num_decodes']} decodes")
    if row["num_prefills"]:
        parts.append(f"{row['prefill_tokens']} prefill tokens")
    return " + ".join(parts) or "empty"


def _run_end(run: RunData) -> int:
    """Return the end of the last step or of the measurement window, whichever is later, in nanoseconds."""
    table = run.steps("formed_at", "duration_s")
    ends = table.column("formed_at").to_numpy() + table.column("duration_s").to_numpy()
    return nanoseconds(max(float(ends.max()) if len(ends) else 0.0, run.window.end_at))


@contextmanager
def _open(path: Path) -> Iterator[IO[str]]:
    if path.suffix != ".gz":
        with path.open("w", encoding="utf-8") as plain:
            yield plain
        return
    # The gzip header has no name and no time, so that the same run gives the same bytes.
    with (
        path.open("wb") as raw,
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as binary,
        io.TextIOWrapper(binary, encoding="utf-8") as text,
    ):
        yield text
