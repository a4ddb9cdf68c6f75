"""Run a sweep over several cores and resume it after an interruption."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from vajra_py.config import ExperimentConfig, SweepPoint, expand_sweep
from vajra_py.experiment.runs.equal_seeds import EqualSeeds, SettingSeeds, drew_beside_workload, note_copies
from vajra_py.experiment.runs.folder import RunFolder
from vajra_py.experiment.runs.point_status import PointStatus
from vajra_py.experiment.runs.pool import MakePool, RunTask, local_pool
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.plugins import Registry, load_registry

SweepProgress: TypeAlias = Callable[[int, PointStatus], None]
"""Called with the point's position and status."""


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Result of a sweep: its runs in order, and the failed points with their reasons."""

    runs: Sequence[RunData]
    failures: Sequence[tuple[str, str]]
    copies: Sequence[tuple[str, str]] = ()
    """(Point that is not run because it would repeat the run of another seed, point with that run)."""


def sweep_points(
    config: ExperimentConfig, registry: Registry | None = None
) -> list[tuple[SweepPoint, ExperimentConfig, Path]]:
    """Return (point, settings, folder) of every point. The folder is `<output.dir>/<name>/<point>`, or
    `<output.dir>/<name>` for a single run.
    """
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
    """Run every point of the sweep, except seeds that would repeat another seed's run and, unless `overwrite` is set,
    points that are already finished.

    Points run concurrently in `workers` processes, or in `pool`. By default there is one process per core for
    simulations, but only one for points on a device, because concurrent runs would disturb each other's times. A failed
    point does not stop the others. Raises `RunInterrupted` if the user interrupts the sweep; finished runs are kept.
    """
    registry = registry or load_registry()
    points = sweep_points(config, registry)
    plan = _Plan(points, EqualSeeds(registry).of_points([(point, one) for point, one, _ in points]), overwrite)
    alone = any(one.backend.kind != "simulator" for _, one, _ in points)
    failures: dict[int, str] = {}

    def note(index: int, **facts: Any) -> None:
        if progress is not None:
            progress(index, PointStatus(points[index][0].label, **facts))

    def report(index: int, done: int, total: int, now: float) -> None:
        note(index, num_done=done, num_total=total, now_s=now)

    todo = plan.missing(plan.kept())
    on_progress = None if progress is None else report
    runs_pool = (
        pool(on_progress) if pool else local_pool(workers or (1 if alone else None), len(todo), registry, on_progress)
    )

    def submit(wanted: Sequence[int]) -> None:
        for index in wanted:
            _, one, path = points[index]
            runs_pool.submit(index, RunTask(one, path, overwrite))

    try:
        for index in sorted({*range(len(points))} - {*todo}):
            note(index, is_finished=True, was_there=index not in plan.copies, is_copy=index in plan.copies)
        submit(todo)
        for index, error in runs_pool.ends():
            if error is not None:
                failures[index] = error
            note(index, is_finished=error is None, error=error)
            if error is None:
                submit(plan.missing(plan.released_by(index)))
    finally:
        runs_pool.close()
    plan.note(failures)
    left = [index for index in range(len(points)) if index not in failures and index not in plan.copies]
    return SweepResult(
        [RunData.load(points[index][2], points[index][0].label) for index in left],
        [(points[index][0].label, error) for index, error in sorted(failures.items())],
        [(points[copy][0].label, points[kept][0].label) for copy, kept in sorted(plan.copies.items())],
    )


class _Plan:
    """Points to run, with one point per group of seeds that give the same run."""

    def __init__(
        self,
        points: Sequence[tuple[SweepPoint, ExperimentConfig, Path]],
        settings: Sequence[SettingSeeds],
        overwrite: bool,
    ) -> None:
        self._points = points
        self._settings = settings
        self._overwrite = overwrite
        self.copies = {copy: kept for own in settings for kept in own.kept for copy in own.copies_of(kept)}
        """For each point that is not run, the point with the equal run."""

    def kept(self) -> list[int]:
        """Return the points with a run of their own, finished or not.

        If a finished run turns out to have used its seed, the points that were expected to repeat it are included.
        """
        for kept in sorted(set(self.copies.values())):
            if self._is_finished(kept):
                self.released_by(kept)
        return [index for index in range(len(self._points)) if index not in self.copies]

    def missing(self, wanted: Sequence[int]) -> list[int]:
        """Return the points in `wanted` that are not finished."""
        return [index for index in wanted if not self._is_finished(index)]

    def released_by(self, index: int) -> list[int]:
        """Return the points that were expected to repeat the run of this finished point, if that run used its seed
        after all, and remove them from `copies`; return an empty list otherwise.
        """
        own = [copy for copy, kept in self.copies.items() if kept == index]
        if not own or not drew_beside_workload(self._points[index][2]):
            return []
        for copy in own:
            del self.copies[copy]
        return own

    def note(self, failures: Mapping[int, str]) -> None:
        """For each run that represents several seeds, record their number in its summary."""
        for own in self._settings:
            first = tuple(self.copies.get(index, index) for index in own.points)
            for index in own.kept:
                if len(own.points) > 1 and index not in failures:
                    note_copies(self._points[index][2], SettingSeeds(own.points, first))

    def _is_finished(self, index: int) -> bool:
        _, one, path = self._points[index]
        return not self._overwrite and RunFolder(path).is_finished(one)
