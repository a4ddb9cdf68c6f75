"""Formats of stated facts: how each kind of fact is stored in columns, and parsed from CSV cells and JSON values.

This module depends only on the kinds of facts, not on individual facts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct, structs

from vajra_py.contract.facts import FACTS, Fact, FactKind, is_number
from vajra_py.workload.arrays import F64, I64, ObjectArray, StringColumn, objects
from vajra_py.workload.cells import durations, flags, maybe_numbers, maybe_whole_numbers, text, texts, whole_numbers
from vajra_py.workload.files import Parser

__all__ = ["CSV_FIELDS", "REQUIRED_FIELDS", "FactColumn", "FactFormat", "format_of"]

FactColumn: TypeAlias = F64 | I64 | StringColumn | ObjectArray
"""Values of one fact. None is stored as the smallest integer in integer columns, and as NaN in float columns."""

_NO_INTEGER = np.iinfo(np.int64).min


class FactFormat(Struct, frozen=True):
    """Storage and parsing of values of one kind.

    Attributes:
        column: converts values to a column.
        values: converts a column, or a slice of one, to values.
        read_json: converts a JSON value; raises TypeError or ValueError if it is not allowed.
        json_allowed: description of the JSON values allowed, for errors.
        parse_cells: converts the cells of a CSV column to a column; raises ValueError if a cell is not allowed.
        cells_allowed: description of the cells allowed, for errors.
    """

    column: Callable[[Sequence[Any]], FactColumn]
    values: Callable[[Any], list[Any]]
    read_json: Callable[[Any], Any]
    json_allowed: str
    parse_cells: Parser
    cells_allowed: str


def format_of(fact: Fact) -> FactFormat:
    """Return the format of a fact's kind."""
    own = _OPTIONAL_INTEGER if fact.is_optional and fact.kind is FactKind.INTEGER else _FORMATS[fact.kind]
    return own if fact.least is None else _bounded(own, fact.least)


def _bounded(plain: FactFormat, least: int) -> FactFormat:
    """Return the format `plain` restricted to integers >= `least`."""

    def read_json(value: Any) -> int:
        number: int = plain.read_json(value)
        if number < least:
            raise ValueError
        return number

    def parse_cells(cells: Sequence[str]) -> Any:
        numbers = plain.parse_cells(cells)
        if any(number < least and number != _NO_INTEGER for number in numbers.tolist()):
            raise ValueError
        return numbers

    words = f"A whole number >= {least}"
    return structs.replace(
        plain,
        read_json=read_json,
        json_allowed=words,
        parse_cells=parse_cells,
        cells_allowed=plain.cells_allowed.replace("A whole number", words),
    )


def read_integer(value: Any) -> int:
    """Return a JSON integer that fits into 64 bits. Raises TypeError or ValueError."""
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise TypeError
    return value


def read_number(value: Any) -> float:
    """Return a finite JSON number as a float. Raises TypeError or ValueError."""
    if not is_number(value):
        raise TypeError
    return float(value)


def read_seconds(value: Any) -> float:
    """Return a finite JSON number >= 0 as a float. Raises TypeError or ValueError."""
    if not is_number(value) or value < 0:
        raise TypeError
    return float(value)


def _read_flag(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError
    return value


def read_text(value: Any) -> str:
    """Return a JSON string. Raises TypeError or ValueError."""
    if not isinstance(value, str):
        raise TypeError
    return value


def _read_texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError
    return tuple(map(read_text, value))


def _float_column(values: Sequence[float | None]) -> F64:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _floats(column: F64) -> list[float | None]:
    return [None if value != value else value for value in column.tolist()]


def _integer_column(values: Sequence[int | None]) -> I64:
    return np.array([_NO_INTEGER if value is None else value for value in values], dtype=np.int64)


def _optional_integers(column: I64) -> list[int | None]:
    return [None if value == _NO_INTEGER else value for value in column.tolist()]


def _flag_column(values: Sequence[bool]) -> I64:
    return np.array(values, dtype=np.int64)


def _flags(column: I64) -> list[bool]:
    return list(map(bool, column.tolist()))


def _plain(column: I64 | StringColumn | ObjectArray) -> list[Any]:
    return column.tolist()


_INTEGER = FactFormat(_integer_column, _plain, read_integer, "A whole number", whole_numbers, "A whole number")
_OPTIONAL_INTEGER = FactFormat(
    *(_integer_column, _optional_integers, read_integer, "A whole number"),
    *(maybe_whole_numbers(_NO_INTEGER), "A whole number, or nothing"),
)
_FORMATS: Mapping[FactKind, FactFormat] = {
    FactKind.TEXT: FactFormat(StringColumn.of, _plain, read_text, "A string", text, "Any text"),
    FactKind.TEXTS: FactFormat(
        objects, _plain, _read_texts, "A list of strings", texts, "Texts with `;` between them, or nothing"
    ),
    FactKind.INTEGER: _INTEGER,
    FactKind.FLAG: FactFormat(_flag_column, _flags, _read_flag, "true or false", flags, "true, false, 1, 0 or nothing"),
    FactKind.NUMBER: FactFormat(
        _float_column, _floats, read_number, "A finite number", maybe_numbers, "A finite number, or nothing"
    ),
    FactKind.DURATION: FactFormat(
        *(_float_column, _floats, read_seconds, "A finite number of seconds >= 0"),
        *(durations, "A finite number of seconds >= 0, or nothing"),
    ),
}

REQUIRED_FIELDS = ("arrived_at", "num_prompt_tokens", "num_output_tokens")
CSV_FIELDS = (
    *(*REQUIRED_FIELDS, "max_tokens"),
    *(fact.name for fact in FACTS if fact.kind in (FactKind.INTEGER, FactKind.FLAG)),
    *(fact.name for fact in FACTS if fact.kind in (FactKind.NUMBER, FactKind.DURATION)),
    *("think_time_s", "request_id"),
    *(fact.name for fact in FACTS if fact.kind in (FactKind.TEXT, FactKind.TEXTS)),
    "follows",
)
"""Fields of a request that can be read from a column of a CSV file."""
