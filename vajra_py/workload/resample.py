"""Draw replications of a trace with the seed: by random windows, block bootstrap or thinning.

A window is an unchanged interval of the trace. The block bootstrap treats the trace as a circle and concatenates random
blocks of it (D. N. Politis and J. P. Romano, "A circular block-resampling procedure for stationary data", 1992), so
that every request is equally likely. Thinning keeps each request, or each unit of requests, with a fixed probability.

A *unit* is a set of requests that are kept together: the requests of one program or session, requests linked by
`follows`, or a single request.

If the content of prompts is known, prompts may share prefixes, and the rate of prefix hits in a sample may differ from
that in the trace. The bootstrap therefore rejects a trace with known content. Thinning rejects it unless every request
belongs to a program or session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import structs

from vajra_py.errors import WorkloadError
from vajra_py.workload.arrays import F64, I64, ObjectArray, StringColumn, objects
from vajra_py.workload.columns import Columns, follow_columns
from vajra_py.workload.stated import FactColumn
from vajra_py.workload.workload import Workload

__all__ = ["block_bootstrap", "random_window", "thin", "units_of"]


def units_of(columns: Columns) -> I64:
    """Return for each request the unit to which it belongs; units are numbered from 0 in order of first appearance."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    size = len(columns)
    rows = np.arange(size, dtype=np.int64)
    pairs: list[tuple[I64, I64]] = []
    units = columns.unit_id
    if units is not None:
        groups = units.groups()
        named = np.array([bool(text) for text in units.tolist()], dtype=np.bool_)
        first = np.full(int(groups.max(initial=-1)) + 1, -1, dtype=np.int64)
        first[groups[::-1]] = rows[::-1]
        pairs.append((rows[named], first[groups[named]]))
    if columns.follows is not None:
        has_parent = columns.follows >= 0
        pairs.append((rows[has_parent], columns.follows[has_parent]))
    if columns.joins is not None:
        joined = [(row, parent) for row, others in enumerate(columns.joins) for parent in others]
        pairs.append((_column(joined, 0), _column(joined, 1)))
    if not pairs:
        return rows
    one, other = (np.concatenate(side) for side in zip(*pairs, strict=True))
    graph = coo_array((np.ones(len(one), dtype=np.bool_), (one, other)), shape=(size, size))
    return _ranked(connected_components(graph, directed=False)[1])


def _column(pairs: Sequence[tuple[int, int]], side: int) -> I64:
    return np.array([pair[side] for pair in pairs], dtype=np.int64)


