"""Order of deferred requests: the most urgent first, and within a priority first come, first served.

While a request is deferred, the requests behind it in this order wait too, as in llm-d's flow control. Requests for
different replicasets do not wait for each other.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Literal

from pydantic import Field

from vajra_policies.routing import PeriodicWakeUps
from vajra_py.contract import (
    ACCEPT,
    AdmissionDecision,
    Defer,
    PolicyConfig,
    Refuse,
    ReplicaId,
    RequestView,
    WakeUps,
)

_ADMISSION = "admission"


class HoldingConfig(PolicyConfig):
    """Parameters for handling requests that are not accepted."""

    when_closed: Literal["defer", "refuse"] = Field(
        "defer",
        description="Treatment of a request that is not admitted now: it waits at the gate, or is refused.",
    )
    recheck_s: float = Field(
        0.01,
        gt=0,
        description="Interval at which waiting requests are considered again, besides whenever a request is admitted or ends, seconds.",
    )


class Line:
    """Deferred requests of one replicaset, in order of priority, then submission."""

    __slots__ = ("_heap", "_held")

    def __init__(self) -> None:
        self._held: set[int] = set()
        self._heap: list[tuple[int, int]] = []
        """Heap of (priority, index); entries of requests that are no longer in `_held` are dropped when they reach the
        front.
        """

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._held)

    def waits_behind(self, request: RequestView) -> bool:
        """Return True if a deferred request comes before this request."""
        heap, held = self._heap, self._held
        while heap and heap[0][1] not in held:
            heappop(heap)
        return bool(heap) and heap[0] < (request.priority, request.index)

    def join(self, request: RequestView) -> None:
        """Add a request, unless it is contained already."""
        if request.index not in self._held:
            self._held.add(request.index)
            heappush(self._heap, (request.priority, request.index))

    def leave(self, request: RequestView) -> None:
        """Remove a request if it is contained."""
        self._held.discard(request.index)


class Holding:
    """Base class of policies that may defer requests: keeps the deferred requests of each replicaset, and wakes the
    policy to decide on them again.
    """

    def __init__(self, config: HoldingConfig, wake: WakeUps) -> None:
        self._when_closed = config.when_closed
        self._wake = wake
        self._rechecks = PeriodicWakeUps(wake, config.recheck_s)
        self._lines: dict[str, Line] = {}
        self._num_held = 0

    def _line_of(self, request: RequestView) -> Line:
        line = self._lines.get(request.replicaset)
        if line is None:
            line = self._lines[request.replicaset] = Line()
        return line

    def _closed(self, line: Line, request: RequestView, now: float, reason: str) -> AdmissionDecision:
        """Return the decision on a request that is not accepted now."""
        if self._when_closed == "refuse":
            return Refuse(reason)
        self._num_held -= len(line)
        line.join(request)
        self._num_held += len(line)
        self._rechecks.start(now)
        return Defer(reason=reason, holds_rest=True)

    def _open(self, line: Line, request: RequestView) -> AdmissionDecision:
        """Return the decision on a request that is accepted."""
        self._leave(line, request)
        return ACCEPT

    def _leave(self, line: Line, request: RequestView) -> None:
        self._num_held -= len(line)
        line.leave(request)
        self._num_held += len(line)

    def on_wake(self, key: str, now: float) -> None:
        """Set the next wake-up while requests are deferred; after this call, `admit` is called again for them."""
        if key != _ADMISSION:
            self._rechecks.woken(now, goes_on=self._num_held > 0)

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Wake the policy now, to decide on deferred requests again, since a queue has become shorter."""
        if self._num_held:
            self._wake.at(now, _ADMISSION)

    def on_departures(self, requests: list[RequestView], now: float) -> None:
        """Forget requests that left while they were deferred."""
        for request in requests:
            line = self._lines.get(request.replicaset)
            if line is not None:
                self._leave(line, request)
