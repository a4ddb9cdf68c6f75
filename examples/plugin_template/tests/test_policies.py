"""Tests of the contract and of the policies' decisions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from vajra_py.contract import PolicySpec
from vajra_py.testing.conformance import check_policy

from vajra_example_policies import vajra_policies
from vajra_example_policies.aging_shortest import AgingShortestConfig, AgingShortestPolicy
from vajra_example_policies.capped_chunk import CappedChunkConfig, CappedChunkPolicy
from vajra_example_policies.prefix_affinity import PrefixAffinityConfig, PrefixAffinityPolicy


@pytest.mark.parametrize("spec", vajra_policies(), ids=lambda spec: spec.name)
def test_keeps_the_contract(spec: PolicySpec) -> None:
    check_policy(spec)


OTHER_PARAMS: dict[str, dict[str, Any]] = {
    "example_aging_shortest": {"forgiven_tokens": 64, "default_ttft_slo_s": 0.5},
    "example_prefix_affinity": {"min_hit_fraction": 0.1, "max_kv_fraction": 1.0},
    "example_capped_chunk": {"chunk_tokens": 32, "capped_chunk_tokens": 1},
}


@pytest.mark.parametrize("spec", vajra_policies(), ids=lambda spec: spec.name)
def test_keeps_the_contract_with_other_parameters(spec: PolicySpec) -> None:
    check_policy(spec, OTHER_PARAMS[spec.name])


def waiting(num_tokens: int, arrived_at: float = 0.0, ttft_slo_s: float | None = None) -> Any:
    return SimpleNamespace(
        num_remaining_prompt_tokens=num_tokens,
        num_prompt_tokens=num_tokens,
        arrived_at=arrived_at,
        ttft_slo_s=ttft_slo_s,
    )


def test_short_prompts_go_first_until_long_ones_have_waited() -> None:
    policy = AgingShortestPolicy(AgingShortestConfig(forgiven_tokens=1000, default_ttft_slo_s=1.0))
    long = waiting(2000)
    assert policy.key(waiting(500), 0.0) < policy.key(long, 0.0)
    assert policy.key(long, 3.0) < policy.key(waiting(500, arrived_at=3.0), 3.0)


def test_a_tighter_slo_ages_faster() -> None:
    policy = AgingShortestPolicy(AgingShortestConfig())
    hurried, patient = waiting(1000, ttft_slo_s=0.5), waiting(1000, ttft_slo_s=30.0)
    assert policy.key(hurried, 0.0) == policy.key(patient, 0.0)
    assert policy.key(hurried, 1.0) < policy.key(patient, 1.0)


def replica(replica_id: int, free_blocks: int, hit_tokens: int = 0, is_up: bool = True) -> Any:
    return SimpleNamespace(
        replica_id=replica_id,
        free_blocks=free_blocks,
        num_blocks=100,
        num_pending_tokens=0,
        is_up=is_up,
        prefix_hit_tokens=lambda request: hit_tokens,
    )


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        ([replica(0, 90), replica(1, 40, hit_tokens=80)], 1),
        ([replica(0, 90), replica(1, 40, hit_tokens=30)], 0),
        ([replica(0, 90), replica(1, 5, hit_tokens=80)], 0),
        ([replica(0, 50), replica(1, 50)], 0),
        ([replica(0, 90, is_up=False), replica(1, 10)], 1),
        ([replica(0, 90, is_up=False)], None),
    ],
    ids=["cached", "cached too little", "memory nearly full", "tie", "down", "none is up"],
)
def test_routing(replicas: list[Any], expected: int | None) -> None:
    assert PrefixAffinityPolicy(PrefixAffinityConfig()).assign(waiting(100), replicas, 0.0) == expected


def test_the_cap_must_be_lower() -> None:
    with pytest.raises(ValidationError, match="caps nothing"):
        CappedChunkConfig(chunk_tokens=64, capped_chunk_tokens=128)


def test_a_lone_prompt_gets_the_large_chunk() -> None:
    policy = CappedChunkPolicy(CappedChunkConfig(chunk_tokens=512, capped_chunk_tokens=64))
    assert policy.solo_chunk_size(0, 1000) == 512
    assert policy.solo_chunk_size(512, 488) == 488
