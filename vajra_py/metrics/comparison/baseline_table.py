"""The table of differences from a baseline."""

from __future__ import annotations

from collections.abc import Sequence

from vajra_py.metrics.comparison.compared_settings import ComparedSettings, scope_title
from vajra_py.metrics.comparison.metrics import Metric, error_text, metric_text, titled
from vajra_py.metrics.comparison.significance import Versus
from vajra_py.metrics.comparison.table_model import Cell, Row, Table
from vajra_py.metrics.comparison.tables import family_notes

_HEADS = ("metric", "baseline", "value", "difference", "change", "better in", "p", "adjusted p", "significant")


def difference_table(
    comparison: ComparedSettings, baseline: str, scope: str, metrics: Sequence[Metric] | None = None
) -> Table:
    """Return a table of differences from the baseline: a row for each combination of a metric and another setting under
    the baseline's load. The rows of a setting begin with the primary metrics. `metrics` are by default those for which
    lower or higher values are better.

    Differences between replicated settings have an interval, the fraction of replications in which the setting is
    better, and p-values; differences between settings that each have one seed are not tested. Raises `RunError` for an
    unknown baseline.
    """
    position = comparison.position(baseline)
    shown = [one for one in comparison.shown(scope) if one.lower_is_better is not None] if metrics is None else metrics
    ordered = sorted(shown, key=lambda metric: metric.key not in comparison.primary)
    rows: list[Row] = []
    for _, i in comparison.pairs(position):
        own = [
            (metric, base, value)
            for metric in ordered
            if (base := comparison.values[scope][metric.key][position]) is not None
            and (value := comparison.values[scope][metric.key][i]) is not None
        ]
        for number, (metric, base, value) in enumerate(own):
            row = _cells(metric, base, value, comparison.versus(i, position, metric.key, scope))
            rows.append(Row(comparison.names[i], row, starts=number == 0 and bool(rows)))
    notes = list(family_notes(comparison, scope))
    if comparison.is_replicated:
        notes.insert(
            0, "Mean difference with its 95 % interval, in pairs of one seed; secondary metrics have a p-value only"
        )
    elif not any(comparison.copied):
        notes.insert(0, "One seed each: nothing is tested; `replications: 5` tests it")
    title = f"{scope_title(scope)}: difference from {baseline}"
    return Table("setting", _HEADS, tuple(rows), title, tuple(notes), frozenset({0, len(_HEADS) - 1}), 1)


def _cells(metric: Metric, base: float, value: float, versus: Versus) -> tuple[Cell, ...]:
    gap = value - base if versus.difference is None else versus.difference.mean
    texts = (
        f"{gap / base:+.1%}" if base and gap else "",
        "" if versus.better_fraction is None else f"{versus.better_fraction:.0%}",
        p_text(versus.p_value),
        p_text(versus.p_adjusted),
        versus.verdict,
    )
    return (
        Cell(titled(metric)),
        Cell(metric_text(metric, base)),
        Cell(metric_text(metric, value)),
        Cell(signed(metric, gap), spread_of(metric, versus)),
        *map(Cell, texts),
    )


def spread_of(metric: Metric, versus: Versus) -> str:
    """Return the half width of a difference's confidence interval as `±0.12`; an empty string if there is no interval,
    or if the difference was not tested.
    """
    interval = None if versus.difference is None or versus.untested else versus.difference.interval
    return f"±{error_text(metric, interval.half_width)}" if interval is not None and interval.half_width else ""


def signed(metric: Metric, value: float) -> str:
    """Return a difference with its sign; without a sign if it is displayed as zero."""
    text = error_text(metric, value)
    return text if not any(digit in "123456789" for digit in text) else f"{'-' if value < 0 else '+'}{text}"


def p_text(value: float | None) -> str:
    """Return a p-value with two significant digits, or an empty string for None."""
    return "" if value is None else "<0.001" if value < 0.001 else f"{value:.2g}"
