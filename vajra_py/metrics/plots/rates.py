"""Figures of latency, SLO attainment and goodput against the load.

Each point is one setting. Its x value is the mean of the replications' offered rates (arrivals per second in the
measurement window), its y value is the mean of the replications' values, with a bar for the 95 % confidence interval of
that mean. Settings that differ only in their configured rate form a line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vajra_py.metrics.comparison.intervals import Interval, floats, positive_interval, proportion_interval
from vajra_py.metrics.plots.layout import Arrangement, Series, arrange_runs, series_by_system
from vajra_py.metrics.plots.style import (
    GRID,
    MUTED,
    add_legend,
    label_all,
    line_entries,
    misses,
    name_panel,
    new_figure,
    note_empty,
    percent,
    plain_log,
    styled,
)
from vajra_py.metrics.runs.replications import Setting, group_replications
from vajra_py.metrics.runs.run_data import RunData

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Reader = Callable[[RunData], "float | None"]
_MakeInterval = Callable[[Sequence[float]], Interval | None]
_MAX_CLASSES = 4
_ATTAINMENT = "overall.slo.overall.attainment_fraction"
_OFFERED_LABEL = "offered load (req/s)"


@dataclass(frozen=True, slots=True)
class _Point:
    rate: float
    mean: float
    interval: Interval | None


def has_rate_sweep(runs: Sequence[RunData]) -> bool:
    """Return whether any system was run at two or more configured rates."""
    series, _ = series_by_system(runs)
    return any(len(_points(one, _offered, 1.0)) > 1 for one in series)


def has_slo(runs: Sequence[RunData]) -> bool:
    """Return whether requests of any run have SLOs."""
    return any(_value(run, _ATTAINMENT) is not None for run in runs)


@styled
def latency_by_rate(runs: Sequence[RunData]) -> Figure:
    """Draw P50 (upper row) and P99 (lower row) of TTFT, TPOT and E2E against the offered load, with a line per system
    and a logarithmic latency axis.
    """
    series, arrangement = series_by_system(runs)
    figure, axes = new_figure(2, 3, 2.4, sharex=True)
    columns = (("ttft_s", "TTFT", 1.0, "s"), ("tpot_s", "TPOT", 1000.0, "ms"), ("e2e_s", "E2E", 1.0, "s"))
    merged = _one_panel(arrangement)
    for row, stat in enumerate(("p50", "p99")):
        for column, (name, label, scale, unit) in enumerate(columns):
            own = axes[row, column]
            drawn = _draw(own, series, merged, _at(f"overall.{name}.{stat}"), scale, positive_interval)
            own.set_ylabel(f"{label} {stat.upper()} ({unit})")
            name_panel(own, f"{name.removesuffix('_s')}_{stat}")
            if drawn:
                plain_log(own.yaxis, most=6)
            if row == 1:
                own.set_xlabel(_OFFERED_LABEL)
    label_all(axes)
    add_legend(figure, _legend(series, arrangement))
    return figure


def class_names(runs: Sequence[RunData]) -> list[str]:
    """Return the SLO classes of the runs' requests."""
    return list(dict.fromkeys(name for run in runs for name in run.summary.value("by_slo_class") or {}))


@styled
def class_latency_by_rate(runs: Sequence[RunData], classes: Sequence[str] | None = None) -> Figure:
    """Draw median TTFT, P99 TTFT and P99 E2E latency against the offered load of all classes, with a row per SLO class
    and a logarithmic latency axis.
    """
    series, arrangement = series_by_system(runs)
    names = list(classes or class_names(runs))[:_MAX_CLASSES] or ["(none)"]
    figure, axes = new_figure(len(names), 3, 2.5, sharex=True)
    columns = (("ttft_s", "p50", "TTFT P50"), ("ttft_s", "p99", "TTFT P99"), ("e2e_s", "p99", "E2E P99"))
    for row, name in enumerate(names):
        for own, (latency, statistic, label) in zip(axes[row], columns, strict=True):
            if _draw(own, series, _one_panel(arrangement), _of_class(name, latency, statistic), 1.0, positive_interval):
                plain_log(own.yaxis, most=6)
            own.set_ylabel(f"{label} (s)")
            own.set_title(f"class {name}")
            name_panel(own, f"{latency.removesuffix('_s')}_{statistic}")
            if row == len(names) - 1:
                own.set_xlabel(_OFFERED_LABEL)
    label_all(axes)
    add_legend(figure, _legend(series, arrangement))
    return figure


