"""Record a served session as a run's folder, to compare, plot and replay.

The folder is complete once the server has shut down. Until then, logs grow on disk, and only the last steps are lost if
the process is killed. Tables grow in memory, by about 200 bytes per request and per step and 8 bytes per token, so
recording is optional.

Invariants:
    - A full disk ends the recording, but not the server; the manifest then states the reason.
    - A recording that has ended uses no further memory.
    - Only the server's user can read the folder, because it contains prompts.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from vajra_py.config import SystemConfig
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.errors import ConfigError, Problem, VajraError
from vajra_py.experiment.runs.engined import ENGINE_FILE
from vajra_py.experiment.runs.folder import FAILED, FINISHED, RunFolder
from vajra_py.experiment.runs.results import with_programs
from vajra_py.metrics.summary.drafts import drafts_section
from vajra_py.metrics.summary.movement import movement_section
from vajra_py.metrics.summary.summary import summarise
from vajra_py.metrics.tables.changes import Changes
from vajra_py.metrics.tables.further_columns import FurtherColumns
from vajra_py.metrics.tables.movement_log import MovementLog, paths_of
from vajra_py.metrics.tables.recorder import Recorder
from vajra_py.metrics.tables.requests import write_parquet
from vajra_py.metrics.tables.transfers import TRANSFERS_FILE
from vajra_py.plugins import Registry
from vajra_py.runtime.records.admission_log import ADMISSIONS_FILE, AdmissionLog
from vajra_py.runtime.records.decision_log import DecisionLog
from vajra_py.runtime.records.draft_log import DRAFTS_FILE, DraftLog
from vajra_py.runtime.records.input_log import INPUTS_FILE, Input, InputLog
from vajra_py.runtime.records.output_log import OUTPUTS_FILE, OutputLog
from vajra_py.runtime.records.retention_log import RETENTION_FILE, RetentionLog
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.support.clock import to_seconds

_log = logging.getLogger(__name__)
_RECORDS_PER_BATCH = 64
"""Maximum number of steps that are lost if the process is killed."""
_RESERVE = "reserve.partial"
_RESERVE_BYTES = 2**16
"""Disk space that is reserved so that the manifest can still be written if the disk is full."""


class _Log(io.RawIOBase):
    """File that accepts all data, and discards data after a disk error."""

    def __init__(self, path: Path, notify: Callable[[OSError], None]) -> None:
        super().__init__()
        self._file = path.open("wb", buffering=0)
        self._notify = notify
        self._works = True

    def writable(self) -> bool:
        """See `io`."""
        return True

    def write(self, data: Any) -> int:
        """Write the data, or discard them if a write has failed; return their size in either case."""
        left = memoryview(data)
        size = left.nbytes
        try:
            while self._works and left.nbytes:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._works = False
            self._notify(error)
        return size

    def close(self) -> None:
        """See `io`."""
        self._file.close()
        super().close()


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """State of a session at its end.

    Attributes:
        now: Tick of the last event.
        alive: Requests that have not ended, with their tokens.
    """

    controller: Controller
    now: int
    num_steps: int
    alive: Iterable[tuple[Request, Sequence[int]]]


def check_is_free(folder: Path) -> None:
    """Raise `ConfigError` if the folder for a recording is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        problem = Problem(f"run folder {folder}", "is there already, and not empty", "A folder that is not there")
        raise ConfigError(problem)


