"""Figure of the values emitted by policies over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vajra_py.metrics.plots.layout import arrange_runs
from vajra_py.metrics.plots.style import add_legend, line_entries, new_figure, styled
from vajra_py.metrics.runs.naming import distinct
from vajra_py.metrics.runs.run_data import RunData

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PANELS = 8
"""Maximum number of panels; emitted values are taken in order of policy and name."""
_MAX_POINTS = 2000
"""Limit for thinning lines: if a line has at least twice this number of points, only every n-th point is drawn, with
`n` chosen so that at least this number of points remains.
"""


def has_emitted(runs: Sequence[RunData]) -> bool:
    """Return whether a policy of any run emitted values."""
    return any(run.summary.value("emitted") for run in runs)


@styled
def emitted_over_time(runs: Sequence[RunData]) -> Figure:
    """Draw emitted values over time, with a panel for each policy and name, and a line for each run."""
    arrangement = arrange_runs(runs)
    tables = [run.emitted().to_pandas() for run in runs]
    pairs = {pair for table in tables for pair in zip(table["policy"], table["name"], strict=True)}
    shown = sorted(pairs)[:MAX_PANELS]
    figure, axes = new_figure(max(len(shown), 1), 1, 1.8, sharex=True)
    names = [run.name for run in distinct(runs)]
    for (policy, name), row in zip(shown, axes, strict=False):
        own = row[0]
        own.set_title(policy)
        own.set_ylabel(name)
        for i, table in enumerate(tables):
            rows = table[(table["policy"] == policy) & (table["name"] == name)]
            if rows.empty:
                continue
            rows = rows.iloc[:: max(1, len(rows) // _MAX_POINTS)]
            look = arrangement.looks[i].line | {"linewidth": 0.8, "label": names[i]}
            own.plot(rows["at"], rows["value"], **look)
    for own in axes[-1]:
        own.set_xlabel("time (s)")
    add_legend(figure, line_entries(arrangement.legend) if len(runs) > 1 else [])
    return figure
