"""`vajra compare`: runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from vajra_py.metrics.comparison.comparison import Comparison
    from vajra_py.metrics.comparison.table_model import Table
    from vajra_py.metrics.runs.run_data import RunData


@click.command(no_args_is_help=True)
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--report", type=click.Path(path_type=Path, dir_okay=False), help="Write one self-contained HTML report here."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "markdown", "latex", "csv", "json"]),
    default="table",
    show_default=True,
)
@click.option(
    "--scope",
    help="Class, tenant or pool to compare, in place of all requests. Without it, CSV and JSON have all of them.",
)
@click.option(
    "--each-run", is_flag=True, help="Show every run. Without it, runs that differ only in their seed form one setting."
)
@click.option("--baseline", help="Name of the setting that the others are compared with.")
@click.option(
    "--metrics",
    multiple=True,
    metavar="NAME[,NAME...]",
    help="Primary metrics: the differences in these are tested, adjusted for their number. By default P99 TTFT, P99 TBT and SLO attainment.",
)
@click.option(
    "--columns",
    multiple=True,
    metavar="NAME[,NAME...]",
    help="Metrics that a table or LaTeX table shows as columns, a row for each setting.",
)
def compare(  # noqa: PLR0913 - one argument for each option
    runs: tuple[Path, ...],
    report: Path | None,
    form: str,
    scope: str | None,
    each_run: bool,
    baseline: str | None,
    metrics: tuple[str, ...],
    columns: tuple[str, ...],
) -> None:
    """Compare RUNS: run folders, or folders that contain run folders (such as a sweep's)."""
    from vajra_py.experiment.runs.folder import find_all_runs
    from vajra_py.metrics.comparison.comparison import compare as compare_runs
    from vajra_py.metrics.runs.naming import load_runs

    loaded = load_runs(find_all_runs(runs))
    primary = _names(metrics)
    comparison = compare_runs(loaded, each_run=each_run, metrics=primary)
    view = _View(form, None if scope is None else comparison.scope(scope), baseline, _names(columns))
    if columns and form not in ("table", "latex"):
        raise click.UsageError(
            "--columns: applies to tables and LaTeX tables only. Allowed: --format table, --format latex."
        )
    if form == "table":
        _show(comparison, view, loaded)
    else:
        click.echo(_text(comparison, view), nl=False)
    if baseline is not None and len(comparison.of_load(comparison.position(baseline))) == 1:
        message = f"no difference from {baseline}: every other setting has a different load; only settings of the same load are compared"
        click.echo(f"warning: {message}", err=True)
    if report is not None:
        from vajra_py.metrics.report.report import write_report

        write_report(loaded, report, metrics=primary)
        click.echo(f"report: {report}")


@dataclass(frozen=True, slots=True)
class _View:
    """Requested part and form of a comparison."""

    form: str
    scope: str | None
    baseline: str | None
    columns: tuple[str, ...]


def _names(given: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for one in given for name in one.replace(" ", "").split(",") if name)


def _text(comparison: Comparison, view: _View) -> str:
    """Return the comparison as text for other programs."""
    from vajra_py.metrics.comparison import tables as comparison_tables
    from vajra_py.metrics.comparison.compared_settings import OVERALL
    from vajra_py.metrics.comparison.reason_table import further_tables
    from vajra_py.metrics.comparison.table_renderers import csv_text, latex, markdown

    position = None if view.baseline is None else comparison.position(view.baseline)
    if view.form == "json":
        return comparison_tables.json_text(comparison, view.scope, position)
    if view.form == "csv" and position is not None:
        rows = list(comparison_tables.difference_records(comparison, view.scope, position))
        return csv_text(comparison_tables.DIFFERENCE_COLUMNS, rows)
    if view.form == "csv":
        return comparison.to_csv(view.scope)
    scope = view.scope or OVERALL
    if view.baseline is not None:
        return (markdown if view.form == "markdown" else latex)(_differences(comparison, view))
    if view.form == "latex":
        return comparison.to_latex(scope, view.columns)
    further = further_tables(comparison) if view.scope is None else []
    return "\n".join([comparison.to_markdown(scope), *map(markdown, further)])


def _differences(comparison: Comparison, view: _View) -> Table:
    from vajra_py.metrics.comparison.baseline_table import difference_table
    from vajra_py.metrics.comparison.compared_settings import OVERALL
    from vajra_py.metrics.comparison.metrics import named_metrics

    assert view.baseline is not None
    metrics = named_metrics(view.columns, "--columns") if view.columns else None
    return difference_table(comparison, view.baseline, view.scope or OVERALL, metrics)


def _show(comparison: Comparison, view: _View, loaded: Sequence[RunData]) -> None:
    """Print the comparison for a reader."""
    from vajra_py.cli.options import print_step_times, print_warnings, show_further_tables, show_table
    from vajra_py.metrics.comparison.compared_settings import OVERALL

    if view.baseline is not None:
        show_table(_differences(comparison, view))
        return
    show_table(comparison.render(view.scope or OVERALL, view.columns).table)
    if view.scope is None:
        show_further_tables(comparison)
    print_step_times(loaded, comparison)
    print_warnings(loaded)
    if len(comparison.scopes) > 1 and view.scope is None:
        click.echo(f"also by --scope: {', '.join(comparison.scopes[1:])}")
