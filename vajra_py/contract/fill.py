"""Vajra's way to fill a step: decodes first, then prompts in order of urgency with chunks sized by a rule.

The loop that Vajra's replica schedulers share: a policy that only wants another chunk size passes one function to `fill`.
What a step without waiting prompts costs does not depend on how many requests decode.

Source: Vajra's scheduling architecture (three-phase batch formation); Sarathi-Serve (OSDI'24) for stall-free batching.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from vajra_py.contract.batch import BatchBuilder, PreemptionMode, Refusal
from vajra_py.contract.requests import RequestView
from vajra_py.contract.views import LocalReplicaView

ChunkRule: TypeAlias = Callable[[RequestView, BatchBuilder, LocalReplicaView], int | None]
"""Tokens that the next chunk of a prompt gets in this step (at most `batch.max_chunk(request)` and `batch.tokens_left`).

0 passes this prompt over; after None no further prompt gets anything in this step.
"""

MAX_SKIPPED = 10
"""Number of prompts that a step may pass over before it stops looking (Vajra's bound)."""


def fill(
    replica: LocalReplicaView,
    batch: BatchBuilder,
    next_chunk: ChunkRule,
    preemption_mode: PreemptionMode = PreemptionMode.RECOMPUTE,
) -> None:
    """Form a step: every decode, preempting for blocks as needed, then partial prefills and waiting prompts by urgency.

    A decode that finds no block preempts the least urgent partial prefill, else the least urgent decode, which may be
    itself. Where the host has no room to swap to, the victim is recomputed. Prompts are taken from two sources, the more
    urgent head first; a partial prefill wins ties. What cannot be taken now is passed over; after ten of them nothing
    more is admitted in this step. The prompt's memory is reserved by the replica's reservation option.

    Memory for prompts is never taken from others, with one exception: when nothing else could run, since partial
    prefills hold all of it and none can grow (possible with the reservation option `incremental` alone), the least urgent of
    them are preempted until the most urgent one can grow.
    """
    add_all_decodes(replica, batch, preemption_mode)
    if batch.slots_left <= 0 or batch.tokens_left <= 0:
        return
    if not add_prompts(replica, batch, next_chunk) and not batch.num_requests:
        _free_the_most_urgent(replica, batch, next_chunk, preemption_mode)


def add_all_decodes(replica: LocalReplicaView, batch: BatchBuilder, mode: PreemptionMode) -> None:
    """Put every decode into the batch, making room for each that lacks a block; stops when the batch is full."""
    while (stop := batch.add_decodes()) is not None:
        if stop.refusal not in (Refusal.KV_BLOCKS, Refusal.GROUP_BUSY):
            return
        if not _give_way(batch, least_urgent_victim(replica, stop.request), mode):
            return


def least_urgent_victim(replica: LocalReplicaView, needing: RequestView) -> RequestView:
    """The victim so that `needing` can decode: the least urgent partial prefill, else the least urgent decode."""
    partial = replica.partial_prefills()
    if partial:
        return partial[-1]
    return max(replica.decodes(), key=replica.urgency, default=needing)


def add_prompts(replica: LocalReplicaView, batch: BatchBuilder, next_chunk: ChunkRule) -> bool:
    """Take prompts by urgency until the batch is full or the rule ends the step.

    After `MAX_SKIPPED` prompts were passed over, or without any free block, nothing more is admitted; partial prefills
    still get their turn, since memory that they hold comes back only when they are done. False when one of them was
    refused the blocks to go on.
    """
    has_looked = not replica.num_waiting  # looks at the queue as late as possible: cheapest once its head has left
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
                continue  # victims of this step do not count towards MAX_SKIPPED
            if refusal is Refusal.KV_BLOCKS and request.is_resident:
                all_can_grow = False
        num_skipped += 1
    return all_can_grow


def _give_way(batch: BatchBuilder, victim: RequestView, mode: PreemptionMode) -> bool:
    """Preempt the victim in the given mode, by recompute where the host is full; False when neither is possible."""
    return batch.preempt(victim, mode) is None or batch.preempt(victim) is None


def _free_the_most_urgent(
    replica: LocalReplicaView, batch: BatchBuilder, next_chunk: ChunkRule, mode: PreemptionMode
) -> None:
    partial = list(replica.partial_prefills())
    if len(partial) < replica.num_running:
        return  # others are in flight and may free enough
    first = partial[0]
    while len(partial) > 1:
        if not _give_way(batch, partial.pop(), mode):
            return
        num_tokens = next_chunk(first, batch, replica)
        if not num_tokens or batch.add(first, num_tokens) is not Refusal.KV_BLOCKS:
            return
