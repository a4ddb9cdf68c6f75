"""The interface between experiments and backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from msgspec import Struct, field

from vajra_py.config import ExperimentConfig
from vajra_py.contract.latency import LatencyModel
from vajra_py.experiment.runs.results import Tables
from vajra_py.latency import StepTimes
from vajra_py.plugins import Registry
from vajra_py.runtime.records.decision_log import DecisionLog
from vajra_py.runtime.serving.controller import Controller
from vajra_py.runtime.support.seeds import SeedTree
from vajra_py.workload import Workload

Progress = Callable[[int, int, float], None]
"""Called repeatedly with (ended requests, total requests, seconds on the run's clock)."""


class Run(Struct, frozen=True):
    """Inputs of one run."""

    config: ExperimentConfig
    registry: Registry
    workload: Workload
    seeds: SeedTree
    progress: Progress | None = None


class Outcome(Struct):
    """Result of a backend that has finished."""

    ended_at: float
    """End of the run, in seconds on its clock."""
    num_steps: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts for the manifest."""


WriteTables: TypeAlias = Callable[[Path, ExperimentConfig, Tables, float, Mapping[str, Any]], None]
"""Called with the run's folder, its settings, the recorded tables, the run's end in seconds, and the origin of its step
times.
"""


class Backend(Protocol):
    """Executor of one run; `prepare` and `start` are each called once, in this order."""

    controller: Controller
    decision_log: type[DecisionLog]
    """Class of the decision log."""
    write: WriteTables
    """Function that writes the run's tables."""

    @property
    def latency_models(self) -> Mapping[str, LatencyModel]:
        """Latency models of the steps, by the keys of `device_figures.latency_models`; empty if an engine executes the
        steps.
        """

    @property
    def step_times(self) -> StepTimes:
        """Provenance of the durations of steps: measured or predicted, from what, and with which known errors."""

    def prepare(self, folder: Path) -> None:
        """Prepare backend-specific recording in the run's folder."""

    def start(self) -> Outcome:
        """Serve the whole workload."""

    def position(self) -> tuple[float, int]:
        """Return (seconds on the run's clock, number of steps) so far; also works after a failure."""

    def close(self) -> None:
        """Release all resources, after success or failure."""


MakeBackend: TypeAlias = Callable[[Run], Backend]
