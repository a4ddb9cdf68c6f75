"""Tables of a comparison as data: values by setting, differences between settings, and records for files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vajra_py.metrics.comparison.compared_settings import ComparedSettings, scope_title
from vajra_py.metrics.comparison.metrics import BY_KEY, Metric, error_text, metric_text, titled
from vajra_py.metrics.comparison.significance import OVERLOADED
from vajra_py.metrics.comparison.table_model import BEST, HIGHEST, LOWEST, WORSE, Cell, Row, Table
from vajra_py.metrics.comparison.table_renderers import csv_text

WIDE = 6
"""Maximum number of settings shown as columns; more settings are shown as rows, with fewer metrics."""


def value_table(
    comparison: ComparedSettings, scope: str, metrics: Sequence[Metric] | None = None, *, by_setting: bool | None = None
) -> Table:
    """Return the values of one scope; few settings are columns, many are rows.

    Args:
        comparison: Settings and their values.
        scope: One of the comparison's scopes.
        metrics: Metrics to show; by default those that fit the layout.
        by_setting: Show settings as rows; by default if there are more than `WIDE`.
    """
    is_by_setting = len(comparison.names) > WIDE if by_setting is None else by_setting
    shown = list(metrics) if metrics is not None else comparison.shown(scope, 0 if is_by_setting else 1)
    title = scope_title(scope)
    notes = tuple(value_notes(comparison, scope, shown))
    stability = tuple(Cell(label, label=label) for label in comparison.stability)
    if not is_by_setting:
        rows = [Row("stability", stability)]
        if comparison.is_replicated or any(comparison.copied):
            rows.append(Row("replications", tuple(map(Cell, replication_counts(comparison)))))
        rows += [Row(titled(metric), cells(comparison, metric, scope)) for metric in shown]
        return Table("metric", comparison.names, tuple(rows), title, notes)
    columns = [stability, *(cells(comparison, metric, scope) for metric in shown)]
    starts = comparison.load_starts()
    order = comparison.by_load()
    found = tuple(
        Row(comparison.names[i], tuple(column[i] for column in columns), i in starts and i != order[0]) for i in order
    )
    heads = ("stability", *map(titled, shown))
    return Table("setting", heads, found, title, notes, frozenset({0}))


def replication_counts(comparison: ComparedSettings) -> list[str]:
    """Return each setting's number of runs as text; `1 for 5 equal seeds` if all seeds give the same run."""
    return [
        f"{count} for {comparison.copied[i]} equal seeds" if comparison.is_copied(i) else str(count)
        for i, count in enumerate(comparison.replications)
    ]


def cells(comparison: ComparedSettings, metric: Metric, scope: str) -> tuple[Cell, ...]:
    """Return a cell with value, interval and mark for each setting."""
    marks = comparison.marks(metric.key, scope)
    return tuple(
        Cell(
            metric_text(metric, value),
            interval_text(comparison, metric, i, scope),
            marks.get(i, ""),
            is_quiet=comparison.stability[i] == OVERLOADED and len(comparison.names) > 1,
        )
        for i, value in enumerate(comparison.values[scope][metric.key])
    )


def interval_text(comparison: ComparedSettings, metric: Metric, position: int, scope: str) -> str:
    """Return the interval of a setting's value as `±0.12`, or as a range if it is asymmetric; an empty text if there is
    none.
    """
    value, interval = comparison.values[scope][metric.key][position], comparison.interval(metric.key, position, scope)
    if interval is None or value is None:
        return ""
    half = interval.half_width
    if abs((interval.low + interval.high) / 2 - value) <= 0.1 * half:
        return f"±{error_text(metric, half)}"
    return f"[{metric_text(metric, interval.low)}, {metric_text(metric, interval.high)}]"


def value_notes(comparison: ComparedSettings, scope: str, metrics: Sequence[Metric]) -> Iterator[str]:
    """Yield sentences without full stops on the meaning of values and marks, the tests made, and differences between
    the workloads.
    """
    marks = {mark for metric in metrics for mark in comparison.marks(metric.key, scope).values()}
    if comparison.is_replicated:
        yield "Mean of the replications with its 95 % interval"
    if marks:
        which = (
            "but not significantly against every other setting"
            if comparison.is_replicated
            else "one seed each: not tested"
        )
        words = {
            BEST: "* best of its load, significantly so against every other setting",
            LOWEST: f"↓ lowest of its load, {which}",
            HIGHEST: f"↑ highest of its load, {which}",
            WORSE: "† significantly worse than the best of its load",
        }
        yield "; ".join(text for mark, text in words.items() if mark in marks)
    yield from family_notes(comparison, scope)
    if comparison.workloads:
        yield comparison.workloads


