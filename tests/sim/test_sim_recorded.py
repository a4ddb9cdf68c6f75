"""Do runs of the mechanism end as recorded in `recorded.json`? A change that is meant is recorded anew."""

from __future__ import annotations

import pytest

from tests.records import read_records
from tests.sim.recorded import COMMAND, FILE, run, subjects

RECORDS = read_records(FILE)


@pytest.mark.parametrize("subject", subjects())
def test_a_run_ends_as_recorded(subject: str) -> None:
    rows = RECORDS.get(subject, {})
    new = run(subject)
    assert sorted(rows) == sorted(new), f"not everything is recorded of {subject}: {COMMAND}"
    told = {key: old.difference(new[key]) for key, old in rows.items()}
    found = [f"{subject}, {key}: {text}" for key, text in told.items() if text]
    assert not found, "\n".join([*found, f"If that is meant: {COMMAND}"])
