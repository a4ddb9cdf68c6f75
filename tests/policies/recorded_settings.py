"""Worlds of each kind of policy, and what single policies need."""

from __future__ import annotations

from tests.policies.recorded_worlds import ADAPTERS, DEEP, World, merged, of_scenario
from vajra_py.contract import RoutingPartKind
from vajra_py.testing import retention, scalers, scenarios

_FEW: DEEP = {"replica": {"max_batch_size": 4, "memory": {"num_blocks": 24}}}
_SHORT: DEEP = {"replica": {"memory": {"num_blocks": 24}}}
_LONG: DEEP = {"replica": {"max_batch_size": 12, "max_batch_tokens": None, "memory": {"num_blocks": 220}}}
_UNKNOWN: DEEP = {"backend": {"simulator": {"output_length": {"type": "history", "by_tenant": True}}}}
_STAGES: DEEP = {"backend": {"simulator": {"latency": {"num_stages": 2}}}}


def without_lengths(world: World) -> World:
    """Return the world with policies that know nothing of the lengths of outputs."""
    return World(world.requests, merged(world.settings, _UNKNOWN))


def _worlds(copies: int, more: DEEP) -> dict[str, World]:
    """Chats with SLOs that expire, prefixes in short memory, programs with tools, and long prompts."""
    return {
        "chats": World(of_scenario(scenarios.LEAVING, 2 + copies), merged(_FEW, more)),
        "memory": World(of_scenario(scenarios.SHARED_PREFIXES, 2 + copies), merged(_SHORT, more)),
        "programs": World(of_scenario(scenarios.PROGRAMS, 2 + copies), merged(_FEW, more)),
        "long": World(of_scenario(scenarios.LONG_AND_SHORT, 3 + copies), merged(_LONG, more)),
    }


_ONE = _worlds(0, {})
CHATS, MEMORY, PROGRAMS = (_ONE[name] for name in ("chats", "memory", "programs"))
_THREE = _worlds(2, {"num_replicas": 3})
POOLS: DEEP = {
    "pools": {"prefill": {"num_replicas": 2}, "decode": {"num_replicas": 2}},
    "hand_off": {"kv_bytes_per_token": 100_000},
    "links": {"bandwidth_gb_s": 1.0},
}
_ROLES: DEEP = merged(
    {key: value for key, value in POOLS.items() if key != "pools"},
    {"pools": {"prefill": {"num_replicas": 2}, "mixed": {"num_replicas": 2}}},
)
_SIZES: DEEP = {"pools": {"small": {"role": "mixed"}, "large": {"role": "mixed", "num_replicas": 2}}}
ADAPTED: DEEP = {
    "replica": {
        "adapters": {
            "max_loras": 2,
            "unmerged_factor": 1.5,
            "switch_s": 0.01,
            "models": [{"name": one, "num_blocks": 1, "load_s": 0.02} for one in ADAPTERS],
        }
    }
}
DRAFTED: DEEP = {
    "replica": {"draft": {"num_tokens": 2, "max_tokens": 4}},
    "backend": {"simulator": {"drafts": {"rate": 0.6}}},
}
_ELASTIC = {"max_replicas": 4, "startup_s": 0.5}
_SLOW: DEEP = {"backend": {"simulator": {"latency": {"base_s": 0.02, "per_token_s": 0.002}}}}
_PRESET: DEEP = {"replica": {"max_model_len": 2000}}

PROFILES: DEEP = {"prefill": {"scorers": ["queue-scorer"]}, "decode": {"scorers": ["kv-cache-utilization-scorer"]}}
"""Settings of a router that chooses for prompts and decodes apart."""

WITH_HAND_OFF = ("distserve", "splitwise", "mooncake", "dynaserve")
"""Presets whose requests go from one replica to another."""

