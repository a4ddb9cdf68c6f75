"""Compressed files of JSON lines: the same rows give the same bytes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from vajra_py.runtime.records.decision_log import open_binary


class JsonLinesFile:
    """Writer of one file during a run; the file is complete up to the last row that was flushed."""

    def __init__(self, path: Path, open_file: Callable[[Path], BinaryIO] = open_binary) -> None:
        self._raw = open_file(path)
        self._file = gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=self._raw, mtime=0)

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one more line."""
        self._file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")

    def flush(self) -> None:
        """Flush every line so far to the operating system, so that it survives the end of this process."""
        self._file.flush()

    def close(self) -> None:
        """Finish the file."""
        self._file.close()
        self._raw.close()


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file. Raises `OSError`, `EOFError` or `ValueError` if the file is broken."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
