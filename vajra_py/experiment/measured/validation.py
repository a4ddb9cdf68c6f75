"""Simulate an experiment that was run on an engine, with the same requests, and compare the simulation with the
engine's run.

The simulation has the same policies, sizes and arrivals as the engine's run, and the output lengths that the engine
generated; only step times are predicted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from vajra_py.config import BackendConfig, ExperimentConfig, SimulatorConfig, TypedChoice
from vajra_py.engine.config import ModelBackendConfig
from vajra_py.errors import ConfigError, Problem, RunError
from vajra_py.experiment.measured.accuracy import Accuracy, compare_with_measured
from vajra_py.experiment.measured.files import read_measured
from vajra_py.experiment.runs.backend import Backend, Run
from vajra_py.experiment.runs.engined import ENGINE_FILE
from vajra_py.experiment.runs.folder import SIMULATED
from vajra_py.experiment.runs.replay import sized_config
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.experiment.runs.simulated import SimulatedRun
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.plugins import Registry
from vajra_py.runtime.records.json_lines import read_rows
from vajra_py.runtime.records.output_log import OUTPUTS_FILE
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.workload import Workload


def check_validation(config: ExperimentConfig) -> None:
    """Raise `ConfigError` if the experiment cannot be validated: its backend runs no model, has settings by replicaset,
    or has no latency model.
    """
    settings = config.backend.settings
    if not isinstance(settings, ModelBackendConfig):
        message = f"only what computes with a model is compared with a simulation (got {config.backend.kind})"
        raise ConfigError(Problem("backend", message, "Allowed: engine, vllm"))
    if settings.own_settings:
        message = "the simulator predicts the steps of one model, and these name several settings"
        raise ConfigError(Problem(f"backend.{settings.kind}.replicasets", message, "Allowed: none"))
    if settings.latency is None:
        message = "is needed to simulate what the engine does"
        allowed = "{type: profiled, path: FILE}, with a FILE that `vajra profile` wrote"
        raise ConfigError(Problem(f"backend.{settings.kind}.latency", message, allowed))


@dataclass(frozen=True, slots=True)
class Assumed:
    """Settings of a simulation that replace those of the engine's run.

    Attributes:
        latency: Model of the step times; None for the latency model in the engine's settings. Policies get predictions
            from the model in the engine's settings in either case.
        seed: Seed of the random variation between equal steps; None for the run's seed.
    """

    latency: TypedChoice | None = None
    seed: int | None = None


def validate(measured: RunData, config: ExperimentConfig, registry: Registry | None = None) -> Accuracy:
    """Simulate a finished run of the engine and compare the two runs; `config` is the run's configuration.

    Raises `ConfigError` (see `check_validation`), and `RunError` if the run is incomplete or a request did not receive
    its complete answer.
    """
    simulated = simulate_as_served(measured, config, registry)
    return compare_with_measured(read_measured(measured.path), simulated)


def simulate_as_served(
    measured: RunData, config: ExperimentConfig, registry: Registry | None = None, assumed: Assumed | None = None
) -> RunData:
    """Simulate a finished run of the engine; the results are in the folder `SIMULATED` below the run's folder. Raises
    the errors of `validate`.
    """
    assumed = assumed or Assumed()
    check_validation(config)
    if not measured.is_finished:
        raise RunError(str(Problem(str(measured.path), "is not a finished run", "Run it again")))
    return run_experiment(
        _simulation_of(config, measured.path, assumed.latency),
        folder=measured.path / SIMULATED,
        registry=registry,
        overwrite=True,
        backend=lambda run: _as_served(run, config, measured.path, assumed.seed),
    )


def _simulation_of(config: ExperimentConfig, path: Path, latency: TypedChoice | None) -> ExperimentConfig:
    engine: ModelBackendConfig = config.backend.settings
    assert engine.latency is not None  # ensured by `check_validation`
    facts = json.loads((path / ENGINE_FILE).read_text())
    simulator = SimulatorConfig(
        latency=latency or engine.latency,
        predictions=engine.latency if latency else None,
        output_length=engine.output_length,
        warmup_s=engine.warmup_s,
        warmup_requests=engine.warmup_requests,
    )
    sized = sized_config(config, facts)
    return sized.model_copy(
        update={"name": f"{config.name}-{SIMULATED}", "backend": BackendConfig(simulator=simulator)}
    )


def _as_served(run: Run, config: ExperimentConfig, path: Path, seed: int | None) -> Backend:
    """Return a simulation with the engine's arrival times and output lengths."""
    engine: ModelBackendConfig = config.backend.settings
    lengths = {row["request_id"]: len(row["token_ids"]) for row in read_rows(path / OUTPUTS_FILE)}
    workload = run.workload
    if engine.time_scale != 1.0:
        workload = workload.scale_time(engine.time_scale)
    if not engine.sampling.ignore_eos:
        specs = [replace(spec, num_output_tokens=max(1, lengths.get(spec.request_id, 1))) for spec in workload]
        workload = Workload.from_requests(specs, workload.name)
    return SimulatedRun(structs.replace(run, workload=workload, seeds=run.seeds if seed is None else SeedTree(seed)))
