"""Options that several commands share."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs

if TYPE_CHECKING:
    from rich.progress import Progress

    from vajra_py.experiment.measured.accuracy import Accuracy
    from vajra_py.experiment.measured.run import MeasuredRun
    from vajra_py.metrics.comparison.comparison import Comparison
    from vajra_py.metrics.comparison.table_model import Table
    from vajra_py.metrics.runs.run_data import RunData


class NumberRange(click.FloatRange):
    """Number within bounds; rejects `nan`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert the number. Fails if it is out of range."""
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return found


overrides_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="PATH=VALUE",
    help="Override one setting, such as `--set workload.rate=8`; the value is YAML. May be repeated.",
)

on_option = click.option(
    "--on",
    default="local",
    show_default=True,
    metavar="PLACE",
    help="Where to compute: local, auto (the Ray cluster of this machine), HOST:PORT or ray://HOST:PORT (a Ray cluster).",
)

engine_option = click.option(
    "--engine",
    "engine",
    multiple=True,
    metavar="ARGUMENT=VALUE",
    help="Engine setting that the measured file lacks, by vLLM's name, such as `--engine max_num_seqs=128`. May be repeated.",
)


latency_option = click.option(
    "--latency",
    "latency",
    multiple=True,
    metavar="SETTING=VALUE",
    help="Setting of the latency model, such as `--latency link_latency_us=8`. Without --profile, aiconfigurator's operator tables are used: `--latency system=h200_sxm --latency precision=fp8`. May be repeated.",
)


def measured_latency(
    run: MeasuredRun, profile: Path | None, calibration: Path | None, given: Sequence[str]
) -> dict[str, Any]:
    """Return the `latency:` section for simulating a measured run: a profile bundle if given, else operator tables.

    `given` holds the values of `--latency`.
    """
    from vajra_py.experiment.measured.simulation import bundle_latency, tables_latency

    changes = named_values(given, "--latency")
    if profile is None:
        return tables_latency(run, calibration, **changes)
    return bundle_latency(run, profile, calibration, **changes)


def named_values(given: Sequence[str], option: str = "--engine") -> dict[str, Any]:
    """Return the values of a repeated option by name. Raises `ConfigError` for a value that is not NAME=VALUE."""
    import json

    from vajra_py.errors import ConfigError, Problem

    found: dict[str, Any] = {}
    for one in given:
        name, equals, text = one.partition("=")
        if not equals:
            allowed = "Such as max_num_seqs=128" if option == "--engine" else "Such as system=h200_sxm"
            raise ConfigError(Problem(option, f"is not NAME=VALUE ({one!r})", allowed))
        try:
            found[name] = json.loads(text)
        except json.JSONDecodeError:
            found[name] = text
    return found


def show_table(table: Table) -> None:
    """Print a table, fitted to the terminal; in full width if standard output is not a terminal."""
    from vajra_py.metrics.comparison.table_renderers import TerminalTable, plain_text

    if not sys.stdout.isatty():  # no layout is needed, and importing rich is slow
        click.echo(plain_text(table))
        return
    from rich.console import Console

    Console().print(TerminalTable(table))


def show_further_tables(comparison: Comparison) -> None:
    """Print the tables of pools, and of moves, deferrals and refusals by reason, unless the comparison is too wide."""
    from vajra_py.metrics.comparison.reason_table import further_tables
    from vajra_py.metrics.comparison.tables import WIDE

    if len(comparison.names) <= WIDE:  # with more settings the tables are too wide; the report has them
        for table in further_tables(comparison):
            show_table(table)


def print_step_times(runs: Sequence[RunData], comparison: Comparison | None = None) -> None:
    """Print the origin of these runs' step times, and whether differences between settings exceed the known error."""
    from vajra_py.metrics.comparison.step_time_trust import judged_differences, step_time_origins

    for sentence, names in step_time_origins(runs):
        click.echo(f"step times: {sentence}" + (f" ({', '.join(names)})" if names else ""))
    for sentence in judged_differences(runs, comparison) if comparison is not None else ():
        click.echo(sentence)


def print_accuracy(accuracy: Accuracy, title: str = "") -> None:
    """Print the errors of a simulation of a measured run, one row per metric, and the origin of its step times."""
    show_table(structs.replace(accuracy.table(), title=title))
    click.echo(f"step times: {accuracy.trust}")


def print_warnings(runs: Sequence[RunData]) -> None:
    """Print warnings about these runs on standard error, each once.

    The reason why a replicated setting is unstable is printed once for all seeds.
    """
    from vajra_py.metrics.runs.replications import group_replications

    found: dict[str, list[str]] = {}
    settings = group_replications(runs)
    notes: dict[str, list[str]] = {}
    for setting in settings:
        if setting.note:
            notes.setdefault(setting.note, []).append(setting.name)
        labels: dict[str, int] = {}
        for run in setting.runs:
            sentences = list(run.summary.value("warnings") or [])
            if not run.is_finished:
                sentences.insert(0, "Did not come to its end: these are the numbers up to where it stopped.")
            for sentence in sentences:
                if len(setting.runs) > 1 and sentence.startswith("The run is "):
                    label = str(run.summary.value("stability.label"))
                    labels[label] = labels.get(label, 0) + 1
                elif sentence != setting.note:
                    found.setdefault(sentence, []).append(run.name)
        for label, count in labels.items():
            found.setdefault(f"{label} under {count} of {len(setting.runs)} seeds.", []).append(setting.name)
    for note, names in notes.items():
        about = (
            "" if len(settings) == 1 else "all settings: " if len(names) == len(settings) else f"{', '.join(names)}: "
        )
        click.echo(f"note: {about}{note}", err=True)
    for sentence, names in found.items():
        about = "" if len(runs) == 1 else "all runs: " if len(names) == len(runs) else f"{', '.join(names)}: "
        click.echo(f"note: {about}{sentence}", err=True)


def new_progress() -> Progress:
    """Create a display of tasks with bars and notes, on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
    )
