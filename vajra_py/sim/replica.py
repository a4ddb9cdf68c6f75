"""A simulated replica: its step in flight, the end of that step, and its timer."""

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
    """The timer, if it can compute the durations of several steps in advance; else None."""
    stage_free_at: list[int] = field(default_factory=list)
    """Tick from which each pipeline stage is free; empty with a single stage."""
    plan: StepPlan | None = None
    """The step in flight, if the replica has a single pipeline stage."""
    run_ends: array[int] | None = None
    """End ticks of the remaining steps of a run (a decode step and its repetitions), the step in flight first; None if
    the step in flight is not part of a run. Only the end of the last step is an event.
    """
    is_apart: bool = False
    """True if other requests took blocks after the step in flight was formed, so that this step needs its own record.
    """
    run_limit: int = FIRST_STEPS
    """Maximum number of steps computed at once: increased after a run that was completed, reset after one that was
    interrupted.
    """
