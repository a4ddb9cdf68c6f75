"""The built-in scheduling policies, registered through the entry point that any package can use."""

from __future__ import annotations

from vajra_py.contract import AdmissionSpec, PolicySpec, RetentionSpec, RoutingPartSpec, ScalerSpec, hookimpl
from vajra_py.contract.hookspecs import Preset


@hookimpl
def vajra_policies() -> list[PolicySpec]:
    """Vajra's own policies, and those of other systems; imported when asked for."""
    from vajra_policies import (
        dynamic_chunk,
        edf,
        fcfs,
        fixed_chunk,
        least_loaded,
        lrs,
        power_of_two,
        preemptive,
        prefix_affinity,
        priority,
        pull,
        random_replica,
        round_robin,
        space_sharing,
    )
    from vajra_policies.adapters import BATCHERS as ADAPTERS
    from vajra_policies.adapters import ROUTERS as ADAPTER_ROUTERS
    from vajra_policies.chunking import POLICIES as CHUNKING
    from vajra_policies.fairness import POLICIES as FAIRNESS
    from vajra_policies.fairness import ROUTERS as FAIR_ROUTERS
    from vajra_policies.prefixes import POLICIES as PREFIXES
    from vajra_policies.programs import POLICIES as PROGRAMS
    from vajra_policies.routers import POLICIES as ROUTERS
    from vajra_policies.size import POLICIES as SIZE
    from vajra_policies.slo import BATCHERS, PRIORITIZERS
    from vajra_policies.slo import ROUTERS as SLO_ROUTERS
    from vajra_policies.systems import POLICIES

    prioritizers = [fcfs.SPEC, edf.SPEC, lrs.SPEC, priority.SPEC]
    prioritizers += [*FAIRNESS, *SIZE, *PREFIXES, *PRIORITIZERS, *PROGRAMS]
    choosers = [round_robin.SPEC, pull.SPEC, least_loaded.SPEC, power_of_two.SPEC, random_replica.SPEC]
    batchers = [
        fixed_chunk.SPEC,
        dynamic_chunk.SPEC,
        space_sharing.SPEC,
        preemptive.SPEC,
        *BATCHERS,
        *CHUNKING,
        *ADAPTERS,
    ]
    routers = [prefix_affinity.SPEC, *ROUTERS, *FAIR_ROUTERS, *SLO_ROUTERS, *ADAPTER_ROUTERS]
    return [*prioritizers, *choosers, *routers, *batchers, *POLICIES]


@hookimpl
def vajra_routing_parts() -> list[RoutingPartSpec]:
    """Parts of composable routers, under llm-d's names."""
    from vajra_policies.routers import parts

    return parts()


@hookimpl
def vajra_scalers() -> list[ScalerSpec]:
    """Scalers of replicasets; imported when asked for."""
    from vajra_policies.scaling import dynamo_planner, target_utilization

    return [target_utilization.SPEC, dynamo_planner.SPEC]


@hookimpl
def vajra_retention_policies() -> list[RetentionSpec]:
    """Orders in which idle cached content is given up; imported when asked for."""
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
    """Vajra's own admission policies, and those of other systems."""
    from vajra_policies.admission import ADMISSION_POLICIES

    return list(ADMISSION_POLICIES)


@hookimpl
def vajra_presets() -> list[Preset]:
    """Settings of whole systems by name."""
    from vajra_policies.systems import PRESETS

    return list(PRESETS)
