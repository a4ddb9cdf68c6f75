"""Reduce a run of a million requests to the few hundred points of a figure.

The functions compute distributions, means over time bins, and cumulative service from a run's tables. Times are seconds
on the run's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vajra_py.metrics.definitions import Floats, Ints, ServiceWeights
from vajra_py.metrics.runs.run_data import RunData
from vajra_py.metrics.summary.fairness import Service, ServiceGaps, backlogged_service
from vajra_py.metrics.tables.columns import group_codes

CDF_FRACTIONS: Floats = np.unique(
    np.concatenate([np.linspace(0.0, 1.0, 201), [0.985, 0.992, 0.994, 0.996, 0.998, 0.999]])
)
TIME_BINS = 200


@dataclass(frozen=True, slots=True)
class Cdf:
    """Cumulative distribution: a fraction `shares[i]` of the population is at most `values[i]`."""

    values: Floats
    shares: Floats


def request_cdf(run: RunData, column: str) -> Cdf:
    """Return the distribution of a latency over the requests that arrived in the window. Requests without a value count
    too: if there are any, the curve ends below 100 %.
    """
    values = run.measured(column)[column]
    known = np.sort(values[np.isfinite(values)])
    if not known.size:
        return Cdf(np.zeros(0), np.zeros(0))
    ranks = np.unique(np.ceil(CDF_FRACTIONS * (known.size - 1)).astype(np.int64))
    return Cdf(known[ranks], (ranks + 1) / len(values))


def gap_cdf(run: RunData) -> Cdf:
    """Return the distribution of the gaps between tokens over all requests."""
    table = run.tbt("gap_s", "weight")
    gaps, weights = table.column("gap_s").to_numpy(), table.column("weight").to_numpy()
    if not weights.sum() > 0:
        return Cdf(np.zeros(0), np.zeros(0))
    order = np.argsort(gaps, kind="stable")
    cumulative = np.cumsum(weights[order])
    positions = np.searchsorted(cumulative, np.maximum(CDF_FRACTIONS * cumulative[-1], 1), side="left")
    positions = np.unique(np.minimum(positions, len(gaps) - 1))
    return Cdf(gaps[order][positions], cumulative[positions] / cumulative[-1])


def time_edges(run: RunData, num_bins: int = TIME_BINS) -> Floats:
    """Return the edges of equal time bins, in seconds on the run's clock, from the window's start to its end or to the
    last end of a request, whichever is later.
    """
    window = run.window
    ended_at = run.requests("ended_at").column("ended_at").to_numpy()
    last = float(np.nanmax(ended_at)) if np.isfinite(ended_at).any() else window.end_at
    return np.linspace(window.start_at, max(last, window.end_at), num_bins + 1)


def waiting_over_time(run: RunData, edges: Floats) -> Floats:
    """Return the mean number of requests waiting for their first admission in each bin."""
    table = run.requests("arrived_at", "admitted_at", "ended_at")
    arrived_at, admitted_at, ended_at = (table.column(name).to_numpy() for name in table.column_names)
    left_at = np.fmin(admitted_at, ended_at)
    return (_area(arrived_at, edges) - _area(left_at[np.isfinite(left_at)], edges)) / np.diff(edges)


def kv_use_over_time(run: RunData, edges: Floats, pool: PoolReplicas | None = None) -> Floats:
    """Return the fraction of KV blocks in use in each bin, as a mean over time and over replicas: over all replicas of
    `pool`, or, without `pool`, over the replicas that ran steps. A replica without running requests counts as 0.
    """
    table = run.steps(
        "replicaset", "replica_id", "formed_at", "duration_s", "used_fraction", "num_running", "num_finished"
    )
    columns = {name: table.column(name).to_numpy(zero_copy_only=False) for name in table.column_names}
    if pool is not None:
        inside = pool.holds(columns)
        columns = {name: column[inside] for name, column in columns.items()}
    replicas = _replica_codes(columns)
    count = int(replicas.max()) + 1 if replicas.size else 0
    total = np.zeros(len(edges) - 1)
    for replica in range(count):
        own = {name: column[replicas == replica] for name, column in columns.items()}
        total += _mean_held(own, edges)
    if pool is not None:
        count = len(pool.replica_ids)
    return total / count if count else total


@dataclass(frozen=True, slots=True)
class PoolReplicas:
    """Replicas of one pool."""

    replicaset: str
    replica_ids: range

    def holds(self, columns: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
        """Return a mask of the rows that belong to replicas of this pool."""
        ids, ours = columns["replica_id"], self.replica_ids
        found: NDArray[np.bool_] = (columns["replicaset"] == self.replicaset) & (ids >= ours.start) & (ids < ours.stop)
        return found


def pools_of(run: RunData) -> dict[str, PoolReplicas]:
    """Return the pools of a run by title; empty for a run without pools."""
    return {
        title: PoolReplicas(
            one["replicaset"], range(one["first_replica_id"], one["first_replica_id"] + one["num_replicas"])
        )
        for title, one in (run.summary.value("pools") or {}).items()
    }


def busy_replicas_over_time(run: RunData, edges: Floats, pool: PoolReplicas) -> Floats:
    """Return the mean number of a pool's replicas with a step in flight in each bin."""
    table = run.steps("replicaset", "replica_id", "formed_at", "duration_s")
    columns = {name: table.column(name).to_numpy(zero_copy_only=False) for name in table.column_names}
    inside = pool.holds(columns)
    begins, seconds = columns["formed_at"][inside], columns["duration_s"][inside]
    return np.diff(_ramps(begins, begins + seconds, seconds, edges)) / np.diff(edges)


