"""Protocols of latency models and of related predictions. A latency model predicts a step's duration from its batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

LAST_S = 9_000_000
"""Upper bound for step durations and arrival times, in seconds (104 days)."""


class BatchFeatures(NamedTuple):
    """Additive features of one step's batch, from which latency models predict the step's duration in O(1).

    Every field is a sum over the batch's entries, so adding a chunk is a constant-time update. Context is the number of
    tokens whose KV was in memory before the step.
    """

    num_decodes: int = 0
    decode_context_tokens: int = 0
    num_prefills: int = 0
    prefill_tokens: int = 0
    prefill_tokens_squared: int = 0
    prefill_context_tokens: int = 0
    prefill_attention_pairs: int = 0
    """Number of query-key pairs of causal prefill attention, summed over the chunks; n * context + n * (n + 1) / 2 for
    a chunk of n tokens.
    """
    num_merged_tokens: int = 0
    """Number of query tokens whose attention is merged over several KV-parallel groups."""
    swap_bytes: int = 0
    """Bytes moved between device and host memory before the step."""
    num_draft_tokens: int = 0
    """Number of drafts that the step verifies: the query tokens of the decodes minus one token for each decode."""

    @property
    def num_tokens(self) -> int:
        """Number of query tokens of the step."""
        return self.num_decodes + self.prefill_tokens + self.num_draft_tokens

    @property
    def num_requests(self) -> int:
        """Number of entries of the batch."""
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
        """Return this batch with `num_tokens` more drafts to verify, for decodes already in it."""
        return self._replace(num_draft_tokens=self.num_draft_tokens + num_tokens)

    def with_chunk(self, num_tokens: int, context_tokens: int) -> BatchFeatures:
        """Return this batch with one more prefill chunk of `num_tokens` after `context_tokens` of context."""
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
    """Predicts step durations. Calls are pure: equal features give equal results, without side effects."""

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages; 1 without pipeline parallelism."""

    def stage_time_s(self, features: BatchFeatures) -> float:
        """Return the time in seconds that the slowest stage needs for a batch with these features."""

    def batch_time_s(self, features: BatchFeatures) -> float:
        """Return the seconds from the batch's entry into the first stage until its tokens leave the last stage."""


Origin: TypeAlias = Literal["given", "analytic", "measured", "calibrated", "recorded", "real"]
"""Origin of step times, from `given` (figures of the experiment's author) to `real` (computed by an engine)."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Description of a latency model: origin and known error of its step times, and memory and devices of a replica."""

    origin: Origin
    source: str
    """Model, device and measurements behind the step times, in a few words for summaries and reports."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Relative error of the predicted mean of each metric (`ttft_s`, `tpot_s`, `e2e_s`, `step`) against an engine."""
    num_fallback: int = 0
    """Number of predictions so far that an analytic model made, because the batch was outside the measured range;
    includes predictions that policies requested."""
    filled_fraction: float = 0.0
    """Fraction of the step time predicted so far that is not based on measurements."""
    device: str | None = None
    """Name of the type of a replica's devices, by which price and power are looked up; None: unknown."""
    num_devices: int = 1
    """Number of devices of one replica, over all ranks."""
    max_kv_groups: int | None = None
    """Largest number of KV-parallel groups for which the model predicts the time to merge attention; None: no limit."""
    kv_blocks: Callable[[int, float], int] | None = None
    """Function of (block size in tokens, fraction of device memory to use) that returns the number of KV blocks of one
    KV-parallel group; None: unknown, so that `replica.memory.num_blocks` must be given."""
    kv_bytes_per_token: int = 0
    """Bytes of KV cache per token, over all layers; 0: unknown; swapping then takes no time."""
    max_model_len: int | None = None
    """Longest sequence of the model, in tokens; None: unknown."""
    num_layers: int | None = None
    """Number of layers of the model; None: unknown."""


@runtime_checkable
class DescribesModel(Protocol):
    """Optional capability of a `LatencyModel`: a description of itself."""

    def describe(self) -> ModelDescription:
        """Return the description; it is read when a run is built and again at its end."""


class PrefillTime(Protocol):
    """Predicted time to prefill a prompt that is alone on its replica, in chunks chosen by the configured replica
    scheduler.
    """

    def total_s(self, num_prompt_tokens: int) -> float:
        """Return the time in seconds for the whole prompt."""

    def remaining_s(self, num_prompt_tokens: int, num_done_tokens: int) -> float:
        """Return the time in seconds for the rest of the prompt after the first `num_done_tokens`; never negative."""


@dataclass(frozen=True, slots=True)
class LengthEstimate:
    """Prediction of a request's total output length in tokens."""

    mean_tokens: float
    p50_tokens: float
    p90_tokens: float


class OutputLengthPredictor(Protocol):
    """Predicts output lengths of requests for policies, which never see true lengths.

    A predictor that learns may have the methods of `ListensToRequests`, which are called for requests of all
    replicasets.
    """

    def predict(self, request: object) -> LengthEstimate | None:
        """Return the estimate for a `RequestView`; None if this predictor has none."""
