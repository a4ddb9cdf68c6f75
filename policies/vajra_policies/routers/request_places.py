"""Requests of each replica, tracked by a router from placement to end."""

from __future__ import annotations

from collections import defaultdict
from typing import TypeAlias

from vajra_py.contract import ReplicaId, RequestView

Places: TypeAlias = defaultdict[ReplicaId, dict[RequestView, None]]


class RequestPlaces:
    """Waiting and running requests of each replica, in the order in which they began to wait or run."""

    def __init__(self) -> None:
        self.running: Places = defaultdict(dict)
        self.waiting: Places = defaultdict(dict)
        self._at: dict[RequestView, ReplicaId] = {}

    def __bool__(self) -> bool:
        return bool(self._at)

    def wait(self, request: RequestView, replica_id: ReplicaId) -> None:
        """Count the request as waiting at the replica."""
        self._leave(request)
        self._at[request] = replica_id
        self.waiting[replica_id][request] = None

    def run(self, request: RequestView, replica_id: ReplicaId) -> None:
        """Count the request as running at the replica."""
        self._leave(request)
        self._at[request] = replica_id
        self.running[replica_id][request] = None

    def forget(self, *requests: RequestView) -> None:
        """Forget these requests."""
        for request in requests:
            self._leave(request)

    def has_preempted(self, replica_id: ReplicaId) -> bool:
        """Return True if a preempted request waits at the replica."""
        return any(one.preempted_index > 0 for one in self.waiting[replica_id])

    def _leave(self, request: RequestView) -> None:
        replica_id = self._at.pop(request, None)
        if replica_id is not None:
            self.running[replica_id].pop(request, None)
            self.waiting[replica_id].pop(request, None)
