"""Observer that records one row per request and per step.

Token times are not recorded token by token: requests that decode together (`vajra_py.runtime.requests.decode_pool`)
share a log of their steps' ends, so gaps are computed from these logs, for many ended requests at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from vajra_py.contract import RequestView
from vajra_py.contract.observer import EndReason
from vajra_py.metrics.definitions import UNFINISHED, Floats, Ints, nearest_ranks
from vajra_py.metrics.tables.columnar import GapList
from vajra_py.metrics.tables.further_columns import DRAFT_COUNTS, NOTHING_FURTHER, FurtherColumns
from vajra_py.metrics.tables.requests import STATED_COLUMNS, RequestsBuilder, TbtBuilder
from vajra_py.metrics.tables.steps import StepsBuilder
from vajra_py.runtime.records.step_log import StepLog
from vajra_py.runtime.requests.request import Admission
from vajra_py.runtime.support.clock import TICKS_PER_SECOND

if TYPE_CHECKING:
    from vajra_py.runtime.requests.request import Request

_NOT_ASKED = Admission()
"""Entry of a request for which the admission policy was not called."""

_FACTS = (
    *("request_id", "index", "replicaset", "replica_id", *STATED_COLUMNS),
    *("num_prompt_tokens", "num_output_tokens", "num_cached_tokens", "num_preemptions"),
    *("arrived_at", "admitted_at", "first_token_at", "ended_at"),
)
"""Columns copied from the request's attributes."""

_ROWS_AT_ONCE = 512
"""Number of ended requests that are buffered before their rows are built together."""


class Recorder(StepLog):
    """Observer that collects the requests, steps and gaps of one run."""

    def __init__(
        self,
        num_blocks_of: Callable[[str, int], int],
        *,
        steps: bool = True,
        log: StepLog | None = None,
        further: FurtherColumns = NOTHING_FURTHER,
    ) -> None:
        """Create a recorder.

        Args:
            num_blocks_of: Returns the number of KV blocks of a replica, given (replicaset, replica id).
            steps: Record the steps table.
            log: Step log that another observer fills; its records are used, so that steps are not recorded twice.
            further: Optional columns of the requests table.
        """
        super().__init__()
        self._steps = StepsBuilder(num_blocks_of)
        self._step_log = self if log is None else log
        self.wants_plans = steps and log is None
        if steps:
            self._step_log.share(self._steps.take)
        self._requests = RequestsBuilder(further)
        self._tbt = TbtBuilder()
        self._ended: list[tuple[Request, str, str]] = []

    @property
    def steps(self) -> StepsBuilder:
        """Builder with the steps that have completed."""
        self._step_log.hand_on()
        return self._steps

    @property
    def requests(self) -> RequestsBuilder:
        """Builder with one row per ended request."""
        self._flush()
        return self._requests

    @property
    def tbt(self) -> TbtBuilder:
        """Builder with the gaps between tokens of ended requests."""
        self._flush()
        return self._tbt

    def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
        """Record a row for a request that ended."""
        self._ended.append((cast("Request", request), reason.value, detail))
        if len(self._ended) >= _ROWS_AT_ONCE:
            self._flush()

    def record_unfinished(self, requests: Iterable[Request]) -> None:
        """Record requests that had not ended at the end of the run."""
        self._ended.extend((request, UNFINISHED, "the run ended first") for request in requests)
        self._flush()

    def _flush(self) -> None:
        if not self._ended:
            return
        requests, reasons, details = zip(*self._ended, strict=True)
        self._ended = []
        facts = zip(*map(attrgetter(*_FACTS), requests), strict=True)
        columns: dict[str, Sequence[Any]] = dict(zip(_FACTS, facts, strict=True))
        lists = list(map(self._tbt.gaps, columns["replicaset"], columns["slo_class"]))
        gaps, num_gaps = _keep_gaps(requests, lists)
        p50_s, p99_s, max_s = _gap_quantiles(gaps, num_gaps)
        if self._requests.has_admission:
            columns |= _admission_columns(requests)
        if self._requests.has_drafts:
            columns |= {name: [getattr(one, name) for one in requests] for name in DRAFT_COUNTS}
        self._requests.extend(
            {
                **columns,
                "reason": reasons,
                "detail": details,
                "tbt_p50_s": p50_s,
                "tbt_p99_s": p99_s,
                "tbt_max_s": max_s,
            }
        )


