"""Fixed chunks with a token budget for the prompts of each step, for schedulers that adapt the budget to the load."""

from __future__ import annotations

from vajra_policies.fixed_chunk import FixedChunk, FixedChunkConfig
from vajra_py.contract import BatchBuilder, LocalReplicaView, PolicyContext, RequestView, fill


class PromptBudget(FixedChunk):
    """`fixed_chunk` with at most `_budget` prompt tokens in each step; decodes are not limited by it."""

    def __init__(self, config: FixedChunkConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self._most_tokens = 0
        self._num_decodes: int | None = None
        """Number of tokens in the batch before its first prompt; None before that prompt is considered."""

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Add decodes, then prompts by urgency within the budget."""
        self._most_tokens, self._num_decodes = self._budget(replica, now), None
        fill(replica, batch, self._next_chunk, self._mode)

    def _budget(self, replica: LocalReplicaView, now: float) -> int:
        """Return the largest number of prompt tokens in the step being formed."""
        return self._chunk_size

    def _next_chunk(self, request: RequestView, batch: BatchBuilder, replica: LocalReplicaView) -> int | None:
        if self._num_decodes is None:
            self._num_decodes = batch.num_tokens
        num_tokens = super()._next_chunk(request, batch, replica)
        left = self._most_tokens - (batch.num_tokens - self._num_decodes)
        return None if num_tokens is None or left <= 0 else min(num_tokens, left)
