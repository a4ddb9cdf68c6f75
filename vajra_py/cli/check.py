"""`vajra check` and `vajra schema`: validate experiment files, print their JSON schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vajra_py.cli.options import overrides_option

if TYPE_CHECKING:
    from vajra_py.config import ExperimentConfig, SweepPoint, SystemConfig
    from vajra_py.errors import Problem


@click.command(no_args_is_help=True)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@overrides_option
@click.option("--effective", is_flag=True, help="Print the complete settings, with all defaults.")
@click.option("--llm-d", "llm_d", is_flag=True, help="Read FILES as llm-d's, and print the settings that they become.")
def check(files: tuple[Path, ...], overrides: tuple[str, ...], effective: bool, llm_d: bool) -> None:
    """Check FILES of experiments and systems: print every mistake with file, line and allowed values. Nothing is run.

    A file without a workload (and without sweep, replications and capacity) is a system, the input of `vajra serve`.
    Workload files are read, and replicas and policies are built once for every point of a sweep.
    """
    if llm_d:
        if overrides or effective:
            raise click.UsageError("--llm-d takes neither --set nor --effective")
        _print_llm_d(files)
        return
    from vajra_py.config import ExperimentConfig, SweepPoint, dump_effective, expand_sweep, load_either
    from vajra_py.errors import ConfigError
    from vajra_py.experiment.runs.check import problems_of_parts
    from vajra_py.plugins import load_registry

    problems: list[Problem] = []
    for file in files:
        try:
            config = load_either(file, overrides)
            points: list[tuple[SweepPoint, SystemConfig]] = [(SweepPoint({}, config.name, config.name), config)]
            if isinstance(config, ExperimentConfig):
                points = [*expand_sweep(config)]
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        found = list(dict.fromkeys(problems_of_parts(points, load_registry(), str(file))))
        found += _problems_of_route(config, str(file))
        problems.extend(found)
        if effective:
            click.echo(dump_effective(config), nl=False)
        elif not found:
            if isinstance(config, ExperimentConfig):
                for line in _run_count_lines(expand_sweep(config)):
                    click.echo(f"{file}: {line}")
            else:
                click.echo(f"{file}: valid (a system; with a workload it is an experiment)")
    if problems:
        raise ConfigError(problems)


def _problems_of_route(config: SystemConfig, where: str) -> Iterator[Problem]:
    """Build a router's replicas and policies; yield the problems. Yield nothing for other backends."""
    if config.backend.kind != "route":
        return
    from vajra_py.errors import ConfigError
    from vajra_py.plugins import load_registry
    from vajra_py.route.build import build_router

    try:
        build_router(config, load_registry())
    except ConfigError as error:
        for problem in error.problems:
            is_placed = problem.where.startswith((f"{where}:", "--set "))
            yield problem if is_placed else replace(problem, where=f"{where} {problem.where}")


def _print_llm_d(files: tuple[Path, ...]) -> None:
    """Print each llm-d `EndpointPickerConfig` as a preset and a scheduling section; unused settings are comments."""
    from vajra_py.config import dump_yaml
    from vajra_py.config.llm_d import read_llm_d
    from vajra_py.errors import ConfigError
    from vajra_py.plugins import load_registry

    problems: list[Problem] = []
    for file in files:
        try:
            config = read_llm_d(file, load_registry())
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        click.echo(f"# {file}")
        for one in config.unused:
            click.echo(f"# {one}")
        click.echo(dump_yaml({"preset": config.preset, "scheduling": config.scheduling}), nl=False)
    if problems:
        raise ConfigError(problems)


def _run_count_lines(points: list[tuple[SweepPoint, ExperimentConfig]]) -> Iterator[str]:
    """Yield a line with the number of runs, and lines on seeds that would repeat a run or give equal requests."""
    from vajra_py.experiment.runs.equal_seeds import EqualSeeds
    from vajra_py.plugins import load_registry

    settings = EqualSeeds(load_registry()).of_points(points) if len(points) > 1 else []
    count = sum(len(one.kept) for one in settings) or len(points)
    left = f"; {len(points) - count} would repeat them under another seed" if count < len(points) else ""
    yield f"valid ({count} run{'' if count == 1 else 's'}{left})"
    whys: dict[str, int] = {}
    for one in settings:
        for why in filter(None, (one.why, one.same_load)):
            whys[why] = whys.get(why, 0) + 1
    for why, number in whys.items():
        whose = "" if len(settings) == 1 else "all settings: " if number == len(settings) else f"{number} settings: "
        yield f"{whose}{why}"


@click.command()
def schema() -> None:
    """Print the JSON schema of the files of experiments and systems, with the parameters of everything that is installed."""
    from vajra_py.config import json_schema
    from vajra_py.plugins import load_registry

    click.echo(json.dumps(json_schema(load_registry()), indent=1))
