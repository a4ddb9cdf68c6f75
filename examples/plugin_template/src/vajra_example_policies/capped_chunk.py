"""Batch policy with separate caps on prompt tokens for steps with and without decodes."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator
from vajra_py.contract import (
    BatchBuilder,
    Layer,
    LocalReplicaView,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    RequestView,
    SchedulerTraits,
    SteadyState,
    fill,
)


class CappedChunkConfig(PolicyConfig):
    """Parameters of `example_capped_chunk`."""

    chunk_tokens: int = Field(2048, gt=0, description="Prompt tokens of a step without decodes.")
    capped_chunk_tokens: int = Field(256, gt=0, description="Prompt tokens of a step in which somebody decodes.")

    @model_validator(mode="after")
    def _cap_is_lower(self) -> Self:
        if self.capped_chunk_tokens > self.chunk_tokens:
            raise ValueError("capped_chunk_tokens is above chunk_tokens, so that it caps nothing")
        return self


class CappedChunkPolicy:
    """Schedules decodes first, then prompts by urgency, up to a number of tokens that is smaller in steps with decodes.

    A small cap keeps the times between tokens short. Without decodes, larger chunks compute prompts faster. The shared
    `fill` loop does the rest, so that this policy consists of one rule.
    """

    traits = SchedulerTraits(repeats_decodes=frozenset({SteadyState.NOTHING_WAITS}))
    """After a step of all decodes, steps are identical while no request waits; a simulation applies them at once."""

    def __init__(self, config: CappedChunkConfig) -> None:
        self._config = config

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Form a step with the shared `fill` loop."""
        fill(replica, batch, self._next_chunk)

    def solo_chunk_size(self, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Return the next chunk of a prompt that runs alone on the replica; used to predict prefill times."""
        return min(self._config.chunk_tokens, num_remaining_tokens)

    def _next_chunk(self, request: RequestView, batch: BatchBuilder, replica: LocalReplicaView) -> int:
        cap = self._config.capped_chunk_tokens if replica.num_decodes else self._config.chunk_tokens
        room = min(cap - batch.features().prefill_tokens, batch.tokens_left)
        return max(0, min(batch.max_chunk(request), room))


def _build(config: CappedChunkConfig, context: PolicyContext) -> CappedChunkPolicy:
    return CappedChunkPolicy(config)


SPEC = PolicySpec(
    name="example_capped_chunk",
    layer=Layer.REPLICA_SCHEDULER,
    config=CappedChunkConfig,
    build=_build,
    summary="Small prompt chunks while anything decodes, large ones otherwise.",
    source="Stall-free batching of Sarathi-Serve (OSDI'24), with a second, larger chunk for steps without decodes.",
)
