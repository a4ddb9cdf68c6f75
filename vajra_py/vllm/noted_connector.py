"""Record the answers and reports of a connector as inputs of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vajra_py.runtime.records.input_log import Input
from vajra_py.runtime.requests.connector import KvConnector, KvReport, Match
from vajra_py.runtime.requests.kv_inputs import KvAnswer, KvEnd, KvNews
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.replica import Replica


@dataclass(frozen=True, slots=True)
class NotedConnector:
    """Connector wrapper that records the answers."""

    connector: KvConnector
    replica: Replica
    note: Callable[[Input], None]
    now: Callable[[], int]

    def matched(self, request: Request, num_local_tokens: int) -> Match | None:
        """See `KvConnector`."""
        match, place = (
            self.connector.matched(request, num_local_tokens),
            (self.replica.replicaset, self.replica.replica_id),
        )
        self.note(KvAnswer(self.now(), *place, request.index, *((None,) if match is None else match)))
        return match

    def begins(self, request: Request, num_local_tokens: int, num_tokens: int) -> None:
        """See `KvConnector`."""
        self.connector.begins(request, num_local_tokens, num_tokens)

    def allocated(self, request: Request, num_tokens: int) -> None:
        """See `KvConnector`."""
        self.connector.allocated(request, num_tokens)

    def ended(self, request: Request, num_blocks: int) -> bool:
        """See `KvConnector`."""
        keeps = self.connector.ended(request, num_blocks)
        self.note(KvEnd(self.now(), self.replica.replicaset, self.replica.replica_id, request.index, keeps))
        return keeps


def news_of(report: KvReport, replica: Replica, now: int, step: int | None) -> KvNews:
    """Convert a report to its recorded form; `step` is the index of the step that ended with the report, None if there
    was none.
    """
    received, sent, failed = ([one.index for one in each] for each in (report.received, report.sent, report.failed))
    bad_blocks = sorted(report.bad_blocks)
    return KvNews(
        now, replica.replicaset, replica.replica_id, step, received, sent, failed, bad_blocks, report.num_returned
    )
