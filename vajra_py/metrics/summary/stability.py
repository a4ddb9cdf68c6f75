"""Decide whether the system kept up with its load: stable, backlogged, or overloaded.

The rule uses only the requests' sizes, their outcomes, and the times at which they arrived, were admitted and ended, so
it has the same meaning for every policy and engine:

* Two stocks are measured: requests *in the system* (arrived, not ended) and requests *waiting* (arrived, neither
  admitted nor ended), each in requests and in tokens (prompt and output). A policy that serves short requests first can
  hide a backlog in one of the two units, but not in both. A stock is averaged over time in each quarter of the span
  from the start of the measurement window to the last arrival in it. `A` is the amount that arrived in the second half
  of that span.
* *growth* of a stock = (last quarter - second quarter) / A: the fraction of arrivals that remained in the stock; the
  centres of the two quarters are half of the span apart. At 1.25 times the system's capacity, a fifth of the arrivals
  remains. The first quarter is left out, because the empty system fills then.
* growth of the stock in the system counts only if the last quarter's departures are at most a tenth above the second's:
  a system that holds more requests because more arrive and more complete is not at its limit. Growth of the waiting
  stock always counts.
* growth is *visible* if the stock rose by more than two standard deviations of Poisson arrivals: twice the root of the
  sum of squares of the sizes that arrived in the second half. The rise must also exceed the size of 4 mean requests.
* growth *goes on* if the rise from the third quarter to the last is at least a quarter of the whole rise.
* the *worst quarter* is the one with the most waiting requests, including the first quarter, since a burst is a backlog
  even if it is served later. Its queue is visible if more than 4 requests, and more than two standard deviations of its
  arrivals, waited on average.
* *shed* = the fraction of the window's arrivals that expired, or were rejected although requests of their size or
  larger were served.

**Overloaded**: growth of 5 % or more that is visible and goes on, in any stock, or 5 % or more shed. **Backlogged**:
not overloaded, and at least one of

* visible growth of requests waiting or in the system, or 1 % or more shed;
* on average, more than five requests waiting for their first admission for each request in service (by Little's law:
  requests wait more than five times as long as they are served);
* in the worst quarter, a visible queue of more than five requests for each request in service, or of 5 % or more of the
  requests that arrived in that quarter.

**Stable**: all other runs. In a run too short for visible growth, only shedding and waiting decide.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from enum import Enum

import numpy as np
from msgspec import Struct

from vajra_py.metrics.definitions import Bools, Floats, Ints, Window

OVERLOAD_GROWTH_FRACTION = 0.05
OVERLOAD_SHED_FRACTION = 0.05
BACKLOG_SHED_FRACTION = 0.01
VISIBLE_DEVIATIONS = 2.0
VISIBLE_REQUESTS = 4.0
FLAT_DEPARTURES = 1.1
BACKLOG_WAITING_RATIO = 5.0
BACKLOG_QUEUE_FRACTION = 0.05
_ORDINALS = ("first", "second", "third", "last")


class StabilityLabel(Enum):
    """Label of a run."""

    STABLE = "stable"
    BACKLOGGED = "backlogged"
    OVERLOADED = "overloaded"


class Stability(Struct, frozen=True):
    """Stability label and the numbers on which it is based."""

    label: StabilityLabel
    reason: str
    """One sentence without its full stop."""
    growth_fraction: float
    """Growth of the requests in the system; NaN if all requests arrived at one moment or there are none."""
    token_growth_fraction: float
    """Growth of the tokens in the system."""
    waiting_growth_fraction: float
    """Growth of the requests waiting for their first admission."""
    in_system_by_quarter: tuple[float, ...]
    """Mean number of requests in the system in each quarter of the arrivals' span; empty if there is no span."""
    waiting_by_quarter: tuple[float, ...]
    """Mean number of requests waiting for their first admission in each quarter."""
    shed_fraction: float
    mean_waiting: float
    """Mean over the window of the number of requests waiting for their first admission."""
    mean_in_service: float
    """Mean over the window of the number of requests in service (admitted and not ended)."""


