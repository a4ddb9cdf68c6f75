"""Writes comparisons as tables: for a terminal, as Markdown, LaTeX, and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vajra_py.metrics.comparison import OVERALL, Comparison, scope_title
from vajra_py.metrics.comparison_metrics import BY_KEY, Metric, error_text, metric_text, titled
from vajra_py.metrics.copied_settings import COPIED, copied_lines, has_copies_at_load, replication_counts

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
    from rich.table import Table as RichTable

WIDE = 6
"""Up to this many settings are columns; more are rows, of fewer metrics."""
_EXACT = 1e-9
"""Relative half-width of an interval that is due to rounding."""
TIE = "≈"
BEST = "*"


def mark(comparison: Comparison, key: str, scope: str = OVERALL) -> dict[int, str]:
    """By position: an asterisk for the best value of its load, or `≈` for those that replications cannot tell from the best."""
    ties = comparison.ties(key, scope)
    found = {i: BEST for i in comparison.best(key, scope) if i not in ties} | dict.fromkeys(sorted(ties), TIE)
    return {i: sign for i, sign in found.items() if not has_copies_at_load(comparison, i)}


def caption(comparison: Comparison) -> str | None:
    """What the marks and intervals of a table mean; None for a single setting of one run."""
    parts = []
    if comparison.is_replicated:
        parts.append("mean of the replications ± 95 % interval")
        if len(comparison.names) > 1:
            parts.append("* significantly best (pairs of one seed, Holm), ≈ not told apart from the best")
    elif len(comparison.names) > 1 and not all(comparison.copied):
        parts.append("* best of its metric; one seed each, not tested")
    if any(comparison.copied):
        parts.append(COPIED)
    return "; ".join(parts) or None


def origins(comparison: Comparison) -> Iterator[str]:
    """A line for each origin of the settings' step times, with the settings that it is of where they differ."""
    found: dict[str, list[str]] = {}
    for name, sentence in zip(comparison.names, comparison.step_times, strict=False):
        if sentence:
            found.setdefault(sentence, []).append(name)
    for sentence, names in found.items():
        whose = "" if len(names) == len(comparison.names) else f" of {', '.join(names)}"
        yield f"Step times{whose}: {sentence}."
    yield from copied_lines(comparison)


def plus_minus(comparison: Comparison, metric: Metric, position: int, scope: str = OVERALL) -> str:
    """The interval as ` ±0.12`, as a range where it is lopsided, or nothing."""
    value, interval = comparison.values[scope][metric.key][position], comparison.interval(metric.key, position, scope)
    if interval is None or value is None or interval.half_width <= _EXACT * abs(value):
        return ""
    half = error_text(metric, interval.half_width)
    middle = (interval.low + interval.high) / 2
    if abs(middle - value) <= 0.1 * interval.half_width:
        return f" ±{half}"
    return f" [{metric_text(metric, interval.low)}, {metric_text(metric, interval.high)}]"


def records(comparison: Comparison, scope: str | None = None) -> Iterator[dict[str, Any]]:
    """A row for each scope (or this one) and setting."""
    for own in comparison.scopes if scope is None else (scope,):
        for i, name in enumerate(comparison.names):
            row: dict[str, Any] = {"scope": own, "run": name, "stability": comparison.stability[i]}
            row["replications"] = comparison.replications[i] if comparison.replications else 1
            if any(comparison.copied):
                row["equal_seeds"] = comparison.copied[i]
                row["not_tested_because"] = COPIED if comparison.is_copied(i) else ""
            row["step_times"] = comparison.step_times[i] if comparison.step_times else ""
            for key in BY_KEY:
                row[key] = comparison.values[own][key][i]
                interval = comparison.interval(key, i, own)
                if interval is not None:
                    row |= {f"{key}_low": interval.low, f"{key}_high": interval.high}
            yield row


def csv_text(comparison: Comparison, scope: str | None = None) -> str:
    """The records as CSV."""
    rows = list(records(comparison, scope))
    present = {name for row in rows for name in row}
    columns = ["scope", "run", "stability", "replications", "step_times"]
    columns += [name for name in ("equal_seeds", "not_tested_because") if name in present]
    columns += [name for key in BY_KEY for name in (key, f"{key}_low", f"{key}_high") if name in present]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _cells(comparison: Comparison, metric: Metric, scope: str) -> list[tuple[str, str, str]]:
    """Value, interval and mark for each setting."""
    marks = mark(comparison, metric.key, scope)
    return [
        (metric_text(metric, value), plus_minus(comparison, metric, i, scope), marks.get(i, ""))
        for i, value in enumerate(comparison.values[scope][metric.key])
    ]


def markdown(comparison: Comparison, scope: str = OVERALL) -> str:
    """See `Comparison.to_markdown`."""
    lines = [
        "| " + " | ".join(["metric", *(name.replace("|", "\\|") for name in comparison.names)]) + " |",
        "|---|" + "---:|" * len(comparison.names),
        "| " + " | ".join(["stability", *comparison.stability]) + " |",
    ]
    for metric in comparison.shown(scope):
        cells = [
            f"**{value}**{spread}" if sign == BEST else f"{value}{spread}{sign and ' ' + sign}"
            for value, spread, sign in _cells(comparison, metric, scope)
        ]
        lines.append("| " + " | ".join([titled(metric), *cells]) + " |")
    lines += [text for line in origins(comparison) for text in ("", line)]
    return "\n".join(lines) + "\n"