@styled
def attainment_by_rate(runs: Sequence[RunData]) -> Figure:
    """Draw the fraction of requests that missed an SLO (1 - attainment) against the offered load, on a logarithmic axis
    with lines at 10 % and 1 %.
    """
    series, arrangement = series_by_system(runs)
    figure, axes = new_figure(1, 1, 3.2)
    own = axes[0, 0]
    name_panel(own, "slo_misses")
    if _draw(own, series, _one_panel(arrangement), _missed, 1.0, proportion_interval):
        drawn = [point.mean for one in series for point in _points(one, _missed, 1.0)]
        misses(own.yaxis, min((share for share in drawn if share > 0), default=0.01))
        for level in (0.1, 0.01):
            own.axhline(level, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
            own.annotate(
                f"{1 - level:.0%} met", (1.0, level), xycoords=("axes fraction", "data"), xytext=(-2, 2),
                textcoords="offset points", ha="right", va="bottom", fontsize=7,
            )  # fmt: skip
        own.set_ylim(0, 1.05)
    own.set_xlabel(_OFFERED_LABEL)
    own.set_ylabel("requests that missed an SLO (%)")
    add_legend(figure, _legend(series, arrangement))
    return figure


@styled
def goodput_by_rate(runs: Sequence[RunData]) -> Figure:
    """Draw throughput (left) and, if there are SLOs, goodput (right) in requests per second against the offered load.

    The grey line is the offered load.
    """
    series, arrangement = series_by_system(runs)
    shown = ["throughput", "goodput"] if has_slo(runs) else ["throughput"]
    figure, axes = new_figure(1, len(shown), 3.0, sharex=True, sharey=True)
    for own, path in zip(axes[0], shown, strict=True):
        if _draw(own, series, _one_panel(arrangement), _at(f"overall.{path}.requests_per_s"), 1.0):
            top = max((point.rate for one in series for point in _points(one, _offered, 1.0)), default=0.0)
            own.plot([0, top], [0, top], color=GRID, linewidth=2.2, zorder=1)
            own.set_xlim(left=0)
            own.set_ylim(bottom=0)
        own.set_xlabel(_OFFERED_LABEL)
        own.set_ylabel(f"{path} (requests/s)")
        name_panel(own, path)
        own.tick_params(labelleft=True)
    label_all(axes)
    add_legend(figure, _legend(series, arrangement))
    return figure


@styled
def delivery_bars(runs: Sequence[RunData]) -> Figure:
    """Draw bars of SLO attainment, and of throughput (light) with goodput (solid), with a row per setting; without SLOs
    only throughput.
    """
    settings = group_replications(runs)
    hues = [look.hue for look in arrange_runs([setting.first for setting in settings]).looks]
    rows = np.arange(len(settings))
    attainment, throughput, goodput = (
        np.array([_mean(setting, f"overall.{path}") for setting in settings], dtype=np.float64)
        for path in ("slo.overall.attainment_fraction", "throughput.requests_per_s", "goodput.requests_per_s")
    )
    has_slo = bool(np.isfinite(attainment).any())
    figure, axes = new_figure(1, 2 if has_slo else 1, max(1.6, 0.26 * len(settings) + 0.8), sharey=True)
    first, last = axes[0, 0], axes[0, -1]
    if has_slo:
        first.barh(rows, np.nan_to_num(attainment), height=0.62, color=hues, label="SLO attainment")
        first.set_xlim(0, 1)
        percent(first.xaxis)
        first.set_xlabel("SLO attainment")
        name_panel(first, "slo_attainment")
    name_panel(last, "throughput")
    last.barh(
        rows, np.nan_to_num(throughput), height=0.62, color=hues, alpha=0.3 if has_slo else 1.0, label="throughput"
    )
    last.barh(rows, np.nan_to_num(goodput), height=0.62, color=hues, label="goodput")
    last.set_xlabel("throughput (light) and goodput (solid), requests/s" if has_slo else "throughput (requests/s)")
    first.set_yticks(rows, [setting.name for setting in settings])
    first.set_ylim(len(settings) - 0.4, -0.6)
    for own in axes[0]:
        own.grid(axis="y", visible=False)
        own.set_xlim(left=0)
    return figure


def _draw(
    axes: Any,
    series: Sequence[Series],
    arrangement: Arrangement,
    read: _Reader,
    scale: float,
    make: _MakeInterval = positive_interval,
) -> bool:
    """Draw one line per series; write a message and return False if there is nothing to draw."""
    drawn = False
    for i in arrangement.members(0):
        points = _points(series[i], read, scale, make)
        if not points:
            continue
        drawn = True
        look = arrangement.looks[i]
        rates, means = [point.rate for point in points], [point.mean for point in points]
        axes.plot(
            rates,
            means,
            label=series[i].label,
            marker="" if look.is_muted else look.marker,
            markersize=4.5,
            **look.line,
        )
        known = [(point.rate, point.interval) for point in points if point.interval is not None]
        axes.vlines(
            [rate for rate, _ in known],
            [interval.low for _, interval in known],
            [interval.high for _, interval in known],
            color=look.hue, linewidth=1.6, alpha=0.7, label=f"{series[i].label}, 95 % interval",
        )  # fmt: skip
    if not drawn:
        note_empty(axes)
    return drawn


def _points(series: Series, read: _Reader, scale: float, make: _MakeInterval = positive_interval) -> list[_Point]:
    """Return a point for each setting of the series, by ascending rate."""
    points = []
    for setting in series.settings:
        rates, values = (floats([own(run) for run in setting.runs]) for own in (_offered, read))
        if rates.size and values.size:
            points.append(_Point(float(rates.mean()), float(values.mean()) * scale, make((values * scale).tolist())))
    return sorted(points, key=lambda point: point.rate)


def _one_panel(arrangement: Arrangement) -> Arrangement:
    """Return the arrangement with all series in one panel, since lines with few points can share a panel."""
    return Arrangement(("",), (0,) * len(arrangement.panel_of), arrangement.looks, arrangement.legend)


def _legend(series: Sequence[Series], arrangement: Arrangement) -> list[tuple[str, Any]]:
    return line_entries(arrangement.legend, with_marker=True) if len(series) > 1 else []


def _missed(run: RunData) -> float | None:
    met = _value(run, _ATTAINMENT)
    return None if met is None else 1.0 - met


def _at(path: str) -> _Reader:
    return lambda run: _value(run, path)


def _offered(run: RunData) -> float | None:
    return _value(run, "overall.offered_requests_per_s")


def _of_class(name: str, latency: str, statistic: str) -> _Reader:
    """Return a function that reads a statistic of one class's latency. A class name may contain dots, so it is looked
    up on its own, not as part of a dotted path.
    """

    def read(run: RunData) -> float | None:
        group = (run.summary.value("by_slo_class") or {}).get(name) or {}
        distribution = group.get(latency)
        found = distribution.get(statistic) if isinstance(distribution, Mapping) else None
        return None if found is None else float(found)

    return read


def _value(run: RunData, path: str) -> float | None:
    value = run.summary.value(path)
    return None if value is None else float(value)


def _mean(setting: Setting, path: str) -> float:
    values = floats([_value(run, path) for run in setting.runs])
    return float(values.mean()) if values.size else float("nan")


__all__ = [
    "attainment_by_rate",
    "class_latency_by_rate",
    "class_names",
    "delivery_bars",
    "goodput_by_rate",
    "has_rate_sweep",
    "has_slo",
    "latency_by_rate",
]