def _ranked(labels: Any) -> I64:
    """Return the labels as numbers from 0 in order of first appearance."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    return rank[inverse.reshape(-1)]


def random_window(
    workload: Workload, rng: np.random.Generator, *, num_requests: int | None = None, duration_s: float | None = None
) -> Workload:
    """Return a window of the workload with a uniformly random start.

    Exactly one length is given: `num_requests`, or `duration_s` in seconds. The window is cut like `Workload.slice`: a
    request whose parents are before the window arrives at its nominal time. The clock starts at the window's start.

    Raises:
        WorkloadError: the workload is no longer than the window.
    """
    total, times = len(workload), workload.columns.arrived_at
    if num_requests is not None:
        if num_requests >= total:
            message = f"window: random is to be {num_requests:,} of {total:,} requests, which leaves no choice"
            raise WorkloadError(workload.name, None, message, f"first below {total:,}")
        skip = int(rng.integers(0, total - num_requests + 1))
        columns = workload.slice(skip=skip, first=num_requests).columns
        columns = structs.replace(columns, arrived_at=columns.arrived_at - columns.arrived_at[0])
        return _noted(workload, columns, op="window", skip=skip, num_requests=num_requests)
    assert duration_s is not None  # checked by the caller
    span_s = float(times[-1] - times[0]) if total else 0.0
    if duration_s >= span_s:
        message = f"window: random is to be {duration_s:g} s of {span_s:g} s, which leaves no choice"
        raise WorkloadError(workload.name, None, message, f"window_s below {span_s:g}")
    start_s = float(times[0]) + float(rng.uniform(0.0, span_s - duration_s))
    kept = workload.slice(start_s=start_s, end_s=start_s + duration_s)
    return _noted(workload, kept.columns, op="window", start_s=start_s, duration_s=duration_s)


def thin(
    workload: Workload, rng: np.random.Generator, *, rate: float | None = None, fraction: float | None = None
) -> Workload:
    """Keep each unit independently with the same probability.

    Exactly one of two arguments is given: the probability `fraction`, or `rate`, the mean number of requests per second
    to keep.

    Raises:
        WorkloadError: the rate of the trace is not above `rate`, is undefined, or depends on the system because
            requests follow each other; or the content of its prompts is known and some request belongs to no program or
            session.
    """
    columns = workload.columns
    if rate is not None:
        if workload.has_followers:
            message = "thin.rate: requests follow one another, so their rate depends on the system"
            raise WorkloadError(workload.name, None, message, "thin.fraction")
        if not rate < workload.rate:
            message = f"thin.rate is not below the trace's own rate ({rate:g} and {workload.rate:g} requests/s)"
            raise WorkloadError(workload.name, None, message, "A lower one; or workload.rate, which stretches time")
        fraction = rate / workload.rate
    assert fraction is not None  # checked by the caller
    _check_content(workload, "thin", _has_sessions(columns))
    units = units_of(columns)
    is_kept = rng.random(int(units.max(initial=-1)) + 1) < fraction
    rows = np.nonzero(is_kept[units])[0].astype(np.int64)
    return _noted(workload, columns.take(rows), op="thin", fraction=fraction, rate=rate)


def block_bootstrap(
    workload: Workload,
    rng: np.random.Generator,
    *,
    block_s: float | None = None,
    block_requests: int | None = None,
    first: int | None = None,
) -> Workload:
    """Concatenate blocks of the workload, at uniformly random starts, until they are as long as the workload.

    Exactly one size of blocks is given: `block_s`, a duration in seconds, or `block_requests`, a number of units (see
    the module). With `block_s`, the sample has the duration of the workload, and its number of requests varies. With
    `block_requests`, the sample has as many units as the workload, each at its recorded gap after the previous unit;
    its duration varies. A unit belongs entirely to the block that contains its first request. `first` ends the sample
    after that many requests if each unit is a single request; else `first` has no effect. Request ids are renumbered;
    ids of sessions and programs are extended by the number of the drawn unit.

    Raises:
        WorkloadError: the trace is no longer than a block, or the content or token ids of its prompts are known, so
            that prompts of blocks drawn twice would be prefix hits.
    """
    _check_content(workload, "bootstrap", is_kept_whole=False)
    columns = workload.columns
    if columns.prompt_token_ids is not None:
        raise WorkloadError(workload.name, None, "bootstrap: prompts have token ids, and would repeat", _OTHERS)
    units = units_of(columns)
    starts_s = columns.arrived_at[np.unique(units, return_index=True)[1]]
    if block_s is not None:
        drawn, begins_s = _blocks_by_time(workload, starts_s, rng, block_s)
    else:
        assert block_requests is not None  # checked by the caller
        drawn, begins_s = _blocks_by_number(workload, starts_s, rng, block_requests)
    order = np.argsort(units, kind="stable")
    sizes = np.bincount(units)
    ends = np.cumsum(sizes)
    # The first units contain the first requests only if each unit is a single request: turns of a session may arrive
    # after requests of later units.
    if first is not None and sizes.max() == 1:
        drawn, begins_s = drawn[:first], begins_s[:first]
    copies = np.repeat(np.arange(len(drawn), dtype=np.int64), sizes[drawn])
    place = np.arange(len(copies)) - np.repeat(np.cumsum(sizes[drawn]) - sizes[drawn], sizes[drawn])
    rows = order[np.repeat(ends[drawn] - sizes[drawn], sizes[drawn]) + place]
    times = begins_s[copies] + (columns.arrived_at[rows] - starts_s[drawn[copies]])
    sample = _copied(columns, rows, copies, times)
    facts = {"op": "bootstrap", "block_s": block_s, "block_requests": block_requests, "num_units": len(drawn)}
    return _noted(workload, sample, **facts)


def _blocks_by_time(workload: Workload, starts_s: F64, rng: np.random.Generator, block_s: float) -> tuple[I64, F64]:
    """Draw units in blocks of `block_s` seconds; return the units, and the start time of each in seconds."""
    span_s = _circle_s(starts_s)
    _check_block(workload, f"{block_s:g} s", block_s < span_s, f"{span_s:g} s")
    origin_s = float(starts_s[0])
    at_s = starts_s - origin_s
    count = int(np.ceil(span_s / block_s))
    drawn: list[I64] = []
    begins: list[F64] = []
    for block, start_s in enumerate(rng.uniform(0.0, span_s, count).tolist()):
        length_s = min(block_s, span_s - block * block_s)
        rounds = np.concatenate([at_s, at_s + span_s])
        low, high = np.searchsorted(rounds, [start_s, start_s + length_s], side="left")
        drawn.append(np.arange(low, high, dtype=np.int64) % len(at_s))
        begins.append(rounds[low:high] - start_s + block * block_s)
    return np.concatenate(drawn), np.concatenate(begins)


def _blocks_by_number(workload: Workload, starts_s: F64, rng: np.random.Generator, block: int) -> tuple[I64, F64]:
    """Draw units in blocks of `block` units; return the units, and the start time of each in seconds. Gaps between
    units are as recorded.
    """
    total = len(starts_s)
    _check_block(workload, f"{block:,}", block < total, f"{total:,} requests or sessions")
    gaps_s = np.diff(starts_s, prepend=starts_s[-1] - _circle_s(starts_s))
    count = -(-total // block)
    first = rng.integers(0, total, count)
    drawn = ((first[:, None] + np.arange(block)) % total).reshape(-1)[:total]
    begins_s = np.cumsum(gaps_s[drawn])
    return drawn.astype(np.int64), begins_s - begins_s[0]


def _check_block(workload: Workload, block: str, is_shorter: bool, total: str) -> None:
    if not is_shorter:
        message = f"bootstrap: a block is as long as the trace or longer ({block} of {total})"
        raise WorkloadError(workload.name, None, message, "Blocks much shorter than the trace")


def _copied(columns: Columns, rows: I64, copies: I64, times: F64) -> Columns:
    """Return copies of these rows at these times, under new ids; links within the same copy of a unit are kept."""
    order = np.argsort(times, kind="stable")
    rows, copies, times = rows[order], copies[order], times[order]
    numbers = np.arange(len(rows), dtype=np.int64)
    changes: dict[str, Any] = {"arrived_at": times, "request_id": StringColumn.numbered("", numbers)}
    is_linked = columns.follows is not None or "parent_calls" in columns.stated
    pairs = list(zip(copies.tolist(), rows.tolist(), strict=True)) if is_linked else []
    place = {pair: new for new, pair in enumerate(pairs)}
    if columns.follows is not None:
        parents = [[place[copy, parent] for parent in columns.parents(row)] for copy, row in pairs]
        changes |= follow_columns(parents)
    copied = structs.replace(structs.replace(columns, follows=None, joins=None).take(rows), **changes)
    named = {"session_id": copied.session_id, "program_id": copied.program_id}
    renamed: dict[str, FactColumn] = {
        fact: StringColumn.of(
            f"{name}#{copy}" if name else "" for name, copy in zip(column.tolist(), copies.tolist(), strict=True)
        )
        for fact, column in named.items()
        if column is not None
    }
    if "parent_calls" in columns.stated:
        renamed["parent_calls"] = _copied_calls(columns, pairs, place)
    return copied.stating(renamed)


def _copied_calls(
    columns: Columns, pairs: Sequence[tuple[int, int]], place: Mapping[tuple[int, int], int]
) -> ObjectArray:
    """Return the `parent_calls` of the copied requests, as ids of copies. Calls outside the same copy of a unit are left
    out.

    `pairs` holds the copy and the row of each request, and `place` the new row of each pair.
    """
    row_of = {name: row for row, name in enumerate(columns.request_id.tolist())}
    stated = [[row_of.get(name, -1) for name in names] for names in columns.values("parent_calls")]
    return objects([tuple(str(place[copy, one]) for one in stated[row] if (copy, one) in place) for copy, row in pairs])


_OTHERS = "window: random"


def _check_content(workload: Workload, what: str, is_kept_whole: bool) -> None:
    if workload.columns.content is not None and not is_kept_whole:
        why = (
            "and the trace has no sessions to keep whole"
            if what == "thin"
            else "and blocks that are drawn twice would repeat them"
        )
        message = f"{what}: prompts share prefixes, {why}: the prefix cache would have other hits than in the trace"
        raise WorkloadError(workload.name, None, message, _OTHERS)


def _has_sessions(columns: Columns) -> bool:
    return columns.unit_id is not None and all(columns.unit_id.tolist())


def _circle_s(times: F64) -> float:
    """Return the time span of the arrivals plus one mean gap, in seconds: number of arrivals divided by their rate."""
    size = len(times)
    return float(times[-1] - times[0]) * size / (size - 1) if size > 1 else 0.0


def _noted(workload: Workload, columns: Columns, **operation: Any) -> Workload:
    """Return a workload of the sampled requests, with the sampling recorded in `source["operations"]`."""
    operations: Sequence[Any] = [*workload.source.get("operations", []), operation]
    return Workload(columns, workload.name, {**workload.source, "operations": operations})