WORLDS: dict[str, dict[str, World]] = {
    "request_prioritizer": _ONE,
    "replica_scheduler": {
        **_ONE,
        "stages": World(of_scenario(scenarios.PIPELINED, 2), merged(_SHORT, _STAGES)),
    },
    "adaserve": _ONE,
    "endpoint_picker": {**_THREE, "pools": World(of_scenario(scenarios.LEAVING, 4), merged(_FEW, POOLS))},
    "splitwise_mixed_pool": _worlds(
        2,
        {
            "pools": {one: {"role": "mixed", "num_replicas": 2} for one in ("prompt", "token")},
            "hand_off": {"preset": "splitwise", "kv_bytes_per_token": 100_000},
        },
    ),
    "mooncake": {
        **_worlds(1, {"num_replicas": 2}),
        "pools": World(of_scenario(scenarios.LEAVING, 4), merged(_FEW, POOLS)),
    },
    "replicaset_scheduler": _THREE,
    "admission": _worlds(1, {"num_replicas": 2}),
    "retention": {
        "sessions": World(retention._conversations, retention.SITUATIONS["short memory"]),
        "memory": _ONE["memory"],
        "programs": _ONE["programs"],
    },
    "scaling": {
        "waves": World(scalers._load, {"num_replicas": 2, "elastic": _ELASTIC, **_SLOW}),
        "split": World(
            scalers._load,
            merged(POOLS, _SLOW, {"pools": {one: {"elastic": _ELASTIC} for one in ("prefill", "decode")}}),
        ),
    },
    "preset": {
        "chats": World(of_scenario(scenarios.LEAVING, 3), merged(_PRESET, {"replica": {"memory": {"num_blocks": 30}}})),
        "memory": World(
            of_scenario(scenarios.SHARED_PREFIXES, 3), merged(_PRESET, {"replica": {"memory": {"num_blocks": 30}}})
        ),
    },
    **{one.value: _THREE for one in RoutingPartKind},
    "decider": _worlds(2, POOLS),
    **{one: _worlds(2, _ROLES) for one in ("decode-filter", "prefill-filter")},
    **{one: _worlds(2, _SIZES) for one in ("by-label", "label-selector-filter")},
}
WORLDS |= {f"preset {one}": WORLDS["preset"] for one in WITH_HAND_OFF}
"""Worlds by kind of policy, by name of one, or by kind and name."""

NEEDS: dict[str, DEEP] = {
    "fcfs": ADAPTED,
    "space_sharing": {"scheduling": {"request_prioritizer": "lrs"}},
    "chameleon": ADAPTED,
    "dlora": ADAPTED,
    "cascadeinfer": {"hand_off": {"kv_bytes_per_token": 100_000}},
    **{f"preset {one}": {"hand_off": {"kv_bytes_per_token": 100_000}} for one in WITH_HAND_OFF},
    "dlora_migration": merged(ADAPTED, {"hand_off": {"kv_bytes_per_token": 100_000}}),
    "lora-affinity-scorer": ADAPTED,
    "adaserve": DRAFTED,
}
for _scorer, _producer in (
    ("token-load-scorer", "inflight-load-producer"),
    ("latency-scorer", "predicted-latency-producer"),
):
    NEEDS[_producer] = {"scheduling": {"replicaset_scheduler": {"params": {"scorers": [_scorer]}}}}
