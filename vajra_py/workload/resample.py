"""Replications of a trace: other requests of the same kind, drawn from it by the seed.

A window is a stretch of the trace as it stands. The block bootstrap puts blocks of it together anew, with the ends of the trace joined (D. N. Politis and J. P. Romano, "A circular
block-resampling procedure for stationary data", 1992), so that every request is equally likely. Thinning keeps each request, or each session as a whole, with one probability.

A *unit* is what stays together: the requests of one session and those that follow each other, or a request alone. Thinning and bootstrap would change how often prompts find their
prefix in a cache where requests share content beyond their unit, and refuse such traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vajra_py.errors import WorkloadError
from vajra_py.workload.arrays import F64, I64, StringColumn
from vajra_py.workload.columns import Columns, follow_columns
from vajra_py.workload.workload import Workload

__all__ = ["block_bootstrap", "random_window", "thin", "units_of"]


def units_of(columns: Columns) -> I64:
    """A number for each request, from 0 in order of first appearance; equal for those that stay together."""
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
    """The labels as numbers from 0 in order of first appearance."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    return rank[inverse.reshape(-1)]


def random_window(
    workload: Workload, rng: np.random.Generator, *, num_requests: int | None = None, duration_s: float | None = None
) -> Workload:
    """A stretch of the workload that begins at a place drawn uniformly: `num_requests` in a row, or `duration_s` seconds. One of the two is given.

    It is cut as `Workload.slice` cuts: a follower of a request before the window arrives at its nominal time. The clock starts at the window's start.

    Raises:
        WorkloadError: the workload is no longer than the window.
    """
    total, times = len(workload), workload.columns.arrived_at
    if num_requests is not None:
        if num_requests >= total:
            message = f"window: random is to be {num_requests:,} of {total:,} requests, which leaves nothing to draw"
            raise WorkloadError(workload.name, None, message, f"first below {total:,}")
        skip = int(rng.integers(0, total - num_requests + 1))
        columns = workload.slice(skip=skip, first=num_requests).columns
        columns = replace(columns, arrived_at=columns.arrived_at - columns.arrived_at[0])
        return _noted(workload, columns, op="window", skip=skip, num_requests=num_requests)
    assert duration_s is not None  # checked by the caller
    span_s = float(times[-1] - times[0]) if total else 0.0
    if duration_s >= span_s:
        message = f"window: random is to be {duration_s:g} s of {span_s:g} s, which leaves nothing to draw"
        raise WorkloadError(workload.name, None, message, f"window_s below {span_s:g}")
    start_s = float(times[0]) + float(rng.uniform(0.0, span_s - duration_s))
    kept = workload.slice(start_s=start_s, end_s=start_s + duration_s)
    return _noted(workload, kept.columns, op="window", start_s=start_s, duration_s=duration_s)


def thin(
    workload: Workload, rng: np.random.Generator, *, rate: float | None = None, fraction: float | None = None
) -> Workload:
    """Each unit kept by itself with one probability: `fraction`, or the one that leaves `rate` requests per second on average. One of the two is given.

    Raises:
        WorkloadError: the trace is not denser than `rate`, has no rate or requests that follow each other (whose rate is not the trace's), or its
            prompts share content and it has no sessions.
    """
    columns = workload.columns
    if rate is not None:
        if workload.has_followers:
            message = "thin.rate: requests follow one another, so that their rate depends on who serves them"
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
    """Blocks of the workload at places drawn uniformly, one after the other, until they are as long as it: `block_s` seconds, or `block_requests` units.

    With `block_s` the sample is as long in time and its number of requests varies; with `block_requests` it has as many units, each at its own distance from the one before, and its
    length varies. A unit belongs to the block that it begins in and comes whole. One of the two is given; `first` ends the sample once that many requests are there.
    Ids are numbered anew; those of sessions have the number of the draw.

    Raises:
        WorkloadError: the trace is no longer than a block, or its prompts share content: blocks that are drawn twice would be served from a cache.
    """
    _check_content(workload, "bootstrap", is_kept_whole=False)
    columns = workload.columns
    if columns.prompt_token_ids is not None:
        raise WorkloadError(
            workload.name, None, "bootstrap: prompts are known by their tokens, and would repeat", _OTHERS
        )
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
    if (
        first is not None and sizes.max() == 1
    ):  # no more than are needed; later turns of sessions may come earlier than new ones
        drawn, begins_s = drawn[:first], begins_s[:first]
    copies = np.repeat(np.arange(len(drawn), dtype=np.int64), sizes[drawn])
    place = np.arange(len(copies)) - np.repeat(np.cumsum(sizes[drawn]) - sizes[drawn], sizes[drawn])
    rows = order[np.repeat(ends[drawn] - sizes[drawn], sizes[drawn]) + place]
    times = begins_s[copies] + (columns.arrived_at[rows] - starts_s[drawn[copies]])
    sample = _copied(columns, rows, copies, times)
    facts = {"op": "bootstrap", "block_s": block_s, "block_requests": block_requests, "num_units": len(drawn)}
    return _noted(workload, sample, **facts)


