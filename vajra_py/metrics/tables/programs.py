"""Table of programs, made from the requests table.

`programs.parquet` is written if any request has a `program_id`. It has a row per program, in order of arrival. Times
are seconds on the run's clock; NaN = undefined.

- `makespan_s`: from the arrival of the first call to the end of the last one; only for completed programs.
- `ideal_s`: makespan predicted by the latency model if the program ran alone: the critical path over its delays and
  calls. Each call runs alone, and the prefix cache holds the tokens that its prompt shares with its parents' prompts
  and outputs. NaN in runs without a latency model.
- `slowdown`: `makespan_s / ideal_s`.
- `reason`: `failed` if a call ended without a result; else `unfinished` if a call had not ended, or if fewer calls
  arrived than the client declared; else `completed`.
- `run_s`: time from admission to the end, summed over the calls.
- `wait_s`: time from arrival to admission (to the end for a call that was never admitted), summed over the calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vajra_py.metrics.definitions import Floats, Ints
from vajra_py.metrics.tables.columns import floats_of, group_codes, ints_of
from vajra_py.metrics.tables.requests import UNFINISHED, reason_masks
from vajra_py.runtime.records.arrow_arrays import arrow_array

if TYPE_CHECKING:
    import pyarrow as pa

    ArrowTable: TypeAlias = pa.Table
else:
    ArrowTable = "pyarrow.Table"

PROGRAMS_FILE = "programs.parquet"
COMPLETED, FAILED = "completed", "failed"
"""Values of `reason`, besides `UNFINISHED`."""
_TEXTS = ("program_id", "tenant", "slo_class", "reason")
_COUNTS = (
    *("num_calls", "num_completed", "num_declared"),
    *("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_preemptions"),
)
_TIMES = ("arrived_at", "ended_at", "makespan_s", "ideal_s", "slowdown", "run_s", "wait_s", "program_slo_s")
PROGRAM_TABLE_COLUMNS = (*_TEXTS, *_COUNTS, *_TIMES, "slo_met")
"""Columns of the table, in order. `num_declared` is the number of calls declared by the client; -1 if not declared."""


def programs_table(
    requests: ArrowTable, ideal_s: Mapping[str, float] | None = None, run_ended_at: float = 0.0
) -> ArrowTable | None:
    """Return the table of these requests' programs; None if no request belongs to a program.

    `ideal_s` has ideal makespans by program. `run_ended_at` is the end of the run in seconds. Unfinished programs were
    observed until then, or until the latest event of a call if that is later.
    """
    if "program_id" not in requests.column_names:
        return None
    import pyarrow as pa
    import pyarrow.compute as pc

    calls = requests.filter(pc.not_equal(requests.column("program_id"), arrow_array([""])[0]))
    if not calls.num_rows:  # columns of programs also exist if requests have adapters
        return None
    codes, names = group_codes(calls, "program_id")
    size = len(names)
    completed, _ = reason_masks(calls.column("reason"))
    columns = _sums(calls, codes, size, completed)
    arrived_at, ended_at = floats_of(calls, "arrived_at"), floats_of(calls, "ended_at")
    columns["arrived_at"] = _extreme(np.minimum, codes, size, arrived_at)
    columns["ended_at"] = _extreme(np.maximum, codes, size, ended_at)
    reason = _reasons(calls, codes, columns, completed)
    is_done = reason == COMPLETED
    makespan_s = np.where(is_done, columns["ended_at"] - columns["arrived_at"], np.nan)
    given = {} if ideal_s is None else ideal_s
    columns["makespan_s"] = makespan_s
    columns["ideal_s"] = np.array([given.get(name, np.nan) for name in names], dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        slowdown = makespan_s / columns["ideal_s"]
    columns["slowdown"] = np.where(np.isfinite(slowdown), slowdown, np.nan)
    slo_s = columns["program_slo_s"] = _extreme(np.fmax, codes, size, floats_of(calls, "program_slo_s"))
    until = max(run_ended_at, float(np.nanmax(np.concatenate([arrived_at, ended_at]))) if len(calls) else 0.0)
    age_s = np.where(is_done, makespan_s, until - columns["arrived_at"])
    is_lost = (age_s > slo_s) | (reason == FAILED)
    is_decided = ~np.isnan(slo_s) & (is_done | is_lost)
    firsts = _firsts(calls, codes, size)
    texts = {name: calls.column(name).take(arrow_array(firsts)) for name in ("tenant", "slo_class")}
    texts |= {"program_id": arrow_array(names), "reason": arrow_array(reason.tolist())}
    arrays = [texts[name].cast(pa.string()) for name in _TEXTS]
    arrays += [arrow_array(columns[name], pa.int64()) for name in _COUNTS]
    arrays += [arrow_array(columns[name], pa.float64()) for name in _TIMES]
    arrays.append(arrow_array(~is_lost, is_null=~is_decided))
    order = np.lexsort((firsts, columns["arrived_at"]))
    return pa.table(arrays, names=list(PROGRAM_TABLE_COLUMNS)).take(arrow_array(order))


def no_programs() -> ArrowTable:
    """Return the table of a run without programs."""
    import pyarrow as pa

    kinds = [pa.string()] * len(_TEXTS) + [pa.int64()] * len(_COUNTS) + [pa.float64()] * len(_TIMES) + [pa.bool_()]
    return pa.schema(list(zip(PROGRAM_TABLE_COLUMNS, kinds, strict=True))).empty_table()


def _sums(calls: ArrowTable, codes: Ints, size: int, completed: NDArray[np.bool_]) -> dict[str, Any]:
    """Return the columns that are sums over a program's calls, and the column `num_declared`."""
    admitted_at, ended_at = floats_of(calls, "admitted_at"), floats_of(calls, "ended_at")
    was_admitted = ~np.isnan(admitted_at)
    run_s = np.nan_to_num(ended_at - admitted_at)
    wait_s = np.nan_to_num(np.where(was_admitted, admitted_at, ended_at) - floats_of(calls, "arrived_at"))

    def total(values: Any) -> Ints:
        return np.bincount(codes, weights=values, minlength=size).astype(np.int64)

    prompts = np.where(was_admitted, ints_of(calls, "num_prompt_tokens"), 0)
    return {
        "num_calls": np.bincount(codes, minlength=size),
        "num_completed": total(completed),
        "num_prompt_tokens": total(prompts),
        **{name: total(ints_of(calls, name)) for name in _COUNTS[4:]},
        "run_s": np.bincount(codes, weights=run_s, minlength=size),
        "wait_s": np.bincount(codes, weights=wait_s, minlength=size),
        "num_declared": _extreme(np.fmax, codes, size, floats_of(calls, "num_program_calls"), -1.0).astype(np.int64),
    }


