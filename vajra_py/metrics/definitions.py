"""Definitions of TTFT, TBT, TPOT, E2E, SLO attainment, quantiles and fairness.

Tables and summaries define these metrics by the functions of this module. The functions take whole columns (numpy
arrays, one entry per request) and do not modify their arguments. NaN means "did not happen" and is excluded from
distributions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from vajra_py.contract.observer import EndReason

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

UNFINISHED = "unfinished"
"""`reason` of a request that had not ended at the end of the run; every other value is one of `EndReason`."""

COMPLETED_REASONS = (EndReason.STOP.value, EndReason.LENGTH.value)
"""End reasons of requests that received their complete answer."""

REASONS: tuple[str, ...] = (*(reason.value for reason in EndReason), UNFINISHED)
"""All values of `reason`, in the order of reports."""

QUANTILES: Mapping[str, float] = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
"""Quantiles in summaries, by key."""

# Rounding errors such as 0.07 * 100 = 7.000000000000001 must not raise a quantile's rank by one.
_RANK_SLACK = 1.0 - 1e-12


class Window(Struct, frozen=True):
    """The measurement window, both ends included, in seconds on the run's clock.

    Latencies, counts, attainment and rates cover the requests that *arrived* in it, however late they ended;
    `vajra_py.metrics.summary.rates` defines the time over which rates are computed.
    """

    start_at: float
    end_at: float

    def __post_init__(self) -> None:
        if not (np.isfinite(self.start_at) and np.isfinite(self.end_at) and self.start_at <= self.end_at):
            raise ValueError(
                f"window: not a range of time ([{self.start_at}, {self.end_at}]). Allowed: two finite numbers in seconds, start <= end"
            )

    @property
    def duration_s(self) -> float:
        """Length of the window in seconds."""
        return self.end_at - self.start_at

    def holds(self, at: Floats) -> Bools:
        """Return a mask of the times inside the window; False for NaN."""
        return (at >= self.start_at) & (at <= self.end_at)


class Slo(Struct, frozen=True):
    """Default SLOs of requests without their own, in seconds; None for no SLO of that kind."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    tbt_s: float | None = None


class SloDefaults(Struct, frozen=True):
    """Default SLOs by class. For each kind of SLO (TTFT, TPOT, TBT or E2E) that a class lacks, the default of
    `everyone` applies. A default applies only to requests without their own SLO of that kind.
    """

    everyone: Slo = field(default_factory=Slo)
    by_class: Mapping[str, Slo] = field(default_factory=dict)

    def of(self, slo_class: str) -> Slo:
        """Return the SLO of a class; missing kinds are taken from `everyone`."""
        own = self.by_class.get(slo_class)
        if own is None:
            return self.everyone
        return Slo(
            *(
                mine if mine is not None else theirs
                for mine, theirs in (
                    (own.ttft_s, self.everyone.ttft_s),
                    (own.tpot_s, self.everyone.tpot_s),
                    (own.e2e_s, self.everyone.e2e_s),
                    (own.tbt_s, self.everyone.tbt_s),
                )
            )
        )


class SloStatus(IntEnum):
    """Compliance of a request with its SLO."""

    NONE = 0
    """No SLO, or, for TBT, no recorded gaps."""
    UNDECIDED = 1
    """Aborted by the client, or unfinished at the end of the run, before the SLO was met or violated."""
    MISSED = 2
    MET = 3


class Outcomes(Struct, frozen=True):
    """Columns for computing latencies and SLO status; one entry per request, times in seconds, NaN = never."""

    arrived_at: Floats
    first_token_at: Floats
    ended_at: Floats
    num_output_tokens: Ints
    completed: Bools
    """True if `reason` is one of `COMPLETED_REASONS`."""
    dropped: Bools
    """True if `reason` is rejected, expired or failed."""
    tbt_max_s: Floats | None = None
    """Longest gap between two consecutive tokens; None if gaps were not recorded."""

    def observed_until(self) -> float:
        """Return the latest time in any request's record; an unfinished request had not ended at that time."""
        moments = [column[np.isfinite(column)] for column in (self.arrived_at, self.first_token_at, self.ended_at)]
        return max((float(column.max()) for column in moments if column.size), default=0.0)


class SloTargets(Struct, frozen=True):
    """SLOs, one entry per request, in seconds; NaN = none. `deadline_at` is a time on the run's clock, the others are
    durations.
    """

    ttft_s: Floats
    tpot_s: Floats
    deadline_at: Floats
    tbt_s: Floats | None = None


class SloJudgement(Struct, frozen=True):
    """`SloStatus` of each request (int8), for each kind of SLO and for all of them together."""

    ttft: NDArray[np.int8]
    tpot: NDArray[np.int8]
    deadline: NDArray[np.int8]
    overall: NDArray[np.int8]
    tbt: NDArray[np.int8]


