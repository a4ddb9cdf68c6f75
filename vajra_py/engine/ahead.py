"""Look-ahead: start computing the decodes of a replica's next step before it has been decided.

Where a policy declares that it repeats decodes, those that will probably go on are told to the worker together with a step,
and it submits them to the device before it waits for the step's tokens. The policy then decides as ever. Of what is under
way, the rows that were decided are used; those that have ended or given way are dropped, and what the step has besides
(chunks of new requests) is computed behind. So nothing of what is decided, recorded or put out depends on it.

Invariants:
    - Nothing here changes the mechanism, or what the executor remembers of its worker.
    - A row that is begun writes KV where its own request has not got yet, or into a spare block: a dropped one leaves
      nothing that is ever read.
"""

from __future__ import annotations

from collections.abc import Iterator

from vajra_py.engine.compute import Ahead, Foreseen, StepInput
from vajra_py.engine.executor import EngineExecutor
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.step.plan import StepPlan

MOST_SPARE_BLOCKS = 64
"""Rows of one step that may need a block and be begun ahead all the same."""


def spare_blocks(max_requests: int) -> int:
    """Return how many blocks a worker keeps for what is begun ahead."""
    return min(max_requests, MOST_SPARE_BLOCKS)


class LookAhead:
    """Work that one worker began before it was decided."""

    def __init__(self, replica: Replica, executor: EngineExecutor) -> None:
        self._replica = replica
        self._executor = executor
        self._told: Ahead | None = None
        self._num_spare = spare_blocks(replica.limits.max_batch_size)
        self.num_used = 0
        """Steps of which some rows were begun before they were decided."""
        self.num_wasted = 0
        """Steps that were begun, and none of whose rows was decided."""
        self.num_dropped_rows = 0
        """Rows that were begun and not decided."""

    def work(self, plan: StepPlan, step: StepInput) -> Foreseen:
        """Return the worker's input for a step that was decided, `step` being its input."""
        told, self._told = self._told, None
        begun: list[int] = []
        if told is not None:
            decided = set(step.decodes)
            begun = [slot for slot in told.decodes if slot in decided]
            self.num_used += bool(begun)
            self.num_wasted += not begun
            self.num_dropped_rows += len(told.decodes) - len(begun)
        if self._replica.repeats.goes_on(plan):
            longest = self._replica.limits.max_model_len
            self._told = self._executor.foreseen(self._rows(plan), longest, self._num_spare)
        return Foreseen(step, begun, self._told)

    def forget(self) -> None:
        """The worker is another one, or was told something else."""
        self._told = None

    def _rows(self, plan: StepPlan) -> Iterator[tuple[Request, int]]:
        """(request, tokens computed) of rows that decode after this step, as far as can be known."""
        if plan.pool is not None:
            ending = set(plan.pool.ending_in_flight())
            yield from ((one, one.num_computed_tokens) for one in plan.pool if one not in ending)
        for request, num_tokens, start, _ in plan.chunks:
            if start + num_tokens == request.num_known_tokens:
                yield request, start + num_tokens
