"""Lists of groups and requests whose keys have fallen, written by a prioritizer and read by its queues."""

from __future__ import annotations

from collections.abc import Sequence

from vajra_py.contract.requests import RequestView

_NUM_KEPT = 1024
"""Minimum number of latest names that are kept; a queue that has missed older names re-reads all its keys."""


class _Fallen:
    """Names of the objects whose keys have fallen most recently."""

    __slots__ = ("_names", "_num_forgotten", "num_named")

    def __init__(self) -> None:
        self.num_named = 0
        """Number of names added so far; `FallenRequests.add_all` counts as one."""
        self._names: list[str] = []
        self._num_forgotten = 0

    def _name(self, name: str) -> None:
        names = self._names
        names.append(name)
        self.num_named += 1
        if len(names) >= 2 * _NUM_KEPT:
            self._num_forgotten += _NUM_KEPT
            del names[:_NUM_KEPT]

    def since(self, num_read: int) -> Sequence[str] | None:
        """Return the names after the first `num_read`; None if some of them are no longer stored. Called by queues."""
        first = num_read - self._num_forgotten
        return None if first < 0 else self._names[first:]


class FallenGroups(_Fallen):
    """List of groups whose keys have fallen; each prioritizer has its own list.

    Only the latest names are stored. Adding a group is cheap, and harmless if its key has not fallen or if none of its
    requests waits.
    """

    __slots__ = ()

    def add(self, group: str) -> None:
        """Add a group whose key has, or may have, fallen since the key was last read."""
        self._name(group)


class FallenRequests(_Fallen):
    """List of requests whose keys have fallen; each prioritizer has its own list.

    Only the latest names are stored. Adding a request is cheap, and harmless if its key has not fallen or if it does
    not wait.
    """

    __slots__ = ()

    def add(self, request: RequestView) -> None:
        """Add a request whose key has, or may have, fallen since the key was last read."""
        self._name(request.request_id)

    def add_all(self) -> None:
        """Declare that any key may have fallen, so that all of them are re-read once."""
        self.num_named += 1
        self._num_forgotten = self.num_named
        self._names.clear()
