"""The tables of a report as plain structures for its template, folded to the width of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from vajra_py.metrics.comparison import OVERALL, Comparison, scope_title
from vajra_py.metrics.comparison_metrics import BY_KEY, METRICS, Metric, error_text, metric_text, titled
from vajra_py.metrics.comparison_tables import BEST, TIE, WIDE, mark, plus_minus
from vajra_py.metrics.copied_settings import replication_counts
from vajra_py.metrics.differences import differences
from vajra_py.metrics.run_data import RunData

MAX_SCOPES = 24
_MAX_DIFFERENCES = 40
_PAGE_CHARACTERS = 132
"""Characters of a table's type that fit next to each other on the page."""
_PADDING = 2
_VERSUS_KEYS = (
    "ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "tbt_p99_s", "e2e_p99_s", "slo_attainment_fraction", "goodput_requests_per_s", "throughput_requests_per_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """One value."""

    text: str
    spread: str = ""
    """Its interval, in small type."""
    mark: str = ""
    label: str | None = None
    """A stability label, which has a colour."""

    @property
    def width(self) -> int:
        """Characters, small ones counted as less."""
        return len(self.text) + len(self.mark) + (3 * len(self.spread) + 3) // 4


@dataclass(frozen=True, slots=True)
class TableRow:
    """A heading and its cells."""

    head: str
    cells: tuple[Cell, ...]
    starts: bool = False
    """Whether a line is drawn above it."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table, or one of those that a wide one was folded into."""

    corner: str
    heads: tuple[str, ...]
    rows: tuple[TableRow, ...]


Folded: TypeAlias = list[Table]
"""Tables with the same rows that stand below each other."""


def fold(table: Table) -> Folded:
    """The table cut into such that fit the page, the row headings in each."""
    first = max((len(row.head) for row in table.rows), default=0)
    parts: list[list[int]] = [[]]
    used = first
    for i, head in enumerate(table.heads):
        words = max((len(word) for word in head.split()), default=0)
        width = max([words, *(row.cells[i].width for row in table.rows)]) + _PADDING
        if parts[-1] and used + width > _PAGE_CHARACTERS:
            parts.append([])
            used = first
        parts[-1].append(i)
        used += width
    return [
        Table(
            table.corner,
            tuple(table.heads[i] for i in part),
            tuple(TableRow(row.head, tuple(row.cells[i] for i in part), row.starts) for row in table.rows),
        )
        for part in parts
    ]


def main_table(comparison: Comparison, scope: str, level: int) -> Folded:
    """Metrics as rows for a few settings, settings as rows for many."""
    metrics = comparison.shown(scope, level)
    if len(comparison.names) > WIDE:
        return rows_table(comparison, scope, metrics)
    rows = [TableRow(titled(metric), _cells(comparison, metric, scope)) for metric in metrics]
    if scope == OVERALL:
        rows.insert(0, TableRow("stability", tuple(Cell(label, label=label) for label in comparison.stability)))
        if comparison.is_replicated or any(comparison.copied):
            rows.insert(1, TableRow("replications", tuple(map(Cell, replication_counts(comparison)))))
    return fold(Table("metric", comparison.names, tuple(rows)))


def rows_table(comparison: Comparison, scope: str, metrics: Sequence[Metric]) -> Folded:
    """A row for each setting."""
    starts = comparison.load_starts()
    columns = [_cells(comparison, metric, scope) for metric in metrics]
    heads = [titled(metric) for metric in metrics]
    if scope == OVERALL:
        heads.insert(0, "stability")
        columns.insert(0, tuple(Cell(label, label=label) for label in comparison.stability))
    rows = [
        TableRow(comparison.names[i], tuple(column[i] for column in columns), i in starts and len(starts) > 1)
        for i in comparison.by_load()
    ]
    return fold(Table("setting" if comparison.is_replicated else "run", tuple(heads), tuple(rows)))


def scope_tables(comparison: Comparison) -> list[tuple[str, Folded]]:
    """A table for each class and tenant; of a single setting, one table with all of them."""
    scopes = comparison.scopes[1 : MAX_SCOPES + 1]
    if len(comparison.names) > 1 or not scopes:
        return [(scope_title(scope), main_table(comparison, scope, 0)) for scope in scopes]
    shown = {metric.key for scope in scopes for metric in comparison.shown(scope)}
    metrics = [metric for metric in METRICS if metric.key in shown]
    rows = [
        TableRow(
            scope_title(scope),
            tuple(_cells(comparison, metric, scope)[0] for metric in metrics),
            i > 0 and scope.split(" ")[0] != scopes[i - 1].split(" ")[0],
        )
        for i, scope in enumerate(scopes)
    ]
    return [("All of them", fold(Table("group", tuple(titled(metric) for metric in metrics), tuple(rows))))]


def versus_table(comparison: Comparison) -> Folded:
    """Each setting against the first one of its load; empty without replications."""
    pairs = []
    for start in comparison.by_load():
        if start in comparison.load_starts():
            pairs += [(start, i) for i in comparison.of_load(start) if i != start]
    shown = [key for key in _VERSUS_KEYS if BY_KEY[key] in comparison.shown(OVERALL, 2)]
    found = {(one.position, one.key): one for one in comparison.versus(pairs, shown)}
    keys = [key for key in shown if any(key == own for _, own in found)]
    if not keys:
        return []
    rows = []
    for n, (baseline, i) in enumerate(pairs):
        cells = []
        for key in keys:
            one = found.get((i, key))
            if one is None:
                cells.append(Cell("–"))
                continue
            metric, gap = BY_KEY[key], one.difference
            half = error_text(metric, gap.interval.half_width)
            better = "" if one.better_fraction is None else f", better in {one.better_fraction:.0%}"
            cells.append(Cell(_signed(metric, gap.mean), f" ±{half}{better}", BEST if one.is_significant else ""))
        head = f"{comparison.names[i]} − {comparison.names[baseline]}"
        rows.append(TableRow(head, tuple(cells), n > 0 and baseline != pairs[n - 1][0]))
    return fold(Table("difference", tuple(titled(BY_KEY[key]) for key in keys), tuple(rows)))


def difference_table(runs: Sequence[RunData]) -> tuple[Folded, int]:
    """What the configurations differ in, a row per run; and how many more differences are not shown."""
    found = list(differences(runs).items())
    shown = found[:_MAX_DIFFERENCES]
    rows = tuple(TableRow(run.name, tuple(Cell(values[i]) for _, values in shown)) for i, run in enumerate(runs))
    return (fold(Table("run", tuple(path for path, _ in shown), rows)) if shown else []), len(found) - len(shown)


def _cells(comparison: Comparison, metric: Metric, scope: str) -> tuple[Cell, ...]:
    marks = mark(comparison, metric.key, scope)
    return tuple(
        Cell(
            metric_text(metric, value),
            plus_minus(comparison, metric, i, scope),
            {BEST: "★", TIE: TIE}.get(marks.get(i, ""), ""),
        )
        for i, value in enumerate(comparison.values[scope][metric.key])
    )


def _signed(metric: Metric, value: float) -> str:
    text = error_text(metric, value)
    return text if not any(digit in "123456789" for digit in text) else f"{'−' if value < 0 else '+'}{text}"
