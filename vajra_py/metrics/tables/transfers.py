"""The transfers table: a row for each transfer of a request's KV between replicas, including those that did not take
place.

`transfers.parquet` is written if requests may move between replicas with their KV. Times are seconds on the run's
clock, NaN = never:

* `held_at`: start of the wait at the source; NaN if the request still runs at the source when the row ends (the row is
  then a copy for a migration, or a transfer of part of a prompt's KV);
* `start_at`, `end_at`: start and end of the KV transfer; KV that is sent while the prompt is still being computed
  (`hand_off.overlap`) has a `start_at` before `held_at`;
* `arrived_at`: time at which the target accepted the request: `end_at`, or the end of a later step;
* `over_at`: time of the `outcome`, such as the admission at the target or the end of a copy.

A request is held from `held_at` to `start_at`, in transfer from `start_at` (from `held_at` if that is later) to
`arrived_at`, and waiting at the target until `over_at`; a stage that was not completed ends at `over_at`. A move of a
waiting request, which has no KV, is a row with `kind` "move", equal times and no `held_at`. Rows are in order of their
start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vajra_py.metrics.definitions import Bools, Floats, Ints
from vajra_py.metrics.tables.columnar import NameColumn, PackedRows, TextColumn
from vajra_py.runtime.records.arrow_arrays import arrow_array, numpy_array

if TYPE_CHECKING:
    import pyarrow as pa

    ArrowTable: TypeAlias = pa.Table
    ArrowSchema: TypeAlias = pa.Schema
else:
    ArrowTable = ArrowSchema = "pyarrow object"

TRANSFERS_FILE = "transfers.parquet"

HAND_OFF, MIGRATION, MOVE = "hand_off", "migration", "move"
"""Kinds of rows: hand-off after the prompt, migration of a running request, and move of a waiting request."""

DONE, STAYED, CALLED_OFF, ENDED, RECOMPUTED, UNFINISHED = (
    *("done", "stayed", "called_off", "ended", "recomputed", "unfinished"),
)
"""Outcomes of rows.

- `DONE`: the request was admitted at the target; if the request still runs at its source (`held_at` is NaN), the copy
  of its KV is complete.
