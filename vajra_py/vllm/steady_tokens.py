"""Take in the tokens of a step whose requests are those of the step before, all at once.

Most steps of decodes give every request some tokens that end none of them. Then outputs grow and clients get ids, and no
request has to be looked at: which tokens would end any of them is known for all together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from vllm.v1.engine import EngineCoreOutput

from vajra_py.vllm.mechanism import Request
from vajra_py.vllm.records import Record


class TakenTokens(NamedTuple):
    """Tokens that became output.

    Attributes:
        outputs: messages of each client, by its index.
        accepted: requests that got more than one token, and how many more.
    """

    outputs: dict[int, list[EngineCoreOutput]]
    accepted: dict[Request, int]


@dataclass(slots=True)
class _Batch:
    """Requests of a step, in the order of the workers.

    Attributes:
        stops: tokens that end any of them.
        num_left: number of tokens that each can take at least before one of them needs a look.
    """

    records: list[Record]
    requests: list[Request]
    outputs: list[list[int]]
    clients: list[int]
    stops: set[int]
    num_left: int = 0

    def count_left(self) -> int:
        """Compute `num_left` anew; between calls it is a lower bound."""
        self.num_left = min(record.plain_until - len(record.output) for record in self.records)
        return self.num_left


class SteadyTokens:
    """Tokens of steps as long as these compute the same requests."""

    def __init__(self, records: Mapping[str, Record]) -> None:
        """`records`: requests whose end no client has got yet, by name."""
        self._records = records
        self._names: list[str] = []
        self._is_new = True
        """True if these requests were not looked up yet."""
        self._batch: _Batch | None = None
        """Requests that were looked up; None: none yet, or one of them needs a look in every step."""

    def forget(self) -> None:
        """Look requests up again, since one of them has ended or was handed in again."""
        self._names, self._batch = [], None

    def count_again(self) -> None:
        """Count what is left of each request again, since tokens are taken in one by one."""
        if self._batch is not None:
            self._batch.num_left = 0

    def take(self, names: list[str], sampled: Sequence[list[int]]) -> TakenTokens | None:
        """Take in a step's tokens, of which clients get the ids alone; None, and nothing changed, if a request needs a look."""
        if names != self._names:
            self._names, self._batch, self._is_new = list(names), None, True
            return None
        if self._is_new:
            self._look_up()
        batch = self._batch
        if batch is None:
            return None
        counts = set(map(len, sampled))
        most = max(counts)
        if most >= batch.num_left and most >= batch.count_left():
            self._batch = None
            return None
        if 0 in counts or not batch.stops.isdisjoint(chain.from_iterable(sampled)):
            return None
        batch.num_left -= most
        for output, tokens in zip(batch.outputs, sampled, strict=True):
            output += tokens
        sent = list(map(EngineCoreOutput, self._names, sampled))
        outputs = {batch.clients[0]: sent}
        if batch.clients.count(batch.clients[0]) < len(sent):
            outputs = {}
            for client, one in zip(batch.clients, sent, strict=True):
                outputs.setdefault(client, []).append(one)
        accepted = {}
        if most > 1:
            owners = zip(batch.requests, sampled, strict=True)
            accepted = {request: len(tokens) - 1 for request, tokens in owners if len(tokens) > 1}
        return TakenTokens(outputs, accepted)

    def owners(self, names: list[str]) -> Sequence[Request] | None:
        """Return the requests of these names; None if they are not those of the last step, or one needs a look."""
        return None if self._batch is None or names != self._names else self._batch.requests

    def _look_up(self) -> None:
        """Look the requests up, unless one is unknown, has ended in the mechanism, or has no token yet."""
        records = [one for one in map(self._records.get, self._names) if one is not None and one.output]
        requests = [own for record in records if (own := record.own) is not None]
        if not requests or len(requests) < len(self._names):
            return
        self._is_new = False
        clients = [record.client_index for record in records]
        stops = set().union(*(record.stops for record in records))
        self._batch = _Batch(records, requests, [record.output for record in records], clients, stops)
