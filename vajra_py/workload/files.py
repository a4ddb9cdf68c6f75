"""Read trace files, plain or gzipped, with errors that name file and line.

Invariants: a file is read as UTF-8, gzip is recognised by its first two bytes, and every failure is a `WorkloadError`.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from vajra_py.errors import WorkloadError, did_you_mean

__all__ = [
    "Array",
    "Column",
    "Parser",
    "Table",
    "file_facts",
    "is_encodable",
    "iter_csv_rows",
    "iter_json_lines",
    "iter_lines",
    "line_of_row",
    "read_header",
    "read_table",
]

GZIP_MAGIC = b"\x1f\x8b"
BLOCK_ROWS = 65_536


def _open_bytes(file: Path) -> IO[bytes]:
    try:
        raw = file.open("rb")
    except OSError as error:
        raise WorkloadError(file, None, f"cannot be read ({error.strerror or error})", "A readable file") from None
    if raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC:
        raw.close()
        return cast("IO[bytes]", gzip.open(file, "rb"))
    raw.seek(0)
    return raw


def file_facts(kind: str, file: Path) -> dict[str, Any]:
    """Return a manifest's entry for a file: its kind, name and the SHA-256 of its bytes as stored."""
    try:
        with file.open("rb") as raw:
            digest = hashlib.file_digest(raw, "sha256").hexdigest()
    except OSError as error:
        raise WorkloadError(file, None, f"cannot be read ({error.strerror or error})", "A readable file") from None
    return {"kind": kind, "file": file.name, "sha256": digest}


def iter_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a file, with their line ends.

    Raises:
        WorkloadError: the file cannot be opened, is not UTF-8, or its gzip stream is truncated or damaged; the error
            gives the line reached.
    """
    num_lines = 0
    with _open_bytes(file) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
        try:
            for line in text:
                num_lines += 1
                yield line
        except EOFError:
            message = "the gzip file is cut short (its end is missing)"
            raise WorkloadError(file, num_lines + 1, message, "A complete file") from None
        except (zlib.error, OSError) as error:
            raise WorkloadError(file, num_lines + 1, f"the gzip file is damaged ({error})", "A complete file") from None
        except UnicodeDecodeError as error:
            line_number, byte = _undecodable(file, num_lines)
            message = f"is not valid UTF-8 (byte 0x{byte:02x}, {error.reason})"
            raise WorkloadError(file, line_number, message, "A text file in UTF-8, plain or gzip'd") from None


def _undecodable(file: Path, num_lines: int) -> tuple[int, int]:
    """Return the line number and value of the first byte that is not UTF-8.

    The number of lines read so far does not give the line, because text is decoded in larger pieces.
    """
    with _open_bytes(file) as raw:
        for number, line in enumerate(raw, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return number, line[error.start]
    return num_lines + 1, 0


def iter_json_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and JSON object of each line of a file; blank lines are skipped.

    Raises:
        WorkloadError: as for `iter_lines`, and if a line is not a JSON object or the file contains none.
    """
    empty = True
    for number, line in enumerate(iter_lines(file), start=1):
        if not line.strip():
            continue
        empty = False
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            message = f"is not valid JSON: {error.msg} at column {error.colno} ({line.strip()[:40]!r})"
            raise WorkloadError(file, number, message, "One JSON object a line") from None
        except ValueError:  # Python refuses to convert numbers of more than 4300 digits
            message = f"is not valid JSON: has a number of too many digits ({line.strip()[:40]!r})"
            raise WorkloadError(file, number, message, "Numbers of at most 4300 digits") from None
        except RecursionError:
            raise WorkloadError(file, number, "is JSON nested too deeply", "One flat JSON object a line") from None
        if "\\u" in line and not is_encodable(value):
            message = f"has half of a surrogate pair, which is no character ({line.strip()[:40]!r})"
            raise WorkloadError(file, number, message, "Text of whole characters")
        if not isinstance(value, dict):
            raise WorkloadError(file, number, f"is not a JSON object ({line.strip()[:40]!r})", "One JSON object a line")
        yield number, value
    if empty:
        raise WorkloadError(file, None, "is empty (no request in it)", "At least one request")


def is_encodable(value: Any) -> bool:
    """Return True unless a text in this JSON value has half of a surrogate pair, which no file in UTF-8 can hold."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


Array: TypeAlias = npt.NDArray[Any]
Parser: TypeAlias = Callable[[Sequence[str]], Array]
"""Function that converts the cells of one column to an array; raises ValueError if it rejects any cell.

