"""Scheduling policies for vajra-py: what this package offers."""

from __future__ import annotations

from vajra_py.contract import PolicySpec, hookimpl

from vajra_example_policies import aging_shortest, capped_chunk, prefix_affinity

__all__ = ["vajra_policies"]


@hookimpl
def vajra_policies() -> list[PolicySpec]:
    """Called once, when vajra-py looks for policies."""
    return [aging_shortest.SPEC, prefix_affinity.SPEC, capped_chunk.SPEC]
