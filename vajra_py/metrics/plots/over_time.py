"""Figures over time: queues, KV memory, batches, steps, and service by tenant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vajra_py.metrics.definitions import ServiceWeights
from vajra_py.metrics.plots.data import (
    kv_use_over_time,
    service_gaps,
    service_over_time,
    time_edges,
    tokens_per_step,
    waiting_over_time,
)
from vajra_py.metrics.plots.layout import arrange_runs, select
from vajra_py.metrics.plots.style import (
    DECODE_COLOUR,
    INK,
    MAX_SERIES,
    MIXED_COLOUR,
    MUTED,
    PREFILL_COLOUR,
    Look,
    add_legend,
    big_numbers,
    label_all,
    line_entries,
    name_panel,
    new_figure,
    note_empty,
    patch_entries,
    percent,
    styled,
    tapered,
)
from vajra_py.metrics.runs.naming import distinct
from vajra_py.metrics.runs.run_data import RunData

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TIME_LABEL = "time (s)"
MAX_RUN_PANELS = 9
"""Maximum number of runs in a figure with a panel per run."""
MAX_TIMELINES = 6
_TIMELINE_STEPS = 70
_MAX_REPLICAS = 8


@styled
def queue_and_kv(runs: Sequence[RunData]) -> Figure:
    """Draw requests waiting for their first admission (left) and KV blocks in use (right) over time, with a line per
    run.

    Points are means over bins of 1/200 of the displayed time; KV use is a mean over replicas.
    """
    arrangement = arrange_runs(runs)
    rows = len(arrangement.panels)
    figure, axes = new_figure(rows, 2, 2.9 if rows == 1 else 1.8, sharex="row")
    names = [run.name for run in distinct(runs)]
    has_dashes = any(look.colour is None for _, look in arrangement.legend)
    for panel in range(rows):
        members = arrangement.members(panel)
        for place, i in enumerate(members):
            width = 0.7 if arrangement.looks[i].is_muted else 0.8 * tapered(place, len(members))
            look = arrangement.looks[i].line | {"linewidth": width}
            if not has_dashes:
                # Colours alone distinguish the runs of a panel, and dashes are hard to follow in a noisy line.
                look["linestyle"] = "-"
            _draw_queue_and_kv(axes[panel], runs[i], look | {"label": names[i]})
    for row, title in enumerate(arrangement.panels):
        left, right = axes[row]
        left.set_title(title)
        for own, label in ((left, "waiting requests"), (right, "KV blocks in use")):
            name_panel(own, "waiting" if own is left else "kv_use")
            if not own.lines:
                note_empty(own)
                continue
            own.set_ylabel(label)
            own.set_ylim(bottom=0)
        if right.lines:
            percent(right.yaxis)
            if right.get_ylim()[1] > 0.4:
                right.set_ylim(0, 1.05)
                right.axhline(1.0, color=MUTED, linewidth=0.8, zorder=1)
            big_numbers(left.yaxis)
    for own in axes[-1]:
        own.set_xlabel(_TIME_LABEL)
    label_all(axes)
    legend = [
        (label, look if has_dashes else Look(look.colour, 0, look.is_muted)) for label, look in arrangement.legend
    ]
    add_legend(figure, line_entries(legend) if len(runs) > 1 else [])
    return figure


def _draw_queue_and_kv(pair: Any, run: RunData, look: dict[str, Any]) -> None:
    edges = time_edges(run)
    if not edges[-1] > edges[0]:
        return
    left, right = pair
    middle = (edges[1:] + edges[:-1]) / 2
    left.plot(middle, waiting_over_time(run, edges), **look)
    right.plot(middle, kv_use_over_time(run, edges), **look)


@styled
def batch_composition(runs: Sequence[RunData]) -> Figure:
    """Draw the mean decode and prefill tokens per step over time, stacked, with a panel per run (at most nine, chosen
    by `select`).
    """
    shown, figure, axes = _run_panels(runs, MAX_RUN_PANELS, row_height_in=2.0)
    for run, own in zip(shown, axes, strict=True):
        edges = time_edges(run, 120)
        decode, prefill = tokens_per_step(run, edges)
        if not (decode + prefill).any():
            note_empty(own)
            continue
        own.stairs(decode, edges, fill=True, color=DECODE_COLOUR, linewidth=0, label="decode tokens")
        own.stairs(
            decode + prefill,
            edges,
            baseline=decode,
            fill=True,
            color=PREFILL_COLOUR,
            linewidth=0,
            label="prefill tokens",
        )
        big_numbers(own.yaxis)
    _label_grid(axes, "tokens per step", "batch")
    add_legend(figure, patch_entries([("decode tokens", DECODE_COLOUR), ("prefill tokens", PREFILL_COLOUR)]))
    return figure


@styled
def service_by_tenant(runs: Sequence[RunData], weights: ServiceWeights | None = None) -> Figure:
    """Draw each tenant's cumulative service in weighted tokens, with a panel per run. The seven tenants with the most
    service are named; the other tenants are merged.
    """
    shown, figure, axes = _run_panels(runs, MAX_RUN_PANELS, row_height_in=2.2)
    service = []
    for run in shown:
        edges = time_edges(run, 120)
        service.append((edges, service_over_time(run, edges, weights or ServiceWeights())))
    totals: dict[str, float] = {}
    for _, tenants in service:
        for tenant, line in tenants.items():
            totals[tenant] = totals.get(tenant, 0.0) + float(line[-1])
    named = sorted(totals, key=lambda tenant: (-totals[tenant], tenant))[: MAX_SERIES - 1]
    rest = [tenant for tenant in totals if tenant not in named]
    for own, (edges, tenants) in zip(axes, service, strict=True):
        if not tenants:
            note_empty(own)
            continue
        for i, tenant in enumerate(named):
            if tenant in tenants:
                own.plot(edges, tenants[tenant], label=tenant or "(none)", **Look(i, i).line)
        others = [tenants[tenant] for tenant in rest if tenant in tenants]
        if others:
            own.plot(edges, sum(others), label=f"{len(rest)} others", **Look(0, is_muted=True).line)
        big_numbers(own.yaxis)
    _label_grid(axes, "service (weighted tokens)", "service")
    entries = [(tenant or "(none)", Look(i, i)) for i, tenant in enumerate(named)]
    entries += [(f"{len(rest)} others", Look(0, is_muted=True))] if rest else []
    add_legend(figure, line_entries(entries))
    return figure


@styled
def service_difference(runs: Sequence[RunData], weights: ServiceWeights | None = None) -> Figure:
    """Draw the largest difference of service between two tenants over time, with a line per run, and a panel per load
    if there are many runs. The value at a time is the maximum over all windows that end at that time and throughout
    which both tenants were backlogged.
    """
    arrangement = arrange_runs(runs)
    names = [run.name for run in distinct(runs)]
    rows = len(arrangement.panels)
    figure, axes = new_figure(rows, 1, 2.9 if rows == 1 else 1.8, sharex=True)
    for panel, title in enumerate(arrangement.panels):
        own = axes[panel, 0]
        own.set_title(title)
        name_panel(own, "service_difference")
        members = arrangement.members(panel)
        for place, i in enumerate(members):
            gaps = service_gaps(runs[i], weights or ServiceWeights())
            if gaps is not None:
                look = arrangement.looks[i]
                width = 0.7 if look.is_muted else 0.8 * tapered(place, len(members))
                own.plot(gaps.edges, gaps.by_end, **(look.line | {"linewidth": width, "label": names[i]}))
        if not own.lines:
            note_empty(own, "no two tenants were backlogged together")
            continue
        own.set_ylim(bottom=0)
        own.set_ylabel("service difference (weighted tokens)" if rows == 1 else "difference (tokens)")
        big_numbers(own.yaxis)
    axes[-1, 0].set_xlabel(_TIME_LABEL)
    add_legend(figure, line_entries(arrangement.legend) if len(runs) > 1 else [])
    return figure


@styled
def step_timeline(runs: Sequence[RunData], start_at: float | None = None, duration_s: float | None = None) -> Figure:
    """Draw the steps of each replica as bars coloured by kind, with a panel per run (at most six) over the same period.

    Without `start_at` (seconds on the runs' clock) the period is centred at the time at which the first run with steps
    has the most waiting requests; without `duration_s` it covers about 70 steps. A triangle marks a step that preempted
    a request.
    """
    shown = select(distinct(runs), MAX_TIMELINES)
    stretches = [_stretch(run, start_at, duration_s) for run in shown]
    found = next((stretch for stretch in stretches if stretch is not None), None)
    steps = [_steps_between(run, found) if found else None for run in shown]
    heights = [max(1.0, 0.32 * (len(own["rows"]) if own else 1) + 0.55) for own in steps]
    figure, axes = new_figure(len(shown), 1, sum(heights) / len(heights), sharex=True, height_ratios=heights)
    for run, own, bars in zip(shown, axes[:, 0], steps, strict=True):
        own.set_title(run.name if len(shown) > 1 else "")
        name_panel(own, "steps")
        if not bars:
            note_empty(own, "no steps in this stretch")
            continue
        for kind, (label, colour) in enumerate(_STEP_KINDS):
            for row, boxes in enumerate(bars["rows"]):
                chosen = [box for box, of_kind in boxes if of_kind == kind]
                own.broken_barh(
                    chosen, (row - 0.36, 0.72), facecolors=colour, edgecolor="white", linewidth=0.35, label=label
                )
        for row, at in bars["preemptions"]:
            own.plot(at, row - 0.36, "v", color=INK, markersize=4.5)
        own.set_yticks(range(len(bars["rows"])), bars["labels"])
        own.set_ylim(len(bars["rows"]) - 0.45, -0.65)
        own.grid(axis="y", visible=False)
    if found:
        axes[-1, 0].set_xlim(*found)
    axes[-1, 0].set_xlabel(_TIME_LABEL)
    add_legend(figure, [*patch_entries(_STEP_KINDS), ("preemption", _triangle())])
    return figure


_STEP_KINDS = (
    ("decodes only", DECODE_COLOUR),
    ("decodes and prefills", MIXED_COLOUR),
    ("prefills only", PREFILL_COLOUR),
)


def _triangle() -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], marker="v", color=INK, linestyle="none", markersize=5)


def _stretch(run: RunData, start_at: float | None, duration_s: float | None) -> tuple[float, float] | None:
    table = run.steps("formed_at", "duration_s", "num_waiting")
    if not table.num_rows:
        return None
    formed_at, step_s, waiting = (table.column(name).to_numpy() for name in table.column_names)
    length_s = duration_s if duration_s is not None else _TIMELINE_STEPS * float(np.median(step_s))
    centre = float(formed_at[int(np.argmax(waiting))])
    start = start_at if start_at is not None else max(float(formed_at.min()), centre - length_s / 2)
    return start, start + max(length_s, 1e-9)


def _steps_between(run: RunData, stretch: tuple[float, float]) -> dict[str, Any] | None:
    """Return bars by replica: `rows` of ((start, duration), kind), `labels`, and `preemptions` as (row, time); None
    without steps.
    """
    names = ("replicaset", "replica_id", "formed_at", "duration_s", "num_decodes", "num_prefills", "num_preempted")
    table = run.steps(*names)
    formed_at = table.column("formed_at").to_numpy()
    inside = np.flatnonzero((formed_at < stretch[1]) & (formed_at + table.column("duration_s").to_numpy() > stretch[0]))
    if not inside.size:
        return None
    records = table.take(inside).to_pylist()
    replicas = sorted({(record["replicaset"], record["replica_id"]) for record in records})[:_MAX_REPLICAS]
    several = len({name for name, _ in replicas}) > 1
    rows: list[list[tuple[tuple[float, float], int]]] = [[] for _ in replicas]
    preemptions = []
    for record in records:
        key = (record["replicaset"], record["replica_id"])
        if key not in replicas:
            continue
        row = replicas.index(key)
        kind = 0 if not record["num_prefills"] else (1 if record["num_decodes"] else 2)
        rows[row].append(((record["formed_at"], record["duration_s"]), kind))
        if record["num_preempted"]:
            preemptions.append((row, record["formed_at"]))
    labels = [f"{name} {replica}" if several else f"replica {replica}" for name, replica in replicas]
    return {"rows": rows, "labels": labels, "preemptions": preemptions}


def _run_panels(runs: Sequence[RunData], limit: int, row_height_in: float) -> tuple[list[RunData], Figure, list[Any]]:
    """Return (runs shown, figure, panels): a panel for each run, up to three in a row, with the run's name as title if
    several runs are shown.
    """
    shown = select(distinct(runs), limit)
    columns = min(len(shown), 3)
    rows = -(-len(shown) // columns)
    figure, grid = new_figure(rows, columns, 3.0 if rows == 1 else row_height_in, sharex=True, sharey=True)
    panels = list(grid.ravel())
    for spare in panels[len(shown) :]:
        spare.set_visible(False)
    panels = panels[: len(shown)]
    for run, own in zip(shown, panels, strict=True):
        own.set_title(run.name if len(shown) > 1 else "")
    across = panels[0].get_subplotspec().get_geometry()[1]
    for own in panels[-across:]:
        own.tick_params(labelbottom=True)
        own.set_xlabel(_TIME_LABEL)
    return shown, figure, panels


def _label_grid(panels: Sequence[Any], label: str, name: str) -> None:
    """Give every panel the name `name`, set the y label at the first panel of each row, and start the shared y axis at
    0.
    """
    if any(own.has_data() for own in panels):
        panels[0].set_ylim(bottom=0)
    for own in panels:
        name_panel(own, name)
    for own in panels[:: panels[0].get_subplotspec().get_geometry()[1]]:
        own.set_ylabel(label)


__all__ = ["batch_composition", "queue_and_kv", "service_by_tenant", "service_difference", "step_timeline"]
