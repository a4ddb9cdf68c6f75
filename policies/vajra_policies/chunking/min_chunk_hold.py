"""Minimum-chunk hold: while requests decode, small chunks are held until together they have a minimum of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from pydantic import Field

from vajra_policies.fixed_chunk import FixedChunk, FixedChunkConfig
from vajra_py.contract import BatchBuilder, Layer, LocalReplicaView, PolicyContext, PolicySpec, RequestView, fill


class MinChunkHoldConfig(FixedChunkConfig):
    """Parameters of `min_chunk_hold`. The pull request disables the rule by default; the defaults here are round
    figures.
    """

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

    Held chunks are computed together once they have `min_chunk` tokens in total, or when no request decodes; each is
    held for at most `max_delay_steps` steps. Most steps with prompts then have enough tokens to be worth their fixed
    cost; the delay is bounded.

    This pays if a step with prompts has a fixed cost (kernels underused by a small chunk, no CUDA graph); if step times
    are linear in tokens, it delays first tokens for nothing.

    Left out: vLLM's scheduler around the rule; everything else is as in `fixed_chunk`.

    Source: vLLM, pull request 54145, "Batch small prefill chunks under decode load".
    """

    def __init__(self, config: MinChunkHoldConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self._min_chunk = config.min_chunk
        self._max_delay_steps = config.max_delay_steps
        self._num_held: dict[RequestView, int] = {}
        """Number of steps for which each request's chunk has been held."""
        self._holds = False

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Add decodes, then prompts by urgency; while requests decode, hold small chunks unless they have `min_chunk`
        tokens in total.
        """
        self._holds = replica.num_decodes > 0 and not self._are_enough(replica, batch)
        fill(replica, batch, self._next_chunk, self._mode)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget these requests."""
        for request in requests:
            self._num_held.pop(request, None)

    def _are_enough(self, replica: LocalReplicaView, batch: BatchBuilder) -> bool:
        """Return True if the small chunks of this step have at least `min_chunk` tokens in total, when chunks are added
        by urgency until the step is full.
        """
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
    summary="Holds small chunks of prompts back while requests decode, for a bounded number of steps.",
    source="vLLM, pull request 54145",
    advice=(
        "Use it where every step with prompts has a fixed cost. Not with step times that are linear in tokens, where "
        "it only delays first tokens."
    ),
)
