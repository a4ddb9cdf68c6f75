"""The built-in scheduling policies, registered through the entry point that any package can use."""

from __future__ import annotations

from vajra_py.contract import AdmissionSpec, Layer, PolicyAt, RetentionSpec, RoutingPartSpec, ScalerSpec, hookimpl
from vajra_py.contract.hookspecs import Preset

_PRIORITIZER, _ROUTER, _BATCHER = Layer.REQUEST_PRIORITIZER, Layer.REPLICASET_SCHEDULER, Layer.REPLICA_SCHEDULER
_POLICIES = (
    PolicyAt("fcfs", _PRIORITIZER, "vajra_policies.fcfs"),
    PolicyAt("edf", _PRIORITIZER, "vajra_policies.edf"),
    PolicyAt("lrs", _PRIORITIZER, "vajra_policies.lrs", ("lars",)),
    PolicyAt("priority", _PRIORITIZER, "vajra_policies.priority"),
    PolicyAt("vtc", _PRIORITIZER, "vajra_policies.fairness.vtc"),
    PolicyAt("least_counter_first", _PRIORITIZER, "vajra_policies.fairness.least_counter_first"),
    PolicyAt("deficit_round_robin", _PRIORITIZER, "vajra_policies.fairness.deficit_round_robin", ("drr",)),
    PolicyAt("dlpm", _PRIORITIZER, "vajra_policies.fairness.dlpm", ("deficit_longest_prefix_match",)),
    PolicyAt("equinox", _PRIORITIZER, "vajra_policies.fairness.equinox"),
    PolicyAt("sjf", _PRIORITIZER, "vajra_policies.size.shortest_job", ("shortest_job_first",)),
    PolicyAt("srpt", _PRIORITIZER, "vajra_policies.size.shortest_remaining", ("shortest_remaining_processing_time",)),
    PolicyAt("trail", _PRIORITIZER, "vajra_policies.size.trail"),
    PolicyAt("ltr", _PRIORITIZER, "vajra_policies.size.learning_to_rank", ("learning_to_rank",)),
    PolicyAt("hrrn", _PRIORITIZER, "vajra_policies.size.highest_response_ratio", ("highest_response_ratio_next",)),
    PolicyAt("skip_join_mlfq", _PRIORITIZER, "vajra_policies.size.skip_join_mlfq", ("fastserve",)),
    PolicyAt("lpm", _PRIORITIZER, "vajra_policies.prefixes.longest_prefix_match", ("longest_prefix_match",)),
    PolicyAt("preflow", _PRIORITIZER, "vajra_policies.prefixes.preflow"),
    PolicyAt("residual_sjf", _PRIORITIZER, "vajra_policies.prefixes.residual_shortest_job"),
    PolicyAt("qoserve", _PRIORITIZER, "vajra_policies.slo.qoserve", ("niyama",)),
    PolicyAt("jitserve", _PRIORITIZER, "vajra_policies.slo.jitserve"),
    PolicyAt("andes", _PRIORITIZER, "vajra_policies.slo.andes"),
    PolicyAt("qlm", _PRIORITIZER, "vajra_policies.slo.qlm"),
    PolicyAt("kairos", _PRIORITIZER, "vajra_policies.slo.kairos"),
    PolicyAt("plas", _PRIORITIZER, "vajra_policies.programs.attained_service:PLAS"),
    PolicyAt("atlas", _PRIORITIZER, "vajra_policies.programs.attained_service:ATLAS"),
    PolicyAt(
        "least_attained_service",
        _PRIORITIZER,
        "vajra_policies.programs.least_attained_service",
        ("las", "program_aware_fairness"),
    ),
    PolicyAt("justitia", _PRIORITIZER, "vajra_policies.programs.justitia"),
    PolicyAt("continuum", _PRIORITIZER, "vajra_policies.programs.continuum"),
    PolicyAt("parrot", _PRIORITIZER, "vajra_policies.programs.parrot"),
    PolicyAt("round_robin", _ROUTER, "vajra_policies.round_robin"),
    PolicyAt("pull", _ROUTER, "vajra_policies.pull"),
    PolicyAt("least_loaded", _ROUTER, "vajra_policies.least_loaded", ("join_shortest_queue",)),
    PolicyAt("power_of_two", _ROUTER, "vajra_policies.power_of_two"),
    PolicyAt("random", _ROUTER, "vajra_policies.random_replica"),
    PolicyAt("prefix_affinity", _ROUTER, "vajra_policies.prefix_affinity"),
    PolicyAt("endpoint_picker", _ROUTER, "vajra_policies.routers.endpoint_picker"),
    PolicyAt("dynamo_kv_router", _ROUTER, "vajra_policies.routers.dynamo_kv_router"),
    PolicyAt("sglang_cache_aware", _ROUTER, "vajra_policies.routers.sglang_cache_aware"),
    PolicyAt("preble_e2", _ROUTER, "vajra_policies.routers.preble_e2"),
    PolicyAt("lmetric", _ROUTER, "vajra_policies.routers.lmetric"),
    PolicyAt("mooncake_conductor", _ROUTER, "vajra_policies.routers.mooncake_conductor"),
    PolicyAt("consistent_hashing", _ROUTER, "vajra_policies.routers.consistent_hashing"),
    PolicyAt("thunderagent", _ROUTER, "vajra_policies.routers.thunderagent"),
    PolicyAt("llumnix", _ROUTER, "vajra_policies.routers.llumnix"),
    PolicyAt("splitwise_mixed_pool", _ROUTER, "vajra_policies.routers.splitwise_mixed_pool"),
    PolicyAt("dynaserve", _ROUTER, "vajra_policies.routers.dynaserve"),
    PolicyAt("micro_requests", _BATCHER, "vajra_policies.routers.dynaserve:REPLICA_SPEC"),
    PolicyAt("cascadeinfer", _ROUTER, "vajra_policies.routers.cascadeinfer"),
    PolicyAt("ascendra", _ROUTER, "vajra_policies.routers.ascendra"),
    PolicyAt("d2lpm", _ROUTER, "vajra_policies.fairness.d2lpm"),
    PolicyAt("polyserve", _ROUTER, "vajra_policies.slo.polyserve"),
    PolicyAt("dlora_migration", _ROUTER, "vajra_policies.adapters.dlora_migration"),
    PolicyAt("fixed_chunk", _BATCHER, "vajra_policies.fixed_chunk"),
    PolicyAt("dynamic_chunk", _BATCHER, "vajra_policies.dynamic_chunk"),
    PolicyAt("space_sharing", _BATCHER, "vajra_policies.space_sharing"),
    PolicyAt("preemptive", _BATCHER, "vajra_policies.preemptive"),
    PolicyAt("slack_chunk", _BATCHER, "vajra_policies.slo.slack_chunk"),
    PolicyAt("sliding_serve", _BATCHER, "vajra_policies.slo.sliding_serve"),
    PolicyAt("past_future", _BATCHER, "vajra_policies.slo.past_future"),
    PolicyAt("hygen", _BATCHER, "vajra_policies.slo.hygen"),
    PolicyAt("conserve", _BATCHER, "vajra_policies.slo.conserve"),
    PolicyAt("scorpio", _BATCHER, "vajra_policies.slo.scorpio"),
    PolicyAt("slos_serve", _BATCHER, "vajra_policies.slo.slos_serve"),
    PolicyAt("adaserve", _BATCHER, "vajra_policies.slo.adaserve"),
    PolicyAt("blendserve", _BATCHER, "vajra_policies.slo.blendserve"),
    PolicyAt("p_pas", _BATCHER, "vajra_policies.chunking.p_pas"),
    PolicyAt("min_chunk_hold", _BATCHER, "vajra_policies.chunking.min_chunk_hold"),
    PolicyAt("prefill_waves", _BATCHER, "vajra_policies.chunking.prefill_waves"),
    PolicyAt("mixed_prefill_governor", _BATCHER, "vajra_policies.chunking.mixed_prefill_governor"),
    PolicyAt("chameleon", _BATCHER, "vajra_policies.adapters.chameleon"),
    PolicyAt("dlora", _BATCHER, "vajra_policies.adapters.dlora"),
    PolicyAt("vllm_v1", _BATCHER, "vajra_policies.systems.vllm_v1"),
    PolicyAt("nano_vllm", _BATCHER, "vajra_policies.systems.nano_vllm"),
    PolicyAt("minivllm", _BATCHER, "vajra_policies.systems.minivllm"),
    PolicyAt("nano_vllm_rs", _BATCHER, "vajra_policies.systems.nano_vllm_rs"),
    PolicyAt("orca", _BATCHER, "vajra_policies.systems.orca"),
)


