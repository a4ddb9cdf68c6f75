"""Figures that policies emit, such as counters, levels and predictions."""

from __future__ import annotations

import re
from array import array

from msgspec import Struct, field

from vajra_py.contract import EmitFigure, RequestView

MAX_ROWS = 5_000_000
"""Maximum number of figures that a run keeps, at 28 bytes each; further figures are only counted."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")


class EmittedFigures:
    """Figures emitted by the policies of a run, in columns; kept only if the run requests them (`is_kept`)."""

    def __init__(self) -> None:
        self.is_kept = False
        self.series: list[tuple[str, str, str]] = []
        """Series of figures, (replicaset, policy, name); a row refers to a series by its position in this list."""
        self.numbers = array("I")
        """Position in `series` of each row's series."""
        self.at = array("d")
        """Time of each row, in seconds on the run's clock."""
        self.values = array("d")
        self.indices = array("q")
        """Index of the request to which each row belongs; -1: no request."""
        self.num_lost = 0
        """Number of figures dropped because `MAX_ROWS` were kept already."""

    def __len__(self) -> int:
        """Return the number of kept figures."""
        return len(self.at)

    def of(self, replicaset: str, policy: str) -> EmitFigure:
        """Return the function with which one policy emits figures."""
        numbers: dict[str, int] = {}

        def emit(name: str, value: float, now: float, request: RequestView | None = None) -> None:
            if name not in numbers:
                _check_name(name)
            figure, seconds = float(value), float(now)
            if not (figure - figure == 0.0 and seconds - seconds == 0.0):  # x - x is 0 only for a finite x
                raise ValueError(f"emit({name!r}): must be finite numbers (got {value!r} at {now!r})")
            index = -1 if request is None else getattr(request, "index", None)
            if not isinstance(index, int):  # such as `str.index`, a method
                raise ValueError(f"emit({name!r}): request is {request!r}. Allowed: a RequestView or None")
            if not self.is_kept:
                return
            number = numbers.get(name)
            if number is None:
                number = numbers[name] = self._number_of(replicaset, policy, name)
            if len(self.at) >= MAX_ROWS:
                self.num_lost += 1
                return
            self.numbers.append(number)
            self.at.append(seconds)
            self.values.append(figure)
            self.indices.append(index)

        return emit

    def _number_of(self, replicaset: str, policy: str, name: str) -> int:
        series = (replicaset, policy, name)
        if series not in self.series:
            self.series.append(series)
        return self.series.index(series)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"emit: not a name ({name!r}). Allowed: lower-case letters, digits and underscores")


class PolicyDiary(Struct, frozen=True):
    """Results of a run's policies in addition to their decisions."""

    emitted: EmittedFigures = field(default_factory=EmittedFigures)
    asked_for_lengths: set[str] = field(default_factory=set)
    """Names of policies that requested output lengths although the predictor has none."""
