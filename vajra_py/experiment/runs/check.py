"""Find mistakes that appear only when an experiment's parts are built: unreadable traces, incompatible models or
policies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from vajra_py.config import ExperimentConfig, SweepPoint, SystemConfig
from vajra_py.errors import ConfigError, Problem, WorkloadError
from vajra_py.experiment.runs.backends import check_backend
from vajra_py.experiment.runs.run import load_workload
from vajra_py.plugins import Registry


def problems_of_parts(
    points: Sequence[tuple[SweepPoint, SystemConfig]], registry: Registry, where: str = ""
) -> Iterator[Problem]:
    """Read the workload's files and put replicas and policies together once for every point; yield what is wrong, each thing once.

    `where` is put before each problem of the settings whose line is not known.
    """
    seen: set[tuple[str, ...]] = set()
    found: set[str] = set()
    for point, config in points:
        try:
            if isinstance(config, ExperimentConfig):
                paths = tuple(_paths(config.workload))
                if paths and paths not in seen:
                    seen.add(paths)
                    load_workload(config)
            check_backend(config, registry)
        except WorkloadError as error:
            yield from error.problems
        except ConfigError as error:
            at_point = "" if len(points) == 1 else f" ({point.label})"
            for problem in error.problems:
                if str(problem) not in found:  # a mistake common to all points is reported once, for the first
                    found.add(str(problem))
                    is_placed = problem.where.startswith((f"{where}:", "--set "))
                    place = f"{problem.where}{at_point}" if is_placed else f"{where}{at_point} {problem.where}".strip()
                    yield replace(problem, where=place)


def _paths(workload: Any) -> Iterator[str]:
    """Yield the files that a workload is read from."""
    if getattr(workload, "path", None):
        yield workload.path
    for part in getattr(workload, "workloads", ()):
        yield from _paths(part)
