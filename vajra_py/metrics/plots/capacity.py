"""Figure of a capacity search: each metric of the SLO against rate or cost, with its limit and the settings'
capacities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vajra_py.metrics.comparison.intervals import Interval, floats, positive_interval, proportion_interval
from vajra_py.metrics.plots.style import INK, Look, add_legend, line_entries, new_figure, percent, plain_log, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Limit:
    """Condition of the SLO: a metric and its limit."""

    condition: str
    metric: str
    limit: float
    unit: str
    """Unit of the metric, such as `s`; empty for a fraction."""

    @property
    def is_fraction(self) -> bool:
        """True if the metric is a fraction, which is shown in percent."""
        return not self.unit


@dataclass(frozen=True, slots=True)
class CapacityCurve:
    """One setting: measurements at each rate (or cost), and its capacity."""

    label: str
    points: Sequence[tuple[float, Mapping[str, tuple[float | None, ...]]]]
    """(Rate or cost, values of all seeds by metric) of each measurement, in ascending order of the rate or cost."""
    knee: float | None
    """Capacity, in the unit of the x values; None if none was found."""
    interval: Interval | None = None
    """Confidence interval of the capacity."""
    lines: Mapping[str, Sequence[tuple[float, float]]] | None = None
    """Fitted curve of each condition's metric for a typical seed, as points (rate, value). It crosses the condition's
    limit at the capacity in `ends`. None to draw a line through the means instead.
    """
    ends: Mapping[str, tuple[float, Interval | None]] = field(default_factory=dict)
    """For each condition, (capacity, interval of the capacity) that the setting would have if the SLO had only this
    condition.
    """


@styled
def capacity_figure(curves: Sequence[CapacityCurve], limits: Sequence[Limit], x_label: str) -> Figure:
    """Draw a panel for each condition of the SLO, with a line for each setting; a vertical line with a band shows the
    setting's capacity with its interval, and a dashed line shows the limit.

    With rates on the x axis, every run is a point. A ring on the dashed line shows, with its interval, the capacity
    that the setting would have if the SLO had only this condition; the vertical line passes through the ring of the
    condition that decides the capacity. With costs on the x axis (such as numbers of replicas), points are means over
    seeds with 95 % intervals, and a ring on the setting's line shows its capacity. The x axis is linear, latency axes
    are logarithmic.
    """
    figure, axes = new_figure(1, len(limits), 3.0)
    looks = [Look(k % 8, k // 8) for k in range(len(curves))]
    reach = _range(curves)
    for own, limit in zip(axes.flat, limits, strict=False):
        for curve, look in zip(curves, looks, strict=True):
            (_draw_means if curve.lines is None else _draw_runs)(own, curve, look, limit, reach)
            _draw_knee(own, curve, look)
        own.axhline(limit.limit, color=INK, linewidth=0.9, linestyle=(0, (3, 2)), zorder=1)
        own.set_xlabel(x_label)
        own.set_ylabel(limit.metric if limit.is_fraction else f"{limit.metric}, {limit.unit}")
        own.set_xlim(*reach)
        if limit.is_fraction:
            percent(own.yaxis)
        elif limit.limit > 0:
            plain_log(own.yaxis)
    add_legend(
        figure, line_entries([(one.label, look) for one, look in zip(curves, looks, strict=True)], with_marker=True)
    )
    return figure


def _draw_runs(axes: Any, curve: CapacityCurve, look: Look, limit: Limit, reach: tuple[float, float]) -> None:
    runs = [
        (x, value)
        for x, values in curve.points
        if x <= reach[1]
        for value in floats(list(values[limit.metric])).tolist()
        if limit.is_fraction or limit.limit <= 0 or value > 0
    ]
    axes.plot([x for x, _ in runs], [y for _, y in runs], look.marker, color=look.hue, markersize=2.5, alpha=0.35, markeredgewidth=0)  # fmt: skip
    line = [point for point in (curve.lines or {}).get(limit.condition, ()) if point[0] <= reach[1]]
    axes.plot([x for x, _ in line], [y for _, y in line], **look.line)
    if limit.condition in curve.ends:
        rate, interval = curve.ends[limit.condition]
        axes.plot([rate], [limit.limit], marker="o", markersize=8, markerfacecolor="none", color=look.hue, zorder=3)
        if interval is not None:
            axes.hlines([limit.limit], [interval.low], [min(interval.high, reach[1])], color=look.hue, linewidth=1.4, alpha=0.6)  # fmt: skip


def _draw_means(axes: Any, curve: CapacityCurve, look: Look, limit: Limit, reach: tuple[float, float]) -> None:
    points = [(x, floats(list(values[limit.metric]))) for x, values in curve.points if x <= reach[1]]
    points = [(x, values) for x, values in points if values.size > 1 and (limit.is_fraction or values.min() > 0)]
    axes.plot(
        [x for x, _ in points], [float(values.mean()) for _, values in points], marker=look.marker, markersize=4, **look.line
    )  # fmt: skip
    for x, values in points:
        interval = (proportion_interval if limit.is_fraction else positive_interval)(values.tolist())
        if interval is not None:
            low = max(interval.low, 0.0 if limit.is_fraction else float(values.min()) * 0.5)
            high = min(interval.high, 1.0) if limit.is_fraction else interval.high
            axes.vlines([x], [low], [high], color=look.hue, linewidth=1.4, alpha=0.6)
    if curve.knee is not None and points:
        height = float(np.interp(curve.knee, [x for x, _ in points], [float(values.mean()) for _, values in points]))
        axes.plot([curve.knee], [height], marker="o", markersize=8, markerfacecolor="none", color=look.hue)


def _draw_knee(axes: Any, curve: CapacityCurve, look: Look) -> None:
    if curve.knee is not None:
        axes.axvline(curve.knee, color=look.hue, linewidth=1.0, alpha=0.8, zorder=1.2)
    if curve.interval is not None and np.isfinite(curve.interval.high):
        axes.axvspan(curve.interval.low, curve.interval.high, color=look.hue, alpha=0.12, linewidth=0)


def _range(curves: Sequence[CapacityCurve]) -> tuple[float, float]:
    """Return the range of the x axis: from zero to 1.5 times the highest capacity, since higher rates are irrelevant.
    Without capacities, the range ends at the highest rate.
    """
    knees = [one.knee for one in curves if one.knee is not None]
    rates = [x for one in curves for x, _ in one.points]
    return 0.0, 1.5 * max(knees) if knees else max(rates, default=1.0)
