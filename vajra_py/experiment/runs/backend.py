"""The interface between experiments and backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

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
"""Called now and then with (requests ended, requests in all, seconds on the run's clock)."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run about to start."""

    config: ExperimentConfig
    registry: Registry
    workload: Workload
    seeds: SeedTree
    progress: Progress | None = None


@dataclass(slots=True)
class Outcome:
    """Result of a backend that has finished."""

    ended_at: float
    """Seconds on the run's clock."""
    num_steps: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts for the manifest."""


WriteTables: TypeAlias = Callable[[Path, ExperimentConfig, Tables, float, Mapping[str, Any]], None]
"""Called with the run's folder, its settings, what was recorded, the run's end in seconds, and where step times come from."""


class Backend(Protocol):
    """A prepared run; `prepare` and `start` are called once, in this order."""

    controller: Controller
    decision_log: type[DecisionLog]
    """Class that records its decisions."""
    write: WriteTables
    """Writes the tables of a run."""

    @property
    def latency_models(self) -> Mapping[str, LatencyModel]:
        """Latency models of the steps, by replicaset; none where steps are computed."""

    @property
    def step_times(self) -> StepTimes:
        """Return the origin of the steps' durations."""

    def prepare(self, folder: Path) -> None:
        """Prepare backend-specific recording in the run's folder."""

    def start(self) -> Outcome:
        """Serve the whole workload."""

    def position(self) -> tuple[float, int]:
        """(seconds on the run's clock, steps) so far; also after a failure."""

    def close(self) -> None:
        """Release all resources, after success or failure."""


MakeBackend: TypeAlias = Callable[[Run], Backend]
