"""Self-contained HTML report with verdict, tables, figures and configurations.

The page contains all styles, figures (inline SVG) and data, and has no scripts. It follows the browser's light or dark
setting, and the same runs give the same bytes. Its order is: compared settings and workloads, stability, warnings,
tables, figures, details.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vajra_py.errors import RunError
from vajra_py.metrics.comparison.compared_settings import OVERALL
from vajra_py.metrics.comparison.comparison import Comparison, compare
from vajra_py.metrics.comparison.metrics import BY_KEY, Metric, metric_text
from vajra_py.metrics.comparison.significance import OVERLOADED
from vajra_py.metrics.comparison.tables import WIDE
from vajra_py.metrics.comparison.trust import warnings_of
from vajra_py.metrics.report.figures import FIGURES
from vajra_py.metrics.report.figures_svg import inline_svg
from vajra_py.metrics.report.tables import (
    MAX_SCOPES,
    difference_table,
    full_table,
    main_table,
    pool_tables,
    reason_tables,
    scope_tables,
    versus_table,
)
from vajra_py.metrics.runs.differences import IDENTITIES, Axis, flatten
from vajra_py.metrics.runs.replications import Setting, group_replications, system_axes, workload_differences
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.metrics.runs.workload_words import workload_words

_MAX_NAMES = 8
_MAX_NAMED = 3
"""Maximum number of settings named in a sentence; the rest are counted."""


def write_report(
    runs: Sequence[RunData], path: str | Path, title: str | None = None, metrics: Sequence[str] = ()
) -> None:
    """Write the report of these runs atomically: the file appears only when it is complete. Parent folders are created.
    Raises `RunError` if `path` is a folder.
    """
    target = Path(path)
    if target.is_dir():
        raise RunError(f"report {target}: is a folder. Name a file, such as {target / 'report.html'}.")
    target.parent.mkdir(parents=True, exist_ok=True)
    is_device = target.exists() and not target.is_file()  # such as /dev/stdout, which must not be replaced by a file
    written = target if is_device else target.with_name(target.name + ".partial")
    written.write_text(render_report(runs, title, metrics), encoding="utf-8")
    if not is_device:
        os.replace(written, target)


def render_report(runs: Sequence[RunData], title: str | None = None, metrics: Sequence[str] = ()) -> str:
    """Return the report as HTML text. `metrics` are the primary metrics. Raises `RunError` if there are no runs, or a
    run's tables cannot be read.
    """
    from vajra_py.metrics.comparison.table_renderers import html_templates

    first = compare(runs)
    groups = group_replications(runs)
    settings = [groups[i] for i in first.by_load()]
    ordered = [run for setting in settings for run in setting.every]
    comparison = compare(ordered, metrics=metrics)
    differing, num_more = difference_table([setting.first for setting in settings])
    context = {
        "title": title or (ordered[0].name if len(ordered) == 1 else f"Comparison of {_counted(settings)}"),
        "num_settings": len(settings),
        "is_replicated": comparison.is_replicated,
        "lead": _lead(settings),
        "verdicts": _verdicts(settings, comparison),
        "findings": findings(comparison),
        "warnings": warnings_of(settings, comparison),
        "main": main_table(comparison, OVERALL, 1 if len(settings) <= WIDE else 0),
        "full": full_table(comparison),
        "family": comparison.family_words(),
        "versus": versus_table(comparison),
        "scopes": scope_tables(comparison),
        "num_more_scopes": max(0, len(comparison.groups) - MAX_SCOPES),
        "pools": pool_tables(comparison),
        "reasons": reason_tables(comparison),
        "groups": _figures(ordered, comparison),
        "has_movement": any(name.startswith("held_") for name in _known(comparison)),
        "has_slo": any(name.endswith("slo_attainment_fraction") for name in _known(comparison)),
        "differences": differing,
        "num_more_differences": num_more,
        "shared": _shared(ordered),
        "manifests": [(run.name, list(flatten(run.manifest).items())) for run in ordered],
    }
    return html_templates().get_template("report.html.j2").render(context)


def _known(comparison: Comparison) -> list[str]:
    return [metric.key for metric in comparison.shown(OVERALL, 2)]


def _counted(settings: Sequence[Setting]) -> str:
    """Return a text with the number of runs, or with the numbers of settings and seeds."""
    counts = sorted({len(setting.runs) for setting in settings})
    if counts == [1]:
        return f"{len(settings)} runs"
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{len(settings)} {'setting' if len(settings) == 1 else 'settings'} of {seeds} seeds each"


def _lead(settings: Sequence[Setting]) -> list[str]:
    """Return sentences on the compared settings and workloads."""
    runs = [run for setting in settings for run in setting.runs]
    varied = system_axes(runs)
    if len(runs) == 1:
        sentences = [f"One run, {runs[0].name}."]
    elif varied:
        sentences = [f"{_counted(settings)} that differ in {_and([_described(axis) for axis in varied])}."]
    elif len(settings) == 1:
        sentences = [f"{_counted(settings)}."]
    else:
        sentences = [f"{_counted(settings)} whose configurations do not differ."]
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
    sentences.append(f"{'Each run' if len(runs) > 1 else 'It'} measured {span} requests{offered}{who}.")
    described = {str(run.config.get("description") or "") for run in runs}
    about = [one for one in described if one] if len(described) == 1 else []
    firsts = [setting.first for setting in settings]
    apart = workload_differences(firsts)
    if not apart:
        return [*about, *sentences, *workload_words(firsts)]
    kinds: dict[str, list[RunData]] = {}
    for run in firsts:
        kinds.setdefault(json.dumps([flatten(run.config).get(f"workload.{key}") for key in IDENTITIES]), []).append(run)
    return [*about, *sentences, f"{apart}.", *(text for own in kinds.values() for text in workload_words(own))]


def _described(axis: Axis) -> str:
    levels = axis.levels
    listed = ", ".join(levels) if len(levels) <= _MAX_NAMES else f"{levels[0]} … {levels[-1]}, {len(levels)} values"
    return f"{axis.label} ({listed})"


def _verdicts(settings: Sequence[Setting], comparison: Comparison) -> list[dict[str, Any]]:
    """Return one entry per stability label: the number of its settings, and each setting with the reason for the label.
    Reasons are omitted for stable settings if there are several settings.
    """
    found = []
    for label in ("stable", "backlogged", "overloaded", "unknown"):
        members = [i for i, own in enumerate(comparison.stability) if own == label]
        if not members:
            continue
        reasons = [(comparison.names[i], _reason(settings[i], label)) for i in members]
        found.append(
            {
                "label": label,
                "count": len(members),
                "reasons": reasons if label != "stable" or len(settings) == 1 else [],
            }
        )
    return found


def _reason(setting: Setting, label: str) -> str:
    """Return a text with the reason of a setting's label, taken from the setting's first run with this label. If the
    setting has several runs, the text also states how many of them have the label.
    """
    runs = [run for run in setting.runs if (run.summary.value("stability.label") or "unknown") == label]
    reason = str(runs[0].summary.value("stability.reason") or "") if runs else ""
    return reason if len(setting.runs) == 1 else f"{len(runs)} of {len(setting.runs)} seeds, such as: {reason}"


def findings(comparison: Comparison) -> list[str]:
    """Return a sentence per primary metric on the best value under the highest load with which at least two settings
    kept up.
    """
    if len(comparison.names) < 2:
        return []
    order = dict.fromkeys(comparison.loads[i] for i in comparison.by_load() if len(comparison.of_load(i)) > 1)
    loads = {load: [i for i in comparison.by_load() if comparison.loads[i] == load] for load in order}
    steady = {load: own for load, own in loads.items() if sum(comparison.stability[i] != OVERLOADED for i in own) > 1}
    if not loads:
        return []
    if not steady:
        return ["Fewer than two settings kept up with any load: the averages of overloaded runs are not compared."]
    highest = list(steady)[-1]
    found = [text for key in comparison.primary if (text := _finding(comparison, key, steady[highest]))]
    left_out = list(loads)[list(loads).index(highest) + 1 :]
    if left_out:
        found.append(f"Fewer than two settings kept up with {'; '.join(left_out)}: nothing is compared there.")
    if len(loads) == 1:
        return found
    which = "one of the loads" if comparison.workloads else "the highest load"
    under = f"Under {which}{' that two settings kept up with' if left_out else ''} ({highest}): "
    return [under + text[0].lower() + text[1:] if not text.startswith("Fewer") else text for text in found]


def _finding(comparison: Comparison, key: str, members: Sequence[int]) -> str | None:
    """Return a sentence with the best value, the settings that do not differ significantly from it (with replications),
    and the worst value; None without a best value.
    """
    metric, row = BY_KEY[key], comparison.values[OVERALL][key]
    best = sorted(comparison.best(key) & set(members))
    known = [i for i in members if row[i] is not None and comparison.stability[i] != OVERLOADED]
    others = [i for i in known if i not in best]
    if not best or not others or metric.lower_is_better is None:
        return None
    furthest = (max if metric.lower_is_better else min)(others, key=lambda i: row[i] or 0.0)
    word = "Lowest" if metric.lower_is_better else "Highest"
    text = f"{word} {metric.label}: {_named(comparison, best)} – {_with_unit(metric, row[best[0]])}"
    if comparison.is_replicated:
        open_ones = [i for i in others if not comparison.versus(i, best[0], key).is_significant]
        than = f"significantly {word.lower().removesuffix('est')}er than"
        if not open_ones:
            text += f", {than} every other setting"
        elif len(open_ones) == len(others):
            text += f", but {than} no other setting"
        else:
            text += f", not {than} {_named(comparison, open_ones)}"
    return f"{text}; furthest from it: {_judged(comparison, furthest)} – {_with_unit(metric, row[furthest])}."


def _named(comparison: Comparison, members: Sequence[int]) -> str:
    more = [f"{len(members) - _MAX_NAMED} more"] if len(members) > _MAX_NAMED else []
    return _and([*(_judged(comparison, i) for i in members[:_MAX_NAMED]), *more])


def _judged(comparison: Comparison, i: int) -> str:
    """Return a setting's name, followed by its stability label if the setting is not stable."""
    label = comparison.stability[i]
    return comparison.names[i] if label == "stable" else f"{comparison.names[i]}, {label}"