def latex(comparison: Comparison, scope: str = OVERALL) -> str:
    """See `Comparison.to_latex`."""
    is_wide = len(comparison.names) > WIDE
    table = [["metric", *map(latex_text, comparison.names)], ["stability", *map(latex_text, comparison.stability)]]
    for metric in comparison.shown(scope, 0 if is_wide else 1):
        cells = []
        for value, spread, sign in _cells(comparison, metric, scope):
            number = rf"\textbf{{{value}}}" if sign == BEST else value
            error = spread.strip().replace("±", r"$\pm$")
            cells.append(
                " ".join(filter(None, (number, error, r"$\approx$" if sign == TIE else ""))).replace("–", "--")
            )
        table.append([latex_text(titled(metric)), *cells])
    if is_wide:  # settings become rows
        order = [0, *(1 + i for i in comparison.by_load())]
        table = [[row[i] for row in table] for i in order]
    lines = [" & ".join(row) + r" \\" for row in table]
    head = [
        f"% {caption(comparison) or 'one run'}",
        r"\begin{tabular}{l" + "r" * (len(table[0]) - 1) + "}",
        r"\toprule",
    ]
    foot = [rf"\par{{\footnotesize {latex_text(line)}\par}}" for line in origins(comparison)]
    return "\n".join([*head, lines[0], r"\midrule", *lines[1:], r"\bottomrule", r"\end{tabular}", *foot]) + "\n"


_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    sign: f"\\{sign}" for sign in "&%$#_{}"
}


def latex_text(text: str) -> str:
    """The text with LaTeX's special characters escaped."""
    return re.sub(r"[\\~^&%$#_{}]", lambda found: _LATEX[found.group()], text)


def terminal(comparison: Comparison, scope: str = OVERALL) -> RenderableType:
    """See `Comparison.render`."""
    return _by_metric(comparison, scope) if len(comparison.names) <= WIDE else _ByRun(comparison, scope)


def _by_metric(comparison: Comparison, scope: str) -> RichTable:
    from rich.markup import escape
    from rich.table import Table as RichTable

    table = RichTable(title=escape(scope_title(scope)), caption=caption(comparison))
    table.add_column("metric")
    for name in comparison.names:
        table.add_column(escape(name), justify="right", overflow="fold")
    table.add_row("stability", *comparison.stability)
    if comparison.is_replicated or any(comparison.copied):
        table.add_row("replications", *replication_counts(comparison))
    for metric in comparison.shown(scope):
        table.add_row(titled(metric), *_marked(comparison, metric, scope))
    return table


@dataclass(frozen=True, slots=True)
class _ByRun:
    """Lays the tables out when the terminal's width is known."""

    comparison: Comparison
    scope: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RichTable]:
        yield from run_tables(self.comparison, self.scope, options.max_width)


def run_tables(comparison: Comparison, scope: str, width: int) -> list[RichTable]:
    """Tables with a row per setting, each at most `width` characters wide if its first metric fits at all."""
    columns = [("stability", list(comparison.stability))]
    columns += [(titled(metric), _marked(comparison, metric, scope)) for metric in comparison.shown(scope, level=0)]
    room = width - max(map(len, (*comparison.names, "run"))) - 4
    pages: list[list[tuple[str, list[str]]]] = []
    left = -1
    for title, cells in columns:
        needed = _needed_width(title, cells) + 3
        if left < needed:
            pages.append([])
            left = room
        pages[-1].append((title, cells))
        left -= needed
    return [
        _page(comparison, scope if not i else None, page, is_last=i == len(pages) - 1) for i, page in enumerate(pages)
    ]


def _page(
    comparison: Comparison, scope: str | None, columns: Sequence[tuple[str, list[str]]], *, is_last: bool
) -> RichTable:
    from rich.markup import escape
    from rich.table import Table as RichTable

    title = None if scope is None else escape(scope_title(scope))
    table = RichTable(title=title, caption=caption(comparison) if is_last else None)
    table.add_column("run", no_wrap=True)
    for name, cells in columns:
        justify: JustifyMethod = "left" if name == "stability" else "right"
        table.add_column(name, justify=justify, width=_needed_width(name, cells))
    starts = comparison.load_starts()
    for i in comparison.by_load():
        if i in starts:
            table.add_section()
        table.add_row(escape(comparison.names[i]), *(cells[i] for _, cells in columns))
    return table


def _marked(comparison: Comparison, metric: Metric, scope: str) -> list[str]:
    from rich.markup import escape

    cells = []
    for value, spread, sign in _cells(comparison, metric, scope):
        text = f"{value}{escape(spread) if comparison.is_replicated else ''}{sign}"
        cells.append(f"[bold]{text}[/bold]" if sign == BEST else text)
    return cells


def _needed_width(title: str, cells: Sequence[str]) -> int:
    """Characters of the longest word of the title, or of the longest cell without its mark-up."""
    shown = (cell.removeprefix("[bold]").removesuffix("[/bold]").replace("\\[", "[") for cell in cells)
    return max(map(len, (*title.split(), *shown)))
