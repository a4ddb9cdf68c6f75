"""Pools that execute runs: in this process, in processes of this machine, or (`vajra_py.cluster`) on a Ray cluster.

A pool accepts tasks, identified by numbers that the caller chooses, and yields them as they end; meanwhile it reports
the progress of running tasks. Results are written to the tasks' folders, with the same bytes wherever a task is
executed.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.queues import Queue as ProcessQueue
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from vajra_py.config import ExperimentConfig, config_from_mapping
from vajra_py.config.load import effective_settings
from vajra_py.errors import RunError, RunInterrupted, VajraError
from vajra_py.experiment.runs.backend import MakeBackend, Progress
from vajra_py.experiment.runs.backends import make_backend
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.plugins import Registry

if TYPE_CHECKING:
    from vajra_py.experiment.runs.divided import Part

_POLL_S = 0.2
_REPORT_EVERY = 50
INTERRUPTED = "interrupted; finished runs are kept, give the same command again to go on"


@dataclass(frozen=True, slots=True)
class RunTask:
    """Run to execute: its settings and the folder of its results."""

    config: ExperimentConfig
    path: Path
    overwrite: bool = False
    part: Part | None = None
    """Part of the run to execute; None for the whole run."""

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration as plain values, for another process."""
        return effective_settings(self.config)


TaskProgress: TypeAlias = Callable[[int, int, int, float], None]
"""Called with (task number, ended requests, total requests, seconds on the run's clock)."""
End: TypeAlias = tuple[int, "str | None"]
"""(Task number, error text; None if the task succeeded)."""


MakePool: TypeAlias = Callable[["TaskProgress | None"], "RunPool"]
"""Function that creates a pool. The pool reports the progress of its tasks to the given function, if any."""


class RunPool(Protocol):
    """Pool that executes runs."""

    def submit(self, number: int, task: RunTask) -> None:
        """Submit a task; also allowed while iterating over `ends`."""

    def ends(self) -> Iterator[End]:
        """Yield tasks as they end. Raises `RunInterrupted` if the user interrupts the runs; finished runs are kept."""

    def close(self) -> None:
        """Release the pool's resources."""


class InProcess:
    """Pool that runs tasks one after the other in this process, so that a registry with policies that are not installed
    can be used.
    """

    def __init__(
        self, registry: Registry, progress: TaskProgress | None = None, backend: MakeBackend = make_backend
    ) -> None:
        """`backend` creates the backend of each run."""
        self._registry = registry
        self._progress = progress
        self._backend = backend
        self._tasks: deque[tuple[int, RunTask]] = deque()

    def submit(self, number: int, task: RunTask) -> None:
        """See `RunPool`."""
        self._tasks.append((number, task))

    def ends(self) -> Iterator[End]:
        """See `RunPool`."""
        while self._tasks:
            number, task = self._tasks.popleft()

            every = _REPORT_EVERY if task.config.backend.kind == "simulator" else 1

            def report(done: int, total: int, now: float, number: int = number, every: int = every) -> None:
                if self._progress is not None and done % every == 0:
                    self._progress(number, done, total, now)

            try:
                run_experiment(
                    task.config,
                    folder=task.path,
                    registry=self._registry,
                    progress=report,
                    overwrite=task.overwrite,
                    backend=backend_of(task.part, self._backend),
                )
            except RunInterrupted:
                raise
            except VajraError as error:
                yield number, str(error)
            else:
                yield number, None

    def close(self) -> None:
        """Do nothing; the pool has no resources."""


_Message: TypeAlias = tuple[int, int, int, float]


