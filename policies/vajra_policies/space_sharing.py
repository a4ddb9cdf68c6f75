"""Space sharing: at most one very long prefill per step, which leaves a part of the step to short prompts if it has
slack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from vajra_policies.class_shares import ClassShares
from vajra_policies.preemption import preemption_mode
from vajra_policies.target_time import TargetTime, TargetTimeConfig
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

MAX_SPARED_FRACTION = 0.5
"""Largest fraction of the target time that a long prefill leaves to other prompts."""


class SpaceSharingConfig(TargetTimeConfig):
    """Parameters of `space_sharing`."""

    long_seq_kv_cache_len_threshold: int = Field(
        262_144,
        ge=1,
        description="Number of tokens in KV from which a prefill counts as long.",
        json_schema_extra={"unit": "tokens"},
    )
    class_shares: Mapping[str, Annotated[float, Field(gt=0, le=1)]] = Field(
        default_factory=dict,
        description=(
            "Fraction of the target time that prompts of each class may take in a step, by class; classes that are not listed share the rest. Empty: no shares."
        ),
    )
    class_by: Literal["slo_class", "tenant"] = Field(
        "slo_class", description="Attribute of a request that is its class, for `class_shares`."
    )

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        total = sum(self.class_shares.values())
        if total > 1.0 + 1e-9:
            raise ValueError(f"class_shares add up to {total:g}, which is more than the whole step (1)")
        return self


class SpaceSharing:
    """Dynamic chunks, with rules for prompts whose KV has reached `long_seq_kv_cache_len_threshold` tokens.

    Below the threshold, a prompt gets the chunk that fits the full target time. At or above the threshold, it gets no
    chunk if another long prefill is in the batch; otherwise its chunk fits target * (1 - clamp(slack, 0, 0.5)), with
    slack as a fraction of the time from arrival to deadline (`LocalReplicaView.slack_fraction`). A long prefill with
    slack thus leaves up to half of the step to short prompts; without slack it takes the whole step. The prioritizer
    must predict slack, as `lrs` and `edf` do.

    `class_shares` is a separate option, off by default: hard limits on the fraction of a step's time that the prompts
    of each class add, to isolate service classes or tenants. In an empty step, a prompt whose class has no time left
    still gets a chunk of the minimum size.

    Source: Medha (arXiv:2409.17264), space sharing; Vajra's public code for threshold and bounds. `class_shares` exists
    because one page of Vajra's documentation describes space sharing as isolation between tenants.
    """

    traits = SchedulerTraits(repeats_decodes=frozenset(SteadyState), needs_slack=True, is_work_conserving=True)
    """`fill` adds only the decodes if no prompt waits or if the decodes fill the batch, so equal steps repeat. If
    nothing runs, a waiting request gets a chunk, so the replica does not idle.
    """

    def __init__(self, config: SpaceSharingConfig, context: PolicyContext) -> None:
        self._config = config
        self._mode = preemption_mode(config, context)
        self._chunks = TargetTime(config, context)
        self._long_prefill: RequestView | None = None
        self._shares: ClassShares | None = None
        if config.class_shares:
            by_tenant = config.class_by == "tenant"
            self._shares = ClassShares(config.class_shares, config.target_batch_time_s, by_tenant=by_tenant)

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Add decodes, then prompts by urgency until the step is predicted to take its target time."""
        self._long_prefill = None
        if self._shares is not None:
            self._shares.start()
        fill(replica, batch, self._next_chunk, self._mode)

    def solo_chunk_size(self, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Return the chunk that fits the full target time: a prompt alone on the replica need not leave any time."""
        return self._chunks.solo_chunk_size(num_done_tokens, num_remaining_tokens, self._config.target_batch_time_s)

    def _next_chunk(self, request: RequestView, batch: BatchBuilder, replica: LocalReplicaView) -> int | None:
        target_s = self._config.target_batch_time_s
        if self._chunks.is_full(batch, target_s):
            return None
        if self._is_long(request, batch):
            if self._long_prefill is not None and self._long_prefill in batch:
                return 0
            slack = replica.slack_fraction(request)
            assert slack is not None  # because the trait `needs_slack` is set
            spared = spared_fraction(slack)
            batch.note(request, spared_fraction=spared)
            target_s *= 1.0 - spared
            if self._chunks.is_full(batch, target_s):
                return 0
            self._long_prefill = request
        if self._shares is not None:
            left_s = self._shares.left_s(request, batch)
            if batch.num_requests and left_s <= self._config.tolerance_fraction * self._shares.budget_s(request):
                return 0
            target_s = min(target_s, batch.predicted_time() + left_s)
        return self._chunks.chunk(request, batch, target_s)

    def _is_long(self, request: RequestView, batch: BatchBuilder) -> bool:
        threshold = self._config.long_seq_kv_cache_len_threshold
        if request.num_known_tokens < threshold:
            return False
        return max(request.num_computed_tokens, batch.cached_tokens(request)) >= threshold


def spared_fraction(slack: float) -> float:
    """Return the fraction of a step that a long prefill leaves to other prompts: `slack`, a fraction of the time from
    arrival to deadline, clamped to 0 .. 0.5.
    """
    return min(max(slack, 0.0), MAX_SPARED_FRACTION)


SPEC = PolicySpec(
    name="space_sharing",
    layer=Layer.REPLICA_SCHEDULER,
    config=SpaceSharingConfig,
    build=SpaceSharing,
    summary=(
        "Dynamic chunks; at most one very long prefill per step, which leaves time to short prompts as far as its "
        "slack allows."
    ),
    source="Medha (arXiv:2409.17264), space sharing; Vajra's scheduling architecture",
    advice=(
        "Use it with `lrs` or `edf` where very long and short prompts run together. Not with prioritizers that do not "
        "predict slack."
    ),
)
