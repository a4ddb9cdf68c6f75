"""Columns of lists in record files: the values one after the other, and each record's number of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def reordered(values: NDArray[Any], counts: NDArray[Any], order: NDArray[np.int64]) -> NDArray[Any]:
    """Return values (rows, if two-dimensional), of which each record has so many, with the records in this order."""
    if not len(values):
        return values
    stops = np.cumsum(counts, dtype=np.int64)
    starts, counts = (stops - counts)[order], counts[order]
    new_starts = np.cumsum(counts, dtype=np.int64) - counts
    places = np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(starts - new_starts, counts)
    taken: NDArray[Any] = values.take(places, axis=0)
    return taken
