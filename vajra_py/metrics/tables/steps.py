"""The steps table: stored as one record per sequence of repeated decode steps, and read as one row per step.

Repeated steps decode the same requests, so they differ only in times, context lengths and allocated KV blocks. A record
therefore consists of the first step, the number of steps, their ends (`latency.models.packed_times`) and the numbers of
blocks that they allocate. A file of records has a column `num_steps`; a file without it has one row per step.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vajra_py.latency.models.packed_times import PackedTimes, seconds_of
from vajra_py.metrics.tables.columnar import NameColumn, PackedRows
from vajra_py.runtime.records.arrow_arrays import arrow_array, call, cast, list_array, numpy_array
from vajra_py.runtime.records.record_lists import reordered
from vajra_py.runtime.records.step_log import CAME_BACK, Batch
from vajra_py.runtime.support.clock import TICKS_PER_SECOND, to_seconds, to_ticks

if TYPE_CHECKING:
    import pyarrow as pa

    ArrowTable: TypeAlias = pa.Table
    ArrowSchema: TypeAlias = pa.Schema
else:
    ArrowTable = ArrowSchema = "pyarrow object"

Ints: TypeAlias = NDArray[np.int64]
_NAN = float("nan")


class StepRow(NamedTuple):
    """One step and the state of its replica right after it was formed."""

    replicaset: str
    replica_id: int
    step_index: int
    formed_at: float
    duration_s: float
    """Time from forming the step to the return of its tokens, in seconds."""
    num_decodes: int
    num_prefills: int
    decode_tokens: int
    prefill_tokens: int
    decode_context_tokens: int
    num_running: int
    num_waiting: int
    """Number of requests waiting right after forming; `num_running` counts the running ones at that moment."""
    free_blocks: int
    used_fraction: float
    """Fraction of the KV blocks in use right after forming, 0 to 1."""
    num_preempted: int
    num_finished: int


STEP_COLUMNS = StepRow._fields
"""Columns of the steps table, in order."""

_FIELDS = (
    *(("replicaset", "i"), ("replica_id", "i"), ("step_index", "q"), ("num_steps", "i"), ("formed", "q")),
    *(("num_decodes", "i"), ("num_prefills", "i"), ("decode_tokens", "q"), ("prefill_tokens", "q")),
    *(("decode_context_tokens", "q"), ("num_running", "i"), ("num_waiting", "i"), ("num_waiting_after", "i")),
    *(("free_blocks", "q"), ("num_growths", "i"), ("num_blocks", "q"), ("num_preempted", "i"), ("num_finished", "i")),
    *(("formed_at", "d"), ("duration_s", "d"), ("used_fraction", "d")),
)
"""Fields of a record. They describe the record's first step, except `num_waiting_after`, which describes the later
steps. `formed_at`, `duration_s` and `used_fraction` are NaN if they can be derived from ticks and blocks; other values,
for example in rows added by `append`, replace the derived values.
"""


_OTHERWISE_CALLED = {
    **{"step_index": "step", "num_decodes": "batch_decodes"},
    **{"decode_context_tokens": "context_tokens", "num_growths": "num_growth"},
}
"""Name that a field has in a step log, for each field whose name differs there."""


class StepsBuilder:
    """Builder of the steps table. Steps may be added in any order. The written records are ordered by replica;
    `to_table` returns one row per step, in order of time.
    """

    def __init__(self, num_blocks_of: Callable[[str, int], int] | None = None) -> None:
        """Create an empty builder. `num_blocks_of` returns the number of KV blocks of a replica, given (replicaset,
        replica id); it is needed only for `take`.
        """
        self._num_blocks_of = num_blocks_of
        self._records = PackedRows(_FIELDS)
        self._replicasets = NameColumn()
        self._made: tuple[int, ArrowTable] | None = None
        """Cached table of records, and the number of records when it was built."""
        self._ends = array("q")
        self._growth = array("i")
        """Number of requests that allocate a block in each repeated step, for all records, one record after the other.
        If a record has fewer numbers than repeated steps, its numbers repeat cyclically.
        """

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self._ends)

    def append(self, row: StepRow) -> None:
        """Append one step."""
        formed = to_ticks(row.formed_at)
        end = to_ticks(row.formed_at + row.duration_s)
        is_exact = (to_seconds(formed), to_seconds(end) - to_seconds(formed)) == (row.formed_at, row.duration_s)
        times = (_NAN, _NAN) if is_exact else (row.formed_at, row.duration_s)
        self._records.append(
            *(self._replicasets.code(row.replicaset), row.replica_id, row.step_index, 1, formed),
            *(row.num_decodes, row.num_prefills, row.decode_tokens, row.prefill_tokens, row.decode_context_tokens),
            *(row.num_running, row.num_waiting, row.num_waiting, row.free_blocks, 0, 0),
            *(row.num_preempted, row.num_finished, *times, row.used_fraction),
        )
        self._ends.append(end)

    def take(self, batch: Batch) -> None:
        """Append the records of a step log, without steps whose results never returned."""
        given, ends = batch.columns(), np.frombuffer(batch.ends, dtype=np.int64)
        came_back = given["status"] == CAME_BACK
        if not came_back.all():
            ends = ends[np.repeat(came_back, given["num_steps"])]
            given = {name: column[came_back] for name, column in given.items()}
        num_blocks = self._num_blocks(batch.replicasets, given["replicaset"], given["replica_id"])
        columns: dict[str, Any] = {name: given[name] for name, _ in _FIELDS if name in given}
        columns |= {name: given[other] for name, other in _OTHERWISE_CALLED.items()}
        columns["replicaset"] = np.array(self._replicasets.codes(batch.replicasets))[given["replicaset"]]
        columns["num_preempted"] = given["num_preempted"] + given["num_preempted_before"]
        columns |= {"num_blocks": num_blocks, **dict.fromkeys(("formed_at", "duration_s", "used_fraction"), _NAN)}
        self._records.extend(len(num_blocks), **columns)
        self._ends.frombytes(ends.tobytes())
        self._growth.frombytes(np.frombuffer(batch.lists["growth"], dtype=np.int64).astype(np.int32).tobytes())

    def _num_blocks(self, names: Sequence[str], replicasets: Any, replica_ids: Any) -> Any:
        """Return the number of KV blocks of each record's replica; `replicasets` are positions in `names`."""
        assert self._num_blocks_of is not None
        found, positions = np.unique(replica_ids * len(names) + replicasets, return_inverse=True)
        of_each = [divmod(one, len(names)) for one in found.tolist()]
        num_blocks = [self._num_blocks_of(names[code], replica_id) for replica_id, code in of_each]
        return np.array(num_blocks, dtype=np.int64)[positions]

    def extend(self, records: ArrowTable) -> None:
        """Append the records of another steps table."""
        if not records.num_rows:
            return
        num_steps = numpy_array(records.column("num_steps")).astype(np.int64)
        bends, _ = list_parts(records.column("bends"))
        growth, num_growths = list_parts(records.column("growth"))
        gap, duration, drift = (
            numpy_array(records.column(name)).astype(np.int64) for name in ("gap", "duration", "drift")
        )
        formed, ends = PackedTimes(gap, num_steps, duration, drift, bends.astype(np.int64)).unpack()
        given = {"replicaset", "formed", "num_growths"}
        columns: dict[str, Any] = {name: numpy_array(records.column(name)) for name, _ in _FIELDS if name not in given}
        columns["replicaset"] = self._replicasets.codes(records.column("replicaset").to_pylist())
        columns |= {"formed": formed[np.cumsum(num_steps) - num_steps], "num_growths": num_growths}
        self._records.extend(len(num_steps), **columns)
        self._ends.frombytes(ends.astype(np.int64).tobytes())
        self._growth.frombytes(growth.astype(np.int32).tobytes())

    layout: Mapping[str, Any] = {
        "use_dictionary": [
            *("replicaset", "replica_id", "num_steps", "num_decodes", "num_prefills", "decode_tokens", "num_running"),
            *("num_waiting", "num_waiting_after", "num_blocks", "num_preempted", "num_finished"),
            *("formed_at", "duration_s", "used_fraction", "bends.list.element", "growth.list.element"),
        ],
        "column_encoding": dict.fromkeys(
            ("step_index", "decode_context_tokens", "gap", "duration", "drift"), "DELTA_BINARY_PACKED"
        ),
    }
    """Parquet encoding of the records."""

    def schema(self) -> ArrowSchema:
        """Return the names and types of the written columns of records."""
        import pyarrow as pa

        wide = ("step_index", "prefill_tokens", "decode_tokens", "decode_context_tokens", "free_blocks", "num_blocks")
        types = {"replicaset": pa.string(), **dict.fromkeys(wide, pa.int64())}
        types |= dict.fromkeys(("formed_at", "duration_s", "used_fraction"), pa.float64())
        fields = [(name, types.get(name, pa.int32())) for name, _ in _FIELDS if name not in ("num_growths", "formed")]
        fields += [(name, pa.int64()) for name in ("gap", "duration", "drift")]
        fields += [("bends", pa.list_(pa.int64())), ("growth", pa.list_(pa.int32()))]
        return pa.schema(fields, metadata={"ticks_per_second": str(TICKS_PER_SECOND)})

    def slices(self, num_rows: int) -> Iterator[ArrowTable]:
        """Yield the records in slices of at most `num_rows`, ordered by replica."""
        table = self.records()
        for start in range(0, table.num_rows, num_rows):
            yield table.slice(start, num_rows)

    def records(self) -> ArrowTable:
        """Return all records, ordered by replica; the table is cached."""
        import pyarrow as pa

        if self._made is not None and self._made[0] == len(self._records):
            return self._made[1]
        column = self._records.column
        # Order replicasets by name: their codes depend on which of them completed a step first.
        ranks = self._replicasets.ranks()[column("replicaset")]
        order = np.lexsort((column("step_index"), column("replica_id"), ranks))
        ends = reordered(np.array(self._ends, dtype=np.int64), column("num_steps"), order)
        growth = reordered(np.array(self._growth, dtype=np.int32), column("num_growths"), order)
        records = self._records.rows(order)
        num_steps, num_growths = records["num_steps"].astype(np.int64), records["num_growths"].astype(np.int64)
        times = PackedTimes.pack(records["formed"].astype(np.int64), num_steps, ends)
        columns: dict[str, Any] = {name: np.ascontiguousarray(records[name]) for name, _ in _FIELDS}
        columns["replicaset"] = self._replicasets.take(columns["replicaset"])
        columns |= {"gap": times.gap, "duration": times.duration, "drift": times.drift}
        columns["bends"] = list_array(times.bends, np.maximum(num_steps - 2, 0))
        columns["growth"] = list_array(growth, num_growths)
        schema = self.schema()
        arrays = [arrow_array(columns[field.name], field.type) for field in schema]
        table = pa.Table.from_arrays(arrays, schema=schema)
        self._made = len(records), table
        return table

    def to_table(self) -> ArrowTable:
        """Return the table with one row per step, in order of time."""
        return expand_steps(self.records(), STEP_COLUMNS)


