"""Highest response ratio next: the request with the longest wait relative to its size goes first."""

from __future__ import annotations

from collections.abc import Sequence

from vajra_policies.size.lengths import FirstLengths, Lengths, SizeConfig
from vajra_py.contract import KeyMotion, Layer, PolicyContext, PolicySpec, RequestView


class HighestResponseRatioConfig(SizeConfig):
    """Parameters of `hrrn`."""


class HighestResponseRatio:
    """Key = -(now - arrival) / S, with S = w * prompt + output expected at arrival, in output tokens.

    The response ratio is (wait + service) / service = 1 + wait / service. The highest ratio has the lowest key, and
    goes first. The keys of short requests fall fast, but each starts at 0 on arrival. A long request that has waited
    long enough thus goes before every short request that arrives later, so no request starves.

    Left out: nothing.

    Source: Brinch Hansen, "An analysis of response ratio scheduling", IFIP Congress 1971.
    """

    key_motion = KeyMotion.TIME_LINEAR

    def __init__(self, config: SizeConfig, context: PolicyContext) -> None:
        self._prompt_weight = config.prompt_weight
        self._lengths = FirstLengths(Lengths(config, context.output_lengths))

    def line(self, request: RequestView) -> tuple[float, float]:
        """Return the key as a line in time, (intercept, slope): (arrival / S, -1 / S per second)."""
        slope = 1.0 / (self._prompt_weight * request.num_prompt_tokens + self._lengths.total(request))
        return request.arrived_at * slope, -slope

    def key(self, request: RequestView, now: float) -> float:
        """Return the key at `now`, from the line that `line` returns."""
        intercept, slope = self.line(request)
        return intercept + slope * now

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget the expected lengths of these requests."""
        self._lengths.forget(requests)


SPEC = PolicySpec(
    name="hrrn",
    layer=Layer.REQUEST_PRIORITIZER,
    config=HighestResponseRatioConfig,
    build=HighestResponseRatio,
    summary="Highest response ratio next: the longest wait relative to the expected size.",
    source="Brinch Hansen (1971)",
    aliases=("highest_response_ratio_next",),
    advice=(
        "Use it for most of the gain of `sjf` without starvation, at about the same CPU time: keys are linear in time. "
        "Not for tight deadlines (`lrs`, `edf`)."
    ),
)
