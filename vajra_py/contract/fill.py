"""Vajra's batch formation: decodes first, then prompts in order of urgency, with chunks sized by a function.

Vajra's replica schedulers share this loop: a policy that only changes the chunk size passes a `ChunkRule` to `fill`. If
no prompt waits, the cost of forming a step does not depend on the number of decodes.

Source: Vajra's scheduling architecture (three-phase batch formation); Sarathi-Serve (OSDI'24) for stall-free batching.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from vajra_py.contract.batch import BatchBuilder, PreemptionMode, Refusal
from vajra_py.contract.requests import RequestView
from vajra_py.contract.views import LocalReplicaView

ChunkRule: TypeAlias = Callable[[RequestView, BatchBuilder, LocalReplicaView], int | None]
"""Function that returns the size in tokens of a prompt's next chunk.

The size is at most `batch.max_chunk(request)` and `batch.tokens_left`. 0 skips this prompt; None ends the addition of
prompts in this step.
"""

MAX_SKIPPED = 10
"""Number of skipped prompts after which a step admits no further prompt (Vajra's bound)."""


def fill(
    replica: LocalReplicaView,
    batch: BatchBuilder,
    next_chunk: ChunkRule,
    preemption_mode: PreemptionMode = PreemptionMode.RECOMPUTE,
) -> None:
    """Form a step: add every decode, with preemptions if blocks are lacking, then partial prefills and waiting prompts
    by urgency.

    A decode that lacks a block preempts the least urgent partial prefill. Without partial prefills, it preempts the
    least urgent decode, possibly itself. If the host has no room for swapping, the victim is recomputed. Prompts come
    from two queues, partial prefills and waiting requests; the more urgent of the two heads is next, and a partial
    prefill wins ties. A prompt that cannot be added is skipped; after ten skipped prompts, no further prompt is
    admitted in this step. A prompt's memory is reserved according to the replica's reservation option.

    Prompts do not preempt other requests, with one exception: if partial prefills hold all memory and none of them can
    grow, no request could run. Then the least urgent partial prefills are preempted until the most urgent one can grow.
    This can only happen with the reservation option `incremental`.
    """
    add_all_decodes(replica, batch, preemption_mode)
    if batch.slots_left <= 0 or batch.tokens_left <= 0:
        return
    if not add_prompts(replica, batch, next_chunk) and not batch.num_requests:
        _free_the_most_urgent(replica, batch, next_chunk, preemption_mode)


def add_all_decodes(replica: LocalReplicaView, batch: BatchBuilder, mode: PreemptionMode) -> None:
    """Add every decode to the batch until it is full; preempt requests if a decode lacks a block."""
    while (stop := batch.add_decodes()) is not None:
        if stop.refusal not in (Refusal.KV_BLOCKS, Refusal.GROUP_BUSY):
            return
        if not _give_way(batch, least_urgent_victim(replica, stop.request), mode):
            return


def least_urgent_victim(replica: LocalReplicaView, needing: RequestView) -> RequestView:
    """Return the victim for a decode that needs blocks: the least urgent partial prefill, or else the least urgent
    decode.

    Returns `needing` itself if the replica has neither.
    """
    partial = replica.partial_prefills()
    if partial:
        return partial[-1]
    return max(replica.decodes(), key=replica.urgency, default=needing)


def add_prompts(replica: LocalReplicaView, batch: BatchBuilder, next_chunk: ChunkRule) -> bool:
    """Add prompts by urgency until the batch is full or the rule returns None.

    After `MAX_SKIPPED` skipped prompts, or without a free block, no further prompt is admitted; partial prefills still
    continue, since they release their memory only when they are done. Returns False if a partial prefill lacked blocks.
    """
    # If `has_looked` is True, `queued` is the next waiting request, or None because no further request waits. If it is
    # False, the next waiting request must still be read.
    has_looked = not replica.num_waiting
    if has_looked and not replica.num_partial_prefills:
        return True
    partial, waiting = iter(replica.partial_prefills()), iter(()) if has_looked else replica.waiting()
    in_progress, queued = next(partial, None), None
    num_skipped = 0
    all_can_grow = True
    while True:
        request = in_progress
        if (queued is not None or not has_looked) and num_skipped < MAX_SKIPPED and batch.free_blocks > 0:
            if not has_looked:
                queued, has_looked = next(waiting, None), True
            if queued is not None and (
                in_progress is None or replica.urgency(queued)[:1] < replica.urgency(in_progress)[:1]
            ):
                # Do not read the next waiting request yet: once `request` is admitted, the next waiting request is the
                # head of the queue, and the head is read fastest.
                request, queued, has_looked = queued, None, False
        if request is None:
            break
        if request is in_progress:
            in_progress = next(partial, None)
            if request in batch:
                continue
        num_tokens = next_chunk(request, batch, replica)
        if num_tokens is None:
            break
        if num_tokens > 0:
            refusal = batch.add(request, num_tokens)
            if refusal is None:
                if batch.tokens_left <= 0 or batch.slots_left <= 0:
                    break
                continue
            if refusal is Refusal.BATCH_FULL or refusal is Refusal.TOKEN_BUDGET:
                break
            if refusal is Refusal.JUST_PREEMPTED:
                continue  # requests preempted in this step do not count towards MAX_SKIPPED
            if refusal is Refusal.KV_BLOCKS and request.is_resident:
                all_can_grow = False
        num_skipped += 1
    return all_can_grow


def _give_way(batch: BatchBuilder, victim: RequestView, mode: PreemptionMode) -> bool:
    """Preempt the victim in the given mode, or else by recompute; return False if both are refused."""
    return batch.preempt(victim, mode) is None or batch.preempt(victim) is None


def _free_the_most_urgent(
    replica: LocalReplicaView, batch: BatchBuilder, next_chunk: ChunkRule, mode: PreemptionMode
) -> None:
    """Preempt partial prefills, the least urgent first, until the most urgent one has the blocks for its next chunk."""
    partial = list(replica.partial_prefills())
    if len(partial) < replica.num_running:
        # This step has no decodes, so the running requests that are not in `partial` are in flight. They may free
        # enough blocks when their step ends.
        return
    first = partial[0]
    while len(partial) > 1:
        if not _give_way(batch, partial.pop(), mode):
            return
        num_tokens = next_chunk(first, batch, replica)
        if not num_tokens or batch.add(first, num_tokens) is not Refusal.KV_BLOCKS:
            return
