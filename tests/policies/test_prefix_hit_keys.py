"""Do policies whose keys move with prefix hits decide as if all keys were read at each step?"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.policies.read_at_each_step import decisions
from vajra_py.contract import KeyMotion
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.workload.request import PromptContent, RequestSpec

POLICIES: dict[str, dict[str, Any]] = {
    "residual_sjf": {"max_wait_s": 0.4},
    "preflow": {"doubling_s": 0.3},
    "lpm": {"fcfs_above": 12},
    "dlpm": {"quantum": 60.0, "tenant_weights": {"t1": 3.0}},
}
WORLDS: dict[str, dict[str, Any]] = {
    "little memory": {"num_blocks": 40},
    "swap": {"num_blocks": 40, "host_blocks": 30},
    "two replicas": {"num_replicas": 2, "num_blocks": 50},
    "pipeline": {"pipeline_stages": 2},
}


def workload(seed: int) -> list[RequestSpec]:
    stream = random.Random(seed)
    specs, at = [], 0.0
    for index in range(60):
        at += stream.expovariate(40.0)
        tenant = stream.randrange(4)
        segments = [(f"system {tenant % 2}", stream.choice([16, 48, 80])), (f"own {index}", stream.randint(1, 60))]
        if stream.random() < 0.7:
            segments.insert(1, (f"document {tenant} {stream.randrange(3)}", stream.choice([20, 64, 120])))
        num_tokens = sum(length for _, length in segments)
        content = PromptContent(tuple(segments))
        specs.append(
            RequestSpec(f"r{index}", at, num_tokens, stream.randint(1, 30), tenant=f"t{tenant}", content=content)
        )
    return specs


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("batcher", ["preemptive", "fixed_chunk"])
@pytest.mark.parametrize("name", POLICIES)
def test_decisions_are_those_of_keys_that_are_read_at_each_step(name: str, batcher: str, world: str) -> None:
    options = {"num_blocks": 64, "max_model_len": 600, "prefix_cache": PrefixCacheOptions()} | WORLDS[world]
    declared, read = (
        decisions(name, POLICIES[name], KeyMotion.PREFIX_HITS, batcher, workload(len(world)), reads_all=all_, **options)
        for all_ in (False, True)
    )
    assert declared == read
