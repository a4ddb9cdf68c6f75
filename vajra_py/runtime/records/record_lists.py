"""Columns of lists in record files: the concatenated values, and each record's number of values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def reordered(values: NDArray[Any], counts: NDArray[Any], order: NDArray[np.int64]) -> NDArray[Any]:
    """Return the values (rows, if two-dimensional) with the records reordered; `counts` has the number of values of
    each record.
    """
    if not len(values):
        return values
    stops = np.cumsum(counts, dtype=np.int64)
    starts, counts = (stops - counts)[order], counts[order]
    new_starts = np.cumsum(counts, dtype=np.int64) - counts
    places = np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(starts - new_starts, counts)
    taken: NDArray[Any] = values.take(places, axis=0)
    return taken
