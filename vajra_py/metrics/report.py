"""Self-contained HTML report: verdict, tables, figures, configurations.

The page loads nothing: styles, figures (inline SVG) and data are inside. It follows the reader's light or dark setting, has no script, and is the same bytes for
the same runs. The reading order is: what was compared and on what, whether the runs were stable, warnings, numbers, pictures, details.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vajra_py.metrics import plots
from vajra_py.metrics.comparison import METRICS, OVERALL, Comparison, Metric, compare, metric_text, scope_title, titled
from vajra_py.metrics.differences import SEED_PATH, Axis, axes, differences, flatten
from vajra_py.metrics.figures_svg import inline_svg
from vajra_py.metrics.plots.over_time import MAX_RUN_PANELS, MAX_TIMELINES
from vajra_py.metrics.run_data import RunData, distinct

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDE_RUNS = 6
_MAX_SCOPES = 24
_MAX_DIFFERENCES = 40
_MAX_NAMES = 8


@dataclass(frozen=True, slots=True)
class _FigureSpec:
    """A figure of the report."""

    key: str
    group: str
    title: str
    caption: str
    draw: Callable[[Sequence[RunData]], Figure]
    numbers: str | None = None
    """Metric whose values the figure's text alternative spells out."""
    wanted: Callable[[Sequence[RunData]], bool] = lambda runs: True
    most_runs: int | None = None
    """Runs that the figure has panels for."""


def _has_several_tenants(runs: Sequence[RunData]) -> bool:
    return any(len(run.summary.value("by_tenant") or {}) > 1 for run in runs)


def _has_one_load(runs: Sequence[RunData]) -> bool:
    return not plots.has_rate_sweep(runs)


def _has_slo(runs: Sequence[RunData]) -> bool:
    path = "overall.slo.overall.attainment_fraction"
    return plots.has_rate_sweep(runs) and any(run.summary.value(path) is not None for run in runs)


_FIGURES: tuple[_FigureSpec, ...] = (
    _FigureSpec(
        "latency_by_rate",
        "Load",
        "Latency against load",
        "P50 (upper row) and P99 (lower row) against the offered load; logarithmic latency. A line bends upwards where its system saturates.",
        plots.latency_by_rate,
        "ttft_p99_s",
        plots.has_rate_sweep,
    ),
    _FigureSpec(
        "attainment_by_rate",
        "Load",
        "SLO attainment against load",
        "Share of requests that met all their SLOs. The load at which a line falls through 90 % or 99 % is the system's capacity under these SLOs.",
        plots.attainment_by_rate,
        "slo_attainment_fraction",
        _has_slo,
    ),
    _FigureSpec(
        "goodput_by_rate",
        "Load",
        "Throughput and goodput against load",
        "Requests completed per second, and those of them that met their SLOs. On the grey line everything offered is delivered.",
        plots.goodput_by_rate,
        "goodput_requests_per_s",
        plots.has_rate_sweep,
    ),
    _FigureSpec(
        "latency_ranges",
        "Latency",
        "Latency of each run",
        "From P50 (dot) to P99 (end of the bar), cross: mean; logarithmic.",
        plots.latency_ranges,
        "ttft_p99_s",
    ),
    _FigureSpec(
        "latency_cdfs",
        "Latency",
        "Latency distributions",
        "Share of requests (of gaps, for TBT) up to each latency; logarithmic. TTFT and E2E count every request that arrived: a line that ends below 100 % left "
        "requests unanswered.",
        plots.latency_cdfs,
        "e2e_p99_s",
    ),
    _FigureSpec(
        "slowdown_by_prompt_length",
        "Latency",
        "Slowdown by prompt length",
        "TTFT relative to the fastest prefill that any of these runs gave prompts of that length: median, and whisker up to P99; logarithmic. Short prompts far above "
        "long ones: they wait behind them (head-of-line blocking).",
        plots.slowdown_by_prompt_length,
        "ttft_p99_s",
    ),
    _FigureSpec(
        "delivery_bars",
        "Delivery",
        "What each run delivered",
        "SLO attainment; throughput (light) and the goodput in it (solid).",
        plots.delivery_bars,
        "goodput_requests_per_s",
        _has_one_load,
    ),
    _FigureSpec(
        "queue_and_kv",
        "Over time",
        "Queue and KV memory",
        "Requests that wait for their first step, and KV blocks in use (mean over replicas). A queue that only rises is overload.",
        plots.queue_and_kv,
        "kv_used_mean_fraction",
    ),
    _FigureSpec(
        "batch_composition",
        "Over time",
        "Batch composition",
        "Tokens of a step, mean over short bins of time: decode tokens below, prefill tokens above.",
        plots.batch_composition,
        "mean_step_tokens",
        most_runs=MAX_RUN_PANELS,
    ),
    _FigureSpec(
        "step_timeline",
        "Over time",
        "Steps of each replica",
        "About seventy steps around the moment at which most requests waited; the width of a bar is the step's duration.",
        plots.step_timeline,
        most_runs=MAX_TIMELINES,
    ),
    _FigureSpec(
        "service_by_tenant",
        "Tenants",
        "Service of each tenant",
        "Prompt tokens plus twice the output tokens that each tenant has got so far.",
        plots.service_by_tenant,
        "jain_index",
        _has_several_tenants,
        MAX_RUN_PANELS,
    ),
)


