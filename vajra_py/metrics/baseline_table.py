"""Tables of differences from a baseline: for a terminal, as Markdown, LaTeX, and CSV."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from vajra_py.metrics.comparison import OVERALL, Comparison, Versus, scope_title
from vajra_py.metrics.comparison_metrics import Metric, error_text, metric_text, titled
from vajra_py.metrics.comparison_tables import latex_text
from vajra_py.metrics.copied_settings import COPIED, copied_lines, not_tested

if TYPE_CHECKING:
    from rich.console import RenderableType

_HEADER = ("setting", "metric", "baseline", "value", "difference", "change", "better in", "significant")


def difference_rows(comparison: Comparison, baseline: str, scope: str = OVERALL) -> list[tuple[str, ...]]:
    """A header, and a row for each other setting of the baseline's load and each metric that has a better end.

    Differences of replicated settings have their interval, the share of replications in which the setting is better, and whether that is significant for the number of
    comparisons (Holm); those of one seed are not tested. Raises `RunError` for a baseline that is not there.
    """
    position = comparison.position(baseline)
    metrics = [one for one in comparison.shown(scope) if one.lower_is_better is not None]
    tested = comparison.against(position, [one.key for one in metrics], scope)
    found = {(one.position, one.key): one for one in tested}
    rows: list[tuple[str, ...]] = [_HEADER]
    for i in comparison.of_load(position):
        if i == position:
            continue
        for metric in metrics:
            base, value = (comparison.values[scope][metric.key][at] for at in (position, i))
            if base is not None and value is not None:
                untested = not_tested(comparison, position, i)
                rows.append(_row(comparison.names[i], metric, (base, value), found.get((i, metric.key)), untested))
    return rows


def _row(
    name: str, metric: Metric, values: tuple[float, float], versus: Versus | None, untested: str
) -> tuple[str, ...]:
    base, value = values
    gap = value - base if versus is None else versus.difference.mean
    text = f"{'-' if gap < 0 else '+'}{error_text(metric, gap)}"
    better, significant = "", untested
    if versus is not None:
        text += f" ±{error_text(metric, versus.difference.interval.half_width)}"
        better = "" if versus.better_fraction is None else f"{versus.better_fraction:.0%}"
        significant = "no"
        if versus.is_significant:
            significant = "better" if (gap < 0) == metric.lower_is_better else "worse"
    change = f"{gap / base:+.1%}" if base else ""
    return (
        name,
        titled(metric),
        metric_text(metric, base),
        metric_text(metric, value),
        text,
        change,
        better,
        significant,
    )


def terminal(comparison: Comparison, baseline: str, scope: str = OVERALL) -> RenderableType:
    """What to print on a terminal with rich."""
    from rich.markup import escape
    from rich.table import Table

    head, *rows = difference_rows(comparison, baseline, scope)
    table = Table(title=escape(f"{scope_title(scope)}: difference from {baseline}"), caption=_caption(comparison))
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i < 2 or i == len(head) - 1 else "right", overflow="fold")
    previous = None
    for row in rows:
        if previous not in (None, row[0]):
            table.add_section()
        previous = row[0]
        table.add_row(*map(escape, row))
    return table


def _caption(comparison: Comparison) -> str | None:
    if any(comparison.copied):
        return COPIED
    if not comparison.is_replicated:
        return "one seed each: nothing is tested; `replications: 5` tests it"
    return "mean difference ± 95 % interval, in pairs of one seed; significance corrected for the number of rows (Holm)"


def markdown(comparison: Comparison, baseline: str, scope: str = OVERALL) -> str:
    """The rows as a Markdown table."""
    head, *rows = (
        tuple(cell.replace("|", "\\|") for cell in row) for row in difference_rows(comparison, baseline, scope)
    )
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    foot = [text for line in copied_lines(comparison) for text in ("", line)]
    return "\n".join([lines[0], "|---|---|" + "---:|" * (len(head) - 3) + "---|", *lines[1:], *foot]) + "\n"


def latex(comparison: Comparison, baseline: str, scope: str = OVERALL) -> str:
    """The rows as a LaTeX table (package booktabs)."""
    head, *rows = (
        " & ".join(latex_text(cell).replace("±", r"$\pm$").replace("–", "--") for cell in row) + r" \\"
        for row in difference_rows(comparison, baseline, scope)
    )
    begin = r"\begin{tabular}{ll" + "r" * (len(_HEADER) - 3) + "l}"
    foot = [rf"\par{{\footnotesize {latex_text(line)}\par}}" for line in copied_lines(comparison)]
    return "\n".join([begin, r"\toprule", head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}", *foot]) + "\n"


def csv_text(comparison: Comparison, baseline: str, scope: str | None = None) -> str:
    """The rows of one scope, or of all, as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("scope", *_HEADER))
    for one in comparison.scopes if scope is None else (scope,):
        writer.writerows((one, *row) for row in difference_rows(comparison, baseline, one)[1:])
    return text.getvalue()
