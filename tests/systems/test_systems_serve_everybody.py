"""Does every policy that follows another system serve everyone, whatever the replica looks like, without losing a block?"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_policies.systems import minivllm, nano_vllm, nano_vllm_rs, orca, vllm_v1
from vajra_py.contract import PolicySpec
from vajra_py.contract.observer import EndReason
from vajra_py.latency import AffineModel
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.testing.conformance import check_policy
from vajra_py.testing.harness import Harness, HarnessOptions, PolicySource
from vajra_py.workload.request import PromptContent, RequestSpec

POLICIES: list[PolicySpec] = [vllm_v1.SPEC, nano_vllm.SPEC, minivllm.SPEC, nano_vllm_rs.SPEC, orca.SPEC]
BATCHERS: list[tuple[str, dict[str, Any]]] = [
    ("vllm_v1", {}),
    ("vllm_v1", {"victim": "lowest_priority", "long_prefill_threshold_tokens": 9, "reserve_full_prompt": False}),
    ("vllm_v1", {"victim": "lowest_priority", "prefill_interval_steps": 4, "watermark_fraction": 0.2}),
    ("vllm_v1", {"chunked_prefill": False, "max_num_active_requests": 2}),
    ("nano_vllm", {"prefill": "whole", "prefill_budget_tokens": 130}),
    ("nano_vllm", {"prefill": "chunk_first", "prefill_budget_tokens": 13}),
    ("minivllm", {}),
    ("nano_vllm_rs", {"prefill_budget_tokens": 40, "chunk_size": 16}),
    ("nano_vllm_rs", {"preemption": False, "chunked_prefill": False, "prefill_budget_tokens": 150}),
    ("orca", {}),
]
PRIORITIZERS: list[PolicySource] = [("fcfs", {"preempted": "first"}), "fcfs", "priority"]

CACHES = [
    None,
    PrefixCacheOptions(),
    PrefixCacheOptions(reuse_order="fifo", duplicates="keep_last"),
    PrefixCacheOptions(reuse_order="fifo", release_order="head_first", retain_freed=False, duplicates="keep_last"),
]

requests: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    gap_s=st.sampled_from([0.0, 0.0, 0.001, 0.02, 0.3]),
    num_prompt_tokens=st.integers(1, 120),
    num_output_tokens=st.integers(1, 40),
    priority=st.integers(-1, 1),
    num_shared_tokens=st.sampled_from([0, 0, 16, 40]),
)


@st.composite
def options(draw: st.DrawFn) -> HarnessOptions:
    return HarnessOptions(
        num_blocks=draw(st.integers(11, 30)),
        max_batch_size=draw(st.sampled_from([1, 3, 16])),
        max_batch_tokens=draw(st.sampled_from([None, 5, 40, 160])),
        pipeline_stages=draw(st.sampled_from([1, 1, 1, 2])),
        host_blocks=draw(st.sampled_from([0, 8, 60])),
        bytes_per_block=1,
        watermark_blocks=draw(st.sampled_from([0, 0, 1])),
        reserve_prompt=draw(st.booleans()),
        prefix_cache=draw(st.sampled_from(CACHES)),
        latency=AffineModel(0.005, 0.0001, per_prefill_pair_s=1e-6, per_swap_byte_s=1e-5),
    )


def spec_of(index: int, at: float, facts: dict[str, Any]) -> RequestSpec:
    num_prompt, num_output = facts["num_prompt_tokens"], facts["num_output_tokens"]
    shared = min(facts["num_shared_tokens"], num_prompt)
    segments = [segment for segment in (("common", shared), (f"own {index}", num_prompt - shared)) if segment[1]]
    return RequestSpec(
        f"r{index}",
        at,
        num_prompt,
        num_output,
        max_tokens=num_output,
        priority=facts["priority"],
        content=PromptContent(tuple(segments)),
    )


@settings(max_examples=150)
@given(
    st.sampled_from(PRIORITIZERS),
    st.sampled_from(BATCHERS),
    options(),
    st.lists(requests, min_size=1, max_size=12),
)
def test_everybody_is_served_or_refused_at_once(
    prioritizer: PolicySource,
    batcher: tuple[str, dict[str, Any]],
    sizes: HarnessOptions,
    arrivals: list[dict[str, Any]],
) -> None:
    harness = Harness(prioritizer, "round_robin", batcher, sizes)
    workload, at = [], 0.0
    for index, facts in enumerate(arrivals):
        at += facts["gap_s"]
        workload.append(spec_of(index, at, facts))
    harness.run(workload)  # raises if a request is never served, or a block is lost
    for spec in workload:
        request = harness.request(spec.request_id)
        if request.end_reason is EndReason.REJECTED:
            assert request.detail
            assert request.num_output_tokens == 0
        else:
            assert request.num_output_tokens == spec.num_output_tokens
    budget = sizes.max_batch_tokens or 1 << 60
    for step in harness.steps:
        assert 0 < len(step.entries) <= sizes.max_batch_size
        assert step.num_tokens <= budget


@pytest.mark.usefixtures("hash_seeds_at_once")
@pytest.mark.parametrize(("name", "params"), [one for one in BATCHERS if one[1]], ids=str)
def test_keeps_the_contract_with_other_parameters(name: str, params: dict[str, Any]) -> None:
    spec = next(one for one in POLICIES if one.name == name)
    generous = {**params, "prefill_budget_tokens": 4096} if "prefill_budget_tokens" in params else params
    check_policy(spec, generous)
