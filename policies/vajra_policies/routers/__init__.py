"""Composable routing under llm-d's names, formulas and defaults, and the routers of other systems."""

from __future__ import annotations

from vajra_policies.routers import (
    context_length,
    cost_router,
    deciders,
    endpoint_attribute,
    endpoint_picker,
    in_flight,
    labels,
    latency,
    load_scorers,
    pickers,
    preble,
    prefix_affinity_filter,
    prefix_matches,
    prefix_scorers,
    saturation,
    session_affinity,
    sglang_cache_aware,
)
from vajra_py.contract import PolicySpec, RoutingPartSpec

POLICIES: tuple[PolicySpec, ...] = (
    endpoint_picker.SPEC,
    cost_router.SPEC,
    sglang_cache_aware.SPEC,
    preble.SPEC,
)

PARTS: tuple[RoutingPartSpec, ...] = (
    *prefix_matches.SPECS,
    *in_flight.SPECS,
    *latency.SPECS,
    *load_scorers.SPECS,
    *prefix_scorers.SPECS,
    *session_affinity.SPECS,
    *context_length.SPECS,
    *endpoint_attribute.SPECS,
    *labels.SPECS,
    *prefix_affinity_filter.SPECS,
    *saturation.SPECS,
    *pickers.SPECS,
    *deciders.SPECS,
)
"""Producers, filters, scorers, pickers and deciders."""
