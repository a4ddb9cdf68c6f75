"""Tables of a report, split to fit the width of the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from vajra_py.metrics.comparison.baseline_table import p_text, signed, spread_of
from vajra_py.metrics.comparison.compared_settings import OVERALL, scope_title
from vajra_py.metrics.comparison.comparison import Comparison
from vajra_py.metrics.comparison.metrics import BY_KEY, METRICS, titled
from vajra_py.metrics.comparison.reason_table import reason_table
from vajra_py.metrics.comparison.significance import Versus
from vajra_py.metrics.comparison.table_model import BEST, Cell, Row, Table, fold
from vajra_py.metrics.comparison.tables import cells, pool_table, value_table
from vajra_py.metrics.runs.differences import differences
from vajra_py.metrics.runs.run_data import RunData

MAX_SCOPES = 24
_MAX_DIFFERENCES = 40
_PAGE_CHARACTERS = 132
"""Number of characters of a table's font that fit on a line of the page."""
_PADDING = 2
_VERSUS_KEYS = (
    "ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "tbt_p99_s", "e2e_p99_s", "slo_attainment_fraction", "goodput_requests_per_s", "throughput_requests_per_s",
)  # fmt: skip

Folded: TypeAlias = list[Table]
"""Tables with the same rows, placed below each other."""


def _characters(cell: Cell) -> int:
    """Return the width of a cell in characters, with its interval below the value in smaller type."""
    return max(len(cell.text) + len(cell.mark), (7 * len(cell.spread) + 7) // 8)


def _folded(table: Table) -> Folded:
    return fold(table, _PAGE_CHARACTERS, _characters, _PADDING)


def main_table(comparison: Comparison, scope: str, level: int) -> Folded:
    """Return the values of a scope: with few settings, rows are metrics; with many settings, rows are settings."""
    return _folded(value_table(comparison, scope, comparison.shown(scope, level)))


def full_table(comparison: Comparison) -> Folded:
    """Return a table with a row for each setting and a column for every metric."""
    return _folded(value_table(comparison, OVERALL, comparison.shown(OVERALL, 2), by_setting=True))


def scope_tables(comparison: Comparison) -> list[tuple[str, Folded]]:
    """Return (title, tables) for each of the first `MAX_SCOPES` classes and tenants; for a single setting, one table
    with a row per class or tenant.
    """
    scopes = comparison.groups[:MAX_SCOPES]
    if len(comparison.names) > 1 or not scopes:
        return [(scope_title(scope), main_table(comparison, scope, 0)) for scope in scopes]
    shown = {metric.key for scope in scopes for metric in comparison.shown(scope)}
    metrics = [metric for metric in METRICS if metric.key in shown]
    rows = [
        Row(
            scope_title(scope),
            tuple(cells(comparison, metric, scope)[0] for metric in metrics),
            i > 0 and scope.split(" ")[0] != scopes[i - 1].split(" ")[0],
        )
        for i, scope in enumerate(scopes)
    ]
    return [("All of them", _folded(Table("group", tuple(titled(metric) for metric in metrics), tuple(rows))))]


def pool_tables(comparison: Comparison) -> Folded:
    """Return the table of pools; empty if no setting has pools."""
    table = pool_table(comparison)
    return [] if table is None else _folded(table)


def reason_tables(comparison: Comparison) -> Folded:
    """Return the table of moves, deferrals and refusals by reason; empty if there were none."""
    table = reason_table(comparison)
    return [] if table is None else _folded(table)


def versus_table(comparison: Comparison) -> Folded:
    """Return tables that compare each setting with the first one under its load, with primary metrics first; empty
    without replications.
    """
    starts = [i for i in comparison.by_load() if i in comparison.load_starts()]
    pairs = [pair for start in starts for pair in comparison.pairs(start)]
    shown = comparison.shown(OVERALL, 2)
    wanted = [
        key for key in dict.fromkeys((*comparison.primary, *_VERSUS_KEYS)) if any(one.key == key for one in shown)
    ]
    found = {(i, key): comparison.versus(i, base, key) for base, i in pairs for key in wanted}
    keys = [key for key in wanted if any(one.difference is not None for (_, own), one in found.items() if own == key)]
    if not keys:
        return []
    rows = [
        Row(
            f"{comparison.names[i]} − {comparison.names[base]}",
            tuple(_difference_cell(found[i, key]) for key in keys),
            n > 0 and base != pairs[n - 1][0],
        )
        for n, (base, i) in enumerate(pairs)
    ]
    return _folded(Table("difference", tuple(titled(BY_KEY[key]) for key in keys), tuple(rows)))


def _difference_cell(versus: Versus) -> Cell:
    if versus.difference is None:
        return Cell("–")
    metric = BY_KEY[versus.key]
    better = "" if versus.better_fraction is None else f"better in {versus.better_fraction:.0%}"
    p_value = f"adjusted p {p_text(versus.p_adjusted)}" if versus.p_adjusted is not None else ""
    if versus.p_adjusted is None and versus.p_value is not None:
        p_value = f"p {p_text(versus.p_value)}"
    parts = (spread_of(metric, versus), better, p_value, versus.verdict if versus.untested else "")
    spread = ", ".join(filter(None, parts))
    mark = BEST if versus.is_significant else ""
    return Cell(signed(metric, versus.difference.mean), spread, mark, is_quiet=bool(versus.untested))


def difference_table(runs: Sequence[RunData]) -> tuple[Folded, int]:
    """Return (table of the differing configuration values with a row per run, number of differences not shown)."""
    found = list(differences(runs).items())
    shown = found[:_MAX_DIFFERENCES]
    rows = tuple(Row(run.name, tuple(Cell(values[i]) for _, values in shown)) for i, run in enumerate(runs))
    return (_folded(Table("run", tuple(path for path, _ in shown), rows)) if shown else []), len(found) - len(shown)
