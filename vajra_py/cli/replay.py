"""`vajra replay`: check that the simulator takes the decisions that an engine run recorded."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(no_args_is_help=True)
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
def replay(runs: tuple[Path, ...]) -> int:
    """Run the requests of RUNS (runs of the engine) through the simulator, with the recorded step durations.

    The decision logs must be equal; otherwise the first difference is shown and the exit code is 1.
    """
    from vajra_py.experiment.runs.folder import find_all_runs
    from vajra_py.experiment.runs.replay import replay as replay_run

    different = False
    for path in find_all_runs(runs):
        report = replay_run(path)
        what = f"{report.num_steps} steps, {report.num_requests} requests"
        if report.is_equal:
            click.echo(f"equal: {path} ({what})")
            continue
        different = True
        click.echo(f"different: {path} ({what})\n  {report.difference}")
    return 1 if different else 0
