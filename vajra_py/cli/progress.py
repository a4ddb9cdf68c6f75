"""Progress of runs on a terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from vajra_py.cli.options import new_progress

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from vajra_py.experiment.runs.point_status import PointStatus

_MIN_RENDER_S = 0.1
_MIN_RUN_S = 0.2
"""Time after which a single run gets a bar, seconds: shorter runs are not worth importing rich, which is slow."""


class RunsDisplay:
    """One bar for all runs, and one per active run: finished requests, simulated time, and speed."""

    def __init__(self, num_runs: int, quiet: bool, *, is_simulated: bool = True, lists_kept: bool = True) -> None:
        """Create the display.

        Args:
            num_runs: number of runs, finished ones included.
            quiet: True to show nothing.
            is_simulated: True to show simulated time and speed.
            lists_kept: True to name each run that had been finished before.
        """
        self._lists_kept = lists_kept
        self._is_simulated = is_simulated
        self._quiet = quiet
        self._progress: Progress | None = None
        self._num_runs = num_runs
        self._all: TaskID | None = None
        self._tasks: dict[int, TaskID] = {}
        self._started: dict[int, float] = {}
        self._shown_at: dict[int, float] = {}

    def __enter__(self) -> RunsDisplay:
        if not self._quiet and self._num_runs > 1:
            self._progress = new_progress()
            self._progress.start()
            self._all = self._progress.add_task("all runs", total=self._num_runs, note="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def point(self, index: int, status: PointStatus) -> None:
        """Show the status of one point of the sweep."""
        if self._quiet:
            return
        if status.is_finished or status.error is not None:
            self._end(index, status)
            return
        now = time.monotonic()
        elapsed = now - self._started.setdefault(index, now)
        if self._progress is None:
            if elapsed < _MIN_RUN_S:
                return
            self._progress = new_progress()
            self._progress.start()
        progress = self._progress
        if index not in self._tasks:
            self._tasks[index] = progress.add_task(status.values_label, total=status.num_total or None, note="")
        if now - self._shown_at.get(index, 0.0) < _MIN_RENDER_S:
            return
        self._shown_at[index] = now
        note = f"{status.now_s:,.0f} s simulated" if self._is_simulated else f"{status.now_s:,.0f} s"
        if self._is_simulated and elapsed >= _MIN_RENDER_S:
            note += f", {status.now_s / elapsed:,.0f} x real time"
        progress.update(self._tasks[index], total=status.num_total, completed=status.num_done, note=note)

    def _end(self, index: int, status: PointStatus) -> None:
        progress = self._progress
        task = self._tasks.pop(index, None)
        if progress is not None and task is not None:
            if self._num_runs > 1:
                progress.remove_task(task)
            else:
                total = progress.tasks[task].total
                progress.update(task, completed=total if status.error is None else None)
        if progress is not None and self._all is not None:
            progress.advance(self._all)
        if status.was_there and self._lists_kept:
            text = f"was finished: {status.values_label}"
            click.echo(text, err=True) if progress is None else progress.console.print(text)