- `STAYED`: the request continues at its source.
- `CALLED_OFF`: the transfer was cancelled or failed; another row may follow.
- `ENDED`: the request ended before it was admitted at the target.
- `RECOMPUTED`: the request's KV was lost or given up, so its tokens are computed again.
- `UNFINISHED`: the run ended first.
"""

_FIELDS = (
    *(("index", "q"), ("replicaset", "i"), ("kind", "i"), ("stage", "i"), ("is_live", "i")),
    *(("source_replica_id", "i"), ("source_pool", "i"), ("target_replica_id", "i"), ("target_pool", "i")),
    *(("held_at", "d"), ("start_at", "d"), ("end_at", "d"), ("arrived_at", "d"), ("over_at", "d")),
    *(("num_tokens", "q"), ("num_bytes", "q"), ("link", "i"), ("outcome", "i"), ("reason", "i")),
)
_NAMES = ("replicaset", "kind", "source_pool", "target_pool", "link", "outcome", "reason")
"""Text fields with few distinct values."""
TRANSFER_COLUMNS = ("request_id", *(name for name, _ in _FIELDS))
"""Columns of the transfers table, in order."""

MOVEMENT_TIMES = ("held_s", "transfer_s", "target_wait_s")
MOVEMENT_COUNTS = ("num_hand_offs", "num_migrations", "num_moves", "moved_tokens", "moved_bytes")
MOVEMENT_COLUMNS = (
    *(*MOVEMENT_TIMES, *MOVEMENT_COUNTS),
    *("source_replica_id", "source_pool", "target_replica_id", "target_pool"),
)
"""Further columns of the requests table of a run whose requests may move. The three times are sums in seconds over a
request's hand-offs and migrations; each is NaN if the request was never in that stage (held, in transfer, waiting at a
target). Source and target are those of the last transfer that arrived (-1 and empty if none did).
"""
MOVEMENT_TEXTS = ("source_pool", "target_pool")


class TransfersBuilder:
    """Builder of the transfers table."""

    layout: Mapping[str, Any] = {"use_dictionary": ["request_id", *_NAMES]}

    def __init__(self) -> None:
        self._rows = PackedRows(_FIELDS)
        self._request_ids = TextColumn()
        self._names = {name: NameColumn() for name in _NAMES}

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def append(self, request_id: str, row: Mapping[str, Any]) -> None:
        """Append one row; `row` has a value for each column except `request_id`."""
        self._request_ids.append(request_id)
        names = self._names
        values = [names[name].code(row[name]) if name in names else row[name] for name, _ in _FIELDS]
        self._rows.append(*values)

    def take(self, table: ArrowTable) -> None:
        """Append the rows of another transfers table."""
        for row in table.to_pylist():
            self.append(row["request_id"], row)

    @staticmethod
    def schema() -> ArrowSchema:
        """Return the names and types of the columns."""
        import pyarrow as pa

        types = {"q": pa.int64(), "i": pa.int32(), "d": pa.float64()}
        own = {name: types[code] for name, code in _FIELDS}
        own |= dict.fromkeys(_NAMES, pa.string()) | {"request_id": pa.string(), "is_live": pa.bool_()}
        return pa.schema([(name, own[name]) for name in TRANSFER_COLUMNS])

    def to_table(self) -> ArrowTable:
        """Return the whole table."""
        import pyarrow as pa

        return pa.concat_tables([self.schema().empty_table(), *self.slices(max(len(self), 1))])

    def slices(self, num_rows: int) -> Iterator[ArrowTable]:
        """Yield the table in slices of at most `num_rows` rows, in order."""
        import pyarrow as pa

        rows = self._rows.rows(slice(None))
        begin = np.fmin(np.fmin(rows["held_at"], rows["start_at"]), rows["over_at"])
        order = np.lexsort((rows["index"], begin))
        request_ids = self._request_ids.all()
        for start in range(0, len(order), num_rows):
            chosen = order[start : start + num_rows]
            own = rows[chosen]
            columns: dict[str, Any] = {name: np.ascontiguousarray(own[name]) for name, _ in _FIELDS}
            columns |= {name: names.take(columns[name]) for name, names in self._names.items()}
            columns |= {"is_live": columns["is_live"] == 1}
            columns["request_id"] = request_ids.take(arrow_array(chosen)).cast(pa.string())
            schema = self.schema()
            yield pa.Table.from_arrays([arrow_array(columns[f.name], f.type) for f in schema], schema=schema)


class Stays:
    """Seconds that requests spent held, in transfer, and waiting at the target, for each row of a transfers table; NaN
    for stages that did not occur.
    """

    def __init__(self, table: ArrowTable) -> None:
        held_at, start_at, arrived_at, over_at = (
            numpy_array(table.column(name)) for name in ("held_at", "start_at", "arrived_at", "over_at")
        )
        stood = ~np.isnan(held_at)
        self.held_s: Floats = np.maximum(np.where(np.isnan(start_at), over_at, start_at) - held_at, 0.0)
        self.transfer_s: Floats = np.where(
            stood, np.where(np.isnan(arrived_at), over_at, arrived_at) - np.maximum(start_at, held_at), np.nan
        )
        self.target_wait_s: Floats = np.where(stood, over_at - arrived_at, np.nan)


def movement_columns(table: ArrowTable, indices: Ints) -> dict[str, Any]:
    """Return `MOVEMENT_COLUMNS` of the requests with these indices (sorted), from a transfers table."""
    rows = _RowsOfRequests(table, indices)
    stays = Stays(table)
    columns: dict[str, Any] = {name: rows.sums(getattr(stays, name)) for name in MOVEMENT_TIMES}
    kind, is_live = (numpy_array(table.column(name)) for name in ("kind", "is_live"))
    has_arrived = ~np.isnan(numpy_array(table.column("arrived_at")))
    is_whole = ~np.isnan(numpy_array(table.column("end_at")))
    columns["num_hand_offs"] = rows.counts((kind == HAND_OFF) & has_arrived)
    columns["num_migrations"] = rows.counts((kind == MIGRATION) & has_arrived & ~is_live)
    columns["num_moves"] = rows.counts(kind == MOVE)
    for name in ("tokens", "bytes"):
        columns[f"moved_{name}"] = rows.counts(is_whole, numpy_array(table.column(f"num_{name}")))
    last = rows.last((kind != MOVE) & has_arrived)
    for end in ("source", "target"):
        ids, pools = (numpy_array(table.column(f"{end}_{what}")) for what in ("replica_id", "pool"))
        columns[f"{end}_replica_id"] = np.where(last >= 0, ids[last] if len(ids) else -1, -1).astype(np.int32)
        columns[f"{end}_pool"] = [str(pools[i]) if i >= 0 else "" for i in last.tolist()]
    return columns


class _RowsOfRequests:
    """Rows of a table grouped by request."""

    def __init__(self, table: ArrowTable, indices: Ints) -> None:
        index: Ints = numpy_array(table.column("index"))
        self._size = len(indices)
        position = np.searchsorted(indices, index)
        self._is_asked = np.zeros(len(index), dtype=np.bool_)
        inside = position < self._size
        self._is_asked[inside] = indices[position[inside]] == index[inside]
        self._position = np.where(self._is_asked, position, 0)

    def counts(self, chosen: Bools, amounts: NDArray[Any] | None = None) -> Ints:
        """Return the number of each request's chosen rows or, with `amounts`, the sum of the amounts of these rows."""
        total = np.zeros(self._size, dtype=np.int64)
        chosen = chosen & self._is_asked
        np.add.at(total, self._position[chosen], 1 if amounts is None else amounts[chosen])
        return total

    def sums(self, values: Floats) -> Floats:
        """Return the sum of each request's values, ignoring NaN; NaN if all are NaN."""
        known = ~np.isnan(values) & self._is_asked
        total = np.full(self._size, np.nan)
        total[self._position[known]] = 0.0
        np.add.at(total, self._position[known], values[known])
        return total

    def last(self, chosen: Bools) -> Ints:
        """Return the position of each request's last chosen row; -1 if it has none."""
        found = np.full(self._size, -1, dtype=np.int64)
        at = np.flatnonzero(chosen & self._is_asked)
        found[self._position[at]] = at  # repeated indices: the last assignment wins
        return found


def movement_types() -> dict[str, Any]:
    """Return the Arrow types of those `MOVEMENT_COLUMNS` that are not floats."""
    import pyarrow as pa

    types: dict[str, Any] = dict.fromkeys(MOVEMENT_TEXTS, pa.string()) | dict.fromkeys(MOVEMENT_COUNTS, pa.int64())
    return types | dict.fromkeys(("source_replica_id", "target_replica_id"), pa.int32())
