"""Latencies censored by the end of a run: their number, and lower bounds.

A run that ends with requests in it has the latencies of those that were served in time, which are the short ones: its means and quantiles are too low. A request without a value has waited for its age, the
time from its arrival to its own end or to that of the run, so its value would have been at least that; with the ages in the place of the missing values, mean and quantiles are
lower bounds of those over all requests. Rejected requests have no place in a queue, and are left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vajra_py.metrics.definitions import QUANTILES, Bools, Floats, quantiles


def censored_section(values: Floats, least: Floats, missing: Bools) -> dict[str, Any] | None:
    """Return the requests whose value is missing, and lower bounds over all; None when none is missing.

    `values`: NaN = none; `least`: what a missing value would have been at least; `missing`: those that would have had one.
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