class Processes:
    """Pool that runs tasks concurrently in processes of this machine."""

    def __init__(self, num_workers: int, progress: TaskProgress | None = None) -> None:
        context = get_context("spawn")
        self._progress = progress
        self._messages: ProcessQueue[_Message] = context.Queue()
        self._pool = ProcessPoolExecutor(
            num_workers, mp_context=context, initializer=_set_up_worker, initargs=(self._messages,)
        )
        self._waiting: dict[Future[str | None], int] = {}

    def submit(self, number: int, task: RunTask) -> None:
        """See `RunPool`."""
        with _interrupts_held():
            future = self._pool.submit(_execute, number, task.settings, task.path, task.overwrite, task.part)
        self._waiting[future] = number

    def ends(self) -> Iterator[End]:
        """See `RunPool`."""
        try:
            while self._waiting:
                done, _ = wait(self._waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                self._drain()
                for future in done:
                    yield self._waiting.pop(future), _result(future)
        except KeyboardInterrupt:
            raise RunInterrupted(INTERRUPTED) from None

    def close(self) -> None:
        """End the processes; unfinished tasks are dropped and their workers terminated.

        If all tasks have ended, wait for workers that are still starting, because they would fail without their queues.
        """
        if self._waiting:
            for process in list((self._pool._processes or {}).values()):
                process.terminate()
        self._pool.shutdown(wait=not self._waiting, cancel_futures=True)

    def _drain(self) -> None:
        while True:
            try:
                message = self._messages.get_nowait()
            except Empty:
                return
            if self._progress is not None:
                self._progress(*message)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Defer Ctrl-C within the context, and make processes that are started in the context ignore it.

    A terminal sends Ctrl-C to the whole process group, but this process must end the workers itself.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _result(future: Future[str | None]) -> str | None:
    try:
        return future.result()
    except BrokenProcessPool:
        lost = "a worker process was killed (by the system, when memory is short). Finished runs are kept; try fewer workers"
        raise RunError(f"workers: {lost}.") from None


_messages: ProcessQueue[_Message] | None = None


def _set_up_worker(messages: ProcessQueue[_Message]) -> None:
    global _messages
    _messages = messages


def _execute(number: int, settings: dict[str, Any], path: Path, overwrite: bool, part: Part | None) -> str | None:
    """Execute a task in a worker process; return the error's text if it fails."""

    def report(done: int, total: int, now: float) -> None:
        if _messages is not None and done % _REPORT_EVERY == 0:
            _messages.put((number, done, total, now))

    return execute_task(settings, path, overwrite, report, part)


def execute_task(
    settings: dict[str, Any],
    path: Path,
    overwrite: bool,
    progress: Callable[[int, int, float], None],
    part: Part | None = None,
) -> str | None:
    """Execute a run, or a part of it, from plain settings; return the error's text if it fails."""
    config, backend = config_from_mapping(settings), backend_of(part)
    try:
        run_experiment(config, folder=path, progress=progress, overwrite=overwrite, backend=backend)
    except VajraError as error:
        return str(error)
    return None


def backend_of(part: Part | None, whole: MakeBackend = make_backend) -> MakeBackend:
    """Return the backend factory of a part of a run; `whole` for an undivided run."""
    if part is None:
        return whole
    from vajra_py.experiment.runs.divided import PartOfRun

    return lambda run: PartOfRun(run, part)


def local_pool(num_workers: int | None, num_tasks: int, registry: Registry, progress: TaskProgress | None) -> RunPool:
    """Create a pool of this machine, with one worker per core unless `num_workers` is given, and no more workers than
    tasks. A single worker runs in this process.
    """
    count = min(num_workers or os.cpu_count() or 1, max(num_tasks, 1))
    return InProcess(registry, progress) if count == 1 else Processes(count, progress)


def run_in_pool(pool: MakePool, task: RunTask, progress: Progress | None = None) -> RunData:
    """Execute one run in a pool and open its results. Raises `RunError` when it fails."""

    def report(number: int, done: int, total: int, now: float) -> None:
        assert progress is not None
        progress(done, total, now)

    runs = pool(None if progress is None else report)
    try:
        runs.submit(0, task)
        for _, error in runs.ends():
            if error is not None:
                raise RunError(error)
    finally:
        runs.close()
    return RunData.load(task.path)
