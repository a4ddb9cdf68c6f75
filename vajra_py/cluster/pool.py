"""Worker pool that executes runs on a Ray cluster.

Results are returned as the files of a run's folder, so nodes need no shared disk, and each folder is written atomically
once its run has ended. A run whose worker or node is lost is executed again elsewhere.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vajra_py.cluster.connect import RayCluster
from vajra_py.cluster.files import MANIFEST, Shipment, Workspace, unpack
from vajra_py.cluster.node import ProgressCollector, RemoteResult, RemoteRun, execute_run, remove_workspace
from vajra_py.config.manifest import git_state
from vajra_py.errors import RunError, RunInterrupted, VajraError
from vajra_py.experiment.runs.folder import RunFolder, files_digest
from vajra_py.experiment.runs.pool import INTERRUPTED, End, RunTask, TaskProgress

_log = logging.getLogger(__name__)
_POLL_S = 0.2
_EMPTY_POLLS = 300
"""Maximum number of consecutive polls (about a minute) that find no CPU in the cluster; after more, the pool fails."""
MOST_LOSSES = 3
"""Maximum number of times that a run's worker or node may be lost."""
_REMOVE_S = 2.0


class RayPool:
    """Worker pool on a cluster, with one run at a time for each CPU."""

    def __init__(
        self, cluster: RayCluster, num_workers: int | None = None, progress: TaskProgress | None = None
    ) -> None:
        """`num_workers` is the maximum number of concurrent runs; None for the number of CPUs of the cluster."""
        self._cluster, self._ray = cluster, cluster.ray
        self._most = num_workers
        self._progress = progress
        self._shipment = Shipment(self._ray.put)
        context = self._ray.get_runtime_context()
        # The name is unique to this pool: nodes may still be removing the previous pool's workspace.
        self._workspace = Workspace(f"vajra-{uuid4().hex}", os.getcwd())
        self._execute = self._ray.remote(num_cpus=1, max_retries=0)(execute_run)
        # The collector is placed beside this process: on a compute node it would occupy a worker process.
        beside_asker = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=True)
        actor = self._ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=beside_asker)(ProgressCollector)
        self._collector: Any = None if progress is None else actor.remote()
        self._asked: Any = None
        self._tasks: dict[int, RunTask] = {}
        self._queue: deque[int] = deque()
        self._running: dict[Any, int] = {}
        self._refused: deque[End] = deque()
        self._losses: dict[int, int] = {}
        self._git = git_state(Path.cwd())
        self._num_empty = 0

    def submit(self, number: int, task: RunTask) -> None:
        """Queue a run; see `RunPool`. Raises `OSError` at once if the results could not be written."""
        _check_writable(task.path)
        place = RunFolder(task.path)
        try:
            if place.is_finished(task.config) and not task.overwrite:
                self._refused.append((number, None))
                return
            place.check(task.config, overwrite=task.overwrite)
        except VajraError as error:
            self._refused.append((number, str(error)))
            return
        self._tasks[number] = task
        self._queue.append(number)

    def ends(self) -> Iterator[End]:
        """Yield the end of each run when it occurs; see `RunPool`."""
        try:
            while self._refused or self._queue or self._running:
                while self._refused:
                    yield self._refused.popleft()
                self._launch()
                if self._running:
                    done, _ = self._ray.wait(list(self._running), timeout=_POLL_S)
                    self._report()
                    self._check_alive(is_idle=not done)
                    for reference in done:
                        yield from self._take(reference)
        except KeyboardInterrupt:
            raise RunInterrupted(INTERRUPTED) from None
        except (ConnectionError, self._ray.exceptions.RayError) as error:
            what = f"--on: the cluster is lost ({_last_line(error).rstrip('.')})"
            raise RunError(f"{what}. Finished runs are kept; repeat the same command to continue.") from None

    def close(self) -> None:
        """Cancel runs, and remove the workspaces from the nodes; see `RunPool`."""
        if not self._cluster.is_there:
            return
        try:
            for reference in self._running:
                self._ray.cancel(reference, force=True)
            if self._collector is not None:
                self._ray.kill(self._collector)
            self._ray.wait(removals := self._removals(), num_returns=len(removals), timeout=_REMOVE_S)
        except Exception:  # the cluster is lost: its nodes keep the files, and no run is left to cancel
            _log.debug("files of runs stay on a node", exc_info=True)

    def _removals(self) -> list[Any]:
        remove = self._ray.remote(num_cpus=0, max_retries=0)(remove_workspace)
        affinities = [NodeAffinitySchedulingStrategy(one["NodeID"], soft=False) for one in self._cluster.nodes()]
        return [remove.options(scheduling_strategy=one).remote(self._workspace) for one in affinities]

    def _launch(self) -> None:
        while self._queue and (self._most is None or len(self._running) < self._most):
            number = self._queue.popleft()
            task = self._tasks[number]
            try:
                files = self._shipment.files_of(task.config)
            except VajraError as error:
                self._refused.append((number, str(error)))
                continue
            run = RemoteRun(number, task.settings, files, self._workspace, self._cluster.fingerprint, task.part)
            self._running[self._execute.remote(run, self._collector)] = number

    def _take(self, reference: Any) -> Iterator[End]:
        """Yield the end of a run, or nothing if the run is repeated."""
        number = self._running.pop(reference)
        try:
            result: RemoteResult = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            yield number, f"an error on a node: {_last_line(error)}"
            return
        except self._ray.exceptions.RayError as error:
            self._losses[number] = count = self._losses.get(number, 0) + 1
            if count <= MOST_LOSSES:
                _log.warning("a worker or node was lost; its run is executed again (%s)", _last_line(error))
                self._queue.append(number)
            else:
                yield number, f"its worker was lost {count} times ({_last_line(error)})"
            return
        task = self._tasks.pop(number)
        if MANIFEST in result.files:
            unpack(self._completed(result.files, task), task.path)
        yield number, result.error

    def _completed(self, files: dict[str, bytes], task: RunTask) -> dict[str, bytes]:
        """Return the files with facts of this machine added: the state of the current folder, and digests of the input
        files.
        """
        facts = json.loads(files[MANIFEST]) | {"git": self._git, "files": files_digest(task.config)}
        return files | {MANIFEST: (json.dumps(facts, indent=1, sort_keys=True) + "\n").encode()}

    def _report(self) -> None:
        """Forward new progress reports without blocking."""
        if self._collector is None or self._progress is None:
            return
        if self._asked is not None:
            ready, _ = self._ray.wait([self._asked], timeout=0)
            if not ready:
                return
            try:
                messages = self._ray.get(self._asked)
            except self._ray.exceptions.RayError:
                # The collector's node is lost; Ray restarts the collector on another one.
                messages = []
            running = set(self._running.values())
            for message in messages:
                if message[0] in running:
                    self._progress(*message)
        self._asked = self._collector.take.remote()

    def _check_alive(self, *, is_idle: bool) -> None:
        """Raise `RunError` if the cluster has had no CPU for more than `_EMPTY_POLLS` polls."""
        self._num_empty = self._num_empty + 1 if is_idle and not self._cluster.num_cpus else 0
        if self._num_empty > _EMPTY_POLLS:
            raise RunError("--on: the cluster has no node left to compute on. Finished runs are kept.")


def _check_writable(path: Path) -> None:
    there = next(one for one in path.parents if one.exists())
    wrong = errno.ENOTDIR if not there.is_dir() else 0 if os.access(there, os.W_OK) else errno.EACCES
    if wrong:
        raise OSError(wrong, os.strerror(wrong), str(there))


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