def tokens_per_step(run: RunData, edges: Floats) -> tuple[Floats, Floats]:
    """Return (decode, prefill) tokens per step, each as a mean over the steps formed in a bin; 0 for a bin without
    steps.
    """
    table = run.steps("formed_at", "decode_tokens", "prefill_tokens")
    formed_at = table.column("formed_at").to_numpy()
    count = np.histogram(formed_at, edges)[0]
    decode, prefill = (
        np.histogram(formed_at, edges, weights=table.column(name).to_numpy())[0] / np.maximum(count, 1)
        for name in ("decode_tokens", "prefill_tokens")
    )
    return decode, prefill


def service_over_time(run: RunData, edges: Floats, weights: ServiceWeights) -> dict[str, Floats]:
    """Return each tenant's cumulative weighted service up to each edge. Prompt tokens count when the first output token
    is emitted, output tokens evenly from then until the request's end.
    """
    table = run.requests("tenant", "num_prompt_tokens", "num_output_tokens", "first_token_at", "ended_at")
    encoded = table.column("tenant").combine_chunks().dictionary_encode()
    codes: Ints = encoded.indices.to_numpy(zero_copy_only=False)
    first = table.column("first_token_at").to_numpy()
    last = table.column("ended_at").to_numpy()
    last = np.where(np.isfinite(last), last, edges[-1])
    prompt, output = (table.column(name).to_numpy() for name in ("num_prompt_tokens", "num_output_tokens"))
    served = np.isfinite(first)
    found = {}
    for code, tenant in enumerate(encoded.dictionary.to_pylist()):
        own = served & (codes == code)
        found[tenant] = weights.prompt_token * _sum_until(
            first[own], prompt[own], edges
        ) + weights.output_token * _ramps(first[own], np.maximum(last[own], first[own]), output[own], edges)
    return found


def service_gaps(run: RunData, weights: ServiceWeights) -> ServiceGaps | None:
    """Return the differences of service between tenants that are backlogged together; None if no two tenants are ever
    backlogged together.
    """
    table = run.requests(
        "tenant", "arrived_at", "admitted_at", "first_token_at", "ended_at", "num_prompt_tokens", "num_output_tokens"
    )
    codes, names = group_codes(table, "tenant")
    if len(names) < 2:
        return None
    columns = [table.column(name).to_numpy(zero_copy_only=False) for name in table.column_names[1:]]
    shares = np.array([weights.tenants.get(name, 1.0) for name in names], dtype=np.float64)
    window = run.window
    both = backlogged_service(Service(codes, *columns), len(names), shares, weights, window.end_at, window.start_at)
    return both.gaps()


def _area(moments: Floats, edges: Floats) -> Floats:
    """Return, for each bin, the integral over time of the number of `moments` that have passed."""
    ordered = np.sort(moments)
    passed = np.searchsorted(ordered, edges, side="right")
    sums = np.concatenate(([0.0], np.cumsum(ordered)))
    return np.diff(passed * edges - sums[passed])


def _mean_held(columns: dict[str, NDArray[Any]], edges: Floats) -> Floats:
    """Return the mean fraction of one replica's KV blocks in use in each bin. A step's blocks count as in use until the
    step ends, or until the next step is formed if requests remain on the replica.
    """
    order = np.argsort(columns["formed_at"], kind="stable")
    formed_at, use = columns["formed_at"][order], columns["used_fraction"][order]
    ended_at = formed_at + columns["duration_s"][order]
    following = np.append(formed_at[1:], np.inf)
    stays = (columns["num_running"] > columns["num_finished"])[order]
    held_until = np.where(stays & np.isfinite(following), following, np.minimum(ended_at, following))
    times = np.stack([formed_at, held_until], axis=1).ravel()
    levels = np.stack([use, np.zeros_like(use)], axis=1).ravel()
    integral = np.concatenate(([0.0], np.cumsum(levels[:-1] * np.diff(times))))
    return np.diff(np.interp(edges, times, integral)) / np.diff(edges)


def _sum_until(moments: Floats, amounts: NDArray[Any], edges: Floats) -> Floats:
    order = np.argsort(moments, kind="stable")
    sums = np.concatenate(([0.0], np.cumsum(amounts[order])))
    return sums[np.searchsorted(moments[order], edges, side="right")]


def _ramps(begins: Floats, ends: Floats, amounts: NDArray[Any], edges: Floats) -> Floats:
    """Return the total that has accrued up to each edge. Each amount accrues evenly between its entries of `begins` and
    `ends`, or at once if they are equal.
    """
    span = ends - begins
    instant = span <= 0
    rate = amounts[~instant] / span[~instant]
    total = _sum_until(begins[instant], amounts[instant], edges)
    for moments, sign in ((begins[~instant], 1.0), (ends[~instant], -1.0)):
        total = total + sign * (_sum_until(moments, rate, edges) * edges - _sum_until(moments, rate * moments, edges))
    return total


def _replica_codes(columns: dict[str, NDArray[Any]]) -> Ints:
    """Return the index of each row's replica; the replicas of all replicasets are numbered together, from 0."""
    keys = list(zip(columns["replicaset"].tolist(), columns["replica_id"].tolist(), strict=True))
    numbers = {key: i for i, key in enumerate(sorted(set(keys)))}
    return np.array([numbers[key] for key in keys], dtype=np.int64)


def bucket_edges(lengths: Sequence[int]) -> list[int]:
    """Return the edges of prompt length buckets that cover these lengths: 0, 64, and so on in factors of four."""
    longest = max(lengths, default=1)
    edges = [0, 64]
    while edges[-1] < longest:
        edges.append(edges[-1] * 4)
    return edges
