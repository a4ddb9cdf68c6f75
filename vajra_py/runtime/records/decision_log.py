"""Decision log: the policies' decisions as records in a Parquet file. A step is one record; a decode step and its
repetitions share one record.

A record has the changes since the replica's previous record: requests that joined or left the decodes, the chunks,
preempted requests, ended requests, and the time at which each step of the record ended. `decision_reader` makes a row
for each step. The same run gives the same bytes: the file does not contain the time of writing.
"""

from __future__ import annotations

import io
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from vajra_py.contract import RequestView
from vajra_py.contract.observer import EndReason
from vajra_py.runtime.records.decision_journal import Journal, journal_path, read_journal
from vajra_py.runtime.records.decision_records import DISTINCT, KINDS, MODES, REASONS, SCALARS, Records, schema
from vajra_py.runtime.records.step_log import (
    LISTS,
    NEVER_CAME_BACK,
    NO_LISTS,
    ONLY_PREEMPTED,
    ROW_BYTES,
    Batch,
    Numbers,
    PlanRepeats,
    StepLog,
)
from vajra_py.runtime.requests.decode_pool import DecodePool
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.requests.running_set import NO_CHANGES, PoolChanges
from vajra_py.runtime.step.plan import StepPlan, in_batch_order
from vajra_py.runtime.support.clock import NEVER, to_ticks

RECORDS_AT_ONCE = 32_768
"""Number of records collected before they are written together."""

_KIND_CODES, _MODE_CODES, _REASON_CODES = (
    {name: code for code, name in enumerate(names)} for names in (KINDS, MODES, REASONS)
)


def open_binary(path: Path) -> BinaryIO:
    """Open a new binary file for writing."""
    return path.open("wb")


class DecisionFile:
    """File of a decision log, which appears under its final name when it is closed.

    A row group holds all records of a stretch of time, and records of one tick stay together: the bytes therefore
    depend neither on the order of events within a tick, nor on when records are passed to `take`.
    """

    def __init__(self, path: Path, open_file: Callable[[Path], BinaryIO] = open_binary) -> None:
        import pyarrow.parquet as pq

        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        deltas = ("step", "free_blocks", "gap", "duration", "drift")
        lists = ("bends", "arrived", *chain.from_iterable(LISTS.values()))
        self._file = _Counted(open_file(self._partial))
        self._writer = pq.ParquetWriter(
            self._file,
            schema(),
            compression="zstd",
            compression_level=3,
            use_dictionary=[
                *("replicaset", "notes", *(name for name in SCALARS if name not in deltas)),
                *(f"{name}.list.element" for name in lists if name not in DISTINCT),
            ],
            column_encoding={
                **dict.fromkeys(deltas, "DELTA_BINARY_PACKED"),
                **{f"{name}.list.element": "DELTA_BINARY_PACKED" for name in DISTINCT},
            },
            version="2.6",
        )
        self._held: list[Records] = []
        self._num_held, self._enough = 0, RECORDS_AT_ONCE

    def take(self, records: Records) -> bool:
        """Take records in any order; return True if it is time to call `write`."""
        self._held.append(records)
        self._num_held += len(records)
        return self._num_held >= self._enough

    def write(self, complete_before: int | None = None) -> None:
        """Write complete row groups, given that all records before this tick have been taken (None: all records)."""
        if not self._held:
            return
        records = Records.concat(self._held).by_time()
        kept, arrived = records.field("kept"), records.arrivals.ticks
        num_sure = len(kept) if complete_before is None else int(np.searchsorted(kept, complete_before))
        start = first_arrival = 0
        while start + RECORDS_AT_ONCE <= num_sure:
            last_tick = kept[start + RECORDS_AT_ONCE - 1]
            stop, next_arrival = (int(np.searchsorted(ticks, last_tick, side="right")) for ticks in (kept, arrived))
            self._write(records.part(slice(start, stop), slice(first_arrival, next_arrival)))
            start, first_arrival = stop, next_arrival
        self._held = [records.part(slice(start, None), slice(first_arrival, None))]
        self._num_held = len(kept) - start
        self._enough = self._num_held + RECORDS_AT_ONCE if self._num_held >= RECORDS_AT_ONCE else RECORDS_AT_ONCE

    def close(self) -> None:
        """Write the remaining records, and finish the file."""
        self.write()
        for rest in self._held:
            if len(rest):
                self._write(rest)
        self._writer.close()
        self._file.close()
        os.replace(self._partial, self._path)

    def _write(self, records: Records) -> None:
        self._writer.write_table(records.table(), row_group_size=len(records))


