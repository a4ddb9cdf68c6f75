"""Builders of the tables of requests and gaps: compact in memory, and written byte for byte the same for equal rows.

Rows are packed when they are added (about 200 bytes per request) and converted to columns on demand, one row group at a
time while writing. Requests are added in the order of their ends and written by submission index; gaps are written
sorted. A Parquet file depends only on its rows and the version of pyarrow: compression and row groups are fixed, and
there is no write time and no pandas metadata.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vajra_py.contract.facts import FACTS, FactKind
from vajra_py.metrics.definitions import (
    COMPLETED_REASONS,
    REASONS,
    UNFINISHED,
    Outcomes,
    SloStatus,
    SloTargets,
    e2e_s,
    judge_slos,
    tpot_s,
    ttft_s,
)
from vajra_py.metrics.tables.columnar import GapList, NameColumn, PackedRows, TextColumn
from vajra_py.metrics.tables.further_columns import (
    DRAFT_COLUMNS,
    DRAFT_COUNTS,
    NOTHING_FURTHER,
    FurtherColumns,
    acceptance_length,
)
from vajra_py.metrics.tables.tier_log import LOAD_TIME
from vajra_py.metrics.tables.transfers import MOVEMENT_COLUMNS, movement_columns, movement_types
from vajra_py.runtime.records.arrow_arrays import arrow_array, call, cast, is_among, numpy_array

if TYPE_CHECKING:
    import pyarrow as pa

    from vajra_py.metrics.tables.request_row import RequestRow

    ArrowTable: TypeAlias = pa.Table
    ArrowSchema: TypeAlias = pa.Schema
else:
    ArrowTable = ArrowSchema = "pyarrow object"

Columns: TypeAlias = dict[str, Any]

ROW_GROUP_ROWS = 131_072
"""Rows per Parquet row group; also the number of rows that are expanded in memory at a time while writing."""

_COMPRESSION = "zstd"
_COMPRESSION_LEVEL = 3
_NAN = float("nan")
_DISTINCT = ("request_id", "session_id", "program_id")
"""Text columns with mostly distinct values."""


def _stated(*kinds: FactKind) -> tuple[str, ...]:
    """Return the columns of the stated facts of these kinds."""
    return tuple(fact.seen_as for fact in FACTS if fact.seen_as is not None and fact.kind in kinds)


_LISTS = _stated(FactKind.TEXTS)
_INTEGERS = tuple(fact.name for fact in FACTS if fact.kind is FactKind.INTEGER and not fact.is_optional)
_FLAGS = _stated(FactKind.FLAG)
STATED_COLUMNS = (
    *_stated(FactKind.TEXT),
    *_LISTS,
    *_stated(FactKind.INTEGER, FactKind.FLAG),
    *_stated(FactKind.NUMBER, FactKind.DURATION),
)
"""Columns of facts stated by clients."""
PROGRAM_COLUMNS = tuple(fact.seen_as for fact in FACTS if fact.seen_as is not None and fact.is_only_where_stated)
"""Columns that exist only if requests belong to programs or have adapters."""
TEXT_COLUMNS = ("request_id", "replicaset", *_stated(FactKind.TEXT), "reason", "detail")
"""Text columns of the requests table, without those of admission, movement, and lists of texts."""


class TableBuilder(Protocol):
    """Builder that collects rows and returns them as columns."""

    def __len__(self) -> int:
        """Return the number of rows of the finished table."""

    @property
    def layout(self) -> Mapping[str, Any]:
        """Keyword arguments of the Parquet writer that select the columns' encoding."""

    def schema(self) -> ArrowSchema:
        """Return the names and types of the written columns."""

    def slices(self, num_rows: int) -> Iterator[ArrowTable]:
        """Yield the written rows in slices of at most `num_rows`; nothing for an empty table."""


