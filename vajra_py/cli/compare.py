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
    help="A class or tenant named in the output, in place of all requests. CSV and JSON hold every scope without it.",
)
@click.option(
    "--each-run", is_flag=True, help="Show every run; without it, runs that differ in their seed only are one."
)
@click.option("--baseline", help="Show differences of the other settings from the one of this name.")
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
    """Compare RUNS: folders of runs, or folders that hold runs (such as a sweep's)."""
    from vajra_py.experiment.runs.folder import find_all_runs
    from vajra_py.metrics.comparison.comparison import compare as compare_runs
    from vajra_py.metrics.runs.run_data import load_runs

    loaded = load_runs(find_all_runs(runs))
    primary = _names(metrics)
    comparison = compare_runs(loaded, each_run=each_run, metrics=primary)
    asked = _Asked(form, None if scope is None else comparison.scope(scope), baseline, _names(columns))
    if columns and form not in ("table", "latex"):
        raise click.UsageError("--columns: is of tables and LaTeX tables. Allowed: --format table, --format latex.")
    if form == "table":
        _show(comparison, asked, loaded)
    else:
        click.echo(_text(comparison, asked), nl=False)
    if baseline is not None and len(comparison.of_load(comparison.position(baseline))) == 1:
        message = f"no difference from {baseline}: every other setting has another load, and loads are not compared"
        click.echo(f"warning: {message}", err=True)
    if report is not None:
        from vajra_py.metrics.report.report import write_report

        write_report(loaded, report, metrics=primary)
        click.echo(f"report: {report}")


@dataclass(frozen=True, slots=True)
class _Asked:
    """Which part of a comparison is shown, and how."""

    form: str
    scope: str | None
    baseline: str | None
    columns: tuple[str, ...]


def _names(given: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for one in given for name in one.replace(" ", "").split(",") if name)


def _text(comparison: Comparison, asked: _Asked) -> str:
    """The comparison as a text for other programs."""
    from vajra_py.metrics.comparison import tables as comparison_tables
    from vajra_py.metrics.comparison.comparison import OVERALL
    from vajra_py.metrics.comparison.table_renderers import csv_text, latex, markdown

    position = None if asked.baseline is None else comparison.position(asked.baseline)
    if asked.form == "json":
        return comparison_tables.json_text(comparison, asked.scope, position)
    if asked.form == "csv" and position is not None:
        rows = list(comparison_tables.difference_records(comparison, asked.scope, position))
        return csv_text(comparison_tables.DIFFERENCE_COLUMNS, rows)
    if asked.form == "csv":
        return comparison.to_csv(asked.scope)
    scope = asked.scope or OVERALL
    if asked.baseline is not None:
        return (markdown if asked.form == "markdown" else latex)(_differences(comparison, asked))
    return comparison.to_markdown(scope) if asked.form == "markdown" else comparison.to_latex(scope, asked.columns)


def _differences(comparison: Comparison, asked: _Asked) -> Table:
    from vajra_py.metrics.comparison.baseline_table import difference_table
    from vajra_py.metrics.comparison.comparison import OVERALL
    from vajra_py.metrics.comparison.metrics import named_metrics

    assert asked.baseline is not None
    metrics = named_metrics(asked.columns, "--columns") if asked.columns else None
    return difference_table(comparison, asked.baseline, asked.scope or OVERALL, metrics)


def _show(comparison: Comparison, asked: _Asked, loaded: Sequence[RunData]) -> None:
    """Print the comparison for a reader."""
    from vajra_py.cli.options import say_step_times, say_warnings, show_table
    from vajra_py.metrics.comparison.comparison import OVERALL

    if asked.baseline is not None:
        show_table(_differences(comparison, asked))
        return
    show_table(comparison.render(asked.scope or OVERALL, asked.columns).table)
    say_step_times(loaded, comparison)
    say_warnings(loaded)
    if len(comparison.scopes) > 1 and asked.scope is None:
        click.echo(f"also by --scope: {', '.join(comparison.scopes[1:])}")
