"""`vajra compare`: put the results of several runs side by side."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(no_args_is_help=True)
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--report", type=click.Path(path_type=Path), help="Write one self-contained HTML report here.")
@click.option("--format", "form", type=click.Choice(["table", "markdown", "csv"]), default="table", show_default=True)
@click.option(
    "--scope", default="overall", show_default=True, help="`overall`, or a class or tenant named in the output."
)
def compare(runs: tuple[Path, ...], report: Path | None, form: str, scope: str) -> None:
    """Compare RUNS: folders of runs, or folders that hold runs (such as a sweep's)."""
    from vajra_py.errors import RunError, did_you_mean
    from vajra_py.experiment.folder import find_runs
    from vajra_py.metrics.comparison import compare as compare_runs
    from vajra_py.metrics.run_data import load_runs

    loaded = load_runs([path for given in runs for path in find_runs(given)])
    comparison = compare_runs(loaded)
    if scope not in comparison.scopes:
        raise RunError(f"--scope: nothing has that name ({scope!r}). {did_you_mean(scope, comparison.scopes)}")
    if form == "csv":
        click.echo(comparison.to_csv(), nl=False)
    elif form == "markdown":
        click.echo(comparison.to_markdown(scope))
    else:
        from vajra_py.cli.options import say_warnings, wide_console

        wide_console().print(comparison.render(scope))
        say_warnings(loaded)
        if len(comparison.scopes) > 1 and scope == "overall":
            click.echo(f"also by --scope: {', '.join(comparison.scopes[1:])}")
    if report is not None:
        from vajra_py.metrics.report import write_report

        report.parent.mkdir(parents=True, exist_ok=True)
        write_report(loaded, report)
        click.echo(f"report: {report}")