FITTING: dict[str, DEEP] = {
    "andes": {"horizon_s": 0.2, "expected_ttft_s": 0.1, "reading_speed": 40.0},
    "atlas": {"queue_bounds_s": [0.01, 0.05], "starvation_ratio": 2.0},
    "plas": {"queue_bounds_s": [0.01, 0.05], "starvation_ratio": 2.0},
    "continuum": {"ttl_s": 0.05, "max_mean_gap_s": 0.1},
    "continuum_pins": {"ttl_s": 0.05, "max_mean_gap_s": 0.1},
    "deficit_round_robin": {"quantum": 40.0},
    "dlpm": {"quantum": 40.0},
    "d2lpm": {"quantum": 40.0},
    "equinox": {"patience_s": 0.1},
    "edf": {"min_deadline_s": 0.01},
    "lrs": {"min_deadline_s": 0.01},
    "jitserve": {"refresh_steps": 3},
    "kairos": {"default_ttft_s": 0.2},
    "least_attained_service": {"half_life_s": 0.1},
    "lpm": {"fcfs_above": 6},
    "ltr": {"starvation_s": 0.1, "boost_steps": 3},
    "preflow": {"doubling_s": 0.1},
    "qlm": {"granularity_s": 0.01, "default_slo_s": 0.3, "group_requests": 2},
    "qoserve": {"default_ttft_s": 0.3},
    "residual_sjf": {"max_wait_s": 0.1},
    "skip_join_mlfq": {"promotion_steps": 10, "starvation_s": 0.1},
    "adaserve": {"chunk_size": 48, "budget_tokens": 12},
    "blendserve": {"chunk_size": 48},
    "chameleon": {"chunk_size": 48, "refresh_s": 0.05, "slo_s": 0.3},
    "conserve": {"chunk_size": 48, "default_tpot_s": 0.008, "offline_step_s": 0.02},
    "dlora": {"chunk_size": 48, "credit_bound": 2.0},
    "dynamic_chunk": {"target_batch_time_s": 0.015},
    "fixed_chunk": {"chunk_size": 48},
    "hygen": {"chunk_size": 48, "latency_budget_s": 0.008},
    "micro_requests": {"chunk_size": 48},
    "min_chunk_hold": {"chunk_size": 48, "min_chunk": 16, "max_delay_steps": 2},
    "mixed_prefill_governor": {"chunk_size": 48, "mixed_tokens": 8, "max_wait_s": 0.05},
    "nano_vllm": {"prefill_budget_tokens": 96},
    "nano_vllm_rs": {"prefill_budget_tokens": 96, "chunk_size": 32},
    "p_pas": {"chunk_size": 48, "capped_tokens": 8},
    "past_future": {"chunk_size": 48, "window": 8},
    "preemptive": {"chunk_size": 48},
    "prefill_waves": {"chunk_size": 48, "wave_slots": 2},
    "scorpio": {"chunk_size": 48},
    "slack_chunk": {"sizes": [8, 64]},
    "sliding_serve": {"min_chunk": 8, "max_chunk": 64, "grain": 8},
    "slos_serve": {"chunk_size": 48, "step_s": 0.008},
    "space_sharing": {"target_batch_time_s": 0.015, "long_seq_kv_cache_len_threshold": 64},
    "ascendra": {"margin_s": 0.01},
    "cascadeinfer": {"interval_s": 0.02, "plan_s": 0.1, "own_tokens": 20.0},
    "dlora_migration": {"interval_s": 0.05, "more_requests": 1},
    "dynaserve": {"min_part_tokens": 4},
    "polyserve": {"tiers_s": [0.012, 0.03]},
    "preble_e2": {"window_s": 0.3, "min_requests_per_replica": 2},
    "thunderagent": {
        "scheduler_interval_s": 0.05,
        "pause_threshold": 0.7,
        "pause_target": 0.5,
        "resume_timeout_s": 0.3,
    },
    "max_load": {"max_requests": 8},
    "mooncake": {"ttft_slo_s": 0.2, "tbt_slo_s": 0.02, "decode_s": 0.2},
    "priority_holdback": {"queue_threshold_requests": 3},
    "soft_reflective_ceiling": {"queue_threshold_requests": 3},
    "saturation_shedding": {"queue_threshold_requests": 3},
    "probabilistic_shedding": {"queue_threshold_requests": 3},
    "token_bucket": {"capacity": 300.0, "refill_per_s": 300.0},
    "target_utilization": {"interval_s": 2.0, "down_window_s": 10.0},
    "dynamo_planner": {"load_interval_s": 2.0, "throughput_interval_s": 9.0},
    "session_pin": {"pin_s": 0.2},
    "ttl": {"ttl_s": 0.3},
    "prefix_affinity": {"max_imbalance_requests": 2},
    "splitwise_mixed_pool": {"max_pending_prompt_tokens": 200},
}
"""Parameters with which the rules bite in worlds so small."""

