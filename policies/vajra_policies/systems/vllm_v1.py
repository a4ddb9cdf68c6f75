"""vLLM's V1 scheduler: running requests in order of admission, then waiting ones from the head, under one token budget."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vajra_policies.systems.whole_prompts import outgrows
from vajra_py.contract import (
    BatchBuilder,
    DecodeStop,
    Layer,
    LocalReplicaView,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    Refusal,
    ReplicaLoadView,
    RequestView,
    SchedulerTraits,
    SteadyState,
)


class VllmV1Config(PolicyConfig):
    """Parameters of `vllm_v1`. Token budget and batch limit are the replica's (`max_batch_tokens`, `max_batch_size`)."""

    victim: Literal["latest_admitted", "lowest_priority"] = Field(
        "latest_admitted",
        description=(
            "Victim when a running request needs a block: the one admitted last (vLLM's fcfs), or the one with the numerically highest priority, then the latest arrival (vLLM's priority)."
        ),
    )
    max_num_active_requests: int | None = Field(
        None,
        ge=1,
        description="Number of requests holding memory from which none is admitted; null: the replica's batch limit.",
    )
    long_prefill_threshold_tokens: int = Field(
        0,
        ge=0,
        description=(
            "Maximum number of tokens of one request in a step while other requests wait or run, tokens; 0: no cap."
        ),
        json_schema_extra={"unit": "tokens"},
    )
    adaptive_long_prefill_threshold: bool = Field(
        False, description="Raise the cap to an equal share of the token budget if the share is larger."
    )
    adaptive_share_tokens: int | None = Field(
        None,
        ge=1,
        description=(
            "Number of tokens that is divided into equal shares (vLLM's `max_num_batched_tokens`, if "
            "`max_num_scheduled_tokens` is less); null: the token budget."
        ),
        json_schema_extra={"unit": "tokens"},
    )
    chunked_prefill: bool = Field(
        True, description="Split a waiting prompt that exceeds the remaining budget; false: admission stops there."
    )
    reserve_full_prompt: bool = Field(
        True, description="Admit a request only if its whole known sequence fits; nothing is reserved."
    )
    watermark_fraction: float = Field(
        0.0, ge=0, lt=1, description="Fraction of all KV blocks that admission leaves free while other requests run."
    )
    prefill_interval_steps: int = Field(
        1,
        ge=1,
        description=(
            "Number of steps from one step with prompts to the next, unless requests queue up; 1: every step may "
            "have prompts."
        ),
        json_schema_extra={"unit": "steps"},
    )
    continues_after_own_preemption: bool = Field(
        True,
        description=(
            "Let the running requests behind one that was preempted for its own lack of blocks still be scheduled (vLLM 0.33); false: the step's running requests end there (0.32). Has an effect only with `lowest_priority`."
        ),
    )


