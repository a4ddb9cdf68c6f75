"""Recorded selections of Dynamo's router: the comparison notices each kind of difference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden.readers import compare_folder
from tests.golden.readers.trace import read_json


def first_select(run: dict[str, Any], wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in run["ops"] if one["op"] == "select" and wanted(one))
    return found


def other_choice(run: dict[str, Any]) -> None:
    select = first_select(run, lambda one: len(one["argmin"]) < run["workers"])
    select["chosen"] = next(worker for worker in range(run["workers"]) if worker not in select["argmin"])
    select["cost_of_chosen"] = select["costs"][select["chosen"]]


def other_cost(run: dict[str, Any]) -> None:
    first_select(run, lambda one: True)["costs"][0] += 1e-6


def other_draw(run: dict[str, Any]) -> None:
    select = first_select(run, lambda one: len(one["argmin"]) < run["workers"])
    select["draws"][0][0] = next(worker for worker in range(run["workers"]) if worker not in select["argmin"])


def other_setting(run: dict[str, Any]) -> None:
    run["config"]["overlap_score_credit"] = 0.9


def lost_event(run: dict[str, Any]) -> None:
    run["ops"] = [one for one in run["ops"] if one["op"] != "prefill_complete"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (other_choice, ("chosen",)),
        (other_cost, ("costs",)),
        (other_draw, ("draws",)),
        (other_setting, ("costs", "argmin")),
        (lost_event, ("load",)),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_difference_is_noticed(recorded: Callable[[str], Path], tmp_path: Path, change: Any, field: Any) -> None:
    _, run = next(read_json(recorded("router_dynamo/selections.jsonl.gz")))
    change(run)
    (tmp_path / "changed.json").write_text(json.dumps(run))
    (result,) = compare_folder(tmp_path)
    assert result.difference is not None
    assert result.difference.field in field
