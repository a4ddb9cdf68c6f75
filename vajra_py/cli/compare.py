"""`vajra compare`: runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from vajra_py.metrics.comparison import Comparison


@click.command(no_args_is_help=True)
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--report", type=click.Path(path_type=Path, dir_okay=False), help="Write one self-contained HTML report here."
)
@click.option(
    "--format", "form", type=click.Choice(["table", "markdown", "latex", "csv"]), default="table", show_default=True
)
@click.option(
    "--scope", help="A class or tenant named in the output, in place of all requests. CSV holds every scope without it."
)
@click.option(
    "--each-run", is_flag=True, help="Show every run; without it, runs that differ in their seed only are one."
)
@click.option("--baseline", help="Show differences of the other settings from the one of this name.")
def compare(
    runs: tuple[Path, ...], report: Path | None, form: str, scope: str | None, each_run: bool, baseline: str | None
) -> None:
    """Compare RUNS: folders of runs, or folders that hold runs (such as a sweep's)."""
    from vajra_py.experiment.folder import find_all_runs
    from vajra_py.metrics.comparison import OVERALL
    from vajra_py.metrics.comparison import compare as compare_runs
    from vajra_py.metrics.run_data import load_runs

    loaded = load_runs(find_all_runs(runs))
    comparison = compare_runs(loaded, each_run=each_run)
    only = None if scope is None else comparison.scope(scope)
    if baseline is not None:
        _show_differences(comparison, baseline, form, only)
    elif form == "csv":
        click.echo(comparison.to_csv(only), nl=False)
    elif form == "markdown":
        click.echo(comparison.to_markdown(only or OVERALL))
    elif form == "latex":
        click.echo(comparison.to_latex(only or OVERALL), nl=False)
    else:
        from vajra_py.cli.options import say_step_times, say_warnings, wide_console

        wide_console().print(comparison.render(only or OVERALL))
        say_step_times(loaded, comparison)
        say_warnings(loaded)
        if len(comparison.scopes) > 1 and only is None:
            click.echo(f"also by --scope: {', '.join(comparison.scopes[1:])}")
    if report is not None:
        from vajra_py.metrics.report import write_report

        write_report(loaded, report)
        click.echo(f"report: {report}")


def _show_differences(comparison: Comparison, baseline: str, form: str, scope: str | None) -> None:
    from vajra_py.metrics import baseline_table
    from vajra_py.metrics.comparison import OVERALL

    if form == "csv":
        click.echo(baseline_table.csv_text(comparison, baseline, scope), nl=False)
    elif form == "table":
        from vajra_py.cli.options import wide_console

        wide_console().print(baseline_table.terminal(comparison, baseline, scope or OVERALL))
    else:
        write = baseline_table.markdown if form == "markdown" else baseline_table.latex
        click.echo(write(comparison, baseline, scope or OVERALL), nl=False)
    if len(comparison.of_load(comparison.position(baseline))) == 1:
        message = f"no difference from {baseline}: every other setting has another load, and loads are not compared"
        click.echo(f"warning: {message}", err=True)
