"""Latency, attainment and goodput against load.

Load is the offered rate: arrivals per second in the measurement window. Runs that differ in load and seed only are one line; several seeds of one load are
one point at their mean, with a bar from the least to the greatest value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vajra_py.metrics.plots.layout import Arrangement, Series, arrange_runs, series_by_system
from vajra_py.metrics.plots.style import (
    GRID,
    MUTED,
    add_legend,
    line_entries,
    new_figure,
    percent,
    plain_log,
    say_empty,
    styled,
)
from vajra_py.metrics.run_data import RunData, distinct

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OFFERED = "overall.offered_requests_per_s"
_OFFERED_LABEL = "offered load (requests/s)"
_SAME_LOAD = 0.02


@dataclass(frozen=True, slots=True)
class _Point:
    rate: float
    mean: float
    low: float
    high: float


def has_rate_sweep(runs: Sequence[RunData]) -> bool:
    """Whether some system was run under at least two loads."""
    series, _ = series_by_system(runs)
    return any(len(_points(one, _OFFERED, 1.0)) > 1 for one in series)


@styled
def latency_by_rate(runs: Sequence[RunData]) -> Figure:
    """P50 (upper row) and P99 (lower row) of TTFT, TPOT and E2E against the offered load, a line per system; logarithmic latency."""
    series, arrangement = series_by_system(runs)
    figure, axes = new_figure(2, 3, 2.4, sharex=True)
    columns = (("ttft_s", "TTFT", 1.0, "s"), ("tpot_s", "TPOT", 1000.0, "ms"), ("e2e_s", "E2E", 1.0, "s"))
    merged = _one_panel(arrangement)
    for row, stat in enumerate(("p50", "p99")):
        for column, (name, label, scale, unit) in enumerate(columns):
            own = axes[row, column]
            drawn = _draw(own, series, merged, f"overall.{name}.{stat}", scale)
            own.set_ylabel(f"{label} {stat.upper()} ({unit})")
            if drawn:
                plain_log(own.yaxis, most=6)
            if row == 1:
                own.set_xlabel(_OFFERED_LABEL)
    add_legend(figure, _legend(series, arrangement))
    return figure


@styled
def attainment_by_rate(runs: Sequence[RunData]) -> Figure:
    """Share of requests that met all their SLOs against the offered load, with lines at 90 % and 99 %."""
    series, arrangement = series_by_system(runs)
    figure, axes = new_figure(1, 1, 3.2)
    own = axes[0, 0]
    if _draw(own, series, _one_panel(arrangement), "overall.slo.overall.attainment_fraction", 1.0):
        for level in (0.9, 0.99):
            own.axhline(level, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
            own.annotate(
                f"{level:.0%}", (1.0, level), xycoords=("axes fraction", "data"), xytext=(4, 0),
                textcoords="offset points", va="center", fontsize=8,
            )  # fmt: skip
        own.set_ylim(0, 1.03)
        percent(own.yaxis)
    own.set_xlabel(_OFFERED_LABEL)
    own.set_ylabel("SLO attainment")
    add_legend(figure, _legend(series, arrangement))
    return figure


@styled
def goodput_by_rate(runs: Sequence[RunData]) -> Figure:
    """Requests per second, completed (left) and completed within their SLOs (right), against the offered load; the grey line is all that was offered."""
    series, arrangement = series_by_system(runs)
    figure, axes = new_figure(1, 2, 3.0, sharex=True, sharey=True)
    for own, (path, label) in zip(axes[0], (("throughput", "throughput"), ("goodput", "goodput")), strict=True):
        if _draw(own, series, _one_panel(arrangement), f"overall.{path}.requests_per_s", 1.0):
            top = max((point.rate for one in series for point in _points(one, _OFFERED, 1.0)), default=0.0)
            own.plot([0, top], [0, top], color=GRID, linewidth=2.2, zorder=1)
            own.set_xlim(left=0)
            own.set_ylim(bottom=0)
        own.set_xlabel(_OFFERED_LABEL)
        own.set_ylabel(f"{label} (requests/s)")
        own.tick_params(labelleft=True)
    add_legend(figure, _legend(series, arrangement))
    return figure


@styled
def delivery_bars(runs: Sequence[RunData]) -> Figure:
    """SLO attainment, and throughput (light) with the goodput in it (solid), a row per run; without SLOs throughput alone."""
    runs = distinct(runs)
    hues = [look.hue for look in arrange_runs(runs).looks]
    rows = np.arange(len(runs))
    attainment, throughput, goodput = (
        np.array([_number(run, f"overall.{path}") for run in runs], dtype=np.float64)
        for path in ("slo.overall.attainment_fraction", "throughput.requests_per_s", "goodput.requests_per_s")
    )
    has_slo = bool(np.isfinite(attainment).any())
    figure, axes = new_figure(1, 2 if has_slo else 1, max(1.6, 0.26 * len(runs) + 0.8), sharey=True)
    first, last = axes[0, 0], axes[0, -1]
    if has_slo:
        first.barh(rows, np.nan_to_num(attainment), height=0.62, color=hues)
        first.set_xlim(0, 1)
        percent(first.xaxis)
        first.set_xlabel("SLO attainment")
    last.barh(rows, np.nan_to_num(throughput), height=0.62, color=hues, alpha=0.3 if has_slo else 1.0)
    last.barh(rows, np.nan_to_num(goodput), height=0.62, color=hues)
    last.set_xlabel("throughput (light) and goodput (solid), requests/s" if has_slo else "throughput (requests/s)")
    first.set_yticks(rows, [run.name for run in runs])
    first.set_ylim(len(runs) - 0.4, -0.6)
    for own in axes[0]:
        own.grid(axis="y", visible=False)
        own.set_xlim(left=0)
    return figure


def _draw(axes: Any, series: Sequence[Series], arrangement: Arrangement, path: str, scale: float) -> bool:
    """Draw one line per series; says so and returns False when there is nothing to draw."""
    drawn = False
    for i in arrangement.members(0):
        points = _points(series[i], path, scale)
        if not points:
            continue
        drawn = True
        look = arrangement.looks[i]
        rates, means = [point.rate for point in points], [point.mean for point in points]
        axes.plot(rates, means, marker="" if look.is_muted else look.marker, markersize=4.5, **look.line)
        spread = [point for point in points if point.high > point.low]
        axes.vlines(
            [point.rate for point in spread], [point.low for point in spread], [point.high for point in spread],
            color=look.hue, linewidth=1.0, alpha=0.7,
        )  # fmt: skip
    if not drawn:
        say_empty(axes)
    return drawn


def _points(series: Series, path: str, scale: float) -> list[_Point]:
    """By rising rate; loads that differ by under 2 % (seeds of one load) are one point."""
    pairs = sorted((_number(run, _OFFERED), _number(run, path) * scale) for run in series.runs)
    clusters: list[list[tuple[float, float]]] = []
    for rate, value in pairs:
        if not (np.isfinite(rate) and np.isfinite(value)):
            continue
        if clusters and rate <= clusters[-1][0][0] * (1 + _SAME_LOAD):
            clusters[-1].append((rate, value))
        else:
            clusters.append([(rate, value)])
    reduce: Callable[[list[float]], float] = lambda values: float(np.mean(values))  # noqa: E731
    return [
        _Point(reduce([r for r, _ in own]), reduce([v for _, v in own]), min(v for _, v in own), max(v for _, v in own))
        for own in clusters
    ]


def _one_panel(arrangement: Arrangement) -> Arrangement:
    """The same looks with every series in one panel: lines of points can share it where clouds could not."""
    return Arrangement(("",), (0,) * len(arrangement.panel_of), arrangement.looks, arrangement.legend)


def _legend(series: Sequence[Series], arrangement: Arrangement) -> list[tuple[str, Any]]:
    return line_entries(arrangement.legend, with_marker=True) if len(series) > 1 else []


def _number(run: RunData, path: str) -> float:
    value = run.summary.value(path)
    return float("nan") if value is None else float(value)


__all__ = ["attainment_by_rate", "delivery_bars", "goodput_by_rate", "has_rate_sweep", "latency_by_rate"]
