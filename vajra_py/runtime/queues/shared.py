"""Access of a replica to the requests that its replicaset has not yet bound to a replica."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from vajra_py.contract import RequestView
from vajra_py.runtime.queues import RequestQueue


class SharedAccess(Protocol):
    """One replica's access to the shared queue of its replicaset."""

    @property
    def queue(self) -> RequestQueue:
        """The present shared queue, only for reading."""

    def __len__(self) -> int:
        """Return the number of requests in the shared queue."""

    def pulled(self, now: float) -> Iterator[RequestView]:
        """Iterate lazily over the requests that the replicaset scheduler allows this replica to take at `now`."""

    def __contains__(self, request: object) -> bool:
        """Return True if the request is in the shared queue."""

    def begin_step(self) -> None:
        """Begin a step of this replica: see `RequestQueue.begin_step`."""

    def take(self, request: RequestView) -> None:
        """Remove from the shared queue a request that the replica admits, binds or drops."""
