"""Accept less urgent requests at a rate that falls as saturation rises, instead of excluding them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vajra_policies.admission.holding import Holding, HoldingConfig
from vajra_policies.admission.saturation import SaturationConfig, saturation_for
from vajra_py.contract import AdmissionDecision, AdmissionSpec, PolicyContext, ReplicasetView, RequestView

_ROUND_OFF = 1e-9
"""Term added to the divisor 1 - saturation, so that the period stays finite near a saturation of 1."""


class SoftReflectiveConfig(SaturationConfig, HoldingConfig):
    """Parameters of `soft_reflective_ceiling`; `recheck_s` is the longest time between cycles while requests are
    deferred.
    """


def opening_period(saturation: float, rank: int, num_bands: int) -> int:
    """Return k: the band (priority) of this rank is open in every k-th cycle; 1 means in all cycles, 0 in none.

    With s the saturation and n the number of bands: k = 0 if s >= 1. Otherwise, k = 1 for the most urgent band, which
    has rank 0, and for a band of rank i with s < 1 - i * s / (n - 1). For all other bands, k = max(1, round(s / (1 -
    s))).
    """
    if saturation >= 1.0:
        return 0
    if rank == 0 or num_bands == 1 or saturation < 1.0 - rank * saturation / (num_bands - 1):
        return 1
    return max(1, math.floor(saturation / (1.0 - saturation + _ROUND_OFF) + 0.5))


class SoftReflectiveCeiling(Holding):
    """Accepts requests of a priority (band) in all, some or no cycles, by `opening_period`.

    A cycle is a time at which the policy decides about a band: when requests arrive, are admitted or end, and every
    `recheck_s` while requests are deferred. There is a band for each priority that has occurred so far.

    Source: llm-d router, flow control with `soft-reflective-ceiling-policy`.
    """

    def __init__(self, config: SoftReflectiveConfig, context: PolicyContext) -> None:
        super().__init__(config, context.wake)
        self._config = config
        self._priorities: list[int] = []
        self._cycles: dict[tuple[str, int], tuple[float, int]] = {}
        """(time, number) of the latest counted cycle by replicaset and priority; cycles in which the band's period is 0
        or 1 are not counted.
        """

    def admit(self, request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        """Defer or refuse the request if its band is closed in this cycle, or deferred requests come before it."""
        if request.priority not in self._priorities:
            self._priorities = sorted([*self._priorities, request.priority])
        line = self._line_of(request)
        if line.waits_behind(request):
            return self._closed(line, request, now, "requests that come first wait")
        saturation = saturation_for(self._config, request, replicasets)
        rank = self._priorities.index(request.priority)
        period = opening_period(saturation, rank, len(self._priorities))
        if period == 0 or (period > 1 and self._cycle(request, now) % period):
            reason = f"priority {request.priority} is closed at this saturation"
            return self._closed(line, request, now, reason)
        return self._open(line, request)

    def _cycle(self, request: RequestView, now: float) -> int:
        """Return the number of the present cycle of the request's band, counted from 1."""
        band = (request.replicaset, request.priority)
        at, number = self._cycles.get(band, (-1.0, 0))
        if at != now:
            number += 1
            self._cycles[band] = (now, number)
        return number


SPEC = AdmissionSpec(
    name="soft_reflective_ceiling",
    config=SoftReflectiveConfig,
    build=SoftReflectiveCeiling,
    summary="Accepts requests of lower priorities less and less often as saturation rises.",
    source="llm-d router: soft-reflective-ceiling-policy",
    advice=(
        "Use it with several priorities, if less urgent requests should be slowed down rather than stopped as load "
        "rises. Not where results have to be explained: how often a priority is accepted depends on how often the "
        "policy is called."
    ),
)
