"""`vajra atlas`: policies side by side on several workloads and loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vajra_py.cli.options import on_option, overrides_option
from vajra_py.cli.progress import RunsDisplay

if TYPE_CHECKING:
    from vajra_py.experiment.atlas.study import AtlasResult, Request


@click.command()
@click.argument("policies", nargs=-1)
@click.option(
    "--preset", "presets", multiple=True, metavar="NAME", help="A whole system as a further row. May be repeated."
)
@click.option(
    "--baseline",
    metavar="POLICIES",
    default="fcfs+least_loaded+fixed_chunk",
    show_default=True,
    help="Policies that all others are compared with, and into which each policy is put at its layer.",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    metavar="NAME|FILE",
    help="chats, documents, agents, or an experiment file whose sweep gives the loads. May be repeated. Default: all three.",
)
@click.option(
    "--replications",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Number of seeds of each setting; more can be added later.",
)
@click.option(
    "--metrics",
    multiple=True,
    metavar="NAME[,NAME...]",
    help="Primary metrics: the columns of the map, whose differences are tested.",
)
@overrides_option
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default="runs/atlas",
    show_default=True,
    help="Folder for the page and its runs.",
)
@on_option
@click.option("--workers", type=click.IntRange(min=1), help="Number of runs at a time. Default: one for each core.")
@click.option("--overwrite", is_flag=True, help="Run again and overwrite existing results.")
@click.option(
    "--figure-format",
    "figure_formats",
    multiple=True,
    type=click.Choice(["svg", "png", "pdf"]),
    default=("svg", "png"),
    show_default=True,
    help="File format of the figures beside the page. May be repeated.",
)
@click.option("--quiet", "-q", is_flag=True, help="Print no progress bar and no findings, only the page's path.")
def atlas(  # noqa: PLR0913 - one argument for each option
    policies: tuple[str, ...],
    presets: tuple[str, ...],
    baseline: str,
    workloads: tuple[str, ...],
    replications: int,
    metrics: tuple[str, ...],
    overrides: tuple[str, ...],
    out: Path,
    on: str,
    workers: int | None,
    overwrite: bool,
    figure_formats: tuple[str, ...],
    quiet: bool,
) -> int:
    """Compare POLICIES on several workloads and loads, and write one page that shows the best policies for each of
    them, and a card for each policy.

    POLICIES are names of installed policies of any layer (vtc), or several joined by + (lrs+dynamic_chunk); without
    any, twelve published ones. Finished runs are not repeated, so an interrupted atlas resumes, and policies can be
    added later.
    """
    from vajra_py.cluster.connect import ray_cluster
    from vajra_py.cluster.places import pool_on
    from vajra_py.experiment.atlas.cards import cards_of
    from vajra_py.experiment.atlas.entries import DEFAULT_POLICIES, entries_of
    from vajra_py.experiment.atlas.study import WORKLOADS, Execution, Request, num_points, plans_of, run_atlas
    from vajra_py.metrics.report.atlas import AtlasPage, write_atlas
    from vajra_py.plugins import load_registry

    registry = load_registry()
    named = policies if policies or presets else DEFAULT_POLICIES
    base, entries = entries_of(named, presets, baseline, registry)
    primary = tuple(name for one in metrics for name in one.replace(" ", "").split(",") if name)
    asked = Request(base, entries, workloads or tuple(WORKLOADS), replications, primary, overrides, out)
    plans = plans_of(asked, registry)
    display = RunsDisplay(num_points(plans), quiet, lists_kept=False)
    with ray_cluster(on) as cluster, display:
        pool_of = None if cluster is None else lambda config: pool_on(cluster, config, workers)
        result = run_atlas(asked, plans, registry, Execution(workers, overwrite, display.point, pool_of))
    page = AtlasPage(result.workloads, cards_of(asked.rows, registry), result.failures)
    paths = write_atlas(page, out, figure_formats)
    _print(asked, result, paths, quiet)
    return 1 if result.failures else 0


def _print(asked: Request, result: AtlasResult, paths: list[Path], quiet: bool) -> None:
    """Print the findings of each workload, the failures, and the path of the page."""
    from vajra_py.metrics.report.report import findings

    if not quiet:
        for workload in result.workloads:
            click.echo(f"{workload.name}:")
            for finding in findings(workload.comparison):
                click.echo(f"  {finding}")
    for name, error in result.failures:
        click.echo(f"failed: {name}: {error}", err=True)
    click.echo(f"results: {asked.out} ({result.num_runs} runs, {len(paths) - 1} files beside the page)")
    click.echo(f"atlas: {paths[0]}")