class RequestsBuilder:
    """Builder of the requests table: one row per submitted request, each appended once, in any order."""

    _FIELDS = (
        ("index", "q"),
        ("replicaset", "i"),
        ("replica_id", "i"),
        ("num_prompt_tokens", "q"),
        ("num_output_tokens", "q"),
        ("num_cached_tokens", "q"),
        ("num_preemptions", "i"),
        ("arrived_at", "d"),
        ("admitted_at", "d"),
        ("first_token_at", "d"),
        ("ended_at", "d"),
        ("reason", "i"),
        ("detail", "i"),
        ("tbt_p50_s", "d"),
        ("tbt_p99_s", "d"),
        ("tbt_max_s", "d"),
        *(
            (
                name,
                "q"
                if name in _INTEGERS
                else "b"
                if name in _FLAGS
                else "i"
                if name in (*TEXT_COLUMNS, *_LISTS)
                else "d",
            )
            for name in STATED_COLUMNS
            if name not in _DISTINCT
        ),
    )

    def __init__(self, further: FurtherColumns = NOTHING_FURTHER) -> None:
        admission, self._movement, self._tiers = further.admission, further.movement, further.tiers
        self.has_admission, self.has_drafts = admission, further.drafts
        self.has_programs = False
        """True if a request belongs to a program or has an adapter, so that the table has `PROGRAM_COLUMNS`."""
        self.ended_at = 0.0
        """End of the run in seconds, until which unfinished requests were observed. 0 if unknown; then the latest event
        of any request is used instead.
        """
        self._fields = (*self._FIELDS, *_ADMISSION_FIELDS) if admission else self._FIELDS
        if self.has_drafts:
            self._fields = (*self._fields, *((name, "q") for name in DRAFT_COUNTS))
        self._rows = PackedRows(self._fields)
        self._texts = {name: TextColumn() for name in _DISTINCT}
        self._names = {name: NameColumn() for name in TEXT_COLUMNS if name not in _DISTINCT}
        self._names |= {name: NameColumn(of_lists=True) for name in _LISTS}
        if admission:
            self._names |= {name: NameColumn() for name in ADMISSION_TEXTS}

    def __len__(self) -> int:
        """Return the number of requests added."""
        return len(self._rows)

    @property
    def layout(self) -> Mapping[str, Any]:
        """See `TableBuilder`."""
        return {"use_dictionary": [name for name in TEXT_COLUMNS if self.has_programs or name not in PROGRAM_COLUMNS]}

    def append(self, row: RequestRow) -> None:
        """Append one request. Raises `ValueError` if its reason is not one of `REASONS`."""
        if row.reason not in REASONS:
            raise ValueError(
                f"request {row.request_id}: unknown reason ({row.reason!r}). Allowed: {', '.join(REASONS)}"
            )
        names = (*_DISTINCT, *self._FIELD_NAMES)
        self.extend({name: [getattr(row, name)] for name in names})

    def extend(self, columns: Mapping[str, Sequence[Any] | NDArray[Any]]) -> None:
        """Append several requests, given a column for each field of `RequestRow`; reasons must be in `REASONS`."""
        self.has_programs = self.has_programs or any(columns["program_id"]) or any(columns["adapter"])
        for name, texts in self._texts.items():
            for text in columns[name]:
                texts.append(text)
        numbers: Columns = {}
        for name, code in self._fields:
            values = columns[name]
            if name in self._names:
                values = self._names[name].codes(list(values))
            numbers[name] = np.asarray(values, dtype=np.float64) if code == "d" else values
        self._rows.extend(len(columns["index"]), **numbers)

    def take(self, table: ArrowTable) -> None:
        """Append the rows of another requests table."""
        if not table.num_rows:
            return
        if "program_id" in table.column_names:
            self.has_programs = True
        else:
            table = with_facts(table, (*table.column_names, *PROGRAM_COLUMNS))
        for name, texts in self._texts.items():
            texts.take(table.column(name))
        numbers: Columns = {}
        for name, _ in self._fields:
            column = table.column(name)
            if name in _LISTS:
                numbers[name] = self._names[name].codes(list(map(tuple, column.to_pylist())))
            elif name in self._names:
                found = column.combine_chunks().dictionary_encode()
                codes = self._names[name].codes(found.dictionary.to_pylist())
                numbers[name] = np.array(codes, dtype=np.int32)[numpy_array(found.indices)]
            else:
                numbers[name] = numpy_array(column)
        self._rows.extend(table.num_rows, **numbers)

    def schema(self) -> ArrowSchema:
        """Return the names and types of the columns of the requests table."""
        import pyarrow as pa

        integers = (
            *("index", "num_prompt_tokens", "num_output_tokens", "num_cached_tokens", "num_preemptions"),
            *_INTEGERS,
        )
        types = {"replica_id": pa.int32(), "slo_met": pa.bool_(), **dict.fromkeys(integers, pa.int64())}
        types |= dict.fromkeys(TEXT_COLUMNS, pa.string()) | dict.fromkeys(_LISTS, pa.list_(pa.string()))
        types |= dict.fromkeys(_FLAGS, pa.bool_())
        types |= dict.fromkeys(ADMISSION_TEXTS, pa.string()) | {"num_deferrals": pa.int64()}
        names = (*REQUEST_COLUMNS, *ADMISSION_COLUMNS) if self.has_admission else REQUEST_COLUMNS
        if self._movement is not None:
            names = (*names, *MOVEMENT_COLUMNS)
            types |= movement_types()
        if self._tiers is not None:
            names = (*names, *self._tiers.columns)
            types |= dict.fromkeys(self._tiers.columns, pa.int64()) | {LOAD_TIME: pa.float64()}
        if self.has_drafts:
            names = (*names, *DRAFT_COLUMNS)
            types |= dict.fromkeys(DRAFT_COUNTS, pa.int64())
        names = (*names, *PROGRAM_COLUMNS) if self.has_programs else names
        return pa.schema([(name, types.get(name, pa.float64())) for name in names])

    def to_table(self) -> ArrowTable:
        """Return the whole table, sorted by submission index. Raises `ValueError` if an index occurs twice."""
        return _whole(self)

    def slices(self, num_rows: int) -> Iterator[ArrowTable]:
        """Yield the table in slices of at most `num_rows` rows."""
        import pyarrow as pa

        indices = self._rows.column("index")
        order = np.argsort(indices, kind="stable")
        twice = np.flatnonzero(np.diff(indices[order]) == 0)
        if twice.size:
            raise ValueError(
                f"requests table: two rows of one request (index {indices[order][twice[0]]}). Allowed: one each"
            )
        texts = {name: column.all() for name, column in self._texts.items()}
        until = self._observed_until()
        transfers = None if self._movement is None else self._movement.to_table()
        for start in range(0, len(order), num_rows):
            chosen = order[start : start + num_rows]
            columns = self._numbers(self._rows.rows(chosen), until)
            columns |= {
                name: cast(call("take", text, arrow_array(chosen)), pa.string()) for name, text in texts.items()
            }
            if transfers is not None:
                columns |= movement_columns(transfers, columns["index"])
            if self._tiers is not None:
                columns |= self._tiers.columns_for(columns["index"], columns["num_cached_tokens"])
            yield _table(columns, self.schema())

    def _observed_until(self) -> float:
        moments = (self._rows.column(name) for name in ("arrived_at", "first_token_at", "ended_at"))
        known = [float(np.nanmax(column)) for column in moments if not np.isnan(column).all()]
        return max([self.ended_at, *known])

    def _numbers(self, rows: NDArray[Any], observed_until: float) -> Columns:
        """Return the columns of these rows, including derived ones, but without `_DISTINCT` and the columns of movement
        and memory tiers.
        """
        columns: Columns = {name: np.ascontiguousarray(rows[name]) for name, _ in self._fields}
        columns |= {name: names.take(columns[name]) for name, names in self._names.items()}
        columns |= {name: columns[name].astype(np.bool_) for name in _FLAGS}
        completed, dropped = reason_masks(columns["reason"])
        outcomes = Outcomes(
            columns["arrived_at"],
            columns["first_token_at"],
            columns["ended_at"],
            columns["num_output_tokens"],
            completed,
            dropped,
            columns["tbt_max_s"],
        )
        targets = SloTargets(columns["ttft_slo_s"], columns["tpot_slo_s"], columns["deadline_at"], columns["tbt_slo_s"])
        columns["ttft_s"] = ttft_s(outcomes)
        columns["e2e_s"] = e2e_s(outcomes)
        columns["queue_s"] = columns["admitted_at"] - columns["arrived_at"]
        columns["tpot_s"] = tpot_s(outcomes)
        if self.has_drafts:
            columns["acceptance_length"] = acceptance_length(columns["num_drafts"], columns["num_accepted_tokens"])
        columns["slo_met"] = _slo_met(judge_slos(outcomes, targets, observed_until).overall)
        return columns

    _FIELD_NAMES = tuple(name for name, _ in _FIELDS)


