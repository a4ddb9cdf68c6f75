"""Programs: fair and fast service of agents whose calls belong together."""

from __future__ import annotations

from vajra_policies.programs import attained_service, continuum, justitia, least_attained_service, parrot
from vajra_py.contract import PolicySpec

POLICIES: tuple[PolicySpec, ...] = (
    attained_service.PLAS,
    attained_service.ATLAS,
    least_attained_service.SPEC,
    justitia.SPEC,
    continuum.SPEC,
    parrot.SPEC,
)
