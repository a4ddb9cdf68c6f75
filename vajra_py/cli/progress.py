"""Progress of runs on a terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vajra_py.cli.options import new_progress

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from vajra_py.experiment.runs.sweep import PointStatus

_MIN_RENDER_S = 0.1


class RunsDisplay:
    """One bar for all runs, and one per active run: finished requests, simulated time, and speed."""

    def __init__(self, num_runs: int, quiet: bool, *, is_simulated: bool = True, lists_kept: bool = True) -> None:
        """`lists_kept`: name each run that was finished before."""
        self._lists_kept = lists_kept
        self._is_simulated = is_simulated
        self._progress: Progress | None = None if quiet else new_progress()
        self._num_runs = num_runs
        self._all: TaskID | None = None
        self._tasks: dict[int, TaskID] = {}
        self._started: dict[int, float] = {}
        self._shown_at: dict[int, float] = {}

    def __enter__(self) -> RunsDisplay:
        if self._progress is not None and self._num_runs > 1:
            self._progress.start()
            self._all = self._progress.add_task("all runs", total=self._num_runs, note="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None and self._progress.live.is_started:
            self._progress.stop()

    def point(self, index: int, status: PointStatus) -> None:
        """Show the status of a point."""
        progress = self._progress
        if progress is None:
            return
        if status.is_finished or status.error is not None:
            self._end(progress, index, status)
            return
        now = time.monotonic()
        if index not in self._tasks:
            progress.start()
            self._tasks[index] = progress.add_task(status.values_label, total=status.num_total or None, note="")
            self._started[index] = now
        if now - self._shown_at.get(index, 0.0) < _MIN_RENDER_S:
            return
        self._shown_at[index] = now
        elapsed = now - self._started[index]
        note = f"{status.now_s:,.0f} s simulated" if self._is_simulated else f"{status.now_s:,.0f} s"
        if self._is_simulated and elapsed >= _MIN_RENDER_S:
            note += f", {status.now_s / elapsed:,.0f} x real time"
        progress.update(self._tasks[index], total=status.num_total, completed=status.num_done, note=note)

    def _end(self, progress: Progress, index: int, status: PointStatus) -> None:
        task = self._tasks.pop(index, None)
        if task is not None and self._num_runs > 1:
            progress.remove_task(task)
        elif task is not None:
            total = progress.tasks[task].total
            progress.update(task, completed=total if status.error is None else None)
        if self._all is not None:
            progress.advance(self._all)
        if status.was_there and self._lists_kept:
            progress.console.print(f"was finished: {status.values_label}")
