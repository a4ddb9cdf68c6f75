"""Look-ahead: start computing the decodes of a replica's next step before the policy has decided on it.

Look-ahead is used if a policy declares that it repeats decodes (`SchedulerTraits.repeats_decodes`). Together with a
step, the worker gets the decodes that will probably be in the next step. It submits them to the device before it waits
for the step's tokens. The policy then decides the next step as usual. Started rows (one per decode) that the policy
selects are used; the others, such as rows of requests that ended or were preempted, are dropped. The rest of the step
(such as chunks of new requests) is computed after the started rows. So decisions, records and tokens do not depend on
look-ahead.

Invariants:
    - This module does not change the mechanism, nor the executor's record of the worker's state.
    - A started row writes KV at positions that its request has not reached, or into a spare block, so a dropped row
      leaves nothing that is ever read.
"""

from __future__ import annotations

from collections.abc import Iterator

from vajra_py.engine.compute import LookaheadDecodes, LookaheadStep, StepInput
from vajra_py.engine.executor import EngineExecutor
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.step.plan import StepPlan

MOST_SPARE_BLOCKS = 64
"""Maximum number of rows of one step that may be started ahead although they need a new KV block."""


def spare_blocks(max_requests: int) -> int:
    """Return the number of blocks that a worker keeps for rows that are started ahead and need a new block."""
    return min(max_requests, MOST_SPARE_BLOCKS)


class LookAhead:
    """Decodes of one worker that were started ahead."""

    def __init__(self, replica: Replica, executor: EngineExecutor) -> None:
        self._replica = replica
        self._executor = executor
        self._started: LookaheadDecodes | None = None
        self._num_spare = spare_blocks(replica.limits.max_batch_size)
        self.num_used = 0
        """Number of steps that used rows started ahead."""
        self.num_wasted = 0
        """Number of steps for which rows were started ahead, but none was used."""
        self.num_dropped_rows = 0
        """Number of started rows that were not used."""

    def work(self, plan: StepPlan, step: StepInput) -> LookaheadStep:
        """Return the worker's input for a decided step `plan`; `step` is the same input without look-ahead."""
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
        """Forget the started decodes: the worker was replaced, or will drop them with its next step."""
        self._started = None

    def _rows(self, plan: StepPlan) -> Iterator[tuple[Request, int]]:
        """Yield each request that will probably decode next, and its number of computed tokens before that decode."""
        if plan.pool is not None:
            ending = set(plan.pool.ending_in_flight())
            yield from ((one, one.num_computed_tokens) for one in plan.pool if one not in ending)
        # Requests may be handed off once their prompts are computed, so their first decodes are not started ahead.
        if self._replica.hands_off:
            return
        for request, num_tokens, start, _ in plan.chunks:
            if start + num_tokens == request.num_known_tokens:
                yield request, start + num_tokens
