"""Latencies censored by the end of a run: how many there are, and lower bounds of means and quantiles.

If requests are unfinished when a run ends, only the latencies of the other requests are known. These are the shorter
latencies, so means and quantiles are too low. A missing latency is at least the request's age: the time from its
arrival to its own end or to the end of the run. With ages in place of missing values, the mean and the quantiles are
lower bounds of the mean and the quantiles over all requests. Rejected requests are left out, because they do not wait
in a queue.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vajra_py.metrics.definitions import QUANTILES, Bools, Floats, quantiles


def censored_section(values: Floats, least: Floats, missing: Bools) -> dict[str, Any] | None:
    """Return the number of missing values, and lower bounds of the statistics over all requests; None if no value is
    missing.

    Args:
        values: One entry per request; NaN = no value.
        least: Lower bound of each request's value.
        missing: Mask of the requests whose value is censored.
    """
    count = int(missing.sum())
    if not count:
        return None
    known = ~np.isnan(values)
    every = np.concatenate((values[known], least[missing]))
    bounds = {"mean": float(every.mean())}
    bounds |= dict(zip(QUANTILES, quantiles(every, tuple(QUANTILES.values())), strict=True))
    bounds["max"] = float(every.max())
    return {"num_missing": count, "num_known": int(known.sum()), "at_least": bounds}
