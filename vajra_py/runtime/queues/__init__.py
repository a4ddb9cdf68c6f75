"""Queues of waiting requests in exact priority order.

All queues implement one protocol; which one is used depends on how keys can change (`KeyMotion`) and on whether
requests are ordered by group. The order is total: by (key, arrival, index) or by (key of the group, key, arrival,
index). It always equals a plain sort of all waiting requests at the time of the query, so the queues differ only in
cost.
"""

from __future__ import annotations

from vajra_py.contract import GroupsRequests, KeyMotion, NamesFalls, RequestPrioritizer, TimeLinearPrioritizer
from vajra_py.errors import PolicyError
from vajra_py.runtime.queues.arbitrary import ArbitraryQueue
from vajra_py.runtime.queues.base import HitChanges, RequestQueue
from vajra_py.runtime.queues.grouped import GroupedQueue, KeyedByGroup
from vajra_py.runtime.queues.hits import GroupedHitsQueue, NoHits, PrefixHitsQueue
from vajra_py.runtime.queues.kinetic import KineticQueue
from vajra_py.runtime.queues.named_falls import NamedFallsQueue
from vajra_py.runtime.queues.sorted_queue import SortedQueue

__all__ = [
    "ArbitraryQueue",
    "GroupedHitsQueue",
    "GroupedQueue",
    "HitChanges",
    "KineticQueue",
    "NamedFallsQueue",
    "NoHits",
    "PrefixHitsQueue",
    "RequestQueue",
    "SortedQueue",
    "make_queue",
]


def make_queue(prioritizer: RequestPrioritizer, name: str | None = None) -> RequestQueue:
    """Create the cheapest queue that keeps this prioritizer's order exact. `name`: the policy's name in errors.

    Raises `PolicyError` if the prioritizer's `key_motion` is not a `KeyMotion`, if it is TIME_LINEAR and `line` is
    missing, or if it is NAMED_FALLS and `fallen_requests` is missing.
    """
    motion: object = prioritizer.key_motion  # a plug-in may declare anything
    if isinstance(prioritizer, GroupsRequests) and isinstance(motion, KeyMotion):
        if motion is KeyMotion.STATIC or motion is KeyMotion.PROGRESS:
            return GroupedQueue(prioritizer, name)
        if motion is KeyMotion.PREFIX_HITS:
            return GroupedHitsQueue(prioritizer, name)
        return ArbitraryQueue(KeyedByGroup(prioritizer, name), name)
    if motion is KeyMotion.TIME_LINEAR:
        if isinstance(prioritizer, TimeLinearPrioritizer):
            return KineticQueue(prioritizer, name)
        message = "its key_motion is TIME_LINEAR but it has no method line(request). Allowed: a method that returns (intercept, slope)."
        raise PolicyError(name or type(prioritizer).__name__, message)
    if motion is KeyMotion.STATIC or motion is KeyMotion.PROGRESS:
        return SortedQueue(prioritizer, name)
    if motion is KeyMotion.NAMED_FALLS:
        if isinstance(prioritizer, NamesFalls):
            return NamedFallsQueue(prioritizer, name)
        message = "its key_motion is NAMED_FALLS but it has no fallen_requests. Allowed: a FallenRequests."
        raise PolicyError(name or type(prioritizer).__name__, message)
    if motion is KeyMotion.PREFIX_HITS:
        return PrefixHitsQueue(prioritizer, name)
    if motion is KeyMotion.ARBITRARY or motion is KeyMotion.VOLATILE:
        return ArbitraryQueue(prioritizer, name)
    message = f"its key_motion is not a KeyMotion (got {motion!r}). Allowed: {', '.join(map(str, KeyMotion))}."
    raise PolicyError(name or type(prioritizer).__name__, message)
