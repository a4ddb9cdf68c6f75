"""Recorded decisions of Dynamo's program-level router: what they cover, and that the comparison notices a difference."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from tests.golden.readers import thunderagent


@pytest.fixture(scope="session")
def cases(recorded_cases: Callable[[str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return recorded_cases("thunderagent/runs.jsonl.gz")


def test_recorded_runs_pause_resume_force_and_lose(cases: list[dict[str, Any]]) -> None:
    ops = [op for case in cases for op in case["ops"]]
    assert {"tick", "forced_resume", "replica_gone", "end_program"} <= {op["op"] for op in ops}
    rows = [row for op in ops for row in op.get("state", ())]
    assert {row[1] for row in rows} == {"active", "paused"}
    assert any(row[6] for row in rows)
    assert {row[2] for op in ops for row in op.get("admitted", ())} >= {0.0, 1.0, -2.0}


@pytest.mark.parametrize(("column", "other"), [(1, "paused"), (2, "acting"), (4, 1), (5, 99), (6, 7), (7, 77.0)])
def test_each_column_of_a_state_is_compared(cases: list[dict[str, Any]], column: int, other: Any) -> None:
    case = deepcopy(cases[0])
    place = next(place for place, op in enumerate(case["ops"]) if op["op"] == "tick")
    row = next(row for row in case["ops"][place]["state"] if row[column] != other)
    row[column] = other
    result = thunderagent.compare("thunderagent", "changed", case)
    assert result.difference is not None
    assert (result.difference.step, result.difference.field) == (str(place), "state")
