"""Policies and presets that follow other systems."""

from __future__ import annotations

from vajra_policies.systems import minivllm, nano_vllm, nano_vllm_rs, orca, vllm_v1
from vajra_policies.systems.presets import PRESETS
from vajra_py.contract import PolicySpec

__all__ = ["POLICIES", "PRESETS"]

POLICIES: list[PolicySpec] = [vllm_v1.SPEC, nano_vllm.SPEC, minivllm.SPEC, nano_vllm_rs.SPEC, orca.SPEC]
