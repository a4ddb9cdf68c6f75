"""Command `vajra calibrate`: fit host overhead and scale factors to a measured run."""

from __future__ import annotations

from pathlib import Path

import click

from vajra_py.cli.options import NumberRange, engine_option, latency_option


@click.command(no_args_is_help=True)
@click.argument("measured", type=click.Path(path_type=Path))
@click.option("--profile", type=click.Path(path_type=Path), help="Profile bundle of the same model and GPU.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("calibration.json"),
    show_default=True,
)
@click.option(
    "--fit-fraction",
    type=NumberRange(0, 1, min_open=True, max_open=True),
    default=1 / 3,
    show_default="1/3",
    help="Fraction of the requests, from the first on, that the calibration is fitted to; the rest tests it.",
)
@engine_option
@latency_option
@click.option("--overwrite", is_flag=True, help="Overwrite an existing calibration.")
@click.option("--quiet", "-q", is_flag=True, help="Print no progress.")
def calibrate(  # noqa: PLR0913 - one argument for each option
    measured: Path,
    profile: Path | None,
    output: Path,
    fit_fraction: float,
    engine: tuple[str, ...],
    latency: tuple[str, ...],
    overwrite: bool,
    quiet: bool,
) -> None:
    """Fit a profile bundle, or operator tables, to MEASURED: a measured run's folder, a detailed result of vllm bench serve, a guidellm report, or a run of this project.

    Each of about forty trials simulates the run. To use the resulting file, name it under `latency:` as `calibration:
    FILE`.
    """
    from vajra_py.cli.options import measured_latency, named_values
    from vajra_py.errors import ConfigError, Problem
    from vajra_py.experiment.measured.calibration import calibrate as fit_run
    from vajra_py.experiment.measured.files import read_measured

    if output.exists() and not overwrite:
        raise ConfigError(Problem(f"--output {output}", "is there already", "Another file, or --overwrite"))
    run = read_measured(measured, named_values(engine))

    def progress(count: int, cost: float) -> None:
        click.echo(f"\r{count} simulations, cost {cost:.1f} ", nl=False, err=True)

    fit = fit_run(run, measured_latency(run, profile, None, latency), fit_fraction, None if quiet else progress)
    if not quiet:
        click.echo(err=True)
    fit.calibration.write(output)
    for line in fit.lines():
        click.echo(line)
    click.echo(f"calibration: {output}")
