"""A journal of decisions is a file that is readable at once and closed at the end."""

from __future__ import annotations

from pathlib import Path

from vajra_py.runtime.records.decision_journal import Journal


def test_a_journal_closes_its_file_even_without_a_record(tmp_path: Path) -> None:
    file = (tmp_path / "journal").open("wb")
    Journal(file).close()
    assert file.closed
