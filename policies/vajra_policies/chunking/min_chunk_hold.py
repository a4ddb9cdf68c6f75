"""Minimum-chunk hold: small chunks of prompts wait for one another while requests decode."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from pydantic import Field

from vajra_policies.fixed_chunk import FixedChunk, FixedChunkConfig
from vajra_py.contract import BatchBuilder, Layer, LocalReplicaView, PolicyContext, PolicySpec, RequestView, fill


class MinChunkHoldConfig(FixedChunkConfig):
    """Parameters of `min_chunk_hold`. The pull request switches it off by default; these are round figures."""

    min_chunk: int = Field(
        512,
        ge=1,
        description="Tokens below which a chunk is held back while requests decode.",
        json_schema_extra={"unit": "tokens"},
    )
    max_delay_steps: int = Field(
        8,
        ge=0,
        description="Number of steps after which a request's chunk is no longer held back.",
        json_schema_extra={"unit": "steps"},
    )


class MinChunkHold(FixedChunk):
    """`fixed_chunk`, where a chunk of fewer than `min_chunk` tokens is held back while a request decodes.

    Held chunks are computed together once they have `min_chunk` tokens in all, or one after `max_delay_steps` steps, or when no request
    decodes. So a step with prompts has enough of them to be worth its fixed cost, and the others are steps of decodes alone, for
    a bounded delay.

    It pays where a step with prompts has a cost of its own (kernels that a small chunk leaves idle, no CUDA graph); with step times
    that are linear in tokens it delays first tokens for nothing.

    Left out: vLLM's scheduler around the rule; all else is `fixed_chunk`'s.

    Source: vLLM, pull request 54145, "Batch small prefill chunks under decode load".
    """

    def __init__(self, config: MinChunkHoldConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self._min_chunk = config.min_chunk
        self._max_delay_steps = config.max_delay_steps
        self._num_held: dict[RequestView, int] = {}
        """Steps in which each request's chunk has been held back."""
        self._holds = False

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Decodes, then prompts by urgency, those with small chunks only together."""
        self._holds = replica.num_decodes > 0 and not self._are_enough(replica, batch)
        fill(replica, batch, self._next_chunk, self._mode)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget these requests."""
        for request in requests:
            self._num_held.pop(request, None)

    def _are_enough(self, replica: LocalReplicaView, batch: BatchBuilder) -> bool:
        """True if the small chunks of the most urgent prompts make up a large one, as far as the step has room."""
        room = min(self._chunk_size - replica.num_decodes, batch.tokens_left - replica.num_decodes)
        num_small = 0
        for request in chain(replica.partial_prefills(), replica.waiting()):
            num_tokens = min(batch.max_chunk(request), room)
            if num_tokens <= 0:
                return False
            room -= num_tokens
            num_small += num_tokens if num_tokens < self._min_chunk else 0
            if num_small >= self._min_chunk:
                return True
        return False

    def _next_chunk(self, request: RequestView, batch: BatchBuilder, replica: LocalReplicaView) -> int | None:
        num_tokens = super()._next_chunk(request, batch, replica)
        if num_tokens is None:
            return None
        if self._holds and num_tokens < self._min_chunk:
            num_held = self._num_held.get(request, 0)
            if num_held < self._max_delay_steps:
                self._num_held[request] = num_held + 1
                return 0
        self._num_held.pop(request, None)
        return num_tokens


SPEC = PolicySpec(
    name="min_chunk_hold",
    layer=Layer.REPLICA_SCHEDULER,
    config=MinChunkHoldConfig,
    build=MinChunkHold,
    summary="Small chunks of prompts wait for one another while requests decode, for a bounded number of steps.",
    source="vLLM, pull request 54145",
    advice=(
        "Use it where a step with prompts has a cost of its own. Not with step times that are linear in tokens, "
        "where it only delays first tokens."
    ),
)
