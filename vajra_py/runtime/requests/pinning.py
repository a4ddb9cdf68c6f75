"""Creation and end of the pins of one replica's cached content, with reports to observers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import isfinite
from numbers import Real

from vajra_py.contract import RequestView
from vajra_py.contract.observer import Observer, PinEnd
from vajra_py.runtime.kv import KvMemory
from vajra_py.runtime.requests.request import Request

FURTHEST_S = 1e9
"""Maximum duration of a pin in seconds."""


def pin_name(request: RequestView) -> Hashable:
    """Return the name of a request's pin: its tenant and session, or its id if it has no session."""
    return (request.tenant, request.session_id) if request.session_id else request.request_id


def checked_seconds(seconds: object) -> float:
    """Return `seconds`, a pin's duration, as a float of at most `FURTHEST_S`. Raises `ValueError` if `seconds` is
    negative or not a finite number.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not isfinite(seconds) or seconds < 0:
        raise ValueError(f"a pin lasts a number of seconds (got {seconds!r}). Allowed: 0 to {FURTHEST_S:.0f}")
    return min(float(seconds), FURTHEST_S)


class Pinning:
    """Makes and ends the pins of one replica."""

    def __init__(self, replicaset: str, replica_id: int, memory: KvMemory) -> None:
        self._where = replicaset, replica_id
        self._memory = memory
        self.observers: Sequence[Observer] = ()

    def pin(self, request: Request, seconds: float, now: float) -> bool:
        """Pin the content of a registered request for `seconds` seconds; return False and change nothing if pins would
        then hold more blocks than allowed.
        """
        name, memory = pin_name(request), self._memory
        if not memory.pin(name, request, now + seconds):
            return False
        for observer in self.observers:
            observer.on_pinned(*self._where, str(name), request, now + seconds, now)
        return True

    def unpin(self, request: RequestView, now: float) -> None:
        """End the pin that has the name of the request's pin (`pin_name`), if there is one."""
        name = pin_name(request)
        if self._memory.unpin(name):
            self._notify(name, PinEnd.RELEASED, now)

    def settle(self, now: float) -> None:
        """End the pins that are due, and drop content that has expired."""
        for name in self._memory.settle_due():
            self._notify(name, PinEnd.EXPIRED, now)

    def release_one(self, now: float) -> bool:
        """End the pin that would last longest. Returns False if no idle block is kept for pins, so that ending pins
        would free no block.
        """
        name = self._memory.release_pin()
        if name is None:
            return False
        self._notify(name, PinEnd.FORCED, now)
        return True

    def _notify(self, name: Hashable, why: PinEnd, now: float) -> None:
        for observer in self.observers:
            observer.on_unpinned(*self._where, str(name), why, now)
