"""The time that rates are taken over, with the drain after the last arrival left out.

A run ends when its last request does, long after the last one came. Requests over all that time is a rate that falls with the length of one answer; requests that ended by the last arrival,
over the span of the arrivals, leaves out those that the system was serving at its usual pace when the arrivals stopped, and counts the time in which an empty system filled. Rates here are
about all completed requests, over the time in which the system delivered them:

* the *span of the arrivals*, first to last, where the run is stable: nothing stayed behind, so what came in that time was delivered at the rate at which it came;
* the *spread of the completions*, where it is longer, in a run that is not stable: the time from the 10th to the 90th percentile of the completions, scaled to all of them. Neither the
  start, in which the system fills, nor the last tenth, which drains, moves it; under overload it is the pace at which the system works. Where the first tenth took more than half of that
  time (a few waves of requests, or a single one), it counts from the first admission on.

Both are scaled: n requests have n - 1 intervals between them, and those that come together at the first moment (the clients of a closed loop) begin the first one. A stable run in which everything is
completed has a throughput that equals its offered load. A stable run
that is nearly all drain (less than a quarter of it was completed by the last arrival) shows nothing of what the system can keep up with, and is judged by its completions too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vajra_py.metrics.definitions import Floats, Window, nearest_rank

LOW, HIGH = 0.1, 0.9
"""Fractions of the completions between which they give the pace."""
_FEW_WAVES = 0.5
_MOSTLY_DRAIN = 0.25


@dataclass(frozen=True, slots=True)
class RateTime:
    """Time spans over which a run's rates are computed, seconds; None where undefined."""

    duration_s: float | None
    """Amounts of completed requests over this are the rates; None for fewer than two completed requests."""
    over: str
    """`arrivals` or `completions`."""
    arrivals_s: float
    """Time from the first arrival in the window to the last."""
    completions_s: float | None
    """The spread of the completions."""
    last_arrival_at: float | None
    drain_s: float
    """Time from the last arrival to the end of the window."""
    num_completed_in_drain: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def rate_time(
    arrived_at: Floats, admitted_at: Floats, completed_at: Floats, window: Window, *, is_stable: bool
) -> RateTime:
    """Return the time of the requests that arrived in the window: one entry each, `completed_at` NaN of one that was
    not completed.
    """
    if not arrived_at.size:
        return RateTime(None, "arrivals", 0.0, None, None, window.duration_s, 0)
    last_at = float(arrived_at.max())
    drain_s = max(0.0, window.end_at - last_at)
    done = ~np.isnan(completed_at)
    left = np.sort(completed_at[done])
    late = int((left > last_at).sum())
    span_s, spread_s = 0.0, 0.0
    if len(left) > 1:
        span_s = _span(arrived_at[done])
        spread_s = _spread(left, float(np.fmin(admitted_at, completed_at)[done].min()))
    keeps_up = is_stable and len(left) - late >= _MOSTLY_DRAIN * len(left)
    duration_s = span_s if keeps_up else max(span_s, spread_s)
    return RateTime(
        duration_s=duration_s if duration_s > 0 and math.isfinite(duration_s) else None,
        over="arrivals" if duration_s == span_s else "completions",
        arrivals_s=last_at - float(arrived_at.min()),
        completions_s=spread_s if spread_s > 0 else None,
        last_arrival_at=last_at,
        drain_s=drain_s,
        num_completed_in_drain=late,
    )


def steady_window(window: Window, rates: Mapping[str, Any]) -> Window:
    """Return the part of the window in which requests arrived, for metrics measured over time (utilisation, power); the
    whole window where all arrived at one moment.
    """
    last_at = rates["last_arrival_at"]
    if last_at is None or not window.start_at < last_at < window.end_at:
        return window
    return Window(window.start_at, float(last_at))


def arrival_rate(arrived_at: Floats) -> float | None:
    """Arrivals per second between the first and the last, without those at the first moment, at which the time begins; None where all come at one."""
    later = int((arrived_at > arrived_at.min()).sum()) if arrived_at.size else 0
    return later / float(np.ptp(arrived_at)) if later else None


def _span(arrived_at: Floats) -> float:
    """Return the time in which requests come, as if the first one had an interval before it; 0 where all come at one
    moment.
    """
    rate = arrival_rate(arrived_at)
    return len(arrived_at) / rate if rate else 0.0


def _spread(left: Floats, since: float) -> float:
    """Return the time that ordered completions took, by those in the middle of them and at most all of it; `since` is
    when the first of these requests was admitted.
    """
    count = len(left)
    low, high = nearest_rank(count, LOW), nearest_rank(count, HIGH)
    ramp_s, middle_s = float(left[low]) - since, float(left[high] - left[low])
    if ramp_s > _FEW_WAVES * middle_s:
        return (ramp_s + middle_s) * count / int(np.searchsorted(left, left[high], side="right"))
    return min(middle_s * count / (high - low), float(left[-1]) - since)
