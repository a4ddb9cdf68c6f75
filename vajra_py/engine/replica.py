"""State that the engine's loop keeps of each replica, messages that it takes, and its options."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from vajra_py.engine.ahead import LookAhead
from vajra_py.engine.compute import LookaheadStep, StepInput, StepOutput
from vajra_py.engine.executor import EngineExecutor
from vajra_py.engine.outputs import Submission
from vajra_py.engine.step_watch import StepWatch
from vajra_py.engine.supervision import GivenUp, Restarted
from vajra_py.engine.worker import Finished, LeftFirstStage, Worker
from vajra_py.errors import VajraError
from vajra_py.runtime.records.input_log import PolicyChange
from vajra_py.runtime.serving.backend import BackendReplica
from vajra_py.runtime.serving.policy_swap import Swapped
from vajra_py.runtime.step.plan import StepPlan


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """A client takes its request back."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """No more is wanted: finish the turn and return."""


@dataclass(frozen=True, slots=True)
class SwapPolicy:
    """Request to swap a policy; `done` is called with the result, in the loop's thread."""

    change: PolicyChange
    done: Callable[[Swapped | VajraError], None]


Message: TypeAlias = Submission | AbortRequest | SwapPolicy | LeftFirstStage | Finished | Restarted | GivenUp | Stop


@dataclass(frozen=True, slots=True)
class Timed:
    """A request that is made, and taken in, when the clock says so."""

    tick: int
    make: Callable[[], Submission]


@dataclass(eq=False, slots=True)
class StepUnderWay:
    """A step in flight, which its worker computes whole or in parts.

    Attributes:
        plan: what was decided.
        parts: what has not come back: the worker is told one after the other, with pipeline stages all of them at once.
        num_entering: how many of these have not left the first pipeline stage.
        outputs: of the parts that came back.
    """

    plan: StepPlan
    parts: deque[StepInput]
    num_entering: int
    outputs: list[StepOutput] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class EngineReplica(BackendReplica):
    """One replica with what computes for it."""

    executor: EngineExecutor
    worker: Worker
    ahead: LookAhead | None = None
    """Begins steps of its worker before they are decided; None: none is."""
    watch: StepWatch | None = None
    """Limits how long its worker takes for a step; None: nobody does."""
    under_way: deque[StepUnderWay] = field(default_factory=deque)
    """Steps in flight, in order: one, or as many as there are pipeline stages."""
    is_lost: bool = False
    num_stale: int = 0
    """Number of outstanding answers of steps whose plans were dropped."""
    compute_s: float = 0.0
    """Time that its steps took on the device, in all."""
    busy_ticks: int = 0
    """Time from forming them to taking their results in."""

    def submit(self, step: StepInput | LookaheadStep) -> None:
        """Give its worker a step."""
        if self.watch is not None:
            self.watch.begin((self.replica.replicaset, self.replica.replica_id), step)
        self.worker.submit(step)


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Rules of one run of the loop."""

    serves: bool = False
    """True: wait for further requests when none is left, until stopped."""
    tenant_salt: bool = False
    check_every_steps: int = 0
    """Number of steps between checks of conservation; 0: never."""
    max_reruns: int | None = None
    """Number of times that a request is computed again when replicas fail under it; None: requests of a lost replica end."""
    wait_s: float = 60.0
    """Seconds that requests wait while none of their replicas is up."""
    isolates_policies: bool = False
    """True when a policy that breaks the contract takes its replicaset out of service, instead of ending the run."""
    policy_timeout_s: float | None = 60.0
    """Seconds after which a policy that has not returned breaks the contract; None: no limit."""
