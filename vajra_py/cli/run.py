"""`vajra run`: run an experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import Struct

from vajra_py.cli.options import on_option, overrides_option
from vajra_py.cli.progress import RunsDisplay

if TYPE_CHECKING:
    from vajra_py.config import ExperimentConfig
    from vajra_py.experiment.runs.pool import MakePool
    from vajra_py.metrics.runs.run_data import RunData

MOSTLY_REJECTED = 5
"""Exit code if all runs finished, but one of them rejected more than half of its requests as impossible to serve."""


@click.command(no_args_is_help=True)
@click.argument("file", type=click.Path(path_type=Path))
@overrides_option
@click.option(
    "--preset", help="Run a whole system's policies in place of FILE's, and its replica options where FILE gives none."
)
@on_option
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Number of processes, by default one for each core: for the points of a sweep, or for the replicas of a single run where that is exact.",
)
@click.option("--overwrite", is_flag=True, help="Run again and overwrite existing results.")
@click.option(
    "--report", type=click.Path(path_type=Path, dir_okay=False), help="Write an HTML report of the runs to this file."
)
@click.option("--validate", is_flag=True, help="Simulate each run of the engine too, and show the simulation's errors.")
@click.option(
    "--quiet",
    "-q",
    is_flag=True,
    help="Print no progress bar and no table, only the results' path and warnings of rejected requests.",
)
def run(  # noqa: PLR0913 - one argument for each option
    file: Path,
    overrides: tuple[str, ...],
    preset: str | None,
    on: str,
    workers: int | None,
    overwrite: bool,
    report: Path | None,
    validate: bool,
    quiet: bool,
) -> int:
    """Run the experiment of FILE, or every point of its sweep and every replication.

    Finished runs are not repeated, so an interrupted sweep resumes where it stopped.
    """
    from vajra_py.runtime.support.gc_control import put_off_collections

    put_off_collections()
    from vajra_py.config import expand_sweep, load_config

    if preset is not None:  # the preset replaces the file's policies; `--set` still takes precedence over it
        overrides = (f"preset={preset}", *overrides)
    config = load_config(file, overrides, drops_policies=preset is not None)
    if validate:
        from vajra_py.experiment.measured.validation import check_validation

        for _, point in expand_sweep(config):
            check_validation(point)
    if report is not None:  # made before the runs, so that a folder that cannot be made fails at once
        report.parent.mkdir(parents=True, exist_ok=True)
    display = RunsDisplay(len(expand_sweep(config)), quiet, is_simulated=config.backend.kind == "simulator")
    failures: list[tuple[str, str]] = []
    num_copies = 0
    with _pool_on(on, config, workers) as pool, display:
        if config.is_single:
            runs = [_run_one(config, _RunOptions(overwrite, quiet, workers, pool), display)]
        else:
            from vajra_py.experiment.runs.sweep import sweep

            result = sweep(config, workers=workers, overwrite=overwrite, progress=display.point, pool=pool)
            runs, failures, num_copies = list(result.runs), list(result.failures), len(result.copies)
    _show(runs, report, quiet, num_copies)
    if validate:
        _validate(runs)
    for label, error in failures:
        click.echo(f"failed: {label}: {error}", err=True)
    is_served = _warn_of_rejections(runs)
    return 1 if failures else 0 if is_served else MOSTLY_REJECTED


@contextmanager
def _pool_on(on: str, config: ExperimentConfig, workers: int | None) -> Iterator[MakePool | None]:
    """Yield the factory of worker pools at the place that `--on` names; None for this machine."""
    if on == "local":
        yield None
        return
    from vajra_py.cluster.connect import ray_cluster
    from vajra_py.cluster.places import pool_on

    with ray_cluster(on) as cluster:
        yield None if cluster is None else pool_on(cluster, config, workers)


def _warn_of_rejections(runs: Sequence[RunData]) -> bool:
    """Warn on standard error of requests rejected as impossible to serve; return False if a run rejected over half.

    Requests rejected by a bounded queue or an admission policy do not count: rejection is their purpose. Equal messages
    of several runs are printed once.
    """
    from vajra_py.runtime.records.arrow_arrays import rows_with
    from vajra_py.runtime.requests.rejections import TURNED_AWAY

    named: dict[str, list[str]] = {}
    is_served = True
    for run in runs:
        ended = run.manifest.get("num_ended")
        if ended is not None and "rejected" not in ended:
            continue
        requests = run.requests("request_id", "reason", "detail")
        rejected = rows_with(requests, "reason", "rejected").to_pylist()
        found = [one for one in rejected if not one["detail"].startswith(TURNED_AWAY)]
        if found:
            first = f"{found[0]['request_id']}: {found[0]['detail']}"
            count = f"{len(found)} of {requests.num_rows} requests were rejected"
            named.setdefault(f"{count}, for instance {first}", []).append(run.name)
        is_served = is_served and 2 * len(found) <= requests.num_rows
    for what, names in named.items():
        others = (
            f" and {len(names) - 1} other runs" if len(names) > 2 else f" and {names[-1]}" if len(names) > 1 else ""
        )
        where = f"all {len(runs)} runs" if len(names) == len(runs) > 1 else f"{names[0]}{others}"
        click.echo(f"warning: {where}: {what}", err=True)
    return is_served


class _RunOptions(Struct, frozen=True):
    """Execution options of a run."""

    overwrite: bool
    quiet: bool
    workers: int | None
    pool: MakePool | None
    """Factory of the worker pool that executes the runs; None for this machine."""


def _run_one(config: ExperimentConfig, options: _RunOptions, display: RunsDisplay) -> RunData:
    from vajra_py.experiment.runs.point_status import PointStatus
    from vajra_py.experiment.runs.run import run_experiment

    def progress(done: int, total: int, now: float) -> None:
        display.point(0, PointStatus(config.name, done, total, now))

    run = _run_divided(config, options, progress) if (options.workers or 1) > 1 else None
    if run is None and options.pool is None:
        run = run_experiment(config, progress=progress, overwrite=options.overwrite)
    elif run is None:
        from vajra_py.experiment.runs.pool import RunTask, run_in_pool

        assert options.pool is not None
        run = run_in_pool(options.pool, RunTask(config, config.output_dir / config.name, options.overwrite), progress)
    display.point(0, PointStatus(config.name, is_finished=True))
    return run


def _run_divided(
    config: ExperimentConfig, options: _RunOptions, progress: Callable[[int, int, float], None]
) -> RunData | None:
    """Execute the run with several workers; return None if it has finished before, or if it must run undivided.

    If it must run undivided, the reason is printed unless `quiet` is set.
    """
    from vajra_py.experiment.runs.folder import RunFolder
    from vajra_py.experiment.runs.parts import parts_of, run_in_parts
    from vajra_py.experiment.runs.pool import local_pool
    from vajra_py.plugins import load_registry

    assert options.workers is not None
    place, registry = RunFolder(config.output_dir / config.name), load_registry()
    if place.is_finished(config) and not options.overwrite:
        return None
    place.check(config, overwrite=options.overwrite)
    parts = parts_of(config, registry, options.workers)
    if not isinstance(parts, str):
        pool = options.pool or (lambda progress: local_pool(options.workers, len(parts), registry, progress))
        run = run_in_parts(config, registry, parts, pool, progress, overwrite=options.overwrite)
        if not isinstance(run, str):
            return run
        parts = run
    if not options.quiet:
        click.echo(f"not divided among {options.workers} workers: {parts.rstrip('.')}.", err=True)
    return None


def _show(runs: list[RunData], report: Path | None, quiet: bool, num_copies: int = 0) -> None:
    if not runs:
        return
    places = sorted({str(one.path if len(runs) == 1 else one.path.parent) for one in runs})
    counts = [] if len(runs) == 1 and not num_copies else [f"{len(runs)} run{'' if len(runs) == 1 else 's'}"]
    counts += [f"{num_copies} would repeat them under another seed"] if num_copies else []
    click.echo(f"results: {' '.join(places)}" + (f" ({'; '.join(counts)})" if counts else ""))
    if not quiet:
        from vajra_py.cli.options import print_step_times, print_warnings, show_further_tables, show_table
        from vajra_py.metrics.comparison.comparison import compare
        from vajra_py.metrics.runs.naming import distinct

        runs = distinct(runs)
        comparison = compare(runs)
        show_table(comparison.render().table)
        show_further_tables(comparison)
        print_step_times(runs, comparison)
        print_warnings(runs)
    if report is not None:
        from vajra_py.metrics.report.report import write_report

        write_report(runs, report)
        click.echo(f"report: {report}")


def _validate(runs: list[RunData]) -> None:
    from vajra_py.cli.options import print_accuracy
    from vajra_py.config import load_config
    from vajra_py.experiment.measured.validation import validate as validate_run

    for one in runs:
        print_accuracy(validate_run(one, load_config(one.path / "config.yaml")), f"{one.name}: measured and simulated")