class RunRecording:
    """Recording of one session; created before the model is loaded, so that an occupied folder is reported at once."""

    def __init__(self, config: SystemConfig, registry: Registry, folder: Path) -> None:
        check_is_free(folder)
        self._place = RunFolder(folder)
        self._place.start(config, registry, overwrite=False, is_private=True)
        (folder / _RESERVE).write_bytes(bytes(_RESERVE_BYTES))
        self._keeps_steps = config.output.steps
        self._inputs: InputLog | None = None
        self._outputs: OutputLog | None = None
        self._recorder: Recorder | None = None
        self._decisions: DecisionLog | None = None
        self._admissions: AdmissionLog | None = None
        self._movement: MovementLog | None = None
        self._retention: RetentionLog | None = None
        self._drafts: DraftLog | None = None
        self._controller: Controller | None = None
        """Controller observed by the recorder and the logs; None before `begin` and once recording has stopped."""
        self._changes = Changes()
        self.stopped = ""
        """Reason why recording has stopped; empty while it continues."""

    def _stop(self, error: Exception) -> None:
        """Stop recording after an error."""
        if not self.stopped:
            self.stopped = f"the recording stopped, and the server went on: {error}"
            _log.error("%s (%s)", self.stopped, self._place.path)

    def _keeps_on(self) -> bool:
        """Return whether recording continues; if not, remove the observers. Called between events."""
        if self.stopped and self._controller is not None:
            kept = (self._recorder, self._decisions, self._admissions, self._retention, self._drafts, self._movement)
            self._controller.unwatch([one for one in kept if one is not None])
            self._controller = self._recorder = None
        return not self.stopped

    def _open(self, path: Path) -> BinaryIO:
        return cast(BinaryIO, _Log(path, self._stop))

    @property
    def observers(self) -> Sequence[Observer]:
        """Observers that record the run."""
        logs = (self._decisions, self._admissions, self._retention, self._drafts, self._movement)
        kept = (self._recorder, *logs, self._changes)
        return [one for one in kept if one is not None]

    def begin(self, description: Mapping[str, Any], controller: Controller) -> None:
        """Begin recording after the model is loaded and before the first event; `description` has the model's sizes by
        replicaset.
        """
        import pyarrow as pa

        # Arrow's first array imports pandas, if installed. During a step, this import would take half a second.
        pa.array([0])
        path = self._place.path
        (path / ENGINE_FILE).write_text(json.dumps(description, indent=1, sort_keys=True) + "\n")
        self._decisions = DecisionLog(path / "decisions.parquet", self._open, _RECORDS_PER_BATCH)
        self._decisions.share(lambda batch: self._flush())
        has_gate, paths = controller.gate is not None, paths_of(controller)
        self._movement = MovementLog(paths) if paths else None
        has_drafts = any(one.limits.max_draft_tokens for one in controller.replicas())
        self._recorder = Recorder(
            controller.num_blocks_of,
            steps=self._keeps_steps,
            log=self._decisions,
            further=FurtherColumns(
                has_gate, has_drafts, movement=None if self._movement is None else self._movement.table
            ),
        )
        if has_drafts:
            self._drafts = DraftLog(path / DRAFTS_FILE, self._open)
        if has_gate:
            self._admissions = AdmissionLog(path / ADMISSIONS_FILE, self._open)
        self._retention = RetentionLog(path / RETENTION_FILE, self._open)
        self._controller = controller
        self._inputs = InputLog(path / INPUTS_FILE, self._open)
        self._outputs = OutputLog(path / OUTPUTS_FILE, self._open)

    def _flush(self) -> None:
        """Flush all logs except the decision log to disk, up to the last step in the decision log."""
        assert self._inputs is not None
        assert self._outputs is not None
        if not self.stopped:
            self._inputs.flush()
            self._outputs.flush()
            if self._admissions is not None:
                self._admissions.flush()
            if self._retention is not None:
                self._retention.flush()
            if self._drafts is not None:
                self._drafts.flush()

    def note(self, entry: Input) -> None:
        """Record an input of the controller."""
        assert self._inputs is not None
        if self._keeps_on():
            self._inputs.note(entry)

    def ended(self, request: Request, reason: EndReason, token_ids: Sequence[int], *, is_faulty: bool = False) -> None:
        """Record the end of a request that generated these tokens; `is_faulty`: the request ended because computing its
        next token failed.
        """
        if self._keeps_on():
            assert self._outputs is not None
            self._outputs.note(request, reason.value, token_ids, is_faulty=is_faulty)

    def finish(self, end: SessionEnd | None, error: BaseException | None) -> None:
        """Finish the recording. `end` is None if the session never began."""
        facts: dict[str, Any] = {}
        try:
            if end is not None:
                self._finish_logs(end)
                facts = self._facts(end)
                if not self.stopped:
                    self._write_tables(end)
        except Exception as failed:  # a failed recording must not fail the server, whose work is done
            self._stop(failed)
        for partial in self._place.path.glob("*.partial"):  # removed first, since this frees space on a full disk
            partial.unlink()
        reason = (
            "" if error is None else str(error) if isinstance(error, VajraError) else f"{type(error).__name__}: {error}"
        )
        why = "; ".join(one for one in (reason, self.stopped) if one)
        try:
            if why:
                self._place.note(FAILED, error=why, **facts)
            else:
                self._place.note(FINISHED, **facts)
            for file in self._place.path.iterdir():
                file.chmod(0o600)
        except OSError as failed:
            _log.error("the state of the recording cannot be written: %s", failed)
        self._place.close()

    def _finish_logs(self, end: SessionEnd) -> None:
        assert self._inputs is not None
        assert self._outputs is not None
        assert self._decisions is not None
        for request, token_ids in end.alive:
            self._outputs.note(request, "", token_ids, is_faulty=False)
        self._decisions.close()
        if self._admissions is not None:
            self._admissions.close()
        if self._retention is not None:
            self._retention.close()
        if self._drafts is not None:
            self._drafts.close()
        self._inputs.close()
        self._outputs.close()

    def _write_tables(self, end: SessionEnd) -> None:
        controller = end.controller
        recorder, path = self._recorder, self._place.path
        assert recorder is not None
        ended_at = to_seconds(end.now)
        if self._movement is not None:
            self._movement.on_run_end(ended_at)
        recorder.record_unfinished(controller.alive())
        recorder.requests.ended_at = ended_at
        write_parquet(recorder.requests, path / "requests.parquet")
        write_parquet(recorder.steps, path / "steps.parquet")
        write_parquet(recorder.tbt, path / "tbt.parquet")
        requests, steps, tbt = recorder.requests.to_table(), recorder.steps.to_table(), recorder.tbt.to_table()
        summary = summarise(requests, steps, tbt, ended_at=ended_at)
        if self._movement is not None:
            write_parquet(self._movement.table, path / TRANSFERS_FILE)
            inside = np.ones(requests.num_rows, dtype=np.bool_)
            summary = summary.with_sections(movement_section(self._movement.table.to_table(), requests, inside))
        if self._drafts is not None:
            summary = summary.with_sections(drafts_section(requests, np.ones(requests.num_rows, dtype=np.bool_)))
        summary = with_programs(summary, requests, path, ended_at) or summary
        (path / "summary.json").write_text(summary.to_json())

    def _facts(self, end: SessionEnd) -> dict[str, Any]:
        controller = end.controller
        return {
            "ended_at_s": to_seconds(end.now),
            "num_steps": end.num_steps,
            "num_submitted": controller.num_submitted,
            "num_ended": {reason.value: count for reason, count in sorted(controller.num_ended.items(), key=str)},
            "num_unfinished": controller.num_alive,
            "workload": {"num_requests": controller.num_submitted, "served": True},
            **self._changes.facts(),
        }
