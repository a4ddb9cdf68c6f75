"""Figures of all candidates as arrays, one element per candidate; they are read once for each placement and shared by
all parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vajra_py.contract import LoadColumns, ReplicaId, ReplicaLoadView

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]


class Candidates(list[ReplicaLoadView]):
    """Replicas considered for one placement, with the load figures that were read so far.

    `source`: sequence that contains these replicas, and may offer load figures as arrays (`LoadColumns`). `mask`: True
    for each replica of `source` that is a candidate; None: all of them are.
    """

    __slots__ = ("columns", "mask", "source")

    def __init__(
        self, replicas: Iterable[ReplicaLoadView], source: object = None, mask: Sequence[bool] | None = None
    ) -> None:
        super().__init__(replicas)
        self.columns: dict[str, Any] = {}
        self.source: LoadColumns | None = source if isinstance(source, LoadColumns) else None
        self.mask = None if mask is None else np.array(mask, dtype=np.bool_)


def those_up(replicas: Sequence[ReplicaLoadView]) -> Candidates:
    """Return the replicas that take requests."""
    is_up = [one.is_up for one in replicas]
    if all(is_up):
        return Candidates(replicas, replicas)
    return Candidates(compress(replicas, is_up), replicas, is_up)


def candidates(replicas: Sequence[ReplicaLoadView]) -> Candidates:
    """Return the replicas as `Candidates`, whose loads are read on demand."""
    return replicas if isinstance(replicas, Candidates) else Candidates(replicas)


def fitting(
    replicas: Sequence[ReplicaLoadView], fits: NDArray[np.bool_], *, fallback: bool
) -> Sequence[ReplicaLoadView]:
    """Return the replicas for which `fits` is True, in their order; if there are none and `fallback` is True, return
    all.
    """
    if fits.all():
        return replicas
    kept = list(compress(replicas, fits.tolist()))
    return replicas if not kept and fallback else kept


def position_of(replica_id: ReplicaId, replicas: Sequence[ReplicaLoadView]) -> int:
    """Return the position of a replica in a sequence; -1 if the sequence does not contain it."""
    found = np.flatnonzero(ids(replicas) == replica_id)
    return int(found[0]) if len(found) else -1


def ids(replicas: Sequence[ReplicaLoadView]) -> Integers:
    """Return the replicas' ids."""
    found: Integers = _column(replicas, "replica_id", np.int64)
    return found


def running(replicas: Sequence[ReplicaLoadView]) -> Floats:
    """Return for each replica the number of requests that hold KV blocks."""
    return _floats(replicas, "num_running")


def waiting(replicas: Sequence[ReplicaLoadView]) -> Floats:
    """Return for each replica the number of requests in its own queue: assigned and not admitted yet, or preempted."""
    return _floats(replicas, "num_waiting")


def context_tokens(replicas: Sequence[ReplicaLoadView]) -> Floats:
    """Return for each replica the number of tokens whose KV it holds for running requests."""
    return _floats(replicas, "num_context_tokens")


def kv_usage(replicas: Sequence[ReplicaLoadView]) -> Floats:
    """Return the fraction of each replica's KV blocks in use; idle cached blocks count as free, as in vLLM's metric."""
    free, total = _floats(replicas, "free_blocks"), _floats(replicas, "num_blocks")
    usage: Floats = 1.0 - free / np.maximum(total, 1.0)
    return usage


def _floats(replicas: Sequence[ReplicaLoadView], name: str) -> Floats:
    found: Floats = _column(replicas, name, np.float64)
    return found


def _column(replicas: Sequence[ReplicaLoadView], name: str, kind: Any) -> Any:
    if not isinstance(replicas, Candidates):
        return np.array(_READERS[name](replicas), dtype=kind)
    found = replicas.columns.get(name)
    if found is None:
        source = replicas.source
        found = np.asarray(_READERS[name](replicas) if source is None else source.column(name), dtype=kind)
        if source is not None and replicas.mask is not None:
            found = found[replicas.mask]
        replicas.columns[name] = found
    return found


_READERS: dict[str, Any] = {  # attribute access is twice as fast as `getattr`
    "replica_id": lambda replicas: [one.replica_id for one in replicas],
    "num_running": lambda replicas: [one.num_running for one in replicas],
    "num_waiting": lambda replicas: [one.num_waiting for one in replicas],
    "num_pending_tokens": lambda replicas: [one.num_pending_tokens for one in replicas],
    "num_context_tokens": lambda replicas: [one.num_context_tokens for one in replicas],
    "free_blocks": lambda replicas: [one.free_blocks for one in replicas],
    "num_blocks": lambda replicas: [one.num_blocks for one in replicas],
    "max_batch_size": lambda replicas: [one.max_batch_size for one in replicas],
}


def figure(replicas: Sequence[ReplicaLoadView], name: str) -> Floats:
    """Return the figure `name` of each replica: an attribute of `ReplicaLoadView`, or `kv_cache_utilization`."""
    return kv_usage(replicas) if name == "kv_cache_utilization" else _floats(replicas, name)


def min_max(values: Floats, *, lower_is_better: bool = True) -> Floats:
    """Return the values scaled linearly: 0 for the worst, 1 for the best; all 1 if they are equal."""
    if not len(values):
        return values
    low, high = values.min(), values.max()
    if low == high:
        return np.ones(len(values))
    scaled: Floats = (high - values if lower_is_better else values - low) / (high - low)
    return scaled
