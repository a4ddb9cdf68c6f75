"""`dynamo_planner` against recorded decisions of Dynamo's planner, and whether the comparison notices a difference."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.golden.readers import compare_folder, planner


@pytest.fixture(scope="session")
def cases(shared_dir: Path) -> list[dict[str, Any]]:
    path = shared_dir / "recorded" / "planner_dynamo" / "cases.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"recorded decisions absent: no file {path}")
    with gzip.open(path, "rt") as stream:
        return [json.loads(line) for line in stream]


def test_every_recorded_decision_is_reproduced(cases: list[dict[str, Any]], shared_dir: Path) -> None:
    results = list(compare_folder(shared_dir / "recorded" / "planner_dynamo"))
    assert len(results) == len(cases) == 100
    for result in results:
        told = result.difference.lines() if result.difference else []
        assert result.matches, "\n".join([result.name, *told])
    assert sum(result.num_compared for result in results) == sum(len(case["ticks"]) for case in cases)


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
