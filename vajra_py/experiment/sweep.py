"""Run a sweep over several cores and resume it after an interruption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from vajra_py.config import ExperimentConfig, SweepPoint, expand_sweep
from vajra_py.config.sweeps import values_of_label
from vajra_py.experiment.folder import RunFolder
from vajra_py.experiment.pool import MakePool, RunTask, local_pool
from vajra_py.metrics.run_data import RunData
from vajra_py.plugins import Registry, load_registry


@dataclass(frozen=True, slots=True)
class PointStatus:
    """How one point of a sweep stands."""

    label: str
    num_done: int = 0
    num_total: int = 0
    now_s: float = 0.0
    is_finished: bool = False
    was_there: bool = False
    """Finished in an earlier sweep; not run again."""
    error: str | None = None

    @property
    def values_label(self) -> str:
        """The point by its values alone: every point sets the same paths."""
        return values_of_label(self.label)


SweepProgress: TypeAlias = Callable[[int, PointStatus], None]
"""Called with the point's position and how it stands."""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What became of a sweep: its runs in order, and the points that failed with their reasons."""

    runs: Sequence[RunData]
    failures: Sequence[tuple[str, str]]


def sweep_points(
    config: ExperimentConfig, registry: Registry | None = None
) -> list[tuple[SweepPoint, ExperimentConfig, Path]]:
    """Every point with its settings and its folder, `<output.dir>/<name>/<point>`; of a single run, `<output.dir>/<name>`."""
    base = config.output_dir / config.name
    if config.is_single:
        return [(point, one, base) for point, one in expand_sweep(config, registry)]
    return [(point, one, base / point.point_id) for point, one in expand_sweep(config, registry)]


def sweep(
    config: ExperimentConfig,
    *,
    workers: int | None = None,
    registry: Registry | None = None,
    progress: SweepProgress | None = None,
    overwrite: bool = False,
    pool: MakePool | None = None,
) -> SweepResult:
    """Run every point of the sweep; points that are finished already are kept.

    Simulations run several at once, one a core unless `workers` says otherwise, or in the `pool` given; points on a device one after the other, as
    they would measure each other.
    A point that fails does not stop the others. Raises `RunInterrupted` when the user stops it; what is finished stays.
    """
    registry = registry or load_registry()
    points = sweep_points(config, registry)
    todo: list[int] = []
    for index, (point, one, path) in enumerate(points):
        if RunFolder(path).is_finished(one) and not overwrite:
            if progress is not None:
                progress(index, PointStatus(point.label, is_finished=True, was_there=True))
        else:
            todo.append(index)
    alone = any(one.backend.kind != "simulator" for _, one, _ in points)
    failures: dict[int, str] = {}

    def report(index: int, done: int, total: int, now: float) -> None:
        assert progress is not None
        progress(index, PointStatus(points[index][0].label, done, total, now))

    told = None if progress is None else report
    runs_pool = pool(told) if pool else local_pool(workers or (1 if alone else None), len(todo), registry, told)
    try:
        for index in todo:
            _, one, path = points[index]
            runs_pool.submit(index, RunTask(one, path, overwrite))
        for index, error in runs_pool.ends():
            if error is not None:
                failures[index] = error
            if progress is not None:
                progress(index, PointStatus(points[index][0].label, is_finished=error is None, error=error))
    finally:
        runs_pool.close()
    runs = [RunData.load(path, point.label) for index, (point, _, path) in enumerate(points) if index not in failures]
    return SweepResult(runs, [(points[index][0].label, error) for index, error in sorted(failures.items())])
