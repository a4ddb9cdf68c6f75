"""Decision log: what the policies decided, in a Parquet file of records; a run of repeated decode steps is one record.

A record says what changed: who joined and left the decodes since the replica's record before it, the chunks, who was preempted,
who ended, and when the steps of a run ended. `decision_reader` makes a row for each step of it. The same run gives the same
bytes: no time of writing, and decisions come before anything that depends on the machine.
"""

from __future__ import annotations

import io
import json
import os
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np

from vajra_py.contract import RequestView
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.latency.packed_times import PackedTimes
from vajra_py.runtime.records.decision_journal import RECORDS_PER_BATCH, Batch, Journal, journal_path, read_journal
from vajra_py.runtime.records.record_lists import list_array, reordered
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.requests.running_set import NO_CHANGES, PoolChanges
from vajra_py.runtime.step.plan import StepPlan, in_batch_order
from vajra_py.runtime.support.clock import TICKS_PER_SECOND

RECORDS_AT_ONCE = 32_768
"""Records that are kept until they are written together."""

SCALARS = (
    *("replica_id", "step", "num_steps", "status", "num_decodes", "decodes_at"),
    *("free_blocks", "num_waiting", "num_waiting_after", "num_running"),
)
"""Whole numbers of a record, beside its replicaset, times and notes. `decodes_at`: how many chunks stand before the decodes."""
CAME_BACK, ONLY_PREEMPTED, NEVER_CAME_BACK = 0, 1, 2
"""A record's `status`."""
LISTS = {
    "growth": ("growth",),
    "arrivals": ("arrived",),
    "joined": ("joined", "joined_order", "joined_computed"),
    "left": ("left",),
    "chunks": ("chunk", "chunk_tokens", "chunk_computed", "chunk_kind", "chunk_after"),
    "preempted": ("preempted", "preempted_mode"),
    "finished": ("finished", "finished_reason"),
}
"""Lists of a record: the columns of each, one number an entry. Requests are named by index; `chunk_after`: how many decodes stand
before it; -1: before it if it is none of the first `decodes_at` chunks, else none of them."""
KINDS = ("running", "admitted", "resumed")
MODES = ("recompute", "swap")
REASONS = tuple(reason.value for reason in EndReason)
NUMBER_TYPE = {"growth": np.int32, "chunk_kind": np.int8, "preempted_mode": np.int8, "finished_reason": np.int8}
"""Of the lists' columns; the others are of 64 bits."""

_KIND_CODES, _MODE_CODES, _REASON_CODES = (
    {name: code for code, name in enumerate(names)} for names in (KINDS, MODES, REASONS)
)
Numbers: TypeAlias = Sequence[int]


def open_binary(path: Path) -> BinaryIO:
    """A new file to write bytes to."""
    return path.open("wb")


