"""Arrays for the columns of a workload, and operations that select rows and concatenate columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

__all__ = ["F64", "I64", "BoolArray", "ObjectArray", "StringColumn", "int64s", "objects"]

F64: TypeAlias = npt.NDArray[np.float64]
I64: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
ObjectArray: TypeAlias = npt.NDArray[np.object_]


def int64s(size: int, value: int = 0) -> I64:
    """Return an array of shape [size], filled with `value`."""
    return np.full(size, value, dtype=np.int64)


def objects(values: Sequence[object]) -> ObjectArray:
    """Return an object array with one element per value, even if the values are sequences."""
    array = np.empty(len(values), dtype=np.object_)
    for index, value in enumerate(values):
        array[index] = value
    return array


class StringColumn(Struct, frozen=True):
    """Column of strings in 4 or 12 bytes per row: a label from a small table, and optionally a number (>= 0) after it.

    The string of a row is `labels[codes[row]]`, or with numbers `f"{labels[codes[row]]}{numbers[row]}"`; the number -1
    stands for no number.
    """

    labels: tuple[str, ...]
    codes: npt.NDArray[np.int32]
    numbers: I64 | None = None

    @classmethod
    def constant(cls, value: str, size: int) -> StringColumn:
        """Return a column with the same string in each row."""
        return cls((value,), np.zeros(size, dtype=np.int32))

    @classmethod
    def numbered(cls, prefix: str, numbers: I64) -> StringColumn:
        """Return a column whose strings are `prefix` followed by the row's entry of `numbers`."""
        return cls((prefix,), np.zeros(len(numbers), dtype=np.int32), numbers)

    @classmethod
    def of(cls, values: Iterable[str]) -> StringColumn:
        """Return a column of arbitrary strings; equal ones are stored once."""
        known: dict[str, int] = {}
        codes = np.fromiter((known.setdefault(value, len(known)) for value in values), dtype=np.int32)
        return cls(tuple(known), codes)

    @classmethod
    def concat(cls, parts: Sequence[StringColumn]) -> StringColumn:
        """Return the concatenation of the columns."""
        known: dict[str, int] = {}
        codes: list[npt.NDArray[np.int32]] = []
        for part in parts:
            lookup = np.array([known.setdefault(label, len(known)) for label in part.labels], dtype=np.int32)
            codes.append(lookup[part.codes] if len(lookup) else part.codes)
        numbers: I64 | None = None
        if any(part.numbers is not None for part in parts):
            numbers = np.concatenate([int64s(len(p), -1) if p.numbers is None else p.numbers for p in parts])
        return cls(tuple(known), np.concatenate(codes), numbers)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.codes)

    def __getitem__(self, row: int) -> str:
        """Return the string of a row."""
        label = self.labels[int(self.codes[row])]
        if self.numbers is None:
            return label
        number = int(self.numbers[row])
        return f"{label}{number}" if number >= 0 else label

    def tolist(self) -> list[str]:
        """Return all strings."""
        labels = self.labels
        if self.numbers is None:
            return [labels[code] for code in self.codes.tolist()]
        pairs = zip(self.codes.tolist(), self.numbers.tolist(), strict=True)
        return [f"{labels[code]}{number}" if number >= 0 else labels[code] for code, number in pairs]

    def take(self, rows: I64) -> StringColumn:
        """Return the given rows, in that order."""
        return StringColumn(self.labels, self.codes[rows], None if self.numbers is None else self.numbers[rows])

    def slice(self, start: int, stop: int) -> StringColumn:
        """Return a view of the rows [start, stop)."""
        return StringColumn(
            self.labels, self.codes[start:stop], None if self.numbers is None else self.numbers[start:stop]
        )

    def renamed(self, prefix: str) -> StringColumn:
        """Return the column with `prefix` before each string that is not empty."""
        numbers = self.numbers
        if "" not in self.labels or (numbers is not None and bool(np.all(numbers >= 0))):
            return StringColumn(tuple(prefix + label for label in self.labels), self.codes, numbers)
        return StringColumn.of(prefix + value if value else "" for value in self.tolist())

    def groups(self) -> I64:
        """Return a group number per row: equal strings have equal numbers, from 0 in order of first appearance."""
        keys = self.codes.astype(np.int64)
        if self.numbers is not None and len(self):
            keys = keys * (int(self.numbers.max()) + 2) + self.numbers + 1
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        rank = np.empty(len(first), dtype=np.int64)
        rank[np.argsort(first, kind="stable")] = np.arange(len(first))
        return rank[inverse.reshape(-1)]

    def num_distinct(self) -> int:
        """Return the number of distinct non-empty strings."""
        if self.numbers is None:
            return sum(1 for code in np.unique(self.codes).tolist() if self.labels[code])
        groups = self.groups()
        _, first = np.unique(groups, return_index=True)
        return sum(1 for row in first.tolist() if self[row])
