"""Defer less urgent requests at a lower saturation, so that capacity is left for more urgent ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from vajra_policies.admission.holding import Holding, HoldingConfig
from vajra_policies.admission.saturation import SaturationConfig, saturation_for
from vajra_py.contract import AdmissionDecision, AdmissionSpec, PolicyContext, Refuse, ReplicasetView, RequestView


class HoldbackConfig(SaturationConfig, HoldingConfig):
    """Parameters of `priority_holdback`. A priority with a lower number is more urgent."""

    spacing: Literal["rank", "value"] = Field(
        "rank", description="Spacing of the ceilings: equal steps, or in proportion to the priorities' numbers."
    )
    min_ceiling: float = Field(
        0.5, gt=0, lt=1, description="Saturation at which the least urgent priority is held back."
    )
    max_ceiling: float = Field(
        1.0, gt=0, le=1, description="Saturation at which the most urgent priority is held back."
    )
    ceilings: dict[int, float] = Field(
        default_factory=dict,
        description="Ceilings by priority, in place of the other options; requests of other priorities are refused.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_ceiling >= self.max_ceiling:
            raise ValueError(
                f"min_ceiling must be below max_ceiling (got {self.min_ceiling:g} and {self.max_ceiling:g})"
            )
        found = [self.ceilings[priority] for priority in sorted(self.ceilings)]
        if any(not 0 < one <= 1 for one in found):
            raise ValueError(f"ceilings must be above 0 and at most 1 (got {found})")
        if found != sorted(found, reverse=True):
            raise ValueError(f"ceilings must not increase with the priority's number (got {self.ceilings})")
        return self


def holdback_ceilings(priorities: Sequence[int], config: HoldbackConfig) -> dict[int, float]:
    """Return the ceiling of each priority; `priorities` is sorted, the most urgent (lowest) first.

    If `config` lists no ceilings, they are spaced between cMin = `min_ceiling` and cMax = `max_ceiling`. The i-th of n
    priorities, with i counted from 0, gets the ceiling c_i. Spacing by rank: c_i = cMax - i * (cMax - cMin) / (n - 1).
    Spacing by value: c_i = cMin + r_i * (cMax - cMin), where r_i is 1 for the most urgent priority, 0 for the least
    urgent, and linear in the priority's number. A single priority gets cMax. If `config` lists ceilings, a priority
    that is not listed gets 0.
    """
    if config.ceilings:
        return {one: config.ceilings.get(one, 0.0) for one in priorities}
    if len(priorities) == 1:
        return {priorities[0]: config.max_ceiling}
    spread, first, last = config.max_ceiling - config.min_ceiling, priorities[0], priorities[-1]
    if config.spacing == "value":
        return {one: config.min_ceiling + (last - one) / (last - first) * spread for one in priorities}
    return {one: config.max_ceiling - i * spread / (len(priorities) - 1) for i, one in enumerate(priorities)}


class PriorityHoldback(Holding):
    """Accepts a request while saturation is below the ceiling of its priority, and no deferred request comes before it.

    Ceilings cover the priorities that have occurred so far.

    Source: llm-d router, flow control with `priority-holdback-policy`.
    """

    def __init__(self, config: HoldbackConfig, context: PolicyContext) -> None:
        super().__init__(config, context.wake)
        self._config = config
        self._ceilings: Mapping[int, float] = {}

    def admit(self, request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        """Defer or refuse the request if its priority's ceiling is reached, or if deferred requests come before it."""
        if request.priority not in self._ceilings:
            self._ceilings = holdback_ceilings(sorted({*self._ceilings, request.priority}), self._config)
        if not self._ceilings[request.priority]:
            return Refuse(f"priority {request.priority} has no ceiling")
        line, saturation = self._line_of(request), saturation_for(self._config, request, replicasets)
        if line.waits_behind(request) or saturation >= self._ceilings[request.priority]:
            reason = f"priority {request.priority} is held back at this saturation"
            return self._closed(line, request, now, reason)
        return self._open(line, request)


SPEC = AdmissionSpec(
    name="priority_holdback",
    config=HoldbackConfig,
    build=PriorityHoldback,
    summary="Limits each priority to its own ceiling of saturation, so that capacity is left for more urgent requests.",
    source="llm-d router: priority-holdback-policy",
    advice=(
        "Use it where several priorities share replicas, and capacity should be reserved for the more urgent ones. "
        "Not with a single priority: it then only bounds the load (`max_load`)."
    ),
)
