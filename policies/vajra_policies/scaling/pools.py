"""Figures of a pool that scalers read."""

from __future__ import annotations

from collections.abc import Sequence

from vajra_py.contract import PoolView, ReplicaLoadView, ReplicaState


def replicas_in(pool: PoolView, state: ReplicaState) -> Sequence[ReplicaLoadView]:
    """Return the pool's replicas in this state."""
    return [one for one in pool.replicas if one.state is state]


def num_active(pool: PoolView) -> int:
    """Return the number of replicas that are starting or up, which is the number that a scaler sets."""
    return sum(one.state in (ReplicaState.STARTING, ReplicaState.UP) for one in pool.replicas)


def within_bounds(pool: PoolView, wanted: int) -> int:
    """Return the number of replicas nearest to `wanted` that the pool may have."""
    return min(max(wanted, pool.min_replicas), pool.max_replicas)


def shared_requests(pool: PoolView) -> int:
    """Return the number of requests for this pool that are in no replica's queue.

    These are the requests in the shared queue, if the pool's replicas may pull from it, and the requests that wait for
    blocks of a decode replica before their prompt is computed in this pool.
    """
    return max(0, pool.num_queued - sum(one.num_waiting for one in pool.replicas))


def shared_tokens(pool: PoolView) -> int:
    """Return the number of tokens left to compute of `shared_requests`: those of all queued requests of the pool, less
    the pending tokens of its replicas. The result may be too small, since running requests have pending tokens too.
    """
    return max(0, pool.num_queued_tokens - sum(one.num_pending_tokens for one in pool.replicas))
