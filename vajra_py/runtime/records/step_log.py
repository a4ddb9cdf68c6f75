"""What logs inside the mechanism are told of steps: plans as they are, and a run of repetitions as one.

An `Observer` gets steps expanded; a log that keeps every step of a long simulation cannot afford that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from vajra_py.contract.observer import EndReason
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.requests.running_set import PoolChanges
from vajra_py.runtime.step.plan import StepPlan


@runtime_checkable
class StepLog(Protocol):
    """Looks at plans; found among observers."""

    @property
    def wants_plans(self) -> bool:
        """Whether it is to be told of any; read once, before the run."""

    def on_plan(self, replicaset: str, plan: StepPlan, changes: PoolChanges) -> None:
        """A plan was made; without entries, nothing comes back from it."""

    def on_plan_end(
        self, replicaset: str, plan: StepPlan, finished: Sequence[tuple[Request, EndReason]], now: int
    ) -> None:
        """A plan's step came back."""

    def on_plan_repeats(
        self, replicaset: str, plan: StepPlan, ended_at: Sequence[int], growth: Sequence[int], following: StepPlan
    ) -> None:
        """A plan of decodes and repetitions of it came back at these ticks; `following`, one more, is in flight.

        `growth`: how many members took a block in each step after the first; it repeats where there are more steps.
        """
