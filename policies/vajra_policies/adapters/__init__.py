"""LoRA adapters: which of them stay loaded, who runs with which, and where."""

from __future__ import annotations

from vajra_policies.adapters import chameleon, dlora, dlora_migration
from vajra_py.contract import PolicySpec

BATCHERS: tuple[PolicySpec, ...] = (chameleon.SPEC, dlora.SPEC)
ROUTERS: tuple[PolicySpec, ...] = (dlora_migration.SPEC,)
