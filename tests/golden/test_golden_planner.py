"""Recorded decisions of Dynamo's planner: what they cover, and that the comparison notices a difference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden.readers import planner
from tests.golden.readers.trace import read_json


@pytest.fixture(scope="session")
def cases(recorded: Callable[[str], Path]) -> list[dict[str, Any]]:
    return [case for _, case in read_json(recorded("planner_dynamo/cases.jsonl.gz"))]


def test_recorded_cases_cover_targets_modes_and_reasons(cases: list[dict[str, Any]]) -> None:
    configs = [case["config"] for case in cases]
    assert {one["optimization_target"] for one in configs} == {"throughput", "latency", "load", "sla"}
    assert {one["mode"] for one in configs} == {"disagg", "prefill", "decode"}
    reasons = {tick["reasons"][0] for case in cases for tick in case["ticks"]}
    assert {"scale_up", "scale_down", "gpu_budget_guard_hold", "gpu_budget_reconcile"} <= reasons
    assert {"scale_down_refused_consolidation", "scale_down_capped_by_throughput", "scaling_in_progress"} <= reasons


@pytest.mark.parametrize("field", ["throughput_decision", "load_decision", "floor", "reasons", "estimates", "rps"])
def test_each_field_is_compared(cases: list[dict[str, Any]], field: str) -> None:
    case = next(case for case in cases if case["config"]["enable_throughput_scaling"] and len(case["ticks"]) > 3)
    case = json.loads(json.dumps(case))
    case["ticks"][2][field] = [7, 7, 7, 7][: len(case["ticks"][2][field] or (0, 0))]
    result = planner.compare("planner_dynamo", "changed", case)
    assert result.difference is not None
    assert (result.difference.step, result.difference.field) == ("2", field)
