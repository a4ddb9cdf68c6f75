"""Do policies that name falls decide as if all keys were read at each step?"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.policies.read_at_each_step import decisions
from vajra_py.contract import KeyMotion
from vajra_py.workload.request import RequestSpec

POLICIES: dict[str, dict[str, Any]] = {
    "ltr": {"starvation_s": 0.4, "boost_steps": 4},
    "skip_join_mlfq": {"quantum_s": 0.02, "starvation_s": 0.3, "promotion_steps": 9},
    "jitserve": {"refresh_steps": 7},
    "qoserve": {"first_throughput": 1500.0, "decay": 0.6},
}


def workload(seed: int) -> list[RequestSpec]:
    stream = random.Random(seed)
    specs, at = [], 0.0
    for index in range(70):
        at += stream.expovariate(25.0)
        slos: dict[str, float] = {"ttft_slo_s": stream.choice([0.1, 0.4, 1.5])} if stream.random() < 0.8 else {}
        specs.append(RequestSpec(f"r{index}", at, stream.randint(5, 150), stream.randint(1, 30), **slos))
    return specs


@pytest.mark.parametrize("batcher", ["preemptive", "fixed_chunk"])
@pytest.mark.parametrize("name", POLICIES)
def test_decisions_are_those_of_keys_that_are_read_at_each_step(name: str, batcher: str) -> None:
    for seed in range(3):
        specs, sizes = workload(seed), {"num_blocks": 40, "max_model_len": 300}
        declared, read = (
            decisions(name, POLICIES[name], KeyMotion.NAMED_FALLS, batcher, specs, reads_all=all_, **sizes)
            for all_ in (False, True)
        )
        assert declared == read
        assert any(preempted for _, _, preempted in declared) or batcher == "fixed_chunk"
