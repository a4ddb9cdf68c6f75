"""nano-vLLM: a step prefills or decodes, never both, and prefills whenever it can."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

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


class NanoVllmConfig(PolicyConfig):
    """Parameters of `nano_vllm`. nano-vLLM's option `max_num_seqs` is the replica's `max_batch_size`, which limits the
    requests of a step, not the running requests.
    """

    prefill: Literal["whole", "chunk_first"] = Field(
        "chunk_first",
        description="Whole prompts alone, or the first prompt of a step cut to what the budget allows (since 2026).",
    )
    prefill_budget_tokens: int = Field(
        16384,
        ge=1,
        description="Maximum number of tokens of a prefill step, tokens; decode steps have no budget.",
        json_schema_extra={"unit": "tokens"},
    )


class NanoVllm:
    """Prefill from the head of the queue while a prompt fits; only a step that prefills nothing decodes.

    The parameter `prefill` has two values:

    - `whole`: a prompt must fit budget and free blocks at its full length, cached or not, but only its uncached part is
      charged.
    - `chunk_first`: only the uncached part must fit budget and free blocks, and shared blocks count once. The first
      prompt of a step is cut where the budget ends; until it is complete, every step continues it, no request decodes,
      and it cannot be preempted.

    A prompt takes the blocks of its whole known sequence at once. A decode needs a block only when it begins a new
    block. If none is free, the latest admitted request is preempted, to be recomputed, and returns to the front of the
    queue (prioritizer `fcfs` with `preempted: first`).

    Differences from nano-vLLM: a request that would fail an assertion there (a sequence that can never fit, or outgrows
    the budget of whole prompts) is refused at submission; a prompt whose blocks are all cached computes its last block
    again, so that there is a logit to sample from.

    Source: nano-vLLM (GeeeekExplorer), `nanovllm/engine/scheduler.py`; `whole` until 2026-04-13, `chunk_first` after.
    """

    traits = SchedulerTraits(repeats_decodes=frozenset({SteadyState.NOTHING_WAITS}))
    """Decode steps repeat while nothing waits; a waiting request may be prefilled in any step."""

    def __init__(self, config: NanoVllmConfig, context: PolicyContext) -> None:
        limit = context.limits.max_batch_tokens
        self._budget = config.prefill_budget_tokens if limit is None else min(config.prefill_budget_tokens, limit)
        self._chunks_first = config.prefill == "chunk_first"

    def solo_chunk_size(self, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Return the whole budget, or the remaining tokens if these are fewer or prompts are not cut."""
        return min(num_remaining_tokens, self._budget) if self._chunks_first else num_remaining_tokens

    def refuses(self, request: RequestView, replica: ReplicaLoadView, now: float) -> str | None:
        """With `whole`, return a reason for refusal if the request can outgrow the budget: after a preemption, it might
        never be readmitted.
        """
        return None if self._chunks_first else outgrows(request, self._budget)

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Add prompts; if none can be added, add decodes."""
        if replica.num_partial_prefills or replica.num_waiting:
            if self._chunks_first:
                self._prefill_in_chunks(replica, batch)
            else:
                self._prefill_whole(replica, batch)
        if not batch.num_requests:
            decode_in_order(replica, batch)

    def _prefill_whole(self, replica: LocalReplicaView, batch: BatchBuilder) -> None:
        num_charged = 0
        for request in replica.waiting():
            known = request.num_known_tokens
            if num_charged + known > self._budget or replica.blocks_for(known) > batch.free_blocks:
                return
            num_tokens = batch.max_chunk(request)
            if batch.add(request, num_tokens, reserve_tokens=known) is not None:
                return
            num_charged += num_tokens

    def _prefill_in_chunks(self, replica: LocalReplicaView, batch: BatchBuilder) -> None:
        for request in replica.partial_prefills():
            left = min(self._budget - batch.num_tokens, batch.tokens_left)
            if left <= 0 or batch.add(request, min(batch.max_chunk(request), left)) is not None:
                return
        for request in replica.waiting():
            left = min(self._budget - batch.num_tokens, batch.tokens_left)
            if left <= 0:
                return
            num_tokens = batch.max_chunk(request)
            if num_tokens > left:
                if batch.num_requests:
                    return
                num_tokens = left
            if batch.add(request, num_tokens, reserve_tokens=request.num_known_tokens) is not None:
                return


def _build(config: NanoVllmConfig, context: PolicyContext) -> NanoVllm:
    if config.prefill == "whole":
        needs_whole_prompts(context)
    return NanoVllm(config, context)


SPEC = PolicySpec(
    name="nano_vllm",
    layer=Layer.REPLICA_SCHEDULER,
    config=NanoVllmConfig,
    build=_build,
    summary="nano-vLLM: prefill whenever anything fits, else decode; the latest admitted request is preempted first.",
    source="nano-vLLM, scheduler of 2025 (`whole`) and of 2026 (`chunk_first`)",
    advice=(
        "Use it to predict nano-vLLM, or as a small example of prefill-first scheduling. Not where TBT must be even: "
        "decodes pause while prompts are computed."
    ),
)
