"""Admission policies: requests are accepted, degraded, deferred or refused before they are queued."""

from __future__ import annotations

from vajra_policies.admission import (
    max_load,
    mooncake,
    priority_holdback,
    probabilistic_shedding,
    saturation_shedding,
    soft_reflective_ceiling,
    token_bucket,
)

ADMISSION_POLICIES = (
    token_bucket.SPEC,
    max_load.SPEC,
    saturation_shedding.SPEC,
    probabilistic_shedding.SPEC,
    priority_holdback.SPEC,
    soft_reflective_ceiling.SPEC,
    mooncake.SPEC,
)