class Lifetimes(Struct, frozen=True):
    """Times and sizes of requests, one entry per request of the whole run; times in seconds, NaN = never."""

    arrived_at: Floats
    admitted_at: Floats
    ended_at: Floats
    num_prompt_tokens: Ints
    num_output_tokens: Ints
    completed: Bools
    expired: Bools
    rejected: Bools


def assess(lifetimes: Lifetimes, window: Window) -> Stability:
    """Label the part of a run that lies in `window`."""
    inside = window.holds(lifetimes.arrived_at)
    ended_at = np.where(np.isnan(lifetimes.ended_at), np.inf, lifetimes.ended_at)
    admitted_at = np.minimum(np.where(np.isnan(lifetimes.admitted_at), np.inf, lifetimes.admitted_at), ended_at)
    tokens = (lifetimes.num_prompt_tokens + lifetimes.num_output_tokens).astype(np.float64)
    edges = _quarter_edges(lifetimes.arrived_at[inside], window)
    ones = np.ones(len(tokens))
    stocks = [
        _growth((lifetimes.arrived_at, left_at), sizes, edges, (noun, what))
        for what, left_at in (("waiting", admitted_at), ("in the system", ended_at))
        for noun, sizes in (("requests", ones), ("tokens", tokens))
    ]
    shed = _shed_fraction(lifetimes, inside)
    waiting = _mean_between(lifetimes.arrived_at, admitted_at, window.start_at, window.end_at)
    in_service = _mean_between(admitted_at, ended_at, window.start_at, window.end_at)
    label, reason = _verdict(stocks, shed, (waiting, in_service))
    if label is StabilityLabel.STABLE:
        burst = _burst(stocks[0], stocks[2], lifetimes.arrived_at, edges)
        label, reason = (label, reason) if burst is None else (StabilityLabel.BACKLOGGED, burst)
    growths = (stocks[2].fraction, stocks[3].fraction, stocks[0].fraction)
    return Stability(label, reason, *growths, stocks[2].quarters, stocks[0].quarters, shed, waiting, in_service)


class _Growth(Struct, frozen=True):
    """Growth of a stock from the second quarter to the last."""

    unit: str
    where: str
    quarters: tuple[float, ...]
    departures: tuple[float, ...]
    fraction: float
    rise: float
    noise: float

    @property
    def is_visible(self) -> bool:
        """True if the stock rose by more than chance explains, and not only because throughput rose."""
        if not self.quarters or self.rise <= self.noise:
            return False
        return self.where == "waiting" or self.departures[3] <= FLAT_DEPARTURES * self.departures[1]

    @property
    def is_overload(self) -> bool:
        goes_on = self.is_visible and self.quarters[3] - self.quarters[2] >= self.rise / 4
        return goes_on and self.fraction >= OVERLOAD_GROWTH_FRACTION

    @property
    def sentence(self) -> str:
        return (
            f"{self.unit} {self.where} rose from {self.quarters[1]:,.0f} to {self.quarters[3]:,.0f} while requests came"
        )


def _verdict(stocks: Sequence[_Growth], shed: float, shares: tuple[float, float]) -> tuple[StabilityLabel, str]:
    waiting, in_service = shares
    shed_reason = f"{shed:.1%} of the requests expired or were refused for lack of room"
    for stock in stocks:
        if stock.is_overload:
            behind = f"{stock.fraction:.0%} of the {stock.unit} that arrived stayed behind: {stock.sentence}"
            return StabilityLabel.OVERLOADED, behind
    if shed >= OVERLOAD_SHED_FRACTION:
        return StabilityLabel.OVERLOADED, shed_reason
    for stock in stocks:
        if stock.unit == "requests" and stock.is_visible:
            return StabilityLabel.BACKLOGGED, stock.sentence
    if shed >= BACKLOG_SHED_FRACTION:
        return StabilityLabel.BACKLOGGED, shed_reason
    if waiting > BACKLOG_WAITING_RATIO * in_service:
        return StabilityLabel.BACKLOGGED, (
            f"on average {waiting:.1f} requests waited for their first step and only {in_service:.1f} were in service"
        )
    return StabilityLabel.STABLE, "no queue kept growing, and waiting was no more than five times as long as service"


