"""`vajra trace`: export a run as a timeline."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(no_args_is_help=True)
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Default: timeline.json.gz in the run's folder.",
)
def trace(run: Path, output: Path | None) -> None:
    """Write the timeline of RUN: steps, requests, queue and KV use; open it at ui.perfetto.dev."""
    from vajra_py.metrics.report.timeline import write_timeline
    from vajra_py.metrics.runs.run_data import RunData

    found = RunData.load(run)
    target = output or run / "timeline.json.gz"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_timeline(found, target)
    click.echo(f"timeline: {target}")
