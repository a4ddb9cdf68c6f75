"""Stall-free batching with a fixed token budget per step: decodes first, prompts fill the rest."""

from __future__ import annotations

from pydantic import Field

from vajra_policies.preemption import PreemptionConfig, preemption_mode
from vajra_py.contract import (
    BatchBuilder,
    Layer,
    LocalReplicaView,
    PolicyContext,
    PolicySpec,
    RequestView,
    SchedulerTraits,
    SteadyState,
    fill,
)


class FixedChunkConfig(PreemptionConfig):
    """Parameters of `fixed_chunk`."""

    chunk_size: int = Field(
        2048, ge=1, description="Query tokens of one step, decodes included.", json_schema_extra={"unit": "tokens"}
    )


class FixedChunk:
    """Fills each step up to `chunk_size` query tokens: chunk = min(remaining prompt, chunk_size - tokens in the batch).

    Prompts never delay decodes. Both count against one budget, so that the work of a step stays about constant.

    Source: Sarathi-Serve (Agrawal et al., OSDI'24), chunked prefills with stall-free batching; its figures use 512 and
    2048. Vajra's scheduling architecture, fixed-chunk replica scheduler.
    """

    traits = SchedulerTraits(repeats_decodes=frozenset(SteadyState), is_work_conserving=True)
    """`fill` adds only the decodes if no prompt waits or if the decodes fill the batch, so equal steps repeat. If
    nothing runs, a waiting request gets a chunk, so the replica does not idle.
    """

    def __init__(self, config: FixedChunkConfig, context: PolicyContext) -> None:
        self._chunk_size = config.chunk_size
        self._mode = preemption_mode(config, context)

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Add decodes, then prompts by urgency, up to `chunk_size` tokens."""
        fill(replica, batch, self._next_chunk, self._mode)

    def solo_chunk_size(self, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Return the whole budget, or the remaining tokens if these are fewer."""
        return min(self._chunk_size, num_remaining_tokens)

    def _next_chunk(self, request: RequestView, batch: BatchBuilder, replica: LocalReplicaView) -> int | None:
        room = self._room(batch)
        return min(batch.max_chunk(request), room) if room > 0 else None

    def _room(self, batch: BatchBuilder) -> int:
        room, tokens_left = self._chunk_size - batch.num_tokens, batch.tokens_left
        return room if room < tokens_left else tokens_left


SPEC = PolicySpec(
    name="fixed_chunk",
    layer=Layer.REPLICA_SCHEDULER,
    config=FixedChunkConfig,
    build=FixedChunk,
    summary="Decodes first, then prompts by urgency, up to a fixed number of tokens per step.",
    source="Sarathi-Serve (OSDI'24); Vajra's scheduling architecture, fixed chunk",
    advice=(
        "Use it as the baseline of chunked prefill. Not where all steps should take the same time (`dynamic_chunk`)."
    ),
)
