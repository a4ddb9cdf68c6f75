"""Parse the cells of trace files, many cells at a time.

A parser converts the cells of one column to an array, or raises ValueError if it rejects any of them; the caller then
finds the rejected cell by parsing the cells one by one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from vajra_py.workload.arrays import F64, I64, objects
from vajra_py.workload.files import Parser

__all__ = [
    "TimeUnit",
    "durations",
    "finite_times",
    "flags",
    "limits",
    "maybe_numbers",
    "maybe_whole_numbers",
    "text",
    "texts",
    "times_in",
    "token_counts",
    "whole_numbers",
]

TimeUnit: TypeAlias = Literal["s", "ms", "us", "ns", "datetime"]

UNITS_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
NUMERALS = frozenset("0123456789+-.eE \t")
DATETIME = re.compile(
    r"\s*((?:19[7-9]\d|2[01]\d\d|22[0-5]\d)-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d{1,9})?)(?:Z|\+00:00)?\s*", re.ASCII
)


def _checked(cells: Sequence[str]) -> Sequence[str]:
    """Return the cells. Raises ValueError if a cell has characters that do not occur in ASCII decimal numbers.

    This rejects `1_000`, `nan`, `inf` and digits of other scripts, which Python's conversions accept.
    """
    if not NUMERALS.issuperset("".join(cells)):
        raise ValueError("not a decimal number")
    return cells


def _numbers(cells: Sequence[str]) -> F64:
    values = np.array(list(map(float, _checked(cells))), dtype=np.float64)
    if not bool(np.all(np.isfinite(values))):
        raise ValueError("not finite")
    return values


def whole_numbers(cells: Sequence[str]) -> I64:
    """Parse integers of either sign; `374.0` counts as an integer."""
    try:
        return np.array(list(map(int, _checked(cells))), dtype=np.int64)
    except ValueError:
        values = _numbers(cells)
        whole = values.astype(np.int64)
        if not bool(np.all((whole == values) & (np.abs(values) < 2**53))):
            raise
        return whole


def token_counts(minimum: int) -> Parser:
    """Return a parser of numbers of tokens, at least `minimum`."""

    def parse(cells: Sequence[str]) -> I64:
        values = whole_numbers(cells)
        if bool(np.any((values < minimum) | (values > np.iinfo(np.int32).max))):
            raise ValueError("out of range")
        return values

    return parse


def finite_times(cells: Sequence[str]) -> F64:
    """Parse finite numbers >= 0."""
    values = _numbers(cells)
    if bool(np.any(values < 0)):
        raise ValueError("negative")
    return values


def _or_nothing(parse: Parser, nothing: float) -> Parser:
    """Return a parser that also accepts empty cells, which become `nothing`."""

    def parse_some(cells: Sequence[str]) -> npt.NDArray[Any]:
        blank = [not cell.strip() for cell in cells]
        values = parse(["1" if empty else cell for cell, empty in zip(cells, blank, strict=True)])
        values[np.array(blank, dtype=np.bool_)] = nothing
        return values

    return parse_some


durations = _or_nothing(finite_times, np.nan)
"""Parser of seconds >= 0; an empty cell becomes NaN (no value)."""
maybe_numbers = _or_nothing(_numbers, np.nan)
"""Parser of numbers; an empty cell becomes NaN (no value)."""
limits = _or_nothing(token_counts(1), -1)
"""Parser of integers >= 1; an empty cell becomes -1 (no value)."""


def maybe_whole_numbers(nothing: int) -> Parser:
    """Return a parser of integers of either sign; an empty cell becomes `nothing`."""
    return _or_nothing(whole_numbers, nothing)


def text(cells: Sequence[str]) -> npt.NDArray[np.object_]:
    """Return the cells without surrounding blanks, as an object array."""
    return objects([cell.strip() for cell in cells])


_FLAGS = {"": 0, "0": 0, "false": 0, "1": 1, "true": 1}


def flags(cells: Sequence[str]) -> I64:
    """Parse flags: 1 for `true` or `1`; 0 for `false`, `0` or an empty cell."""
    values = [_FLAGS.get(cell.strip().lower()) for cell in cells]
    if None in values:
        raise ValueError("neither true nor false")
    return np.array(values, dtype=np.int64)


def texts(cells: Sequence[str]) -> npt.NDArray[np.object_]:
    """Split each cell at `;` into a tuple of texts; an empty cell gives an empty tuple."""
    return objects([tuple(filter(None, (part.strip() for part in cell.split(";")))) for cell in cells])


def _datetimes(cells: Sequence[str]) -> I64:
    """Parse `YYYY-MM-DD hh:mm:ss[.fraction]`, in UTC or without a zone, to nanoseconds since 1970."""
    matches = [DATETIME.fullmatch(cell) for cell in cells]
    stamps = np.array([match[1] for match in matches if match is not None], dtype="datetime64[ns]")
    if len(stamps) < len(cells):
        raise ValueError("not a date and time")
    return stamps.astype(np.int64)


def times_in(unit: TimeUnit) -> tuple[Parser, str]:
    """Return the parser of arrival times in this unit, and a description of the allowed values.

    The parser returns seconds, or nanoseconds since 1970 for datetimes.
    """
    if unit == "datetime":
        return _datetimes, "A date and time from 1970 to 2259: YYYY-MM-DD hh:mm:ss[.fraction], no zone or UTC"
    units_per_second = UNITS_PER_SECOND[unit]

    def parse(cells: Sequence[str]) -> F64:
        return finite_times(cells) / units_per_second

    return parse, f"A finite number >= 0 (time in {unit})"
