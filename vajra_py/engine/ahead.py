"""Look-ahead: start computing the decodes of a replica's next step before it has been decided.

Where a policy declares that it repeats decodes, the worker gets, together with a step, the decodes that will probably
follow, and submits them to the device before it waits for the step's tokens. The policy then decides as usual. Started rows
that it decided are used; rows of requests that ended or were preempted are dropped, and the rest of the step (chunks of new
requests) is computed after them. So decisions, records and tokens do not depend on look-ahead.

Invariants:
    - Nothing here changes the mechanism, or the executor's record of its worker's state.
    - A started row writes KV at positions that its own request has not reached, or into a spare block: a dropped row leaves
      nothing that is ever read.
"""

from __future__ import annotations

from collections.abc import Iterator

from vajra_py.engine.compute import LookaheadDecodes, LookaheadStep, StepInput
from vajra_py.engine.executor import EngineExecutor
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.step.plan import StepPlan

MOST_SPARE_BLOCKS = 64
"""Most rows of one step that may be started ahead although they need a block."""


def spare_blocks(max_requests: int) -> int:
    """Return the number of blocks that a worker keeps for rows started ahead."""
    return min(max_requests, MOST_SPARE_BLOCKS)


class LookAhead:
    """Decodes that one worker started before they were decided."""

    def __init__(self, replica: Replica, executor: EngineExecutor) -> None:
        self._replica = replica
        self._executor = executor
        self._started: LookaheadDecodes | None = None
        self._num_spare = spare_blocks(replica.limits.max_batch_size)
        self.num_used = 0
        """Steps of which some rows were started before they were decided."""
        self.num_wasted = 0
        """Steps that were started, and none of whose rows was decided."""
        self.num_dropped_rows = 0
        """Rows that were started and not decided."""

    def work(self, plan: StepPlan, step: StepInput) -> LookaheadStep:
        """Return the worker's input for a step that was decided, `step` being its input."""
        started, self._started = self._started, None
        begun: list[int] = []
        if started is not None:
            decided = set(step.decodes)
            begun = [slot for slot in started.decodes if slot in decided]
            self.num_used += bool(begun)
            self.num_wasted += not begun
            self.num_dropped_rows += len(started.decodes) - len(begun)
        if self._replica.repeats.goes_on(plan):
            longest = self._replica.limits.max_model_len
            self._started = self._executor.lookahead_decodes(self._rows(plan), longest, self._num_spare)
        return LookaheadStep(step, begun, self._started)

    def forget(self) -> None:
        """Forget the started decodes: the worker was replaced, or got another step."""
        self._started = None

    def _rows(self, plan: StepPlan) -> Iterator[tuple[Request, int]]:
        """(request, tokens computed) of rows that decode after this step, as far as can be known."""
        if plan.pool is not None:
            ending = set(plan.pool.ending_in_flight())
            yield from ((one, one.num_computed_tokens) for one in plan.pool if one not in ending)
        if self._replica.hands_off:  # requests leave, or may leave, when their prompt is computed
            return
        for request, num_tokens, start, _ in plan.chunks:
            if start + num_tokens == request.num_known_tokens:
                yield request, start + num_tokens
