"""`vajra profile`: measure a model's step times on this machine for the simulator."""

from __future__ import annotations

from pathlib import Path

import click

from vajra_py.cli.options import overrides_option

_QUIET_CORES = 0.2


@click.command()
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="Directory of the model. Default: that of the engine in --config.",
)
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Default: profile.json in the model's directory.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Experiment file whose replica and engine settings the measurement uses.",
)
@overrides_option
@click.option(
    "--passes", type=click.IntRange(min=1), default=5, show_default=True, help="Number of measurements of each shape."
)
@click.option(
    "--random", "num_random", type=click.IntRange(min=0), default=40, show_default=True, help="Number of random shapes."
)
@click.option("--overwrite", is_flag=True, help="Measure again and overwrite an existing profile.")
@click.option("--quiet", "-q", is_flag=True, help="Print no progress bar, only the profile's path.")
def profile(  # noqa: PLR0913 - one argument for each option
    model: Path | None,
    output: Path | None,
    config: Path | None,
    overrides: tuple[str, ...],
    passes: int,
    num_random: int,
    overwrite: bool,
    quiet: bool,
) -> None:
    """Measure the durations of steps for batches of every shape, and fit a latency model to them.

    An interrupted measurement is resumed. Simulations, and policies on the engine, use the profile as
    `latency: {type: profiled, path: FILE}`.
    """
    from vajra_py.errors import ConfigError, Problem
    from vajra_py.experiment.profiling.profile import ProfileSettings, profile_config, profile_model

    made_config = profile_config(model, config, overrides)
    target = output or Path(made_config.backend.settings.model) / "profile.json"
    if target.exists() and not overwrite:
        raise ConfigError(Problem(f"output {target}", "is there already", "Another file, or `--overwrite`"))
    settings = ProfileSettings(made_config, passes, num_random)
    with _Bar(quiet) as bar:
        made = profile_model(settings, target, bar.show)
    click.echo(f"profile: {target} ({made.num_shapes} shapes)")
    others = made.facts["other_load_cores"]
    if others is not None and others > _QUIET_CORES:
        click.echo(
            f"warning: other processes took {others:.1f} cores meanwhile, and what they slowed down is in it", err=True
        )
    if not quiet:
        for name, errors in made.errors.items():
            click.echo(
                f"  {name}: median error {errors['p50']:.1%}, 90th percentile {errors['p90']:.1%} "
                f"({errors['num_shapes']:.0f} shapes)"
            )


class _Bar:
    """Progress bar; shows nothing if `quiet`."""

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._progress = None if quiet else Progress(console=Console(stderr=True))
        self._task = None if self._progress is None else self._progress.add_task("measuring", total=None)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None and self._progress.live.is_started:
            self._progress.stop()

    def show(self, num_done: int, num_total: int) -> None:
        """Show the number of finished measurements."""
        if self._progress is not None and self._task is not None:
            # The display starts only now, so that errors before the first measurement are printed on their own lines.
            self._progress.start()
            self._progress.update(self._task, completed=num_done, total=num_total)
