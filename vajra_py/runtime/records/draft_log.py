"""Log of drafts: one JSON line for each request with drafts, written when it ends.

`{"request_id": …, "places": […], "proposed": […], "accepted": […]}`: for each verification, the number of output tokens
before it, the number of drafts verified, and the number that became output. Without drafts there is no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from vajra_py.contract import RequestView
from vajra_py.contract.observer import EndReason, Observer
from vajra_py.runtime.records.decision_log import open_binary
from vajra_py.runtime.records.json_lines import JsonLinesFile, read_rows

if TYPE_CHECKING:
    from vajra_py.runtime.requests.request import Request

DRAFTS_FILE = "drafts.jsonl.gz"


class DraftLog(Observer):
    """Writes `drafts.jsonl.gz` during a run."""

    wants_step_ends = False

    def __init__(self, path: Path, open_file: Callable[[Path], BinaryIO] = open_binary) -> None:
        self._path = path
        self._open = open_file
        self._file: JsonLinesFile | None = None

    def on_ended(self, request: RequestView, reason: EndReason, detail: str, now: float) -> None:
        """Write a line for a request that had drafts."""
        log = cast("Request", request).draft_log
        if not log:
            return
        if self._file is None:
            self._file = JsonLinesFile(self._path, self._open)
        places, proposed, accepted = zip(*log, strict=True)
        row = {"request_id": request.request_id, "places": places, "proposed": proposed, "accepted": accepted}
        self._file.write(row)

    def flush(self) -> None:
        """Flush every line so far to the operating system."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Finish the file."""
        if self._file is not None:
            self._file.close()


def read_drafts(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log; nothing if there is no file. Raises `OSError`, `EOFError` or `ValueError` if the file
    is broken.
    """
    if not path.exists():
        return
    yield from read_rows(path)
