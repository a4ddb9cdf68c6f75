"""Merge the decision logs of a run's parts into one log, with exactly the bytes of the undivided run's log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vajra_py.runtime.records.decision_journal import read_journal
from vajra_py.runtime.records.decision_log import DecisionFile
from vajra_py.runtime.records.decision_records import Records


def merge_decision_logs(parts: Sequence[Path], path: Path) -> None:
    """Write the log at `path` from the files that `PartialDecisionLog` wrote for each part. Needs memory for about
    twice the records that are written together.
    """
    file = DecisionFile(path)
    unread = [_PartReader(one) for one in parts]
    while unread:
        reader = min(unread, key=lambda one: one.tick)
        records = reader.read()
        if records is None:
            unread.remove(reader)
        elif file.take(records):
            file.write(complete_before=min(one.tick for one in unread))
    file.close()


class _PartReader:
    """Reads the records of a part in the order of recording."""

    def __init__(self, path: Path) -> None:
        self._batches = read_journal(path)
        self.tick = 0
        """Tick before which all records have been read."""

    def read(self) -> Records | None:
        """Return the next records; None at the end."""
        batch = next(self._batches, None)
        if batch is None:
            return None
        records = Records.of(batch)
        if len(records):
            self.tick = int(records.field("kept")[-1])
        return records