def list_parts(column: Any) -> tuple[NDArray[Any], Ints]:
    """Return (all values concatenated, number of values of each row) of a column of lists."""
    counts = numpy_array(call("list_value_length", column)).astype(np.int64)
    return numpy_array(call("list_flatten", column)), counts


def step_schema() -> ArrowSchema:
    """Return the names and types of the columns of the steps table with one row per step."""
    import pyarrow as pa

    types = {"replicaset": pa.string(), "replica_id": pa.int32()}
    types |= dict.fromkeys(("formed_at", "duration_s", "used_fraction"), pa.float64())
    return pa.schema([(name, types.get(name, pa.int64())) for name in STEP_COLUMNS])


def expand_steps(records: ArrowTable, names: Sequence[str], *, encoded: bool = False) -> ArrowTable:
    """Expand records to these columns of the steps table, one row per step, in order of time; steps formed at the same
    time keep the records' order.

    With `encoded`, replicaset names are an Arrow dictionary, which is much faster than a million strings.
    """
    import pyarrow as pa

    expansion = _Expansion(records)
    schema = step_schema()
    fields = [schema.field(name) for name in names]
    if encoded:
        text = pa.dictionary(pa.int32(), pa.string())
        fields = [field.with_type(text) if field.name == "replicaset" else field for field in fields]
    arrays = [arrow_array(expansion.column(field.name, encoded), field.type) for field in fields]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


