"""`vajra capacity`: how much load the settings of an experiment take under an SLO."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vajra_py.cli.options import new_progress, on_option, overrides_option

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from vajra_py.experiment.capacity.answers import CapacityAnswer


@click.command(no_args_is_help=True)
@click.argument("file", type=click.Path(path_type=Path))
@overrides_option
@on_option
@click.option("--workers", type=click.IntRange(min=1), help="Runs to make at once. Default: one for each core there.")
@click.option("--overwrite", is_flag=True, help="Run again, over results that are there.")
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(["pdf", "svg", "png"]),
    default=("svg",),
    show_default=True,
    help="Of the curve; may be repeated.",
)
@click.option("--quiet", "-q", is_flag=True, help="No progress and no table; only the answers.")
def capacity(  # noqa: PLR0913 - one argument for each option
    file: Path,
    overrides: tuple[str, ...],
    on: str,
    workers: int | None,
    overwrite: bool,
    formats: tuple[str, ...],
    quiet: bool,
) -> int:
    """Find the highest rate, or the cheapest replicas, at which the SLO in FILE's `capacity` section holds.

    Answers come last, one for each setting of the sweep. Runs that are there are not made again, so an interrupted search continues.
    """
    from vajra_py.cluster.connect import ray_cluster
    from vajra_py.cluster.places import pool_on
    from vajra_py.config import load_config
    from vajra_py.experiment.capacity.study import find_capacity

    config = load_config(file, overrides)
    display = _Display(quiet)
    with ray_cluster(on) as cluster, display:
        pool = None if cluster is None else pool_on(cluster, config, workers)
        answers = find_capacity(config, workers=workers, overwrite=overwrite, progress=display.update, pool=pool)
    folder = config.output_dir / config.name
    asked = config.capacity
    assert asked is not None  # else there was no answer
    from vajra_py.experiment.capacity.files import difference_lines, write_capacity_files

    for path in write_capacity_files(answers, asked, folder, formats):
        if not quiet:
            click.echo(f"wrote {path}")
    if not quiet:
        _show(answers)
    for note in dict.fromkeys(answer.note for answer in answers if answer.note):
        labels = [answer.label for answer in answers if answer.note == note]
        click.echo(f"note: {'' if len(labels) == len(answers) else ', '.join(labels) + ': '}{note}")
    for line in difference_lines(answers):
        click.echo(line)
    click.echo(f"SLO: {asked.slo}")
    for answer in sorted(answers, key=_worth):
        click.echo(answer.sentence)
    return 1 if any(answer.error is not None for answer in answers) else 0


def _worth(answer: CapacityAnswer) -> float:
    """The highest rate and the lowest cost come last, where one looks first."""
    found = answer.answer
    if found is None or found.outcome == "never":
        return -math.inf
    value = answer.cost(found.setting)
    return -value if answer.costs else value


def _show(answers: list[CapacityAnswer]) -> None:
    from rich.table import Table

    from vajra_py.cli.options import wide_console
    from vajra_py.experiment.capacity.files import answer_rows

    rows = answer_rows(answers)
    table = Table(*rows[0], box=None)
    for row in rows[1:]:
        table.add_row(*row)
    wide_console().print(table)


class _Display:
    """A line for each setting: runs finished of those asked for so far, and what is being run."""

    def __init__(self, quiet: bool) -> None:
        self._progress: Progress | None = None if quiet else new_progress()
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Display:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, label: str, num_done: int, num_asked: int, doing: str) -> None:
        """Show how a setting's search stands."""
        if self._progress is None:
            return
        if label not in self._tasks:
            self._tasks[label] = self._progress.add_task(label, total=None, note="")
        self._progress.update(self._tasks[label], completed=num_done, total=num_asked, note=doing)
