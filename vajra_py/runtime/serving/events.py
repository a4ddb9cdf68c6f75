"""Order of events: by (tick, phase, rank, sequence), a total order, so that equal runs are equal to the byte.

The rank of what replicas do is their place in the run, so that their order does not depend on when an event became known.
"""

from __future__ import annotations

from enum import IntEnum
from heapq import heapify, heappop, heappush
from typing import Any


class Phase(IntEnum):
    """Order of events of one tick: first what frees memory, then what arrives or leaves, then the forming of steps."""

    STEP_END = 0
    """A step came back."""
    FAILURE = 1
    """A replica is lost, comes back, or is waited for no longer."""
    STAGE_END = 2
    """A step has left the first stage of a pipeline."""
    TRANSFER = 3
    """KV on its way between replicas may have arrived."""
    TIER = 4
    """KV on its way between tiers of memory, or an adapter on its way to its slot, may have arrived."""
    ARRIVAL = 5
    ADMISSION = 6
    """The admission policy is called again for requests that it has deferred."""
    EXPIRY = 7
    ABORT = 8
    PROGRAM = 9
    """A program has ended, or was idle for so long."""
    POLICY = 10
    """A policy takes another's place."""
    WAKE = 11
    """A policy is woken at a time that it set."""
    SCALING = 12
    """A scaler is called, or a replica that it has started comes up."""
    FORM = 13
    """A replica forms its next step, by rank; after them idle ones, for a shared queue."""


class EventQueue:
    """Future events; `payload` never takes part in comparisons."""

    __slots__ = ("_sequence", "heap")

    def __init__(self) -> None:
        self.heap: list[tuple[int, Phase, int, int, Any]] = []
        """(tick, phase, rank, sequence, payload), to take one event after the other with `heapq.heappop`; always
        this list."""
        self._sequence = 0

    def push(self, tick: int, phase: Phase, payload: Any, rank: int = 0) -> None:
        """Schedule an event; of one tick and phase the lower rank goes first."""
        self._sequence += 1
        heappush(self.heap, (tick, phase, rank, self._sequence, payload))

    def bring_forward(self, now: int) -> None:
        """Move every event that is due by `now` to `now`; within a phase, events keep their order."""
        due = []
        while self.heap and self.heap[0][0] <= now:
            due.append(heappop(self.heap))
        for _, phase, rank, _, payload in due:
            self.push(now, phase, payload, rank)

    def remove(self, phase: Phase) -> list[Any]:
        """Remove every event of a phase; returns their payloads, in order."""
        removed = sorted(event for event in self.heap if event[1] is phase)
        self.heap[:] = [event for event in self.heap if event[1] is not phase]
        heapify(self.heap)
        return [payload for _, _, _, _, payload in removed]
