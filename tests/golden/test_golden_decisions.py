"""Policies against recorded decisions of the systems that they come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.golden.readers import compare_folder

RECORDED = {
    "evict_sglang": (56, 6909),
    "evict_vllm_offload": (50, 11092),
    "planner_dynamo": (100, 969),
    "router_dynamo": (30, 720),
    "thunderagent": (30, 35074),
}
"""Runs of each system, and decisions in all of them."""


@pytest.mark.parametrize("system", RECORDED)
def test_every_recorded_decision_is_reproduced(recorded: Callable[[str], Path], system: str) -> None:
    results = list(compare_folder(recorded(system)))
    for result in results:
        told = result.difference.lines() if result.difference else []
        assert result.matches, "\n".join([f"{result.system}/{result.name}", *told])
    assert (len(results), sum(result.num_compared for result in results)) == RECORDED[system]
