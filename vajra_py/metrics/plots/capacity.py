"""The curve of a capacity search: each metric of the SLO against rate or cost, with its limit and the knee of each setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vajra_py.metrics.intervals import Interval, floats, positive_interval, proportion_interval
from vajra_py.metrics.plots.style import INK, Look, add_legend, line_entries, new_figure, percent, plain_log, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Limit:
    """A metric of the SLO and its limit."""

    metric: str
    limit: float
    is_fraction: bool


@dataclass(frozen=True, slots=True)
class CapacityCurve:
    """One setting: what was measured at each rate (or cost), and its capacity."""

    label: str
    points: Sequence[tuple[float, Mapping[str, tuple[float | None, ...]]]]
    """Rate or cost, rising; by metric the values of the seeds."""
    knee: float | None
    interval: Interval | None


@styled
def capacity_figure(curves: Sequence[CapacityCurve], limits: Sequence[Limit], x_label: str) -> Figure:
    """One panel for each condition of the SLO: a line for each setting, its knee (the capacity) as a vertical line with its interval as a band; the limit is dashed.

    The rate is linear and a latency logarithmic; a bar at a point is the 95 % interval over its seeds.
    """
    figure, axes = new_figure(1, len(limits), 3.0)
    looks = [Look(k % 8, k // 8) for k in range(len(curves))]
    for own, limit in zip(axes.flat, limits, strict=False):
        for curve, look in zip(curves, looks, strict=True):
            _draw(own, curve, look, limit)
        own.axhline(limit.limit, color=INK, linewidth=0.9, linestyle=(0, (3, 2)), zorder=1)
        own.set_xlabel(x_label)
        own.set_ylabel(limit.metric if limit.is_fraction else f"{limit.metric}, s")
        own.set_xlim(*_range(curves))
        if limit.is_fraction:
            percent(own.yaxis)
        else:
            plain_log(own.yaxis)
    add_legend(
        figure, line_entries([(one.label, look) for one, look in zip(curves, looks, strict=True)], with_marker=True)
    )
    return figure


def _draw(axes: Any, curve: CapacityCurve, look: Look, limit: Limit) -> None:
    points = [(x, floats(list(values[limit.metric]))) for x, values in curve.points]
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
        axes.axvline(curve.knee, color=look.hue, linewidth=1.0, alpha=0.8, zorder=1.2)
        height = float(np.interp(curve.knee, [x for x, _ in points], [float(values.mean()) for _, values in points]))
        axes.plot([curve.knee], [height], marker="o", markersize=8, markerfacecolor="none", color=look.hue)
    if curve.interval is not None:
        axes.axvspan(curve.interval.low, curve.interval.high, color=look.hue, alpha=0.12, linewidth=0)


def _range(curves: Sequence[CapacityCurve]) -> tuple[float, float]:
    """From nothing to half as much again as the highest knee: further out a search has points that nobody asks about."""
    knees = [one.knee for one in curves if one.knee is not None]
    rates = [x for one in curves for x, _ in one.points]
    return 0.0, 1.5 * max(knees) if knees else max(rates, default=1.0)
