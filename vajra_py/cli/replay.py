"""`vajra replay`: check that the simulator makes the decisions that an engine run recorded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from vajra_py.experiment.runs.replay import ReplayReport


@click.command(no_args_is_help=True)
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
def replay(runs: tuple[Path, ...]) -> int:
    """Run the requests of RUNS (runs of the engine) through the simulator, with the recorded step durations.

    The decision logs must be equal; otherwise the first difference is shown and the exit code is 1. For sessions of
    `vajra route`, the recorded answers and reports of the servers are applied again at the recorded times.
    """
    from vajra_py.experiment.runs.folder import find_all_runs

    different = False
    for path in find_all_runs(runs):
        report = _replayed(path)
        what = f"{report.num_steps} {report.unit}, {report.num_requests} requests"
        if report.is_equal:
            click.echo(f"equal: {path} ({what})")
            continue
        different = True
        click.echo(f"different: {path} ({what})\n  {report.difference}")
    return 1 if different else 0


def _replayed(path: Path) -> ReplayReport:
    from vajra_py.config import load_system
    from vajra_py.experiment.runs.replay import replay
    from vajra_py.plugins import load_registry

    registry = load_registry()
    if (path / "config.yaml").exists():
        config = load_system(path / "config.yaml", registry=registry)
        if config.backend.kind == "route":
            from vajra_py.route.replay import replay_route

            return replay_route(path, config, registry)
    return replay(path, registry)
