"""Latency models: the duration of a step by the composition of its batch, and the description of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

LAST_S = 9_000_000
"""Upper bound for step durations and arrival times, in seconds (104 days)."""


class BatchFeatures(NamedTuple):
    """Additive features of one step's batch, from which any latency model answers in O(1).

    Every field is a sum over the batch's entries, so adding a chunk is a constant-time update.
    Context counts the tokens whose KV was in memory before the step.
    """

    num_decodes: int = 0
    decode_context_tokens: int = 0
    num_prefills: int = 0
    prefill_tokens: int = 0
    prefill_tokens_squared: int = 0
    prefill_context_tokens: int = 0
    prefill_attention_pairs: int = 0
    """Query-key pairs of the causal prefill attention: sum of n * context + n * (n + 1) / 2."""
    num_merged_tokens: int = 0
    """Query tokens whose attention is merged over several KV-parallel groups."""
    swap_bytes: int = 0
    """Bytes moved between device and host memory before the step."""
    num_draft_tokens: int = 0
    """Query tokens of the decodes beyond one each: drafts that the step verifies."""

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return self.num_decodes + self.prefill_tokens + self.num_draft_tokens

    @property
    def num_requests(self) -> int:
        """Entries of the batch."""
        return self.num_decodes + self.num_prefills

    def with_decodes(self, num_decodes: int, context_tokens: int) -> BatchFeatures:
        """Return this batch with `num_decodes` more decodes whose contexts sum to `context_tokens`."""
        return BatchFeatures(
            self.num_decodes + num_decodes,
            self.decode_context_tokens + context_tokens,
            self.num_prefills,
            self.prefill_tokens,
            self.prefill_tokens_squared,
            self.prefill_context_tokens,
            self.prefill_attention_pairs,
            self.num_merged_tokens,
            self.swap_bytes,
            self.num_draft_tokens,
        )

    def with_drafts(self, num_tokens: int) -> BatchFeatures:
        """Return this batch with so many more drafts to verify, of decodes that are in it."""
        return self._replace(num_draft_tokens=self.num_draft_tokens + num_tokens)

    def with_chunk(self, num_tokens: int, context_tokens: int) -> BatchFeatures:
        """Return this batch with one more prefill chunk of `num_tokens` behind `context_tokens` of context."""
        return BatchFeatures(
            self.num_decodes,
            self.decode_context_tokens,
            self.num_prefills + 1,
            self.prefill_tokens + num_tokens,
            self.prefill_tokens_squared + num_tokens * num_tokens,
            self.prefill_context_tokens + context_tokens,
            self.prefill_attention_pairs + num_tokens * context_tokens + num_tokens * (num_tokens + 1) // 2,
            self.num_merged_tokens,
            self.swap_bytes,
            self.num_draft_tokens,
        )


class LatencyModel(Protocol):
    """Predict step durations. Pure: equal features get equal answers, and a call changes nothing."""

    @property
    def num_stages(self) -> int:
        """Pipeline stages that a step passes through; 1 without pipeline parallelism."""

    def stage_time_s(self, features: BatchFeatures) -> float:
        """Seconds that the slowest stage is busy with a batch with these features; the whole step when there is one stage."""

    def batch_time_s(self, features: BatchFeatures) -> float:
        """Seconds from the batch's entry into the first stage to its tokens leaving the last."""


Origin: TypeAlias = Literal["given", "analytic", "measured", "calibrated", "recorded", "real"]
"""Origin of step times, from `given` (figures of the experiment's author) to `real` (computed by an engine)."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Facts about a latency model besides step times: their origin and known error, and the memory and devices of a replica."""

    origin: Origin
    source: str
    """Model, device and measurements behind the step times, in a few words for summaries and reports."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Known relative errors of means by metric (`ttft_s`, `tpot_s`, `e2e_s`, `step`), from a comparison with an engine."""
    num_fallback: int = 0
    """Predictions so far beyond what was measured, which an analytic model answered; policies' questions are among them."""
    filled_fraction: float = 0.0
    """Share of the step time so far that follows from rules because there is no measurement of it."""
    device: str | None = None
    """Name of a replica's devices, by which price and power are looked up; None: unknown."""
    num_devices: int = 1
    """Devices of one replica, over all ranks."""
    max_kv_groups: int | None = None
    """Most KV-parallel groups of a replica whose merging of attention the model predicts; None: any number."""
    kv_blocks: Callable[[int, float], int] | None = None
    """KV blocks that fit a replica, by (block size in tokens, fraction of the device memory in use), in one of its KV-parallel groups;
    None: unknown, and `replica.memory.num_blocks` must be given."""
    kv_bytes_per_token: int = 0
    """Bytes of KV cache per token, over all layers; 0: unknown, and swapping takes no time."""
    max_model_len: int | None = None
    """Longest sequence of the model, in tokens; None: unknown."""
    num_layers: int | None = None
    """Layers of the model; None: unknown."""


@runtime_checkable
class DescribesModel(Protocol):
    """Optional capability of a `LatencyModel`: a description of itself."""

    def describe(self) -> ModelDescription:
        """Return the description; it is read when a run is built and again at its end."""


class PrefillTime(Protocol):
    """Predicted time to prefill a prompt alone, in the chunks that the configured replica scheduler would choose."""

    def total_s(self, num_prompt_tokens: int) -> float:
        """Seconds for the whole prompt."""

    def remaining_s(self, num_prompt_tokens: int, num_done_tokens: int) -> float:
        """Seconds for the rest of the prompt once the first `num_done_tokens` are computed; never negative."""


@dataclass(frozen=True, slots=True)
class LengthEstimate:
    """Predicted number of tokens that a request generates in all."""

    mean_tokens: float
    p50_tokens: float
    p90_tokens: float


class OutputLengthPredictor(Protocol):
    """Estimate a request's output length; the only access of policies to anything like the true length.

    A predictor that learns may have the methods of `ListensToRequests`, and is notified of the requests of every replicaset.
    """

    def predict(self, request: object) -> LengthEstimate | None:
        """The estimate for a `RequestView`, or None where this predictor has none."""