class _Expansion:
    """Columns of single steps, in order of time, expanded from their records."""

    def __init__(self, records: ArrowTable) -> None:
        self._records = records
        num_steps = self._ints("num_steps")
        starts = np.cumsum(num_steps) - num_steps
        bends, _ = list_parts(records.column("bends"))
        gap, duration, drift = map(self._ints, ("gap", "duration", "drift"))
        times = PackedTimes(gap, num_steps, duration, drift, bends.astype(np.int64))
        per_second = int((records.schema.metadata or {}).get(b"ticks_per_second", TICKS_PER_SECOND))
        formed_at, ended_at = (seconds_of(ticks, per_second) for ticks in times.unpack())
        record = np.repeat(np.arange(len(num_steps)), num_steps)
        position = np.arange(len(record), dtype=np.int64)
        position -= np.repeat(starts, num_steps)
        duration_s = self._given("duration_s", ended_at - formed_at, record)
        formed_at = self._given("formed_at", formed_at, record)
        order = np.argsort(formed_at, kind="stable")
        self._formed_at, self._duration_s = formed_at[order], duration_s[order]
        taken = self._blocks_taken(num_steps, starts, position)
        self._record, self._position, self._taken = record[order], position[order], taken[order]
        """For each step: its record, its position in the record, and the blocks allocated since the record's first
        step.
        """

    def column(self, name: str, encoded: bool = False) -> Any:
        """Return one column."""
        if name == "replicaset":
            names = self._replicasets()
            return names if encoded else cast(names, names.type.value_type)
        if name == "formed_at":
            return self._formed_at
        if name == "duration_s":
            return self._duration_s
        if name == "used_fraction":
            with np.errstate(divide="ignore", invalid="ignore"):
                free = (self._repeated("free_blocks") - self._taken) / self._repeated("num_blocks")
            used = np.subtract(1.0, free, out=free)
            return self._given(name, used, self._record)
        if name == "free_blocks":
            return self._repeated(name) - self._taken
        if name == "step_index":
            return self._repeated(name) + self._position
        if name == "decode_context_tokens":
            return self._repeated(name) + self._position * self._repeated("num_decodes")
        if name == "num_waiting":
            return np.where(self._position == 0, self._repeated(name), self._repeated("num_waiting_after"))
        return self._repeated(name)

    def _replicasets(self) -> Any:
        """Return the column of replicasets as a dictionary array of codes, which is much faster than a
        million strings.
        """
        import pyarrow as pa

        found = call("dictionary_encode", self._records.column("replicaset").combine_chunks())
        numbers = numpy_array(found.indices)[self._record]
        return pa.DictionaryArray.from_arrays(arrow_array(numbers), found.dictionary)

    def _ints(self, name: str) -> Ints:
        values: Ints = numpy_array(self._records.column(name)).astype(np.int64)
        return values

    def _repeated(self, name: str) -> Ints:
        repeated: Ints = self._ints(name)[self._record]
        return repeated

    def _given(self, name: str, otherwise: NDArray[np.float64], record: Ints) -> NDArray[np.float64]:
        """Return the column's recorded value for each step or, where it is NaN, the derived value (`otherwise`)."""
        given = numpy_array(self._records.column(name))
        if np.isnan(given).all():
            return otherwise
        given = given[record]
        return np.where(np.isnan(given), otherwise, given)

    def _blocks_taken(self, num_steps: Ints, starts: Ints, position: Ints) -> Ints:
        """Return, for each step, the number of blocks allocated since its record's first step. Each later step of a
        record allocates the next number in the record's `growth`, cyclically.
        """
        growth, periods = list_parts(self._records.column("growth"))
        if not growth.size:
            return np.zeros(len(position), dtype=np.int64)
        firsts = np.where(periods > 0, np.cumsum(periods) - periods, len(growth))
        places = position - 1
        places[starts] = 0
        places %= np.repeat(np.maximum(periods, 1), num_steps)
        places += np.repeat(firsts, num_steps)
        taken = np.append(growth, 0).take(places)
        taken[starts] = 0
        sums = np.cumsum(taken, dtype=np.int64)
        sums -= np.repeat(sums[starts], num_steps)
        return sums