def write_report(runs: Sequence[RunData], path: str | Path, title: str | None = None) -> None:
    """Write the report of these runs; the file appears when it is whole."""
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    partial.write_text(render_report(runs, title), encoding="utf-8")
    os.replace(partial, target)


def render_report(runs: Sequence[RunData], title: str | None = None) -> str:
    """The report as HTML text; RunError when there is no run, or a run's tables cannot be read."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    first = compare(runs)
    ordered = [distinct(runs)[i] for i in first.by_load()]
    comparison = compare(ordered)
    environment = Environment(
        loader=PackageLoader("vajra_py.metrics"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    context = {
        "title": title or (ordered[0].name if len(ordered) == 1 else f"Comparison of {len(ordered)} runs"),
        "num_runs": len(ordered),
        "lead": _lead(ordered),
        "verdicts": _verdicts(ordered, comparison),
        "findings": _findings(comparison),
        "warnings": _warnings(ordered),
        "main": _table(comparison, OVERALL, 1 if len(ordered) <= _WIDE_RUNS else 0),
        "full": _rows_table(
            comparison, OVERALL, [metric for metric in METRICS if metric in comparison.shown(OVERALL, 2)]
        ),
        "scopes": _scope_tables(comparison),
        "num_more_scopes": max(0, len(comparison.scopes) - 1 - _MAX_SCOPES),
        "groups": _figures(ordered, comparison),
        "differences": _difference_table(ordered),
        "shared": _shared(ordered),
        "manifests": [(run.name, list(flatten(run.manifest).items())) for run in ordered],
    }
    return environment.get_template("report.html.j2").render(context)


def _lead(runs: Sequence[RunData]) -> list[str]:
    """What was compared, and on what, in sentences."""
    varied = axes(runs)
    if len(runs) == 1:
        sentences = [f"One run, {runs[0].name}."]
    elif varied:
        sentences = [f"{len(runs)} runs that differ in {_and([_described(axis) for axis in varied])}."]
    else:
        sentences = [f"{len(runs)} runs whose configurations do not differ."]
    counts = sorted({int(run.summary.value("overall.counts.arrived") or 0) for run in runs})
    span = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    rates = [rate for run in runs if (rate := run.summary.value("overall.offered_requests_per_s")) is not None]
    offered = ""
    if rates:
        low, high = f"{min(rates):.3g}", f"{max(rates):.3g}"
        offered = f", offered at {low if low == high else f'{low} to {high}'} requests per second"
    tenants = max(int(run.summary.value("fairness.num_tenants") or 0) for run in runs)
    classes = max(len(run.summary.value("by_slo_class") or {}) for run in runs)
    groups = [f"{tenants} tenants"] if tenants > 1 else []
    groups += [f"{classes} SLO classes"] if classes > 1 else []
    who = f", of {_and(groups)}" if groups else ""
    sentences.append(
        f"Each measured {span} requests{offered}{who}."
        if len(runs) > 1
        else f"It measured {span} requests{offered}{who}."
    )
    workload = _workload(runs)
    return [*sentences, workload] if workload else sentences


_WORKLOAD_FIRST = ("type", "profile", "path", "rate")
_SAYS_NOTHING = ("null", "None", "0", "0.0", "false", "False", "[]", "()", "{}")


def _workload(runs: Sequence[RunData]) -> str:
    flats = [
        flatten(run.config.get("workload") or {}) if isinstance(run.config.get("workload"), dict) else {}
        for run in runs
    ]
    shared = [
        (key, value)
        for key, value in sorted(flats[0].items(), key=lambda item: item[0] not in _WORKLOAD_FIRST)
        if str(value) not in _SAYS_NOTHING and key != "too_long" and all(flat.get(key) == value for flat in flats)
    ]
    if not shared:
        return ""
    words = [f"{key.replace('_', ' ')} {value}" for key, value in shared[:_MAX_NAMES]]
    return f"Workload: {', '.join(words)}{', …' if len(shared) > _MAX_NAMES else ''}."


def _described(axis: Axis) -> str:
    levels = axis.levels
    listed = ", ".join(levels) if len(levels) <= _MAX_NAMES else f"{levels[0]} … {levels[-1]}, {len(levels)} values"
    return f"{axis.label} ({listed})"


def _verdicts(runs: Sequence[RunData], comparison: Comparison) -> list[dict[str, Any]]:
    """One entry per stability label: which runs, and why where they are not stable."""
    found = []
    for label in ("stable", "backlogged", "overloaded", "unknown"):
        members = [i for i, own in enumerate(comparison.stability) if own == label]
        if not members:
            continue
        reasons = [(comparison.names[i], runs[i].summary.value("stability.reason") or "") for i in members]
        found.append(
            {"label": label, "count": len(members), "reasons": reasons if label != "stable" or len(runs) == 1 else []}
        )
    return found


def _findings(comparison: Comparison) -> list[str]:
    """The best of a few metrics, under the highest load that more than one run had."""
    if len(comparison.names) < 2:
        return []
    loads = [load for load in dict.fromkeys(comparison.loads) if comparison.loads.count(load) > 1]
    if not loads:
        return []
    members = [i for i, load in enumerate(comparison.loads) if load == loads[-1]]
    found = []
    for key, what in (
        ("ttft_p99_s", "Lowest P99 TTFT"),
        ("tbt_p99_s", "Lowest P99 TBT"),
        ("slo_attainment_fraction", "Highest SLO attainment"),
        ("goodput_requests_per_s", "Highest goodput"),
        ("jain_index", "Most even service of tenants"),
    ):
        sentence = _finding(comparison, key, members)
        if sentence:
            found.append(f"{what}: {sentence}")
    under = f"Under the highest load ({loads[-1]}): " if len(loads) > 1 else ""
    return [under + (sentence if not under else sentence[0].lower() + sentence[1:]) for sentence in found]


def _finding(comparison: Comparison, key: str, members: Sequence[int]) -> str | None:
    metric = next(metric for metric in METRICS if metric.key == key)
    row = comparison.values[OVERALL][key]
    best = [i for i in members if i in comparison.best(key)]
    others = [(value, i) for i in members if i not in best and (value := row[i]) is not None]
    if not best or not others:
        return None
    worst, at = max(others) if metric.lower_is_better else min(others)
    names = _and([_judged(comparison, i) for i in best[:3]]) + (f" and {len(best) - 3} more" if len(best) > 3 else "")
    return f"{names} – {_with_unit(metric, row[best[0]])}; furthest from it: {_judged(comparison, at)} – {_with_unit(metric, worst)}."


def _judged(comparison: Comparison, i: int) -> str:
    """A run's name, with its verdict where it is not stable."""
    label = comparison.stability[i]
    return comparison.names[i] if label == "stable" else f"{comparison.names[i]}, {label}"


