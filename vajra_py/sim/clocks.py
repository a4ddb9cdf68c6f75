"""Position of each replica in simulated time."""

from __future__ import annotations

from dataclasses import dataclass

from vajra_py.runtime.executor import StepPlan
from vajra_py.runtime.replica import Replica
from vajra_py.runtime.replicaset import Replicaset
from vajra_py.sim.executor import StepTimer
from vajra_py.sim.runs import FIRST_STEPS, TimesRuns


@dataclass(slots=True)
class ReplicaClock:
    """Where one replica is in time."""

    replica: Replica
    replicaset: Replicaset
    timer: StepTimer
    stage_free_at: list[int]
    runs: TimesRuns | None
    """The timer, where it knows the durations of several steps in advance."""
    rank: int
    """Its place in the run, by which ties are broken: replicasets as configured, replicas by id."""
    running_ahead: dict[int, ReplicaClock]
    """Those of its replicaset whose step in flight is the first of a run."""
    is_idle: bool = True
    form_pending: bool = False
    plan: StepPlan | None = None
    """The step in flight, with one pipeline stage."""
    run_ends: list[int] | None = None
    """Ticks at which the steps of a run end, when the step in flight is the first of one; the run's last is an event."""
    run_limit: int = FIRST_STEPS
    """How many steps are worked out at once: more after a run that came to its end, few after one that was cut short."""
    version: int = 0
    """Counts step ends that were called off."""
