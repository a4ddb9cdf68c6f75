"""Shed requests with a probability that rises steeply with saturation."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from vajra_policies.admission.saturation import SaturationConfig, saturation_for
from vajra_py.contract import (
    ACCEPT,
    AdmissionDecision,
    AdmissionSpec,
    PolicyContext,
    RandomStream,
    Refuse,
    ReplicasetView,
    RequestView,
)


class ProbabilisticConfig(SaturationConfig):
    """Parameters of `probabilistic_shedding`, which draws from the random stream of the same name."""

    protected_priority: int = Field(
        0,
        description=(
            "Requests of this priority and of lower (more urgent) ones are always admitted; llm-d's priorities have "
            "the opposite sign."
        ),
    )
    factor: float = Field(300.0, gt=0, description="k of the probability min(1, k * saturation^power).")
    power: float = Field(5.0, gt=0, description="Power of the saturation.")


class ProbabilisticShedding:
    """Refuses a request that is not protected, with probability min(1, k * saturation^power).

    With llm-d's k = 300 and power 5, every request that is not protected is refused from a saturation of 0.32 on.

    Source: llm-d router, `probabilistic-admitter`.
    """

    def __init__(self, config: ProbabilisticConfig, stream: RandomStream) -> None:
        self._config = config
        self._stream = stream

    def admit(self, request: RequestView, replicasets: Sequence[ReplicasetView], now: float) -> AdmissionDecision:
        """Accept a protected request; refuse others at random, by saturation."""
        config = self._config
        if request.priority <= config.protected_priority:
            return ACCEPT
        saturation = saturation_for(config, request, replicasets)
        probability = min(config.factor * saturation**config.power, 1.0)
        if self._stream.random() < probability:
            return Refuse("the replicas are near saturation, and requests of its priority are shed at random")
        return ACCEPT


def _build(config: ProbabilisticConfig, context: PolicyContext) -> ProbabilisticShedding:
    return ProbabilisticShedding(config, context.random_stream("probabilistic_shedding"))


SPEC = AdmissionSpec(
    name="probabilistic_shedding",
    config=ProbabilisticConfig,
    build=_build,
    summary="Refuses requests of low priority with a probability that rises with saturation.",
    source="llm-d router: probabilistic-admitter",
    advice=(
        "Use it where shedding should begin gradually, before replicas are full. Not with its defaults where replicas "
        "are normally busy: from a saturation of 0.32 on, only protected requests are accepted."
    ),
)
