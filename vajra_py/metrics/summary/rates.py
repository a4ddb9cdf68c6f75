"""The time over which rates are computed, without the drain after the last arrival.

A run ends when its last request ends, long after the last arrival. Dividing all completed requests by that whole time
gives a rate that depends on the length of a single answer. Counting only requests that ended by the last arrival leaves
out those in service at that moment, but includes the time in which the empty system filled. Rates here therefore count
all completed requests, divided by the time in which the system delivered them:

* the *span of the arrivals*, first to last, if the run is stable: no backlog remained, so requests were delivered at
  the rate at which they arrived;
* the *spread of the completions*, if it is longer, in a run that is not stable: the time from the 10th to the 90th
  percentile of the completions, scaled to all of them. It does not depend on the start, when the system fills, or on
  the last tenth, when it drains; under overload it gives the system's capacity. If the first tenth took more than half
  as long as the time between these percentiles (one or a few waves of requests), the spread starts at the first
  admission.

Both times are scaled to all n requests, since there are only n - 1 intervals between n requests. The span of the
arrivals is multiplied by n and divided by the number of requests that arrive after the first moment, since several
requests may arrive together at that moment (the clients of a closed loop). The throughput of a stable run in which all
requests are completed therefore equals its offered load.

A stable run that consists mostly of drain (less than a quarter of its completed requests were completed by the last
arrival) does not show a sustainable rate; its rates are computed like those of a run that is not stable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import Struct, structs

from vajra_py.metrics.definitions import Floats, Window, nearest_rank

LOW, HIGH = 0.1, 0.9
"""Fractions of the completions that bound the spread."""
_FEW_WAVES = 0.5
_MOSTLY_DRAIN = 0.25


class RateTime(Struct, frozen=True):
    """Time spans over which a run's rates are computed, in seconds; None where undefined."""

    duration_s: float | None
    """Denominator of the rates; None if undefined, such as for fewer than two completed requests."""
    over: str
    """`arrivals` if `duration_s` is the span of the arrivals, `completions` if it is the spread of the completions."""
    arrivals_s: float
    """Time from the first to the last arrival in the window."""
    completions_s: float | None
    """Spread of the completions."""
    last_arrival_at: float | None
    drain_s: float
    """Time from the last arrival to the end of the window."""
    num_completed_in_drain: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return structs.asdict(self)


def rate_time(
    arrived_at: Floats, admitted_at: Floats, completed_at: Floats, window: Window, *, is_stable: bool
) -> RateTime:
    """Return the times over which the rates of the requests that arrived in the window are computed.

    The arrays have one entry per request, in seconds; `completed_at` is NaN for a request that was not completed.
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
    """Return the part of the window in which requests arrived, up to the last arrival, for metrics measured over time
    (utilisation, power); the whole window if no request arrived after its start.
    """
    last_at = rates["last_arrival_at"]
    if last_at is None or not window.start_at < last_at < window.end_at:
        return window
    return Window(window.start_at, float(last_at))


def arrival_rate(arrived_at: Floats) -> float | None:
    """Return the arrivals per second between the first and the last arrival. Requests that arrive at the first moment
    are not counted, since the time span starts with them. None if all requests arrive at one moment.
    """
    later = int((arrived_at > arrived_at.min()).sum()) if arrived_at.size else 0
    return later / float(np.ptp(arrived_at)) if later else None


def _span(arrived_at: Floats) -> float:
    """Return the span of the arrivals in seconds, scaled to all of them: their number divided by `arrival_rate`; 0 if
    all arrive at one moment.
    """
    rate = arrival_rate(arrived_at)
    return len(arrived_at) / rate if rate else 0.0


def _spread(left: Floats, since: float) -> float:
    """Return the spread, in seconds, of the ordered completion times `left`: the time that the middle completions took,
    scaled to all of them (see the module's docstring). `since` is the time of the first admission of these requests.
    """
    count = len(left)
    low, high = nearest_rank(count, LOW), nearest_rank(count, HIGH)
    ramp_s, middle_s = float(left[low]) - since, float(left[high] - left[low])
    if ramp_s > _FEW_WAVES * middle_s:
        return (ramp_s + middle_s) * count / int(np.searchsorted(left, left[high], side="right"))
    return min(middle_s * count / (high - low), float(left[-1]) - since)
