"""Number of replicas over time, where a scaler changes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vajra_py.metrics.plots.layout import arrange_runs
from vajra_py.metrics.plots.style import add_legend, line_entries, new_figure, say_empty, styled
from vajra_py.metrics.runs.naming import distinct
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.metrics.tables.replicas import active_times, scaled_replicasets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PANELS = 8
"""Replicasets that get a panel, the first by name."""


def has_scaling(runs: Sequence[RunData]) -> bool:
    """Return whether a replicaset of any run has a scaler."""
    return any(run.summary.value("replicas") for run in runs)


@styled
def replicas_over_time(runs: Sequence[RunData]) -> Figure:
    """Plot the replicas that start, are up or drain: a panel for each replicaset, a line for each run."""
    arrangement = arrange_runs(runs)
    tables = [run.replicas() for run in runs]
    names = sorted({name for table in tables for name in scaled_replicasets(table)})[:MAX_PANELS]
    figure, axes = new_figure(max(len(names), 1), 1, 1.8, sharex=True)
    labels = [run.name for run in distinct(runs)]
    for name, row in zip(names, axes, strict=False):
        own = row[0]
        own.set_title(name)
        own.set_ylabel("replicas")
        for i, table in enumerate(tables):
            at, counts = active_times(table, name).counts()
            if len(at):
                look = arrangement.looks[i].line | {"label": labels[i]}
                own.plot(at, counts, drawstyle="steps-post", **look)
        own.set_ylim(bottom=0)
    if not names:
        say_empty(axes[0][0])
    for own in axes[-1]:
        own.set_xlabel("time (s)")
    add_legend(figure, line_entries(arrangement.legend) if len(runs) > 1 else [])
    return figure
