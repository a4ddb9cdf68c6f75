"""`vajra figures`: the figures and the table of runs as files for a paper."""

from __future__ import annotations

from pathlib import Path

import click

_WIDTHS = {"column": 3.35, "page": 7.0, "report": 10.0}


def _inches(ctx: click.Context, param: click.Parameter, text: str) -> float:
    """Return the requested width in inches."""
    from vajra_py.metrics.report.figure_files import MAX_WIDTH_IN, MIN_WIDTH_IN

    try:
        found = _WIDTHS[text] if text in _WIDTHS else float(text)
    except ValueError:
        found = 0.0
    if not MIN_WIDTH_IN <= found <= MAX_WIDTH_IN:
        allowed = f"{', '.join(_WIDTHS)}, or {MIN_WIDTH_IN:g} to {MAX_WIDTH_IN:g} inches"
        raise click.BadParameter(f"not a width ({text}). Allowed: {allowed}.", ctx, param)
    return found


@click.command(no_args_is_help=True)
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("figures"),
    show_default=True,
    help="Folder for the figures.",
)
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(["pdf", "svg", "png"]),
    default=("pdf",),
    show_default=True,
    help="File format. May be repeated.",
)
@click.option(
    "--width",
    callback=_inches,
    metavar="column|page|report|INCHES",
    default="column",
    show_default=True,
    help="Width of the figures.",
)
@click.option(
    "--only", multiple=True, metavar="FIGURE", help="Only this figure, such as latency_by_rate; may be repeated."
)
@click.option(
    "--panel",
    "--metric",
    "panels",
    multiple=True,
    metavar="NAME",
    help="Write this panel as a file of its own: a metric such as ttft_p99, or one panel of it. May be repeated.",
)
def figures(
    runs: tuple[Path, ...],
    out: Path,
    formats: tuple[str, ...],
    width: float,
    only: tuple[str, ...],
    panels: tuple[str, ...],
) -> None:
    """Write each figure of RUNS's report as a file with its numbers as CSV, and the table as LaTeX, Markdown and CSV."""
    from vajra_py.experiment.runs.folder import find_all_runs
    from vajra_py.metrics.report.figure_files import write_figures
    from vajra_py.metrics.runs.naming import load_runs

    loaded = load_runs(find_all_runs(runs))
    for path in write_figures(loaded, out, formats=formats, width_in=width, only=only, panels=panels):
        click.echo(path)
