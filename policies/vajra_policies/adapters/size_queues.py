"""Requests queued by size; each queue has a quota of tokens. Sizes, queues and quotas depend on recent requests."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from statistics import fmean
from typing import NamedTuple

from vajra_py.contract import RequestView

_ROUNDS = 100
"""Largest number of rounds of k-means."""
_FIRST, _WINDOW = 16, 1000
"""Number of requests after which queues are first built, and number of latest requests that are remembered."""


def cuts_of(sizes: Sequence[float], most_queues: int) -> list[float]:
    """Return the sizes that separate queues: midpoints between centroids of k-means, which starts at quantiles."""
    points = sorted(sizes)
    count = min(most_queues, len(points))
    centroids = sorted({points[(2 * index + 1) * len(points) // (2 * count)] for index in range(count)})
    for _ in range(_ROUNDS):
        cuts = [(low + high) / 2.0 for low, high in pairwise(centroids)]
        groups: list[list[float]] = [[] for _ in centroids]
        for point in points:
            groups[bisect_right(cuts, point)].append(point)
        found = [fmean(group) for group in groups if group]
        if found == centroids:
            break
        centroids = found
    return [(low + high) / 2.0 for low, high in pairwise(centroids)]


def quotas_of(needs: Sequence[float], num_tokens: int) -> list[int]:
    """Return each queue's quota: its need plus an equal share of the tokens that are left. If there are too few tokens
    for all needs, the first queues get all that they need, and the last ones less.
    """
    quotas, left = [], num_tokens
    for need in needs:
        quotas.append(min(ceil(need), left))
        left -= quotas[-1]
    return [quota + left // len(needs) for quota in quotas]


class SizeFacts(NamedTuple):
    """Facts of one request: numbers of prompt tokens, predicted output tokens and adapter blocks; time of arrival."""

    prompt: float
    output: float
    adapter: float
    arrived_at: float

    @property
    def num_tokens(self) -> int:
        return ceil(self.prompt + self.output)


class SizeQueues:
    """Queues by the weighted request size (WRS) of `Chameleon`, each with a quota of KV tokens to which its requests
    are charged.

    `weights`: A and B of the WRS. `num_tokens`: tokens of the KV memory, divided into quotas. `slo_s`: time that a
    request may take, in seconds. `refresh_s`: time after which queues are rebuilt, in seconds.
    """

    def __init__(
        self, most_queues: int, weights: tuple[float, float], num_tokens: int, slo_s: float, refresh_s: float
    ) -> None:
        self._most_queues, self._weights, self._num_tokens = most_queues, weights, num_tokens
        self._slo_s, self._refresh_s = slo_s, refresh_s
        self._facts: dict[RequestView, SizeFacts] = {}
        self._recent: deque[SizeFacts] = deque(maxlen=_WINDOW)
        self._durations: deque[tuple[SizeFacts, float]] = deque(maxlen=_WINDOW)
        self._greatest = SizeFacts(1.0, 1.0, 1.0, 0.0)
        self._cuts: list[float] = []
        self.quotas: list[int] = [num_tokens]
        """Quota of each queue in tokens, the queue of the smallest sizes first."""
        self.used: list[int] = [0]
        """Number of tokens of each queue's quota that are in use."""
        self._charges: dict[RequestView, tuple[float, list[tuple[int, int]]]] = {}
        """Time of admission of each admitted request, and its charges as (queue, tokens)."""
        self._num_seen, self._refresh_count, self._refresh_at = 0, _FIRST, float("inf")

    def __contains__(self, request: RequestView) -> bool:
        return request in self._facts

    def learn(self, request: RequestView, facts: SizeFacts) -> None:
        """Record a new request."""
        self._facts[request] = facts
        self._recent.append(facts)
        self._num_seen += 1

    def num_tokens_of(self, request: RequestView) -> int:
        """Return the number of tokens of the request's prompt and predicted output."""
        return self._facts[request].num_tokens

    def queue_of(self, request: RequestView) -> int:
        """Return the index of the queue to which a request belongs by its size."""
        return self._queue_of(self._facts[request])

    def lines(self, waiting: Sequence[RequestView]) -> list[deque[RequestView]]:
        """Return the waiting requests of each queue, in the order of `waiting`."""
        lines: list[deque[RequestView]] = [deque() for _ in self.quotas]
        for request in waiting:
            lines[self.queue_of(request)].append(request)
        return lines

    def has_quota(self, queue: int, num_tokens: int) -> bool:
        """Return True if the queue has this many tokens of quota left, or if none of its quota is in use."""
        return not self.used[queue] or self.used[queue] + num_tokens <= self.quotas[queue]

    def borrowed(self, num_tokens: int, lenders: Sequence[int]) -> list[tuple[int, int]]:
        """Return `num_tokens` divided among the lenders, as (queue, tokens); empty if the lenders' unused quotas add up
        to less than `num_tokens`.
        """
        charges = []
        for queue in lenders:
            given = min(num_tokens, self.quotas[queue] - self.used[queue])
            if given > 0:
                charges.append((queue, given))
                num_tokens -= given
        return charges if num_tokens <= 0 else []

    def charge(self, request: RequestView, now: float, charges: list[tuple[int, int]]) -> None:
        """Charge an admitted request to queues; `charges` are (queue, tokens)."""
        self._charges[request] = now, charges
        for queue, num_tokens in charges:
            self.used[queue] += num_tokens

    def give_back(self, request: RequestView) -> float | None:
        """Return the request's tokens to the queues that were charged. Returns the time at which the request was
        admitted; None if it was not.
        """
        charged = self._charges.pop(request, None)
        if charged is None:
            return None
        for queue, num_tokens in charged[1]:
            self.used[queue] -= num_tokens
        return charged[0]

    def forget(self, request: RequestView, now: float) -> None:
        """Return the tokens of an ended request to the queues, and record the request's time from admission to end."""
        began_at = self.give_back(request)
        facts = self._facts.pop(request, None)
        if facts is not None and began_at is not None:
            self._durations.append((facts, now - began_at))

    def is_due(self, now: float) -> bool:
        """Return True if the queues must be rebuilt."""
        return now >= self._refresh_at or self._num_seen >= self._refresh_count

    def _size_of(self, facts: SizeFacts) -> float:
        """Return the weighted request size (WRS)."""
        (prompt_weight, output_weight), most = self._weights, self._greatest
        factor = facts.adapter / most.adapter if facts.adapter else 1.0
        return (prompt_weight * facts.prompt / most.prompt + output_weight * facts.output / most.output) * factor

    def _queue_of(self, facts: SizeFacts) -> int:
        return bisect_right(self._cuts, self._size_of(facts))

    def refresh(self, now: float) -> None:
        """Rebuild queues and quotas from recent requests; running requests are charged to their new queues."""
        recent = self._recent
        prompt, output, adapter = (max(1.0, *(one[index] for one in recent)) for index in range(3))
        self._greatest = SizeFacts(prompt, output, adapter, 0.0)
        self._cuts = cuts_of([self._size_of(one) for one in recent], self._most_queues)
        queues: list[list[SizeFacts]] = [[] for _ in range(len(self._cuts) + 1)]
        for one in recent:
            queues[self._queue_of(one)].append(one)
        times: list[list[float]] = [[] for _ in queues]
        for facts, duration_s in self._durations:
            times[self._queue_of(facts)].append(duration_s)
        mean_s = fmean(one for _, one in self._durations) if self._durations else 1.0
        span_s = max(one.arrived_at for one in recent) - min(one.arrived_at for one in recent) or 1.0
        needs = [
            max(one.num_tokens for one in members)
            * (fmean(durations) if durations else mean_s)
            * (1.0 / self._slo_s + len(members) / span_s)
            for members, durations in zip(queues, times, strict=True)
        ]
        self.quotas = quotas_of(needs, self._num_tokens)
        self.used = [0] * len(queues)
        for request, (began_at, _) in self._charges.items():
            facts = self._facts[request]
            self.charge(request, began_at, [(self._queue_of(facts), facts.num_tokens)])
        self._refresh_at = now + self._refresh_s
        self._refresh_count = 2 * self._num_seen
