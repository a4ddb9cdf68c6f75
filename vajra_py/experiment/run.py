"""Run one experiment into a folder of results; whatever happens, what was reached is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from vajra_py.config import ExperimentConfig
from vajra_py.contract.observer import Observer
from vajra_py.errors import ConfigError, Problem, RunInterrupted, VajraError
from vajra_py.experiment.backend import Backend, MakeBackend, Progress, Run, make_backend
from vajra_py.experiment.device_figures import devices_of
from vajra_py.experiment.folder import FAILED, FINISHED, INTERRUPTED, RunFolder
from vajra_py.metrics.changes import Changes
from vajra_py.metrics.costs import cost_sections
from vajra_py.metrics.definitions import Floats, Window
from vajra_py.metrics.intervals import mser5
from vajra_py.metrics.recorder import Recorder
from vajra_py.metrics.run_data import RunData
from vajra_py.metrics.run_warnings import rate_warnings
from vajra_py.metrics.summary import summarise
from vajra_py.metrics.tables import write_parquet
from vajra_py.plugins import Registry, build_observer, load_registry
from vajra_py.runtime.records.decision_log import DecisionLog
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.workload import Workload, build_workload

WARMUP_OFF = (0.0, 0)


def run_experiment(
    config: ExperimentConfig,
    *,
    folder: Path | None = None,
    registry: Registry | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    backend: MakeBackend = make_backend,
) -> RunData:
    """Run one experiment (without a sweep) and return its results; a finished run of the same settings is not repeated.

    Raises `ConfigError` before anything is written when the experiment cannot be built or its folder holds other results;
    a failure or an interruption later leaves the tables so far in the folder, marked in its manifest, and is raised on.
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
    devices_of(config)  # a wrong name under `costs` is found before anything is run
    seeds = SeedTree(config.seed)
    run = Run(config, registry, load_workload(config), seeds, progress)
    prepared = backend(run)
    try:
        place.start(config, registry, overwrite=overwrite)
        prepared.prepare(place.path)
        _Attempt(run, prepared, place).execute()
    finally:
        prepared.close()
    return RunData.load(place.path)


def load_workload(config: ExperimentConfig) -> Workload:
    """The experiment's workload; the same for every experiment with the same seed and workload settings."""
    return build_workload(config.workload, SeedTree(config.seed).child("workload").stream, Path.cwd())


class _Attempt:
    """One execution and its outputs."""

    def __init__(self, run: Run, backend: Backend, place: RunFolder) -> None:
        self._run = run
        self._backend = backend
        self._place = place
        controller = backend.controller
        self._recorder = Recorder(_num_blocks(controller), run.config.output.steps)
        self._log = DecisionLog(place.path / "decisions.parquet") if run.config.output.decision_log else None
        self._changes = Changes()
        self._observers: list[Observer] = [self._recorder]
        if run.config.backend.kind != "simulator":  # in which nothing is changed, and every observer costs time
            self._observers.append(self._changes)
        if self._log is not None:
            self._observers.append(self._log)
        self._observers += [build_observer(one.type, one.parameters, run.registry) for one in run.config.observers]
        controller.watch(self._observers)

    def execute(self) -> None:
        """Run, and write what came of it."""
        try:
            outcome = self._backend.start()
        except KeyboardInterrupt:
            self._write()
            self._place.note(INTERRUPTED, **self._facts())
            raise RunInterrupted(f"interrupted; what was reached is in {self._place.path}") from None
        except Exception as error:  # whatever failed, what was reached is kept
            self._write()
            self._place.note(FAILED, error=_said(error), **self._facts())
            raise
        self._write()
        self._place.note(FINISHED, **self._facts(), **outcome.facts)

    def _facts(self) -> dict[str, object]:
        seconds, num_steps = self._backend.position()
        controller = self._backend.controller
        return {
            "ended_at_s": seconds,
            "num_steps": num_steps,
            "num_submitted": controller.num_submitted,
            "num_ended": {reason.value: count for reason, count in sorted(controller.num_ended.items(), key=str)},
            "num_unfinished": len(controller.alive()),
            "workload": {"num_requests": len(self._run.workload), **self._run.workload.source},
            **self._changes.facts(),
        }

    def _write(self) -> None:
        recorder, path = self._recorder, self._place.path
        seconds, _ = self._backend.position()
        for observer in self._observers:
            observer.on_run_end(seconds)
        recorder.record_unfinished(self._backend.controller.alive())
        if self._log is not None:
            self._log.close()
        write_parquet(recorder.requests, path / "requests.parquet")
        write_parquet(recorder.steps, path / "steps.parquet")
        write_parquet(recorder.tbt, path / "tbt.parquet")
        requests, steps, tbt = recorder.requests.to_table(), recorder.steps.to_table(), recorder.tbt.to_table()
        arrived_at, e2e_s = (requests.column(name).to_numpy() for name in ("arrived_at", "e2e_s"))
        window = self._window(arrived_at, e2e_s, seconds)
        summary = summarise(requests, steps, tbt, window)
        summary = summary.with_warnings(rate_warnings(summary.data, _asked_rate(self._run.config)))
        summary = summary.with_step_times(self._backend.step_times.to_mapping())
        devices = devices_of(self._run.config)
        if devices:
            summary = summary.with_sections(cost_sections(devices, summary.data, steps))
        (path / "summary.json").write_text(summary.to_json())

    def _window(self, arrived_at: Floats, e2e_s: Floats, ended_at: float) -> Window | None:
        settings = self._run.config.backend.settings
        warmup_s, warmup_requests = getattr(settings, "warmup_s", 0.0), getattr(settings, "warmup_requests", 0)
        if not len(arrived_at) or (warmup_s, warmup_requests) == WARMUP_OFF:
            return None
        start = float(arrived_at[0]) + warmup_s
        if warmup_requests == "auto":
            done = np.flatnonzero(np.isfinite(e2e_s))
            cut = mser5(e2e_s[done])
            warmup_requests = int(done[cut]) if cut else 0
        if warmup_requests:
            start = max(start, float(arrived_at[min(warmup_requests, len(arrived_at) - 1)]))
        return Window(start, max(start, ended_at))


def _asked_rate(config: ExperimentConfig) -> float | None:
    """Requests per second that the workload was asked to come at: its `rate`, or that of the arrivals of single requests."""
    asked = config.workload.rate
    if asked is None and config.workload.type == "synthetic" and config.workload.time_scale is None:
        asked = getattr(config.workload.arrivals, "rate", None)
    return asked


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, VajraError) else f"{type(error).__name__}: {error}"


def _num_blocks(controller: Controller) -> Callable[[str], int]:
    sizes = {name: one.replicas[0].memory.num_blocks for name, one in controller.replicasets.items()}
    return sizes.__getitem__
