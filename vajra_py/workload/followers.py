"""Requests that follow others: release them once their parents have ended, and check links to parents."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from vajra_py.workload.request import RequestSpec

__all__ = ["Followers", "problem_with_parents"]


class Followers:
    """Holds requests with parents that have not ended; each is released when the last of its parents ends."""

    def __init__(self) -> None:
        self._children: dict[str, list[RequestSpec]] = {}
        self._num_parents_left: dict[str, int] = {}  # only for requests with several parents

    def add(self, spec: RequestSpec) -> bool:
        """Hold a request until its parents have ended; return False if it has no parents, and so is not held."""
        parents = spec.parents
        for parent in parents:
            self._children.setdefault(parent, []).append(spec)
        if len(parents) > 1:
            self._num_parents_left[spec.request_id] = len(parents)
        return bool(parents)

    def released_by(self, request_id: str) -> Sequence[RequestSpec]:
        """Return the requests whose last unfinished parent was this request, which has ended for any reason."""
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
    """Return two texts, the fault of a request's parents and the allowed values; None if there is no fault.

    Args:
        request_id: id of the request.
        parents: ids of its parents.
        earlier: ids of the requests before it in the workload.
        parents_of: ids of the parents of every request in the workload.
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
    """Return the ids on a cycle from a request through this parent back to itself; empty if there is no cycle."""
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
