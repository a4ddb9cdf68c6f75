"""MinivLLM as documented: prefill first, otherwise decode, with one budget for both."""

from __future__ import annotations

from vajra_policies.systems.prefill_first import decode_in_order
from vajra_policies.systems.whole_prompts import needs_whole_prompts, outgrows
from vajra_py.contract import (
    BatchBuilder,
    Layer,
    LocalReplicaView,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    ReplicaLoadView,
    RequestView,
    SchedulerTraits,
    SteadyState,
)


class MinivllmConfig(PolicyConfig):
    """Parameters of `minivllm`, which has none: its limits per step are the replica's `max_batch_size` and
    `max_batch_tokens`.
    """


class Minivllm:
    """Prefill whole prompts from the head of the queue; only a step that prefills nothing decodes.

    A prompt must fit the budget and the free blocks at its full length and is charged its full length, cached or not.
    Decode steps check blocks before limits: if the batch is full and the next decode needs a block, the latest admitted
    request is preempted, although the next decode does not run in this step. Victims are recomputed and return to the
    front of the queue (prioritizer `fcfs` with `preempted: first`).

    This is the scheduler that MinivLLM's documentation describes. MinivLLM's code differs: it loses requests, leaks
    blocks and repeats tokens. A request that would stall the scheduler (a sequence that can never fit memory or budget)
    is refused at submission; a prompt whose blocks are all cached computes its last block again.

    Source: MinivLLM (Wenyueh), documentation of scheduling.
    """

    traits = SchedulerTraits(repeats_decodes=frozenset({SteadyState.NOTHING_WAITS}))
    """Decode steps repeat while nothing waits; a waiting request may be prefilled in any step."""

    def __init__(self, config: MinivllmConfig, context: PolicyContext) -> None:
        self._budget = context.limits.max_batch_tokens

    def solo_chunk_size(self, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Return all remaining tokens, since prompts are computed in one piece."""
        return num_remaining_tokens

    def refuses(self, request: RequestView, replica: ReplicaLoadView, now: float) -> str | None:
        """Return a reason for refusal if the request can outgrow the budget: after a preemption, it might never be
        readmitted.
        """
        return outgrows(request, self._budget)

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Add prompts; if none can be added, add decodes."""
        if replica.num_waiting:
            self._prefill(replica, batch)
        if not batch.num_requests:
            decode_in_order(replica, batch, looks_past_the_limit=True)

    def _prefill(self, replica: LocalReplicaView, batch: BatchBuilder) -> None:
        num_charged = 0
        for request in replica.waiting():
            num_charged += request.num_known_tokens
            if self._budget is not None and num_charged > self._budget:
                return
            if replica.blocks_for(request.num_known_tokens) > batch.free_blocks:
                return
            if batch.add(request, batch.max_chunk(request), reserve_tokens=request.num_known_tokens) is not None:
                return


def _build(config: MinivllmConfig, context: PolicyContext) -> Minivllm:
    needs_whole_prompts(context)
    return Minivllm(config, context)


SPEC = PolicySpec(
    name="minivllm",
    layer=Layer.REPLICA_SCHEDULER,
    config=MinivllmConfig,
    build=_build,
    summary="MinivLLM as documented: whole prompts first, else decodes, with one budget for both.",
    source="MinivLLM, documentation of scheduling",
    advice=(
        "Use it to predict MinivLLM, with a budget that counts prompts and decodes alike. Not where TBT must be even: "
        "decodes pause while prompts are computed."
    ),
)
