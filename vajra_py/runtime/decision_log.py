"""Decision log: what the policies decided, step by step.

The same run gives the same bytes: no time of writing, and decisions come before anything that depends on the machine.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from vajra_py.contract import Observer, StepEnd, StepRecord


def open_binary(path: Path) -> BinaryIO:
    """A new file to write bytes to."""
    return path.open("wb")


class DecisionLog(Observer):
    """Writes `decisions.jsonl.gz` while the run goes on; what was written stays readable when the run breaks off."""

    wants_steps = True

    def __init__(self, path: Path, open_file: Callable[[Path], BinaryIO] = open_binary) -> None:
        self._raw = open_file(path)
        self._file = gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=self._raw, mtime=0)
        self._open: dict[tuple[str, int, int], dict[str, Any]] = {}

    def on_step_begin(self, step: StepRecord) -> None:
        """Keep what was decided until the step comes back; a step that only preempted is written at once."""
        row = step_row(step)
        if step.chunks:
            self._open[step.replicaset, step.replica_id, step.step_index] = row
        else:
            self._write(row)

    def on_step_end(self, step: StepEnd) -> None:
        """Write the step with its end."""
        row = self._open.pop((step.replicaset, step.replica_id, step.step_index))
        row["ended_at"] = step.ended_at
        row["finished"] = [[request.request_id, reason.value] for request, reason in step.finished]
        self._write(row)

    def close(self) -> None:
        """Write what never came back, and finish the file."""
        for row in self._open.values():
            self._write(row)
        self._open.clear()
        self._file.close()
        self._raw.close()

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")


def step_row(step: StepRecord) -> dict[str, Any]:
    """A step's decisions as plain values; `ended_at` is null and `finished` empty until it comes back."""
    row: dict[str, Any] = {
        "replicaset": step.replicaset,
        "replica_id": step.replica_id,
        "step": step.step_index,
        "formed_at": step.formed_at,
        "ended_at": None,
        "chunks": [
            [chunk.request.request_id, chunk.num_tokens, chunk.num_computed_before, chunk.kind] for chunk in step.chunks
        ],
        "preempted": [[request.request_id, mode] for request, mode in step.preempted],
        "finished": [],
        "free_blocks": step.free_blocks,
        "num_waiting": step.num_waiting,
        "num_running": step.num_running,
    }
    if step.notes:
        row["notes"] = {request_id: dict(scores) for request_id, scores in step.notes.items()}
    return row
