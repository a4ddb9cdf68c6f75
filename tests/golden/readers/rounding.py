"""Test whether rounding of a table explains the differences between two simulations.

Vidur's step times came from tables in full precision; the tables at hand are rounded to some significant digits. If both
simulators run the same steps, the time of every event differs by the sum, over the steps since the clocks last met, of
one unknown digit rest for each number of tokens. So there must be rests within the rounding that make all times agree.
If there are none, the steps differ.

Clocks meet whenever the replica was idle: the next step starts at an arrival, in both.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vajra_py.contract.observer import Observer, StepEnd

EXACT_DIGITS = 15
"""A table with this many significant digits or more is taken as exact."""
_SLACK = 1.0 + 1e-6
_SAME_INSTANT_S = 5e-13
"""Half a tick of the simulated clock."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Event:
    """One time that both simulators give: a first token, or an end."""

    at: float
    """Here, seconds on the run's clock."""
    expected_at: float
    scale_s: float
    """Scale of the difference: the recorded TTFT or E2E."""

    @property
    def relative_difference(self) -> float:
        """Against the recorded duration."""
        return abs(self.at - self.expected_at) / self.scale_s


class StepTimes(Observer):
    """Records the time and number of tokens of every step."""

    def __init__(self) -> None:
        self.formed_at: list[float] = []
        self.ended_at: list[float] = []
        self.num_tokens: list[int] = []

    def on_step_end(self, step: StepEnd) -> None:
        self.formed_at.append(step.formed_at)
        self.ended_at.append(step.ended_at)
        self.num_tokens.append(step.features.num_tokens)


def significant_digits(path: Path) -> int:
    """Most significant digits of any number in a table of numbers."""
    most = 0
    with gzip.open(path, "rt", newline="") as stream:
        rows = csv.reader(stream)
        next(rows)
        for row in rows:
            most = max(most, *(len(one.lower().split("e")[0].replace(".", "").strip("-0")) for one in row[1:]))
    return most


def half_units(columns: Mapping[str, Floats], digits: int) -> Mapping[str, Floats]:
    """Return the largest error of each entry by rounding to `digits` significant digits."""
    moved = {}
    for name, values in columns.items():
        safe = np.where(values > 0, values, 1.0)
        moved[name] = np.where(values > 0, 0.5 * 10.0 ** (np.floor(np.log10(safe)) - (digits - 1)), 0.0)
    return moved


def left_over(steps: StepTimes, events: Sequence[Event], may_move_s: Floats) -> float:
    """Largest relative difference that remains when step times move, within `may_move_s` by tokens, to fit best."""
    from scipy.optimize import lsq_linear

    counts = _step_counts(steps, events, len(may_move_s))
    scale = np.array([event.scale_s for event in events])
    wanted = np.array([event.expected_at - event.at for event in events]) / scale
    used = np.flatnonzero(counts.any(axis=0) & (may_move_s > 0))
    unit = float(np.abs(wanted).max()) or 1.0
    effects = counts[:, used] * may_move_s[used] / scale[:, None] / unit
    solution = lsq_linear(effects, wanted / unit, bounds=(-_SLACK, _SLACK), max_iter=500)
    return float(np.abs(effects @ solution.x - wanted / unit).max()) * unit


def _step_counts(steps: StepTimes, events: Sequence[Event], num_kinds: int) -> Floats:
    """For each event: how many steps of each number of tokens ran since the replica was last idle."""
    order = np.argsort(np.array(steps.ended_at))
    ended_at = np.array(steps.ended_at)[order]
    positions = np.searchsorted(ended_at, np.array([event.at for event in events]) - _SAME_INSTANT_S)
    wanted: dict[int, list[int]] = {}
    for number, position in enumerate(positions):
        wanted.setdefault(int(position), []).append(number)
    counts = np.zeros((len(events), num_kinds))
    current = np.zeros(num_kinds)
    last_end = -1.0
    for position, step in enumerate(order):
        if steps.formed_at[step] > last_end + _SAME_INSTANT_S:
            current[:] = 0.0
        current[steps.num_tokens[step]] += 1.0
        last_end = steps.ended_at[step]
        for number in wanted.get(position, ()):
            counts[number] = current
    return counts
