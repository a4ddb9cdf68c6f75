"""Read CSV traces (Azure, BurstGPT, length files, others by column names).

Without an id column, ids are the numbers of the data rows (from 0). Rows must be in order of arrival, unless sorting is
enabled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field, structs

from vajra_py.contract.facts import FACTS
from vajra_py.errors import WorkloadError, did_you_mean
from vajra_py.workload.arrays import F64, ObjectArray, StringColumn, int64s, objects
from vajra_py.workload.cells import TimeUnit, durations, limits, text, times_in, token_counts
from vajra_py.workload.columns import Columns, follow_columns, in_order
from vajra_py.workload.content import NO_NODE, ContentBuilder, ContentColumn, SegmentSpace
from vajra_py.workload.files import Array, Column, Table, file_facts, read_header, read_table
from vajra_py.workload.followers import problem_with_parents
from vajra_py.workload.request import MetadataValue
from vajra_py.workload.stated import CSV_FIELDS, REQUIRED_FIELDS, FactColumn, format_of
from vajra_py.workload.workload import Workload

__all__ = ["CsvLayout", "read_azure", "read_burstgpt", "read_csv", "read_lengths"]

_STATED = {fact.name: format_of(fact) for fact in FACTS}
MOST_SHOWN = 300
"""Maximum number of characters of a header to show in an error."""

COMMON_NAMES: Mapping[str, tuple[str, ...]] = {
    "arrived_at": (
        "arrived_at", "arrival_s", "arrival_s_synthetic", "arrival_time", "arrival_time_s", "arrival", "arrived_at_s",
        "timestamp_s", "timestamp", "time_s",
    ),
    "num_prompt_tokens": (
        "num_prompt_tokens", "num_prefill_tokens", "prompt_tokens", "input_tokens", "input_length", "prompt_length",
        "prompt_len", "input_len", "contexttokens", "request tokens", "num_input_tokens",
    ),
    "num_output_tokens": (
        "num_output_tokens", "num_decode_tokens", "output_tokens", "output_length", "output_len", "completion_tokens",
        "response_tokens", "response tokens", "generatedtokens", "num_generated_tokens", "decode_tokens",
    ),
    "tenant": ("tenant", "tenant_id", "client", "client_id", "user", "user_id"),
}  # fmt: skip
"""Usual column names (in lower case) by field, as found in public files of lengths."""

PREFIX_BLOCKS = re.compile(r"prefix_block_ids_(\d+)")


class CsvLayout(Struct, frozen=True):
    """Mapping of columns to fields of requests, and options of reading.

    Attributes:
        columns: column name of each field of `RequestSpec` to read (see CSV_FIELDS).
        metadata: names of columns kept as metadata.
        rebase: True to start the clock at the first arrival; always done if `time_unit` is "datetime".
        drop_empty: True to drop and count rows with 0 prompt or output tokens; False: such rows are errors.
        sort: True to sort rows by arrival; False: descending times are errors.
        filters: text that a row must have to be kept, by column name.
        blocks: name of the column of prefix block ids, or empty.
    """

    columns: Mapping[str, str]
    time_unit: TimeUnit = "s"
    metadata: Sequence[str] = ()
    rebase: bool = False
    drop_empty: bool = False
    sort: bool = False
    filters: Mapping[str, str] = field(default_factory=dict)
    blocks: Sequence[str] = ()


def read_azure(file: Path, *, sort: bool = False, drop_empty: bool = False) -> Workload:
    """Read an Azure LLM inference trace: `TIMESTAMP` (date and time), `ContextTokens`, `GeneratedTokens`.

    The clock starts at the first request. Source: Azure Public Dataset, 2023 and 2024 LLM traces (Patel et al.,
    Splitwise, ISCA 2024).

    Raises:
        WorkloadError: the file is not as described; the error gives the line.
    """
    columns = {
        "arrived_at": "TIMESTAMP",
        "num_prompt_tokens": "ContextTokens",
        "num_output_tokens": "GeneratedTokens",
    }
    return _read(file, "azure", CsvLayout(columns, "datetime", sort=sort, drop_empty=drop_empty, rebase=True))


def read_burstgpt(
    file: Path, *, sort: bool = False, drop_empty: bool = True, model: str | None = None, log_type: str | None = None
) -> Workload:
    """Read a BurstGPT trace.

    Columns: `Timestamp` (seconds), `Model`, `Request tokens`, `Response tokens`, `Total tokens`, `Log Type`. The clock
    starts at the first request kept. Failures (0 response tokens) are dropped and counted unless `drop_empty` is false.
    `model` and `log_type` keep only the rows with the given value; both become metadata of each request. Source: Wang
    et al., BurstGPT, arXiv 2401.17644.

    Raises:
        WorkloadError: the file is not as described (the error gives the line), or no row is left.
    """
    columns = {
        "arrived_at": "Timestamp",
        "num_prompt_tokens": "Request tokens",
        "num_output_tokens": "Response tokens",
    }
    if "Session ID" in read_header(file):
        columns["session_id"] = "Session ID"
    wanted = {"Model": model, "Log Type": log_type}
    layout = CsvLayout(
        columns,
        metadata=("Model", "Log Type"),
        rebase=True,
        drop_empty=drop_empty,
        sort=sort,
        filters={name: value for name, value in wanted.items() if value is not None},
    )
    return _read(file, "burstgpt", layout)


def read_csv(file: Path, layout: CsvLayout | None = None) -> Workload:
    """Read any CSV file with a header.

    Columns are found by `layout.columns`, else by usual names, such as `num_prefill_tokens` and `num_decode_tokens`
    (Vidur), else by the field names of `RequestSpec`.

    Raises:
        WorkloadError: a column is missing or unknown, or the file is not as described; the error gives the line.
    """
    layout = layout or CsvLayout({})
    header = read_header(file)
    unknown = sorted(set(layout.columns) - set(CSV_FIELDS))
    if unknown:
        message = f"no such field to map a column to ({unknown[0]!r})"
        raise WorkloadError(file, None, message, did_you_mean(unknown[0], CSV_FIELDS))
    columns = {name: name for name in CSV_FIELDS if name in header} | _common_columns(header) | dict(layout.columns)
    for name in REQUIRED_FIELDS:
        if name not in columns:
            raise _no_column(file, name, header)
    return _read(file, "csv", structs.replace(layout, columns=columns))


def read_lengths(
    file: Path,
    *,
    arrivals: Callable[[int], F64] | None = None,
    num_requests: int | None = None,
    sample: np.random.Generator | None = None,
    layout: CsvLayout | None = None,
) -> Workload:
    """Read a file of prompt and output lengths under any of the usual column names, with or without arrivals.

    A column of tenants is read too, and so is a column of chained prefix block ids (`prefix_block_ids_16` holds the ids
    of the prompt's full 16-token blocks).

    Args:
        file: CSV file with a header.
        arrivals: function that returns arrival times, in seconds, for a number of requests; None uses the file's
            column.
        num_requests: number of requests; None for all rows. A number greater than the number of rows needs `sample`.
        sample: draws rows with replacement; None takes the first rows. Needs `arrivals`, and a file without prefix
            block ids, since prompts of rows drawn twice would be prefix hits.
        layout: columns in addition to those found by name.

    Raises:
        WorkloadError: a column is missing, there are no arrivals, or the file is too short or not as described; the
            error gives the line.
    """
    header = read_header(file)
    layout = layout or CsvLayout({})
    columns = _common_columns(header) | dict(layout.columns)
    for name in REQUIRED_FIELDS[1:]:
        if name not in columns:
            raise _no_column(file, name, header)
    if arrivals is not None:
        columns.pop("arrived_at", None)
    elif "arrived_at" not in columns:
        raise _no_column(file, "arrived_at", header, "Give `arrivals` to draw them. ")
    blocks = [name for name in header if PREFIX_BLOCKS.fullmatch(name)]
    table, requests, facts = _columns(file, "lengths", structs.replace(layout, columns=columns, blocks=blocks[:1]))
    wanted = len(requests) if num_requests is None else num_requests
    if sample is not None:
        if requests.content is not None:
            message = f"sample: prompts share prefixes ({blocks[0]}), and rows that are drawn twice would repeat them"
            raise WorkloadError(file, 1, message, "The file's rows in order (sample: false)")
        rows = sample.integers(0, len(requests), wanted)
        requests = structs.replace(requests.take(rows), request_id=StringColumn.numbered("", np.arange(wanted)))
    elif wanted > len(requests):
        allowed = "At most so many, or sample: true to draw rows with replacement"
        raise WorkloadError(file, None, f"has {len(table)} rows of lengths ({wanted} requested)", allowed)
    elif wanted < len(requests):
        requests = requests.take(np.arange(wanted, dtype=np.int64))
    if arrivals is not None:
        requests = structs.replace(requests, arrived_at=arrivals(wanted))
    return Workload(requests, _stem(file), facts)


def _stem(file: Path) -> str:
    """Return the file's name without suffixes, the default name of its workload."""
    return file.name.split(".")[0] or file.name


def _common_columns(header: Sequence[str]) -> dict[str, str]:
    """Return those columns of a header that have a usual name, by field; earlier names in `COMMON_NAMES` take
    precedence.
    """
    lowered = {name.lower(): name for name in reversed(header)}
    found = ((key, next((lowered[n] for n in names if n in lowered), None)) for key, names in COMMON_NAMES.items())
    return {key: name for key, name in found if name is not None}


def _no_column(file: Path, key: str, header: Sequence[str], advice: str = "") -> WorkloadError:
    names = ", ".join(COMMON_NAMES[key])
    found = ", ".join(header)
    shown = found if found.isprintable() else ascii(found)
    message = f"has no column for {key} ({shown if len(shown) <= MOST_SHOWN else shown[:MOST_SHOWN] + '…'})"
    return WorkloadError(file, 1, message, f"{advice}A column of one of these names: {names}")


def _wanted(layout: CsvLayout) -> list[Column]:
    parse_time, allowed_time = times_in(layout.time_unit)
    tokens = (token_counts(0 if layout.drop_empty else 1), "A whole number of tokens >= 1")
    parsers = {
        "arrived_at": (parse_time, allowed_time),
        "num_prompt_tokens": tokens,
        "num_output_tokens": tokens,
        "max_tokens": (limits, "A whole number >= 1, or nothing"),
        "think_time_s": (durations, "A finite number of seconds >= 0, or nothing"),
        **dict.fromkeys(("request_id", "follows"), (text, "Any text")),
        **{name: (format.parse_cells, format.cells_allowed) for name, format in _STATED.items()},
    }
    columns = [Column(key, name, *parsers[key]) for key, name in layout.columns.items()]
    others = dict.fromkeys([*layout.metadata, *layout.filters, *layout.blocks])
    return columns + [Column(f"text {name}", name, text, "Any text") for name in others]


def _read(file: Path, kind: str, layout: CsvLayout) -> Workload:
    _, requests, facts = _columns(file, kind, layout)
    return Workload(requests, _stem(file), facts)


def _columns(file: Path, kind: str, layout: CsvLayout) -> tuple[Table, Columns, dict[str, Any]]:
    """Return the table, the requests of the rows kept, and the manifest's facts about file and rows."""
    table = read_table(file, _wanted(layout))
    facts: dict[str, Any] = {**file_facts(kind, file), "num_rows": len(table), "columns": dict(layout.columns)}
    keep = np.ones(len(table), dtype=np.bool_)
    for name, value in layout.filters.items():
        cells = table[f"text {name}"]
        keep &= cells == value
        facts.setdefault("filters", {})[name] = value
        if not keep.any():
            present = sorted({str(cell) for cell in cells})[:20]
            raise WorkloadError(file, None, f"no row is left with {name} {value!r}", did_you_mean(value, present))
    if layout.drop_empty:
        full = (table["num_prompt_tokens"] >= 1) & (table["num_output_tokens"] >= 1)
        facts["num_dropped_empty"] = int((keep & ~full).sum())
        keep &= full
        if not keep.any():
            raise WorkloadError(file, None, "no row is left with a prompt and an output", "At least one request")
    rows = np.nonzero(keep)[0].astype(np.int64)
    requests = _all_rows(table, layout).take(rows)
    if "arrived_at" in layout.columns:
        requests = structs.replace(requests, arrived_at=_seconds(table["arrived_at"][rows], layout)).sorted_by_arrival()
    return table, requests, facts


def _seconds(stamps: Array, layout: CsvLayout) -> F64:
    """Return the arrivals of the rows kept, in seconds on the workload's clock."""
    if layout.rebase or layout.time_unit == "datetime":
        stamps = stamps - stamps.min()
    return stamps / 1e9 if layout.time_unit == "datetime" else stamps.astype(np.float64)


def _all_rows(table: Table, layout: CsvLayout) -> Columns:
    """Return all rows of the table in the file's order, with arrivals in the file's unit."""
    changes: dict[str, Any] = {"request_id": StringColumn.numbered("", np.arange(len(table), dtype=np.int64))}
    stated: dict[str, FactColumn] = {}
    for key in layout.columns:
        values = table[key]
        if key in _STATED:
            is_text = values.dtype == np.object_
            stated[key] = _STATED[key].column(values.tolist()) if is_text else values
        elif key == "think_time_s":
            changes[key] = np.nan_to_num(values, nan=0.0)
        elif key != "follows":
            changes[key] = StringColumn.of(values.tolist()) if key == "request_id" else values
    stamps = changes.setdefault("arrived_at", np.zeros(len(table)))
    if not layout.sort and len(stamps) > 1 and bool(np.any(stamps[1:] < stamps[:-1])):
        row = int(np.argmax(stamps[1:] < stamps[:-1])) + 1
        message = f"arrives before the row above it (column {layout.columns['arrived_at']!r})"
        raise table.error(row, message, "Ascending times; or sort: true")
    if "request_id" in layout.columns:
        _check_ids(table, layout.columns["request_id"])
    if "follows" in layout.columns:
        changes |= _parents(table, changes["request_id"].tolist(), stamps)
    if layout.metadata:
        changes["metadata"] = _metadata([(name, table[f"text {name}"].tolist()) for name in layout.metadata])
    if layout.blocks:
        changes["content"] = _block_content(table, changes["num_prompt_tokens"].tolist(), layout.blocks[0])
    return Columns(**changes, stated=in_order(stated))


def _check_ids(table: Table, name: str) -> None:
    seen: set[str] = set()
    for row, value in enumerate(table["request_id"].tolist()):
        if not value or value in seen:
            message = f"column {name!r}: the id is empty or used before ({value!r})"
            raise table.error(row, message, "A different id for each request")
        seen.add(value)


def _metadata(columns: Sequence[tuple[str, list[str]]]) -> ObjectArray:
    """Return the metadata mapping of each row; rows with equal values share one object."""
    names = [name for name, _ in columns]
    known: dict[tuple[str, ...], Mapping[str, MetadataValue]] = {}
    cells = zip(*(values for _, values in columns), strict=True)
    return objects([known.setdefault(row, dict(zip(names, row, strict=True))) for row in cells])


def _parents(table: Table, ids: Sequence[str], stamps: Array) -> dict[str, Any]:
    """Return the columns of parents. A cell with `;` that is not itself an id is a list of ids."""
    row_of = {request_id: row for row, request_id in enumerate(ids)}
    parents_of: dict[str, list[str]] = {}
    for request_id, cell in zip(ids, table["follows"].tolist(), strict=True):
        several = ";" in cell and cell not in row_of
        parents_of[request_id] = [entry.strip() for entry in cell.split(";")] if several else [cell] if cell else []
    earlier: set[str] = set()
    for row in np.argsort(stamps, kind="stable").tolist():
        problem = problem_with_parents(ids[row], parents_of[ids[row]], earlier, parents_of)
        if problem is not None:
            raise table.error(row, *problem)
        earlier.add(ids[row])
    return follow_columns([[row_of[parent] for parent in parents_of[request_id]] for request_id in ids])


def _is_block_id(text: str) -> bool:
    return text.isdecimal() and len(text) < 20 and int(text) < 2**63


def _block_content(table: Table, lengths: Sequence[int], name: str) -> ContentColumn:
    """Return contents from chained block ids; the tokens after the last full block are unique to the prompt."""
    match = PREFIX_BLOCKS.fullmatch(name)
    block_tokens = int(match[1]) if match is not None else 0
    builder = ContentBuilder((SegmentSpace("number"), SegmentSpace("number", "rest")))
    nodes = int64s(len(lengths), NO_NODE)
    for row, (cell, length) in enumerate(zip(table[f"text {name}"].tolist(), lengths, strict=True)):
        ids = cell.split()
        if len(ids) * block_tokens > length or not all(map(_is_block_id, ids)):
            message = f"column {name!r} does not list the full blocks of a prompt of {length} tokens ({cell[:40]!r})"
            allowed = f"At most one id (a whole number from 0 to 2**63 - 1) per {block_tokens} tokens"
            raise table.error(row, message, allowed)
        node = NO_NODE
        for entry in ids:
            node = builder.add(node, 0, int(entry), block_tokens)
        rest = length - len(ids) * block_tokens
        nodes[row] = builder.add(node, 1, row, rest) if rest else node
    return ContentColumn(builder.store(), nodes)