_RANGES = [{"max_tokens": 60, "replicas": [0]}, {"min_tokens": 50, "max_tokens": 120, "replicas": [1]}]
FITTING.update(
    {
        "by-label": {"label": "pool", "valid_values": ["large"]},
        "label-selector-filter": {"match_labels": {"pool": "small"}},
        "endpoint-attribute-filter": {
            "attribute": "num_waiting",
            "algorithm": {"threshold": {"operator": "LessThanOrEqual", "value": 1}},
            "fallback_on_empty": True,
        },
        "endpoint-attribute-scorer": {"attribute_key": "free_blocks", "algorithm": {"type": "linear_higher_is_better"}},
        "utilization-filter": {
            "conditions": [{"metric": "waiting-queue", "max_value": 2}],
            "fallback_on_empty": True,
        },
        "context-length-aware": {"ranges": _RANGES},
        "concurrency-detector": {"max_concurrency": 4},
        "utilization-detector": {"queue_depth_threshold": 2},
        **{
            one: {"strategy": "session_id", "eviction_ttl_seconds": 0.05}
            for one in ("session-affinity-scorer", "session-affinity-filter")
        },
        "load-aware-scorer": {"threshold": 4},
        "token-load-scorer": {"queue_threshold_tokens": 300},
        "prefix-cache-affinity-filter": {
            "affinity_threshold": 0.3,
            "peak_prefill_throughput": 1000.0,
            "max_ttft_penalty_ms": 50.0,
        },
        "no-hit-lru-scorer": {"lru_size": 2},
        "approx-prefix-cache-producer": {"lru_capacity_per_server": 8},
        "prefix-based-pd-decider": {"non_cached_tokens": 60},
        "isl-bounding-decider": {"eff_isl_threshold": 60},
    }
)
_WEIGHTS = {"tenant_weights": {"tenant0": 3.0, "tenant1": 0.5}}
_CONCURRENCY: list[DEEP] = [
    {"detector": "concurrency", "max_concurrency_requests": 4},
    {"detector": "concurrency", "concurrency": "tokens", "max_concurrency_tokens": 300},
    {"detector": "concurrency", "concurrency": "hybrid", "max_concurrency_tokens": 300, "max_concurrency_requests": 6},
    {"kv_threshold_fraction": 0.3},
]
_SLA = {"target": "sla", "itl_slo_s": 0.03}
MORE: dict[str, list[DEEP]] = {
    **{one: [_WEIGHTS] for one in ("vtc", "least_counter_first", "deficit_round_robin", "dlpm", "d2lpm")},
    **{one: [{"tool_metadata": "other", "max_mean_gap_s": 0.05}] for one in ("continuum", "continuum_pins")},
    "justitia": [{"cost_metadata": "none"}],
    "space_sharing": [
        {"class_shares": {"interactive": 0.8, "batch": 0.2}},
        {"class_shares": {"tenant0": 0.8, "tenant1": 0.2}, "class_by": "tenant"},
    ],
    "vllm_v1": [
        {"victim": "lowest_priority"},
        {"victim": "lowest_priority", "continues_after_own_preemption": False},
        {"max_num_active_requests": 2},
        {"long_prefill_threshold_tokens": 8, "adaptive_long_prefill_threshold": True},
        {"long_prefill_threshold_tokens": 8, "adaptive_long_prefill_threshold": True, "adaptive_share_tokens": 48},
    ],
    "chameleon": [
        {"frequency_weight": 3.0},
        {"recency_weight": 3.0},
        {"size_weight": 3.0},
    ],
    "endpoint_picker": [
        {"scorers": [{"scorer": "prefix-cache-scorer"}]},
        {"filters": ["utilization-detector"]},
        {"picker": "random-picker"},
        *(
            {"profiles": PROFILES, "disaggregation": one}
            for one in (
                {"order": "prefill-first"},
                {"order": "decode-after-prompt"},
                {"decider": "prefix-based-pd-decider"},
            )
        ),
        {"producers": [{"producer": "approx-prefix-cache-producer", "params": {"lru_capacity_per_server": 4}}]},
    ],
    "by-label": [{"valid_values": ["small"]}, {"label": "llm-d.ai/role", "valid_values": ["mixed"]}],
    "label-selector-filter": [
        {"match_labels": {}, "match_expressions": [{"key": "pool", "operator": "In", "values": ["large"]}]},
        {"match_labels": {}, "match_expressions": [{"key": "pool", "operator": "NotIn", "values": ["large"]}]},
    ],
    "concurrency-detector": [
        {"concurrency_mode": "tokens", "max_token_concurrency": 300},
        {"concurrency_mode": "tokens", "max_token_concurrency": 300, "headroom": 0.5},
    ],
    "context-length-aware": [{"ranges": _RANGES[1:]}, {"enable_filtering": True}],
    "endpoint-attribute-filter": [
        {"algorithm": {"threshold": {"operator": one, "value": 2}}}
        for one in ("LessThan", "NotEqual", "GreaterThanOrEqual")
    ],
    "endpoint-attribute-scorer": [
        {"algorithm": {"type": "linear_lower_is_better"}},
        {"algorithm": {"type": "linear_higher_is_better", "normalization": {"fixed_range": {"min": 4, "max": 12}}}},
    ],
    "utilization-filter": [
        {"conditions": [{"metric": metric, "max_value": most}]}
        for metric, most in (("active-requests", 4), ("running-requests", 2), ("kv-cache-utilization", 0.5))
    ],
    "approx-prefix-cache-producer": [{"auto_tune": False, "block_size_tokens": 64}],
    "inflight-load-producer": [
        {"add_estimated_output_tokens": True},
        {"add_estimated_output_tokens": True, "output_ratio": 0.1},
        {"add_estimated_output_tokens": True, "max_estimated_output_tokens": 4},
    ],
    "dynamo_kv_router": [{"use_kv_events": False}, {"use_kv_events": False, "router_ttl_secs": 0.1}],
    "sglang_cache_aware": [
        {"balance_abs_threshold": 1},
        {"balance_abs_threshold": 1, "balance_rel_threshold": 4.0},
    ],
    "llumnix": [{"headroom_blocks": 8}, {"headroom_blocks": 8, "high_priority_below": 1}],
    "max_load": [{"max_tokens": 500}],
    "mooncake": [{"rule": "load"}, {"rule": "predicted_load"}, {"rule": "predicted_load", "decode_s": 0.05}],
    "priority_holdback": [*_CONCURRENCY, {"ceilings": {"-1": 1.0, "0": 0.6}}],
    "probabilistic_shedding": _CONCURRENCY,
    "saturation_shedding": [*_CONCURRENCY, {"when_closed": "defer"}, {"when_closed": "defer", "recheck_s": 0.1}],
    "soft_reflective_ceiling": _CONCURRENCY,
    "token_bucket": [
        {"buckets": {"tenant0": {"capacity": 50.0, "refill_per_s": 100.0}}},
        {"cost": "requests", "capacity": 3.0, "refill_per_s": 2.0},
    ],
    "ttl": [{"ttl_by_slo_class_s": {"batch": 0.05}}],
    "kvflow": [{"next_stages": {"work": ["plan"], "plan": ["plan"]}}],
    "dynamo_planner": [
        {"target": "latency"},
        _SLA,
        {**_SLA, "ttft_slo_s": 0.05},
        {**_SLA, "by_load": False},
        {**_SLA, "by_throughput": False},
        {**_SLA, "by_load": False, "throughput_interval_s": 3.0},
        {**_SLA, "by_load": False, "max_change": 1},
        {**_SLA, "down_sensitivity_fraction": 0.3},
        {**_SLA, "by_load": False, "expected_prompt_tokens": 100},
        {**_SLA, "by_load": False, "expected_output_tokens": 4000},
        {**_SLA, "max_devices": 4},
        {**_SLA, "min_devices": 5},
        {**_SLA, "max_devices": 5, "devices_per_replica": {"prefill": 2, "default": 2}},
        {"target": "load", "kv_up_fraction": 0.1, "kv_down_fraction": 0.02},
        {
            "target": "load",
            "kv_up_fraction": 0.1,
            "kv_down_fraction": 0.02,
            "prefill_up_tokens": 60,
            "prefill_down_tokens": 10,
        },
    ],
}
"""Changes that no one can guess: of parameters without numbers, and of several that go together."""
