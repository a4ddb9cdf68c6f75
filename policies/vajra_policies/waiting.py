"""Waiting requests by group (tenant, program), for prioritizers that compare groups."""

from __future__ import annotations

from collections.abc import Callable

from vajra_py.contract import RequestView


class Waiting:
    """Requests that wait, by group. The policy reports who begins to wait and who waits no more."""

    def __init__(self, group_of: Callable[[RequestView], str]) -> None:
        self._group_of = group_of
        self.groups: dict[str, dict[RequestView, None]] = {}
        """Waiting requests of each group that has any, in the order in which groups, and requests in them, began to wait."""

    def add(self, request: RequestView) -> None:
        """A request begins to wait."""
        self.groups.setdefault(self._group_of(request), {})[request] = None

    def remove(self, request: RequestView) -> None:
        """A request waits no more; no effect if it did not wait."""
        group = self._group_of(request)
        members = self.groups.get(group)
        if members is None or request not in members:
            return
        del members[request]
        if not members:
            del self.groups[group]
