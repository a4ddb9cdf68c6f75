"""Write the comparison of a measured run with its simulation as an HTML page: errors, distributions, the latencies of
each request, and the load over time.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vajra_py.experiment.measured.accuracy import LATENCIES, Accuracy
from vajra_py.metrics.comparison.table_renderers import html
from vajra_py.metrics.plots.style import COLOURS, MUTED, new_figure, styled
from vajra_py.metrics.report.figures_svg import inline_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE = """
:root { --grid: #d4d8dd; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --grid: #444b54; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } th, td { padding: 0.15rem 0.9rem; text-align: right; border-bottom: 1px solid var(--grid); }
th:first-child { text-align: left; } td small { font-weight: bold; margin-left: 0.5rem; } svg { max-width: 100%; height: auto; }
"""


def write_accuracy_report(accuracy: Accuracy, path: Path) -> None:
    """Write one self-contained HTML page."""
    parts = [
        f"<h1>{escape(accuracy.name)}: measured and simulated</h1>",
        f"<p>Step times: {escape(accuracy.trust)}.</p>",
        html(accuracy.table()),
        "<h2>Distributions</h2>",
        inline_svg(
            distributions(accuracy), "cdf", "Cumulative distributions of TTFT, TPOT and E2E, measured and simulated"
        ),
        "<h2>Request by request</h2>",
        inline_svg(pairs(accuracy), "pairs", "Simulated against measured TTFT, TPOT and E2E of each request"),
        "<h2>Over time</h2>",
        inline_svg(over_time(accuracy), "series", "Running and waiting requests and tokens per second, by second"),
    ]
    title = f"<title>{escape(accuracy.name)}</title>"
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8">{title}<style>{_STYLE}</style>{"".join(parts)}</html>\n'
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


@styled
def distributions(accuracy: Accuracy) -> Figure:
    """Draw the cumulative distributions of the latencies."""
    figure, axes = _panels(len(LATENCIES))
    for axis, name in zip(axes, LATENCIES, strict=True):
        for requests, label, colour, dash in (
            (accuracy.measured, "measured", COLOURS[0], "-"),
            (accuracy.simulated, "simulated", COLOURS[1], "--"),
        ):
            values = np.sort(getattr(requests, f"{name}_s"))
            values = values[np.isfinite(values)]
            axis.plot(values, np.linspace(0, 1, len(values)), color=colour, linestyle=dash, label=label)
        axis.set(title=f"{name.upper()}, s", ylim=(0, 1))
    axes[0].set_ylabel("part of the requests")
    axes[0].legend()
    return figure


@styled
def pairs(accuracy: Accuracy) -> Figure:
    """Draw simulated against measured latencies, with one point per request."""
    figure, axes = _panels(len(LATENCIES))
    for axis, name in zip(axes, LATENCIES, strict=True):
        measured, simulated = (getattr(one, f"{name}_s") for one in (accuracy.measured, accuracy.simulated))
        # TPOT is NaN for requests with a single token, and there may be no others.
        top = 1.03 * float(np.nanmax([*measured, *simulated, 0.0])) or 1.0
        axis.plot([0, top], [0, top], color=MUTED, linewidth=1)
        axis.plot(measured, simulated, ".", color=COLOURS[0], markersize=3.5, alpha=0.6)
        axis.set(title=f"{name.upper()}, s", xlabel="measured", xlim=(0, top), ylim=(0, top))
    axes[0].set_ylabel("simulated")
    return figure


@styled
def over_time(accuracy: Accuracy) -> Figure:
    """Draw the measured and simulated load by second."""
    figure, axes = _panels(max(1, len(accuracy.series)))
    for axis, series in zip(axes, accuracy.series, strict=False):
        axis.plot(series.seconds, series.measured, color=COLOURS[0], label="measured", linewidth=1.2)
        axis.plot(series.seconds, series.simulated, color=COLOURS[1], linestyle="--", label="simulated", linewidth=1.2)
        axis.set(title=series.name.replace("_", " "), xlabel="s")
    axes[0].legend()
    return figure


def _panels(number: int) -> tuple[Figure, Sequence[Axes]]:
    figure, axes = new_figure(1, number, 2.6)
    return figure, list(axes[0])
