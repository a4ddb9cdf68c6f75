"""Event queue with the total order (tick, phase, rank, sequence).

The rank of what replicas do is their place in the run, so that their order does not depend on when an event became known.
"""

from __future__ import annotations

import heapq
from enum import IntEnum
from typing import Any


class Phase(IntEnum):
    """What goes first among events of one tick: what frees, then what comes, then what decides."""

    STEP_END = 0
    FAILURE = 1
    STAGE_END = 2
    ARRIVAL = 3
    EXPIRY = 4
    ABORT = 5
    POLICY = 6
    FORM = 7


class EventQueue:
    """Future events; `payload` never takes part in comparisons."""

    __slots__ = ("_sequence", "heap")

    def __init__(self) -> None:
        self.heap: list[tuple[int, Phase, int, int, Any]] = []
        """(tick, phase, rank, sequence, payload), for whoever takes one event after the other with `heapq.heappop`."""
        self._sequence = 0

    def push(self, tick: int, phase: Phase, payload: Any, rank: int = 0) -> None:
        """Let something happen at `tick`; of one tick and phase the lower rank goes first."""
        self._sequence += 1
        heapq.heappush(self.heap, (tick, phase, rank, self._sequence, payload))

    def nothing_up_to(self, tick: int, phase: Phase) -> bool:
        """Whether no event precedes (tick, phase), and none of it was pushed earlier."""
        if not self.heap:
            return True
        first = self.heap[0]
        return first[0] > tick or (first[0] == tick and first[1] > phase)
