"""Log of an admission policy's decisions: one JSON line each time a request is degraded, refused, deferred, or accepted
after a deferral.

`{"at": seconds, "index": …, "request_id": …, "policy": …, "decision": "accept" | "refuse" | "defer", …}`, with the
fields that the decision sets. Lines are in the order of the decisions. The same run gives the same bytes. Runs without
an admission policy have no such file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from vajra_py.contract import Accept, AdmissionDecision, Defer, Refuse, RequestView
from vajra_py.contract.observer import Observer
from vajra_py.runtime.records.json_lines import JsonLinesFile, read_rows

ADMISSIONS_FILE = "admissions.jsonl.gz"
_NAMES = {Accept: "accept", Refuse: "refuse", Defer: "defer"}


class AdmissionLog(JsonLinesFile, Observer):
    """Writes `admissions.jsonl.gz` during a run."""

    wants_step_ends = False

    def on_admission_decision(self, request: RequestView, policy: str, decision: AdmissionDecision, now: float) -> None:
        """Write the line of a decision."""
        values = {one.name: getattr(decision, one.name) for one in fields(decision)}
        row = {
            "at": now,
            "index": request.index,
            "request_id": request.request_id,
            "policy": policy,
            "decision": _NAMES[type(decision)],
            **{
                name: _plain(value)
                for name, value in values.items()
                if value is not None and value is not False and value != ""
            },
        }
        self.write(row)


def _plain(value: Any) -> Any:
    """Return a number of any library as a Python number."""
    return value.item() if hasattr(value, "item") else value


def read_admissions(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the decisions of a log; nothing if there is no file. Raises `OSError`, `EOFError` or `ValueError` if the
    file is broken.
    """
    if not path.exists():
        return
    yield from read_rows(path)