_ALWAYS = (
    *(
        "request_id",
        "index",
        "replicaset",
        "replica_id",
        *_stated(FactKind.TEXT),
        *_LISTS,
        *_stated(FactKind.INTEGER, FactKind.FLAG),
    ),
    *("num_prompt_tokens", "num_output_tokens", "num_cached_tokens", "num_preemptions"),
    *("arrived_at", "admitted_at", "first_token_at", "ended_at", "reason", "detail"),
    *("ttft_s", "e2e_s", "queue_s", "tpot_s", "tbt_p50_s", "tbt_p99_s", "tbt_max_s"),
    *(*_stated(FactKind.NUMBER, FactKind.DURATION), "slo_met"),
)
REQUEST_COLUMNS = tuple(name for name in _ALWAYS if name not in PROGRAM_COLUMNS)
"""Columns of every requests table, in order; optional columns follow these."""

_ADMISSION_FIELDS = (
    *(("admission", "i"), ("degraded", "i"), ("shed_reason", "i")),
    *(("num_deferrals", "q"), ("deferral_reason", "i"), ("deferred_at", "d"), ("deferred_s", "d")),
)
ADMISSION_COLUMNS = tuple(name for name, _ in _ADMISSION_FIELDS)
"""Further columns of the requests table of a run with an admission policy. `admission` is accepted, degraded, refused,
deferred (until the request or the run ended) or empty (the request was rejected before the policy was called).
"""
ADMISSION_TEXTS = ("admission", "degraded", "shed_reason", "deferral_reason")
"""Text columns among the columns of admission."""

