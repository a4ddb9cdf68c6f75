"""KV connector that gives recorded answers, for a replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from vajra_py.runtime.records.input_log import Input
from vajra_py.runtime.requests.connector import NOTHING, ConnectorRules, KvReport, Match
from vajra_py.runtime.requests.kv_inputs import KvAnswer, KvEnd, KvNews
from vajra_py.runtime.requests.request import Request
from vajra_py.runtime.serving.replica import Replica
from vajra_py.runtime.step.plan import StepPlan


class ReplayedConnector:
    """KV connector of one replica that returns the recorded answers, in order for each request, and the recorded
    reports of steps.
    """

    def __init__(self, replica: Replica, rules: Mapping[str, Any], inputs: Iterable[Input]) -> None:
        self._answers: dict[int, deque[Match | None]] = {}
        self._keeps: dict[int, bool] = {}
        self._news: dict[int, KvNews] = {}
        self._replica = replica
        for one in inputs:
            if isinstance(one, KvAnswer):
                match = None if one.num_tokens is None else Match(one.num_tokens, one.is_async)
                self._answers.setdefault(one.index, deque()).append(match)
            elif isinstance(one, KvEnd):
                self._keeps[one.index] = one.keeps
            elif isinstance(one, KvNews) and one.step is not None:
                self._news[one.step] = one
        replica.use_connector(self, ConnectorRules(**rules))

    def report(self, plan: StepPlan) -> KvReport | None:
        """Return the recorded report of a step; None if there is none."""
        news = self._news.get(plan.step_index)
        return None if news is None else self._replica.report_of(news)

    def matched(self, request: Request, num_local_tokens: int) -> Match | None:
        """See `KvConnector`; a call without a recorded answer has nothing to load."""
        answers = self._answers.get(request.index)
        return answers.popleft() if answers else NOTHING

    def begins(self, request: Request, num_local_tokens: int, num_tokens: int) -> None:
        """See `KvConnector`."""

    def allocated(self, request: Request, num_tokens: int) -> None:
        """See `KvConnector`."""

    def ended(self, request: Request, num_blocks: int) -> bool:
        """See `KvConnector`."""
        return self._keeps.get(request.index, False)
