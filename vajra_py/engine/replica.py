"""State that the engine's loop keeps of each replica, messages that it takes, and its options."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from vajra_py.engine.ahead import LookAhead
from vajra_py.engine.compute import LoadAdapter, LookaheadStep, StepInput, StepOutput
from vajra_py.engine.executor import EngineExecutor
from vajra_py.engine.kv_copy import KvExport, KvImport, KvMove
from vajra_py.engine.outputs import Submission
from vajra_py.engine.step_watch import StepWatch
from vajra_py.engine.supervision import GivenUp, Restarted
from vajra_py.engine.worker import KvTask, Worker, WorkerNews
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


Message: TypeAlias = Submission | AbortRequest | SwapPolicy | WorkerNews | Restarted | GivenUp | Stop


@dataclass(frozen=True, slots=True)
class Timed:
    """A request that is made and submitted at a time of the clock."""

    tick: int
    make: Callable[[], Submission]


@dataclass(eq=False, slots=True)
class StepUnderWay:
    """A step in flight, which its worker computes whole or in parts.

    Attributes:
        plan: what was decided.
        parts: what has not come back: the worker is sent one after the other, with pipeline stages all of them at once.
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
    """Limits how long its worker takes for a step; None: there is no limit."""
    under_way: deque[StepUnderWay] = field(default_factory=deque)
    """Steps in flight, in order: one, or as many as there are pipeline stages."""
    is_lost: bool = False
    num_stale: int = 0
    """Number of outstanding answers of steps whose plans were dropped."""
    compute_s: float = 0.0
    """Time that its steps took on the device, in all."""
    busy_ticks: int = 0
    """Time from forming them to taking their results in."""
    exports: deque[KvExport] = field(default_factory=deque)
    """Copies that wait until its worker has got the rest of the step in flight, which may write what they read."""

    def submit(self, step: StepInput | LookaheadStep) -> None:
        """Give its worker a step, or a part of one."""
        if self.watch is not None:
            self.watch.begin((self.replica.replicaset, self.replica.replica_id), step)
        self.worker.submit(step)

    def export_kv(self, copy: KvExport) -> None:
        """Have its worker copy KV out of its memory, as it is after the steps in flight."""
        self.exports.append(copy)
        self.send_exports()

    def send_exports(self) -> None:
        """Pass on the copies that wait, unless parts of a step are still to be given."""
        if self.num_stages == 1 and any(len(step.parts) > 1 for step in self.under_way):
            return
        while self.exports:
            self._copy_kv(self.exports.popleft())

    def import_kv(self, copy: KvImport) -> None:
        """Have its worker copy KV into blocks that no step in flight uses."""
        self._copy_kv(copy)

    def load_adapter(self, load: LoadAdapter) -> None:
        """Have its worker copy an adapter into a slot that no step in flight uses."""
        if self.watch is not None:
            self.watch.begin_copy((self.replica.replicaset, self.replica.replica_id))
        self.worker.load_adapter(load)

    def move_kv(self, copy: KvMove) -> None:
        """Have its worker copy KV between its device and its host memory: after earlier requests, beside later ones."""
        if self.watch is not None:
            self.watch.begin_move((self.replica.replicaset, self.replica.replica_id), copy)
        self.worker.copy_kv(copy)

    def start_again(self, worker: Worker) -> None:
        """Compute with another worker, without state."""
        self.worker, self.is_lost = worker, False
        self.executor.start_again()
        self.exports.clear()
        if self.ahead is not None:
            self.ahead.forget()

    def _copy_kv(self, copy: KvTask) -> None:
        if self.watch is not None:
            self.watch.begin_copy((self.replica.replicaset, self.replica.replica_id))
        self.worker.copy_kv(copy)


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
