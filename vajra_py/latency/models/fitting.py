"""Fit curves to measured step times and report their error on held-out steps.

The fit is a sum of curves and of terms with a constant time per unit. All are non-decreasing, except the curve over the
number of tokens at its first few knots: matrix products with two rows may take longer than with four, since libraries
use different algorithms. The fit is found by least squares with non-negative coefficients: levels at those first knots,
slopes between the other knots, and times per unit.
Errors are relative, so that short steps count as much as long ones; disturbed measurements get less weight (Huber's
weights).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vajra_py.contract.latency import BatchFeatures
from vajra_py.errors import ConfigError, Problem
from vajra_py.latency.models.packed_times import EXACT
from vajra_py.latency.models.profiled import COEFFICIENTS, CURVES, Curve, Profile, StepFit
from vajra_py.latency.models.tabular import Columns, read_columns

Floats = npt.NDArray[np.float64]

_KNOTS = {"num_tokens": (8, 2), "decode_context_tokens": (1, 4), "prefill_attention_pairs": (1, 4)}
"""For each curve, the two numbers (singles, factor) that determine its knots: a knot lies at every integer up to
`singles`, and from there on each knot lies at `factor` times the knot before. Matrix products of one, two or a few rows
use different algorithms, while the time of attention grows evenly.
"""
_FREE = "num_tokens"
"""Name of the only curve that may decrease at its first knots."""
_HUBER = 0.15
"""Relative error above which a measurement gets less weight."""
_ROUNDS = 8
_HELD_OUT_PART = 5
STEP_COLUMNS = ("num_decodes", "decode_context_tokens", "num_prefills", "prefill_tokens", "prefill_context_tokens")
OPTIONAL_COLUMNS = ("prefill_attention_pairs", "swap_bytes")
TIME_COLUMN = "time_s"


@dataclass(frozen=True, slots=True)
class Measured:
    """Features of a measured step and its duration in seconds."""

    features: BatchFeatures
    time_s: float

    @property
    def kind(self) -> str:
        """Kind of the step: "decode", "prefill" or "mixed"."""
        if not self.features.num_prefills:
            return "decode"
        return "mixed" if self.features.num_decodes else "prefill"


def fit_steps(measured: Sequence[Measured]) -> StepFit:
    """Return the best fit to these steps. Raises `ValueError` if there are none."""
    if not measured:
        raise ValueError("fit: there are no measurements")
    features = {
        name: np.array([float(getattr(one.features, name)) for one in measured]) for name in (*CURVES, *COEFFICIENTS)
    }
    knots = {name: _knots(features[name].tolist(), *_KNOTS[name]) for name in CURVES}
    parts = {name: _functions(name, knots[name], features[name]) for name in CURVES}
    columns = [*chain.from_iterable(parts.values()), *(features[name] for name in COEFFICIENTS)]
    solution = _robust(np.stack(columns, axis=1), np.array([one.time_s for one in measured]))
    base, curves = 0.0, {}
    for name, part in parts.items():
        shares, solution = solution[: len(part)], solution[len(part) :]
        functions = _functions(name, knots[name], np.array(knots[name]))
        values = np.sum([share * one for share, one in zip(shares, functions, strict=True)], axis=0)
        # Curves begin at 0, except the one that may decrease: its lowest value becomes part of every step's base time.
        lowest = float(np.min(values))
        base += lowest
        curves[name] = Curve(tuple(knots[name]), tuple((values - lowest).tolist()))
    return StepFit(base, curves, dict(zip(COEFFICIENTS, solution.tolist(), strict=True)))


def held_out_errors(measured: Sequence[Measured], order: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return the relative errors of a fit on held-out shapes: the first fifth of `order`; the fit uses the other
    shapes.

    Errors are given by kind of step and for all steps. Each entry has the number of steps, the median and 90th
    percentile of the absolute error, and the mean of the signed error.
    """
    num_held_out = max(1, len(measured) // _HELD_OUT_PART)
    held_out = [measured[index] for index in order[:num_held_out]]
    fit = fit_steps([measured[index] for index in order[num_held_out:]] or held_out)
    return errors_of(fit.time_s, held_out)


def is_steps_table(path: str) -> bool:
    """Return True for the name of a table of measured steps, False for the name of a profile."""
    return path.endswith((".csv", ".csv.gz", ".npz", ".parquet"))


def profile_of_steps(path: str) -> Profile:
    """Fit a profile to a table with one row per measured step.

    Its columns are `STEP_COLUMNS`, `TIME_COLUMN`, and any of `OPTIONAL_COLUMNS`. Without `prefill_attention_pairs`, the
    chunks of a step are assumed to be equal.

    Raises:
        ConfigError: the file is missing or broken, lacks a column, has no rows, or has a value that is impossible for a
            step.
    """
    columns = read_columns(Path(path), (*STEP_COLUMNS, TIME_COLUMN), OPTIONAL_COLUMNS)
    times_s = columns.pop(TIME_COLUMN)
    if not len(times_s):
        raise ConfigError(Problem(path, "has no rows", "One row for each measured step"))
    problems = _count_problems(path, columns)
    if (times_s <= 0).any():
        problems.append(Problem(f"{path} {TIME_COLUMN}", "has a time that is not positive", "Seconds of the step"))
    if problems:
        raise ConfigError(problems)
    if "prefill_attention_pairs" not in columns:
        tokens, chunks = columns["prefill_tokens"], np.maximum(columns["num_prefills"], 1.0)
        mean_pairs = tokens / chunks * (columns["prefill_context_tokens"] / chunks + (tokens / chunks + 1.0) / 2.0)
        columns["prefill_attention_pairs"] = np.rint(chunks * mean_pairs)
        if too_many := _count_problems(path, {"prefill_attention_pairs": columns["prefill_attention_pairs"]}):
            raise ConfigError(too_many)
    rows = zip(*(column.astype(np.int64).tolist() for column in columns.values()), strict=True)
    shapes = [BatchFeatures(**dict(zip(columns, row, strict=True))) for row in rows]
    measured = [Measured(features, time_s) for features, time_s in zip(shapes, times_s.tolist(), strict=True)]
    order = [place for first in range(_HELD_OUT_PART) for place in range(first, len(measured), _HELD_OUT_PART)]
    facts = {"source": f"a fit to the measured steps of {Path(path).name}"}
    return Profile(fit_steps(measured), facts, held_out_errors(measured, order), len(measured))


def _count_problems(path: str, columns: Columns) -> list[Problem]:
    problems = []
    for name, column in columns.items():
        bad = np.flatnonzero((column != np.floor(column)) | (column < 0) | (column >= EXACT))
        if bad.size:
            what = "has a negative number" if column[bad[0]] < 0 else "is not a count"
            allowed = f"Allowed: whole numbers from 0 to {EXACT - 1}"
            problems.append(Problem(f"{path} {name}[{bad[0]}]", f"{what} ({column[bad[0]]:g})", allowed))
    return problems


def errors_of(predict: Callable[[BatchFeatures], float], measured: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """Return the relative errors of predictions, in the form of `held_out_errors`."""
    found: dict[str, dict[str, float]] = {}
    for kind in ("all", "decode", "prefill", "mixed"):
        chosen = [one for one in measured if kind in ("all", one.kind)]
        if chosen:
            errors = np.array([predict(one.features) / one.time_s - 1.0 for one in chosen])
            size = np.abs(errors)
            found[kind] = {
                "num_shapes": float(len(chosen)),
                "p50": float(np.quantile(size, 0.5)),
                "p90": float(np.quantile(size, 0.9)),
                "mean": float(errors.mean()),
            }
    return found


def _knots(values: Sequence[float], singles: int, factor: int) -> list[float]:
    """Return the knots: 0, the largest value and, between them, the numbers that `_KNOTS` describes. A knot is left out
    if the segment that ends there would contain no value.
    """
    largest = max(values)
    knots, top = [0.0], 1
    while top < largest:
        if any(knots[-1] < value <= top for value in values):
            knots.append(float(top))
        top = top + 1 if top < singles else top * factor
    return [*knots, float(max(1, largest))]


def _functions(name: str, knots: list[float], values: Floats) -> list[Floats]:
    """Return the functions whose weighted sum is the curve, evaluated at `values`.

    The functions are segments and, for the curve that may decrease, a level at each of its first knots. That curve is
    constant before the first of these knots, linear between them, and non-decreasing after the last of them.
    """
    if name != _FREE:
        return _segments(values, knots)
    levels = [knot for knot in knots[1:-1] if knot <= _KNOTS[name][0]] or knots[:1]
    hats = [np.interp(values, levels, one) for one in np.eye(len(levels))]
    return [*hats, *_segments(values, knots[knots.index(levels[-1]) :])]


def _segments(values: Floats, knots: Sequence[float]) -> list[Floats]:
    """Return, for each segment, how far each value reaches into it; the last segment has no end."""
    columns = []
    for index, (low, high) in enumerate(pairwise(knots)):
        top = np.inf if index == len(knots) - 2 else high
        columns.append(np.clip(values, low, top) - low)
    return columns


def _robust(matrix: Floats, times: Floats) -> Floats:
    """Return coefficients >= 0 such that matrix @ x approximates the times in relative terms; outliers get less weight.

    Errors are relative to the prediction. If they were relative to the measurement, a step measured too short would
    have more influence than one measured too long.
    """
    from scipy.optimize import nnls  # takes long to import, and most models are not fitted

    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0.0] = 1.0
    scaled = matrix / scale
    weights = 1.0 / times
    solution = np.zeros(matrix.shape[1])
    for _ in range(_ROUNDS):
        solution, _ = nnls(scaled * weights[:, None], times * weights, maxiter=10 * matrix.shape[1])
        predicted = np.maximum(scaled @ solution, 1e-12)
        residuals = np.abs(times / predicted - 1.0)
        weights = np.sqrt(np.minimum(1.0, _HUBER / np.maximum(residuals, 1e-12))) / predicted
    return np.asarray(solution / scale, np.float64)
