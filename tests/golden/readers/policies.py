"""What policies of recorded systems have in common."""

from __future__ import annotations

from collections.abc import Iterable

from vajra_py.contract import QueueView, ReplicaId, ReplicaLoadView, RequestView
from vajra_py.contract.observer import Observer


class Arrivals(Observer):
    """The order in which KV of requests comes."""

    def __init__(self) -> None:
        self._position: dict[str, int] = {}

    def order_of(self, request: RequestView) -> int:
        """Position of a request among those whose KV has come; -1 where it is computed."""
        return self._position.get(request.request_id, -1)

    def on_arrived(self, request: RequestView, source: ReplicaId, target: ReplicaId, now: float) -> None:
        self._position[request.request_id] = len(self._position)


class BindsOnArrival:
    """A router with which nobody waits in the shared queue."""

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        """Nothing: everyone is bound on arrival."""
        return ()
