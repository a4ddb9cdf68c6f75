"""Run one experiment into a folder of results; a failed run writes its partial results."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vajra_py.config import ExperimentConfig
from vajra_py.contract.latency import LAST_S
from vajra_py.contract.observer import Observer
from vajra_py.errors import ConfigError, Problem, RunInterrupted, VajraError, WorkloadError
from vajra_py.experiment.device_figures import devices_of
from vajra_py.experiment.runs.backend import Backend, MakeBackend, Progress, Run
from vajra_py.experiment.runs.backends import make_backend
from vajra_py.experiment.runs.folder import FAILED, FINISHED, INTERRUPTED, RunFolder
from vajra_py.experiment.runs.ideal_makespans import ideal_makespans
from vajra_py.experiment.runs.results import Tables
from vajra_py.metrics.runs.run_data import DECISIONS_FILE, RunData
from vajra_py.metrics.summary.costs import ReplicasetDevices
from vajra_py.metrics.summary.warnings import policy_notes
from vajra_py.metrics.tables.changes import Changes
from vajra_py.metrics.tables.emitted import emitted_table
from vajra_py.metrics.tables.further_columns import FurtherColumns
from vajra_py.metrics.tables.movement_log import MovementLog, paths_of
from vajra_py.metrics.tables.recorder import Recorder
from vajra_py.metrics.tables.replicas import ReplicaStates
from vajra_py.metrics.tables.tier_log import TierLog, links_of
from vajra_py.plugins import Registry, build_observer, load_registry
from vajra_py.runtime.records.admission_log import ADMISSIONS_FILE, AdmissionLog
from vajra_py.runtime.records.draft_log import DRAFTS_FILE, DraftLog
from vajra_py.runtime.records.retention_log import RETENTION_FILE, RetentionLog
from vajra_py.runtime.support.seeds import NotedSeeds, SeedTree
from vajra_py.workload import Workload, build_workload
from vajra_py.workload.fingerprint import fingerprint


def run_experiment(
    config: ExperimentConfig,
    *,
    folder: Path | None = None,
    registry: Registry | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    backend: MakeBackend = make_backend,
) -> RunData:
    """Run one experiment (without a sweep) and return its results; a finished run with equal settings is not repeated,
    unless `overwrite` is set.

    Raises `ConfigError`, before anything is written, if the experiment cannot be built or its folder contains other
    results. After a later failure or interruption, the tables recorded so far and the status in the manifest are
    written; then the failure is re-raised, or `RunInterrupted` is raised.
    """
    if not config.is_single:
        what = "replications" if config.sweep is None else "sweep"
        raise ConfigError(
            Problem(what, "this experiment is more than one run", "Use `sweep` for it, or take a point of it")
        )
    registry = registry or load_registry()
    place = RunFolder(folder if folder is not None else config.output_dir / config.name)
    if place.is_finished(config) and not overwrite:
        return RunData.load(place.path)
    place.check(config, overwrite=overwrite)
    seeds = NotedSeeds(SeedTree(config.seed))
    run = Run(config, registry, load_workload(config), seeds, progress)
    prepared = backend(run)
    try:
        devices = devices_of(config, prepared.latency_models)  # raises for unknown names under `costs`, before the run
        place.start(config, registry, overwrite=overwrite)
        prepared.prepare(place.path)
        _Attempt(run, prepared, place, seeds, devices).execute()
    finally:
        prepared.close()
        place.close()
    return RunData.load(place.path)


def load_workload(config: ExperimentConfig) -> Workload:
    """Return the experiment's workload; the same for every experiment with the same seed and workload settings."""
    workload = build_workload(config.workload, SeedTree(config.seed).child("workload").stream, Path.cwd())
    last = float(workload.columns.arrived_at.max())
    if not last <= LAST_S:
        message = f"a request arrives {last:,.0f} s after the run's begin"
        raise WorkloadError(workload.name, None, message, f"Allowed: at most {LAST_S:,.0f} s; a higher rate")
    return workload


