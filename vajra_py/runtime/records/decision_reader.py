"""Reader of decision logs: one row per step, in the order in which steps completed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush, merge
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from vajra_py.contract.observer import StepRecord
from vajra_py.latency.models.packed_times import PackedTimes
from vajra_py.runtime.records.decision_journal import journal_path
from vajra_py.runtime.records.decision_log import journaled_tables
from vajra_py.runtime.records.decision_records import KINDS, MODES, REASONS, SCALARS
from vajra_py.runtime.records.step_log import CAME_BACK, LISTS, NEVER_CAME_BACK
from vajra_py.runtime.support.clock import NEVER, to_seconds

Row: TypeAlias = dict[str, Any]
_Key: TypeAlias = tuple[int, int, str, int, int]
"""(tick, 0 if the step completed or else 1, replicaset, replica id, number of the replica's earlier rows)."""
_RUNNING = KINDS[0]


def read_decisions(path: Path) -> Iterator[Row]:
    """Iterate over the rows of a log in order of time: a step counts at the tick at which it completed or, if it only
    preempted, at which it was formed. At one tick, completed steps come before those that only preempted; remaining
    ties are broken by replicaset and replica id. Steps that never completed come last.

    If a killed process left the log unfinished (`is_cut`), the rows of its journal are read.

    Raises pyarrow's errors if the file is missing or cut off (`OSError`, `pyarrow.ArrowException`), and `ValueError` if
    its records are inconsistent.
    """
    import pyarrow.parquet as pq

    if is_cut(path):
        groups = [_Group(table) for table in journaled_tables(path)]
    else:
        with pq.ParquetFile(path) as file:
            groups = [_Group(file.read_row_group(number)) for number in range(file.num_row_groups)]
    ids: dict[int, str] = {}
    replicas: dict[tuple[str, int], list[tuple[_Group, int]]] = {}
    for group in groups:
        ids.update(group.ids())
        for number, key in enumerate(zip(group.column("replicaset"), group.column("replica_id"), strict=True)):
            replicas.setdefault(key, []).append((group, number))
    if is_cut(path):
        replicas = {key: _without_gaps(records) for key, records in replicas.items()}
    unfinished: list[tuple[_Key, Row]] = []
    readers = [_ReplicaReader(key, records, ids, unfinished) for key, records in sorted(replicas.items())]
    for _, row in merge(*(one.rows() for one in readers)):
        yield row
    for _, row in sorted(unfinished, key=lambda entry: entry[0]):
        yield row


def is_cut(path: Path) -> bool:
    """Return True if this log is incomplete: the process that wrote it was killed, or is still writing."""
    return not path.exists() and journal_path(path).exists()


def step_row(step: StepRecord) -> Row:
    """Return the decisions of a step that begins as plain values; `ended_at` is null and `finished` is empty."""
    chunks = [
        [chunk.request.request_id, chunk.num_tokens, chunk.num_computed_before, chunk.kind] for chunk in step.chunks
    ]
    preempted = [[request.request_id, mode] for request, mode in step.preempted]
    figures = (step.free_blocks, step.num_waiting, step.num_running)
    row = _row((step.replicaset, step.replica_id, step.step_index), (step.formed_at, None), chunks, preempted, figures)
    if step.notes:
        row["notes"] = {request_id: dict(scores) for request_id, scores in step.notes.items()}
    return row


def _row(
    place: tuple[str, int, int],
    times: tuple[float, float | None],
    chunks: list[Any],
    preempted: list[Any],
    figures: tuple[int, int, int],
) -> Row:
    return {
        "replicaset": place[0],
        "replica_id": place[1],
        "step": place[2],
        "formed_at": times[0],
        "ended_at": times[1],
        "chunks": chunks,
        "preempted": preempted,
        "finished": [],
        "free_blocks": figures[0],
        "num_waiting": figures[1],
        "num_running": figures[2],
    }


class _Group:
    """Records that were written together."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._columns: dict[str, Any] = {}
        counts = table.column("num_steps").to_numpy()
        bends = table.column("bends").combine_chunks().flatten().to_numpy().astype(np.int64)
        formed, ended = PackedTimes(
            table.column("gap").to_numpy(),
            counts,
            table.column("duration").to_numpy(),
            table.column("drift").to_numpy(),
            bends,
        ).unpack()
        self._formed, self._ended = formed, ended
        self._starts = np.cumsum(counts) - counts
        self.scalars = list(zip(*(table.column(name).to_numpy().tolist() for name in SCALARS), strict=True))
        self._lists = {name: _Lists(table, columns) for name, columns in LISTS.items()}

    def column(self, name: str) -> list[Any]:
        """Return the values of a column."""
        found = self._columns.get(name)
        if found is None:
            found = self._columns[name] = list(self._table.column(name).to_pylist())
        return found

    def ids(self) -> Iterator[tuple[int, str]]:
        """Return (index, id) of each request that arrived."""
        indices = self._table.column("arrived").combine_chunks().flatten().to_pylist()
        return zip(indices, self._table.column("arrived_ids").combine_chunks().flatten().to_pylist(), strict=True)

    def first_formed(self, number: int) -> int:
        """Return the tick at which the first step of a record was formed."""
        return int(self._formed[self._starts[number]])

    def times(self, number: int, num_steps: int) -> Iterator[tuple[int, int]]:
        """Return (formed, ended) in ticks of each step of a record."""
        start = int(self._starts[number])
        part = slice(start, start + num_steps)
        return zip(self._formed[part].tolist(), self._ended[part].tolist(), strict=True)

    def entries(self, name: str, number: int) -> list[tuple[int, ...]]:
        """Return the entries of one of a record's lists."""
        return self._lists[name].entries(number)


class _Lists:
    """Columns whose lists have equal lengths within each record."""

    def __init__(self, table: Any, names: Sequence[str]) -> None:
        arrays = [table.column(name).combine_chunks() for name in names]
        self._offsets = arrays[0].offsets.to_numpy().tolist()
        self._values = [array.values.to_numpy() for array in arrays]

    def entries(self, number: int) -> list[tuple[int, ...]]:
        start, stop = self._offsets[number], self._offsets[number + 1]
        return list(zip(*(values[start:stop].tolist() for values in self._values), strict=True))


class _ReplicaReader:
    """Reads one replica's records in the order in which its steps were formed."""

    def __init__(
        self,
        place: tuple[str, int],
        records: list[tuple[_Group, int]],
        ids: Mapping[int, str],
        unfinished: list[tuple[_Key, Row]],
    ) -> None:
        self._place = place
        self._ids = ids
        self._unfinished = unfinished
        # A step that only preempts is recorded when it is formed, any other step when it completes. With several steps
        # in flight, a later group may therefore contain a step that was formed earlier.
        self._records = sorted(records, key=_formation)
        self._decodes: dict[int, tuple[int, int]] = {}
        """Decodes, by request index: (index of admission, number of computed tokens minus `_num_decode_steps`, both
        numbers as of the time at which the request joined).
        """
        self._ordered: list[tuple[str, int]] = []
        self._num_decode_steps = 0
        self._num_rows = 0

    def rows(self) -> Iterator[tuple[_Key, Row]]:
        """Yield the rows with their keys, in rising order of keys."""
        held: list[tuple[_Key, Row]] = []
        following = [group.first_formed(number) for group, number in self._records[1:]]
        for (group, number), next_formed in zip(self._records, [*following, NEVER], strict=True):
            for entry in self._expanded(group, number):
                heappush(held, entry)
                # With several steps in flight, a row waits until no later record can contain a row that precedes it.
                while held and held[0][0][0] <= next_formed:
                    yield heappop(held)

    def _expanded(self, group: _Group, number: int) -> Iterator[tuple[_Key, Row]]:
        record = dict(zip(SCALARS, group.scalars[number], strict=True))
        self._apply(group, number)
        if len(self._decodes) != record["num_decodes"] and record["num_decodes"]:
            raise ValueError(
                f"step {record['step']} of replica {self._place[1]} of {self._place[0]}: {record['num_decodes']} decodes "
                f"are counted, and {len(self._decodes)} are known"
            )
        chunks = group.entries("chunks", number)
        preempted = [[self._ids[one], MODES[mode]] for one, mode in group.entries("preempted", number)]
        growth = [count for (count,) in group.entries("growth", number)]
        notes = group.column("notes")[number]
        free_blocks, num_waiting = record["free_blocks"], record["num_waiting"]
        for step, (formed, ended) in enumerate(group.times(number, record["num_steps"])):
            if step:
                free_blocks -= growth[(step - 1) % len(growth)]
                num_waiting = record["num_waiting_after"]
            is_back = record["status"] == CAME_BACK
            row = _row(
                (*self._place, record["step"] + step),
                (to_seconds(formed), to_seconds(ended) if is_back else None),
                self._entries(chunks, record),
                preempted,
                (free_blocks, num_waiting, record["num_running"]),
            )
            if notes:
                row["notes"] = json.loads(notes)
            for one, reason in group.entries("finished", number) if is_back else ():
                row["finished"].append([self._ids[one], REASONS[reason]])
            key = (ended if is_back else formed, int(not is_back), *self._place, self._num_rows)
            self._num_rows += 1
            if record["status"] == NEVER_CAME_BACK:
                self._unfinished.append((key, row))
            else:
                yield key, row

    def _apply(self, group: _Group, number: int) -> None:
        left, joined = group.entries("left", number), group.entries("joined", number)
        for (one,) in left:
            del self._decodes[one]
        for one, order, computed in joined:
            self._decodes[one] = order, computed - self._num_decode_steps
        if left or joined:
            in_order = sorted(self._decodes.items(), key=lambda entry: entry[1])
            self._ordered = [(self._ids[one], computed) for one, (_, computed) in in_order]

    def _entries(self, chunks: Sequence[tuple[int, ...]], record: Mapping[str, int]) -> list[list[Any]]:
        """Return every entry of the step in batch order."""
        decodes: list[list[Any]] = []
        if record["num_decodes"]:
            done = self._num_decode_steps
            decodes = [[name, 1, computed + done, _RUNNING] for name, computed in self._ordered]
            self._num_decode_steps += 1
        if not chunks:
            return decodes
        entries: list[list[Any]] = []
        num_taken = 0
        for position, (one, num_tokens, computed, kind, after) in enumerate(chunks):
            if after < 0:
                after = 0 if position < record["decodes_at"] else len(decodes)
            if after > num_taken:
                entries += decodes[num_taken:after]
                num_taken = after
            entries.append([self._ids[one], num_tokens, computed, KINDS[kind]])
        return entries + decodes[num_taken:]


_STEP, _STATUS, _NUM_STEPS = (SCALARS.index(name) for name in ("step", "status", "num_steps"))


def _formation(record: tuple[_Group, int]) -> tuple[int, bool]:
    """Return the sort key of a record in order of formation: the index of its first step; of records with equal
    indices, one that only preempted comes first.
    """
    group, number = record
    scalars = group.scalars[number]
    return scalars[_STEP], scalars[_STATUS] in (CAME_BACK, NEVER_CAME_BACK)


def _without_gaps(records: list[tuple[_Group, int]]) -> list[tuple[_Group, int]]:
    """Return a replica's records before the first missing step, which was in flight when the process was killed."""
    kept = []
    num_steps = 0
    for group, number in sorted(records, key=_formation):
        scalars = group.scalars[number]
        if scalars[_STEP] > num_steps:
            break
        kept.append((group, number))
        num_steps += scalars[_NUM_STEPS] if scalars[_STATUS] == CAME_BACK else 0
    return kept
