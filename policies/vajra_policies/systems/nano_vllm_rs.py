"""The Rust nano-vllm: mixed steps, chunked prefill, priorities, and preemption by swapping."""

from __future__ import annotations

from collections.abc import Container

from pydantic import Field

from vajra_policies.preemption import give_way
from vajra_policies.systems.whole_prompts import outgrows
from vajra_py.contract import (
    BatchBuilder,
    Layer,
    LocalReplicaView,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    PreemptionMode,
    Refusal,
    ReplicaLoadView,
    RequestView,
    SchedulerTraits,
    SteadyState,
)

_NO_ROOM_HELPS = frozenset({Refusal.LOADING, Refusal.NOT_ADMITTED, Refusal.JUST_PREEMPTED})
"""Refusals of a waiting request that preempting other requests would not change."""


class NanoVllmRsConfig(PolicyConfig):
    """Parameters of `nano_vllm_rs`. The engine's option `max_num_seqs`, the maximum number of concurrent sequences, is
    the replica's `max_batch_size`.
    """

    prefill_budget_tokens: int = Field(
        4096,
        ge=1,
        description="Maximum number of prompt tokens of a step, tokens; decodes are not counted.",
        json_schema_extra={"unit": "tokens"},
    )
    chunked_prefill: bool = Field(True, description="Split prompts into chunks.")
    chunk_size: int = Field(
        512,
        ge=1,
        description="Maximum number of tokens of one prompt in a step, tokens.",
        json_schema_extra={"unit": "tokens"},
    )
    preemption: bool = Field(
        True,
        description=(
            "Preempt requests of lower priority for more urgent waiting ones and for decodes that need a block; false: admission reserves memory for the longest output, so that no preemption is needed."
        ),
    )


