"""Figure of programs' makespans, in seconds and relative to their ideal makespans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vajra_py.metrics.plots.layout import arrange_runs
from vajra_py.metrics.plots.style import (
    add_legend,
    line_entries,
    name_panel,
    new_figure,
    note_empty,
    percent,
    plain_log,
    styled,
)
from vajra_py.metrics.runs.naming import distinct
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.metrics.tables.columns import floats_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = (("makespan_s", "makespan (s)"), ("slowdown", "slowdown"))


def has_programs(runs: Sequence[RunData]) -> bool:
    """Return whether any run has programs."""
    return any(run.has_programs for run in runs)


@styled
def program_makespans(runs: Sequence[RunData]) -> Figure:
    """Draw cumulative distributions of makespan and slowdown over all programs, with a line per run."""
    arrangement = arrange_runs(runs)
    tables = [run.programs() for run in runs]
    names = [run.name for run in distinct(runs)]
    figure, axes = new_figure(1, len(_COLUMNS), 3.1, sharey=True)
    for own, (column, label) in zip(axes[0], _COLUMNS, strict=True):
        own.set_xlabel(label)
        name_panel(own, column.removesuffix("_s"))
        found = False
        for i, table in enumerate(tables):
            values = floats_of(table, column)
            known = np.sort(values[~np.isnan(values)])
            if known.size:
                shares = np.arange(1, known.size + 1) / len(values)
                own.step(known, shares, where="post", label=names[i], **arrangement.looks[i].line)
                found = True
        if found:
            plain_log(own.xaxis, most=7)
        else:
            note_empty(own)
        own.set_ylim(0, 1.02)
    axes[0, 0].set_ylabel("share of programs")
    percent(axes[0, 0].yaxis)
    add_legend(figure, line_entries(arrangement.legend) if len(runs) > 1 else [])
    return figure