@hookimpl
def vajra_policies() -> list[PolicyAt]:
    """Return the built-in policies, Vajra's own and those of other systems; each is imported on first use."""
    return list(_POLICIES)


@hookimpl
def vajra_routing_parts() -> list[RoutingPartSpec]:
    """Return the built-in parts of composable routers, under llm-d's names."""
    from vajra_policies.routers import parts

    return parts()


@hookimpl
def vajra_scalers() -> list[ScalerSpec]:
    """Return the built-in scalers of replicasets; this call imports the scalers."""
    from vajra_policies.scaling import dynamo_planner, target_utilization

    return [target_utilization.SPEC, dynamo_planner.SPEC]


@hookimpl
def vajra_retention_policies() -> list[RetentionSpec]:
    """Return the built-in retention policies; this call imports the policies."""
    from vajra_policies.retention import (
        age,
        arc,
        continuum_pins,
        frequency,
        kvflow,
        recency,
        request_priority,
        session_pin,
        ttl,
    )

    simple = [recency.LRU, frequency.LFU, age.FIFO, recency.MRU, age.FILO, frequency.SLRU]
    return [*simple, arc.SPEC, request_priority.SPEC, ttl.SPEC, session_pin.SPEC, continuum_pins.SPEC, kvflow.SPEC]


@hookimpl
def vajra_admission_policies() -> list[AdmissionSpec]:
    """Return the built-in admission policies, Vajra's own and those of other systems."""
    from vajra_policies.admission import ADMISSION_POLICIES

    return list(ADMISSION_POLICIES)


@hookimpl
def vajra_presets() -> list[Preset]:
    """Return the built-in presets, which are named settings of whole systems."""
    from vajra_policies.systems.presets import PRESETS

    return list(PRESETS)
