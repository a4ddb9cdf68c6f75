"""Append-only columns that keep millions of rows in little memory.

Each kind of column has its own store: rows of numbers are packed into bytes, repeated strings are stored as integer
codes, and distinct strings share one buffer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vajra_py.runtime.records.arrow_arrays import arrow_array, call
from vajra_py.runtime.support.clock import TICKS_PER_SECOND

# Gaps are merged when the number of gaps added since the last merge reaches the larger of this number and half of the
# number of gaps after the last merge.
_MERGE_ROWS = 1 << 20


class NameColumn:
    """Integer codes of distinct strings (or tuples of strings), numbered in order of first use."""

    __slots__ = ("_codes", "_of_lists")

    def __init__(self, *, of_lists: bool = False) -> None:
        self._codes: dict[Any, int] = {}
        self._of_lists = of_lists

    def code(self, name: Any) -> int:
        """Return the code of this string; its first use assigns a new code."""
        code = self._codes.get(name)
        if code is None:
            code = self._codes[name] = len(self._codes)
        return code

    def codes(self, names: Sequence[Any]) -> list[int]:
        """Return the codes of these strings."""
        for name in dict.fromkeys(names):
            self.code(name)
        return list(map(self._codes.__getitem__, names))

    def ranks(self) -> NDArray[np.int64]:
        """Return the alphabetical rank of each string, indexed by its code."""
        ranks = np.empty(len(self._codes), dtype=np.int64)
        for rank, name in enumerate(sorted(self._codes)):
            ranks[self._codes[name]] = rank
        return ranks

    def take(self, codes: NDArray[Any]) -> Any:
        """Return the strings that these codes stand for, as an Arrow array."""
        import pyarrow as pa

        kind = pa.list_(pa.string()) if self._of_lists else pa.string()
        return call("take", arrow_array(list(self._codes), kind), arrow_array(codes))


class TextColumn:
    """Column of mostly distinct strings, stored as UTF-8 in one buffer."""

    __slots__ = ("_bytes", "_ends")

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._ends = array("q", [0])

    def append(self, text: str) -> None:
        """Append one string."""
        self._bytes += text.encode()
        self._ends.append(len(self._bytes))

    def take(self, texts: Any) -> None:
        """Append the strings of an Arrow column."""
        import pyarrow as pa

        given = texts.cast(pa.large_string()).combine_chunks()
        ends = np.frombuffer(given.buffers()[1], dtype=np.int64)[given.offset : given.offset + len(given) + 1]
        start = len(self._bytes) - ends[:1]
        self._bytes += memoryview(given.buffers()[2] or b"")[ends[0] : ends[-1]]
        self._ends.frombytes((ends[1:] + start).tobytes())

    def all(self) -> Any:
        """Return all strings as an Arrow array with 64-bit offsets."""
        import pyarrow as pa

        buffers = [pa.py_buffer(self._ends.tobytes()), pa.py_buffer(bytes(self._bytes))]
        return pa.LargeStringArray.from_buffers(len(self._ends) - 1, *buffers)


class PackedRows:
    """Rows of numbers packed into a byte buffer; `fields` are (name, struct format character) pairs."""

    __slots__ = ("_buffer", "_dtype", "_struct")

    def __init__(self, fields: tuple[tuple[str, str], ...]) -> None:
        self._struct = Struct("<" + "".join(code for _, code in fields))
        self._dtype = np.dtype(
            [(name, "<" + {"q": "i8", "i": "i4", "b": "i1", "d": "f8"}[code]) for name, code in fields]
        )
        self._buffer = bytearray()

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._buffer) // self._struct.size

    def append(self, *values: float) -> None:
        """Append one row; the values are in the order of the fields."""
        self._buffer += self._struct.pack(*values)

    def extend(self, num_rows: int, **columns: Any) -> None:
        """Append `num_rows` rows. Each column is an array with one value per row, or one value for all rows."""
        rows = np.empty(num_rows, dtype=self._dtype)
        for name, values in columns.items():
            rows[name] = values
        self._buffer += rows.tobytes()

    def column(self, name: str) -> NDArray[Any]:
        """Return one column as a copy; a view would keep the buffer from growing."""
        return np.frombuffer(self._buffer, dtype=self._dtype)[name].copy()

    def rows(self, chosen: slice | NDArray[np.int64]) -> NDArray[Any]:
        """Return a copy of these rows as a structured array."""
        # Rows are copied faster as bytes than as structures.
        rows = np.frombuffer(self._buffer, dtype=np.uint8).reshape(-1, self._struct.size)
        found = rows[chosen].copy() if isinstance(chosen, slice) else rows.take(chosen, axis=0)
        return found.view(self._dtype)[:, 0]


class GapList:
    """Gaps between tokens of one replicaset and SLO class. Callers keep a reference to this list, so that adding a gap
    needs no lookup.
    """

    __slots__ = ("_gaps", "_logs", "_merge_at", "_num_merged", "_single", "_weights")

    def __init__(self) -> None:
        self._gaps = array("d")
        self._weights = array("q")
        self._single = array("d")
        """Gaps of weight 1 that are not merged yet."""
        self._logs: dict[int, _LogGaps] = {}
        """Gaps from logs shared by several requests, keyed by the log's `id`."""
        self._merge_at = _MERGE_ROWS
        self._num_merged = 0
        """Length of `_gaps` after the last merge; entries of `_gaps` from this index on are not merged yet."""

    def add(self, gap_s: float, weight: int) -> None:
        """Add a gap of `gap_s` seconds seen by `weight` requests."""
        self._gaps.append(gap_s)
        self._weights.append(weight)
        self._merge_when_due()

    def extend(self, gaps_s: NDArray[np.float64]) -> None:
        """Add gaps in seconds, each of weight 1; duplicates are allowed."""
        self._single.frombytes(gaps_s.tobytes())
        self._merge_when_due()

    def extend_weighted(self, gaps_s: NDArray[np.float64], weights: NDArray[np.int64]) -> None:
        """Add gaps in seconds with their weights."""
        self._gaps.frombytes(gaps_s.tobytes())
        self._weights.frombytes(weights.tobytes())
        self._merge_when_due()

    def extend_from_log(self, log: array[int], first: int, end: int) -> None:
        """Add, with weight 1, the gaps between consecutive ticks at positions `first` to `end - 1` of a log shared with
        other requests.
        """
        found = self._logs.get(id(log))
        if found is None:
            found = self._logs[id(log)] = _LogGaps(log)
        found.firsts.append(first)
        found.lasts.append(end - 1)

    def _merge_when_due(self) -> None:
        if len(self._gaps) + len(self._single) >= self._merge_at:
            self.merged()

    def merged(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the distinct gaps in ascending order, in seconds, and their weights. Gaps of weight 0 are left out.
        The merged form replaces the stored gaps.
        """
        if not self._single and not self._logs and self._num_merged == len(self._gaps):
            return np.array(self._gaps, dtype=np.float64), np.array(self._weights, dtype=np.int64)
        gaps, weights = self._merge()
        self._gaps, self._weights = array("d", gaps.tobytes()), array("q", weights.tobytes())
        self._single, self._logs = array("d"), {}
        self._num_merged = len(gaps)
        self._merge_at = len(gaps) + max(_MERGE_ROWS, len(gaps) // 2)
        return gaps, weights

    def _merge(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        # A plain sort is many times as fast as the argsort below, so gaps of weight 1 are sorted and counted first.
        single = np.sort(np.array(self._single, dtype=np.float64))
        firsts = _firsts(single)
        shared = [log.weighted() for log in self._logs.values()]
        gaps = np.concatenate((np.array(self._gaps, dtype=np.float64), single[firsts], *(one[0] for one in shared)))
        repeats = np.diff(firsts, append=single.size)
        weights = np.concatenate((np.array(self._weights, dtype=np.int64), repeats, *(one[1] for one in shared)))
        gaps, weights = gaps[weights > 0], weights[weights > 0]
        if not gaps.size:
            return gaps, weights
        order = np.argsort(gaps, kind="stable")
        gaps, weights = gaps[order], weights[order]
        firsts = _firsts(gaps)
        return gaps[firsts], np.add.reduceat(weights, firsts)


class _LogGaps:
    """Log of ticks at which tokens were received, and for each request the range of log positions of the tokens that it
    received. The weights of the gaps between the log's ticks are computed on demand.
    """

    __slots__ = ("_log", "firsts", "lasts")

    def __init__(self, log: array[int]) -> None:
        self._log = log
        self.firsts = array("q")
        self.lasts = array("q")

    def weighted(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the log's gaps in seconds and the number of requests that saw each gap, which may be 0."""
        firsts, lasts = np.array(self.firsts), np.array(self.lasts)
        begin, last = int(firsts.min()), int(lasts.max())
        size = last - begin + 1
        changes = np.bincount(firsts - begin, minlength=size) - np.bincount(lasts - begin, minlength=size)
        ticks = np.frombuffer(self._log, dtype=np.int64)[begin : last + 1]
        return np.diff(ticks / TICKS_PER_SECOND), np.cumsum(changes)[:-1]


def _firsts(ordered: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the start index of each distinct value of a sorted array."""
    return np.flatnonzero(np.diff(ordered, prepend=-np.inf))