class DecisionLog(Observer):
    """Writes `decisions.parquet` while the run goes on; the file appears under its name when it is whole, at the close.

    Until then a journal beside it has its records, for who reads what a killed process left.
    """

    wants_step_ends = False
    wants_plans = True

    def __init__(self, path: Path, open_file: Callable[[Path], BinaryIO] = open_binary) -> None:
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._open_file = open_file
        self._file: _Counted | None = None
        self._writer: Any = None
        self._journal: Journal | None = None
        self._open: dict[tuple[str, int, int], tuple[StepPlan, PoolMoves]] = {}
        self._records = _Records()

    def on_arrival(self, request: RequestView, now: float) -> None:
        """Records name requests by index; its id goes with the next record."""
        self._records.ids.append(request.request_id)
        self._records.arrived.append(request.index)

    def on_plan(self, replicaset: str, plan: StepPlan, changes: PoolChanges) -> None:
        """Keep what was decided until the step comes back; a step that only preempted is written at once."""
        moves = _moves(plan, changes)
        if plan.num_requests:
            self._open[replicaset, plan.replica_id, plan.step_index] = plan, moves
        else:
            self._keep(replicaset, plan, moves, _ONLY_PREEMPTED)

    def on_plan_end(
        self, replicaset: str, plan: StepPlan, finished: Sequence[tuple[Request, EndReason]], now: int
    ) -> None:
        """The step is complete with its end."""
        _, moves = self._open.pop((replicaset, plan.replica_id, plan.step_index))
        ended: Numbers = ()
        if finished:
            ended = [number for one, reason in finished for number in (one.index, _REASON_CODES[reason.value])]
        self._keep(replicaset, plan, moves, _End(CAME_BACK, (now,), (), ended, plan.num_waiting))

    def on_plan_repeats(
        self, replicaset: str, plan: StepPlan, ended_at: Sequence[int], growth: Sequence[int], following: StepPlan
    ) -> None:
        """One record for all these steps."""
        _, moves = self._open.pop((replicaset, plan.replica_id, plan.step_index))
        self._keep(replicaset, plan, moves, _End(CAME_BACK, ended_at, growth, (), following.num_waiting))
        self._open[replicaset, plan.replica_id, following.step_index] = following, NO_MOVES

    def close(self) -> None:
        """Write what never came back, and finish the file."""
        for (replicaset, _, _), (plan, moves) in self._open.items():
            self._keep(replicaset, plan, moves, _NEVER_CAME_BACK)
        self._open.clear()
        self._flush()
        if self._writer is None:
            self._writer = self._new_writer()
        self._writer.close()
        assert self._file is not None
        self._file.close()
        os.replace(self._partial, self._path)
        if self._journal is not None:
            self._journal.close()
            journal_path(self._path).unlink(missing_ok=True)

    def _keep(self, replicaset: str, plan: StepPlan, moves: PoolMoves, end: _End) -> None:
        records = self._records
        records.append(replicaset, plan, moves, end)
        if len(records.notes) - records.num_journaled >= RECORDS_PER_BATCH:
            if self._journal is None:
                self._journal = Journal(self._open_file(journal_path(self._path)))
            self._journal.write(records.take_batch())
        if len(records.notes) >= RECORDS_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        records, self._records = self._records, _Records()
        self._records.ids, self._records.arrived = records.take_back_arrived()
        if not records.notes:
            return
        if self._writer is None:
            self._writer = self._new_writer()
        self._writer.write_table(records.table(), row_group_size=RECORDS_AT_ONCE)

    def _new_writer(self) -> Any:
        import pyarrow.parquet as pq

        numbers = [column for columns in LISTS.values() for column in columns]
        deltas = ("step", "gap", "duration", "drift")
        self._file = _Counted(self._open_file(self._partial))
        return pq.ParquetWriter(
            self._file,
            schema(),
            compression="zstd",
            compression_level=3,
            use_dictionary=[
                *("replicaset", "notes", *(name for name in SCALARS if name not in deltas)),
                *(f"{name}.list.element" for name in ("bends", *numbers) if name not in _DISTINCT),
            ],
            column_encoding={
                **dict.fromkeys(deltas, "DELTA_BINARY_PACKED"),
                **{f"{name}.list.element": "DELTA_BINARY_PACKED" for name in _DISTINCT},
            },
            version="2.6",
        )


_DISTINCT = ("arrived", "joined", "joined_order", "left", "chunk", "finished")
"""Lists whose numbers hardly repeat, but are close to those around them."""
_FIELDS = ("replicaset", "formed", *SCALARS, *(f"num_{name}" for name in LISTS))


def journaled_tables(path: Path) -> list[Any]:
    """What the journal of an unfinished log holds, a table a batch."""
    return [_Records.of(batch).table() for batch in read_journal(journal_path(path))]