def _blocks_by_time(workload: Workload, starts_s: F64, rng: np.random.Generator, block_s: float) -> tuple[I64, F64]:
    """The units drawn and when each begins, by blocks of equal time."""
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
    """Return the units drawn, in blocks of `block` units, and their start times; each keeps its gap of the trace."""
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
        message = f"bootstrap: a block is not shorter than the trace ({block} of {total})"
        raise WorkloadError(workload.name, None, message, "Blocks of which many make the trace")


def _copied(columns: Columns, rows: I64, copies: I64, times: F64) -> Columns:
    """Return these rows at these times, under ids of their own. Rows of one copy of a unit stay together, and follow each other as in the trace."""
    order = np.argsort(times, kind="stable")
    rows, copies, times = rows[order], copies[order], times[order]
    numbers = np.arange(len(rows), dtype=np.int64)
    changes: dict[str, Any] = {"arrived_at": times, "request_id": StringColumn.numbered("", numbers)}
    if columns.follows is not None:
        place = {(copy, row): new for new, (copy, row) in enumerate(zip(copies.tolist(), rows.tolist(), strict=True))}
        parents = [
            [place[copy, parent] for parent in columns.parents(row)]
            for copy, row in zip(copies.tolist(), rows.tolist(), strict=True)
        ]
        changes |= follow_columns(parents)
    stated = {name: column for name, column in columns.stated.items() if name != "parent_calls"}  # with other ids
    copied = replace(replace(columns, follows=None, joins=None, stated=stated).take(rows), **changes)
    named = {"session_id": copied.session_id, "program_id": copied.program_id}
    renamed = {
        fact: StringColumn.of(
            f"{name}#{copy}" if name else "" for name, copy in zip(column.tolist(), copies.tolist(), strict=True)
        )
        for fact, column in named.items()
        if column is not None
    }
    return copied.stating(renamed)


_OTHERS = "window: random"


def _check_content(workload: Workload, what: str, is_kept_whole: bool) -> None:
    if workload.columns.content is not None and not is_kept_whole:
        why = (
            "and the trace has no sessions to keep whole"
            if what == "thin"
            else "and blocks that are drawn twice would repeat them"
        )
        message = f"{what}: prompts share prefixes, {why}: caches would hit as they do not in the trace"
        raise WorkloadError(workload.name, None, message, _OTHERS)


def _has_sessions(columns: Columns) -> bool:
    return columns.unit_id is not None and all(columns.unit_id.tolist())


def _circle_s(times: F64) -> float:
    """Return the time from the first arrival to the one after the last, were it all to begin anew after a mean gap: arrivals over this are their rate."""
    size = len(times)
    return float(times[-1] - times[0]) * size / (size - 1) if size > 1 else 0.0


def _noted(workload: Workload, columns: Columns, **operation: Any) -> Workload:
    """The sampled requests, with what was drawn among the operations of the source."""
    operations: Sequence[Any] = [*workload.source.get("operations", []), operation]
    return Workload(columns, workload.name, {**workload.source, "operations": operations})
