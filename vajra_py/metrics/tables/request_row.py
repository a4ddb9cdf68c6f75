"""One row of the requests table."""

from __future__ import annotations

from dataclasses import dataclass

from vajra_py.contract.facts import StatedFacts

__all__ = ["RequestRow"]


@dataclass(frozen=True, slots=True)
class RequestRow(StatedFacts):
    """Facts of a request at its end, or at the end of the run. Times in seconds on the run's clock, NaN = never.

    Facts stated by the client have the form that policies see: `deadline_at`, not `deadline_s`.
    """

    request_id: str
    index: int
    """Submission order over the whole run."""
    replicaset: str
    replica_id: int
    """Replica that ran or queued it last; -1 if it reached none."""
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    arrived_at: float
    admitted_at: float
    """Time of the first admission."""
    first_token_at: float
    ended_at: float
    reason: str
    """An `EndReason` value, or `UNFINISHED`."""
    detail: str
    tbt_p50_s: float
    tbt_p99_s: float
    tbt_max_s: float
    """Longest gap; `tbt_p50_s`, `tbt_p99_s` and this are the request's `gap_statistics`."""
    deadline_at: float | None = None
