"""Figures of an atlas: map of policies, latency against load, fairness against throughput, cost, and a
policy's effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vajra_py.metrics.comparison.metrics import BY_KEY, Metric, metric_text, titled
from vajra_py.metrics.comparison.policy_map import BASELINE, WorkloadComparison
from vajra_py.metrics.comparison.significance import Versus
from vajra_py.metrics.comparison.table_model import BEST, HIGHEST, LOWEST
from vajra_py.metrics.plots.style import (
    COLOURS,
    GRID,
    INK,
    MAX_SERIES,
    MUTED,
    Look,
    add_legend,
    big_numbers,
    line_entries,
    name_panel,
    new_figure,
    note_empty,
    patch_entries,
    plain_log,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BETTER_COLOUR, WORSE_COLOUR = COLOURS[0], COLOURS[1]
_FULL_GAP = 0.5
"""Magnitude of the relative difference from the baseline (`relative_gap`) at which a cell reaches the full colour. At
half and at twice the baseline's value, the magnitude is 0.5.
"""
_SECONDARY_ALPHA = 0.3
"""Opacity of the colour of a difference that is not significant."""
_LATENCIES = ("ttft_mean_s", "ttft_p99_s", "tbt_p99_s")
_THROUGHPUT, _FAIRNESS, _COST = (
    "throughput_output_tokens_per_s",
    "max_service_difference",
    "cost_per_million_output_tokens",
)


def looks(policies: Sequence[str]) -> dict[str, Look]:
    """Return the colour, dash and marker of each policy; the baseline has the text colour."""
    found = {BASELINE: Look(None)}
    others = [policy for policy in policies if policy != BASELINE]
    return found | {policy: Look(i % MAX_SERIES, i // MAX_SERIES) for i, policy in enumerate(others)}


def _load(own: WorkloadComparison, rank: int | None) -> str:
    return own.main_load if rank is None else own.loads[min(rank, len(own.loads) - 1)]


@styled
def policy_map(workloads: Sequence[WorkloadComparison], rank: int | None = None) -> Figure:
    """Draw a table for each workload; rows are policies, columns metrics. `rank` selects the load: 0 is the workload's
    lowest load, None its main load.

    Colours show how much better or worse than the baseline a value is; they are pale if the difference is not
    significant. Cells of overloaded policies are grey.
    """
    policies = workloads[0].policies
    widths = [max(1, len(own.metrics)) for own in workloads]
    figure, axes = new_figure(1, len(workloads), 0.34 * len(policies) + 1.0, sharey=True, width_ratios=widths)
    for own, panel in zip(workloads, axes[0], strict=True):
        load = _load(own, rank)
        name_panel(panel, own.name)
        offered = own.offered(load)
        panel.set_title(own.name if offered is None else f"{own.name}, {offered:.3g} requests/s")
        panel.grid(visible=False)
        panel.set_xlim(-0.5, len(own.metrics) - 0.5)
        panel.set_xticks(range(len(own.metrics)), [titled(metric) for metric in own.metrics], rotation=35, ha="right")
        for row, policy in enumerate(policies):
            for column, metric in enumerate(own.metrics):
                _draw_cell(panel, (column, row), own, (policy, load), metric)
        panel.tick_params(length=0)
        for side in panel.spines.values():
            side.set_visible(False)
    axes[0, 0].set_yticks(range(len(policies)), policies)
    axes[0, 0].set_ylim(len(policies) - 0.5, -0.5)
    entries = [("better than the baseline", BETTER_COLOUR), ("worse", WORSE_COLOUR), ("overloaded", MUTED)]
    add_legend(figure, patch_entries(entries))
    return figure


def _draw_cell(
    panel: Axes, place: tuple[int, int], own: WorkloadComparison, key: tuple[str, str], metric: Metric
) -> None:
    from matplotlib.patches import Rectangle

    column, row = place
    policy, load = key
    value = own.value(policy, load, metric.key)
    if value is None:
        return
    mark = own.mark(policy, load, metric.key)
    colour, alpha = _shade(own, policy, load, metric)
    is_best = mark in (BEST, LOWEST, HIGHEST)
    box = (column - 0.48, row - 0.45)
    panel.add_patch(Rectangle(box, 0.96, 0.9, facecolor=colour, alpha=alpha, edgecolor="none"))
    if is_best:
        panel.add_patch(
            Rectangle(box, 0.96, 0.9, facecolor="none", edgecolor=INK, linewidth=1.6 if mark == BEST else 0.8)
        )
    text = metric_text(metric, value) + mark
    panel.text(column, row, text, ha="center", va="center", fontsize=7.5, weight="bold" if mark == BEST else "normal")


def _shade(own: WorkloadComparison, policy: str, load: str, metric: Metric) -> tuple[str, float]:
    """Return the colour of a cell and the colour's opacity."""
    if own.is_overloaded(policy, load):
        return MUTED, 0.35
    versus = own.versus(policy, load, metric.key)
    gap = relative_gap(own, policy, load, metric)
    if versus is None or gap is None or metric.lower_is_better is None:
        return GRID, 0.4
    is_better = (gap < 0) == metric.lower_is_better
    strength = min(1.0, abs(gap) / _FULL_GAP)
    factor = 1.0 if versus.is_significant else _SECONDARY_ALPHA
    return (BETTER_COLOUR if is_better else WORSE_COLOUR), 0.75 * strength * factor


