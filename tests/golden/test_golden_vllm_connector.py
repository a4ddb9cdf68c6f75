"""Compare a replica whose KV comes through a connector with recorded runs of vLLM's scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest

from tests.golden.readers import vllm_connector

RUNS = "vllm_connector/workloads.jsonl.gz"
NAMED = {
    "loads": 10,
    "loads by priority": 5,
    "loads in little memory": 1,
    "kept blocks": 12,
    "kept blocks and loads": 23,
    "failed loads are computed": 4,
    "failed loads end requests": 19,
}
"""Positions of the runs that are compared here; `make golden` compares all."""

Run = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def recorded_run(recorded_cases: Callable[[str], list[dict[str, Any]]]) -> Run:
    """Copy of a named run, to compare and to change."""
    runs = recorded_cases(RUNS)
    return lambda name: deepcopy(runs[NAMED[name]])


@pytest.mark.parametrize("name", NAMED)
def test_every_step_is_as_recorded(recorded_run: Run, name: str) -> None:
    trace = recorded_run(name)
    result = vllm_connector.compare("vllm_connector", name, trace)
    assert result.difference is None, "\n".join(result.difference.lines())
    assert result.num_compared == len(trace["steps"])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("failed loads are computed", {"kv_load_failure_policy": "fail"}),
        ("failed loads end requests", {"kv_load_failure_policy": "recompute"}),
        ("loads by priority", {"policy": "fcfs"}),
        ("loads in little memory", {"num_blocks": 77}),
        ("loads in little memory", {"watermark": 0.05}),
    ],
)
def test_other_rules_are_noticed(recorded_run: Run, name: str, change: Mapping[str, Any]) -> None:
    trace = recorded_run(name)
    (changed,) = change
    (trace["config"] if changed in trace["config"] else trace).update(change)
    assert vllm_connector.compare("vllm_connector", name, trace).difference is not None


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("loads", "asynchronous", False),
        ("loads", "none_until", 30),
        ("loads in little memory", "once", None),
        ("kept blocks", "send_steps", None),
    ],
)
def test_other_answers_of_the_connector_are_noticed(recorded_run: Run, name: str, key: str, value: Any) -> None:
    trace = recorded_run(name)
    for request in trace["requests"]:
        request["script"][key] = value if value is not None or key == "send_steps" else not request["script"][key]
    assert vllm_connector.compare("vllm_connector", name, trace).difference is not None


@pytest.mark.parametrize("field", ["connector", "status", "holding", "waiting", "connector_end", "delayed"])
def test_each_field_is_compared(recorded_run: Run, field: str) -> None:
    trace = recorded_run("kept blocks and loads")
    step = next(step for step in trace["steps"] if step.get(field))
    step[field] = step[field][1:]
    result = vllm_connector.compare("vllm_connector", "changed", trace)
    assert result.difference is not None
    assert (result.difference.step, result.difference.field) == (str(step["step"]), field)
