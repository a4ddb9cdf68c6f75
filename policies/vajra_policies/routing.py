"""Helpers of routing policies: which replicas are up, how loaded each is, what to do when none is up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

from vajra_py.contract import QueueView, ReplicaLoadView

LoadUnit: TypeAlias = Literal["requests", "tokens"]


def load_in(unit: LoadUnit) -> Callable[[ReplicaLoadView], int]:
    """Return the function that reads a replica's load.

    `requests`: how many run and wait there. `tokens`: how many tokens these requests have, computed or still to compute.
    """
    return _num_tokens if unit == "tokens" else _num_requests


def _num_requests(replica: ReplicaLoadView) -> int:
    return replica.num_running + replica.num_waiting


def _num_tokens(replica: ReplicaLoadView) -> int:
    return replica.num_pending_tokens + replica.num_context_tokens


def those_up(replicas: Sequence[ReplicaLoadView]) -> list[ReplicaLoadView]:
    """The replicas that take requests."""
    return [replica for replica in replicas if replica.is_up]


def whole_queue(replica: ReplicaLoadView, queued: QueueView, num_batches: int = 1) -> Iterable[str]:
    """Everything in the shared queue, lazily, for a replica that is up and has a free slot and a free KV block.

    `num_batches`: how many steps a replica has in flight at once (its pipeline stages), each with its own slots.
    Without this condition the first replica to ask would look through the queue in vain at every step. Policies that bind
    on arrival use it for requests that came while no replica was up.
    """
    if replica.is_up and replica.num_running < num_batches * replica.max_batch_size and replica.free_blocks > 0:
        return (request.request_id for request in queued)
    return ()
