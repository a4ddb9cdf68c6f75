"""Command `vajra validate`: compare a measured run with a simulation of the same requests."""

from __future__ import annotations

from pathlib import Path

import click

from vajra_py.cli.options import engine_option, latency_option


@click.command(no_args_is_help=True)
@click.argument("measured", type=click.Path(path_type=Path))
@click.argument("simulated", required=False, type=click.Path(path_type=Path))
@click.option(
    "--profile",
    type=click.Path(path_type=Path),
    help="Profile bundle with which the run is simulated, in place of SIMULATED.",
)
@click.option("--calibration", type=click.Path(path_type=Path), help="Calibration of the bundle or tables.")
@engine_option
@latency_option
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), help="Folder for the simulation. Default: runs/validation/NAME."
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write an HTML page with the table and figures to this file.",
)
def validate(  # noqa: PLR0913 - one argument for each option
    measured: Path,
    simulated: Path | None,
    profile: Path | None,
    calibration: Path | None,
    engine: tuple[str, ...],
    latency: tuple[str, ...],
    output: Path | None,
    report: Path | None,
) -> int:
    """Compare MEASURED, a real engine's run or a load generator's file, with SIMULATED, a run folder of the same
    requests, or with a new simulation by --profile or --latency.

    Prints a row for each metric: name, measured, simulated, error. The exit code is 1 when an error of a mean exceeds
    8 % (TTFT: 15 %).
    """
    from vajra_py.cli.options import measured_latency, named_values, print_accuracy
    from vajra_py.experiment.measured.accuracy import compare_with_measured
    from vajra_py.experiment.measured.files import read_measured
    from vajra_py.experiment.measured.simulation import simulate_measured
    from vajra_py.metrics.runs.run_data import RunData

    if (simulated is None) == (profile is None and not latency):
        raise click.UsageError("name either a simulated run, or --profile or --latency (got both or neither)")
    run = read_measured(measured, named_values(engine))
    if simulated is not None:
        data = RunData.load(simulated)
    else:
        folder = output or Path("runs") / "validation" / run.path.resolve().name
        data = simulate_measured(run, measured_latency(run, profile, calibration, latency), folder)
    accuracy = compare_with_measured(run, data)
    print_accuracy(accuracy)
    if report is not None:
        from vajra_py.experiment.measured.report import write_accuracy_report

        write_accuracy_report(accuracy, report)
        click.echo(f"report: {report}")
    return 0 if accuracy.passes else 1
