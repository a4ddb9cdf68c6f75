"""Look-ahead: start computing a replica's next step before it has been decided.

Where a policy declares that it repeats decodes, the step after a step of decodes is told to the worker together with it, and
the worker submits it to the device before it waits for the first one's tokens. The policy then decides as ever. When what
it decided is, to the last block, what was foreseen, the step under way is used; otherwise it is taken back, and the decided
one computed. So nothing of what is decided, recorded or put out depends on it.

Invariants:
    - Nothing here changes the mechanism, or what the executor remembers of its worker.
    - A foreseen step writes KV into the last block of requests that hold it, or into free blocks without content: a wrong
      one leaves nothing that is ever read.
"""

from __future__ import annotations

from vajra_py.engine.compute import Foreseen, StepInput
from vajra_py.engine.executor import EngineExecutor
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.step.plan import StepPlan


class LookAhead:
    """What one worker was told before it was decided."""

    def __init__(self, replica: Replica, executor: EngineExecutor) -> None:
        self._replica = replica
        self._executor = executor
        self._told: StepInput | None = None
        self.num_used = 0
        """Steps that were begun before they were decided."""
        self.num_wasted = 0
        """Steps that were begun and then not decided."""

    def work(self, plan: StepPlan, step: StepInput) -> Foreseen:
        """What the worker is told of a step that was decided, `step` being its input."""
        told, self._told = self._told, None
        is_under_way = told == step
        if told is not None:
            self.num_used += is_under_way
            self.num_wasted += not is_under_way
        if self._replica.repeats.num_alike(plan) > 0:
            self._told = self._next()
        return Foreseen(None if is_under_way else step, self._told)

    def forget(self) -> None:
        """The worker is another one."""
        self._told = None

    def _next(self) -> StepInput | None:
        memory, pool = self._replica.memory, self._replica.running_set.pool
        growing = pool.needing_blocks()
        blocks = memory.peek_growth(len(growing))
        return None if blocks is None else self._executor.foreseen(pool, dict(zip(growing, blocks, strict=True)))
