"""Decision log: what the policies decided, in a Parquet file of records; a run of repeated decode steps is one record.

A record says what changed: who joined and left the decodes since the replica's record before it, the chunks, who was preempted,
who ended, and when the steps of a run ended. `decision_reader` makes a row for each step of it. The same run gives the same
bytes: no time of writing, and decisions come before anything that depends on the machine.
"""

from __future__ import annotations

import io
import json
import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from vajra_py.contract import RequestView
from vajra_py.contract.observer import EndReason
from vajra_py.latency.packed_times import PackedTimes
from vajra_py.runtime.records.decision_journal import Journal, journal_path, read_journal
from vajra_py.runtime.records.record_lists import list_array, reordered
from vajra_py.runtime.records.step_log import (
    LISTS,
    NEVER_CAME_BACK,
    ONLY_PREEMPTED,
    Batch,
    Numbers,
    StepLog,
    joined_batches,
)
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
"""Those of a record's `FIELDS` that are written as they are."""
KINDS = ("running", "admitted", "resumed")
MODES = ("recompute", "swap")
REASONS = tuple(reason.value for reason in EndReason)
NUMBER_TYPE = {"growth": np.int32, "chunk_kind": np.int8, "preempted_mode": np.int8, "finished_reason": np.int8}
"""Of the lists' columns; the others are of 64 bits."""

_KIND_CODES, _MODE_CODES, _REASON_CODES = (
    {name: code for code, name in enumerate(names)} for names in (KINDS, MODES, REASONS)
)


def open_binary(path: Path) -> BinaryIO:
    """A new file to write bytes to."""
    return path.open("wb")


class DecisionLog(StepLog):
    """Writes `decisions.parquet` while the run goes on; the file appears under its name when it is whole, at the close.

    Until then a journal beside it has its records, for who reads what a killed process left.
    """

    def __init__(self, path: Path, open_file: Callable[[Path], BinaryIO] = open_binary) -> None:
        super().__init__()
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._open_file = open_file
        self._file: _Counted | None = None
        self._writer: Any = None
        self._journal: Journal | None = None
        self._open: dict[StepPlan, tuple[str, PoolMoves]] = {}
        self._arrived: list[RequestView] = []
        """Since the last record; they go with the next."""
        self._batches: list[Batch] = []

    def on_arrival(self, request: RequestView, now: float) -> None:
        """Records name requests by index; its id goes with the next record."""
        self._arrived.append(request)

    def on_plan(self, replicaset: str, plan: StepPlan, changes: PoolChanges) -> None:
        """Keep what was decided until the step comes back; a step that only preempted is written at once."""
        is_plain = changes is NO_CHANGES and not plan.chunks
        self._open[plan] = replicaset, NO_MOVES if is_plain else _moves(plan, changes)
        if not plan.num_requests:
            self._record_without_end(replicaset, plan, ONLY_PREEMPTED)

    def on_plan_repeats(
        self, replicaset: str, plan: StepPlan, ended_at: Numbers, growth: Numbers, following: StepPlan
    ) -> None:
        """One record for all these steps."""
        super().on_plan_repeats(replicaset, plan, ended_at, growth, following)
        self._open[following] = replicaset, NO_MOVES

    def close(self) -> None:
        """Write what never came back, and finish the file."""
        for plan, (replicaset, _) in list(self._open.items()):
            self._record_without_end(replicaset, plan, NEVER_CAME_BACK)
        self.hand_on()
        self._write_group()
        self._writer.close()
        assert self._file is not None
        self._file.close()
        os.replace(self._partial, self._path)
        if self._journal is not None:
            self._journal.close()
            journal_path(self._path).unlink(missing_ok=True)

    def _record_without_end(self, replicaset: str, plan: StepPlan, status: int) -> None:
        self._ends.append(plan.formed_at)
        self._record(replicaset, plan, status, 1, plan.num_waiting, 0, *self._lists_of(plan, ()))

    def _lists_of(self, plan: StepPlan, finished: Sequence[tuple[Request, EndReason]]) -> Numbers:
        """What was decided, in numbers."""
        _, (joined, left, chunks) = self._open.pop(plan)
        lists, arrived = self._lists, self._arrived
        num_arrived = len(arrived)
        if num_arrived:
            lists["arrivals"].extend([one.index for one in arrived])
            self._ids += [one.request_id for one in arrived]
            arrived.clear()
        if joined:
            lists["joined"].extend(joined)
        if left:
            lists["left"].extend(left)
        if chunks:
            lists["chunks"].extend(chunks)
        if plan.preempted:
            lists["preempted"].extend(
                [number for one, mode in plan.preempted for number in (one.index, _MODE_CODES[mode])]
            )
        if finished:
            ended = [number for one, reason in finished for number in (one.index, _REASON_CODES[reason.value])]
            lists["finished"].extend(ended)
        self._notes.append(json.dumps(plan.notes, separators=(",", ":")) if plan.notes else "")
        num_chunks = len(chunks) // len(LISTS["chunks"])
        return num_arrived, len(joined) // 3, len(left), num_chunks, len(plan.preempted), len(finished)

    def _keep(self, batch: Batch) -> None:
        """Journal them, and write what makes a group."""
        if len(batch.rows) >= self._batch_bytes:  # the last one is in the file at once
            if self._journal is None:
                self._journal = Journal(self._open_file(journal_path(self._path)))
            self._journal.write(batch)
        self._batches.append(batch)
        if sum(one.num_records for one in self._batches) >= RECORDS_AT_ONCE:
            self._write_group()

    def _write_group(self) -> None:
        if self._writer is None:
            self._writer = self._new_writer()
        batches, self._batches = self._batches, []
        if batches:
            table = _table_of(joined_batches(batches))
            self._writer.write_table(table, row_group_size=table.num_rows)

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


