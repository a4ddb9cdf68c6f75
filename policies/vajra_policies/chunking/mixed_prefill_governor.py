"""Mixed-prefill governor: small steps with prompts, separated by pure decode steps."""

from __future__ import annotations

from pydantic import Field

from vajra_policies.chunking.prompt_budget import PromptBudget
from vajra_policies.fixed_chunk import FixedChunkConfig
from vajra_py.contract import (
    BatchBuilder,
    Layer,
    LocalReplicaView,
    PolicyContext,
    PolicySpec,
    RequestView,
    SchedulerTraits,
)


class MixedPrefillGovernorConfig(FixedChunkConfig):
    """Parameters of `mixed_prefill_governor`. The fork disables all of its limits by default; the defaults here are
    round figures.
    """

    mixed_tokens: int = Field(
        512, ge=1, description="Prompt tokens of a step with decodes.", json_schema_extra={"unit": "tokens"}
    )
    max_partial_prefills: int | None = Field(
        2, ge=1, description="Largest number of concurrent prompts in progress; null: any number."
    )
    min_decode_steps: int = Field(
        4,
        ge=0,
        description="Number of pure decode steps between two steps with prompts.",
        json_schema_extra={"unit": "steps"},
    )
    max_wait_s: float | None = Field(
        0.25,
        gt=0,
        description="Waiting time of the most urgent request after which a prompt is admitted immediately, seconds.",
    )


class MixedPrefillGovernor(PromptBudget):
    """While requests decode, one of every `min_decode_steps` + 1 steps has prompt tokens, at most `mixed_tokens`.

    - Prompts in progress share those tokens evenly. A waiting prompt is admitted while fewer than
      `max_partial_prefills` prompts are in progress, or if the step being formed can compute all of it.
    - Once a request has waited for `max_wait_s`, the next step has prompt tokens. Steps without decodes use the full
      budget.
    - Decode steps that were formed before a prompt began to wait count towards `min_decode_steps`.

    Left out: prompts that take turns at the tokens left over when shares are rounded down (here, shares are rounded up,
    and the last prompt gets fewer). Only the wait of the most urgent waiting request (under `fcfs`, the oldest one) is
    compared with `max_wait_s`.

    Source: local-inference-lab/vllm, pull request 596, "bound mixed prefill work under active decode".
    """

    traits = SchedulerTraits(is_work_conserving=True)
    """`repeats_decodes` is empty: pure decode steps are counted, so each must be formed."""

    def __init__(self, config: MixedPrefillGovernorConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self._config = config
        self._num_decode_steps = 0
        self._share = 0
        self._num_partial = 0

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Add decodes, and prompts unless this is to be a pure decode step."""
        self._num_partial = replica.num_partial_prefills
        super().schedule(replica, batch, now)
        if batch.num_tokens:
            is_decodes_alone = self._num_decodes is None or batch.num_tokens == self._num_decodes
            self._num_decode_steps = self._num_decode_steps + 1 if is_decodes_alone else 0

    def _budget(self, replica: LocalReplicaView, now: float) -> int:
        config = self._config
        self._share = self._chunk_size
        if not replica.num_decodes:
            return self._chunk_size
        if self._num_decode_steps < config.min_decode_steps and not self._has_waited(replica, now):
            return 0
        self._share = -(-config.mixed_tokens // max(replica.num_partial_prefills, 1))
        return config.mixed_tokens

    def _has_waited(self, replica: LocalReplicaView, now: float) -> bool:
        if self._config.max_wait_s is None or not replica.num_waiting:
            return False
        first = next(replica.waiting(), None)
        return first is not None and now - first.arrived_at >= self._config.max_wait_s

    def _next_chunk(self, request: RequestView, batch: BatchBuilder, replica: LocalReplicaView) -> int | None:
        num_tokens = super()._next_chunk(request, batch, replica)
        if num_tokens is None:
            return None
        if request.is_resident:
            num_tokens = min(num_tokens, self._share)
            self._num_partial -= num_tokens == batch.max_chunk(request)
            return num_tokens
        most = self._config.max_partial_prefills
        if num_tokens < batch.max_chunk(request) and most is not None and self._num_partial >= most:
            return 0
        self._num_partial += num_tokens < batch.max_chunk(request)
        return num_tokens


SPEC = PolicySpec(
    name="mixed_prefill_governor",
    layer=Layer.REPLICA_SCHEDULER,
    config=MixedPrefillGovernorConfig,
    build=MixedPrefillGovernor,
    summary="While requests decode, steps with few prompt tokens, separated by pure decode steps.",
    source="local-inference-lab/vllm, pull request 596",
    advice="Use it where long prompts must not slow down decodes. Not for short prompts, which it delays without need.",
)
