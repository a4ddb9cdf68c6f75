"""Earliest deadline first: the earlier a request's deadline, the more urgent it is."""

from __future__ import annotations

from vajra_policies.deadlines import DeadlineConfig, Deadlines
from vajra_py.contract import Key, KeyMotion, Layer, PolicyContext, PolicySpec, PrefillTime, RequestView


class EdfConfig(DeadlineConfig):
    """Parameters of `edf`."""


class Edf:
    """Key = arrival + D, with D = max(prefill_time(prompt) * deadline_multiplier, min_deadline_s); see `Deadlines`.

    Source: Vajra's scheduling architecture, EDF prioritizer; Liu and Layland (JACM 1973) for the rule itself.
    """

    def __init__(self, config: EdfConfig, prefill_time: PrefillTime) -> None:
        self._deadlines = Deadlines(config, prefill_time)

    @property
    def key_motion(self) -> KeyMotion:
        """`STATIC`, since a deadline is fixed at arrival."""
        return KeyMotion.STATIC

    def key(self, request: RequestView, now: float) -> Key:
        """Return the deadline, seconds on the run's clock."""
        return request.arrived_at + self._deadlines.relative_s(request)

    def slack_s(self, request: RequestView, now: float) -> float:
        """Return arrival + D - now - prefill_time(remaining prompt), seconds."""
        return self._deadlines.slack_s(request, now)

    def slack_fraction(self, request: RequestView, now: float) -> float:
        """Return `slack_s` divided by D; this is the key of `lrs`."""
        return self._deadlines.slack_s(request, now) / self._deadlines.relative_s(request)


def _build(config: EdfConfig, context: PolicyContext) -> Edf:
    return Edf(config, context.prefill_time)


SPEC = PolicySpec(
    name="edf",
    layer=Layer.REQUEST_PRIORITIZER,
    config=EdfConfig,
    build=_build,
    summary="Earliest deadline first; deadlines follow from predicted prefill times.",
    source="Vajra's scheduling architecture, EDF prioritizer",
    advice=(
        "Use it where requests have deadlines that can be met. Not in overload: all requests become late together "
        "(`qoserve`)."
    ),
)
