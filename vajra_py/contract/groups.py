"""Names of groups and requests whose keys have fallen, from a prioritizer to the queues that it orders."""

from __future__ import annotations

from collections.abc import Sequence

from vajra_py.contract.requests import RequestView

_NUM_KEPT = 1024
"""Number of names kept for a queue; one that is farther behind reads all of its keys again."""


class _Fallen:
    """The latest names whose keys have become lower."""

    __slots__ = ("_names", "_num_forgotten", "num_named")

    def __init__(self) -> None:
        self.num_named = 0
        """Names given so far."""
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
        """The names after the first `num_read`; None if some of them are no longer known. For queues."""
        first = num_read - self._num_forgotten
        return None if first < 0 else self._names[first:]


class FallenGroups(_Fallen):
    """Groups whose keys have become lower, as their prioritizer names them; one of each prioritizer.

    It keeps the latest names alone. Naming a group is cheap, also one whose key has not fallen or of which nothing waits.
    """

    __slots__ = ()

    def add(self, group: str) -> None:
        """Name a group whose key has fallen, or may have, since it was last read."""
        self._name(group)


class FallenRequests(_Fallen):
    """Requests whose keys have become lower, as their prioritizer names them; one of each prioritizer.

    It keeps the latest names alone. Naming a request is cheap, also one whose key has not fallen, or that does not wait.
    """

    __slots__ = ()

    def add(self, request: RequestView) -> None:
        """Name a request whose key has fallen, or may have, since it was last read."""
        self._name(request.request_id)

    def add_all(self) -> None:
        """Note that any key may have fallen: all of them are read again, once."""
        self.num_named += 1
        self._num_forgotten = self.num_named
        self._names.clear()
