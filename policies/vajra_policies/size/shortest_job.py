"""Shortest job first, by the size that was expected at arrival."""

from __future__ import annotations

from collections.abc import Sequence

from vajra_policies.size.lengths import FirstLengths, Lengths, SizeConfig
from vajra_py.contract import KeyMotion, Layer, PolicyContext, PolicySpec, RequestView


class ShortestJobFirstConfig(SizeConfig):
    """Parameters of `sjf`."""


class ShortestJobFirst:
    """Key = w * prompt + expected output, in output tokens, fixed at arrival.

    With a replica scheduler that preempts no request for a waiting one (such as `fixed_chunk`) this is the
    non-preemptive rule. The wait of a long request is unbounded.

    Left out: nothing.

    Source: Smith, "Various optimizers for single-stage production", Naval Research Logistics Quarterly 1956.
    """

    key_motion = KeyMotion.STATIC

    def __init__(self, config: SizeConfig, context: PolicyContext) -> None:
        self._prompt_weight = config.prompt_weight
        self._lengths = FirstLengths(Lengths(config, context.output_lengths))

    def key(self, request: RequestView, now: float) -> float:
        """Return the expected size in output tokens: the weighted prompt plus the expected output."""
        return self._prompt_weight * request.num_prompt_tokens + self._lengths.total(request)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget the expected lengths of these requests."""
        self._lengths.forget(requests)


SPEC = PolicySpec(
    name="sjf",
    layer=Layer.REQUEST_PRIORITIZER,
    config=ShortestJobFirstConfig,
    build=ShortestJobFirst,
    summary="Shortest job first, by the size expected at arrival.",
    source="Smith (1956)",
    aliases=("shortest_job_first",),
    advice=(
        "Use it for a low mean latency where lengths can be estimated beforehand. Not where no request may starve: "
        "the wait of a long request is unbounded (see `hrrn`, `ltr`)."
    ),
)
