"""ORCA: iteration-level batching, first come first served, with memory for the longest output reserved at admission."""

from __future__ import annotations

from vajra_policies.systems.whole_prompts import needs_whole_prompts
from vajra_py.contract import (
    BatchBuilder,
    Layer,
    LocalReplicaView,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    ReplicaLoadView,
    RequestView,
    SchedulerTraits,
    SteadyState,
)


class OrcaConfig(PolicyConfig):
    """Parameters of `orca`, which has none: the paper's max_bs is the replica's `max_batch_size`, its n_slots the KV
    memory.
    """


class Orca:
    """Each iteration runs up to max_bs requests in order of arrival: running requests, then new ones with their whole
    prompts.

    A request is admitted only if memory for its prompt and longest possible output can be reserved; the first request
    for which this fails ends the selection. No request therefore lacks memory later, and none is preempted. Prompts are
    not cut, and one iteration mixes prompts and decodes (selective batching).

    Choices where the paper is silent: memory is counted in KV blocks; the last token's KV, which is never computed, is
    not counted. A token budget of the replica, which ORCA does not have, must be at least as large as any prompt.

    Source: Yu et al., ORCA, OSDI'22, Algorithm 1 (with one worker: an iteration returns before the next begins).
    """

    traits = SchedulerTraits(repeats_decodes=frozenset(SteadyState))
    """Decode steps repeat while nothing waits, or while decodes fill the batch."""

    def __init__(self, config: OrcaConfig, context: PolicyContext) -> None:
        self._token_limit = context.limits.max_batch_tokens

    def solo_chunk_size(self, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Return all remaining tokens, since prompts are computed in one piece."""
        return num_remaining_tokens

    def refuses(self, request: RequestView, replica: ReplicaLoadView, now: float) -> str | None:
        """Return a reason for refusal if no step can hold the prompt: the request would wait at the head forever."""
        limit = self._token_limit
        if limit is None or request.num_prompt_tokens <= limit:
            return None
        return f"the prompt ({request.num_prompt_tokens} tokens) is computed in one step, which takes at most {limit} tokens"

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Add all running requests, then waiting requests while slots and memory suffice."""
        if batch.add_decodes() is not None or not replica.num_waiting or batch.slots_left <= 0:
            return
        most = replica.limits.num_blocks * replica.limits.block_size  # upper bound of a reservation: all KV memory
        for request in replica.waiting():
            longest = min(request.num_prompt_tokens + request.max_tokens - 1, most)
            if batch.add(request, batch.max_chunk(request), reserve_tokens=longest) is not None:
                return


def _build(config: OrcaConfig, context: PolicyContext) -> Orca:
    needs_whole_prompts(context)
    return Orca(config, context)


SPEC = PolicySpec(
    name="orca",
    layer=Layer.REPLICA_SCHEDULER,
    config=OrcaConfig,
    build=_build,
    summary="ORCA: iteration-level batching without chunks; memory for the longest output is reserved at admission.",
    source="ORCA (OSDI'22), Algorithm 1",
    advice=(
        "Use it as the baseline of papers from before paged memory and chunked prefill. Not in production: memory for "
        "the longest output is reserved from the start, and long prompts stall all decodes."
    ),
)
