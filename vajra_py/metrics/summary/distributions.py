"""Distributions and counts by reason in summaries."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from vajra_py.metrics.definitions import QUANTILES, Floats, quantiles

MAX_REASONS = 100
"""Maximum number of listed reasons, the most frequent first; the rest are counted together."""
OTHER_REASONS = "(others)"


def distribution(values: Floats) -> dict[str, Any]:
    """Return count, mean, quantiles and maximum of the values that are not NaN. Without such values, the count is 0,
    the quantiles are NaN, and the rest is None.
    """
    known = values[~np.isnan(values)]
    section: dict[str, Any] = {"count": int(known.size), "mean": float(known.mean()) if known.size else None}
    section |= dict(zip(QUANTILES, quantiles(known, tuple(QUANTILES.values())), strict=True))
    section["max"] = float(known.max()) if known.size else None
    return section


def by_reason(reasons: Counter[str]) -> dict[str, int]:
    """Return the count of each reason, the most frequent first, with those beyond `MAX_REASONS` summed as
    `OTHER_REASONS`.
    """
    ordered = sorted(reasons.items(), key=lambda entry: (-entry[1], entry[0]))
    listed = dict(ordered[:MAX_REASONS])
    if len(ordered) > MAX_REASONS:
        listed[OTHER_REASONS] = sum(count for _, count in ordered[MAX_REASONS:])
    return listed
