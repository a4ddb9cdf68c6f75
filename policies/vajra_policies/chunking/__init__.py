"""Prompts beside decodes: how many prompt tokens a step takes while others decode."""

from __future__ import annotations

from vajra_policies.chunking import min_chunk_hold, mixed_prefill_governor, p_pas, prefill_waves
from vajra_py.contract import PolicySpec

POLICIES: tuple[PolicySpec, ...] = (
    p_pas.SPEC,
    min_chunk_hold.SPEC,
    prefill_waves.SPEC,
    mixed_prefill_governor.SPEC,
)
