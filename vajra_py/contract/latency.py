"""What a latency model answers: the duration of a step of a given composition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

CONTEXT_GRAIN_TOKENS = 64
LAST_S = 9_000_000
"""Seconds that the clock of a run reaches to at least, 104 days: no step lasts longer, and no request arrives later."""


class BatchFeatures(NamedTuple):
    """Additive features of one step's batch, enough for any latency model to answer in O(1).

    Every field is a sum over the batch's entries, so adding a chunk is a constant-time update.
    Context counts the tokens whose KV was in memory before the step.
    """

    num_decodes: int = 0
    decode_context_tokens: int = 0
    num_prefills: int = 0
    prefill_tokens: int = 0
    prefill_tokens_squared: int = 0
    prefill_context_tokens: int = 0
    prefill_context_rounded_tokens: int = 0
    """Like `prefill_context_tokens`, each entry rounded up to 64 before it is added (what table models index by)."""
    prefill_attention_pairs: int = 0
    """Query-key pairs of the causal prefill attention: sum of n * context + n * (n + 1) / 2."""
    num_merged_tokens: int = 0
    """Query tokens whose attention is merged over several KV-parallel groups."""
    swap_bytes: int = 0
    """Bytes moved between device and host memory before the step."""

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return self.num_decodes + self.prefill_tokens

    @property
    def num_requests(self) -> int:
        """Entries of the batch."""
        return self.num_decodes + self.num_prefills

    def with_decodes(self, num_decodes: int, context_tokens: int) -> BatchFeatures:
        """This batch and `num_decodes` more decodes whose contexts sum to `context_tokens`."""
        return BatchFeatures(
            self.num_decodes + num_decodes,
            self.decode_context_tokens + context_tokens,
            self.num_prefills,
            self.prefill_tokens,
            self.prefill_tokens_squared,
            self.prefill_context_tokens,
            self.prefill_context_rounded_tokens,
            self.prefill_attention_pairs,
            self.num_merged_tokens,
            self.swap_bytes,
        )

    def with_chunk(self, num_tokens: int, context_tokens: int) -> BatchFeatures:
        """This batch and one more prefill chunk of `num_tokens` behind `context_tokens` of context."""
        rounded = -(-context_tokens // CONTEXT_GRAIN_TOKENS) * CONTEXT_GRAIN_TOKENS
        return BatchFeatures(
            self.num_decodes,
            self.decode_context_tokens,
            self.num_prefills + 1,
            self.prefill_tokens + num_tokens,
            self.prefill_tokens_squared + num_tokens * num_tokens,
            self.prefill_context_tokens + context_tokens,
            self.prefill_context_rounded_tokens + rounded,
            self.prefill_attention_pairs + num_tokens * context_tokens + num_tokens * (num_tokens + 1) // 2,
            self.num_merged_tokens,
            self.swap_bytes,
        )


class LatencyModel(Protocol):
    """Predicts step durations. Pure: equal features get equal answers, and asking changes nothing."""

    @property
    def num_stages(self) -> int:
        """Pipeline stages that a step passes through; 1 without pipeline parallelism."""

    def stage_time_s(self, features: BatchFeatures) -> float:
        """Seconds that the slowest stage is busy with a batch with these features; the whole step when there is one stage."""

    def batch_time_s(self, features: BatchFeatures) -> float:
        """Seconds from the batch's entry into the first stage to its tokens leaving the last."""


class PrefillTime(Protocol):
    """Predicted time to prefill a prompt alone, in the chunks that the configured replica scheduler would choose."""

    def total_s(self, num_prompt_tokens: int) -> float:
        """Seconds for the whole prompt."""

    def remaining_s(self, num_prompt_tokens: int, num_done_tokens: int) -> float:
        """Seconds for what is left when the first `num_done_tokens` are computed; never negative."""


@dataclass(frozen=True, slots=True)
class LengthEstimate:
    """A prediction of how many tokens a request will generate in all."""

    mean_tokens: float
    p50_tokens: float
    p90_tokens: float


class OutputLengthPredictor(Protocol):
    """Estimates a request's output length; the only door to anything like the truth."""

    def predict(self, request: object) -> LengthEstimate | None:
        """The estimate for a `RequestView`, or None when this predictor knows nothing."""