def _warnings(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Sentences, each with the runs that it is about (none: all)."""
    found: dict[str, list[str]] = {}
    for run in runs:
        if not run.is_finished:
            found.setdefault("Did not come to its end: these are the numbers up to where it stopped.", []).append(
                run.name
            )
        for sentence in run.summary.value("warnings") or []:
            # The verdict says why a run is not stable.
            if not sentence.startswith("The run is "):
                found.setdefault(sentence, []).append(run.name)
    warnings = [
        (sentence, names if len(names) < len(runs) or len(runs) == 1 else []) for sentence, names in found.items()
    ]
    versions = {str(run.manifest.get("versions")) for run in runs}
    if len(versions) > 1:
        warnings.append(("The runs were made by different versions of the software; see the manifests.", []))
    if len(runs) > 1 and not any(axis.path == SEED_PATH for axis in axes(runs)):
        warnings.append(("Each setting was run with one seed: small differences may be chance.", []))
    return warnings


def _figures(runs: Sequence[RunData], comparison: Comparison) -> list[dict[str, Any]]:
    groups: dict[str, list[dict[str, str]]] = {}
    for spec in _FIGURES:
        if not spec.wanted(runs):
            continue
        caption = spec.caption
        if spec.most_runs is not None and len(runs) > spec.most_runs:
            caption += f" Shown of the {len(runs)} runs: at most {spec.most_runs}, those under the highest load, then of the lowest P99 TTFT."
        alt = f"{spec.title}. {caption}"
        if spec.numbers:
            alt += " " + _spelled(comparison, spec.numbers)
        svg = inline_svg(spec.draw(runs), spec.key.replace("_", "-"), alt)
        groups.setdefault(spec.group, []).append({"title": spec.title, "caption": caption, "svg": svg})
    return [{"name": name, "figures": figures} for name, figures in groups.items()]


def _spelled(comparison: Comparison, key: str) -> str:
    """A metric's values in words, for those who cannot see the figure."""
    metric = next(metric for metric in METRICS if metric.key == key)
    row = comparison.values[OVERALL][key]
    known = [(value, name) for value, name in zip(row, comparison.names, strict=True) if value is not None]
    if not known:
        return ""
    if len(known) > _MAX_NAMES:
        least, most = min(known), max(known)
        return f"{metric.label}: from {_with_unit(metric, least[0])} ({least[1]}) to {_with_unit(metric, most[0])} ({most[1]})."
    return f"{metric.label}: " + ", ".join(f"{name} {_with_unit(metric, value)}" for value, name in known) + "."


def _table(comparison: Comparison, scope: str, level: int) -> dict[str, Any]:
    """Metrics as rows for a few runs, runs as rows for many."""
    metrics = comparison.shown(scope, level)
    if len(comparison.names) > _WIDE_RUNS:
        return _rows_table(comparison, scope, metrics)
    rows = []
    for metric in metrics:
        best = comparison.best(metric.key, scope)
        values = comparison.values[scope][metric.key]
        cells = [
            {"text": metric_text(metric, value), "best": i in best, "label": None} for i, value in enumerate(values)
        ]
        rows.append({"head": titled(metric), "cells": cells, "starts": False})
    if scope == OVERALL:
        labels = [{"text": label, "best": False, "label": label} for label in comparison.stability]
        rows.insert(0, {"head": "stability", "cells": labels, "starts": False})
    return {"corner": "metric", "heads": list(comparison.names), "rows": rows}


def _scope_tables(comparison: Comparison) -> list[tuple[str, dict[str, Any]]]:
    """A table for each class and tenant; of a single run, one table with all of them."""
    scopes = comparison.scopes[1 : _MAX_SCOPES + 1]
    if len(comparison.names) > 1 or not scopes:
        return [(scope_title(scope), _table(comparison, scope, 0)) for scope in scopes]
    shown = {metric.key for scope in scopes for metric in comparison.shown(scope)}
    metrics = [metric for metric in METRICS if metric.key in shown]
    rows = [
        {
            "head": scope_title(scope),
            "cells": [
                {"text": metric_text(metric, comparison.values[scope][metric.key][0]), "best": False, "label": None}
                for metric in metrics
            ],
            "starts": i > 0 and scope.split(" ")[0] != scopes[i - 1].split(" ")[0],
        }
        for i, scope in enumerate(scopes)
    ]
    return [("All of them", {"corner": "group", "heads": [titled(metric) for metric in metrics], "rows": rows})]


def _rows_table(comparison: Comparison, scope: str, metrics: Sequence[Metric]) -> dict[str, Any]:
    starts = comparison.load_starts()
    best = {metric.key: comparison.best(metric.key, scope) for metric in metrics}
    rows = []
    for i in comparison.by_load():
        label = comparison.stability[i]
        cells = [{"text": label, "best": False, "label": label}] if scope == OVERALL else []
        cells += [
            {
                "text": metric_text(metric, comparison.values[scope][metric.key][i]),
                "best": i in best[metric.key],
                "label": None,
            }
            for metric in metrics
        ]
        rows.append({"head": comparison.names[i], "cells": cells, "starts": i in starts and len(starts) > 1})
    heads = (["stability"] if scope == OVERALL else []) + [titled(metric) for metric in metrics]
    return {"corner": "run", "heads": heads, "rows": rows}


def _difference_table(runs: Sequence[RunData]) -> dict[str, Any] | None:
    found = list(differences(runs).items())
    if not found:
        return None
    shown = found[:_MAX_DIFFERENCES]
    rows = [{"head": run.name, "cells": [values[i] for _, values in shown]} for i, run in enumerate(runs)]
    return {"heads": [path for path, _ in shown], "rows": rows, "num_more": len(found) - len(shown)}


def _shared(runs: Sequence[RunData]) -> list[tuple[str, str]]:
    """Configuration that all runs have in common."""
    flats = [flatten(run.config) for run in runs]
    return [(path, value) for path, value in flats[0].items() if all(flat.get(path) == value for flat in flats)]


def _with_unit(metric: Metric, value: float | None) -> str:
    text = metric_text(metric, value)
    return f"{text} {metric.unit}" if metric.unit else text


def _and(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
