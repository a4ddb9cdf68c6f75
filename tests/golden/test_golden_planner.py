"""Recorded decisions of Dynamo's planner: what they cover, and that the comparison notices a difference."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from tests.golden.readers import planner


@pytest.fixture(scope="session")
def cases(recorded_cases: Callable[[str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return recorded_cases("planner_dynamo/cases.jsonl.gz")


def test_recorded_cases_cover_targets_modes_and_reasons(cases: list[dict[str, Any]]) -> None:
    configs = [case["config"] for case in cases]
    assert {one["optimization_target"] for one in configs} == {"throughput", "latency", "load", "sla"}
    assert {one["mode"] for one in configs} == {"disagg", "prefill", "decode"}
    reasons = {tick["reasons"][0] for case in cases for tick in case["ticks"]}
    assert {"scale_up", "scale_down", "gpu_budget_guard_hold", "gpu_budget_reconcile"} <= reasons
    assert {"scale_down_refused_consolidation", "scale_down_capped_by_throughput", "scaling_in_progress"} <= reasons


@pytest.mark.parametrize("field", ["throughput_decision", "load_decision", "floor", "reasons", "estimates", "rps"])
def test_each_field_is_compared(cases: list[dict[str, Any]], field: str) -> None:
    case = deepcopy(
        next(case for case in cases if case["config"]["enable_throughput_scaling"] and len(case["ticks"]) > 3)
    )
    case["ticks"][2][field] = [7, 7, 7, 7][: len(case["ticks"][2][field] or (0, 0))]
    result = planner.compare("planner_dynamo", "changed", case)
    assert result.difference is not None
    assert (result.difference.step, result.difference.field) == ("2", field)