def ttft_s(outcomes: Outcomes) -> Floats:
    """Return the time to first token (TTFT) in seconds: from arrival to the first token that the client receives.

    A later preemption does not change it, since the client keeps its first token.
    """
    return outcomes.first_token_at - outcomes.arrived_at


def e2e_s(outcomes: Outcomes) -> Floats:
    """Return the end-to-end latency (E2E) in seconds: from arrival to the end of a completed request; NaN for other
    requests.
    """
    return np.where(outcomes.completed, outcomes.ended_at - outcomes.arrived_at, np.nan)


def tpot_s(outcomes: Outcomes) -> Floats:
    """Return the time per output token (TPOT) in seconds: (E2E - TTFT) / (output tokens - 1) of completed requests with
    at least two tokens, else NaN.
    """
    gaps = outcomes.num_output_tokens - 1
    defined = outcomes.completed & (gaps >= 1)
    return np.where(defined, (outcomes.ended_at - outcomes.first_token_at) / np.maximum(gaps, 1), np.nan)


def judge_slos(outcomes: Outcomes, targets: SloTargets, observed_until: float | None = None) -> SloJudgement:
    """Judge which requests met their SLOs.

    The TTFT SLO is met if the first token came in time. All other SLOs can be met only by a completed request:

    * TPOT: the mean gap is at most the SLO, or there is only one token;
    * TBT: every gap is at most the SLO;
    * deadline: the request completed by its deadline;
    * overall: the request violated none of its SLOs.

    A dropped request violates all of its SLOs, except a TTFT SLO that it met. For an aborted or unfinished request, the
    SLOs that it violated before its end or the end of the run count as violated, and a TTFT SLO that it met counts as
    met; all others are undecided. `observed_until` is the end of the run in seconds; by default the latest time in
    these requests' records.
    """
    horizon_at = outcomes.observed_until() if observed_until is None else observed_until
    until = np.where(np.isnan(outcomes.ended_at), horizon_at, outcomes.ended_at)
    first_wait_s = ttft_s(outcomes)
    has_first = ~np.isnan(first_wait_s)
    open_ended = ~(outcomes.completed | outcomes.dropped)
    ttft = _status(
        has_target=~np.isnan(targets.ttft_s),
        met=has_first & (first_wait_s <= targets.ttft_s),
        undecided=open_ended & ~has_first & (until - outcomes.arrived_at <= targets.ttft_s),
    )
    mean_gap_s = tpot_s(outcomes)
    tpot = _status(
        has_target=~np.isnan(targets.tpot_s),
        met=outcomes.completed & (np.isnan(mean_gap_s) | (mean_gap_s <= targets.tpot_s)),
        undecided=open_ended,
    )
    deadline = _status(
        has_target=~np.isnan(targets.deadline_at),
        met=outcomes.completed & (outcomes.ended_at <= targets.deadline_at),
        undecided=open_ended & (until <= targets.deadline_at),
    )
    tbt = _tbt_status(outcomes, targets, open_ended)
    kinds = np.stack([ttft, tpot, tbt, deadline])
    overall = np.full(len(ttft), SloStatus.UNDECIDED, dtype=np.int8)
    overall[outcomes.completed] = SloStatus.MET
    overall[outcomes.dropped | (kinds == SloStatus.MISSED).any(axis=0)] = SloStatus.MISSED
    overall[(kinds == SloStatus.NONE).all(axis=0)] = SloStatus.NONE
    return SloJudgement(ttft, tpot, deadline, overall, tbt)


def _tbt_status(outcomes: Outcomes, targets: SloTargets, open_ended: Bools) -> NDArray[np.int8]:
    """Return each request's status for the TBT SLO; `NONE` without an SLO, or if gaps were not recorded. A request with
    a gap that is too long has violated the SLO, however the request ends.
    """
    longest_s = outcomes.tbt_max_s
    if targets.tbt_s is None or longest_s is None:
        return np.full(len(open_ended), SloStatus.NONE, dtype=np.int8)
    kept = np.isnan(longest_s) | (longest_s <= targets.tbt_s)
    return _status(has_target=~np.isnan(targets.tbt_s), met=outcomes.completed & kept, undecided=open_ended & kept)


def _status(has_target: Bools, met: Bools, undecided: Bools) -> NDArray[np.int8]:
    status = np.full(len(has_target), SloStatus.MISSED, dtype=np.int8)
    status[undecided] = SloStatus.UNDECIDED
    status[met] = SloStatus.MET
    status[~has_target] = SloStatus.NONE
    return status