class _Records:
    """Records that are written together."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        """One text a record."""
        self.ids: list[str] = []
        self.arrived = array("q")
        """Of requests whose ids are not in a record yet."""
        self._replicasets: dict[str, int] = {}
        self._rows = bytearray()
        self._pack = Struct(f"<{len(_FIELDS)}q").pack
        self._ends = array("q")
        self._numbers = {name: array("q") for name in LISTS}
        self.num_journaled = 0
        """Records that `take_batch` has given out."""
        self._batch_starts = dict.fromkeys(("rows", "ends", "ids", *LISTS), 0)

    @classmethod
    def of(cls, batch: Batch) -> _Records:
        """The records of a journal's batch."""
        records = cls()
        num_records = len(batch.rows) // (8 * len(_FIELDS))
        records.notes, records.ids = list(batch.notes) or [""] * num_records, list(batch.ids)
        records._replicasets = {name: rank for rank, name in enumerate(batch.replicasets)}
        records._rows += batch.rows
        records._ends.frombytes(batch.ends)
        for name, numbers in batch.lists.items():
            records._numbers[name].frombytes(numbers)
        return records

    def take_batch(self) -> Batch:
        """The records since this was last asked; they stay here too."""
        starts = self._batch_starts
        num_ids = len(self.ids) - len(self.arrived)  # the others belong to the next record
        notes = self.notes[self.num_journaled :]
        batch = Batch(
            list(self._replicasets),
            bytes(self._rows[starts["rows"] :]),
            self._ends[starts["ends"] :].tobytes(),
            notes if any(notes) else [],
            self.ids[starts["ids"] : num_ids],
            {name: numbers[starts[name] :].tobytes() for name, numbers in self._numbers.items()},
        )
        self.num_journaled = len(self.notes)
        starts |= {"rows": len(self._rows), "ends": len(self._ends), "ids": num_ids}
        starts |= {name: len(numbers) for name, numbers in self._numbers.items()}
        return batch

    def take_back_arrived(self) -> tuple[list[str], array[int]]:
        """Ids and indices of the requests that arrived since the last record."""
        start = len(self.ids) - len(self.arrived)
        ids, self.ids = self.ids[start:], self.ids[:start]
        return ids, self.arrived

    def append(self, replicaset: str, plan: StepPlan, moves: PoolMoves, end: _End) -> None:
        """Take one record."""
        status, ended_at, growth, finished, num_waiting_after = end
        numbers, arrived = self._numbers, self.arrived
        num_arrived = len(arrived)
        joined, left, chunks = moves
        preempted: Numbers = ()
        if plan.preempted:
            preempted = [number for one, mode in plan.preempted for number in (one.index, _MODE_CODES[mode])]
        if num_arrived:
            numbers["arrivals"].extend(arrived)
            del arrived[:]
        if growth:
            numbers["growth"].extend(growth)
        if joined:
            numbers["joined"].extend(joined)
        if left:
            numbers["left"].extend(left)
        if chunks:
            numbers["chunks"].extend(chunks)
        if preempted:
            numbers["preempted"].extend(preempted)
        if finished:
            numbers["finished"].extend(finished)
        self._ends.extend(ended_at or (plan.formed_at,))
        self.notes.append(json.dumps(plan.notes, separators=(",", ":")) if plan.notes else "")
        self._rows += self._pack(
            self._replicasets.setdefault(replicaset, len(self._replicasets)),
            plan.formed_at,
            plan.replica_id,
            plan.step_index,
            len(ended_at) or 1,
            status,
            plan.num_pool_decodes,
            plan.pool_position,
            plan.free_blocks,
            plan.num_waiting,
            plan.num_waiting if num_waiting_after is None else num_waiting_after,
            plan.num_running,
            len(growth),
            num_arrived,
            len(joined) // 3,
            len(left),
            len(chunks) // 5,
            len(preempted) // 2,
            len(finished) // 2,
        )

    def table(self) -> Any:
        """The records as an Arrow table, replica by replica, in the order in which steps were formed."""
        import pyarrow as pa

        rows = np.frombuffer(self._rows, dtype=np.int64).reshape(-1, len(_FIELDS))
        names = sorted(self._replicasets)
        ranks = np.array([names.index(name) for name in self._replicasets])[rows[:, 0]]
        field = {name: rows[:, position] for position, name in enumerate(_FIELDS)}
        order = np.lexsort((field["status"] != ONLY_PREEMPTED, field["step"], field["replica_id"], ranks))
        columns: dict[str, Any] = {name: field[name][order] for name in SCALARS}
        columns["replicaset"] = pa.array(names).take(pa.array(ranks[order]))
        columns["notes"] = pa.array(self.notes).take(pa.array(order))
        num_steps = columns["num_steps"]
        ends = reordered(np.array(self._ends, dtype=np.int64), field["num_steps"], order)
        times = PackedTimes.pack(field["formed"][order], num_steps, ends)
        columns |= {"gap": times.gap, "duration": times.duration, "drift": times.drift}
        columns["bends"] = list_array(times.bends, np.maximum(num_steps - 2, 0))
        for name, members in LISTS.items():
            counts = field[f"num_{name}"]
            values = np.array(self._numbers[name], dtype=np.int64).reshape(-1, len(members))
            values = reordered(values, counts, order)
            for position, member in enumerate(members):
                numbers = values[:, position].astype(NUMBER_TYPE.get(member, np.int64))
                columns[member] = list_array(numbers, counts[order])
        places = reordered(np.arange(int(field["num_arrivals"].sum())), field["num_arrivals"], order)
        texts = pa.array(self.ids, type=pa.string()).take(pa.array(places))
        columns["arrived_ids"] = pa.ListArray.from_arrays(columns["arrived"].offsets, texts)
        arrays = [pa.array(columns[one.name], type=one.type) for one in schema()]
        return pa.Table.from_arrays(arrays, schema=schema())


