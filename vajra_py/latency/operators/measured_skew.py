"""Factors by which unequal decode contexts lengthen attention, from batches with unequal contexts in the profile.

The ratio of the times with unequal and with equal contexts is not a constant of the GPU. A chunk beside the decodes
lowers the ratio, since the chunk's own attention is not affected; a larger chunk or a longer context of the chunk
lowers it more. A longer mean context of the decodes raises the ratio. Measured ratios are therefore interpolated over
chunk size, context of the chunk, mean context of the decodes and number of decodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vajra_py.latency.operators.bundle_files import SkewSample

Array = npt.NDArray[np.float64]

WINDOW = 0.2
"""A measured batch is used if the variation of its contexts differs from the requested variation by at most this."""
_PLACES = {name: index for index, name in enumerate(SkewSample._fields)}
DECODES_ALONE = ("num_decodes", "mean_context")
BESIDE_CHUNKS = ("num_decodes", "prefill_chunk", "prefill_context", "mean_context")


def skew_factors(samples: Array, variation: float, axes: Sequence[Array], *, mixed: bool) -> Array | None:
    """Return the factor at every point of a grid of attention times.

    Returns None if the variation is 0 or no batches with about this variation were measured.

    `axes` are those of `DECODES_ALONE` or, for attention of chunks and decodes together (`mixed`), of `BESIDE_CHUNKS`.
    A factor is the median of the measured ratios in a cell; cells are powers of two apart, as in profiles. Between
    cells, factors are linear in the logarithms of sizes; beyond the cells, factors are constant. Factors are at least
    1, since unequal contexts cannot be read faster than equal ones with the same sum. One decode has the factor 1.
    """
    near = (samples[:, _PLACES["prefill_chunk"]] > 0) == mixed
    decodes = samples[:, _PLACES["num_decodes"]]
    # A small sample of contexts varies less around its own mean than the distribution does.
    expected = variation * np.sqrt((decodes - 1.0) / decodes)
    near &= np.abs(samples[:, _PLACES["variation"]] - expected) <= WINDOW
    if variation <= 0 or not near.any():
        return None
    names = BESIDE_CHUNKS if mixed else DECODES_ALONE
    cells = np.rint(_log2(samples[near][:, [_PLACES[name] for name in names]]))
    knots, table = _medians(cells, samples[near][:, _PLACES["ratio"]])
    places = [np.clip(_log2(axis), knot[0], knot[-1]) for axis, knot in zip(axes, knots, strict=True)]
    found = np.maximum(_interpolated(knots, table, places), 1.0)
    found[np.asarray(axes[0]) <= 1] = 1.0
    return found


def _log2(sizes: Array) -> Array:
    """Return base-2 logarithms; 0 counts as 0.5, so that the distance from 0 to 1 equals the distance from 1 to 2."""
    found: Array = np.log2(np.maximum(sizes, 0.5))
    return found


def _medians(cells: Array, ratios: Array) -> tuple[list[Array], Array]:
    """Return (distinct values of each coordinate, median ratios on the grid of these values); a hole of the grid gets
    the median of the nearest cell.
    """
    from scipy.interpolate import NearestNDInterpolator

    known, which = np.unique(cells, axis=0, return_inverse=True)
    order = np.argsort(which.ravel(), kind="stable")
    parts = np.split(ratios[order], np.cumsum(np.bincount(which.ravel()))[:-1])
    medians = np.array([np.median(part) for part in parts])
    knots = [np.unique(column) for column in known.T]
    if len(known) == 1:
        return knots, medians.reshape([1] * len(knots))
    grid = np.stack(np.meshgrid(*knots, indexing="ij"), axis=-1)
    return knots, np.asarray(NearestNDInterpolator(known, medians)(grid), dtype=np.float64)


def _interpolated(knots: Sequence[Array], table: Array, places: Sequence[Array]) -> Array:
    """Return the table at every combination of `places`, linear along each axis."""
    from scipy.interpolate import interp1d

    found = table
    for axis, (knot, at) in enumerate(zip(knots, places, strict=True)):
        if len(knot) > 1:
            found = interp1d(knot, found, axis=axis, copy=False, assume_sorted=True)(at)
        else:
            found = np.repeat(found, len(at), axis=axis)
    return np.array(found, dtype=np.float64)
