"""Times at which keys of waiting requests may fall because time passes, earliest first."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from vajra_py.contract import FallsWithTime, RequestView
from vajra_py.runtime.queues.keys import FallReader

_SPARE = 64
"""Number by which obsolete entries must exceed valid entries before the obsolete ones are deleted."""


class FallTimes:
    """Times, given by a prioritizer, at which keys must be read again."""

    __slots__ = ("_at", "_due", "_reader")

    def __init__(self, prioritizer: FallsWithTime, name: str | None = None) -> None:
        self._reader = FallReader(prioritizer, name)
        self._at: dict[RequestView, float] = {}
        self._due: list[tuple[float, int, RequestView]] = []
        """A heap of (time, serial, request); some entries are obsolete."""

    def note(self, request: RequestView, now: float, serial: int) -> None:
        """Query the prioritizer for the next time at which a request's key, which is read at `now`, may fall (become
        smaller), and store this time. `serial` must be unique.
        """
        at = self._reader.falls_at(request, now)
        if at is None:
            self._at.pop(request, None)
        elif self._at.get(request) != at or at <= now:
            self._at[request] = at
            heappush(self._due, (at, serial, request))

    def drop(self, request: RequestView) -> None:
        """Drop the time of a request that has left."""
        self._at.pop(request, None)
        if len(self._due) > 2 * len(self._at) + _SPARE:
            self._due = [one for one in self._due if self._at.get(one[2]) == one[0]]
            heapify(self._due)

    def take_due(self, now: float) -> list[tuple[float, int, RequestView]]:
        """Remove and return the entries that are due at `now`, for `requests_of` and `put_back`."""
        taken = []
        while self._due and self._due[0][0] <= now:
            taken.append(heappop(self._due))
        return taken

    def requests_of(self, taken: list[tuple[float, int, RequestView]]) -> dict[RequestView, None]:
        """Return the waiting requests of these entries, each once."""
        return dict.fromkeys(one for at, _, one in taken if self._at.get(one) == at)

    def put_back(self, taken: list[tuple[float, int, RequestView]]) -> None:
        """Put back the entries that `take_due` returned, after a key could not be read."""
        self._due = [*taken, *self._due]
        heapify(self._due)