def _figures(runs: Sequence[RunData], comparison: Comparison) -> list[dict[str, Any]]:
    groups: dict[str, list[dict[str, str]]] = {}
    for spec in FIGURES:
        shown = spec.runs_of(runs)
        if not spec.wanted(runs):
            continue
        caption = spec.words(runs)
        alt = f"{spec.title}. {caption}"
        if spec.numbers:
            alt += " " + _spelled(comparison, spec.numbers)
        svg = inline_svg(spec.draw(shown), spec.key.replace("_", "-"), alt)
        groups.setdefault(spec.group, []).append({"title": spec.title, "caption": caption, "svg": svg})
    return [{"name": name, "figures": figures} for name, figures in groups.items()]


def _spelled(comparison: Comparison, key: str) -> str:
    """Return a metric's values as text, for the figure's text alternative."""
    metric = BY_KEY[key]
    row = comparison.values[OVERALL][key]
    known = [(value, name) for value, name in zip(row, comparison.names, strict=True) if value is not None]
    if not known:
        return ""
    if len(known) > _MAX_NAMES:
        least, most = min(known), max(known)
        return f"{metric.label}: from {_with_unit(metric, least[0])} ({least[1]}) to {_with_unit(metric, most[0])} ({most[1]})."
    return f"{metric.label}: " + ", ".join(f"{name} {_with_unit(metric, value)}" for value, name in known) + "."


def _shared(runs: Sequence[RunData]) -> list[tuple[str, str]]:
    """Return the configuration that all runs have in common, as (path, value)."""
    flats = [flatten(run.config) for run in runs]
    return [(path, value) for path, value in flats[0].items() if all(flat.get(path) == value for flat in flats)]


def _with_unit(metric: Metric, value: float | None) -> str:
    text = metric_text(metric, value)
    return f"{text} {metric.unit}" if metric.unit else text


def _and(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
