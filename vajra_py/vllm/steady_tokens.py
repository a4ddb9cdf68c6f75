"""Process the tokens of a step in bulk if its requests are those of the step before.

Most decode steps end no request. In such a step, outputs grow and clients receive token ids without a check of each
request, because the tokens that would end any of the requests are known for the whole batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from vllm.v1.engine import EngineCoreOutput

from vajra_py.vllm.mechanism import Request
from vajra_py.vllm.records import Record


class TakenTokens(NamedTuple):
    """Tokens of a step that became output.

    Attributes:
        outputs: messages for each client, by its index.
        accepted: numbers of accepted drafts; requests without accepted drafts may be left out.
    """

    outputs: dict[int, list[EngineCoreOutput]]
    accepted: dict[Request, int]


@dataclass(slots=True)
class _Batch:
    """Requests of a step, in the order of the workers.

    Attributes:
        client: index of their client; None if there are several.
        stops: token ids that end any of them.
        num_left: number of tokens that can surely be added to each output before a request must be checked
            individually; a lower bound.
    """

    records: list[Record]
    requests: list[Request]
    outputs: list[list[int]]
    client: int | None
    stops: set[int]
    num_left: int = 0

    def count_left(self) -> int:
        """Recompute and return `num_left`; it is exact now, and later only a lower bound."""
        self.num_left = min(record.plain_until - len(record.output) for record in self.records)
        return self.num_left


class SteadyTokens:
    """Bulk processing of tokens, as long as steps compute the same requests."""

    def __init__(self, records: Mapping[str, Record]) -> None:
        """Start without a batch; `records` holds the unfinished requests by name, and is updated by the caller."""
        self._records = records
        self._names: list[str] = []
        self._is_new = True
        """True if the requests of the next step must be looked up."""
        self._batch: _Batch | None = None
        """Batch of the requests looked up last; None before a lookup, or if one of these requests must be checked
        individually in every step.
        """

    def forget(self) -> None:
        """Drop the batch, because one of its requests has ended or was resubmitted."""
        self._names, self._batch = [], None

    def count_again(self) -> None:
        """Recompute `num_left` before the next bulk step, because tokens were added individually."""
        if self._batch is not None:
            self._batch.num_left = 0

    def take(self, names: list[str], sampled: Sequence[list[int]]) -> TakenTokens | None:
        """Append a step's tokens to the outputs; messages contain token ids only.

        Returns None and appends nothing if the requests are not those of the step before, or if one must be checked
        individually.
        """
        if names != self._names:
            self._names, self._batch, self._is_new = list(names), None, True
            return None
        if self._is_new:
            self._look_up()
        batch = self._batch
        if batch is None:
            return None
        most = max(map(len, sampled), default=0)
        if most >= batch.num_left and most >= batch.count_left():
            self._batch = None
            return None
        if not all(sampled):
            return None
        tokens = [one[0] for one in sampled] if most == 1 else list(chain.from_iterable(sampled))
        if not batch.stops.isdisjoint(tokens):
            return None
        batch.num_left -= most
        if most == 1:
            deque(map(list.append, batch.outputs, tokens), maxlen=0)  # takes half the time of a loop in Python
        else:
            deque(map(list.extend, batch.outputs, sampled), maxlen=0)
        sent = list(map(EngineCoreOutput, self._names, sampled))
        if batch.client is None:
            outputs: dict[int, list[EngineCoreOutput]] = {}
            for record, one in zip(batch.records, sent, strict=True):
                outputs.setdefault(record.client_index, []).append(one)
        else:
            outputs = {batch.client: sent}
        accepted = {}
        if most > 1:
            accepted = dict(zip(batch.requests, [len(one) - 1 for one in sampled], strict=True))
        return TakenTokens(outputs, accepted)

    def owners(self, names: list[str]) -> Sequence[Request] | None:
        """Return the requests of these names; None if the last step had other requests, or if one of them must be
        checked individually.
        """
        return None if self._batch is None or names != self._names else self._batch.requests

    def _look_up(self) -> None:
        """Build the batch, unless a request is unknown, is not in the mechanism, or has no token yet."""
        records = [one for one in map(self._records.get, self._names) if one is not None and one.output]
        requests = [own for record in records if (own := record.own) is not None]
        if not requests or len(requests) < len(self._names):
            return
        self._is_new = False
        clients = {record.client_index for record in records}
        client = clients.pop() if len(clients) == 1 else None
        stops = set().union(*(record.stops for record in records))
        self._batch = _Batch(records, requests, [record.output for record in records], client, stops)
