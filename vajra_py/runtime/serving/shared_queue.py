"""Views of a replicaset's shared queue for its replicas and its scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from vajra_py.contract import ReplicaLoadView, RequestView
from vajra_py.runtime.queues import RequestQueue


class PullsRequests(Protocol):
    """Interface of a replicaset for replicas that pull requests."""

    @property
    def shared(self) -> RequestQueue:
        """The shared queue."""

    def pulled_by(self, view: ReplicaLoadView, now: float) -> Iterator[RequestView]:
        """Iterate over the requests that the scheduler allows a replica to take, in the scheduler's order."""


class SharedQueueAccess:
    """One replica's access to the shared queue: the requests that the replicaset scheduler allows it to pull."""

    __slots__ = ("_replicaset", "queue", "view")

    def __init__(self, replicaset: PullsRequests) -> None:
        self._replicaset = replicaset
        self.queue = replicaset.shared
        self.view: ReplicaLoadView | None = None

    def __len__(self) -> int:
        return self.queue.num_requests

    def __contains__(self, request: object) -> bool:
        return request in self.queue

    def pulled(self, now: float) -> Iterator[RequestView]:
        """Iterate over the requests that this replica may take now, in the scheduler's order."""
        assert self.view is not None
        return self._replicaset.pulled_by(self.view, now)

    def begin_step(self) -> None:
        """Begin a step: at the next query, the queue re-reads the keys that may change at any event."""
        self.queue.begin_step()

    def take(self, request: RequestView) -> None:
        """Remove from the shared queue a request that the replica has admitted."""
        self.queue.remove(request)


class SharedView:
    """`QueueView` of the shared queue at one moment."""

    __slots__ = ("_now", "_queue")

    def __init__(self, queue: RequestQueue, now: float) -> None:
        self._queue = queue
        self._now = now

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[RequestView]:
        return self._queue.ordered(self._now)


class EligibleView:
    """`QueueView` of the requests in the shared queue that one replica can run, if replicas differ."""

    __slots__ = ("_is_eligible", "_now", "_queue")

    def __init__(self, queue: RequestQueue, now: float, is_eligible: Callable[[RequestView], bool]) -> None:
        self._queue = queue
        self._now = now
        self._is_eligible = is_eligible

    def __len__(self) -> int:
        return sum(map(self._is_eligible, self._queue))

    def __iter__(self) -> Iterator[RequestView]:
        return filter(self._is_eligible, self._queue.ordered(self._now))
