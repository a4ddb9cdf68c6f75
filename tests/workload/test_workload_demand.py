"""What workloads ask for in the long run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vajra_py.workload import build_workload
from vajra_py.workload.config import SyntheticConfig
from vajra_py.workload.demand import demand_of
from vajra_py.workload.synthetic import named_streams

CHATS: dict[str, Any] = {
    "type": "synthetic",
    "arrivals": {"type": "poisson", "rate": 5},
    "num_requests": 100,
    "prompt_tokens": {"type": "uniform", "min": 100, "max": 300},
    "output_tokens": {"type": "constant", "value": 10},
}


def test_demand_is_that_of_the_distributions_however_few_requests_are_drawn() -> None:
    found = demand_of(CHATS)
    assert found is not None
    assert found.requests_per_s == pytest.approx(5, rel=0.02)
    assert found.prompt_tokens_per_request == pytest.approx(200, rel=0.01)
    assert found.gap_variation == pytest.approx(1, rel=0.03)
    assert demand_of(CHATS | {"num_requests": 7, "first": 3, "start_s": 1.0}) == found


def test_demand_agrees_with_a_long_draw() -> None:
    drawn = build_workload(
        SyntheticConfig.model_validate(CHATS | {"num_requests": 40_000}), named_streams(3), Path()
    ).columns
    found = demand_of(CHATS)
    assert found is not None
    assert found.prompt_tokens_per_s == pytest.approx(np.sum(drawn.num_prompt_tokens) / drawn.arrived_at[-1], rel=0.03)


def test_the_pace_and_limits_that_are_asked_for_count() -> None:
    faster, limited = demand_of(CHATS | {"rate": 8}), demand_of(CHATS | {"max_prompt_tokens": 200})
    assert faster is not None
    assert limited is not None
    assert faster.requests_per_s == pytest.approx(8, rel=1e-3)
    assert limited.prompt_tokens_per_request == pytest.approx(150, rel=0.01)


def test_merged_workloads_add_up() -> None:
    documents = CHATS | {
        "arrivals": {"type": "poisson", "rate": 1},
        "prompt_tokens": {"type": "constant", "value": 2000},
    }
    merged = {"type": "merge", "workloads": [CHATS | {"name": "chats"}, documents | {"name": "documents"}]}
    both, paced = demand_of(merged), demand_of(merged | {"rate": 12})
    assert both is not None
    assert paced is not None
    assert both.requests_per_s == pytest.approx(6, rel=0.02)
    assert both.prompt_tokens_per_s == pytest.approx(3000, rel=0.02)
    assert paced.prompt_tokens_per_s == pytest.approx(6000, rel=0.02)
    closed = CHATS | {"name": "closed", "arrivals": {"type": "closed_loop", "clients": 2}}
    assert demand_of(merged | {"workloads": [*merged["workloads"], closed]}) is None


@pytest.mark.parametrize(
    "workload",
    [
        {"type": "azure", "path": "nowhere.csv"},
        CHATS | {"arrivals": {"type": "closed_loop", "clients": 2}},
        CHATS | {"arrivals": {"type": "at_once"}},
        CHATS | {"arrivals": {"type": "piecewise", "pieces": [{"duration_s": 10, "rate": 5}]}, "duration_s": 10},
        {"type": "of another version"},
    ],
)
def test_what_has_no_long_run_says_so(workload: dict[str, Any]) -> None:
    assert demand_of(workload) is None
