"""State that the engine's loop keeps for each replica, messages to the loop, and the loop's options."""

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
    """Message to abort a request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Message that makes the loop return once it has handled all messages that it has received."""


@dataclass(frozen=True, slots=True)
class SwapPolicy:
    """Message to swap a policy; `done` is called with the result, in the loop's thread."""

    change: PolicyChange
    done: Callable[[Swapped | VajraError], None]


Message: TypeAlias = Submission | AbortRequest | SwapPolicy | WorkerNews | Restarted | GivenUp | Stop


@dataclass(frozen=True, slots=True)
class Timed:
    """Request that arrives at a tick of the clock; `make` creates its submission at that time."""

    tick: int
    make: Callable[[], Submission]


@dataclass(eq=False, slots=True)
class StepUnderWay:
    """A step in flight, which its worker computes as a whole or in parts.

    Attributes:
        plan: the policy's decision.
        parts: parts whose outputs have not arrived. The worker gets the parts one after the other, or, with pipeline
            stages, all at once.
        num_entering: number of parts that have not left the first pipeline stage.
        outputs: outputs that have arrived, one per part.
    """

    plan: StepPlan
    parts: deque[StepInput]
    num_entering: int
    outputs: list[StepOutput] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class EngineReplica(BackendReplica):
    """One replica, with its executor and worker.

    Attributes:
        executor: translates plans to messages for the worker, and the worker's outputs to results.
        worker: computes the replica's steps.
        ahead: look-ahead, which starts decodes before the policy decides on them; None: no look-ahead.
        watch: time limit for the worker's steps; None: no limit.
        under_way: steps in flight, in order: one, or up to the number of pipeline stages.
        is_lost: True if the worker is lost and not replaced yet.
        has_computed: True if the worker has completed a step.
        num_stale: number of outstanding answers to cancelled steps.
        compute_s: total time of its steps on the device, in seconds.
        busy_ticks: total time from forming steps to processing their results, in ticks.
        exports: waiting copies of KV out of the worker's memory. They are submitted after all parts of the steps in
            flight, since these parts may write the KV.
    """

    executor: EngineExecutor
    worker: Worker
    ahead: LookAhead | None = None
    watch: StepWatch | None = None
    under_way: deque[StepUnderWay] = field(default_factory=deque)
    is_lost: bool = False
    has_computed: bool = False
    num_stale: int = 0
    compute_s: float = 0.0
    busy_ticks: int = 0
    exports: deque[KvExport] = field(default_factory=deque)

    def submit(self, step: StepInput | LookaheadStep) -> None:
        """Submit a step, or a part of one, to the worker."""
        if self.watch is not None:
            self.watch.begin((self.replica.replicaset, self.replica.replica_id), step)
        self.worker.submit(step)

    def export_kv(self, copy: KvExport) -> None:
        """Copy KV out of the worker's memory, as it is after the steps in flight."""
        self.exports.append(copy)
        self.send_exports()

    def send_exports(self) -> None:
        """Submit the waiting copies, unless parts of a step are still to be submitted."""
        if self.num_stages == 1 and any(len(step.parts) > 1 for step in self.under_way):
            return
        while self.exports:
            self._copy_kv(self.exports.popleft())

    def import_kv(self, copy: KvImport) -> None:
        """Copy KV into blocks of the worker; no step in flight may use these blocks."""
        self._copy_kv(copy)

    def load_adapter(self, load: LoadAdapter) -> None:
        """Copy an adapter into a slot of the worker; no step in flight may use this slot."""
        if self.watch is not None:
            self.watch.begin_copy((self.replica.replicaset, self.replica.replica_id))
        self.worker.load_adapter(load)

    def move_kv(self, copy: KvMove) -> None:
        """Copy KV between the worker's device and host memory, after earlier messages, concurrently with later ones."""
        if self.watch is not None:
            self.watch.begin_move((self.replica.replicaset, self.replica.replica_id), copy)
        self.worker.copy_kv(copy)

    def start_again(self, worker: Worker) -> None:
        """Continue with a new worker, which has no state."""
        self.worker, self.is_lost, self.has_computed = worker, False, False
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
    """Options of one run of the loop."""

    serves: bool = False
    """True if the loop waits for further requests when none is left; it then runs until it is stopped."""
    tenant_salt: bool = False
    """True if requests of different tenants share no cached prefixes, unless they state the same salt."""
    check_every_steps: int = 0
    """Number of steps between conservation checks; 0: no checks."""
    max_reruns: int | None = None
    """Number of times that a request may cause the loss of a replica and still be computed again; None: all requests of
    a lost replica end."""
    wait_s: float = 60.0
    """Longest time in seconds for which requests wait for restarts of lost replicas, if the other replicas cannot serve
    them."""
    isolates_policies: bool = False
    """True if a policy that breaks the contract takes its replicaset out of service instead of ending the run."""
    policy_timeout_s: float | None = 60.0
    """Seconds after which a policy call counts as a violation of the contract; None: no limit."""
