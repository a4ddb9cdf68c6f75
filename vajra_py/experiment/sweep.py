"""Run a sweep over several cores and resume it after an interruption."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.queues import Queue as ProcessQueue
from pathlib import Path
from queue import Empty
from typing import Any, TypeAlias

from vajra_py.config import ExperimentConfig, SweepPoint, config_from_mapping, expand_sweep
from vajra_py.errors import RunInterrupted, VajraError
from vajra_py.experiment.folder import RunFolder
from vajra_py.experiment.run import run_experiment
from vajra_py.metrics.run_data import RunData
from vajra_py.plugins import Registry, load_registry

_POLL_S = 0.2
_REPORT_EVERY = 50


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


SweepProgress: TypeAlias = Callable[[int, PointStatus], None]
"""Called with the point's position and how it stands."""
_Message: TypeAlias = tuple[int, int, int, float]


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What became of a sweep: its runs in order, and the points that failed with their reasons."""

    runs: Sequence[RunData]
    failures: Sequence[tuple[str, str]]


def sweep_points(
    config: ExperimentConfig, registry: Registry | None = None
) -> list[tuple[SweepPoint, ExperimentConfig, Path]]:
    """Every point with its settings and its folder, `<output.dir>/<name>/<point>`."""
    base = config.output_dir / config.name
    return [(point, one, base / point.point_id) for point, one in expand_sweep(config, registry)]


def sweep(
    config: ExperimentConfig,
    *,
    workers: int | None = None,
    registry: Registry | None = None,
    progress: SweepProgress | None = None,
    overwrite: bool = False,
) -> SweepResult:
    """Run every point of the sweep; points that are finished already are kept.

    Simulations run several at once, one a core unless `workers` says otherwise; points on a device one after the other, as
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
    num_workers = min(workers or (1 if alone else os.cpu_count() or 1), max(len(todo), 1))
    runner = partial(_one_by_one, registry) if num_workers == 1 else _side_by_side
    failures: dict[int, str] = {}
    for index, error in runner(points, todo, num_workers, progress, overwrite):
        if error is not None:
            failures[index] = error
        if progress is not None:
            progress(index, PointStatus(points[index][0].label, is_finished=error is None, error=error))
    runs = [RunData.load(path, point.label) for index, (point, _, path) in enumerate(points) if index not in failures]
    return SweepResult(runs, [(points[index][0].label, error) for index, error in sorted(failures.items())])


_Points: TypeAlias = list[tuple[SweepPoint, ExperimentConfig, Path]]
_Ends: TypeAlias = Iterator[tuple[int, str | None]]


def _one_by_one(
    registry: Registry,
    points: _Points,
    todo: Sequence[int],
    num_workers: int,
    progress: SweepProgress | None,
    overwrite: bool,
) -> _Ends:
    for index in todo:
        point, config, path = points[index]

        def report(done: int, total: int, now: float, index: int = index, label: str = point.label) -> None:
            if progress is not None and done % _REPORT_EVERY == 0:
                progress(index, PointStatus(label, done, total, now))

        try:
            run_experiment(config, folder=path, registry=registry, progress=report, overwrite=overwrite)
        except RunInterrupted:
            raise
        except VajraError as error:
            yield index, str(error)
        else:
            yield index, None


def _side_by_side(
    points: _Points, todo: Sequence[int], num_workers: int, progress: SweepProgress | None, overwrite: bool
) -> _Ends:
    context = get_context("spawn")
    messages: ProcessQueue[_Message] = context.Queue()
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_set_up_worker, initargs=(messages,))
    try:
        waiting: dict[Future[str | None], int] = {}
        for index in todo:
            _, config, path = points[index]
            settings = config.model_dump(mode="json", by_alias=True, exclude_none=True)
            waiting[pool.submit(_run_point, index, settings, path, overwrite)] = index
        while waiting:
            done, _ = wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            _drain(messages, points, progress)
            for future in done:
                yield waiting.pop(future), future.result()
    except (KeyboardInterrupt, GeneratorExit):
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise RunInterrupted("interrupted; finished points are kept, run the same sweep again to go on") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _drain(messages: ProcessQueue[_Message], points: _Points, progress: SweepProgress | None) -> None:
    while True:
        try:
            index, done, total, now = messages.get_nowait()
        except Empty:
            return
        if progress is not None:
            progress(index, PointStatus(points[index][0].label, done, total, now))


_messages: ProcessQueue[_Message] | None = None


def _set_up_worker(messages: ProcessQueue[_Message]) -> None:
    global _messages
    _messages = messages


def _run_point(index: int, settings: dict[str, Any], path: Path, overwrite: bool) -> str | None:
    """In a worker process: run one point; the error's text when it fails."""

    def report(done: int, total: int, now: float) -> None:
        if _messages is not None and done % _REPORT_EVERY == 0:
            _messages.put((index, done, total, now))

    try:
        run_experiment(config_from_mapping(settings), folder=path, progress=report, overwrite=overwrite)
    except VajraError as error:
        return str(error)
    return None
