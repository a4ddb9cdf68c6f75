"""Promised times: who is served so that they are kept, and how much work a step may take."""

from __future__ import annotations

from vajra_policies.slo import andes, conserve, hygen, jitserve, past_future, polyserve, qoserve, scorpio, slack_chunk
from vajra_py.contract import PolicySpec

PRIORITIZERS: tuple[PolicySpec, ...] = (qoserve.SPEC, jitserve.SPEC, andes.SPEC)
BATCHERS: tuple[PolicySpec, ...] = (slack_chunk.SPEC, past_future.SPEC, hygen.SPEC, conserve.SPEC, scorpio.SPEC)
ROUTERS: tuple[PolicySpec, ...] = (polyserve.SPEC,)
