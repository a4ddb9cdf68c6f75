"""Moves, deferrals and refusals by their reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vajra_py.metrics.comparison.compared_settings import ComparedSettings
from vajra_py.metrics.comparison.metrics import significant
from vajra_py.metrics.comparison.table_model import Cell, Row, Table
from vajra_py.metrics.comparison.tables import pool_table
from vajra_py.metrics.runs.replications import Setting
from vajra_py.metrics.runs.run_data import RunData

_SECTIONS = (
    ("movement.by_reason", ""),
    ("admission.deferred_by_reason", "deferred: "),
    ("admission.refused_by_reason", "refused: "),
)


def reasons_of(settings: Sequence[Setting]) -> dict[str, tuple[float, ...]]:
    """Return, for each reason, its count in each setting (the mean over the setting's replications), with the most
    frequent reason first.
    """
    counts = [[_counts(run) for run in setting.runs] for setting in settings]
    names = dict.fromkeys(reason for runs in counts for run in runs for reason in run)
    found = {reason: tuple(sum(run.get(reason, 0) for run in runs) / len(runs) for runs in counts) for reason in names}
    return dict(sorted(found.items(), key=lambda entry: (-sum(entry[1]), entry[0])))


def _counts(run: RunData) -> Mapping[str, int]:
    return {
        before + reason: count
        for path, before in _SECTIONS
        for reason, count in (run.summary.value(path) or {}).items()
    }


def reason_table(comparison: ComparedSettings) -> Table | None:
    """Return a table of counts with a row per reason and a column per setting; None if there are no reasons."""
    rows = tuple(
        Row(reason, tuple(Cell(_text(value), value=value) for value in values))
        for reason, values in comparison.reasons.items()
    )
    return Table("reason", comparison.names, rows, "Moves, deferrals and refusals by reason") if rows else None


def further_tables(comparison: ComparedSettings) -> list[Table]:
    """Return the tables of pools and of reasons, if the settings have them."""
    return [table for table in (pool_table(comparison), reason_table(comparison)) if table is not None]


def _text(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else significant(value)