def family_notes(comparison: ComparedSettings, scope: str) -> Iterator[str]:
    """Yield sentences without full stops on the family of comparisons, and on settings excluded from it."""
    yield from filter(None, (comparison.family_words(scope),))
    unstable = [name for name, own in zip(comparison.names, comparison.stability, strict=True) if own == OVERLOADED]
    if unstable and len(comparison.names) > 1:
        who = ", ".join(unstable) if len(unstable) < len(comparison.names) else "every setting"
        yield f"Overloaded and therefore neither marked nor tested, as their averages grow with the length of the run: {who}"
    for reason, names in comparison.one_sample_notes().items():
        yield f"{reason}: {', '.join(names)}"


def pool_table(comparison: ComparedSettings) -> Table | None:
    """Return a table of pools with a row per pool and setting; None if no setting has pools."""
    rows: list[Row] = []
    metrics = [metric for metric in BY_KEY.values() if _is_of_pools(comparison, metric)]
    for position in comparison.by_load():
        own = [scope for scope in comparison.pools if comparison.values[scope][_OF_EVERY_POOL][position] is not None]
        for number, scope in enumerate(own):
            values = [(metric, comparison.values[scope][metric.key][position]) for metric in metrics]
            cells = tuple(
                Cell(metric_text(metric, value), interval_text(comparison, metric, position, scope))
                for metric, value in values
            )
            pool = scope.partition(" ")[2]
            head = pool if len(comparison.names) == 1 else f"{comparison.names[position]}: {pool}"
            rows.append(Row(head, cells, starts=not number and bool(rows)))
    return Table("pool", tuple(map(titled, metrics)), tuple(rows), "Pools") if rows else None


_OF_EVERY_POOL = "pool_replicas"


def _is_of_pools(comparison: ComparedSettings, metric: Metric) -> bool:
    values = [value for scope in comparison.pools for value in comparison.values[scope][metric.key]]
    if metric.level > 0 or all(value is None for value in values):
        return False
    return any(values) or not metric.key.startswith("num_")


def origins(comparison: ComparedSettings) -> Iterator[str]:
    """Yield a sentence, without its full stop, for each origin of step times; if there are several origins, each
    sentence names its settings.
    """
    found: dict[str, list[str]] = {}
    for name, sentence in zip(comparison.names, comparison.step_times, strict=False):
        if sentence:
            found.setdefault(sentence, []).append(name)
    for sentence, names in found.items():
        whose = "" if len(names) == len(comparison.names) else f" of {', '.join(names)}"
        yield f"Step times{whose}: {sentence}"