def relative_gap(own: WorkloadComparison, policy: str, load: str, metric: Metric) -> float | None:
    """Return a policy's difference from the baseline, divided by the larger of the two values; None if a value is
    unknown. It lies between -1 and 1 and has the same magnitude at half and at twice the baseline's value.
    """
    value, base = (own.value(one, load, metric.key) for one in (policy, BASELINE))
    if value is None or base is None:
        return None
    largest = max(abs(value), abs(base))
    return (value - base) / largest if largest else 0.0


@styled
def latency_by_load(workloads: Sequence[WorkloadComparison], only: str | None = None) -> Figure:
    """Draw latencies against the offered load, with a line for each policy. With `only`, all policies except this one
    and the baseline are grey in the background.
    """
    return _by_load(workloads, _LATENCIES if only is None else _LATENCIES[:1], only)


def _by_load(workloads: Sequence[WorkloadComparison], keys: Sequence[str], only: str | None) -> Figure:
    policies = workloads[0].policies
    style = looks(policies)
    figure, axes = new_figure(len(keys), len(workloads), 2.4, sharex="col")
    for column, own in enumerate(workloads):
        for row, key in enumerate(keys):
            panel = axes[row, column]
            name_panel(panel, f"{own.name}_{key.removesuffix('_s')}")
            drawn = [_draw_line(panel, own, policy, key, _look(style, policy, only)) for policy in policies]
            if not any(drawn):
                note_empty(panel)
                continue
            plain_log(panel.yaxis)
            if row == 0:
                panel.set_title(own.name)
            if column == 0:
                panel.set_ylabel(titled(BY_KEY[key]))
        axes[-1, column].set_xlabel("offered load (requests/s)")
    shown = policies if only is None else [BASELINE, only]
    entries = line_entries([(policy, style[policy]) for policy in shown], with_marker=True)
    add_legend(figure, entries)
    return figure


def _look(style: dict[str, Look], policy: str, only: str | None) -> Look:
    return style[policy] if only is None or policy in (only, BASELINE) else Look(0, is_muted=True)


def _draw_line(panel: Axes, own: WorkloadComparison, policy: str, key: str, look: Look) -> bool:
    """Draw a policy's means and intervals over the loads, with hollow markers if overloaded. Return False if there are
    no values.
    """
    scale = BY_KEY[key].scale
    loads = [load for load in own.loads if own.value(policy, load, key) is not None]
    if not loads:
        return False
    xs = [own.offered(load) or 0.0 for load in loads]
    ys = [(own.value(policy, load, key) or 0.0) * scale for load in loads]
    panel.plot(xs, ys, label=policy, **look.line)
    if look.is_muted:
        return True
    for load, x, y in zip(loads, xs, ys, strict=True):
        face = "none" if own.is_overloaded(policy, load) else look.hue
        panel.plot([x], [y], marker=look.marker, markersize=4.5, color=look.hue, markerfacecolor=face, label="_point")
        interval = own.interval(policy, load, key)
        if interval is not None:
            ends = (interval.low * scale, interval.high * scale)
            panel.vlines([x], *ends, color=look.hue, linewidth=1.4, alpha=0.6, label=f"{policy}, 95 % interval")
    return True


@styled
def fairness_by_throughput(workloads: Sequence[WorkloadComparison], rank: int | None = None) -> Figure:
    """Draw the largest difference of service between backlogged tenants against throughput, under the load with this
    rank (see `policy_map`).
    """
    policies = workloads[0].policies
    style = looks(policies)
    figure, axes = new_figure(1, len(workloads), 3.0)
    for own, panel in zip(workloads, axes[0], strict=True):
        load = _load(own, rank)
        name_panel(panel, own.name)
        panel.set_title(own.name)
        drawn = [_draw_point(panel, own, (policy, load), style[policy]) for policy in policies]
        if any(drawn):
            panel.set_xlabel(titled(BY_KEY[_THROUGHPUT]))
            panel.set_ylabel("service difference (tokens)")
            values = [own.value(policy, load, _FAIRNESS) or 0.0 for policy in policies]
            panel.set_ylim(0, 1.2 * max(values) or 1.0)  # not autoscaled: wide intervals would compress the means
            big_numbers(panel.yaxis)
        else:
            note_empty(panel, "no two tenants were backlogged")
    add_legend(figure, _marker_entries(policies, style))
    return figure


