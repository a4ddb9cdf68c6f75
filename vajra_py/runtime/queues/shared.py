"""A replica's view of the requests that its replicaset has not bound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from vajra_py.contract import RequestView
from vajra_py.runtime.queues import RequestQueue


class SharedAccess(Protocol):
    """One replica's door to the shared queue of its replicaset."""

    @property
    def queue(self) -> RequestQueue:
        """The shared queue as it is now; for questions."""

    def __len__(self) -> int:
        """Requests in the shared queue."""

    def pulled(self, now: float) -> Iterator[RequestView]:
        """The requests that the replicaset scheduler lets this replica take now; lazy."""

    def __contains__(self, request: object) -> bool:
        """Return True if the request is in the shared queue."""

    def begin_step(self) -> None:
        """A step of this replica is decided: see `RequestQueue.begin_step`."""

    def take(self, request: RequestView) -> None:
        """The replica has admitted it."""
