"""Records of a decision log as columns, the form in which they are sorted, written and merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from vajra_py.contract.observer import EndReason
from vajra_py.latency.models.packed_times import PackedTimes
from vajra_py.runtime.records.arrow_arrays import arrow_array, call, list_array, list_arrays
from vajra_py.runtime.records.record_lists import reordered
from vajra_py.runtime.records.step_log import FIELDS, LISTS, ONLY_PREEMPTED, Batch
from vajra_py.runtime.support.clock import TICKS_PER_SECOND

Ints: TypeAlias = NDArray[np.int64]

SCALARS = (
    *("replica_id", "step", "num_steps", "status", "num_decodes", "decodes_at"),
    *("free_blocks", "num_waiting", "num_waiting_after", "num_running"),
)
"""Names of those `FIELDS` of a record that are written unchanged."""
KINDS = ("running", "admitted", "resumed", "moved")
MODES = ("recompute", "swap")
REASONS = tuple(reason.value for reason in EndReason)
NUMBER_TYPE = {"growth": np.int32, "chunk_kind": np.int8, "preempted_mode": np.int8, "finished_reason": np.int8}
"""Number type of list columns; list columns that are not named here have 64-bit numbers."""
_COLUMN_OF = {name: column for column, name in enumerate(FIELDS)}
DISTINCT = ("arrived", "joined", "joined_order", "left", "chunk", "finished")
"""List columns whose numbers rarely repeat but are close to their neighbours."""


class Arrivals(Struct, frozen=True):
    """Requests that arrived; records identify a request by index, and the file has each id once."""

    indices: Ints
    ticks: Ints
    ids: NDArray[np.object_]

    def take(self, which: NDArray[Any] | slice) -> Arrivals:
        """Return the selected arrivals."""
        return Arrivals(self.indices[which], self.ticks[which], self.ids[which])


class Records(Struct, frozen=True):
    """Records of a decision log, as columns.

    Attributes:
        replicasets: names, by number.
        rows: array of shape (records, len(FIELDS)).
        ends: ticks at which steps ended, record after record.
        lists: by name, array of shape (entries, columns of this list) with the entries of all records, record after
            record.
        notes: one text per record.
        arrivals: requests that arrived in the time of these records.
    """

    replicasets: Sequence[str]
    rows: Ints
    ends: Ints
    lists: Mapping[str, Ints]
    notes: NDArray[np.object_]
    arrivals: Arrivals

    @classmethod
    def of(cls, batch: Batch) -> Records:
        """Return the records of a batch."""
        rows = np.frombuffer(batch.rows, dtype=np.int64).reshape(-1, len(FIELDS))
        lists = {
            name: np.frombuffer(batch.lists[name], dtype=np.int64).reshape(-1, len(columns))
            for name, columns in LISTS.items()
        }
        notes = np.array(batch.notes or [""] * len(rows), dtype=object)
        arrived = np.frombuffer(batch.arrived, dtype=np.int64).reshape(-1, 2)
        arrivals = Arrivals(arrived[:, 0], arrived[:, 1], np.array(batch.ids, dtype=object))
        ends = np.frombuffer(batch.ends, dtype=np.int64)
        return cls(batch.replicasets, rows, ends, lists, notes, arrivals)

    @classmethod
    def concat(cls, parts: Sequence[Records]) -> Records:
        """Concatenate records; replicasets are numbered in the order of their names."""
        names = sorted({name for one in parts for name in one.replicasets})
        rows = np.concatenate([one.rows for one in parts])
        ranks = [np.array([names.index(name) for name in one.replicasets], dtype=np.int64) for one in parts]
        rows[:, 0] = np.concatenate([rank[one.rows[:, 0]] for rank, one in zip(ranks, parts, strict=True)])
        arrivals = [one.arrivals for one in parts]
        return cls(
            names,
            rows,
            np.concatenate([one.ends for one in parts]),
            {name: np.concatenate([one.lists[name] for one in parts]) for name in LISTS},
            np.concatenate([one.notes for one in parts]),
            Arrivals(
                np.concatenate([one.indices for one in arrivals]),
                np.concatenate([one.ticks for one in arrivals]),
                np.concatenate([one.ids for one in arrivals]),
            ),
        )

    def __len__(self) -> int:
        return len(self.rows)

    def field(self, name: str) -> Ints:
        """Return the value of a field for each record."""
        return self.rows[:, _COLUMN_OF[name]]

    def take(self, order: Ints, arrivals: NDArray[Any]) -> Records:
        """Return the selected records in the given order, and the selected arrivals."""
        return Records(
            self.replicasets,
            np.asfortranarray(self.rows.take(order, axis=0)),  # column-major: columns are read one at a time
            reordered(self.ends, self.field("num_steps"), order),
            {name: reordered(values, self.field(f"num_{name}"), order) for name, values in self.lists.items()},
            self.notes[order],
            self.arrivals.take(arrivals),
        )

    def by_time(self) -> Records:
        """Return the records, and the arrivals, in the order in which they were recorded. Those of a single log are in
        that order already.
        """
        kept, arrived = self.field("kept"), self.arrivals.ticks
        if (kept[1:] >= kept[:-1]).all() and (arrived[1:] >= arrived[:-1]).all():
            return self
        return self.take(np.argsort(kept, kind="stable"), np.argsort(arrived, kind="stable"))

    def part(self, which: slice, arrivals: slice) -> Records:
        """Return a slice of the records, and of the arrivals."""
        start, stop, _ = which.indices(len(self))

        def own(values: Ints, counts: Ints) -> Ints:
            first = int(counts[:start].sum())
            return values[first : first + int(counts[start:stop].sum())]

        return Records(
            self.replicasets,
            self.rows[which],
            own(self.ends, self.field("num_steps")),
            {name: own(values, self.field(f"num_{name}")) for name, values in self.lists.items()},
            self.notes[which],
            self.arrivals.take(arrivals),
        )

    def table(self) -> Any:
        """Return the records as an Arrow table, replica by replica, in the order in which steps were formed.

        The table depends only on the set of records written together, not on their order. All arrivals are stored in
        its first row.
        """
        import pyarrow as pa

        names = sorted(self.replicasets)
        ranks = np.array([names.index(name) for name in self.replicasets], dtype=np.int64)[self.field("replicaset")]
        is_step = self.field("status") != ONLY_PREEMPTED
        order = np.lexsort((is_step, self.field("step"), self.field("replica_id"), ranks))
        records = self.take(order, np.argsort(self.arrivals.indices, kind="stable"))
        columns: dict[str, Any] = {name: records.field(name) for name in SCALARS}
        columns["replicaset"] = call("take", arrow_array(names), arrow_array(ranks[order]))
        columns["notes"] = arrow_array(records.notes.tolist())
        num_steps = records.field("num_steps")
        times = PackedTimes.pack(records.field("formed"), num_steps, records.ends)
        columns |= {"gap": times.gap, "duration": times.duration, "drift": times.drift}
        columns["bends"] = list_array(times.bends, np.maximum(num_steps - 2, 0))
        for name, members in LISTS.items():
            values, counts = records.lists[name], records.field(f"num_{name}")
            numbers = [
                values[:, position].astype(NUMBER_TYPE.get(member, np.int64)) for position, member in enumerate(members)
            ]
            columns |= zip(members, list_arrays(numbers, counts), strict=True)
        counts = np.zeros(len(records), dtype=np.int64)
        counts[:1] = len(records.arrivals.indices)
        columns["arrived"] = list_array(records.arrivals.indices, counts)
        texts = arrow_array(records.arrivals.ids)
        columns["arrived_ids"] = pa.ListArray.from_arrays(columns["arrived"].offsets, texts)
        kinds = schema()
        return pa.Table.from_arrays([arrow_array(columns[one.name], one.type) for one in kinds], schema=kinds)


def schema() -> Any:
    """Return the Arrow schema of the file."""
    import pyarrow as pa

    fields = [("replicaset", pa.string()), *((name, pa.int64()) for name in SCALARS)]
    fields += [*((name, pa.int64()) for name in ("gap", "duration", "drift")), ("bends", pa.list_(pa.int64()))]
    for column in chain.from_iterable(LISTS.values()):
        fields.append((column, pa.list_(pa.from_numpy_dtype(NUMBER_TYPE.get(column, np.int64)))))
    fields += [("notes", pa.string()), ("arrived", pa.list_(pa.int64())), ("arrived_ids", pa.list_(pa.string()))]
    return pa.schema(fields, metadata={"ticks_per_second": str(TICKS_PER_SECOND)})