TBT_COLUMNS = ("replicaset", "slo_class", "gap_s", "weight")
"""Columns of the table of gaps between tokens, in order."""


class TbtBuilder:
    """Builder of the table of gaps between tokens (TBT): each distinct gap with its number of occurrences."""

    layout: Mapping[str, Any] = {"use_dictionary": ["replicaset", "slo_class"]}

    def __init__(self) -> None:
        self._lists: dict[tuple[str, str], GapList] = {}

    def __len__(self) -> int:
        """Return the number of distinct gaps."""
        return sum(len(gaps.merged()[0]) for gaps in self._lists.values())

    def gaps(self, replicaset: str, slo_class: str = "") -> GapList:
        """Return the gap list of this replicaset and SLO class; an empty `slo_class` means no class."""
        key = (replicaset, slo_class)
        found = self._lists.get(key)
        if found is None:
            found = self._lists[key] = GapList()
        return found

    def add(self, replicaset: str, slo_class: str, gap_s: float, weight: int) -> None:
        """Add a gap of `gap_s` seconds that `weight` requests saw."""
        self.gaps(replicaset, slo_class).add(gap_s, weight)

    def schema(self) -> ArrowSchema:
        """Return the names and types of the columns of the table of gaps."""
        import pyarrow as pa

        return pa.schema(list(zip(TBT_COLUMNS, (pa.string(), pa.string(), pa.float64(), pa.int64()), strict=True)))

    def to_table(self) -> ArrowTable:
        """Return the whole table, sorted by replicaset, SLO class and gap."""
        return _whole(self)

    def slices(self, num_rows: int) -> Iterator[ArrowTable]:
        """Yield slices of at most `num_rows` rows, each of one replicaset and SLO class."""
        import pyarrow as pa

        for (replicaset, slo_class), gap_list in sorted(self._lists.items()):
            gaps, weights = gap_list.merged()
            for start in range(0, len(gaps), num_rows):
                part = slice(start, start + num_rows)
                size = len(gaps[part])
                columns: Columns = {"gap_s": gaps[part], "weight": weights[part]}
                names = {"replicaset": replicaset, "slo_class": slo_class}
                columns |= {name: pa.repeat(arrow_array([text])[0], size) for name, text in names.items()}
                yield _table(columns, self.schema())


