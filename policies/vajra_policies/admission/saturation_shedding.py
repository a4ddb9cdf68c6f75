"""Shed requests of low priority while the replicas are saturated, as llm-d does without flow control."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from vajra_policies.admission.holding import Holding, HoldingConfig
from vajra_policies.admission.saturation import SaturationConfig, saturation_for
from vajra_py.contract import ACCEPT, AdmissionDecision, AdmissionSpec, PolicyContext, ReplicasetView, RequestView


class SheddingConfig(SaturationConfig, HoldingConfig):
    """Parameters of `saturation_shedding`."""

    when_closed: Literal["defer", "refuse"] = Field(
        "refuse",
        description="Treatment of a request that may be shed: `refuse` it, or `defer` it, so that it waits at the gate.",
    )
    protected_priority: int = Field(
        0,
        description=(
            "Requests of this priority and of lower (more urgent) ones are always admitted; llm-d's priorities have "
            "the opposite sign."
        ),
    )
    limit: float = Field(1.0, gt=0, description="Saturation from which on requests are shed.")


class SaturationShedding(Holding):
    """Refuses requests that are not protected while saturation is at or above the limit.

    Source: llm-d router, admission without flow control: priority < 0 is rejected at saturation >= 1.
    """

    def __init__(self, config: SheddingConfig, context: PolicyContext) -> None:
        super().__init__(config, context.wake)
        self._config = config

    def admit(self, request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        """Accept the request if it is protected, or if saturation is below the limit and no deferred request comes
        before it.
        """
        config = self._config
        if request.priority <= config.protected_priority:
            return ACCEPT
        line = self._line_of(request)
        if line.waits_behind(request) or saturation_for(config, request, replicasets) >= config.limit:
            return self._closed(line, request, now, "the replicas are saturated, and its priority is sheddable")
        return self._open(line, request)


SPEC = AdmissionSpec(
    name="saturation_shedding",
    config=SheddingConfig,
    build=SaturationShedding,
    summary="Refuses requests of low priority while queues or KV memory are full.",
    source="llm-d router: utilization-detector, concurrency-detector, admission without flow control",
    advice=(
        "Use it where less urgent requests can be sent again later, and urgent ones need room. Not where all requests "
        "have one priority: if this priority is protected, all of them are accepted."
    ),
)
