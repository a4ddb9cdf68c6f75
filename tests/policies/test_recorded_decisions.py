"""Does every built-in policy decide as it is recorded in `recorded.json`? A change that is meant is recorded anew."""

from __future__ import annotations

import pytest

from tests.policies.recorded import COMMAND, FILE, Subject, changes, differences, subjects
from tests.records import read_records

SUBJECTS = subjects()
RECORDS = read_records(FILE)


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_it_decides_as_recorded(subject: Subject) -> None:
    rows = RECORDS.get(str(subject), {})
    assert rows, f"nothing is recorded of {subject}. If it is new: {COMMAND}"
    found = differences(subject, rows)
    assert not found, "\n".join([*found, f"If that is meant: {COMMAND}"])


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_each_parameter_is_recorded_with_another_value(subject: Subject) -> None:
    changed = {word.partition("=")[0] for key in RECORDS.get(str(subject), {}) for word in key.split(" ")[1:]}
    possible = {
        name for ways in changes(subject) for change in ways for name, value in change.items() if value is not None
    }
    left = sorted(possible - changed - set(subject.fitting))
    assert not left, f"{subject}: no run is recorded with another {', '.join(left)}. Record it: {COMMAND}"


def test_nothing_is_recorded_of_policies_that_are_gone() -> None:
    assert sorted(RECORDS) == sorted(map(str, SUBJECTS)), COMMAND
