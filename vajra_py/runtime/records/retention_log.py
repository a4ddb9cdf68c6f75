"""Log of retention: one JSON line for each pin, for each end of a pin, and for the blocks that a retention policy
evicts at one time.

`{"at": seconds, "replicaset": …, "replica_id": …}` with one of `"pinned": name, "request_id": …, "until": seconds`,
`"unpinned": name, "why": "released" | "expired" | "forced"`, or `"evicted": [[request, depth], …]`: the request that
used each block last, and the number of blocks before it in its chain. Lines are in order of time; the same run gives
the same bytes. Without pins and evictions there is no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from vajra_py.contract import CachedBlock, ReplicaId, RequestView
from vajra_py.contract.observer import Observer, PinEnd
from vajra_py.runtime.records.decision_log import open_binary
from vajra_py.runtime.records.json_lines import JsonLinesFile, read_rows

RETENTION_FILE = "retention.jsonl.gz"


class RetentionLog(Observer):
    """Writes `retention.jsonl.gz` during a run."""

    wants_step_ends = False

    def __init__(self, path: Path, open_file: Callable[[Path], BinaryIO] = open_binary) -> None:
        self._path = path
        self._open = open_file
        self._file: JsonLinesFile | None = None
        self._evicted: list[tuple[str, int]] = []
        self._evicted_at: tuple[float, str, ReplicaId] | None = None

    def on_pinned(
        self, replicaset: str, replica_id: ReplicaId, name: str, request: RequestView, until: float, now: float
    ) -> None:
        """Write the line of a pin."""
        self._write(now, replicaset, replica_id, pinned=name, request_id=request.request_id, until=until)

    def on_unpinned(self, replicaset: str, replica_id: ReplicaId, name: str, why: PinEnd, now: float) -> None:
        """Write the line of a pin's end."""
        self._write(now, replicaset, replica_id, unpinned=name, why=why.value)

    def on_evicted(self, replicaset: str, replica_id: ReplicaId, block: CachedBlock, now: float) -> None:
        """Collect the block; blocks evicted at the same time share one line."""
        if self._evicted_at != (now, replicaset, replica_id):
            self._end_evictions()
            self._evicted_at = (now, replicaset, replica_id)
        self._evicted.append((block.request.request_id, block.depth))

    def flush(self) -> None:
        """Flush every line so far to the operating system."""
        self._end_evictions()
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Finish the file."""
        self._end_evictions()
        if self._file is not None:
            self._file.close()

    def _end_evictions(self) -> None:
        if self._evicted_at is not None:
            where, evicted = self._evicted_at, self._evicted
            self._evicted_at, self._evicted = None, []
            self._write(*where, evicted=evicted)

    def _write(self, at: float, replicaset: str, replica_id: ReplicaId, **what: Any) -> None:
        self._end_evictions()
        if self._file is None:
            self._file = JsonLinesFile(self._path, self._open)
        self._file.write({"at": at, "replicaset": replicaset, "replica_id": replica_id, **what})


def read_retention(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log; nothing if there is no file. Raises `OSError`, `EOFError` or `ValueError` if the file
    is broken.
    """
    if not path.exists():
        return
    yield from read_rows(path)
