"""Fair shares between tenants, counted in tokens."""

from __future__ import annotations

from vajra_policies.fairness import d2lpm, deficit_round_robin, dlpm, equinox, least_counter_first, vtc
from vajra_py.contract import PolicySpec

POLICIES: tuple[PolicySpec, ...] = (
    vtc.SPEC,
    least_counter_first.SPEC,
    deficit_round_robin.SPEC,
    dlpm.SPEC,
    equinox.SPEC,
)
ROUTERS: tuple[PolicySpec, ...] = (d2lpm.SPEC,)
