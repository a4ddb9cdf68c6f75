"""Requests that follow others: their release, and checks of the links between them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from vajra_py.workload.request import RequestSpec

__all__ = ["Followers", "problem_with_parents"]


class Followers:
    """Requests that have not arrived because they follow others; each is released when the last of its parents has ended."""

    def __init__(self) -> None:
        self._children: dict[str, list[RequestSpec]] = {}
        self._num_parents_left: dict[str, int] = {}  # requests with several parents

    def add(self, spec: RequestSpec) -> bool:
        """Keep a request until its parents have ended; False for one without parents."""
        parents = spec.parents
        for parent in parents:
            self._children.setdefault(parent, []).append(spec)
        if len(parents) > 1:
            self._num_parents_left[spec.request_id] = len(parents)
        return bool(parents)

    def released_by(self, request_id: str) -> Sequence[RequestSpec]:
        """The requests that waited for this one alone, or for it as the last, now that it has ended (however it did)."""
        children = self._children.pop(request_id, ())
        return [child for child in children if self._is_last_parent(child)] if children else ()

    def _is_last_parent(self, child: RequestSpec) -> bool:
        left = self._num_parents_left.pop(child.request_id, 1) - 1
        if left:
            self._num_parents_left[child.request_id] = left
        return not left


def problem_with_parents(
    request_id: str, parents: Sequence[str], earlier: Container[str], parents_of: Mapping[str, Sequence[str]]
) -> tuple[str, str] | None:
    """Return the fault of a request's parents and the allowed values; None if there is no fault.

    `earlier` are the ids of the requests above it, `parents_of` gives the parents of every request of the workload.
    """
    allowed = "The id of an earlier request, or several different ones"
    if len(set(parents)) < len(parents):
        return f"follows a request twice ({', '.join(map(repr, parents))})", allowed
    for parent in parents:
        if parent not in parents_of:
            return f"follows a request that is not in the workload ({parent!r})", allowed
        if parent not in earlier:
            cycle = _cycle(request_id, parent, parents_of)
            if cycle:
                return f"waits for itself ({' -> '.join(map(repr, cycle))}, each follows the next)", allowed
            return f"follows a request that comes later ({parent!r})", allowed
    return None


def _cycle(request_id: str, parent: str, parents_of: Mapping[str, Sequence[str]]) -> list[str]:
    """The way from a request through this parent back to itself; empty when there is none."""
    child_of = {parent: request_id}
    pending = [parent]
    while pending:
        at = pending.pop()
        if at == request_id:
            way = [at]
            while len(way) == 1 or way[-1] != request_id:
                way.append(child_of[way[-1]])
            return way[::-1]
        for each in parents_of.get(at, ()):
            if each not in child_of:
                child_of[each] = at
                pending.append(each)
    return []