def records(comparison: ComparedSettings, scope: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield a row per scope (by default all scopes) and setting, with raw values, ends of intervals, and p-values of
    the difference from the best setting of the load.
    """
    for own in comparison.scopes if scope is None else (scope,):
        for i, name in enumerate(comparison.names):
            row: dict[str, Any] = {"scope": own, "run": name, "stability": comparison.stability[i]}
            row["replications"] = comparison.replications[i] if comparison.replications else 1
            row["equal_seeds"] = comparison.copied[i] if comparison.copied else 0
            row["step_times"] = comparison.step_times[i] if comparison.step_times else ""
            row["not_tested_because"] = _why_not_tested(comparison, i)
            for key in BY_KEY:
                row[key] = comparison.values[own][key][i]
                interval = comparison.interval(key, i, own)
                if interval is not None:
                    row |= {f"{key}_low": interval.low, f"{key}_high": interval.high}
                best = comparison.best_of(key, i, own)
                if best is not None and best != i:
                    versus = comparison.versus(i, best, key, own)
                    row |= _known({f"{key}_p_value": versus.p_value, f"{key}_p_adjusted": versus.p_adjusted})
            yield row


def _why_not_tested(comparison: ComparedSettings, position: int) -> str:
    if comparison.stability[position] == OVERLOADED:
        return OVERLOADED
    return comparison.one_sample[position] if comparison.one_sample else ""


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


DIFFERENCE_COLUMNS = (
    "scope", "load", "setting", "baseline", "metric", "family",
    "value", "low", "high", "baseline_value", "baseline_low", "baseline_high",
    "difference", "difference_low", "difference_high", "relative_difference", "better_fraction",
    "p_value", "p_adjusted", "significant", "verdict",
)  # fmt: skip


def difference_records(
    comparison: ComparedSettings, scope: str | None = None, baseline: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a row of plain values (`DIFFERENCE_COLUMNS`) per metric and pair of settings under the same load; with a
    baseline, only the pairs that contain it.
    """
    for own in comparison.scopes if scope is None else (scope,):
        for first, second in comparison.pairs(baseline):
            for metric in comparison.shown(own, 2):
                row = _difference_record(comparison, own, (first, second), metric)
                if row is not None:
                    yield row


def _difference_record(
    comparison: ComparedSettings, scope: str, pair: tuple[int, int], metric: Metric
) -> dict[str, Any] | None:
    first, second = pair
    base, value = (comparison.values[scope][metric.key][i] for i in pair)
    if base is None or value is None:
        return None
    versus = comparison.versus(second, first, metric.key, scope)
    gap = versus.difference
    difference = value - base if gap is None else gap.mean
    ends = [comparison.interval(metric.key, i, scope) for i in (second, first)]
    bounds = [end for one in ends for end in ((None, None) if one is None else (one.low, one.high))]
    spread = (None, None) if gap is None or gap.interval is None else (gap.interval.low, gap.interval.high)
    values = (
        scope, comparison.loads[first], comparison.names[second], comparison.names[first], metric.key,
        "primary" if versus.is_primary else "secondary",
        value, *bounds[:2], base, *bounds[2:], difference, *spread, difference / base if base else None,
        versus.better_fraction, versus.p_value, versus.p_adjusted, versus.is_significant, versus.verdict,
    )  # fmt: skip
    return dict(zip(DIFFERENCE_COLUMNS, values, strict=True))


def value_csv(comparison: ComparedSettings, scope: str | None = None) -> str:
    """See `Comparison.to_csv`."""
    rows = list(records(comparison, scope))
    present = {name for row in rows for name in row}
    columns = ["scope", "run", "stability", "replications", "step_times"]
    columns += ["equal_seeds"] if any(row["equal_seeds"] for row in rows) else []
    columns += ["not_tested_because"] if any(row["not_tested_because"] for row in rows) else []
    suffixes = ("", "_low", "_high", "_p_value", "_p_adjusted")
    columns += [name for key in BY_KEY for suffix in suffixes if (name := f"{key}{suffix}") in present]
    return csv_text(columns, [{name: value for name, value in row.items() if name in columns} for row in rows])


def json_text(comparison: ComparedSettings, scope: str | None = None, baseline: int | None = None) -> str:
    """See `Comparison.to_json`."""
    scopes = comparison.scopes if scope is None else (scope,)
    settings = [
        {
            "name": name,
            "load": comparison.loads[i],
            "stability": comparison.stability[i],
            "replications": comparison.replications[i] if comparison.replications else 1,
            "equal_seeds": comparison.copied[i] if comparison.copied else 0,
            "step_times": comparison.step_times[i] if comparison.step_times else "",
            "not_tested_because": _why_not_tested(comparison, i),
        }
        for i, name in enumerate(comparison.names)
    ]
    values = [
        {"scope": own, "setting": name, "metric": key, "value": value}
        | ({} if (one := comparison.interval(key, i, own)) is None else {"low": one.low, "high": one.high})
        for own in scopes
        for i, name in enumerate(comparison.names)
        for key in BY_KEY
        if (value := comparison.values[own][key][i]) is not None
    ]
    found = {
        "settings": settings,
        "family": {
            "primary_metrics": list(comparison.primary),
            "correction": "Holm",
            "of": {own: comparison.family_words(own) for own in scopes},
        },
        "notes": list(family_notes(comparison, scopes[0])),
        "values": values,
        "differences": list(difference_records(comparison, scope, baseline)),
    }
    if comparison.reasons and scope is None:
        found["reasons"] = {reason: list(values) for reason, values in comparison.reasons.items()}
    return json.dumps(found, indent=1, allow_nan=False) + "\n"
