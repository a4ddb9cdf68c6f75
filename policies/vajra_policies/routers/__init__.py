"""Composable routing under llm-d's names, formulas and defaults, and the routers of other systems.

Modules with policies have their parameters alone, and import what computes when one is built: listing them costs little.
"""

from __future__ import annotations

from vajra_policies.routers import (
    ascendra,
    consistent_hashing,
    dynamo_kv_router,
    dynaserve,
    endpoint_picker,
    llumnix,
    lmetric,
    mooncake_conductor,
    preble_e2,
    sglang_cache_aware,
    splitwise_mixed_pool,
    thunderagent,
)
from vajra_py.contract import PolicySpec, RoutingPartSpec

POLICIES: tuple[PolicySpec, ...] = (
    endpoint_picker.SPEC,
    dynamo_kv_router.SPEC,
    sglang_cache_aware.SPEC,
    preble_e2.SPEC,
    lmetric.SPEC,
    mooncake_conductor.SPEC,
    consistent_hashing.SPEC,
    thunderagent.SPEC,
    llumnix.SPEC,
    splitwise_mixed_pool.SPEC,
    dynaserve.SPEC,
    dynaserve.REPLICA_SPEC,
    ascendra.SPEC,
)


def parts() -> list[RoutingPartSpec]:
    """Return the producers, filters, scorers, pickers and deciders."""
    from vajra_policies.routers import (
        adapters,
        context_length,
        deciders,
        endpoint_attribute,
        in_flight,
        labels,
        latency,
        load_scorers,
        pickers,
        prefix_affinity_filter,
        prefix_matches,
        prefix_scorers,
        saturation,
        session_affinity,
    )

    modules = (
        prefix_matches,
        in_flight,
        latency,
        load_scorers,
        adapters,
        prefix_scorers,
        session_affinity,
        context_length,
        endpoint_attribute,
        labels,
        prefix_affinity_filter,
        saturation,
        pickers,
        deciders,
    )
    return [spec for module in modules for spec in module.SPECS]
