"""Shortest remaining processing time first."""

from __future__ import annotations

from vajra_policies.size.lengths import Lengths, SizeConfig
from vajra_py.contract import KeyMotion, Layer, PolicyContext, PolicySpec, RequestView


class ShortestRemainingConfig(SizeConfig):
    """Parameters of `srpt`."""


class ShortestRemaining:
    """Key = w * known tokens left to compute + output tokens that are now expected to remain.

    With `preemptive` and the oracle's lengths this rule minimises the mean time in system on one server. A request that
    has exceeded its expected output has one expected token left; a request preempted by recompute has to compute all
    its known tokens again.

    Left out: nothing.

    Source: Schrage, "A proof of the optimality of the shortest remaining processing time discipline", Operations Research
    1968; its mean for Poisson arrivals: Schrage and Miller, Operations Research 1966.
    """

    key_motion = KeyMotion.PROGRESS

    def __init__(self, config: SizeConfig, context: PolicyContext) -> None:
        self._prompt_weight = config.prompt_weight
        self._lengths = Lengths(config, context.output_lengths)

    def key(self, request: RequestView, now: float) -> float:
        """Return the remaining work in output tokens: the weighted known tokens left to compute plus the expected rest
        of the output.
        """
        return self._prompt_weight * request.num_remaining_tokens + self._lengths.remaining(request)


SPEC = PolicySpec(
    name="srpt",
    layer=Layer.REQUEST_PRIORITIZER,
    config=ShortestRemainingConfig,
    build=ShortestRemaining,
    summary="Shortest remaining processing time first: expected remaining output plus the rest of the prompt.",
    source="Schrage (1968)",
    aliases=("shortest_remaining_processing_time",),
    advice=(
        "Use it as the bound with which others are compared (`output_length: {type: oracle}`), or with predictions "
        "that improve as a request progresses. Not with predictions that are off by factors: long requests that are "
        "predicted to be short delay all others."
    ),
)