def _draw_point(panel: Axes, own: WorkloadComparison, key: tuple[str, str], look: Look) -> bool:
    policy, load = key
    x, y = (own.value(policy, load, one) for one in (_THROUGHPUT, _FAIRNESS))
    if x is None or y is None:
        return False
    face = "none" if own.is_overloaded(policy, load) else look.hue
    panel.plot(
        [x], [y], marker=look.marker, color=look.hue, markerfacecolor=face, markersize=6, linestyle="none", label=policy
    )
    interval = own.interval(policy, load, _FAIRNESS)
    if interval is not None:
        panel.vlines(
            [x], interval.low, interval.high, color=look.hue, linewidth=1.0, alpha=0.4, label=f"{policy}, 95 % interval"
        )
    return True


def _marker_entries(policies: Sequence[str], style: dict[str, Look]) -> list[tuple[str, Any]]:
    from matplotlib.lines import Line2D

    def artist(look: Look) -> Any:
        return Line2D([], [], color=look.hue, marker=look.marker, linestyle="none", markersize=6)

    return [(policy, artist(style[policy])) for policy in policies]


@styled
def cost(workloads: Sequence[WorkloadComparison]) -> Figure:
    """Draw the cost per million output tokens of each policy, with a dot for each load, hollow if overloaded."""
    policies = workloads[0].policies
    figure, axes = new_figure(1, len(workloads), 0.26 * len(policies) + 0.8, sharey=True)
    for own, panel in zip(workloads, axes[0], strict=True):
        name_panel(panel, own.name)
        panel.set_title(own.name)
        drawn = False
        for number, load in enumerate(own.loads):
            for row, policy in enumerate(policies):
                value = own.value(policy, load, _COST)
                if value is None:
                    continue
                drawn = True
                hue = COLOURS[number % len(COLOURS)]
                face = "none" if own.is_overloaded(policy, load) else hue
                panel.plot(
                    [value], [row], "o", color=hue, markerfacecolor=face, markersize=4.5, label=f"{policy}, {load}"
                )
        if drawn:
            panel.set_xlabel("$ per million output tokens")
            panel.set_xlim(left=0)
        else:
            note_empty(panel, "the device has no price")
        panel.grid(axis="y", visible=False)
    axes[0, 0].set_yticks(range(len(policies)), policies)
    axes[0, 0].set_ylim(len(policies) - 0.5, -0.5)
    return figure


@styled
def effect(workloads: Sequence[WorkloadComparison], policy: str, rank: int | None = None) -> Figure:
    """Draw a policy's mean difference from the baseline with its 95 % interval, in percent of the baseline's value, for
    each primary metric.
    """
    metrics = list({metric.key: metric for own in workloads for metric in own.metrics}.values())
    figure, axes = new_figure(1, len(workloads), 0.28 * len(metrics) + 0.5, sharey=True)
    for own, panel in zip(workloads, axes[0], strict=True):
        load = _load(own, rank)
        name_panel(panel, own.name)
        panel.set_title(own.name)
        drawn = [_draw_effect(panel, row, own, (policy, load), metric) for row, metric in enumerate(metrics)]
        panel.axvline(0.0, color=INK, linewidth=0.8, label="_baseline")
        panel.grid(axis="y", visible=False)
        panel.set_xlabel("difference from the baseline (%)")
        if not any(drawn):
            why = "overloaded" if own.is_overloaded(policy, load) else "nothing to compare"
            panel.text(0.5, 0.5, why, transform=panel.transAxes, ha="center", va="center", color=MUTED)
    axes[0, 0].set_yticks(range(len(metrics)), [metric.label for metric in metrics])
    axes[0, 0].set_ylim(len(metrics) - 0.5, -0.5)
    entries = [("better", BETTER_COLOUR), ("worse", WORSE_COLOUR), ("may be chance", MUTED)]
    add_legend(figure, patch_entries(entries))
    return figure


def _draw_effect(panel: Axes, row: int, own: WorkloadComparison, key: tuple[str, str], metric: Metric) -> bool:
    policy, load = key
    versus, base = own.versus(policy, load, metric.key), own.value(BASELINE, load, metric.key)
    if versus is None or versus.difference is None or not base:
        return False
    if own.is_overloaded(policy, load) or own.is_overloaded(BASELINE, load):
        return False
    gap, hue = versus.difference, _verdict_colour(versus)
    panel.plot([100 * gap.mean / base], [row], "o", color=hue, markersize=5, label=metric.label)
    if gap.interval is not None:
        ends = (100 * gap.interval.low / base, 100 * gap.interval.high / base)
        panel.hlines([row], *ends, color=hue, linewidth=1.8, label=f"{metric.label}, 95 % interval")
    return True


def _verdict_colour(versus: Versus) -> str:
    return {"better": BETTER_COLOUR, "worse": WORSE_COLOUR}.get(versus.verdict, MUTED)
