"""Read programs of calls from CSV, JSON Lines or Parquet: one row per call, with its program, parents and delay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vajra_py.errors import WorkloadError
from vajra_py.workload.arrays import F64, StringColumn
from vajra_py.workload.columns import Columns, follow_columns
from vajra_py.workload.content import NO_NODE, ContentBuilder, ContentColumn, SegmentSpace
from vajra_py.workload.files import file_facts, iter_csv_rows, iter_json_lines
from vajra_py.workload.followers import problem_with_parents
from vajra_py.workload.programs import CallGraph, ContextRule, nominal_arrivals, stated_of
from vajra_py.workload.stated import FactColumn
from vajra_py.workload.workload import Workload

__all__ = ["read_programs"]

_NEEDED = ("program", "call", "num_prompt_tokens", "num_output_tokens")
_TEXTS = ("stage", "tenant", "slo_class")
_MAY_HAVE = ("parents", "delay_s", "arrived_at", *_TEXTS, "program_slo_s")
_MOST_TOKENS = 2**31 - 1


@dataclass(slots=True)
class _Calls:
    """Calls read so far, in the order of the file."""

    graph: CallGraph = field(default_factory=CallGraph.empty)
    ids: dict[str, int] = field(default_factory=dict)
    """Line of the file for each request id, in the order of the calls."""
    prompts: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    slos: list[float] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in _TEXTS})
    programs: dict[str, int] = field(default_factory=dict)
    starts: list[float | None] = field(default_factory=list)
    row_of: dict[str, dict[str, int]] = field(default_factory=dict)
    """Row of each call read so far, by program and call."""
    parents_of: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Parents of every call in the file, by program and call."""


def read_programs(
    file: Path,
    starts: Callable[[int], F64] | None = None,
    *,
    num_programs: int | None = None,
    context: ContextRule = "none",
) -> Workload:
    """Read programs from a file: CSV, JSON Lines (`.jsonl`, `.json`), both optionally gzip-compressed, or Parquet.

    A row is a call. Its fields: `program` and `call` (an id within the program), `num_prompt_tokens`,
    `num_output_tokens`, `parents` (ids of earlier calls of the program, a list or separated by `;`), `delay_s` (seconds
    from the end of the last parent, or from the program's start), `arrived_at` (the program's start in seconds,
    required for its first call unless `starts` is given), `stage`, `tenant`, `slo_class` and `program_slo_s`. Ids of
    requests are `program/call`. Every call states its parents and the number of calls of its program.

    Args:
        file: file to read; its name determines the format.
        starts: function that returns start times, in seconds, for a number of programs; None uses `arrived_at`.
        num_programs: number of programs to take from the start of the file; None for all.
        context: with "grow", a prompt consists of the prompt of the call's first parent (left out unless it is
            shorter), the answers of all parents, and new text, all cut at the prompt's length; with "none", prompts
            share nothing.

    Raises:
        WorkloadError: a field is missing or out of range, a call occurs twice, a parent is unknown, comes later or
            depends on the call, or the file has too few programs; the error gives the line (for Parquet the row, from
            1).
    """
    calls, records = _Calls(), list(_records(file))
    for _, record in records:
        parents_of = calls.parents_of.setdefault(str(record.get("program")), {})
        parents_of.setdefault(str(record.get("call")), _parents(record.get("parents")))
    for line, record in records:
        if num_programs is None or str(record.get("program")) in calls.programs or len(calls.programs) < num_programs:
            _take(calls, file, line, record, is_timed=starts is None)
    found = len(calls.programs)
    if num_programs is not None and num_programs > found:
        raise WorkloadError(file, None, f"has {found} programs ({num_programs} requested)", "At most so many")
    if not found:
        raise WorkloadError(file, None, "is empty (no call in it)", "At least one call")
    begins = np.array(calls.starts, dtype=np.float64) if starts is None else starts(found)
    columns = _columns(calls, begins, context)
    facts = {**file_facts("program_file", file), "num_rows": len(records), "num_programs": found}
    return Workload(columns, file.name.split(".")[0], facts)


def _columns(calls: _Calls, begins: F64, context: ContextRule) -> Columns:
    graph, delay_s = calls.graph, np.array(calls.delays, dtype=np.float64)
    sizes = np.bincount(np.array(graph.programs, dtype=np.int64))
    programs = StringColumn(tuple(calls.programs), np.array(graph.programs, dtype=np.int32))
    stated: dict[str, FactColumn] = stated_of(graph, programs)
    stated |= {name: StringColumn.of(calls.texts[name]) for name in _TEXTS if any(calls.texts[name])}
    stated["num_program_calls"] = sizes[np.array(graph.programs, dtype=np.int64)]
    if not np.isnan(calls.slos).all():
        stated["program_slo_s"] = np.array(calls.slos, dtype=np.float64)
    return Columns(
        arrived_at=nominal_arrivals(graph, begins, delay_s)[0],
        num_prompt_tokens=np.array(calls.prompts, dtype=np.int64),
        num_output_tokens=np.array(calls.outputs, dtype=np.int64),
        request_id=StringColumn.of(calls.ids),
        content=_content(calls) if context == "grow" else None,
        **follow_columns(graph.parents),
        think_time_s=delay_s,
    ).stating(stated)


