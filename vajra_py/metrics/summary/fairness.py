"""Fairness between tenants: differences of service and Jain's index while tenants are backlogged, and the latencies of
the tenant with the largest P99.

The *service* `W_i(t)` of a tenant until time `t` is the weighted sum of its requests' tokens, divided by the tenant's
share (`ServiceWeights`). Prompt tokens count when the request's first output token is emitted; output tokens count
evenly from the first token to the end. A tenant is *backlogged* while any of its requests waits (has arrived, but was
neither admitted nor ended).

* `max_service_difference` is the largest |W_i(s, t) - W_j(s, t)| of all windows [s, t] and all pairs of tenants that
  are both backlogged throughout the window: the quantity that the Virtual Token Counter bounds (Sheng et al., "Fairness
  in Serving Large Language Models", OSDI 2024, theorem 4.4). Windows begin and end on a grid (`grid_edges`).
* `jain_index` is Jain's index of `x_i = s_i / f_i`: `s_i` is the tenant's service in the grid cells during which it and
  at least one other tenant were backlogged throughout; `f_i` is its fair part of the service of all tenants that were
  backlogged in the same cells. The index is 1 if backlogged tenants are served equally, and 1/n if only one of n
  tenants is served. Tenants whose `f_i` is less than the service of their largest request are left out, because a
  policy cannot divide a request.

Neither measure uses total service. A tenant that is not backlogged receives exactly the service that it demands. In a
run that serves every request, the total service of every tenant equals its demand as well, whatever the policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from vajra_py.metrics.definitions import (
    Bools,
    Floats,
    Ints,
    ServiceWeights,
    attained_service,
    jain_index,
    nearest_ranks,
)

MOST_CELLS = 256
"""Maximum number of cells of the grid of windows."""
_MOST_WORK = 5e7
"""Maximum of tenants × cells², the cost of the search over windows."""
_LEAST_CELLS = 16


class Service(Struct, frozen=True):
    """Tenant, waiting time and received service, one entry per request of the run. Times in seconds, NaN = never."""

    tenant: Ints
    """Position of the request's tenant in the list of names."""
    arrived_at: Floats
    admitted_at: Floats
    first_token_at: Floats
    ended_at: Floats
    num_prompt_tokens: Ints
    num_output_tokens: Ints

    def waits_until(self, end_at: float) -> Floats:
        """Return the time at which each request's wait for its first admission ended; `end_at` if it still waited at
        the end of the run.
        """
        left_at: Floats = np.fmin(self.admitted_at, self.ended_at)
        return np.where(np.isnan(left_at), end_at, left_at)


class ServiceGaps(Struct, frozen=True):
    """Differences of service between tenants that are backlogged at the same time."""

    edges: Floats
    """Edges of the grid's cells, in seconds."""
    by_end: Floats
    """For each edge, the largest difference over the windows that end there; 0 if no two tenants are backlogged
    throughout any of these windows.
    """
    largest: float
    window: tuple[float, float]
    tenants: tuple[int, int]
    """Tenant with the most and tenant with the least service in `window`, the window with the largest difference."""


class BackloggedService(Struct, frozen=True):
    """Cumulative service of tenants up to the edges of a grid, and the cells throughout which each tenant was
    backlogged together with another tenant.
    """

    edges: Floats
    tenants: Ints
    """Positions of the tenants that are backlogged throughout at least one cell together with another tenant."""
    served: Floats
    """Cumulative service up to each edge, divided by the tenant's share; shape (tenants, edges)."""
    backlogged: Bools
    """True where this tenant and at least one other are backlogged throughout the cell; shape (tenants, cells)."""

    def gaps(self) -> ServiceGaps | None:
        """Return the largest differences of service over all windows and pairs of tenants; None if no two tenants were
        backlogged together.
        """
        num_cells = self.backlogged.shape[1]
        if len(self.tenants) < 2:
            return None
        by_end = np.zeros(num_cells + 1)
        largest, window, pair = 0.0, (float(self.edges[0]), float(self.edges[0])), (0, 1)
        # A tenant counts only in windows throughout which it is backlogged. `until` has, for each tenant and each first
        # cell of a window, the end edge of the longest window in which the tenant counts.
        until = _runs_of(self.backlogged)
        for begin in range(num_cells):
            alive = np.flatnonzero(until[:, begin] > begin)
            if len(alive) < 2:
                continue
            lengths = until[alive, begin]
            last = int(np.partition(lengths, -2)[-2])  # in longer windows, at most one tenant counts
            got = self.served[alive, begin + 1 : last + 1] - self.served[alive, begin, None]
            inside = lengths[:, None] >= np.arange(begin + 1, last + 1)
            spread = np.where(inside, got, -np.inf).max(axis=0) - np.where(inside, got, np.inf).min(axis=0)
            np.maximum(by_end[begin + 1 : last + 1], spread, out=by_end[begin + 1 : last + 1])
            best = int(np.argmax(spread))
            if spread[best] > largest:
                largest = float(spread[best])
                window = (float(self.edges[begin]), float(self.edges[begin + 1 + best]))
                ordered = alive[inside[:, best]]
                own = got[inside[:, best], best]
                pair = (int(ordered[np.argmax(own)]), int(ordered[np.argmin(own)]))
        return ServiceGaps(
            self.edges, by_end, largest, window, (int(self.tenants[pair[0]]), int(self.tenants[pair[1]]))
        )

    def jain(self, shares: Floats, largest_request: Floats) -> float | None:
        """Return Jain's index of the service that tenants received while backlogged; None if fewer than two tenants can
        be compared. `shares` (share of each tenant) and `largest_request` (service of each tenant's largest request)
        have one entry per tenant of the run.
        """
        share = shares[self.tenants]
        got = np.where(self.backlogged, np.diff(self.served, axis=1), 0.0) * share[:, None]
        entitled = np.where(self.backlogged, share[:, None], 0.0)
        whole = entitled.sum(axis=0)
        part = entitled * np.divide(got.sum(axis=0), whole, out=np.zeros_like(whole), where=whole > 0)
        fair = part.sum(axis=1)
        counted = (fair > 0) & (fair >= largest_request[self.tenants])
        if counted.sum() < 2:
            return None
        return jain_index(got.sum(axis=1)[counted] / fair[counted])


