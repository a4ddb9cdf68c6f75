"""Build the backend that a configuration names; only that one is imported."""

from __future__ import annotations

from vajra_py.errors import ConfigError, Problem
from vajra_py.experiment.runs.backend import Backend, Run


def make_backend(run: Run) -> Backend:
    """Build the backend that the configuration names."""
    kind = run.config.backend.kind
    if kind == "simulator":
        from vajra_py.experiment.runs.simulated import SimulatedRun

        return SimulatedRun(run)
    from vajra_py.engine.config import MODEL_BACKENDS  # a simulation must not import the engine

    if kind in MODEL_BACKENDS:
        from vajra_py.experiment.runs.engined import EngineRun

        return EngineRun(run)
    raise ConfigError(Problem("backend", f"nothing here runs it ({kind!r})", "Allowed: engine, simulator, vllm"))