class VllmV1:
    """Adds running requests, then waiting ones, without separate prefill and decode phases: a decode is a request with
    one token left to compute.

    1. Running requests, in order of (latest) admission, get their remaining tokens, limited by threshold and budget. A
      request that lacks blocks preempts a victim, possibly itself, and possibly one already in this step: the victim
      leaves the step and its tokens return to the budget. The request that needed the blocks keeps the chunk size with
      which it was first tried.
    2. If no request was preempted, waiting requests are admitted from the head until budget, limit or blocks are used
      up. Only a request that waits for its KV or its adapter is passed over; no request is preempted for the head.

    Differences from vLLM: its null block is not a block here, so `num_blocks` is one less (the watermark still counts
    it); exact ties of priority and arrival go by submission, not by the text of the id; blocks cached for tokens that a
    victim then did not compute are removed from the prefix cache.

    Source: vLLM 0.33, `vllm/v1/core/sched/scheduler.py` (synchronous scheduler); Kwon et al., SOSP'23.
    """

    def __init__(self, config: VllmV1Config, context: PolicyContext) -> None:
        limits = context.limits
        self._config = config
        self._budget = limits.max_batch_tokens
        self._max_active = config.max_num_active_requests or limits.max_batch_size
        self._watermark = int(config.watermark_fraction * (limits.num_blocks + 1))
        self._interval = config.prefill_interval_steps
        # With an interval, `schedule` counts steps, so every step must be formed by a call of `schedule`.
        steady = frozenset(SteadyState) if self._interval == 1 else frozenset()
        self.traits = SchedulerTraits(repeats_decodes=steady)
        self._num_steps = 0
        self._last_prefill_step = -self._interval
        self._is_backed_up = False

    def solo_chunk_size(self, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Return the whole budget, or the remaining tokens if these are fewer.

        The threshold for long prompts does not apply to a prompt that is alone.
        """
        return num_remaining_tokens if self._budget is None else min(num_remaining_tokens, self._budget)

    def refuses(self, request: RequestView, replica: ReplicaLoadView, now: float) -> str | None:
        """Without chunked prefill, return a reason for refusal if the request's sequence can outgrow the budget: it
        could wait forever.
        """
        if self._config.chunked_prefill:
            return None
        return outgrows(request, self._budget, "tokens without chunked prefill")

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Add running requests, then waiting requests."""
        cap = self._cap(replica, batch)
        if self._interval == 1:
            self._add_running(replica, batch, cap, holds=False)
            if replica.num_waiting and not batch.num_preempted:
                self._admit(replica, batch, cap, holds=False)
            return
        holds = self._holds(replica)
        self._add_running(replica, batch, cap, holds=holds)
        has_prefill = any(request in batch for request in replica.partial_prefills())
        if not batch.num_preempted:
            has_prefill |= self._admit(replica, batch, cap, holds=holds)
            if not holds:  # only a step without preemptions and held-back prompts shows whether requests queue up
                self._is_backed_up = replica.num_waiting > 0
        if batch.num_requests:
            self._num_steps += 1
            if has_prefill:
                self._last_prefill_step = self._num_steps

    def _cap(self, replica: LocalReplicaView, batch: BatchBuilder) -> int | None:
        threshold = self._config.long_prefill_threshold_tokens
        num_requests = replica.num_running + replica.num_waiting
        if not threshold or num_requests <= 1:
            return None
        if self._config.adaptive_long_prefill_threshold:
            return max(threshold, (self._config.adaptive_share_tokens or batch.tokens_left) // num_requests)
        return threshold

    def _holds(self, replica: LocalReplicaView) -> bool:
        """Return True if prompts are held back to make this a pure decode step."""
        if self._is_backed_up or self._num_steps + 1 - self._last_prefill_step >= self._interval:
            return False
        return replica.num_decodes > 0

    # Running requests

    def _add_running(self, replica: LocalReplicaView, batch: BatchBuilder, cap: int | None, *, holds: bool) -> None:
        while (stop := batch.add_decodes() if holds else batch.add_running(cap)) is not None:
            if stop.refusal is not Refusal.KV_BLOCKS or not self._make_room(replica, batch, stop, cap):
                return

    def _make_room(self, replica: LocalReplicaView, batch: BatchBuilder, stop: DecodeStop, cap: int | None) -> bool:
        """Preempt requests until `stop.request` fits or is itself preempted.

        Returns True if further running requests may be added to the step.
        """
        request = stop.request
        num_tokens = min(batch.max_chunk(request), batch.tokens_left)
        if cap is not None:
            num_tokens = min(num_tokens, cap)
        while True:
            victim = self._victim(replica)
            if batch.preempt(victim) is not None:
                return False
            if victim is request:
                return self._config.continues_after_own_preemption
            if batch.add(request, num_tokens) is None:
                return True

    def _victim(self, replica: LocalReplicaView) -> RequestView:
        running = replica.running()
        if self._config.victim == "latest_admitted":
            return running[-1]
        # Of requests with equal keys, `max` returns the first, which was admitted first.
        return max(running, key=_priority_and_arrival)

    # Waiting requests

    def _admit(self, replica: LocalReplicaView, batch: BatchBuilder, cap: int | None, *, holds: bool) -> bool:
        """Admit waiting requests from the head; return True if any admitted one has more than one token to compute."""
        has_prefill = False
        waiting = iter(replica.waiting())  # reading a request may query the KV connector, so read no more than needed
        while batch.tokens_left > 0 and replica.num_running < self._max_active:
            request = next(waiting, None)
            if request is None:
                break
            known = request.num_known_tokens
            num_cached = batch.cached_tokens(request)
            if holds and num_cached < known - 1:
                break
            num_tokens = min(known - num_cached, batch.max_chunk(request))
            if cap is not None:
                num_tokens = min(num_tokens, cap)
            if num_tokens > batch.tokens_left:
                if not self._config.chunked_prefill:
                    break
                num_tokens = batch.tokens_left
            end = num_cached + num_tokens
            must_fit = known if self._config.reserve_full_prompt else end
            watermark = self._watermark if replica.num_running else 0
            if batch.blocks_needed(request, must_fit, in_steps=must_fit > end) + watermark > batch.free_blocks:
                break
            if watermark and must_fit > end and batch.blocks_needed(request, end) + watermark > batch.free_blocks:
                break  # with sliding windows, this chunk can need more blocks than the whole prompt in several steps
            refusal = batch.add(request, num_tokens, reserve_tokens=end)
            if refusal is Refusal.LOADING or refusal is Refusal.ADAPTER:
                continue  # a request that waits for its KV or adapter does not block those behind it
            if refusal is not None:
                break
            has_prefill = has_prefill or num_cached < known - 1
        return has_prefill


def _priority_and_arrival(request: RequestView) -> tuple[int, float]:
    return request.priority, request.arrived_at


SPEC = PolicySpec(
    name="vllm_v1",
    layer=Layer.REPLICA_SCHEDULER,
    config=VllmV1Config,
    build=VllmV1,
    summary="vLLM V1: running requests in order of admission, then waiting ones, under one token budget.",
    source="vLLM 0.33, V1 scheduler",
    advice=(
        "Use it to predict vLLM, or as the baseline of most papers. Not for TBT SLOs: chunks are not sized by the "
        "time of the step."
    ),
)
