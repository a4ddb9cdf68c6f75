"""Promised times: who is served so that they are kept, and how much work a step may take."""

from __future__ import annotations

from vajra_policies.slo import (
    adaserve,
    andes,
    blendserve,
    conserve,
    hygen,
    jitserve,
    kairos,
    past_future,
    polyserve,
    qlm,
    qoserve,
    scorpio,
    slack_chunk,
    sliding_serve,
    slos_serve,
)
from vajra_py.contract import PolicySpec

PRIORITIZERS: tuple[PolicySpec, ...] = (qoserve.SPEC, jitserve.SPEC, andes.SPEC, qlm.SPEC, kairos.SPEC)
BATCHERS: tuple[PolicySpec, ...] = (
    slack_chunk.SPEC,
    sliding_serve.SPEC,
    past_future.SPEC,
    hygen.SPEC,
    conserve.SPEC,
    scorpio.SPEC,
    slos_serve.SPEC,
    adaserve.SPEC,
    blendserve.SPEC,
)
ROUTERS: tuple[PolicySpec, ...] = (polyserve.SPEC,)
