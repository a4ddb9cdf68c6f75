"""Figures of replicas over time: their number under a scaler, and the utilisation of each pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from vajra_py.metrics.plots.data import busy_replicas_over_time, kv_use_over_time, pools_of, time_edges
from vajra_py.metrics.plots.layout import arrange_runs, select
from vajra_py.metrics.plots.style import (
    MAX_SERIES,
    add_legend,
    label_all,
    line_entries,
    name_panel,
    new_figure,
    note_empty,
    percent,
    styled,
)
from vajra_py.metrics.runs.naming import distinct
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.metrics.tables.replicas import active_times, scaled_replicasets

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.figure import Figure

    ArrowTable: TypeAlias = pa.Table
else:
    ArrowTable = "pyarrow.Table"

_NUM_BINS = 120
MAX_PANELS = 8
"""Maximum number of panels; further replicasets or pools are not shown."""


def has_scaling(runs: Sequence[RunData]) -> bool:
    """Return whether a replicaset of any run has a scaler."""
    return any(run.summary.value("replicas") for run in runs)


@styled
def replicas_over_time(runs: Sequence[RunData]) -> Figure:
    """Draw the number of replicas that are starting, up or draining, with a panel per replicaset or pool and a line per
    run.
    """
    arrangement = arrange_runs(runs)
    tables = [run.replicas() for run in runs]
    groups = [_scaled_groups(run, table) for run, table in zip(runs, tables, strict=True)]
    names = list(dict.fromkeys(name for own in groups for name in own))[:MAX_PANELS]
    figure, axes = new_figure(max(len(names), 1), 1, 1.8, sharex=True)
    labels = [run.name for run in distinct(runs)]
    for name, row in zip(names, axes, strict=False):
        own = row[0]
        own.set_title(name)
        own.set_ylabel("replicas")
        for i, table in enumerate(tables):
            group = groups[i].get(name)
            if group is None:
                continue
            at, counts = active_times(table, group[0], replica_ids=group[1]).counts()
            if len(at):
                look = arrangement.looks[i].line | {"label": labels[i]}
                own.plot(at, counts, drawstyle="steps-post", **look)
        own.set_ylim(bottom=0)
    if not names:
        note_empty(axes[0][0])
    for own in axes[-1]:
        own.set_xlabel("time (s)")
    add_legend(figure, line_entries(arrangement.legend) if len(runs) > 1 else [])
    return figure


def _scaled_groups(run: RunData, table: ArrowTable) -> dict[str, tuple[str, range | None]]:
    """Return, by title, (replicaset, replica ids) of each replicaset with a scaler, or of each of its pools. None as
    ids means all replicas.
    """
    scaled, found = scaled_replicasets(table), dict[str, tuple[str, range | None]]()
    for title, pool in pools_of(run).items():
        if pool.replicaset in scaled:
            found[title] = (pool.replicaset, pool.replica_ids)
    whole = [name for name in scaled if all(name != replicaset for replicaset, _ in found.values())]
    return {**{name: (name, None) for name in whole}, **found}


def has_pools(runs: Sequence[RunData]) -> bool:
    """Return whether any run has pools."""
    return any(run.summary.value("pools") for run in runs)


@styled
def pools_over_time(runs: Sequence[RunData]) -> Figure:
    """Draw busy replicas (left) and KV blocks in use (right), with a row per pool and a line per run (at most eight,
    chosen by `select`).
    """
    runs = select(distinct(runs), MAX_SERIES)
    arrangement = arrange_runs(runs)
    pools = [pools_of(run) for run in runs]
    names = list(dict.fromkeys(name for own in pools for name in own))[:MAX_PANELS]
    figure, axes = new_figure(max(len(names), 1), 2, 1.8, sharex=True)
    labels = [run.name for run in runs]
    for name, (left, right) in zip(names, axes, strict=False):
        left.set_title(name)
        for i, run in enumerate(runs):
            edges = time_edges(run, _NUM_BINS)
            if name not in pools[i] or not edges[-1] > edges[0]:
                continue
            middle, look = (edges[1:] + edges[:-1]) / 2, arrangement.looks[i].line | {"label": labels[i]}
            look["linewidth"] = 1.0
            left.plot(middle, busy_replicas_over_time(run, edges, pools[i][name]), **look)
            right.plot(middle, kv_use_over_time(run, edges, pools[i][name]), **look)
        for own, label in ((left, "busy replicas"), (right, "KV blocks in use")):
            name_panel(own, "busy" if own is left else "kv_use")
            own.set_ylabel(label)
            own.set_ylim(bottom=0)
        percent(right.yaxis)
    if not names:
        note_empty(axes[0][0])
    for own in axes[-1]:
        own.set_xlabel("time (s)")
    label_all(axes)
    add_legend(figure, line_entries(arrangement.legend) if len(runs) > 1 else [])
    return figure
