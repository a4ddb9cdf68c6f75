"""Figures of distributions: latencies, times of moves, and slowdown by prompt length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vajra_py.metrics.comparison.intervals import floats
from vajra_py.metrics.definitions import Floats, quantiles
from vajra_py.metrics.plots.data import Cdf, bucket_edges, gap_cdf, request_cdf
from vajra_py.metrics.plots.layout import Arrangement, arrange_runs
from vajra_py.metrics.plots.style import (
    GRID,
    add_legend,
    label_all,
    line_entries,
    name_panel,
    new_figure,
    note_empty,
    percent,
    plain_log,
    styled,
    tapered,
    token_count,
)
from vajra_py.metrics.runs.naming import distinct
from vajra_py.metrics.runs.replications import Setting, group_replications
from vajra_py.metrics.runs.run_data import RunData

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CDF_COLUMNS = (("ttft_s", "TTFT"), ("tbt", "TBT"), ("e2e_s", "E2E latency"))
_RANGE_METRICS = (
    ("overall.ttft_s", "TTFT", 1.0, "s"),
    ("overall.tbt_s", "TBT", 1000.0, "ms"),
    ("overall.tpot_s", "TPOT", 1000.0, "ms"),
    ("overall.e2e_s", "E2E", 1.0, "s"),
)
_MOVEMENT_TIMES = (
    ("movement.held_s", "held at the source", 1000.0, "ms"),
    ("movement.transfer_s", "in transfer", 1000.0, "ms"),
    ("movement.target_wait_s", "waiting at the target", 1000.0, "ms"),
)


@styled
def latency_cdfs(runs: Sequence[RunData]) -> Figure:
    """Draw cumulative distributions of TTFT, TBT and E2E latency with a line per run, on a logarithmic axis in seconds.

    TTFT and E2E count all requests that arrived in the window, so the line of a run with unanswered requests ends below
    100 %.
    """
    arrangement = arrange_runs(runs)
    names = [run.name for run in distinct(runs)]
    rows = len(arrangement.panels)
    figure, axes = new_figure(rows, 3, 3.1 if rows == 1 else 2.2, sharey=True, sharex="col")
    for column, (name, label) in enumerate(_CDF_COLUMNS):
        curves = [gap_cdf(run) if name == "tbt" else request_cdf(run, name) for run in runs]
        for row in range(rows):
            _draw_cdfs(axes[row, column], (names, curves), arrangement, row)
            name_panel(axes[row, column], name.removesuffix("_s"))
            if row == rows - 1:
                axes[row, column].set_xlabel(f"{label} (s)")
        _share_log_range(axes[:, column], curves)
    for row, title in enumerate(arrangement.panels):
        axes[row, 0].set_title(title)
        axes[row, 0].set_ylabel("share" if rows > 1 else "share of requests (TBT: of gaps)")
        percent(axes[row, 0].yaxis)
    label_all(axes)
    add_legend(figure, line_entries(arrangement.legend) if len(runs) > 1 else [])
    return figure


def _draw_cdfs(axes: Any, named: tuple[Sequence[str], Sequence[Cdf]], arrangement: Arrangement, panel: int) -> None:
    names, curves = named
    members = arrangement.members(panel)
    for place, i in enumerate(members):
        if curves[i].values.size:
            look = arrangement.looks[i].line
            look.setdefault("linewidth", tapered(place, len(members)))
            axes.step(curves[i].values, curves[i].shares, where="post", label=names[i], **look)
    axes.set_ylim(0, 1.02)


def _share_log_range(column_axes: Any, curves: Sequence[Cdf]) -> None:
    """Set one logarithmic range for all curves. The range begins at most five decades below the largest value, so that
    it is not stretched by a few instant answers.
    """
    known = [curve.values for curve in curves if curve.values.size and curve.values[-1] > 0]
    for axes in column_axes:
        if not known:
            note_empty(axes)
            continue
        low = min(float(values[values > 0][0]) for values in known)
        high = max(float(values[-1]) for values in known)
        plain_log(axes.xaxis, most=7)
        axes.set_xlim(max(low, high / 1e5) * 0.85, high * 1.2)


@styled
def latency_ranges(runs: Sequence[RunData]) -> Figure:
    """Draw P50 to P99 of TTFT, TBT, TPOT and E2E with a row per setting: a dot at P50, a bar up to P99, and a cross at
    the mean. Values are means over replications.
    """
    return _ranges(group_replications(runs), _RANGE_METRICS)


def has_movement(runs: Sequence[RunData]) -> bool:
    """Return whether requests of any run moved between replicas with their KV."""
    return any(run.summary.value("movement.held_s.count") for run in runs)


@styled
def movement_times(runs: Sequence[RunData]) -> Figure:
    """Draw P50 to P99 of three times (held at the source, in transfer, waiting at the target) over the requests that
    moved, with a row per setting as in `latency_ranges`.
    """
    return _ranges(group_replications(runs), _MOVEMENT_TIMES)


def _ranges(settings: Sequence[Setting], metrics: Sequence[tuple[str, str, float, str]]) -> Figure:
    """Draw a panel for each metric, given as (path in the summary, label, scale, unit)."""
    figure, axes = new_figure(1, len(metrics), max(1.6, 0.26 * len(settings) + 0.8), sharey=True)
    looks = arrange_runs([setting.first for setting in settings]).looks
    rows = np.arange(len(settings))
    for column, (path, label, scale, unit) in enumerate(metrics):
        own = axes[0, column]
        own.set_xlabel(f"{label} ({unit})")
        name_panel(own, path.rpartition(".")[2].removesuffix("_s"))
        values = np.array(
            [[_scaled(setting, f"{path}.{stat}", scale) for stat in ("p50", "p99", "mean")] for setting in settings],
            dtype=np.float64,
        )
        if not np.isfinite(values).any():
            note_empty(own)
            continue
        for row, (p50, p99, mean) in enumerate(values):
            hue = looks[row].hue
            own.plot([p50, p99], [row, row], color=hue, linewidth=3.2, solid_capstyle="butt", alpha=0.55)
            name = settings[row].name
            own.plot(p50, row, "o", color=hue, markersize=5.5, label=f"{name}, P50")
            own.plot(p99, row, "|", color=hue, markersize=9, markeredgewidth=2, label=f"{name}, P99")
            own.plot(mean, row, "x", color=hue, markersize=4.5, markeredgewidth=1.1, label=f"{name}, mean")
        positive = values[np.isfinite(values) & (values > 0)]
        if positive.size:
            plain_log(own.xaxis, most=4)
            own.set_xlim(positive.min() * 0.8, positive.max() * 1.3)
        else:
            own.set_xlim(left=0)
    axes[0, 0].set_yticks(rows, [setting.name for setting in settings])
    axes[0, 0].set_ylim(len(settings) - 0.4, -0.6)
    for own in axes[0]:
        own.grid(axis="y", visible=False)
    return figure


@styled
def slowdown_by_prompt_length(runs: Sequence[RunData]) -> Figure:
    """Draw TTFT relative to the fastest prefill by bucket of prompt lengths: a dot at the median, a whisker up to P99.

    The fastest prefill of a bucket is the shortest time per prompt token from first admission to first token in any of
    these runs, so a slowdown of 1 is the best observed value. With head-of-line blocking, short prompts have the
    largest slowdown.
    """
    columns = [run.measured("num_prompt_tokens", "arrived_at", "admitted_at", "first_token_at") for run in runs]
    longest = [int(own["num_prompt_tokens"].max()) for own in columns if own["num_prompt_tokens"].size]
    edges = bucket_edges(longest)
    fastest = np.full(len(edges) - 1, np.inf)
    for own in columns:
        np.fmin(fastest, _per_bucket(own, edges, "admitted_at", lambda rates: float(rates.min())), out=fastest)
    arrangement = arrange_runs(runs)
    names = [run.name for run in distinct(runs)]
    rows = len(arrangement.panels)
    figure, axes = new_figure(rows, 1, 3.2 if rows == 1 else 2.0, sharex=True, sharey=True)
    used = [bucket for bucket in range(len(fastest)) if np.isfinite(fastest[bucket])]
    for row, title in enumerate(arrangement.panels):
        own_axes = axes[row, 0]
        own_axes.set_title(title)
        name_panel(own_axes, "slowdown")
        members = arrangement.members(row)
        for place, i in enumerate(members):
            offset = (place + 0.5) / len(members) * 0.8 - 0.4
            _draw_slowdowns(own_axes, (names[i], columns[i]), (edges, fastest, used), offset, arrangement.looks[i])
        _finish_slowdowns(own_axes, edges, used)
    axes[-1, 0].set_xlabel("prompt length (tokens)")
    add_legend(figure, line_entries(arrangement.legend, with_marker=True) if len(runs) > 1 else [])
    return figure


def _draw_slowdowns(
    axes: Any,
    named: tuple[str, dict[str, Any]],
    scale: tuple[list[int], Floats, list[int]],
    offset: float,
    look: Any,
) -> None:
    name, columns = named
    edges, fastest, used = scale
    marks = [
        _per_bucket(columns, edges, "arrived_at", lambda rates, q=q: quantiles(rates, (q,))[0]) / fastest
        for q in (0.5, 0.99)
    ]
    x = np.arange(len(used)) + offset
    p50, p99 = (mark[used] for mark in marks)
    axes.vlines(x, p50, p99, color=look.hue, linewidth=2.2, alpha=0.55)
    axes.plot(x, p50, look.marker, color=look.hue, markersize=5, linestyle="none", label=f"{name}, median")
    axes.plot(x, p99, "_", color=look.hue, markersize=7, markeredgewidth=1.8, linestyle="none", label=f"{name}, P99")


def _finish_slowdowns(axes: Any, edges: list[int], used: list[int]) -> None:
    if not used:
        note_empty(axes)
        return
    plain_log(axes.yaxis, most=5)
    axes.axhline(1.0, color=GRID, linewidth=1.4, zorder=1)
    axes.set_ylabel("TTFT slowdown (×)")
    axes.set_xticks(range(len(used)), [f"{token_count(edges[b])}–{token_count(edges[b + 1])}" for b in used])
    axes.set_xlim(-0.5, len(used) - 0.5)
    axes.grid(axis="x", visible=False)
    for border in range(1, len(used)):
        axes.axvline(border - 0.5, color=GRID, linewidth=0.6, zorder=1)


def _per_bucket(columns: dict[str, Any], edges: list[int], since: str, reduce: Any) -> Floats:
    """Return, for each bucket of prompt lengths, a statistic (`reduce`) of the seconds per prompt token from `since` to
    the first token; NaN for a bucket without requests.
    """
    took_s = columns["first_token_at"] - columns[since]
    lengths = columns["num_prompt_tokens"]
    rates = took_s / np.maximum(lengths, 1)
    found = np.full(len(edges) - 1, np.nan)
    for bucket in range(len(found)):
        own = rates[(lengths > edges[bucket]) & (lengths <= edges[bucket + 1]) & np.isfinite(rates)]
        if own.size:
            found[bucket] = reduce(own)
    return found


def _scaled(setting: Setting, path: str, scale: float) -> float:
    values = floats([run.summary.value(path) for run in setting.runs])
    return float(values.mean()) * scale if values.size else float("nan")