class _End(NamedTuple):
    """What came of a plan."""

    status: int
    ended_at: Sequence[int] = ()
    growth: Numbers = ()
    finished: Numbers = ()
    num_waiting_after: int | None = None
    """None: as after the first."""


_ONLY_PREEMPTED, _NEVER_CAME_BACK = _End(ONLY_PREEMPTED), _End(NEVER_CAME_BACK)


class _Counted(io.RawIOBase):
    """A file to write to that knows how much was written; pyarrow asks."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = 0

    def writable(self) -> bool:
        """See `io`."""
        return True

    def write(self, data: Any) -> int:
        """See `io`."""
        self._file.write(data)
        size = memoryview(data).nbytes
        self._size += size
        return size

    def tell(self) -> int:
        """See `io`."""
        return self._size

    def close(self) -> None:
        """See `io`."""
        if not self.closed:
            self._file.close()
        super().close()


class PoolMoves(NamedTuple):
    """What a plan changed of what the reader knows: who decodes, and the chunks; flat numbers, as `LISTS` groups them."""

    joined: Numbers
    left: Numbers
    chunks: Numbers


NO_MOVES = PoolMoves((), (), ())


def _moves(plan: StepPlan, changes: PoolChanges) -> PoolMoves:
    """Taken down while the plan is fresh, since requests go on."""
    if changes is NO_CHANGES and not plan.chunks:
        return NO_MOVES
    joined: list[int] = []
    for one in changes.joined:
        # Of a step that the pool is part of, its own token counts as computed already.
        joined += (one.index, one.admitted_index, one.num_computed_tokens - (plan.num_pool_decodes > 0))
    return PoolMoves(joined, [one.index for one in changes.left], _chunks(plan))


def _chunks(plan: StepPlan) -> Numbers:
    """(request, tokens, computed before, kind, how many decodes stand before it or -1) of each, in batch order."""
    numbers: list[int] = []
    if not (plan.running_in_order and plan.pool is not None):
        for one, num_tokens, computed, kind in plan.chunks:
            numbers += (one.index, num_tokens, computed, _KIND_CODES[kind], -1)
        return numbers
    admissions = [one.admitted_index for one in plan.pool.in_admission_order()]
    for one, num_tokens, computed, kind in in_batch_order(plan.chunks, (), 0, running_in_order=True):
        before = bisect_left(admissions, one.admitted_index) if kind == "running" else len(admissions)
        numbers += (one.index, num_tokens, computed, _KIND_CODES[kind], before)
    return numbers


def schema() -> Any:
    """Columns of the file."""
    import pyarrow as pa

    fields = [("replicaset", pa.string()), *((name, pa.int64()) for name in SCALARS)]
    fields += [*((name, pa.int64()) for name in ("gap", "duration", "drift")), ("bends", pa.list_(pa.int64()))]
    for column in chain.from_iterable(LISTS.values()):
        fields.append((column, pa.list_(pa.from_numpy_dtype(NUMBER_TYPE.get(column, np.int64)))))
    fields += [("notes", pa.string()), ("arrived_ids", pa.list_(pa.string()))]
    return pa.schema(fields, metadata={"ticks_per_second": str(TICKS_PER_SECOND)})