def quantiles(values: Floats, fractions: Sequence[float]) -> list[float]:
    """Return nearest-rank quantiles: the smallest value such that at least this fraction of all values is at most that
    value. NaN if there are no values.

    Every quantile is a value that occurred; there is no interpolation. NaN entries are ignored.
    """
    known = values[~np.isnan(values)]
    if not known.size:
        return [float("nan")] * len(fractions)
    ranks = _ranks(known.size, fractions)
    ordered = np.partition(known, sorted(set(ranks.tolist())))
    return [float(ordered[rank]) for rank in ranks]


def weighted_quantiles(values: Floats, weights: Ints, fractions: Sequence[float]) -> list[float]:
    """Return `quantiles` of a list with `weights[i]` copies of `values[i]`, without building that list. Weights are
    integers, at least 0.
    """
    total = int(weights.sum())
    if total <= 0:
        return [float("nan")] * len(fractions)
    order = np.argsort(values, kind="stable")
    cumulative = np.cumsum(weights[order])
    positions = np.searchsorted(cumulative, _ranks(total, fractions) + 1, side="left")
    return [float(values[order[position]]) for position in positions]


def nearest_rank(count: int, fraction: float) -> int:
    """Return the zero-based rank of a quantile among `count` ordered values."""
    return min(max(math.ceil(fraction * count * _RANK_SLACK) - 1, 0), count - 1)


def nearest_ranks(counts: Ints, fraction: float) -> Ints:
    """Return `nearest_rank` for each of these counts."""
    ranks = np.ceil(fraction * counts * _RANK_SLACK) - 1
    clipped: Ints = np.clip(ranks, 0, counts - 1).astype(np.int64)
    return clipped


def _ranks(count: int, fractions: Sequence[float]) -> Ints:
    return np.array([nearest_rank(count, fraction) for fraction in fractions], dtype=np.int64)


class GapStatistics(Struct, frozen=True):
    """Statistics of the gaps between one request's tokens as its client receives them, in seconds; NaN with fewer than
    two tokens.
    """

    p50_s: float
    p99_s: float
    max_s: float


def gap_statistics(token_at: Floats) -> GapStatistics:
    """Return statistics of the time between tokens (TBT) of one request, given the ordered times in seconds at which
    its client received tokens.

    A gap includes everything that happens between the two tokens, such as a preemption.
    """
    if len(token_at) < 2:
        return GapStatistics(float("nan"), float("nan"), float("nan"))
    gaps = np.diff(np.asarray(token_at, dtype=np.float64))
    p50_s, p99_s = quantiles(gaps, (0.5, 0.99))
    return GapStatistics(p50_s, p99_s, float(gaps.max()))


def covered_s(begins: Floats, ends: Floats, start_at: float) -> float:
    """Return the seconds covered by at least one span. Spans must be ordered by their starts, and none may begin before
    `start_at`.
    """
    covered = np.maximum.accumulate(ends)
    before = np.concatenate(([start_at], covered[:-1]))
    return float(np.maximum(ends - np.maximum(begins, before), 0.0).sum())


def jain_index(shares: Floats) -> float:
    """Return Jain's fairness index, (sum x)^2 / (n * sum x^2): 1 if all shares are equal, 1/n if one of n gets
    everything.

    NaN if there are no shares or all are zero. Source: Jain, Chiu, Hawe, "A quantitative measure of fairness and
    discrimination for resource allocation in shared computer systems" (1984), equation 2.
    """
    squares = float(np.square(shares).sum())
    if not squares > 0:
        return float("nan")
    return float(shares.sum()) ** 2 / (len(shares) * squares)


class ServiceWeights(Struct, frozen=True):
    """Weights of tokens and tenants for measuring service.

    The defaults of 1 per prompt token and 2 per output token are those of the Virtual Token Counter (Sheng et al.,
    "Fairness in Serving Large Language Models", OSDI 2024, section 3). A tenant of weight 2 is treated fairly when it
    gets twice the service of one of weight 1.
    """

    prompt_token: float = 1.0
    output_token: float = 2.0
    tenants: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tenant, weight in self.tenants.items():
            if not (np.isfinite(weight) and weight > 0):
                raise ValueError(
                    f"weight of tenant {tenant!r}: not a share ({weight}). Allowed: a finite number above 0"
                )


def attained_service(
    num_prompt_tokens: Ints, num_output_tokens: Ints, has_first_token: Bools, weights: ServiceWeights
) -> Floats:
    """Return the weighted service of each request: the weighted sum of its prompt tokens (cached or not; 0 before its
    first output token) and its output tokens.
    """
    prompt = np.where(has_first_token, num_prompt_tokens, 0)
    return weights.prompt_token * prompt + weights.output_token * num_output_tokens
