"""`vajra profiles` and `vajra workloads`: list built-in profiles, models and devices; describe a file's workload."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vajra_py.cli.options import NumberRange, overrides_option

if TYPE_CHECKING:
    from vajra_py.workload import Workload, WorkloadStatistics


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def profiles(as_json: bool) -> None:
    """List workload profiles, model descriptions and devices that can be named in a file."""
    from vajra_py.latency import device_names, model_names
    from vajra_py.workload import profile_names

    lists = (
        ("profiles", "workload profiles (workload: {type: profile, profile: NAME})", profile_names()),
        ("models", "models (latency: {type: roofline, model: NAME}, or the path of a config.json)", model_names()),
        ("devices", "devices (latency: {type: roofline, device: NAME})", device_names()),
    )
    if as_json:
        import json

        click.echo(json.dumps({key: list(names) for key, _, names in lists}, indent=1))
        return
    for _, title, names in lists:
        click.echo(title)
        for name in names:
            click.echo(f"  {name}")


@click.group(no_args_is_help=True)
def workloads() -> None:
    """Inspect workloads."""


@workloads.command(no_args_is_help=True)
@click.argument("file", type=click.Path(path_type=Path))
@overrides_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--figure",
    "figures",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a figure to this file (.pdf, .svg or .png). May be repeated.",
)
@click.option(
    "--width", type=NumberRange(2.0, 40.0), default=7.0, show_default=True, help="Width of the figure, inches."
)
def describe(file: Path, overrides: tuple[str, ...], as_json: bool, figures: tuple[Path, ...], width: float) -> None:
    """Describe the workload of experiment FILE: rate, burstiness, lengths, shared prefixes, sessions."""
    from vajra_py.config import load_config
    from vajra_py.experiment.runs.run import load_workload

    config = load_config(file, overrides)  # for a sweep, the experiment of its first point
    described = load_workload(config)
    statistics = described.statistics()
    if figures:
        _draw(described, figures, width)
    if as_json:
        import json

        click.echo(json.dumps({**statistics.to_dict(), "source": dict(described.source)}, indent=1, default=str))
        return
    if config.sweep is not None:
        click.echo("the workload of the sweep's first point")
    for line in _lines(statistics):
        click.echo(line)
    for key, value in described.source.items():
        if not isinstance(value, Mapping | list | tuple):
            click.echo(f"{key.replace('_', ' '):<22}{value}")


def _draw(described: Workload, figures: tuple[Path, ...], width_in: float) -> None:
    from vajra_py.metrics import plots
    from vajra_py.metrics.plots.style import draw_at
    from vajra_py.metrics.report.figure_files import FORMATS, save_figure

    for path in figures:
        if path.suffix[1:] not in FORMATS:
            raise click.BadParameter(
                f"{path}: not a format for files. Allowed: a name that ends in .{', .'.join(FORMATS)}."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        save_figure(draw_at(width_in, plots.workload_figure, described), path)


def _lines(statistics: WorkloadStatistics) -> list[str]:
    facts: list[tuple[str, Any]] = [
        ("requests", f"{statistics.num_requests:,}"),
        ("arrive within", f"{statistics.duration_s:,.1f} s"),
        ("rate", f"{statistics.rate:,.3f} requests/s"),
        ("inter-arrival CV", f"{statistics.iat_cv:.2f} (1: Poisson)"),
        ("sessions", f"{statistics.num_sessions:,}" if statistics.num_sessions else "none"),
        ("tenants", f"{statistics.num_tenants:,}" if statistics.num_tenants else "none"),
    ]
    if statistics.num_followers:
        facts.append(("wait for another", f"{statistics.num_followers:,}"))
    for name, lengths, total in (
        ("prompt tokens", statistics.prompt, statistics.total_prompt_tokens),
        ("output tokens", statistics.output, statistics.total_output_tokens),
    ):
        spread = f"P50 {lengths.p50:,.0f}, P90 {lengths.p90:,.0f}, P99 {lengths.p99:,.0f}"
        limits = f"from {lengths.min:,} to {lengths.max:,}, {total:,} in all"
        facts.append((name, f"mean {lengths.mean:,.1f}, {spread}, {limits}"))
    share = statistics.prefix_share_fraction
    facts.append(("repeated prefixes", "contents unknown" if share is None else f"{share:.1%} of prompt tokens"))
    return [f"{name:<22}{value}" for name, value in facts]
