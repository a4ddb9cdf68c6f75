"""Conversion of table columns to arrays, and grouping of rows by a column of names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from vajra_py.metrics.definitions import Floats, Ints
from vajra_py.runtime.records.arrow_arrays import call, numpy_array

if TYPE_CHECKING:
    import pyarrow as pa

    ArrowTable: TypeAlias = pa.Table
else:
    ArrowTable = "pyarrow.Table"


def group_codes(table: ArrowTable, column: str) -> tuple[Ints, list[str]]:
    """Return (code of each row, sorted distinct names); a code is the position of the row's name in the names."""
    import pyarrow as pa

    values = table.column(column).combine_chunks()
    if not pa.types.is_dictionary(values.type):
        values = call("dictionary_encode", values)
    names = [name or "" for name in values.dictionary.to_pylist()]
    order = sorted(range(len(names)), key=names.__getitem__)
    if order == sorted(order):
        return numpy_array(values.indices).astype(np.int64), names
    position = np.empty(len(names), dtype=np.int64)
    position[order] = np.arange(len(names))
    codes = numpy_array(values.indices).astype(np.int64)
    return (position[codes] if len(names) else codes), [names[i] for i in order]


def floats_of(table: ArrowTable, column: str) -> Floats:
    """Return the column as floats."""
    values: Floats = numpy_array(table.column(column)).astype(np.float64, copy=False)
    return values


def ints_of(table: ArrowTable, column: str) -> Ints:
    """Return the column as integers."""
    values: Ints = numpy_array(table.column(column)).astype(np.int64, copy=False)
    return values


def write_table(table: ArrowTable, path: Path) -> None:
    """Write a small table to a Parquet file."""
    import pyarrow.parquet as pq

    pq.write_table(table, path, compression="zstd", version="2.6")
