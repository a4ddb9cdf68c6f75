"""Interface and common behaviour of all queues.

Invariants: a request is in a queue at most once; a key that breaks the contract is refused before anything changes, so that
the queue and every other request in it stay as they were.
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
        """Follow a waiting request from its present hits on."""

    def drop(self, request: RequestView) -> None:
        """Stop following a request; does nothing for one that is not followed."""

    def take_changed(self) -> Collection[RequestView]:
        """Return the requests whose hits may have changed since they were followed; they are followed no longer."""


class RequestQueue(Protocol):
    """Waiting requests, most urgent first at any time.

    Times are seconds on the run's clock. Any order of times is answered exactly; times that do not decrease are cheap.
    """

    is_arbitrary: bool
    """True if keys may change at any event; they are read again at each step."""
    is_volatile: bool
    """True if keys are also read again after each admission and preemption."""
    reads_hits: bool
    """True if keys move with the prefix hits of their requests; with `use_hits`, only the keys of changed hits are
    re-read.
    """

    @property
    def num_requests(self) -> int:
        """Number of requests that wait, the same as the length."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens left to compute over all waiting requests, as counted when each was added or last refreshed."""

    def add(self, request: RequestView, now: float) -> None:
        """Add a request. ValueError if it waits already; PolicyError if its key breaks the contract."""

    def remove(self, request: RequestView) -> None:
        """Remove a request from any position. KeyError if it does not wait."""

    def refresh(self, request: RequestView, now: float) -> None:
        """Re-read the key of a request that has progressed. Raises like `remove` and `add`; after an invalid key, the
        old one stays.
        """

    def use_hits(self, hits: HitChanges | None) -> None:
        """Set the source that reports requests whose prefix hits have changed; only their keys are re-read. None: all
        keys are re-read.

        Does nothing if keys do not move with hits.
        """

    def touch(self, request: RequestView) -> None:
        """Mark a request whose state has changed, so that its key is re-read with the next ones; does nothing if keys
        do not move with hits.
        """

    def begin_step(self) -> None:
        """Have keys that may change at any event re-read, even for the time of the last query; called for each step."""

    def peek(self, now: float) -> RequestView | None:
        """Return the most urgent request, None if nothing waits."""

    def ordered(self, now: float) -> Iterator[RequestView]:
        """Iterate over the requests that wait at the time of the call, most urgent first; lazy, so that the head is cheap.

        The queue may change while this is read: requests that are removed before their turn are
        left out, and so are those that are added, added again, or refreshed with another key or number of tokens.
        """

    def urgency(self, request: RequestView, now: float) -> PriorityKey:
        """Return the total order's key of any request, waiting or not."""

    def __len__(self) -> int:
        """Requests that wait."""

    def __contains__(self, request: object) -> bool:
        """Return True if the request waits here."""

    def __iter__(self) -> Iterator[RequestView]:
        """Iterate over the waiting requests in no particular order."""


class RankedQueue(ABC):
    """Ranks of the waiting requests, common to all queues; subclasses keep the ranks in order."""

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
        """Read the request's rank, with the next serial; PolicyError if its key breaks the contract."""

    @abstractmethod
    def _enter(self, rank: Rank, now: float) -> None:
        """Insert a rank that was just registered into the order."""

    @abstractmethod
    def _leave(self, rank: Rank) -> None:
        """Remove a rank that was just unregistered from the order."""

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
        """See `RequestQueue.begin_step`; does nothing, since keys move only as declared."""
        return

    def use_hits(self, hits: HitChanges | None) -> None:
        """See `RequestQueue.use_hits`."""
        return

    def touch(self, request: RequestView) -> None:
        """See `RequestQueue.touch`."""
        return

    def _standing(self, request: RequestView, now: float) -> Rank | None:
        """Return the rank of a waiting request, if its key is valid at this time."""
        return self._ranks.get(request)

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, request: object) -> bool:
        return request in self._ranks

    def __iter__(self) -> Iterator[RequestView]:
        return iter(self._ranks)
