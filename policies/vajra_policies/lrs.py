"""Least relative slack: the smaller a request's slack relative to its deadline, the more urgent it is."""

from __future__ import annotations

from vajra_policies.deadlines import DeadlineConfig, Deadlines
from vajra_py.contract import KeyMotion, Layer, PolicyContext, PolicySpec, PrefillTime, RequestView


class LrsConfig(DeadlineConfig):
    """Parameters of `lrs`."""


class Lrs:
    """Key = (arrival + D - now - prefill_time(remaining prompt)) / D, with EDF's relative deadline D.

    The key falls by 1/D per second while a request waits, and rises as its prompt is computed. Short prompts (small D)
    age fast and long prompts slowly, but a long prompt is not starved: once it has waited long enough, it goes first.
    This makes the policy length-aware. The order of two requests with different D may change as time passes; `line`
    lets queues keep the exact order.

    Source: Medha (arXiv:2409.17264), "length-aware relative slack" (LARS); Vajra's scheduling architecture calls it LRS.
    """

    def __init__(self, config: LrsConfig, prefill_time: PrefillTime) -> None:
        self._deadlines = Deadlines(config, prefill_time)
        self._prefill_time = prefill_time

    @property
    def key_motion(self) -> KeyMotion:
        """`TIME_LINEAR`: between two chunks of the request, the key is a straight line in time."""
        return KeyMotion.TIME_LINEAR

    def line(self, request: RequestView) -> tuple[float, float]:
        """Return (intercept, slope): (arrival + D - prefill_time(remaining prompt)) / D, and -1/D per second."""
        relative_s = self._deadlines.relative_s(request)
        remaining_s = self._prefill_time.remaining_s(request.num_prompt_tokens, request.num_computed_tokens)
        return (request.arrived_at + relative_s - remaining_s) / relative_s, -1.0 / relative_s

    def key(self, request: RequestView, now: float) -> float:
        """Return the relative slack at `now`: 1 - prefill_time / D at arrival, 0 when the remaining prompt must be
        computed at once to meet the deadline, below 0 when the deadline can no longer be met.
        """
        intercept, slope = self.line(request)
        return intercept + slope * now

    def slack_s(self, request: RequestView, now: float) -> float:
        """Return arrival + D - now - prefill_time(remaining prompt), seconds."""
        return self._deadlines.slack_s(request, now)

    def slack_fraction(self, request: RequestView, now: float) -> float:
        """Return the relative slack, which is also the key."""
        return self.key(request, now)


def _build(config: LrsConfig, context: PolicyContext) -> Lrs:
    return Lrs(config, context.prefill_time)


SPEC = PolicySpec(
    name="lrs",
    layer=Layer.REQUEST_PRIORITIZER,
    config=LrsConfig,
    build=_build,
    summary="Least relative slack to the deadline first; it depends on length, progress and time.",
    source="Medha (arXiv:2409.17264), LARS; Vajra's scheduling architecture, LRS prioritizer",
    aliases=("lars",),
    advice=(
        "Use it where prompts of very different lengths share replicas: short ones age fast, and long ones are not "
        "starved. Not without a latency model that predicts prefill times."
    ),
)
