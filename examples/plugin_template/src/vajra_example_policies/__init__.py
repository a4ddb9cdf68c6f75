"""Scheduling policies of this package for vajra-py."""

from __future__ import annotations

from vajra_py.contract import PolicySpec, hookimpl

from vajra_example_policies import aging_shortest, capped_chunk, prefix_affinity

__all__ = ["vajra_policies"]


@hookimpl
def vajra_policies() -> list[PolicySpec]:
    """Return the policies of this package; called once, when vajra-py loads plug-ins."""
    return [aging_shortest.SPEC, prefix_affinity.SPEC, capped_chunk.SPEC]
