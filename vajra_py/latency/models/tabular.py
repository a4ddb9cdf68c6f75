"""Read numeric columns from a file of any supported format."""

from __future__ import annotations

import csv
import gzip
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from vajra_py.errors import ConfigError, Problem, did_you_mean
from vajra_py.latency.hardware.catalog import read_json_file

Columns = dict[str, npt.NDArray[np.float64]]


def read_columns(path: Path, needed: Sequence[str], optional: Sequence[str] = ()) -> Columns:
    """Read numeric columns of equal length from a CSV (also gzip'd), JSON, npz or Parquet file.

    Returns the needed columns, and those optional ones that the file has; other columns are ignored. JSON is an object
    of lists, or a list of objects.

    Raises:
        ConfigError: the file is missing, broken or of another kind, or lacks a needed column, or a value is not a
            finite number (the error names the line or the row).
    """
    if not path.is_file():
        raise ConfigError(Problem(str(path), "there is no such file"))
    wanted = (*needed, *optional)
    name = path.name.removesuffix(".gz")
    if name.endswith(".csv"):
        columns = _from_csv(path, needed, wanted)
    elif name.endswith(".json"):
        columns = _from_json(path, wanted)
    elif name.endswith(".npz"):
        columns = read_npz(path, wanted)
    elif name.endswith(".parquet"):
        columns = _from_parquet(path, wanted)
    else:
        raise ConfigError(
            Problem(
                str(path), f"is of an unknown kind ({path.suffix!r})", "Allowed: .csv, .csv.gz, .json, .npz, .parquet"
            )
        )
    check_names(path, columns, needed)
    columns = {key: columns[key] for key in wanted if key in columns}
    _check_values(path, columns)
    return columns


def check_names(path: Path, names: Mapping[str, Any], needed: Sequence[str]) -> None:
    """Check that a file has the needed columns.

    Raises:
        ConfigError: columns are missing; one problem per column.
    """
    missing = [
        Problem(str(path), f"has no column {name!r}", did_you_mean(name, names)) for name in needed if name not in names
    ]
    if missing:
        raise ConfigError(missing)


def open_csv(path: Path) -> TextIO:
    """Open a CSV file, gzip'd if its name ends with .gz; a byte-order mark is skipped."""
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def read_npz(path: Path, wanted: Sequence[str] | None = None) -> Columns:
    """Return the arrays of an npz file as float64; with `wanted`, only those of these names.

    Raises:
        ConfigError: the file is not an npz file, or contains values other than numbers.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = [name for name in arrays.files if wanted is None or name in wanted]
            return {name: arrays[name].astype(np.float64) for name in names}
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(Problem(str(path), f"is not an npz file of numbers ({error})")) from error
    except Exception as error:  # zipfile raises its own exceptions
        raise ConfigError(Problem(str(path), f"cannot be read as npz ({error})")) from error


def _from_csv(path: Path, needed: Sequence[str], wanted: Sequence[str]) -> Columns:
    values: dict[str, list[float]] = {}
    try:
        with open_csv(path) as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            check_names(path, dict.fromkeys(header), needed)
            kept = [(index, name) for index, name in enumerate(header) if name in wanted]
            values = {name: [] for _, name in kept}
            for row in reader:
                if not row:
                    continue
                for index, name in kept:
                    values[name].append(_number(path, reader.line_num, name, row[index] if index < len(row) else ""))
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(Problem(str(path), f"cannot be read ({error})")) from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(Problem(str(path), f"is not a CSV file ({error})")) from error
    return {name: np.array(column, dtype=np.float64) for name, column in values.items()}


def _number(path: Path, line: int, name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(Problem(f"{path}:{line} {name}", f"is not a number ({text!r})")) from None


def _from_json(path: Path, wanted: Sequence[str]) -> Columns:
    contents = read_json_file(path)
    if isinstance(contents, list) and all(isinstance(row, dict) for row in contents) and contents:
        contents = {key: [row.get(key) for row in contents] for key in contents[0]}
    if not isinstance(contents, dict) or not all(isinstance(column, list) for column in contents.values()):
        raise ConfigError(Problem(str(path), "is neither an object of lists nor a list of objects"))
    columns = {}
    for key in (name for name in contents if name in wanted):
        column = contents[key]
        bad = next((i for i, v in enumerate(column) if not _is_number(v)), None)
        if bad is not None:
            raise ConfigError(Problem(f"{path} {key}[{bad}]", f"is not a number ({column[bad]!r})"))
        columns[key] = np.array(column, dtype=np.float64)
    return columns


def _is_number(value: Any) -> bool:
    """Return True for a JSON number, except for an integer that is too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= sys.float_info.max


def _from_parquet(path: Path, wanted: Sequence[str]) -> Columns:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        table = parquet.read_table(path)
        names = [name for name in table.column_names if name in wanted]
        return {name: table.column(name).to_numpy().astype(np.float64) for name in names}
    except (arrow.ArrowException, ValueError, TypeError) as error:
        raise ConfigError(Problem(str(path), f"is not a Parquet file with numeric columns ({error})")) from error


def _check_values(path: Path, columns: Columns) -> None:
    for name, column in columns.items():
        if column.ndim != 1:
            raise ConfigError(Problem(f"{path} {name}", f"has {column.ndim} dimensions", "One number for each row"))
    lengths = {len(column) for column in columns.values()}
    if len(lengths) > 1:
        raise ConfigError(
            Problem(str(path), f"has columns of different lengths ({', '.join(map(str, sorted(lengths)))})")
        )
    for name, column in columns.items():
        bad = np.flatnonzero(~np.isfinite(column))
        if bad.size:
            raise ConfigError(Problem(f"{path} {name}[{bad[0]}]", f"is not a finite number ({column[bad[0]]})"))
