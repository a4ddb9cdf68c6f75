"""A simulated replica: the step that it executes, its end, and its timer."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from vajra_py.runtime.serving.backend import BackendReplica
from vajra_py.runtime.step.plan import StepPlan
from vajra_py.sim.decode_runs import FIRST_STEPS, TimesRuns
from vajra_py.sim.executor import StepTimer


@dataclass(eq=False, slots=True)
class SimReplica(BackendReplica):
    """One replica of a simulation."""

    timer: StepTimer
    runs: TimesRuns | None
    """The timer, if it has the durations of several steps in advance."""
    stage_free_at: list[int] = field(default_factory=list)
    """Tick from which each pipeline stage is free; empty where there is one."""
    plan: StepPlan | None = None
    """The step in flight, with one pipeline stage."""
    run_ends: array[int] | None = None
    """End ticks of a run's steps, when the step in flight is the first of one; the end of the run is an event."""
    is_apart: bool = False
    """True if blocks were taken from outside since the step in flight was formed, so that it has a record of its own."""
    run_limit: int = FIRST_STEPS
    """Number of steps worked out at once: more after a run that came to its end, few after one that was cut short."""
