"""Observer that counts steps of runs."""

from __future__ import annotations

from vajra_py.contract.observer import Observer, StepRun


class CountsRuns(Observer):
    """Number of steps that were worked out together; with `wants_steps` the simulator forms each step by itself."""

    def __init__(self, *, wants_steps: bool) -> None:
        self.wants_steps = wants_steps
        self.num_in_runs = 0

    def on_step_run(self, run: StepRun) -> None:
        self.num_in_runs += len(run.ended_at)
