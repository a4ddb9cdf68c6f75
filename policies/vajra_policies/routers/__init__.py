"""Composable routing under llm-d's names, formulas and defaults, and the routers of other systems.

The modules of parts are imported only when `parts` is called, so that the import of a single router is fast.
"""

from __future__ import annotations

from vajra_py.contract import RoutingPartSpec


def parts() -> list[RoutingPartSpec]:
    """Return the specs of all producers, filters, scorers, pickers and deciders."""
    from vajra_policies.routers import (
        adapters,
        context_length,
        deciders,
        endpoint_attribute,
        headroom_tier,
        in_flight,
        labels,
        latency,
        latency_scorer,
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
        latency_scorer,
        headroom_tier,
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
