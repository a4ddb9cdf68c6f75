"""Access of a replica to the requests that its replicaset has not bound to a replica."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from vajra_py.contract import RequestView
from vajra_py.runtime.queues import RequestQueue


class SharedAccess(Protocol):
    """One replica's access to the shared queue of its replicaset."""

    @property
    def queue(self) -> RequestQueue:
        """The shared queue as it is now; for reading."""

    def __len__(self) -> int:
        """Requests in the shared queue."""

    def pulled(self, now: float) -> Iterator[RequestView]:
        """Return the requests that the replicaset scheduler lets this replica take now; lazy."""

    def __contains__(self, request: object) -> bool:
        """Return True if the request is in the shared queue."""

    def begin_step(self) -> None:
        """Begin a step of this replica: see `RequestQueue.begin_step`."""

    def take(self, request: RequestView) -> None:
        """Remove a request that the replica has admitted."""