def _content(calls: _Calls) -> ContentColumn:
    """Return the contents of prompts with `context` "grow" (see `read_programs`)."""
    outputs = tuple(("out", call) for call in calls.ids)
    texts = tuple(("text", call) for call in calls.ids)
    builder = ContentBuilder((SegmentSpace("explicit", table=outputs), SegmentSpace("explicit", table=texts)))
    nodes: list[int] = []
    for row, parents in enumerate(calls.graph.parents):
        node, left = NO_NODE, calls.prompts[row]
        if parents and left > calls.prompts[parents[0]]:
            node, left = nodes[parents[0]], left - calls.prompts[parents[0]]
        for one in parents:
            answer = min(left, calls.outputs[one])
            if answer:
                node, left = builder.add(node, 0, one, answer), left - answer
        nodes.append(builder.add(node, 1, row, left) if left else node)
    return ContentColumn(builder.store(), np.array(nodes, dtype=np.int64))


def _take(calls: _Calls, file: Path, line: int, record: Mapping[str, Any], *, is_timed: bool) -> None:
    """Check the call of one row and append it to `calls`; `is_timed`: True if programs start at their `arrived_at`."""

    def error(message: str, allowed: str) -> WorkloadError:
        return WorkloadError(file, line, message, allowed)

    for name in _NEEDED:
        if record.get(name) in (None, ""):
            raise error(f"has no {name} ({', '.join(map(str, record))})", f"Needed: {', '.join(_NEEDED)}")
    program, call = str(record["program"]), str(record["call"])
    rows = calls.row_of.setdefault(program, {})
    if call in rows:
        raise error(f"call {call!r} of program {program!r} is there already", "A different call in each row")
    parents = _parents(record.get("parents"))
    request_id = f"{program}/{call}"
    if request_id in calls.ids:
        message = f"call {call!r} of program {program!r} has the id of line {calls.ids[request_id]} ({request_id!r})"
        raise error(message, "Names of programs and calls that differ when joined by `/`")
    fault = problem_with_parents(call, parents, rows, calls.parents_of[program])
    if fault is not None:
        what = fault[0].replace("a request that is not in the workload", "a call that its program does not have")
        what = what.replace("a request", "a call")
        raise error(f"call {call!r} of program {program!r} {what}", fault[1].replace("request", "call"))
    if program not in calls.programs:
        calls.programs[program] = len(calls.programs)
        start = _number(record.get("arrived_at"))
        if is_timed and (start is None or start < 0):
            message = f"the first call of program {program!r} has no start (arrived_at {record.get('arrived_at')!r})"
            raise error(message, "A finite number of seconds >= 0; or `arrivals`, which draws the starts")
        calls.starts.append(start)
    delay_s = 0.0 if record.get("delay_s") in (None, "") else _number(record["delay_s"])
    if delay_s is None or delay_s < 0:
        raise error(f"delay_s is not a duration ({record['delay_s']!r})", "A finite number of seconds >= 0, or nothing")
    slo_s = _number(record.get("program_slo_s"))
    if record.get("program_slo_s") not in (None, "") and (slo_s is None or slo_s < 0):
        raise error(f"program_slo_s is not a duration ({record['program_slo_s']!r})", "A finite number of seconds >= 0")
    for name, column in (("num_prompt_tokens", calls.prompts), ("num_output_tokens", calls.outputs)):
        value = _number(record[name])
        if value is None or value != int(value) or not 1 <= value <= _MOST_TOKENS:
            raise error(f"{name} cannot be used ({record[name]!r})", "A whole number >= 1")
        column.append(int(value))
    graph = calls.graph
    graph.programs.append(calls.programs[program])
    graph.parents.append(tuple(rows[one] for one in parents))
    graph.stages.append(str(record.get("stage") or ""))
    rows[call] = len(calls.ids)
    calls.ids[request_id] = line
    calls.delays.append(delay_s)
    calls.slos.append(np.nan if slo_s is None else slo_s)
    for name in _TEXTS:
        calls.texts[name].append(str(record.get(name) or ""))


def _parents(value: Any) -> list[str]:
    if value is None:
        return []
    given = value.split(";") if isinstance(value, str) else value if isinstance(value, list) else [value]
    return [text for text in (str(one).strip() for one in given) if text]


def _number(value: Any) -> float | None:
    """Convert a value (text in CSV) to a finite number; None if it is not one."""
    try:
        number = float(value) if not isinstance(value, bool) else np.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return float(number) if np.isfinite(number) else None


def _records(file: Path) -> Iterable[tuple[int, Mapping[str, Any]]]:
    """Return an iterable of the line number and the fields of each row of a file."""
    kinds = [one.lower() for one in file.suffixes if one.lower() != ".gz"]
    kind = kinds[-1] if kinds else ""
    if kind in (".jsonl", ".json"):
        return iter_json_lines(file)
    if kind == ".csv":
        return iter_csv_rows(file)
    if kind in (".parquet", ".pq"):
        return _parquet_rows(file)
    raise WorkloadError(file, None, f"is of an unknown kind ({kind or 'no suffix'})", "A .csv, .jsonl or .parquet file")


def _parquet_rows(file: Path) -> Iterable[tuple[int, Mapping[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file)
    except (OSError, pa.ArrowException) as error:
        message = f"is not a readable Parquet file ({' '.join(str(error).split())[:200]})"
        raise WorkloadError(file, None, message, "A whole Parquet file") from None
    wanted = [name for name in (*_NEEDED, *_MAY_HAVE) if name in table.column_names]
    return enumerate(table.select(wanted).to_pylist(), 1)
