"""QoServe's chunks: as many prompt tokens as the tightest decode has time for."""

from __future__ import annotations

from pydantic import Field, field_validator

from vajra_policies.preemption import PreemptionConfig, preemption_mode
from vajra_policies.slo.targets import token_due_at
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


class SlackChunkConfig(PreemptionConfig):
    """Parameters of `slack_chunk`; the defaults are those of QoServe's code."""

    sizes: tuple[int, ...] = Field(
        (128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2552),
        min_length=1,
        description="Query tokens that a step with prompts may have in all, ascending.",
        json_schema_extra={"unit": "tokens"},
    )
    safety_factor: float = Field(1.2, ge=1, description="Factor of predicted step times, for safety.")

    @field_validator("sizes")
    @classmethod
    def _ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if value[0] < 1 or list(value) != sorted(set(value)):
            raise ValueError(
                f"sizes are not ascending numbers of at least 1 (got {value}). Allowed: such as [128, 512]"
            )
        return value


class SlackChunk:
    """Fills each step to the largest of `sizes` for which safety_factor * T is at most the least slack of the decodes.

    T is the predicted time of the step with this number of tokens. If no size qualifies, the smallest size is used.

    Slack of a decode: arrival + max(TTFT, TTFT SLO) + TBT SLO * i - now, with i its number of output tokens. If decodes
    are ahead of their SLOs, chunks become larger. Decodes without an SLO do not count; without decodes that count, the
    largest size is used.

    Left out: smaller sizes when KV memory runs short.

    Source: QoServe (arXiv:2503.22562), dynamic chunking; constants of its branch of Sarathi-Serve.
    """

    traits = SchedulerTraits(repeats_decodes=frozenset(SteadyState), is_work_conserving=True)
    """`fill` adds only the decodes if no prompt waits or if the decodes fill the batch, so equal steps repeat. If
    nothing runs, a waiting request gets a chunk, so the replica does not idle.
    """

    def __init__(self, config: SlackChunkConfig, context: PolicyContext) -> None:
        self._sizes = config.sizes
        self._safety = config.safety_factor
        self._mode = preemption_mode(config, context)
        self._slack_s = 0.0

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Add decodes, then prompts by urgency up to the size that the decodes' slack allows."""
        if replica.num_waiting or replica.num_partial_prefills:
            due = (token_due_at(request) for request in replica.decodes())
            self._slack_s = min((at for at in due if at is not None), default=float("inf")) - now
        fill(replica, batch, self._next_chunk, self._mode)

    def solo_chunk_size(self, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Return the largest of `sizes`, or the remaining tokens if these are fewer."""
        return min(self._sizes[-1], num_remaining_tokens)

    def _next_chunk(self, request: RequestView, batch: BatchBuilder, replica: LocalReplicaView) -> int | None:
        smallest = self._sizes[0] - batch.num_tokens
        for size in reversed(self._sizes):
            num_tokens = min(size - batch.num_tokens, batch.tokens_left, batch.max_chunk(request))
            if num_tokens <= max(smallest, 0):
                break
            if self._safety * batch.predicted_time_with(request, num_tokens) <= self._slack_s:
                return num_tokens
        room = min(smallest, batch.tokens_left)
        return min(batch.max_chunk(request), room) if room > 0 else None


SPEC = PolicySpec(
    name="slack_chunk",
    layer=Layer.REPLICA_SCHEDULER,
    config=SlackChunkConfig,
    build=SlackChunk,
    summary="Decodes first, then as many prompt tokens, by urgency, as the tightest slack of a decode allows.",
    source="QoServe / Niyama (arXiv:2503.22562, ASPLOS'26)",
    advice=(
        "Use it with `qoserve` where requests have TBT SLOs: decodes that are ahead of their TBT SLO leave time to "
        "prompts. Not without SLOs: every step then has the largest size."
    ),
)