class DecisionLog(StepLog):
    """Writes `decisions.parquet` during the run; the file appears under its final name when the log is closed.

    Until then, a journal beside it has the records, so that they can be read after the process was killed.
    """

    def __init__(
        self,
        path: Path,
        open_file: Callable[[Path], BinaryIO] = open_binary,
        records_per_batch: int | None = None,
    ) -> None:
        super().__init__(records_per_batch)
        self._path = path
        self._open_file = open_file
        self._file: DecisionFile | None = None
        self._journal: Journal | None = None
        self._open: dict[StepPlan, tuple[str, PoolMoves]] = {}

    def on_arrival(self, request: RequestView, now: float) -> None:
        """Note the id of an arriving request; records identify requests by index."""
        self._tick = max(self._tick, to_ticks(now))
        self._ids.append(request.request_id)
        self._arrived.extend((request.index, self._tick))

    def on_plan(self, replicaset: str, plan: StepPlan, changes: PoolChanges) -> None:
        """Keep the decisions until the step completes; a step that only preempted is recorded immediately."""
        is_plain = changes is NO_CHANGES and not (plan.running_in_order and plan.chunks)
        self._open[plan] = replicaset, NO_MOVES if is_plain else _moves(plan, changes)
        if not plan.num_pool_decodes and not plan.chunks:
            self._take(replicaset, plan, ONLY_PREEMPTED, plan.formed_at, ())

    def on_plan_repeats(
        self, replicaset: str, plan: StepPlan, repeats: PlanRepeats, num_waiting: int, now: int
    ) -> None:
        """Write one record for the plan and its repetitions."""
        super().on_plan_repeats(replicaset, plan, repeats, num_waiting, now)
        self._open[plan] = replicaset, NO_MOVES

    def close(self) -> None:
        """Write the steps that never completed, and finish the file."""
        self.hand_on()
        self._tick = NEVER
        for plan, (replicaset, _) in list(self._open.items()):
            self._take(replicaset, plan, NEVER_CAME_BACK, plan.formed_at, ())
        self.hand_on()
        self._finish()

    def _count_lists(
        self, plan: StepPlan, finished: Sequence[tuple[Request, EndReason]], lists: Mapping[str, list[int]]
    ) -> Numbers:
        """Append the decisions of the step to `lists`, as numbers; return the number of entries in each list."""
        _, moves = self._open.pop(plan)
        if moves is NO_MOVES and not finished and not plan.chunks and not plan.preempted:
            return NO_LISTS
        joined, left, chunks = moves
        if chunks is None:
            chunks = lists["chunks"]
            for one, num_tokens, computed, kind in plan.chunks:
                chunks += (one.index, num_tokens, computed, _KIND_CODES[kind], -1)
        else:
            lists["chunks"] += chunks
        lists["joined"] += joined
        lists["left"] += left
        for one, mode in plan.preempted:
            lists["preempted"] += (one.index, _MODE_CODES[mode])
        for one, reason in finished:
            lists["finished"] += (one.index, _REASON_CODES[reason.value])
        return len(joined) // 3, len(left), len(plan.chunks), len(plan.preempted), len(finished)

    def _keep(self, batch: Batch) -> None:
        """Write the records to the journal, and those row groups that are complete to the file."""
        # A full batch goes to the journal. A smaller batch is the last one, and the file is completed next.
        if len(batch.rows) >= self._batch_size * ROW_BYTES:
            if self._journal is None:
                self._journal = Journal(self._open_file(journal_path(self._path)))
            self._journal.write(batch)
        self._file = self._file or DecisionFile(self._path, self._open_file)
        if self._file.take(Records.of(batch)):
            self._file.write(complete_before=self._tick)

    def _finish(self) -> None:
        (self._file or DecisionFile(self._path, self._open_file)).close()
        if self._journal is not None:
            self._journal.close()
            journal_path(self._path).unlink(missing_ok=True)


class PartialDecisionLog(DecisionLog):
    """Decision log of a part of a run, which keeps the records in the order of recording for `merge_decision_logs`."""

    def _keep(self, batch: Batch) -> None:
        if self._journal is None:
            self._journal = Journal(self._open_file(journal_path(self._path)), "lz4")
        self._journal.write(batch)

    def _finish(self) -> None:
        partial = journal_path(self._path)
        if self._journal is None:
            self._open_file(partial).close()
        else:
            self._journal.close()
        os.replace(partial, self._path)


def journaled_tables(path: Path) -> list[Any]:
    """Return the contents of an unfinished log's journal, one table for each batch."""
    return [Records.of(batch).table() for batch in read_journal(journal_path(path))]


class _Counted(io.RawIOBase):
    """File with the position that pyarrow requires: the number of bytes written to it."""

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
    """Data that is no longer known when a plan's step ends: changes of the decode pool, and chunks. Each field has the
    numbers of its entries one after another, in the order of the columns in `LISTS`.
    """

    joined: Numbers
    left: Numbers
    chunks: Numbers | None
    """Chunks in batch order; None: the chunks of the plan, in the plan's order."""


NO_MOVES = PoolMoves((), (), None)


def _moves(plan: StepPlan, changes: PoolChanges) -> PoolMoves:
    """Return the pool's changes as numbers; called when the plan is new, because these numbers change as the requests
    progress.
    """
    joined: list[int] = []
    for one in changes.joined:
        # If the plan runs the pool, `num_computed_tokens` already includes this step; record the number before it.
        joined += (one.index, one.admitted_index, one.num_computed_tokens - (plan.num_pool_decodes > 0))
    chunks = None if plan.pool is None or not plan.running_in_order else _chunks_in_order(plan, plan.pool)
    return PoolMoves(joined, [one.index for one in changes.left], chunks)


def _chunks_in_order(plan: StepPlan, pool: DecodePool) -> Numbers:
    """Return (request, tokens, computed before, kind, number of decodes before it) for each chunk, in batch order."""
    numbers: list[int] = []
    admissions = [one.admitted_index for one in pool.in_admission_order()]
    for one, num_tokens, computed, kind in in_batch_order(plan.chunks, (), 0, running_in_order=True):
        before = bisect_left(admissions, one.admitted_index) if kind == "running" else len(admissions)
        numbers += (one.index, num_tokens, computed, _KIND_CODES[kind], before)
    return numbers