def reason_masks(reasons: Any) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return masks (completed, dropped) for these end reasons; dropped: rejected, expired or failed."""
    return is_among(reasons, COMPLETED_REASONS), is_among(reasons, ("rejected", "expired", "failed"))


def with_facts(table: ArrowTable, names: Sequence[str]) -> ArrowTable:
    """Return these columns of a requests table; a stated fact without a column counts as not stated."""
    import pyarrow as pa

    builder = RequestsBuilder()
    builder.has_programs = True
    schema = builder.schema()
    defaults = {fact.seen_as: _NAN if fact.default is None else fact.default for fact in FACTS}
    columns = [
        table.column(name)
        if name in table.column_names
        else pa.repeat(arrow_array([_in_column(defaults[name])], schema.field(name).type)[0], table.num_rows)
        for name in names
    ]
    return pa.table(columns, names=list(names))


def _in_column(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def write_parquet(builder: TableBuilder, path: str | Path) -> None:
    """Write a builder's table to a Parquet file, atomically: the path exists only once the file is complete.

    The same rows give the same bytes. Writing needs memory for one row group besides the builder's own.
    """
    import pyarrow.parquet as pq

    schema = builder.schema()
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    with pq.ParquetWriter(
        partial,
        schema,
        compression=_COMPRESSION,
        compression_level=_COMPRESSION_LEVEL,
        **builder.layout,
        version="2.6",
    ) as writer:
        for part in builder.slices(ROW_GROUP_ROWS):
            writer.write_table(part, row_group_size=ROW_GROUP_ROWS)
    os.replace(partial, target)


def _whole(builder: TableBuilder) -> ArrowTable:
    import pyarrow as pa

    parts = list(builder.slices(ROW_GROUP_ROWS))
    return pa.concat_tables(parts) if parts else builder.schema().empty_table()


def _table(columns: Columns, schema: ArrowSchema) -> ArrowTable:
    import pyarrow as pa

    arrays = [arrow_array(columns[field.name], field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _slo_met(overall: NDArray[np.int8]) -> Any:
    """Return booleans that are null where the SLO status is undecided or there is no SLO."""
    return arrow_array(overall == SloStatus.MET, is_null=~np.isin(overall, (SloStatus.MET, SloStatus.MISSED)))


__all__ = [
    "ADMISSION_COLUMNS",
    "ADMISSION_TEXTS",
    "PROGRAM_COLUMNS",
    "REQUEST_COLUMNS",
    "ROW_GROUP_ROWS",
    "STATED_COLUMNS",
    "TBT_COLUMNS",
    "TEXT_COLUMNS",
    "UNFINISHED",
    "GapList",
    "RequestsBuilder",
    "TableBuilder",
    "TbtBuilder",
    "reason_masks",
    "with_facts",
    "write_parquet",
]
