"""Does every combination of policies serve every request, whatever the replicas look like, without losing a block?"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_py.latency import AffineModel
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.testing.harness import Harness, HarnessOptions, PolicySource
from vajra_py.workload.request import RequestSpec

PRIORITIZERS: list[PolicySource] = [
    "fcfs",
    ("fcfs", {"preempted": "first"}),
    ("edf", {"min_deadline_s": 0.01}),
    ("lrs", {"min_deadline_s": 0.01}),
    ("lars", {"use_request_deadlines": True}),
    "priority",
    "vtc",
    "least_counter_first",
    ("deficit_round_robin", {"quantum": 40.0}),
    "sjf",
    "srpt",
    "trail",
    ("ltr", {"starvation_s": 0.1, "boost_steps": 3}),
    "hrrn",
    ("skip_join_mlfq", {"promotion_steps": 10, "starvation_s": 0.1}),
    ("qoserve", {"default_ttft_s": 0.3}),
    ("lpm", {"fcfs_above": 3}),
    ("preflow", {"doubling_s": 0.1}),
    ("residual_sjf", {"max_wait_s": 0.1}),
    ("dlpm", {"quantum": 40.0}),
    ("las", {"half_life_s": 0.1}),
    "justitia",
    "continuum",
    "parrot",
    ("jitserve", {"refresh_steps": 3}),
    ("andes", {"horizon_s": 0.2}),
    ("qlm", {"granularity_s": 0.01, "default_slo_s": 0.1, "group_requests": 2}),
    "kairos",
    "equinox",
]
CHOOSERS: list[PolicySource] = [
    "round_robin",
    "pull",
    ("least_loaded", {"by": "tokens"}),
    "power_of_two",
    "random",
    "prefix_affinity",
    "lmetric",
    "consistent_hashing",
    "mooncake_conductor",
    ("d2lpm", {"quantum": 40.0}),
    ("polyserve", {"tiers_s": [0.012, 0.03]}),
    ("dynaserve", {"min_part_tokens": 4}),
    ("ascendra", {"margin_s": 0.01}),
    ("cascadeinfer", {"interval_s": 0.02, "plan_s": 0.1}),
    ("dlora_migration", {"interval_s": 0.05, "more_requests": 1}),
]
BATCHERS: list[tuple[str, dict[str, Any]]] = [
    ("fixed_chunk", {"chunk_size": 48}),
    ("fixed_chunk", {"chunk_size": 1}),
    ("dynamic_chunk", {"target_batch_time_s": 0.012}),
    ("dynamic_chunk", {"target_batch_time_s": 1e-6}),
    ("space_sharing", {"target_batch_time_s": 0.015, "long_seq_kv_cache_len_threshold": 64}),
    ("space_sharing", {"target_batch_time_s": 0.015, "class_shares": {"gold": 0.6, "iron": 0.4}}),
    ("preemptive", {"chunk_size": 48}),
    ("preemptive", {"chunk_size": 1}),
    ("slack_chunk", {"sizes": [8, 64]}),
    ("sliding_serve", {"min_chunk": 8, "max_chunk": 64, "grain": 8}),
    ("past_future", {"chunk_size": 48}),
    ("hygen", {"chunk_size": 48, "latency_budget_s": 0.008}),
    ("scorpio", {"chunk_size": 48, "rejects": False}),
    ("p_pas", {"chunk_size": 48, "capped_tokens": 8}),
    ("min_chunk_hold", {"chunk_size": 48, "min_chunk": 16}),
    ("prefill_waves", {"chunk_size": 48, "wave_slots": 2}),
    ("mixed_prefill_governor", {"chunk_size": 48, "mixed_tokens": 8, "max_wait_s": 0.05}),
    ("conserve", {"chunk_size": 48, "default_tpot_s": 0.008}),
    ("micro_requests", {"chunk_size": 48}),
    ("slos_serve", {"chunk_size": 48, "step_s": 0.008}),
    ("adaserve", {"chunk_size": 48, "budget_tokens": 12}),
    ("blendserve", {"chunk_size": 48}),
    ("chameleon", {"chunk_size": 48, "refresh_s": 0.05}),
    ("dlora", {"chunk_size": 48, "credit_bound": 2.0}),
]

requests: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    gap_s=st.sampled_from([0.0, 0.0, 0.001, 0.02, 0.3]),
    num_prompt_tokens=st.integers(1, 130),
    num_output_tokens=st.integers(1, 50),
    priority=st.integers(-1, 1),
    slo_class=st.sampled_from(["", "gold", "iron"]),
    deadline_s=st.sampled_from([None, 0.0, 0.1]),
    ttft_slo_s=st.sampled_from([None, 0.05]),
)


@st.composite
def options(draw: st.DrawFn) -> HarnessOptions:
    groups = draw(st.sampled_from([1, 1, 3]))
    return HarnessOptions(
        num_replicas=draw(st.sampled_from([1, 1, 3])),
        num_blocks=draw(st.integers(12, 30)) * groups,
        max_batch_size=draw(st.sampled_from([1, 3, 16])),
        max_batch_tokens=draw(st.sampled_from([None, 1, 40])),
        pipeline_stages=draw(st.sampled_from([1, 1, 3])),
        kv_parallel_groups=groups,
        kv_group_tokens=64 if groups > 1 else None,
        host_blocks=draw(st.sampled_from([8, 60])),
        bytes_per_block=1,
        watermark_blocks=draw(st.integers(0, 2)),
        reserve_prompt=draw(st.booleans()),
        prefix_cache=PrefixCacheOptions() if groups == 1 and draw(st.booleans()) else None,
        latency=AffineModel(0.005, 0.0001, per_prefill_pair_s=1e-6, per_swap_byte_s=1e-5),
    )


@settings(max_examples=100)
@given(
    st.sampled_from(PRIORITIZERS),
    st.sampled_from(CHOOSERS),
    st.sampled_from(BATCHERS),
    st.sampled_from(["recompute", "swap"]),
    options(),
    st.lists(requests, min_size=1, max_size=14),
)
def test_every_request_is_served(
    prioritizer: PolicySource,
    chooser: PolicySource,
    batcher: tuple[str, dict[str, Any]],
    preemption: str,
    sizes: HarnessOptions,
    arrivals: list[dict[str, Any]],
) -> None:
    name, params = batcher
    if name == "space_sharing" and prioritizer not in ("lrs", "edf"):
        prioritizer = "lrs"  # it needs slack
    harness = Harness(prioritizer, chooser, (name, {**params, "preemption": preemption}), sizes)
    workload, at = [], 0.0
    for index, facts in enumerate(arrivals):
        at += facts["gap_s"]
        workload.append(RequestSpec(f"r{index}", at, **{key: value for key, value in facts.items() if key != "gap_s"}))
    harness.run(workload)  # raises if a request is never served, or a block is lost
    for spec in workload:
        request = harness.request(spec.request_id)
        assert request.num_output_tokens == spec.num_output_tokens
    budget = sizes.max_batch_tokens or 1 << 60
    for step in harness.steps:
        assert 0 < len(step.entries) <= sizes.max_batch_size
        assert step.num_tokens <= budget
