"""Residual shortest job first: the prompt with the fewest uncached blocks to compute."""

from __future__ import annotations

from pydantic import Field

from vajra_py.contract import KeyMotion, Layer, PolicyConfig, PolicyContext, PolicySpec, RequestView

_EARLY_S = 1e-6
"""Seconds by which `falls_at` is early; larger than any rounding error."""


class ResidualShortestJobConfig(PolicyConfig):
    """Parameters of `residual_sjf`; the default is xLLM's."""

    max_wait_s: float | None = Field(
        10.0,
        ge=0,
        description="Waiting time from which requests go first, in order of arrival, seconds; 0: all do; null: none.",
    )


class ResidualShortestJob:
    """Key = (2, blocks of the prompt - cached blocks) for a request that waits for the first time.

    The key is (1, arrival) once the request has waited for `max_wait_s`, and (0, 0) if it runs or was preempted.

    A cached prefix counts as work already done, so a long prompt that is mostly cached is a short job. Costs are read
    at each step, since other requests may add or overwrite cached blocks.

    Left out: PrefillOnly's ageing, which subtracts a multiple of the wait from the cost; the limit takes its place.

    Source: xLLM, residual shortest job first (pull request 2164); Du et al., "PrefillOnly" (arXiv:2505.07203), for the cost by
    uncached tokens.
    """

    key_motion = KeyMotion.PREFIX_HITS

    def __init__(self, config: ResidualShortestJobConfig, block_size: int) -> None:
        self._max_wait_s = config.max_wait_s
        self._block_size = block_size

    def key(self, request: RequestView, now: float) -> tuple[float, float]:
        """Return the key by the rule in the class docstring."""
        if request.is_resident or request.num_preemptions:
            return (0.0, 0.0)
        if self._max_wait_s is not None and now - request.arrived_at >= self._max_wait_s:
            return (1.0, request.arrived_at)
        size = self._block_size
        return (2.0, float(request.num_prompt_tokens // size - request.prefix_hit_tokens() // size))

    def falls_at(self, request: RequestView, now: float) -> float | None:
        """Return a time just before the request's wait reaches the limit, when its key falls; None if the wait has
        reached it already, if there is no limit, or if the request was preempted and has the lowest key anyway.
        """
        limit = self._max_wait_s
        if limit is None or request.num_preemptions or now - request.arrived_at >= limit:
            return None
        return request.arrived_at + limit - _EARLY_S


def _build(config: ResidualShortestJobConfig, context: PolicyContext) -> ResidualShortestJob:
    return ResidualShortestJob(config, context.limits.block_size)


SPEC = PolicySpec(
    name="residual_sjf",
    layer=Layer.REQUEST_PRIORITIZER,
    config=ResidualShortestJobConfig,
    build=_build,
    summary=(
        "The prompt with the fewest uncached blocks first; requests that have waited for long go before all others."
    ),
    source="xLLM (pull request 2164); PrefillOnly (arXiv:2505.07203)",
    advice=(
        "Use it where many prompts are long and mostly cached: they are short jobs. Not without a prefix cache (`sjf`)."
    ),
)