def backlogged_service(
    service: Service, num_tenants: int, shares: Floats, weights: ServiceWeights, end_at: float, start_at: float
) -> BackloggedService:
    """Return the service of the tenants that were backlogged together between `start_at` and `end_at` (seconds), on a
    grid from the first to the last time at which at least two tenants were backlogged.
    """
    begins = np.maximum(service.arrived_at, start_at)
    ends = np.minimum(service.waits_until(end_at), end_at)
    waited = np.isfinite(begins) & (ends > begins)
    owner, begins, ends = _merged(service.tenant[waited], begins[waited], ends[waited])
    span = _shared_span(begins, ends)
    if span is None:
        none = np.zeros(0)
        return BackloggedService(none, np.zeros(0, np.int64), np.zeros((0, 0)), np.zeros((0, 0), np.bool_))
    edges = grid_edges(*span, num_tenants)
    cells = _covered_cells(owner, begins, ends, edges, num_tenants)
    cells &= cells.sum(axis=0) > 1
    found = np.flatnonzero(cells.any(axis=1))
    place = np.full(num_tenants, -1)
    place[found] = np.arange(len(found))
    served = _served(service, place, edges, weights, end_at)[: len(found)] / shares[found, None]
    return BackloggedService(edges, found, served, cells[found])


def grid_edges(start_at: float, end_at: float, num_tenants: int) -> Floats:
    """Return the edges of equal cells: 256 cells for up to 760 tenants, fewer for more tenants (50 for 20,000), at
    least 16.
    """
    cells = int(min(MOST_CELLS, max(_LEAST_CELLS, math.sqrt(_MOST_WORK / max(num_tenants, 1)))))
    return np.linspace(start_at, end_at, cells + 1)


def fairness_section(
    service: Service, names: Sequence[str], weights: ServiceWeights, window: tuple[float, float], inside: Bools
) -> dict[str, Any]:
    """Return the section `fairness` of a summary. `inside` masks the requests that arrived in the window. Undefined
    values are None, such as differences with a single tenant.
    """
    present = np.flatnonzero(np.bincount(service.tenant[inside], minlength=len(names)))
    shares = np.array([weights.tenants.get(name, 1.0) for name in names], dtype=np.float64)
    each = attained_service(
        service.num_prompt_tokens, service.num_output_tokens, ~np.isnan(service.first_token_at), weights
    )
    totals = np.bincount(service.tenant[inside], weights=each[inside], minlength=len(names))[present] / shares[present]
    section: dict[str, Any] = {
        "num_tenants": len(present),
        "num_backlogged": 0,
        "max_service_difference": None,
        "difference_tenants": None,
        "difference_window_s": None,
        "jain_index": None,
        "max_service": float(totals.max()) if totals.size else None,
        "min_service": float(totals.min()) if totals.size else None,
        "prompt_token_weight": weights.prompt_token,
        "output_token_weight": weights.output_token,
    }
    if len(present) > 1:
        both = backlogged_service(service, len(names), shares, weights, window[1], window[0])
        largest = np.zeros(len(names))
        np.maximum.at(largest, service.tenant, each)
        gaps = both.gaps()
        if gaps is not None:
            section |= {
                "num_backlogged": len(both.tenants),
                "max_service_difference": gaps.largest,
                "difference_tenants": [names[tenant] for tenant in gaps.tenants],
                "difference_window_s": list(gaps.window),
                "jain_index": both.jain(shares, largest),
            }
    return section


def worst_p99(tenant: Ints, values: Floats, num_tenants: int) -> tuple[int, float] | None:
    """Return the tenant with the largest P99 of its requests' values, and this P99 (nearest rank, without NaN values).
    None if no request has a value.
    """
    known = ~np.isnan(values)
    owner, own = tenant[known], values[known]
    if not own.size:
        return None
    order = np.lexsort((own, owner))
    counts = np.bincount(owner, minlength=num_tenants)
    firsts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    there = np.flatnonzero(counts)
    p99 = own[order][firsts[there] + nearest_ranks(counts[there], 0.99)]
    worst = int(np.argmax(p99))
    return int(there[worst]), float(p99[worst])