class NanoVllmRs:
    """Each step: a token for every decode, a chunk for every prompt in progress, then admissions by priority.

    The engine's code and its document disagree in several places, and the document leaves others open. This class
    follows its stated intent ("no sequence ever waits for another to finish", "will resume when memory available"):

    - *Swapped requests resume.* They wait with all others in order of priority, then arrival, and return with their KV
      when it fits (`PreemptionMode.SWAP`; recomputed if host memory is full or absent).
    - *Chunks follow each other.* Prompts in progress continue before any request is admitted, most urgent first. Each
      gets at most `chunk_size` tokens per step, cut to the remaining budget, as in the document's example of ten
      tokens.
    - *Urgent requests get memory.* If the head of the queue lacks only memory, running requests of strictly lower
      priority are preempted, but only if that makes enough room. The lowest priority goes first and, among equals, the
      request admitted last. The head is admitted in the same step. (If equal priority sufficed, requests would preempt
      each other forever.) No request is preempted for a head that waits for its KV or its adapter. Under a prioritizer
      other than `priority`, a step may preempt a request that it has just admitted; if that leaves the step empty,
      because blocks are shared or pinned, no request is preempted for that head again.
    - *Decodes that need a block get one.* The request of lowest priority is preempted, among equals the one admitted
      last, possibly the decode itself. (The code lets the decode continue without a block.)
    - *`max_num_seqs` counts all running requests*, including prompts in progress, as in its description ("to run
      concurrently").
    - The prefill budget counts only prompt tokens, as its name says; it may be used up exactly.
    - The head of the queue is never overtaken: the first request that cannot be admitted ends the admissions of the
      step.

    Lower numbers are more urgent, as everywhere in Vajra (in the Rust engine, higher ones are).

    Source: appleparan/nano-vllm-rs, `docs/scheduler.md`.
    """

    traits = SchedulerTraits(repeats_decodes=frozenset(SteadyState))
    """While decodes fill the batch, no waiting request is considered: none is admitted, and none causes preemptions."""

    def __init__(self, config: NanoVllmRsConfig, context: PolicyContext) -> None:
        limit = context.limits.max_batch_tokens
        self._budget = config.prefill_budget_tokens if limit is None else min(config.prefill_budget_tokens, limit)
        self._chunk_size = config.chunk_size if config.chunked_prefill else None
        self._preempts = config.preemption
        self._max_running = context.limits.max_batch_size
        self._in_vain: RequestView | None = None
        """Waiting request for which a step preempted all requests that the step had just admitted, so that the step
        stayed empty. No request is preempted for this waiting request again.
        """

    def solo_chunk_size(self, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Return the next chunk: with `chunked_prefill`, even a prompt alone on the replica is cut into chunks."""
        return num_remaining_tokens if self._chunk_size is None else self._cut(num_remaining_tokens, self._budget)

    def refuses(self, request: RequestView, replica: ReplicaLoadView, now: float) -> str | None:
        """Without chunked prefill, return a reason for refusal if the request's sequence can outgrow the budget: it
        might wait at the head forever.
        """
        return outgrows(request, self._budget, "prompt tokens") if self._chunk_size is None else None

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Add decodes, then prompts in progress, then newly admitted requests."""
        self._decode(replica, batch)
        left = self._budget
        if replica.num_partial_prefills:
            left -= self._continue_prompts(replica, batch, left)
        if replica.num_waiting:
            self._admit(replica, batch, left)

    def _decode(self, replica: LocalReplicaView, batch: BatchBuilder) -> None:
        while (stop := batch.add_decodes()) is not None and stop.refusal is Refusal.KV_BLOCKS:
            if not give_way(batch, max(replica.running(), key=_victim_key), PreemptionMode.SWAP):
                return

    def _continue_prompts(self, replica: LocalReplicaView, batch: BatchBuilder, budget: int) -> int:
        """Add the next chunks of prompts in progress; return their number of tokens."""
        num_added = 0
        for request in replica.partial_prefills():
            num_tokens = self._chunk(request, batch, budget - num_added)
            if num_tokens <= 0 or batch.add(request, num_tokens) is not None:
                break
            num_added += num_tokens
        return num_added

    def _admit(self, replica: LocalReplicaView, batch: BatchBuilder, budget: int) -> None:
        admitted: set[RequestView] = set()
        for request in replica.waiting():
            if replica.num_running >= self._max_running:
                return
            swapped_decode = request.is_swapped and request.num_remaining_tokens == 1
            num_tokens = 1 if swapped_decode else self._chunk(request, batch, budget)
            if num_tokens <= 0:
                return
            to_hold = request.num_known_tokens
            if not self._preempts:
                to_hold = request.num_prompt_tokens + request.max_tokens - 1
            refusal = batch.add(request, num_tokens, reserve_tokens=to_hold)
            may_preempt = self._preempts and refusal not in _NO_ROOM_HELPS and request is not self._in_vain
            if refusal is not None and may_preempt:
                takes_back = self._make_room(replica, batch, request, admitted)
                refusal = batch.add(request, num_tokens, reserve_tokens=to_hold)
                if takes_back and not batch.num_requests:
                    self._in_vain = request
            if refusal is not None:
                return
            admitted.add(request)
            if not swapped_decode:
                budget -= num_tokens

    def _chunk(self, request: RequestView, batch: BatchBuilder, budget: int) -> int:
        """Return the number of tokens of the next chunk; 0 if the budget has no room for it."""
        num_tokens = batch.max_chunk(request)
        if self._chunk_size is None:
            return num_tokens if num_tokens <= budget else 0
        return self._cut(num_tokens, min(budget, batch.tokens_left))

    def _cut(self, num_tokens: int, budget: int) -> int:
        assert self._chunk_size is not None
        return min(num_tokens, self._chunk_size, budget)

    def _make_room(
        self, replica: LocalReplicaView, batch: BatchBuilder, request: RequestView, admitted: Container[RequestView]
    ) -> bool:
        """Preempt requests of lower priority for a waiting one, if their blocks together seem to suffice.

        Shared and pinned blocks stay in use, so room may still be missing afterwards. Returns True if a request
        admitted in this step was preempted.
        """
        needed = batch.blocks_needed(request, request.num_known_tokens)
        victims = sorted((one for one in replica.running() if one.priority > request.priority), key=_victim_key)
        if batch.free_blocks + sum(_held_blocks(replica, batch, one) for one in victims) < needed:
            return False
        takes_back = False
        while victims and needed > batch.free_blocks:
            victim = victims.pop()
            if not give_way(batch, victim, PreemptionMode.SWAP):
                break
            takes_back |= victim in admitted
        return takes_back


def _victim_key(request: RequestView) -> tuple[int, int]:
    """Return (priority, order of admission). The request with the largest key is preempted first: the least urgent one
    or, among equally urgent ones, the one admitted last.
    """
    return request.priority, request.admitted_index


def _held_blocks(replica: LocalReplicaView, batch: BatchBuilder, request: RequestView) -> int:
    """Return the number of KV blocks of a running request.

    The blocks cover all known tokens of the request or, for a decode that is not yet in this step's batch, only the
    computed ones.
    """
    has_all = request in batch or request.num_remaining_tokens > 1
    return replica.blocks_for(request.num_known_tokens if has_all else request.num_computed_tokens)


SPEC = PolicySpec(
    name="nano_vllm_rs",
    layer=Layer.REPLICA_SCHEDULER,
    config=NanoVllmRsConfig,
    build=NanoVllmRs,
    summary="Rust nano-vllm: mixed steps, chunks, priorities, preemption to host memory with resume.",
    source="nano-vllm-rs, scheduler document",
    advice=(
        "Use it to predict the Rust nano-vllm. Not as an example of a short policy: it reproduces a system's rules "
        "one by one (`preemptive`)."
    ),
)
