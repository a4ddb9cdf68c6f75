"""Runs in short, kept in files: a digest of what happened, and a few figures that say what is different."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias


class Record(NamedTuple):
    """A run in short."""

    digest: str
    """Digest of every decision, and of every request's ways and times."""
    steps: int
    preemptions: int
    end_s: float
    """End of everything, seconds, rounded."""

    def __str__(self) -> str:
        return f"{self.digest} {self.steps} {self.preemptions} {self.end_s}"

    @classmethod
    def read(cls, text: str) -> Record:
        """Return the record with this text."""
        digest, steps, preemptions, end_s = text.split()
        return cls(digest, int(steps), int(preemptions), float(end_s))

    def difference(self, new: Record) -> str | None:
        """Return what another run has otherwise, in words; None where nothing is."""
        if self == new:
            return None
        both = zip(self._fields[1:], self[1:], new[1:], strict=True)
        figures = [f"{name} {before} -> {now}" for name, before, now in both if before != now]
        return ", ".join(figures) or "the same figures, and another digest"


Records: TypeAlias = Mapping[str, Mapping[str, Record]]
"""Records by subject and run."""


def read_records(file: Path) -> dict[str, dict[str, Record]]:
    """Return the records of a file; none if there is no file."""
    data = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {subject: {key: Record.read(text) for key, text in rows.items()} for subject, rows in data.items()}


def write_records(file: Path, records: Records) -> None:
    """Write a file with a line for each run."""
    rows = {subject: {key: str(one) for key, one in runs.items()} for subject, runs in records.items()}
    file.write_text(json.dumps(rows, indent=0, sort_keys=True, separators=(",", ":")) + "\n", encoding="utf-8")
