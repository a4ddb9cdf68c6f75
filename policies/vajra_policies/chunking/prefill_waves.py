"""Bounded prefill waves: pure decode steps while decodes fill the batch, then a few prompts at once."""

from __future__ import annotations

from pydantic import Field

from vajra_policies.fixed_chunk import FixedChunk, FixedChunkConfig
from vajra_policies.preemption import give_way
from vajra_py.contract import (
    BatchBuilder,
    Layer,
    LocalReplicaView,
    PolicyContext,
    PolicySpec,
    Refusal,
    RequestView,
    SchedulerTraits,
    SteadyState,
    add_all_decodes,
)
from vajra_py.contract.fill import add_prompts, fill, least_urgent_victim


class PrefillWavesConfig(FixedChunkConfig):
    """Parameters of `prefill_waves`."""

    wave_slots: int = Field(
        25,
        ge=1,
        description=(
            "Number of prompts in a wave, including prompts in progress; the default is the source's example for "
            "128 slots."
        ),
    )


class PrefillWaves(FixedChunk):
    """Forms pure decode steps while decodes fill the batch; otherwise, up to `wave_slots` prompts run as one wave.

    A wave's prompts get the free slots. If these are too few, the decodes admitted last are paused: they keep their KV,
    and prompts get their slots. After a wave there may therefore be more decodes than slots; steps are then full of
    decodes until enough decodes have ended. Decodes get the slots that no prompt uses.

    This pays if pure decode steps are faster than others (CUDA graphs) and many requests wait.

    Left out: vLLM's scheduler around the rule; everything else is as in `fixed_chunk`.

    Source: vLLM, pull request 56455, "bounded prefill admission for scheduler".
    """

    traits = SchedulerTraits(repeats_decodes=frozenset({SteadyState.NOTHING_WAITS}), is_work_conserving=True)

    def __init__(self, config: PrefillWavesConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self._wave_slots = config.wave_slots
        self._num_new = 0
        """Number of waiting prompts that the wave may still take."""
        self._offered: RequestView | None = None

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Form a pure decode step, or a step with a wave of prompts."""
        num_slots = batch.slots_left
        num_partial = replica.num_partial_prefills
        if replica.num_decodes >= num_slots:
            add_all_decodes(replica, batch, self._mode)
            if batch.num_requests:
                return
        self._offered = None
        self._num_new = max(min(self._wave_slots - num_partial, replica.num_waiting), 0)
        num_kept = max(num_slots - min(num_partial, self._wave_slots) - self._num_new, 0)
        if replica.num_decodes > num_kept:
            self._add_first_decodes(num_kept, replica, batch)
            add_prompts(replica, batch, self._next_chunk)
        fill(replica, batch, self._next_chunk, self._mode)

    def _add_first_decodes(self, num_kept: int, replica: LocalReplicaView, batch: BatchBuilder) -> None:
        """Add the `num_kept` decodes admitted first; if one lacks blocks, preempt the least urgent requests."""
        for request in list(replica.decodes())[:num_kept]:
            while request.is_resident and batch.add(request, 1) is Refusal.KV_BLOCKS:
                victim = least_urgent_victim(replica, request)
                if not give_way(batch, victim, self._mode):
                    break

    def _next_chunk(self, request: RequestView, batch: BatchBuilder, replica: LocalReplicaView) -> int | None:
        if self._offered is not None and self._offered not in batch:
            self._num_new += 1  # the builder refused the offered prompt, so the wave may take another
        self._offered = None
        num_tokens = super()._next_chunk(request, batch, replica)
        if num_tokens and not request.is_resident:
            if not self._num_new:
                return 0
            self._num_new -= 1
            self._offered = request
        return num_tokens


SPEC = PolicySpec(
    name="prefill_waves",
    layer=Layer.REPLICA_SCHEDULER,
    config=PrefillWavesConfig,
    build=PrefillWaves,
    summary="Pure decode steps while decodes fill the batch; otherwise a bounded number of prompts at once.",
    source="vLLM, pull request 56455",
    advice="Use it for backlogs where pure decode steps are faster (CUDA graphs). Not where TTFT must be low.",
)
