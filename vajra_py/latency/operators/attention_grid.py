"""Interpolate measured attention times over chunk size, chunk's context, number of decodes and decodes' context.

Engines launch different kernels for decodes only, for chunks only, and for both in one call, so these cases have
separate tables. Inside the measured grid, times are linear in each axis. Holes of the grid are filled once, when the
tables are built (`filled`). Above the grid, times are extrapolated from the last two points of an axis, up to
`BundleOptions.reach`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Grid = npt.NDArray[np.float64]
Factor = Callable[[tuple[Array, ...]], Grid | None]
"""Function that takes the axes of a grid and returns, for each point of the grid, the factor by which its time is
multiplied; None if all factors are 1.
"""


class DecodeRow:
    """Times of one attention call with a fixed number of decodes and no chunk, by the decodes' mean context.

    Times are linear between the knots and beyond the last one.
    """

    __slots__ = ("knots", "slopes", "values")

    def __init__(self, knots: Array, values: Array) -> None:
        self.knots: list[float] = knots.tolist()
        self.values: list[float] = values.tolist()
        self.slopes: list[float] = (np.diff(values) / np.diff(knots)).tolist()

    def at(self, context: float) -> float:
        """Return the microseconds at one mean context; below the first knot, the time is that of the first knot."""
        if context <= self.knots[0]:
            return self.values[0]
        index = min(bisect_right(self.knots, context), len(self.slopes)) - 1
        return self.values[index] + self.slopes[index] * (context - self.knots[index])

    def at_each(self, contexts: Array) -> Array:
        """Return the microseconds at each mean context, bit for bit equal to the results of `at`."""
        knots, values, slopes = np.array(self.knots), np.array(self.values), np.array(self.slopes)
        clipped = np.maximum(contexts, knots[0])
        indices = np.minimum(np.searchsorted(knots, clipped, side="right"), len(slopes)) - 1
        found: Array = values[indices] + slopes[indices] * (clipped - knots[indices])
        return found


class MixedSlice:
    """Times of one attention call with a chunk and a fixed number of decodes, by (chunk, chunk's context, decodes' mean
    context).
    """

    __slots__ = ("_chunks", "_contexts", "_decode_contexts", "_stride_chunk", "_stride_context", "_times")

    def __init__(self, chunks: Array, contexts: Array, decode_contexts: Array, times: Grid) -> None:
        self._chunks, self._contexts = chunks.tolist(), contexts.tolist()
        self._decode_contexts = decode_contexts.tolist()
        self._stride_context = len(self._decode_contexts)
        self._stride_chunk = self._stride_context * len(self._contexts)
        self._times = array("d")
        self._times.frombytes(np.ascontiguousarray(times, dtype=np.float64).tobytes())

    def at(self, chunk: float, context: float, decode_context: float) -> float:
        """Return the microseconds of one call."""
        axis = self._chunks
        i = bisect_right(axis, chunk, 1, len(axis) - 1) - 1
        x = (chunk - axis[i]) / (axis[i + 1] - axis[i])
        axis = self._contexts
        j = bisect_right(axis, context, 1, len(axis) - 1) - 1
        y = (context - axis[j]) / (axis[j + 1] - axis[j])
        axis = self._decode_contexts
        k = bisect_right(axis, decode_context, 1, len(axis) - 1) - 1
        z = (decode_context - axis[k]) / (axis[k + 1] - axis[k])
        # Below the grid's smallest chunk and smallest decode context, times are constant.
        x, z = (x if x > 0.0 else 0.0), (z if z > 0.0 else 0.0)
        times, one, two = self._times, self._stride_chunk, self._stride_context
        at = i * one + j * two + k
        near = _blend(times, at, two, y, z)
        return near + x * (_blend(times, at + one, two, y, z) - near)


def _blend(times: array[float], at: int, stride: int, y: float, z: float) -> float:
    low = times[at]
    low += z * (times[at + 1] - low)
    at += stride
    high = times[at]
    high += z * (times[at + 1] - high)
    return low + y * (high - low)


def _equal(_axes: tuple[Array, ...]) -> Grid | None:
    return None


class AttentionGrid:
    """Attention times of one layer in microseconds, from rows of (chunk, context, decodes, decode context, time).

    The rows were measured with decodes of equal context. For unequal contexts, `decode_factor` (given the axes decodes
    and context) and `mixed_factor` (given decodes, chunk, chunk's context, decodes' context) return, for each point of
    the grid, the factor by which its time is multiplied.
    """

    def __init__(self, rows: Array, decode_factor: Factor = _equal, mixed_factor: Factor = _equal) -> None:
        chunk, _, decodes, _ = rows[:, :4].T
        alone = rows[(chunk == 0) & (decodes > 0)]
        self.decode_counts, self.decode_contexts, decode = _grid(alone[:, 2], alone[:, 3], alone[:, 4])
        axes = (self.decode_counts, self.decode_contexts)
        self._decode = _times(filled(decode, axes), decode_factor(axes))
        first = rows[(chunk > 0) & (decodes == 0)]
        chunks, contexts, prefill = _grid(first[:, 0], first[:, 1], first[:, 4])
        self._prefill = MixedSlice(
            chunks, contexts, np.array([0.0, 1.0]), np.repeat(filled(prefill, (chunks, contexts))[..., None], 2, axis=2)
        )
        self._mixed_axes, mixed = _mixed_grid(rows[(chunk > 0) & (decodes > 0)])
        self._mixed = _times(mixed, mixed_factor(self._mixed_axes))
        self.largest: Mapping[str, float] = {
            "prefill_chunk": float(chunks[-1]),
            "kv_prefill": float(contexts[-1]),
            "n_decode": float(self.decode_counts[-1]),
            "kv_decode": float(self.decode_contexts[-1]),
        }
        self._rows: dict[int, DecodeRow] = {}
        self._slices: dict[int, MixedSlice] = {}

    def decodes(self, count: int) -> DecodeRow:
        """Return the times of one attention call with `count` decodes and no chunk, by their mean context."""
        row = self._rows.get(count)
        if row is None:
            values = _along_first(self.decode_counts, self._decode, float(count))
            row = self._rows[count] = DecodeRow(self.decode_contexts, values)
        return row

    def prefill_us(self, chunk: float, context: float) -> float:
        """Return the microseconds of one attention call with a chunk and no decodes."""
        return self._prefill.at(chunk, context, 0.0)

    def mixed(self, count: int) -> MixedSlice:
        """Return the times of one attention call with a chunk and `count` decodes."""
        found = self._slices.get(count)
        if found is None:
            counts, chunks, contexts, decode_contexts = self._mixed_axes
            values = _along_first(counts, self._mixed, float(count))
            found = self._slices[count] = MixedSlice(chunks, contexts, decode_contexts, values)
        return found


def _times(grid: Grid, factors: Grid | None) -> Grid:
    return grid if factors is None else grid * factors


def _grid(first: Array, second: Array, times: Array) -> tuple[Array, Array, Grid]:
    rows, columns = np.unique(first), np.unique(second)
    grid = np.full((len(rows), len(columns)), np.nan)
    grid[np.searchsorted(rows, first), np.searchsorted(columns, second)] = times
    return rows, columns, grid


def _mixed_grid(rows: Array) -> tuple[tuple[Array, Array, Array, Array], Grid]:
    """Return the axes, and the times by (decodes, chunk, context, decode context)."""
    axes = (np.unique(rows[:, 2]), np.unique(rows[:, 0]), np.unique(rows[:, 1]), np.unique(rows[:, 3]))
    grid = np.full(tuple(map(len, axes)), np.nan)
    places = tuple(np.searchsorted(axis, rows[:, column]) for axis, column in zip(axes, (2, 0, 1, 3), strict=True))
    grid[places] = rows[:, 4]
    return axes, filled(grid, axes)


def filled(grid: Grid, axes: tuple[Array, ...]) -> Grid:
    """Return the grid with its holes filled.

    First, holes between known times are interpolated along one axis after another, the last axis first. Then, in the
    same order, holes above known times are extrapolated linearly, and holes below them take the first known time. No
    filled time is below the smallest measured time, which also fills the holes that are left.
    """
    result = grid.copy()
    for beyond in (False, True):
        for axis in reversed(range(result.ndim)):
            if not np.isnan(result).any():
                break
            moved = np.moveaxis(result, axis, -1)
            lines = moved.reshape(-1, moved.shape[-1])
            known = np.isfinite(lines)
            # Lines with holes at the same positions are filled together.
            patterns, pattern_of = np.unique(known, axis=0, return_inverse=True)
            for number, pattern in enumerate(patterns):
                if 2 <= pattern.sum() < len(pattern):
                    _fill_lines(lines, pattern_of.reshape(-1) == number, pattern, axes[axis], beyond=beyond)
            moved[...] = lines.reshape(moved.shape)
    smallest = float(np.nanmin(grid))
    cleaned: Grid = np.maximum(np.nan_to_num(result, nan=smallest), smallest)
    return cleaned


def _fill_lines(
    lines: Array, rows: npt.NDArray[np.bool_], known: npt.NDArray[np.bool_], knots: Array, *, beyond: bool
) -> None:
    """Fill the holes in some lines in place; all of these lines have holes at the same positions.

    With `beyond`, holes below and above the known times are filled too.
    """
    from scipy.interpolate import interp1d

    x = knots[known]
    holes = ~known if beyond else ~known & (knots > x[0]) & (knots < x[-1])
    line = interp1d(x, lines[np.ix_(rows, known)], axis=1, fill_value="extrapolate", assume_sorted=True)
    lines[np.ix_(rows, holes)] = line(np.maximum(knots[holes], x[0]))


def _along_first(knots: Array, grid: Grid, at: float) -> Grid:
    """Return the grid at one value of its first axis, extrapolated above the last knot and constant below the first."""
    from scipy.interpolate import interp1d

    if len(knots) == 1:
        lowest: Grid = grid[0]
        return lowest
    line = interp1d(knots, grid, axis=0, fill_value="extrapolate", copy=False, assume_sorted=True)
    return np.asarray(line(max(at, knots[0])), dtype=np.float64)