def _burst(waiting: _Growth, in_system: _Growth, arrived_at: Floats, edges: Floats) -> str | None:
    """Return a sentence on the worst quarter; None if its queue is not a backlog."""
    if not edges.size:
        return None
    worst = max(range(4), key=lambda i: waiting.quarters[i])
    arrivals = int(((arrived_at >= edges[worst]) & (arrived_at <= edges[worst + 1])).sum())
    queue, in_service = waiting.quarters[worst], in_system.quarters[worst] - waiting.quarters[worst]
    if queue <= max(VISIBLE_REQUESTS, VISIBLE_DEVIATIONS * math.sqrt(arrivals)):
        return None
    if queue <= BACKLOG_WAITING_RATIO * in_service and queue < BACKLOG_QUEUE_FRACTION * arrivals:
        return None
    return (
        f"in the {_ORDINALS[worst]} quarter of the arrivals {queue:,.0f} requests waited for their first step on average, "
        f"{in_service:,.0f} were in service and {arrivals:,} arrived"
    )


def _quarter_edges(arrived_at: Floats, window: Window) -> Floats:
    """Return the five edges of the quarters, in seconds; an empty array if there is no span of arrivals."""
    if not arrived_at.size or not float(arrived_at.max()) > window.start_at:
        return np.zeros(0)
    return np.linspace(window.start_at, float(arrived_at.max()), 5)


def _growth(stays: tuple[Floats, Floats], sizes: Floats, edges: Floats, names: tuple[str, str]) -> _Growth:
    """Return the growth of a stock. `stays` are the times at which each request entered and left the stock; `names` are
    the stock's unit (requests or tokens) and its place (waiting or in the system).
    """
    if not edges.size:
        return _Growth(*names, (), (), math.nan, 0.0, 0.0)
    came_at, left_at = stays
    pairs = [(float(start), float(end)) for start, end in itertools.pairwise(edges)]
    quarters = tuple(_mean_between(came_at, left_at, start, end, sizes) for start, end in pairs)
    departures = tuple(float(sizes[(left_at > start) & (left_at <= end)].sum()) for start, end in pairs)
    later = sizes[(came_at > edges[2]) & (came_at <= edges[4])]
    rise = quarters[3] - quarters[1]
    floor = VISIBLE_REQUESTS * float(later.mean()) if later.size else 0.0
    noise = max(floor, VISIBLE_DEVIATIONS * math.sqrt(float(np.square(later).sum())))
    fraction = rise / float(later.sum()) if later.sum() > 0 else math.nan
    return _Growth(*names, quarters, departures, fraction, rise, noise)


def _mean_between(
    begins_at: Floats, ends_at: Floats, start_at: float, end_at: float, sizes: Floats | None = None
) -> float:
    """Return the mean over time, from `start_at` to `end_at`, of the number of intervals [begins_at, ends_at) that
    cover a moment, or, if `sizes` is given, of the sum of their sizes; 0 if `end_at` is not after `start_at`.
    """
    if not end_at > start_at:
        return 0.0
    known = np.isfinite(begins_at)
    overlap = np.maximum(np.minimum(ends_at[known], end_at) - np.maximum(begins_at[known], start_at), 0.0)
    covered = overlap.sum() if sizes is None else np.dot(overlap, sizes[known])
    return float(covered) / (end_at - start_at)


def _shed_fraction(lifetimes: Lifetimes, inside: Bools) -> float:
    """Return the fraction of arrivals that expired, or that were rejected although they could run. A rejected request
    with a longer prompt than every completed request is not counted, since it may never fit.
    """
    total = int(inside.sum())
    if not total:
        return 0.0
    served = lifetimes.num_prompt_tokens[lifetimes.completed]
    largest_served = int(served.max()) if served.size else -1
    crowded_out = lifetimes.rejected & (lifetimes.num_prompt_tokens <= largest_served)
    return float((inside & (lifetimes.expired | crowded_out)).sum()) / total
