"""Code that runs on the nodes of a cluster: execution of runs, and collection of their progress."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ray

from vajra_py.cluster.files import ShippedFile, Workspace, packed
from vajra_py.cluster.fingerprint import EVERY_NODE, difference, fingerprint
from vajra_py.errors import VajraError
from vajra_py.experiment.runs.divided import Part
from vajra_py.experiment.runs.pool import execute_task

_REPORT_S = 0.25


@dataclass(frozen=True, slots=True)
class RemoteRun:
    """Run to execute on a node: its settings as plain values, and its input files."""

    number: int
    settings: dict[str, Any]
    files: list[ShippedFile]
    workspace: Workspace
    fingerprint: Mapping[str, str]
    """Fingerprint of the submitting machine, checked again because a node may have joined after the first check."""
    part: Part | None = None


@dataclass(frozen=True, slots=True)
class RemoteResult:
    """Files of a run's folder, and the error text if the run failed."""

    files: dict[str, bytes]
    error: str | None


class ProgressCollector:
    """Actor that collects the progress of runs: nodes report to it, and the submitting machine polls it."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[int, int, int, float]] = {}

    def report(self, number: int, done: int, total: int, now: float) -> None:
        """Record a run's progress: ended requests, total requests, and seconds on the run's clock."""
        self._latest[number] = number, done, total, now

    def take(self) -> list[tuple[int, int, int, float]]:
        """Return the latest report of each run that has reported since the last call."""
        latest, self._latest = self._latest, {}
        return list(latest.values())


@cache
def _own_fingerprint() -> Mapping[str, str]:
    return fingerprint()


def execute_run(run: RemoteRun, collector: Any) -> RemoteResult:
    """Execute a run in a separate folder and return its files; `collector` is the `ProgressCollector` actor, or None to
    report no progress.
    """
    if differs := difference(run.fingerprint, _own_fingerprint()):
        return RemoteResult({}, f"node {ray.util.get_node_ip_address()}: {differs}. {EVERY_NODE}")
    reported_at = 0.0

    def report(done: int, total: int, now: float) -> None:
        nonlocal reported_at
        moment = time.monotonic()
        if collector is not None and moment - reported_at >= _REPORT_S:
            reported_at = moment
            collector.report.remote(run.number, done, total, now)

    try:
        with tempfile.TemporaryDirectory(prefix="vajra-run-") as folder:
            path = Path(folder) / "run"
            try:
                run.workspace.enter(run.files, ray.get)
                error = execute_task(run.settings, path, False, report, run.part)
            except VajraError as problem:
                error = str(problem)
            return RemoteResult(run.workspace.as_asked(packed(path)), run.workspace.text_as_asked(error))
    finally:
        os.chdir("/")  # leave the workspace, which may be removed while this process waits for a run


def remove_workspace(workspace: Workspace) -> None:
    """Remove the workspace from this node."""
    workspace.remove()
