"""Steps of a target duration: decodes first, then prompts in the largest chunks that keep the step within the target."""

from __future__ import annotations

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


class DynamicChunkConfig(TargetTimeConfig):
    """Parameters of `dynamic_chunk`."""


class DynamicChunk:
    """Chooses the largest chunk with which the predicted step time stays within the target, given the batch so far.

    Chunks are multiples of 32 tokens from `min_chunk` to `max_chunk`, except for a prompt's last chunk. Once the step
    takes more than (1 - tolerance_fraction) of its target, no further prompt is added. The longer the context of a
    prompt, the smaller are its chunks, so that its steps do not take longer.

    Source: Vajra's scheduling architecture, dynamic-chunk replica scheduler; Medha (arXiv:2409.17264), adaptive chunking.
    """

    traits = SchedulerTraits(repeats_decodes=frozenset(SteadyState), is_work_conserving=True)
    """`fill` adds only the decodes if no prompt waits or if the decodes fill the batch, so equal steps repeat. If
    nothing runs, a waiting request gets a chunk, so the replica does not idle.
    """

    def __init__(self, config: DynamicChunkConfig, context: PolicyContext) -> None:
        self._target_s = config.target_batch_time_s
        self._mode = preemption_mode(config, context)
        self._chunks = TargetTime(config, context)

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Add decodes, then prompts by urgency until the predicted duration of the step reaches the target."""
        fill(replica, batch, self._next_chunk, self._mode)

    def solo_chunk_size(self, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Return the chunk of a prompt that is alone on the replica, found by the search that `schedule` uses."""
        return self._chunks.solo_chunk_size(num_done_tokens, num_remaining_tokens, self._target_s)

    def _next_chunk(self, request: RequestView, batch: BatchBuilder, replica: LocalReplicaView) -> int | None:
        if self._chunks.is_full(batch, self._target_s):
            return None
        return self._chunks.chunk(request, batch, self._target_s)


SPEC = PolicySpec(
    name="dynamic_chunk",
    layer=Layer.REPLICA_SCHEDULER,
    config=DynamicChunkConfig,
    build=DynamicChunk,
    summary="Decodes first, then prompts by urgency, in the largest chunks that keep the predicted step time at a target.",
    source="Vajra's scheduling architecture, dynamic chunk; Medha (arXiv:2409.17264), adaptive chunking",
    advice="Use it where requests have TBT SLOs: each step has a target time. Not without an accurate latency model.",
)