def _admission_columns(requests: Sequence[Request]) -> dict[str, Sequence[Any]]:
    """Return `ADMISSION_COLUMNS` for these requests. `deferred_s` is NaN for a request that was still deferred when the
    run ended.
    """
    rows = [(one.admission or _NOT_ASKED, one.ended_at is None) for one in requests]
    return {
        "admission": [row.outcome for row, _ in rows],
        "degraded": [row.degraded for row, _ in rows],
        "shed_reason": [row.refusal for row, _ in rows],
        "num_deferrals": [row.num_deferrals for row, _ in rows],
        "deferral_reason": [row.deferral for row, _ in rows],
        "deferred_at": [row.deferred_at for row, _ in rows],
        "deferred_s": [
            float("nan") if is_open and row.outcome == "deferred" else row.deferred_s for row, is_open in rows
        ],
    }


def token_times(request: Request) -> Floats:
    """Return the times at which a request's client received each token, in seconds."""
    ticks = array("q")
    for entry in request.token_log:
        if isinstance(entry, int):
            ticks.append(entry)
        else:
            log, first, end = entry
            ticks.extend(log[first : end if end >= 0 else None])
    return np.frombuffer(ticks, dtype=np.int64) / TICKS_PER_SECOND if ticks else np.empty(0)


def _keep_gaps(requests: Sequence[Request], lists: Sequence[GapList]) -> tuple[Floats, Ints]:
    """Add the gaps between tokens of each request to its list.

    Returns (gaps in seconds, concatenated in request order; number of gaps of each request).
    """
    ticks = array("q")
    stops = [0]
    within_logs = []
    for request, gap_list in zip(requests, lists, strict=True):
        for entry in request.token_log:
            if isinstance(entry, int):
                ticks.append(entry)
                continue
            log, first, end = entry
            end = len(log) if end < 0 else end
            if end - first > 1:
                gap_list.extend_from_log(log, first, end)
                within_logs.append(slice(len(ticks) + 1, len(ticks) + end - first))
            ticks.extend(log[first:end])
        stops.append(len(ticks))
    bounds = np.array(stops)
    num_tokens = np.diff(bounds)
    is_gap = np.ones(len(ticks), dtype=np.bool_)  # True for tokens that follow a gap: all but a request's first token
    is_gap[bounds[:-1][num_tokens > 0]] = False
    gaps = np.diff(np.array(ticks) / TICKS_PER_SECOND)
    is_own = is_gap.copy()
    for part in within_logs:
        is_own[part] = False
    own = np.flatnonzero(is_own)
    start = 0
    for _, neighbours in groupby(zip(lists, np.searchsorted(own, bounds[1:]).tolist(), strict=True), _identity_of_list):
        *_, (gap_list, stop) = neighbours
        gap_list.extend(gaps[own[start:stop] - 1])
        start = stop
    return gaps[is_gap[1:]], np.maximum(num_tokens - 1, 0)


def _identity_of_list(entry: tuple[GapList, int]) -> int:
    return id(entry[0])


def _gap_quantiles(gaps: Floats, num_gaps: Ints) -> tuple[Floats, Floats, Floats]:
    """Return each of the three `gap_statistics` as an array with one entry per request, given the result of
    `_keep_gaps`.
    """
    ordered = gaps.copy()
    stops = np.cumsum(num_gaps)
    start = 0
    for stop in stops.tolist():
        ordered[start:stop].sort()
        start = stop
    result = np.full((3, len(num_gaps)), np.nan)
    some = num_gaps > 0
    counts, starts = num_gaps[some], (stops - num_gaps)[some]
    result[0, some] = ordered[starts + nearest_ranks(counts, 0.5)]
    result[1, some] = ordered[starts + nearest_ranks(counts, 0.99)]
    result[2, some] = ordered[starts + counts - 1]
    return result[0], result[1], result[2]
