"""Results of runs, as numbers and figures.

`RequestsBuilder`, `StepsBuilder`, `TbtBuilder` and `write_parquet` build and write the tables; `summarise` computes the
summary; `RunData` opens a run's folder; `compare`, `plots`, `write_report` and `write_timeline` present the results.
Metrics are defined in `vajra_py.metrics.definitions`. Importing this package loads none of pyarrow, pandas and
matplotlib: names are resolved when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vajra_py.metrics import plots
    from vajra_py.metrics.comparison.comparison import Comparison, compare
    from vajra_py.metrics.comparison.metrics import METRICS, Metric
    from vajra_py.metrics.definitions import (
        UNFINISHED,
        GapStatistics,
        ServiceWeights,
        Slo,
        SloDefaults,
        Window,
        gap_statistics,
        jain_index,
        quantiles,
        weighted_quantiles,
    )
    from vajra_py.metrics.report.report import render_report, write_report
    from vajra_py.metrics.report.timeline import TimelineOptions, write_timeline
    from vajra_py.metrics.runs.naming import load_runs
    from vajra_py.metrics.runs.run_data import RunData
    from vajra_py.metrics.summary.stability import Stability, StabilityLabel
    from vajra_py.metrics.summary.summary import Summary, summarise
    from vajra_py.metrics.tables.recorder import Recorder
    from vajra_py.metrics.tables.request_row import RequestRow
    from vajra_py.metrics.tables.requests import (
        GapList,
        RequestsBuilder,
        TbtBuilder,
        write_parquet,
    )
    from vajra_py.metrics.tables.steps import StepRow, StepsBuilder

_PLACES = {
    "comparison.comparison": ("Comparison", "compare"),
    "comparison.metrics": ("METRICS", "Metric"),
    "definitions": (
        "UNFINISHED",
        "GapStatistics",
        "ServiceWeights",
        "Slo",
        "SloDefaults",
        "Window",
        "gap_statistics",
        "jain_index",
        "quantiles",
        "weighted_quantiles",
    ),
    "tables.recorder": ("Recorder",),
    "report.report": ("render_report", "write_report"),
    "runs.naming": ("load_runs",),
    "runs.run_data": ("RunData",),
    "summary.stability": ("Stability", "StabilityLabel"),
    "tables.steps": ("StepRow", "StepsBuilder"),
    "summary.summary": ("Summary", "summarise"),
    "tables.request_row": ("RequestRow",),
    "tables.requests": ("GapList", "RequestsBuilder", "TbtBuilder", "write_parquet"),
    "report.timeline": ("TimelineOptions", "write_timeline"),
}
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}

__all__ = [
    "METRICS",
    "UNFINISHED",
    "Comparison",
    "GapList",
    "GapStatistics",
    "Metric",
    "Recorder",
    "RequestRow",
    "RequestsBuilder",
    "RunData",
    "ServiceWeights",
    "Slo",
    "SloDefaults",
    "Stability",
    "StabilityLabel",
    "StepRow",
    "StepsBuilder",
    "Summary",
    "TbtBuilder",
    "TimelineOptions",
    "Window",
    "compare",
    "gap_statistics",
    "jain_index",
    "load_runs",
    "plots",
    "quantiles",
    "render_report",
    "summarise",
    "weighted_quantiles",
    "write_parquet",
    "write_report",
    "write_timeline",
]


def __getattr__(name: str) -> Any:
    """Import an exported name on first use (PEP 562)."""
    if name == "plots":
        return importlib.import_module(f"{__name__}.plots")
    if name not in _PLACE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACE_OF[name]}"), name)
