"""`vajra capacity`: load that the settings of an experiment sustain under an SLO."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import structs

from vajra_py.cli.options import new_progress, on_option, overrides_option

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from vajra_py.experiment.capacity.answers import CapacityAnswer


@click.command(no_args_is_help=True)
@click.argument("file", type=click.Path(path_type=Path))
@overrides_option
@on_option
@click.option("--workers", type=click.IntRange(min=1), help="Number of runs at a time. Default: one for each core.")
@click.option("--overwrite", is_flag=True, help="Run again and overwrite existing results.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "markdown", "latex", "csv", "json"]),
    default="table",
    show_default=True,
    help="Format of the printed answers; CSV has raw values.",
)
@click.option(
    "--figure-format",
    "figure_formats",
    multiple=True,
    type=click.Choice(["pdf", "svg", "png"]),
    default=("svg",),
    show_default=True,
    help="File format of the curve's figure. May be repeated.",
)
@click.option("--quiet", "-q", is_flag=True, help="Print no progress and no table, only the answers.")
def capacity(  # noqa: PLR0913 - one argument for each option
    file: Path,
    overrides: tuple[str, ...],
    on: str,
    workers: int | None,
    overwrite: bool,
    form: str,
    figure_formats: tuple[str, ...],
    quiet: bool,
) -> int:
    """Find the highest rate, or the cheapest replicas, at which the SLO in FILE's `capacity` section holds.

    The answers are printed at the end, one for each setting of the sweep. Finished runs are not repeated, so an
    interrupted search continues.
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
    assert asked is not None  # `find_capacity` raises `ConfigError` without a `capacity` section
    from vajra_py.experiment.capacity.files import write_capacity_files

    paths = write_capacity_files(answers, asked, folder, figure_formats)
    if form == "table":
        _show(answers, asked.slo, paths, quiet=quiet)
    else:
        click.echo(_text(answers, asked.slo, form), nl=False)
        for answer in answers:
            if answer.error is not None:
                click.echo(answer.sentence, err=True)
    return 1 if any(answer.error is not None for answer in answers) else 0


def _worth(answer: CapacityAnswer) -> float:
    """Return a sort key that puts the highest rate or the lowest cost last, next to the shell's prompt."""
    found = answer.answer
    if found is None or found.outcome == "never":
        return -math.inf
    value = answer.cost(found.setting)
    return -value if answer.costs else value


def _show(answers: list[CapacityAnswer], slo: str, paths: list[Path], *, quiet: bool) -> None:
    """Print the answers for a reader, in a table and then one by one."""
    from vajra_py.cli.options import show_table
    from vajra_py.experiment.capacity.answers import answer_notes
    from vajra_py.experiment.capacity.differences import difference_lines
    from vajra_py.experiment.capacity.tables import answer_table

    table = answer_table(answers, slo)
    if not quiet:
        for path in paths:
            click.echo(f"wrote {path}")
        show_table(structs.replace(table, notes=()))
        num_runs, num_new = (sum(getattr(one, name) for one in answers) for name in ("num_runs", "num_new"))
        click.echo(f"{num_runs} runs, {num_new} of them new")
    for note in answer_notes(answers):
        click.echo(f"note: {note}")
    for line in difference_lines(answers):
        click.echo(line)
    click.echo(f"SLO: {slo}")
    for answer in sorted(answers, key=_worth):
        click.echo(answer.sentence)


def _text(answers: list[CapacityAnswer], slo: str, form: str) -> str:
    """Return the answers as text for other programs; only CSV leaves out the differences between answers."""
    from vajra_py.experiment.capacity.plain_values import plain_values
    from vajra_py.experiment.capacity.tables import answer_table, difference_table
    from vajra_py.metrics.comparison.table_renderers import csv_table, latex, markdown

    if form == "json":
        return json.dumps(plain_values(slo, answers), indent=1, allow_nan=False) + "\n"
    table, pairs = answer_table(answers, slo), difference_table(answers)
    if form == "csv":
        return csv_table(table)
    if form == "markdown":
        return "\n".join(map(markdown, (table, pairs) if pairs.rows else (table,)))
    texts = [latex(table, "tab:capacity")] + [latex(pairs, "tab:capacity-differences")] * bool(pairs.rows)
    return "\n".join(texts)


class _Display:
    """Progress display with one line per setting: numbers of finished and requested runs, and the current run."""

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
        """Show the progress of a setting's search."""
        if self._progress is None:
            return
        if label not in self._tasks:
            self._tasks[label] = self._progress.add_task(label, total=None, note="")
        self._progress.update(self._tasks[label], completed=num_done, total=num_asked, note=doing)