It is called with single cells to find a rejected one.
"""


class Column(Struct, frozen=True):
    """Column `name` to read from a table and store under `key`, with its parser and a description of the allowed
    values.
    """

    key: str
    name: str
    parse: Parser
    allowed: str


class Table:
    """Requested columns of a CSV file as arrays; errors about a row state its line number."""

    def __init__(self, file: Path, header: Sequence[str], columns: dict[str, Array]) -> None:
        self.file = file
        self.header = tuple(header)
        self.columns = columns

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: str) -> Array:
        """Return the values of the column stored under `key`."""
        return self.columns[key]

    def error(self, row: int, message: str, allowed: str) -> WorkloadError:
        """Return an error about this row (from 0) that states the line number."""
        return WorkloadError(self.file, line_of_row(self.file, row), message, allowed)


def _rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the row's last line, cells) for each non-blank row of a CSV file, header included."""
    reader = csv.reader(iter_lines(file))
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise WorkloadError(
                file, reader.line_num, f"is not a CSV row ({error})", "Cells separated by commas"
            ) from None
        if cells and (len(cells) > 1 or cells[0].strip()):
            yield reader.line_num, cells


def line_of_row(file: Path, row: int) -> int:
    """Return the line number of data row `row` (from 0)."""
    for index, (line, _) in enumerate(_rows(file)):
        if index == row + 1:
            return line
    raise IndexError(f"{file} has no data row {row}")


def read_header(file: Path) -> list[str]:
    """Return the column names of a CSV file, stripped of surrounding blanks."""
    for line, cells in _rows(file):
        names = [cell.strip() for cell in cells]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise WorkloadError(file, line, f"a column name appears twice ({repeated[0]!r})", "Different column names")
        return names
    raise WorkloadError(file, None, "is empty (not even a header)", "A header line and at least one row")


def read_table(file: Path, wanted: Sequence[Column]) -> Table:
    """Read the requested columns of a CSV file with a header; other columns are ignored.

    Raises:
        WorkloadError: as for `iter_lines`, and if a column is missing, a row has too few or too many cells, a cell is
            rejected, or the file has no rows.
    """
    header = read_header(file)
    for column in wanted:
        if column.name not in header:
            raise WorkloadError(file, 1, f"has no column {column.name!r}", did_you_mean(column.name, header))
    places = [header.index(column.name) for column in wanted]
    blocks: list[list[Array]] = [[] for _ in wanted]
    rows = _rows(file)
    next(rows)
    while True:
        block = list(islice(rows, BLOCK_ROWS))
        if not block:
            break
        if {len(cells) for _, cells in block} != {len(header)}:
            line, cells = next((line, cells) for line, cells in block if len(cells) != len(header))
            message = f"has {len(cells)} cells under a header of {len(header)} columns"
            raise WorkloadError(file, line, message, f"{len(header)} cells separated by commas")
        for place, column, parsed in zip(places, wanted, blocks, strict=True):
            parsed.append(_parse_block(file, block, place, column))
    if not blocks[0]:
        raise WorkloadError(file, None, "is empty (a header without rows)", "At least one request")
    return Table(file, header, {c.key: np.concatenate(parsed) for c, parsed in zip(wanted, blocks, strict=True)})


def _parse_block(file: Path, block: Sequence[tuple[int, list[str]]], place: int, column: Column) -> Array:
    try:
        return column.parse([cells[place] for _, cells in block])
    except (ValueError, OverflowError):
        for line, cells in block:
            try:
                column.parse([cells[place]])
            except (ValueError, OverflowError):
                message = f"column {column.name!r} cannot be read ({cells[place]!r})"
                raise WorkloadError(file, line, message, column.allowed) from None
        raise


def iter_csv_rows(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the line number and the stripped cells, by column name, of each row of a CSV file with a header.

    Raises:
        WorkloadError: as for `iter_lines`, and if a row has too few or too many cells, or the file has no rows.
    """
    header = read_header(file)
    rows = _rows(file)
    next(rows)
    empty = True
    for line, cells in rows:
        empty = False
        if len(cells) != len(header):
            message = f"has {len(cells)} cells under a header of {len(header)} columns"
            raise WorkloadError(file, line, message, f"{len(header)} cells separated by commas")
        yield line, {name: cell.strip() for name, cell in zip(header, cells, strict=True)}
    if empty:
        raise WorkloadError(file, None, "is empty (a header without rows)", "At least one request")
