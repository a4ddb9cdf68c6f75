"""Prioritizer that prefers short prompts and ages waiting requests, so that none starves."""

from __future__ import annotations

from pydantic import Field
from vajra_py.contract import KeyMotion, Layer, PolicyConfig, PolicyContext, PolicySpec, RequestView


class AgingShortestConfig(PolicyConfig):
    """Parameters of `example_aging_shortest`."""

    forgiven_tokens: int = Field(
        2048,
        gt=0,
        description="Tokens by which a prompt counts as shorter once it has waited for its whole TTFT SLO.",
    )
    default_ttft_slo_s: float = Field(
        5.0, gt=0, description="TTFT SLO of requests that have none of their own, seconds."
    )


class AgingShortestPolicy:
    """Shortest remaining prompt first, with ageing.

    key = remaining prompt tokens - forgiven_tokens * waited / TTFT SLO. This is a line in time, and its slope differs
    between requests: a request with a tighter TTFT SLO ages faster. Since the line is declared, the queue keeps the
    exact order without sorting all requests again at each step.
    """

    key_motion = KeyMotion.TIME_LINEAR

    def __init__(self, config: AgingShortestConfig) -> None:
        self._config = config

    def key(self, request: RequestView, now: float) -> float:
        """Return the tokens to compute, minus a credit for waiting; lower is more urgent."""
        intercept, slope = self.line(request)
        return intercept + slope * now

    def line(self, request: RequestView) -> tuple[float, float]:
        """Return (intercept, slope) of the key, which change only when the prompt makes progress."""
        aging_rate = self._config.forgiven_tokens / (request.ttft_slo_s or self._config.default_ttft_slo_s)
        return request.num_remaining_prompt_tokens + aging_rate * request.arrived_at, -aging_rate


def _build(config: AgingShortestConfig, context: PolicyContext) -> AgingShortestPolicy:
    return AgingShortestPolicy(config)


SPEC = PolicySpec(
    name="example_aging_shortest",
    layer=Layer.REQUEST_PRIORITIZER,
    config=AgingShortestConfig,
    build=_build,
    summary="Shortest remaining prompt first; waiting makes a prompt count as shorter.",
    source="Shortest remaining processing time (Schrage 1968), with linear ageing.",
)