def _extreme(ufunc: Any, codes: Ints, size: int, values: Floats, nothing: float = np.nan) -> Floats:
    """Return the largest or smallest value (as `ufunc` selects) over each program's calls; `nothing` for a program
    without values.
    """
    start = np.inf if ufunc is np.minimum else -np.inf
    found = np.full(size, start)
    known = ~np.isnan(values)
    ufunc.at(found, codes[known], values[known])
    return np.where(np.isinf(found), nothing, found)


def _firsts(calls: ArrowTable, codes: Ints, size: int) -> Ints:
    """Return the row of each program's first call."""
    found = np.full(size, len(codes), dtype=np.int64)
    np.minimum.at(found, codes, np.arange(len(codes)))
    return found


def _reasons(calls: ArrowTable, codes: Ints, columns: Mapping[str, Any], completed: NDArray[np.bool_]) -> NDArray[Any]:
    """Return the end reason of each program; a failed call does not count if a call with the same id completed."""
    reasons = np.array(calls.column("reason").to_pylist(), dtype=object)
    is_open = reasons == UNFINISHED
    lost = np.flatnonzero(~completed & ~is_open)
    ids = calls.column("request_id")
    done = {(codes[row], ids[row].as_py()) for row in np.flatnonzero(completed).tolist()} if lost.size else set()
    lost = np.array([row for row in lost.tolist() if (codes[row], ids[row].as_py()) not in done], dtype=np.int64)
    found = np.full(len(columns["num_calls"]), COMPLETED, dtype=object)
    found[codes[is_open]] = UNFINISHED
    found[columns["num_declared"] > columns["num_calls"]] = UNFINISHED
    found[codes[lost]] = FAILED
    return found