def journaled_tables(path: Path) -> list[Any]:
    """What the journal of an unfinished log holds, a table a batch."""
    return [_table_of(batch) for batch in read_journal(journal_path(path))]


def _table_of(batch: Batch) -> Any:
    """The records as an Arrow table, replica by replica, in the order in which steps were formed."""
    import pyarrow as pa

    field = batch.columns()
    names = sorted(batch.replicasets)
    ranks = np.array([names.index(name) for name in batch.replicasets])[field["replicaset"]]
    order = np.lexsort((field["status"] != ONLY_PREEMPTED, field["step"], field["replica_id"], ranks))
    columns: dict[str, Any] = {name: field[name][order] for name in SCALARS}
    columns["replicaset"] = pa.array(names).take(pa.array(ranks[order]))
    columns["notes"] = pa.array(batch.notes or [""] * len(order), type=pa.string()).take(pa.array(order))
    num_steps = columns["num_steps"]
    ends = reordered(np.frombuffer(batch.ends, dtype=np.int64), field["num_steps"], order)
    times = PackedTimes.pack(field["formed"][order], num_steps, ends)
    columns |= {"gap": times.gap, "duration": times.duration, "drift": times.drift}
    columns["bends"] = list_array(times.bends, np.maximum(num_steps - 2, 0))
    for name, members in LISTS.items():
        counts = field[f"num_{name}"]
        values = np.frombuffer(batch.lists[name], dtype=np.int64).reshape(-1, len(members))
        values = reordered(values, counts, order)
        for position, member in enumerate(members):
            numbers = values[:, position].astype(NUMBER_TYPE.get(member, np.int64))
            columns[member] = list_array(numbers, counts[order])
    places = reordered(np.arange(len(batch.ids)), field["num_arrivals"], order)
    texts = pa.array(batch.ids, type=pa.string()).take(pa.array(places))
    columns["arrived_ids"] = pa.ListArray.from_arrays(columns["arrived"].offsets, texts)
    arrays = [pa.array(columns[one.name], type=one.type) for one in schema()]
    return pa.Table.from_arrays(arrays, schema=schema())


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
