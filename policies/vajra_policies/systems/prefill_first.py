"""Decode steps of engines that never mix prefill and decode: decodes run in order of admission, and the latest admitted
one is preempted first.
"""

from __future__ import annotations

from vajra_py.contract import BatchBuilder, LocalReplicaView, Refusal, RequestView


def decode_in_order(replica: LocalReplicaView, batch: BatchBuilder, *, looks_past_the_limit: bool = False) -> None:
    """Add one token for each decode, earliest admission first, up to the batch limit.

    A decode that lacks a block preempts the decode admitted last, possibly itself, but never one that is in the batch
    already. With `looks_past_the_limit`, the first decode beyond a full batch also preempts decodes for a block,
    although it does not run in this step.
    """
    while (stop := batch.add_decodes()) is not None:
        request = stop.request
        if stop.refusal is Refusal.KV_BLOCKS:
            if batch.preempt(replica.decodes()[-1]) is not None:
                return
            continue
        if looks_past_the_limit:
            _make_room_for_next(replica, batch, request)
        return


def _make_room_for_next(replica: LocalReplicaView, batch: BatchBuilder, request: RequestView) -> None:
    next_length = request.num_computed_tokens + 1
    while batch.blocks_needed(request, next_length) > batch.free_blocks:
        victim = replica.decodes()[-1]
        if batch.preempt(victim) is not None or victim is request:
            return
