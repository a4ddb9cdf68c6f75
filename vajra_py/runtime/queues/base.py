"""Interface and common behaviour of all queues.

Invariants: a request is in a queue at most once; a key that breaks the contract is rejected before anything changes, so
that the queue and all its requests stay as they were.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from typing import Protocol

from vajra_py.contract import PriorityKey, RequestView
from vajra_py.runtime.queues.ranks import INDEX, NUM_TOKENS, SERIAL, Rank


class HitChanges(Protocol):
    """Prefix cache of one replica, as a queue's source of changed prefix hits."""

    def follow(self, request: RequestView) -> None:
        """Track changes of a waiting request's prefix hits, starting from its present hits."""

    def drop(self, request: RequestView) -> None:
        """Stop tracking a request; does nothing if it is not tracked."""

    def take_changed(self) -> Collection[RequestView]:
        """Return the requests whose hits may have changed since `follow` was called for them, and stop tracking these
        requests.
        """


class RequestQueue(Protocol):
    """Waiting requests in exact order of urgency at any time.

    Times are seconds on the run's clock. Queries for times in any order are exact; they are cheap if times do not
    decrease.
    """

    is_arbitrary: bool
    """True if keys may change at any event; they are read again at each step."""
    is_volatile: bool
    """True if keys are also read again after each admission and preemption."""
    reads_hits: bool
    """True if keys change with the prefix hits of their requests; with `use_hits`, only the keys of requests whose hits
    have changed are re-read.
    """

    @property
    def num_requests(self) -> int:
        """Number of waiting requests, equal to `len` of the queue."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens left to compute over all waiting requests, as counted when each was added or last refreshed."""

    def add(self, request: RequestView, now: float) -> None:
        """Add a request. ValueError if it waits already; PolicyError if its key breaks the contract."""

    def remove(self, request: RequestView) -> None:
        """Remove a request from any position. KeyError if it does not wait."""

    def refresh(self, request: RequestView, now: float) -> None:
        """Re-read the key of a request that has progressed. Raises the errors of `remove` and `add`; if the new key is
        invalid, the old one stays.
        """

    def use_hits(self, hits: HitChanges | None) -> None:
        """Set the source that reports requests whose prefix hits have changed; only their keys are re-read. None: all
        keys are re-read.

        Does nothing if keys do not change with prefix hits.
        """

    def touch(self, request: RequestView) -> None:
        """Mark a request whose state has changed, so that its key is re-read at the next query; does nothing if keys do
        not change with prefix hits.
        """

    def begin_step(self) -> None:
        """Let keys that may change at any event be re-read at the next query, even if the time has not changed; called
        for each step.
        """

    def peek(self, now: float) -> RequestView | None:
        """Return the most urgent request, None if nothing waits."""

    def ordered(self, now: float) -> Iterator[RequestView]:
        """Iterate over the requests that wait at the time of the call, most urgent first. The order is computed lazily,
        so that reading only the first requests is cheap.

        The queue may change during iteration: requests that are removed before their turn are left out, and so are
        requests that are added, added again, or refreshed with another key or number of tokens.
        """

    def urgency(self, request: RequestView, now: float) -> PriorityKey:
        """Return the key by which the total order ranks a request, (key, arrival, index); the request need not be
        waiting.
        """

    def __len__(self) -> int:
        """Return the number of waiting requests."""

    def __contains__(self, request: object) -> bool:
        """Return True if the request waits in this queue."""

    def __iter__(self) -> Iterator[RequestView]:
        """Iterate over the waiting requests in no particular order."""


class RankedQueue(ABC):
    """Base of all queues. It stores a `Rank` for each waiting request: the tuple by which a subclass sorts the request."""

    is_arbitrary = False
    is_volatile = False
    reads_hits = False

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._ranks: dict[RequestView, Rank] = {}
        self._newest = 0

    @abstractmethod
    def peek(self, now: float) -> RequestView | None:
        """See `RequestQueue.peek`."""

    @abstractmethod
    def urgency(self, request: RequestView, now: float) -> PriorityKey:
        """See `RequestQueue.urgency`."""

    @abstractmethod
    def _rank(self, request: RequestView, now: float) -> Rank:
        """Return the request's rank, with the next serial number; PolicyError if its key breaks the contract."""

    @abstractmethod
    def _enter(self, rank: Rank, now: float) -> None:
        """Insert into the order a rank that was just registered."""

    @abstractmethod
    def _leave(self, rank: Rank) -> None:
        """Remove from the order a rank that was just unregistered."""

    def add(self, request: RequestView, now: float) -> None:
        """See `RequestQueue.add`."""
        if request in self._ranks:
            raise ValueError(f"queue: request {request.request_id} waits already. Add a request once, then refresh it.")
        rank = self._ranks[request] = self._rank(request, now)
        self.num_requests += 1
        self.num_tokens += rank[NUM_TOKENS]
        self._enter(rank, now)

    def remove(self, request: RequestView) -> None:
        """See `RequestQueue.remove`."""
        rank = self._ranks.pop(request)
        self.num_requests -= 1
        self.num_tokens -= rank[NUM_TOKENS]
        self._leave(rank)

    def refresh(self, request: RequestView, now: float) -> None:
        """See `RequestQueue.refresh`."""
        old, new = self._ranks[request], self._rank(request, now)
        if new[: INDEX + 1] != old[: INDEX + 1] or new[SERIAL + 1 :] != old[SERIAL + 1 :]:
            self._leave(old)
            self._ranks[request] = new
            self.num_tokens += new[NUM_TOKENS] - old[NUM_TOKENS]
            self._enter(new, now)

    def begin_step(self) -> None:
        """Do nothing: keys change only as declared; see `RequestQueue.begin_step`."""
        return

    def use_hits(self, hits: HitChanges | None) -> None:
        """See `RequestQueue.use_hits`."""
        return

    def touch(self, request: RequestView) -> None:
        """See `RequestQueue.touch`."""
        return

    def _standing(self, request: RequestView, now: float) -> Rank | None:
        """Return the rank of a waiting request if the rank is valid at `now`; else None."""
        return self._ranks.get(request)

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, request: object) -> bool:
        return request in self._ranks

    def __iter__(self) -> Iterator[RequestView]:
        return iter(self._ranks)