def _merged(owner: Ints, begins: Floats, ends: Floats) -> tuple[Ints, Floats, Floats]:
    """Return the union of each owner's intervals as (owner, begins, ends), ordered by owner and time."""
    if not owner.size:
        return owner, begins, ends
    order = np.lexsort((begins, owner))
    owner, begins, ends = owner[order], begins[order], ends[order]
    ranked, rank = np.unique(ends, return_inverse=True)
    # An offset per owner separates the owners in one running maximum. It is added to the ranks of the ends, since
    # adding it to the times would round them.
    reach = np.maximum.accumulate(owner * len(ranked) + rank)
    reached = ranked[reach % len(ranked)]
    first = np.ones(len(owner), dtype=np.bool_)
    first[1:] = (owner[1:] != owner[:-1]) | (begins[1:] > reached[:-1])
    starts = np.flatnonzero(first)
    return owner[starts], begins[starts], reached[np.append(starts[1:], len(owner)) - 1]


def _shared_span(begins: Floats, ends: Floats) -> tuple[float, float] | None:
    """Return the first and the last time that at least two intervals cover; None if there is no such time."""
    moments = np.concatenate((begins, ends))
    changes = np.concatenate((np.ones(len(begins), np.int64), -np.ones(len(ends), np.int64)))
    order = np.lexsort((changes, moments))
    shared = np.flatnonzero(np.cumsum(changes[order]) >= 2)
    if not shared.size:
        return None
    return float(moments[order][shared[0]]), float(moments[order][shared[-1] + 1])


def _covered_cells(owner: Ints, begins: Floats, ends: Floats, edges: Floats, num_owners: int) -> Bools:
    """Return a mask, shape (owners, cells): True where one of the owner's intervals covers the whole cell."""
    slack = 1e-9 * (edges[-1] - edges[0])
    first = np.searchsorted(edges, begins - slack, side="left")
    last = np.searchsorted(edges, ends + slack, side="right") - 1
    whole = last > first
    steps = np.zeros((num_owners, len(edges)), dtype=np.int64)
    np.add.at(steps, (owner[whole], first[whole]), 1)
    np.add.at(steps, (owner[whole], last[whole]), -1)
    covered: Bools = np.cumsum(steps, axis=1)[:, :-1] > 0
    return covered


def _runs_of(backlogged: Bools) -> Ints:
    """Return, for each cell, the index of the last edge up to which all cells from this cell on are true; for a false
    cell, this is the index of the cell's start edge. The shape is (tenants, cells).
    """
    num_cells = backlogged.shape[1]
    until = np.empty(backlogged.shape, dtype=np.int64)
    reach = np.full(len(backlogged), num_cells)
    for cell in range(num_cells - 1, -1, -1):
        reach = np.where(backlogged[:, cell], reach, cell)
        until[:, cell] = reach
    return until


def _served(
    service: Service, place: NDArray[np.int64], edges: Floats, weights: ServiceWeights, end_at: float
) -> Floats:
    """Return the cumulative weighted service up to each edge, shape (tenants, edges). `place` holds the row of each
    tenant in the result; -1 for a tenant to leave out.
    """
    rows = int(place.max()) + 1
    row = place[service.tenant]
    first_at = service.first_token_at
    chosen = (row >= 0) & ~np.isnan(first_at)
    row, first_at = row[chosen], first_at[chosen]
    last_at = np.where(np.isnan(service.ended_at[chosen]), end_at, service.ended_at[chosen])
    prompt = (weights.prompt_token * service.num_prompt_tokens[chosen]).astype(np.float64)
    output = (weights.output_token * service.num_output_tokens[chosen]).astype(np.float64)
    span = np.maximum(last_at - first_at, 0.0)
    at_once = span == 0
    rate: Floats = np.where(at_once, 0.0, output / np.where(at_once, 1.0, span))

    def until(moments: Floats, amounts: Floats) -> Floats:
        """Return, for each tenant and edge, the sum of the amounts whose moment is not after the edge; shape (rows,
        edges).
        """
        cell = np.searchsorted(edges, moments, side="left")
        there = cell < len(edges)
        flat = np.bincount(
            (row * len(edges) + cell)[there], weights=amounts[there], minlength=rows * len(edges)
        ).reshape(rows, len(edges))
        sums: Floats = np.cumsum(flat, axis=1)
        return sums

    since = edges - edges[0]
    flowing = (until(first_at, rate) - until(last_at, rate)) * since
    flowing -= until(first_at, rate * (first_at - edges[0])) - until(last_at, rate * (last_at - edges[0]))
    served: Floats = until(first_at, prompt + np.where(at_once, output, 0.0)) + flowing
    return served


__all__ = [
    "BackloggedService",
    "Service",
    "ServiceGaps",
    "backlogged_service",
    "fairness_section",
    "grid_edges",
    "worst_p99",
]