class _Attempt:
    """One execution and its outputs."""

    def __init__(
        self,
        run: Run,
        backend: Backend,
        place: RunFolder,
        seeds: NotedSeeds,
        devices: Mapping[str, ReplicasetDevices],
    ) -> None:
        self._run = run
        self._devices = devices
        self._seeds = seeds
        self._backend = backend
        self._place = place
        controller = backend.controller
        output = run.config.output
        self._log = backend.decision_log(place.path / DECISIONS_FILE) if output.decision_log else None
        has_gate, paths = controller.gate is not None, paths_of(controller)
        movement = MovementLog(paths) if paths else None
        self._transfers = None if movement is None else movement.table
        links = links_of(controller)
        self._tiers = TierLog(links) if links else None
        has_drafts = any(one.limits.max_draft_tokens for one in controller.replicas())
        self._recorder = Recorder(
            controller.num_blocks_of,
            steps=output.steps,
            log=self._log,
            further=FurtherColumns(has_gate, has_drafts, self._transfers, self._tiers),
        )
        self._drafts = DraftLog(place.path / DRAFTS_FILE) if has_drafts else None
        self._admissions: AdmissionLog | None = None
        if has_gate and output.decision_log:
            self._admissions = AdmissionLog(place.path / ADMISSIONS_FILE)
        self._retention = RetentionLog(place.path / RETENTION_FILE) if output.decision_log else None
        self._changes = Changes()
        self._observers: list[Observer] = [self._recorder]
        self._replicas = ReplicaStates()
        if any(one.scaling is not None for one in controller.replicasets.values()):
            self._observers.append(self._replicas)
        # In a simulation no replica is lost and no policy is swapped, so the observer of changes is left out.
        if run.config.backend.kind != "simulator":
            self._observers.append(self._changes)
        logs = (self._log, self._admissions, self._retention, movement, self._tiers, self._drafts)
        self._observers += [one for one in logs if one is not None]
        self._observers += [build_observer(one.type, one.parameters, run.registry) for one in run.config.observers]
        controller.watch(self._observers)
        controller.diary.emitted.is_kept = True

    def execute(self) -> None:
        """Run the experiment and write its results."""
        try:
            outcome = self._backend.start()
        except KeyboardInterrupt:
            self._end(INTERRUPTED)
            raise RunInterrupted(f"interrupted; partial results are in {self._place.path}") from None
        except Exception as error:  # keep partial results after any failure
            self._end(FAILED, error=_error_text(error))
            raise
        self._end(FINISHED, **outcome.facts)

    def _end(self, status: str, **facts: Any) -> None:
        """Write the results and note the run's status: `status`, or failed if the results cannot be written."""
        try:
            self._write()
        except Exception as error:
            self._place.note(FAILED, error=_error_text(error), **self._facts())
            raise
        self._place.note(status, **self._facts(), **facts)

    def _facts(self) -> dict[str, object]:
        seconds, num_steps = self._backend.position()
        controller = self._backend.controller
        return {
            "ended_at_s": seconds,
            "num_steps": num_steps,
            "num_submitted": controller.num_submitted,
            "num_ended": {reason.value: count for reason, count in sorted(controller.num_ended.items(), key=str)},
            "num_unfinished": len(controller.alive()),
            "workload": {
                "num_requests": len(self._run.workload),
                **self._run.workload.source,
                "fingerprint": fingerprint(self._run.workload.columns),
            },
            "drawn_beside_workload": self._seeds.draws(),
            **self._changes.facts(),
        }

    def _write(self) -> None:
        recorder, path = self._recorder, self._place.path
        seconds, _ = self._backend.position()
        for observer in self._observers:
            observer.on_run_end(seconds)
        recorder.record_unfinished(self._backend.controller.alive())
        if self._admissions is not None:
            self._admissions.close()
        if self._retention is not None:
            self._retention.close()
        if self._drafts is not None:
            self._drafts.close()
        diary = self._backend.controller.diary
        emitted, notes = emitted_table(diary.emitted), policy_notes(diary)
        replicas = self._replicas.table(seconds)
        run, models = self._run, self._backend.latency_models
        tables = Tables(
            recorder.requests,
            recorder.steps,
            recorder.tbt,
            emitted,
            notes,
            self._devices,
            replicas,
            self._transfers,
            lambda requests: ideal_makespans(run.config, run.workload, models, requests),
            self._tiers,
        )
        with ThreadPoolExecutor(1) as beside:  # the log is encoded mostly without the GIL, while tables are written
            closing = None if self._log is None else beside.submit(self._log.close)
            self._backend.write(path, self._run.config, tables, seconds, self._backend.step_times.to_mapping())
            if closing is not None:
                closing.result()


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, VajraError) else f"{type(error).__name__}: {error}"
