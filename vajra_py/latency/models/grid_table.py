"""Step time interpolated in a table of measured steps.

The table is a full grid over one to four features of the batch; between its points time is linear in each feature (multilinear
interpolation), so the table's own values are returned at its points.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from vajra_py.contract.latency import BatchFeatures
from vajra_py.errors import ConfigError, ExecutorError, Problem, did_you_mean
from vajra_py.latency.models.tabular import Columns, read_columns, read_npz

Beyond = Literal["refuse", "clamp", "extrapolate"]
TIME_COLUMN = "time_s"
MAX_FEATURES = 4


def _mean_decode_context(shape: BatchFeatures) -> float:
    return shape.decode_context_tokens / shape.num_decodes if shape.num_decodes else 0.0


def _field(name: str) -> Callable[[BatchFeatures], float]:
    return lambda shape: float(getattr(shape, name))


FEATURES: dict[str, Callable[[BatchFeatures], float]] = {
    **{name: _field(name) for name in BatchFeatures._fields},
    "num_tokens": _field("num_tokens"),
    "num_requests": _field("num_requests"),
    "mean_decode_context_tokens": _mean_decode_context,
}
"""What a column of a table may be called, and the value that a batch has there."""


class GridTableModel:
    """Interpolates step times measured on a grid of batch features; implements `LatencyModel`.

    `axes` are the features' values, ascending; `times_s` has one dimension for each. `beyond` says what happens outside of the grid.

    Raises:
        ConfigError: an unknown feature, an axis that does not ascend, times of another shape, or a negative time.
    """

    num_stages = 1

    def __init__(
        self,
        axes: dict[str, Sequence[float]],
        times_s: npt.NDArray[np.float64],
        *,
        beyond: Beyond = "refuse",
        source: str = "table",
    ) -> None:
        _check(axes, times_s, source)
        self.features = tuple(axes)
        self._axes = [list(map(float, axis)) for axis in axes.values()]
        self._read = [FEATURES[name] for name in axes]
        self._times = np.ascontiguousarray(times_s, dtype=np.float64)
        self._beyond = beyond
        self._source = source

    @classmethod
    def from_file(cls, path: str | Path, *, beyond: Beyond = "refuse") -> GridTableModel:
        """A table from a file: rows of features and `time_s` (CSV, JSON, Parquet), in any order, every combination once.

        An npz file holds one ascending array per feature, and `time_s` with one dimension for each in the order `features` of the axes
        in the file; or one-dimensional columns like the other formats.

        Raises:
            ConfigError: the file is broken or lacks `time_s`, or its rows are no full grid.
        """
        path = Path(path)
        if path.name.endswith(".npz") and path.is_file():
            arrays = read_npz(path)
            times = arrays.get(TIME_COLUMN)
            if times is not None and times.ndim > 1:
                axes = {name: axis.tolist() for name, axis in arrays.items() if name != TIME_COLUMN}
                return cls(axes, times, beyond=beyond, source=str(path))
        columns = read_columns(path)
        if TIME_COLUMN not in columns:
            raise ConfigError(Problem(str(path), f"has no column {TIME_COLUMN!r}", did_you_mean(TIME_COLUMN, columns)))
        axes, times = _grid(columns, str(path))
        return cls(axes, times, beyond=beyond, source=str(path))

    def stage_time_s(self, shape: BatchFeatures) -> float:
        """The same as `batch_time_s`: a table knows no stages."""
        return self.batch_time_s(shape)

    def batch_time_s(self, shape: BatchFeatures) -> float:
        """Seconds, interpolated.

        Raises:
            ExecutorError: the batch lies outside of the grid and the table was told to refuse that.
        """
        corners = [
            self._place(axis, read(shape), name)
            for axis, read, name in zip(self._axes, self._read, self.features, strict=True)
        ]
        time = 0.0
        for choice in product(*corners):
            weight = 1.0
            index = []
            for position, share in choice:
                weight *= share
                index.append(position)
            if weight:
                time += weight * self._times.item(*index)
        return max(0.0, time)

    def _place(self, axis: list[float], value: float, name: str) -> tuple[tuple[int, float], ...]:
        """The neighbours of `value` on an axis, each with its share."""
        if not axis[0] <= value <= axis[-1]:
            if self._beyond == "refuse":
                raise ExecutorError(
                    f"{self._source}: {name} {value:g} lies outside of the table ({axis[0]:g} to {axis[-1]:g}). "
                    "Measure further, or set beyond to clamp or extrapolate."
                )
            if self._beyond == "clamp":
                value = min(max(value, axis[0]), axis[-1])
        if len(axis) == 1:
            return ((0, 1.0),)
        upper = min(max(bisect_right(axis, value), 1), len(axis) - 1)
        share = (value - axis[upper - 1]) / (axis[upper] - axis[upper - 1])
        return ((upper - 1, 1.0 - share), (upper, share))


def _grid(columns: Columns, source: str) -> tuple[dict[str, Sequence[float]], npt.NDArray[np.float64]]:
    names = [name for name in columns if name != TIME_COLUMN]
    if not names or not len(columns[TIME_COLUMN]):
        raise ConfigError(Problem(source, "has no rows or no features", f"Allowed features: {', '.join(FEATURES)}"))
    axes: dict[str, Sequence[float]] = {}
    positions = []
    for name in names:
        values, position = np.unique(columns[name], return_inverse=True)
        axes[name] = values.tolist()
        positions.append(position)
    shape = tuple(len(axis) for axis in axes.values())
    flat = np.ravel_multi_index(tuple(positions), shape)
    counts = np.bincount(flat, minlength=int(np.prod(shape)))
    if (counts != 1).any():
        cell = int(np.flatnonzero(counts != 1)[0])
        where = zip(names, np.unravel_index(cell, shape), strict=True)
        at = ", ".join(f"{name} {axes[name][int(index)]:g}" for name, index in where)
        raise ConfigError(
            Problem(source, f"has {counts[cell]} rows at {at}", "A full grid has one row for every combination")
        )
    times = np.empty(shape)
    times.flat[flat] = columns[TIME_COLUMN]
    return axes, times


def _check(axes: dict[str, Sequence[float]], times_s: npt.NDArray[np.float64], source: str) -> None:
    problems = [
        Problem(source, f"has an unknown feature ({name!r})", did_you_mean(name, FEATURES))
        for name in axes
        if name not in FEATURES
    ]
    if not 1 <= len(axes) <= MAX_FEATURES:
        problems.append(Problem(source, f"has {len(axes)} features", f"Allowed: 1 to {MAX_FEATURES}"))
    for name, axis in axes.items():
        if np.ndim(axis) != 1 or not len(axis) or (np.diff(np.asarray(axis, dtype=np.float64)) <= 0).any():
            problems.append(
                Problem(f"{source} {name}", "does not ascend", "List every value once, from small to large")
            )
    if not problems and times_s.shape != tuple(len(axis) for axis in axes.values()):
        problems.append(
            Problem(
                f"{source} {TIME_COLUMN}",
                f"has the shape {times_s.shape}",
                "One dimension for each feature, in their order",
            )
        )
    if not (np.isfinite(times_s).all() and (times_s >= 0).all()):
        problems.append(Problem(f"{source} {TIME_COLUMN}", "has a negative or infinite time"))
    if problems:
        raise ConfigError(problems)
