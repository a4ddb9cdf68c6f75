"""Table of replica states in a run with a scaler, and the corresponding section of the summary.

`replicas.parquet` is written if a replicaset has a scaler: a row for each period of a replica in one state, with
`replicaset`, `replica_id`, `state` (a `ReplicaState` value), `start_at` and `end_at` in seconds. Rows are in order of
replicaset, replica and time; a replica without requests when it starts to drain has a draining period of zero length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from msgspec import Struct

from vajra_py.contract import ReplicaId, ReplicaState
from vajra_py.contract.observer import Observer
from vajra_py.metrics.definitions import Floats, Window
from vajra_py.runtime.records.arrow_arrays import arrow_array

if TYPE_CHECKING:
    import pyarrow as pa

    ArrowTable: TypeAlias = pa.Table
else:
    ArrowTable = "pyarrow.Table"

REPLICAS_FILE = "replicas.parquet"
COLUMNS = ("replicaset", "replica_id", "state", "start_at", "end_at")
ACTIVE = tuple(state.value for state in ReplicaState if state is not ReplicaState.DOWN)
"""States in which a replica occupies its devices."""
Stretch: TypeAlias = tuple[str, ReplicaId, str, float, float]


class ReplicaStates(Observer):
    """Observer that collects the states of replicas; empty for a run without a scaler."""

    wants_step_ends = False

    def __init__(self) -> None:
        self._changes: dict[tuple[str, ReplicaId], list[tuple[float, str]]] = {}

    def on_replica_state(self, replicaset: str, replica_id: ReplicaId, state: ReplicaState, now: float) -> None:
        """Record a change of state."""
        self._changes.setdefault((replicaset, replica_id), []).append((now, state.value))

    def table(self, ended_at: float) -> ArrowTable | None:
        """Return the table of a run that ended at `ended_at` seconds; None without a scaler."""
        return replicas_table(self._stretches(ended_at)) if self._changes else None

    def _stretches(self, ended_at: float) -> list[Stretch]:
        found: list[Stretch] = []
        for (replicaset, replica_id), changes in sorted(self._changes.items()):
            ends = [at for at, _ in changes[1:]] + [max(ended_at, changes[-1][0])]
            found += [(replicaset, replica_id, state, at, end) for (at, state), end in zip(changes, ends, strict=True)]
        return found


def replicas_table(stretches: Sequence[Stretch] = ()) -> ArrowTable:
    """Return the table of these periods: (replicaset, replica id, state, start, end)."""
    import pyarrow as pa

    kinds = (pa.string(), pa.int64(), pa.string(), pa.float64(), pa.float64())
    columns = list(zip(*stretches, strict=True)) or [()] * len(COLUMNS)
    return pa.table(
        {name: arrow_array(column, kind) for name, column, kind in zip(COLUMNS, columns, kinds, strict=True)}
    )


class ActiveTimes(Struct, frozen=True):
    """Periods, in seconds, that single replicas of a replicaset spent in one of the selected states."""

    starts: Floats
    ends: Floats

    def seconds(self, window: Window) -> float:
        """Return the replica-seconds within the window."""
        starts, ends = (np.clip(at, window.start_at, window.end_at) for at in (self.starts, self.ends))
        return float((ends - starts).sum())

    def counts(self) -> tuple[Floats, Floats]:
        """Return (times in seconds at which the number of replicas changes, number of replicas from each of these times
        on).
        """
        times = np.concatenate((self.starts, self.ends))
        steps = np.concatenate((np.ones_like(self.starts), -np.ones_like(self.ends)))
        at, position = np.unique(times, return_inverse=True)
        return at, np.cumsum(np.bincount(position, weights=steps, minlength=len(at)))


def active_times(
    table: ArrowTable, replicaset: str, states: Sequence[str] = ACTIVE, replica_ids: range | None = None
) -> ActiveTimes:
    """Return the periods that the replicas of a replicaset (only those in `replica_ids`, if given) spent in these
    states.
    """
    frame = table.to_pandas()
    rows = frame[(frame["replicaset"] == replicaset) & frame["state"].isin(states)]
    if replica_ids is not None:
        rows = rows[rows["replica_id"].isin(replica_ids)]
    return ActiveTimes(rows["start_at"].to_numpy(np.float64), rows["end_at"].to_numpy(np.float64))


def scaled_replicasets(table: ArrowTable) -> list[str]:
    """Return the names of the replicasets with a scaler, sorted."""
    return sorted(set(table.column("replicaset").to_pylist()))


def replicas_section(table: ArrowTable, window: Window, steady: Window) -> dict[str, Any]:
    """Return the section `replicas` of a summary, which counts replicas that are starting, up or draining.

    The mean is over the time in which requests arrive (`steady`), like other means; the maximum and the total
    replica-seconds are over the whole window.
    """
    by_replicaset = {name: replica_figures(table, name, window, steady) for name in scaled_replicasets(table)}
    totals: Mapping[str, float] = {
        key: sum(one[key] for one in by_replicaset.values()) for key in ("mean", "active_s", "num_starts", "num_stops")
    }
    return {"replicas": {**totals, "by_replicaset": by_replicaset}}


def replica_figures(
    table: ArrowTable, replicaset: str, window: Window, steady: Window, replica_ids: range | None = None
) -> dict[str, Any]:
    """Return the figures of a replicaset with a scaler; `replica_ids` restricts them to some of its replicas."""
    active = active_times(table, replicaset, ACTIVE, replica_ids)
    at, counts = active.counts()
    inside = counts[(at < window.end_at) & (np.append(at[1:], np.inf) > window.start_at)]
    measured = steady if steady.duration_s > 0 else window
    starting, draining = (active_times(table, replicaset, (state,), replica_ids) for state in ("starting", "draining"))
    return {
        "mean": active.seconds(measured) / measured.duration_s if measured.duration_s > 0 else 0.0,
        "max": int(inside.max()) if inside.size else 0,
        "active_s": active.seconds(window),
        "starting_s": starting.seconds(window),
        "draining_s": draining.seconds(window),
        "num_starts": int(window.holds(starting.starts).sum()),
        "num_stops": int(window.holds(draining.starts).sum()),
    }
