"""Check for mistakes that appear only when an experiment's parts are built, such as unreadable traces and incompatible
models or policies.
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
    """Read the workload's files and build replicas and policies for every point; yield each problem once.

    `where` prefixes problems of settings whose line is unknown.
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
                # A mistake that several points have in common is reported once.
                if str(problem) not in found:
                    found.add(str(problem))
                    is_placed = problem.where.startswith((f"{where}:", "--set "))
                    place = f"{problem.where}{at_point}" if is_placed else f"{where}{at_point} {problem.where}".strip()
                    yield replace(problem, where=place)


def _paths(workload: Any) -> Iterator[str]:
    """Yield the paths of a workload's files."""
    if getattr(workload, "path", None):
        yield workload.path
    for part in getattr(workload, "workloads", ()):
        yield from _paths(part)
