"""First come, first served: the earlier a request arrived, the more urgent it is."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vajra_py.contract import Key, KeyMotion, Layer, PolicyConfig, PolicyContext, PolicySpec, RequestView


class FcfsConfig(PolicyConfig):
    """Parameters of `fcfs`."""

    preempted: Literal["by_arrival", "first"] = Field(
        "by_arrival",
        description=(
            "Position of preempted requests: by arrival, like other requests, or before all requests that were "
            "never preempted (the latest preempted first)."
        ),
    )


class Fcfs:
    """Key = arrival, seconds on the run's clock.

    With `preempted: first`, a preempted request gets a key below all arrivals, and the latest preempted request has the
    lowest, as in engines that put victims at the front of the queue. A request keeps this key after readmission, so
    that the choice of victims uses it too.

    Source: Vajra's scheduling architecture; the option follows vLLM (Kwon et al., SOSP'23), which prepends victims.
    """

    def __init__(self, config: FcfsConfig) -> None:
        self._preempted_first = config.preempted == "first"

    @property
    def key_motion(self) -> KeyMotion:
        """`STATIC`, or `PROGRESS` if preemption moves a request to the front."""
        return KeyMotion.PROGRESS if self._preempted_first else KeyMotion.STATIC

    def key(self, request: RequestView, now: float) -> Key:
        """Return the arrival; with `preempted: first`, a pair that puts preempted requests first."""
        if not self._preempted_first:
            return request.arrived_at
        if request.preempted_index:
            return (0.0, -float(request.preempted_index))
        return (1.0, request.arrived_at)


def _build(config: FcfsConfig, context: PolicyContext) -> Fcfs:
    return Fcfs(config)


SPEC = PolicySpec(
    name="fcfs",
    layer=Layer.REQUEST_PRIORITIZER,
    config=FcfsConfig,
    build=_build,
    summary="First come, first served.",
    source="Vajra's scheduling architecture, FCFS prioritizer",
    advice=(
        "Use it as the baseline, and where requests are similar. Not where short prompts would wait behind long ones."
    ),
)
