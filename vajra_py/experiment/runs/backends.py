"""Build the backend named by a configuration; other backends are not imported."""

from __future__ import annotations

from typing import cast

from vajra_py.config import ExperimentConfig, SystemConfig, naming_lines
from vajra_py.errors import ConfigError, Problem
from vajra_py.experiment.runs.backend import Backend, Run
from vajra_py.plugins import Registry
from vajra_py.runtime.serving.pools import check_reach
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.workload import Workload


def make_backend(run: Run) -> Backend:
    """Build the backend named by the configuration. Raises `ConfigError`, with file and line if known."""
    with naming_lines(run.config):
        return _make(run)


def _make(run: Run) -> Backend:
    kind = run.config.backend.kind
    if kind == "simulator":
        from vajra_py.experiment.runs.simulated import SimulatedRun

        backend = SimulatedRun(run)
        check_reach(run.config, backend.controller)
        return backend
    from vajra_py.engine.config import MODEL_BACKENDS  # a simulation must not import the engine

    if kind in MODEL_BACKENDS:
        from vajra_py.experiment.runs.engined import EngineRun

        return EngineRun(run)
    raise ConfigError(Problem("backend", f"nothing here runs it ({kind!r})", "Allowed: engine, simulator, vllm"))


def check_backend(config: SystemConfig, registry: Registry) -> None:
    """Build replicas and policies without running anything. Raises `ConfigError` for their problems."""
    kind = config.backend.kind
    if kind == "simulator":
        experiment = cast(ExperimentConfig, config)  # nothing is run, so a missing workload does not matter
        make_backend(Run(experiment, registry, Workload.from_requests([]), SeedTree(config.seed)))
        return
    from vajra_py.engine.config import MODEL_BACKENDS

    if kind in MODEL_BACKENDS:
        from vajra_py.engine.build import Engine
        from vajra_py.engine.services import engine_services

        with naming_lines(config):
            Engine.check(config, engine_services(config, registry, {}))
