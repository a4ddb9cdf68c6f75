"""Order of events: by (tick, phase, rank, sequence), a total order, so that repeated runs give identical results.

The rank of a replica's event is the replica's position in the run, so that the order does not depend on when an event
was scheduled.
"""

from __future__ import annotations

from enum import IntEnum
from heapq import heapify, heappop, heappush
from typing import Any


class Phase(IntEnum):
    """Order of the events of one tick: first those that free memory, then arrivals and departures, then the forming of
    steps.
    """

    STEP_END = 0
    """A step has completed."""
    FAILURE = 1
    """A replica is lost or restored, the wait for a lost replica ends, or the backend acts on a replica (`Control`)."""
    STAGE_END = 2
    """A step has left the first stage of a pipeline."""
    TRANSFER = 3
    """A transfer of KV between replicas may have ended, or a full target is checked again."""
    TIER = 4
    """A transfer of KV between memory tiers, or the load of an adapter, may have ended."""
    ARRIVAL = 5
    ADMISSION = 6
    """The admission policy is called again for requests that it has deferred."""
    EXPIRY = 7
    ABORT = 8
    PROGRAM = 9
    """A program may have to end, by its client's declaration or after its idle time."""
    POLICY = 10
    """A policy replaces another."""
    WAKE = 11
    """A policy is woken at a time that it set."""
    SCALING = 12
    """A scaler is called, or the state of one of its replicas changes."""
    FORM = 13
    """Replicas form their next steps in order of rank; then idle replicas pull from shared queues."""


class EventQueue:
    """Future events, in order; payloads are never compared."""

    __slots__ = ("_sequence", "heap")

    def __init__(self) -> None:
        self.heap: list[tuple[int, Phase, int, int, Any]] = []
        """Heap of (tick, phase, rank, sequence, payload) for `heapq.heappop`; always the same list object."""
        self._sequence = 0

    def push(self, tick: int, phase: Phase, payload: Any, rank: int = 0) -> None:
        """Schedule an event; within a tick and phase, lower ranks go first."""
        self._sequence += 1
        heappush(self.heap, (tick, phase, rank, self._sequence, payload))

    def bring_forward(self, now: int) -> None:
        """Move every event due by `now` to `now`; events of the same phase and rank keep their order."""
        due = []
        while self.heap and self.heap[0][0] <= now:
            due.append(heappop(self.heap))
        for _, phase, rank, _, payload in due:
            self.push(now, phase, payload, rank)

    def remove(self, phase: Phase) -> list[Any]:
        """Remove every event of a phase; return the payloads in order."""
        removed = sorted(event for event in self.heap if event[1] is phase)
        self.heap[:] = [event for event in self.heap if event[1] is not phase]
        heapify(self.heap)
        return [payload for _, _, _, _, payload in removed]
