"""Andes: run the requests that gain the most quality of experience per token of KV memory."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from vajra_policies.slo.reading import Reading
from vajra_policies.slo.targets import tpot_target_s
from vajra_py.contract import (
    EndedStep,
    KeyMotion,
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    PrefillTime,
    ReplicaId,
    RequestView,
)
from vajra_py.contract.latency import LAST_S


class AndesConfig(PolicyConfig):
    """Parameters of `andes`."""

    reading_speed: float = Field(
        4.8, gt=0, description="Reading speed assumed for requests without a TPOT SLO, tokens per second."
    )
    expected_ttft_s: float = Field(1.0, gt=0, description="TTFT assumed for requests without a TTFT SLO, seconds.")
    horizon_s: float = Field(
        10.0, gt=0, le=LAST_S, description="Horizon over which serving a request or not is compared (Delta t), seconds."
    )
    preemption_cap: float | None = Field(
        1.0,
        ge=0,
        description="Mean number of preemptions per request from which none is preempted; null: no cap.",
    )
    first_step_s: float = Field(0.03, gt=0, description="Assumed step time before any step has ended, seconds.")


class Andes:
    """Key = (1, -gain / context): the request with the largest gain per token of context comes first.

    The gain of a request is its QoE after `horizon_s` if it is served, minus its QoE after `horizon_s` if it is not.
    The context is the number of tokens that the request holds or needs in KV memory.

    QoE is the integral over time of the tokens read, divided by that of the tokens expected (`Reading`). The first
    token is expected at the TTFT SLO, and then 1 / TPOT SLO tokens per second (without this SLO, `reading_speed`). A
    request whose reader has buffered tokens loses nothing by a pause, and makes room for others; a request whose reader
    waits for tokens continues. Once requests have been preempted `preemption_cap` times on average, running requests
    come first: (0, ..).

    Needs the replica scheduler `preemptive`, which pauses and preempts requests only if slots or memory are short.

    Left out: the search for the batch size; the time between tokens is a moving average of step times (weight 0.1). Cap
    and horizon are from memory of the paper; the reading speed is a round figure.

    Source: Liu et al., "Andes: Defining and Enhancing Quality-of-Experience in LLM-Based Text Streaming Services"
    (arXiv:2404.16283).
    """

    key_motion = KeyMotion.ARBITRARY

    def __init__(self, config: AndesConfig, prefill_time: PrefillTime) -> None:
        self._config = config
        self._prefill_time = prefill_time
        self._readings: dict[RequestView, Reading] = {}
        self._step_s = config.first_step_s
        self._num_requests = 0
        self._num_preemptions = 0

    def key(self, request: RequestView, now: float) -> tuple[float, float]:
        """Return (0 if the request runs and the cap is exceeded, else 1; minus the gain per token of context)."""
        cap = self._config.preemption_cap
        is_capped = cap is not None and self._num_preemptions > cap * self._num_requests
        stays = is_capped and request.is_resident
        return (0.0 if stays else 1.0, -self._gain(request, now) / request.num_known_tokens)

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Count these requests for the preemption cap."""
        self._num_requests += len(requests)

    def on_preemption(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Count the preemption for the preemption cap."""
        self._num_preemptions += 1

    def on_step_end(self, step: EndedStep) -> None:
        """Update the mean step time, and add the step's new tokens to the buffers of the requests' readers."""
        self._step_s += 0.1 * (step.duration_s - self._step_s)
        for request in step.requests:
            reading = self._reading(request)
            num_new = request.num_output_tokens - reading.num_tokens
            if num_new > 0:
                reading.receive(step.ended_at - request.arrived_at, num_new)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget these requests."""
        for request in requests:
            self._readings.pop(request, None)

    def _gain(self, request: RequestView, now: float) -> float:
        reading, age_s = self._reading(request), now - request.arrived_at
        until_s = age_s + self._config.horizon_s
        seconds = until_s - reading.at_s
        prefill_s = self._prefill_time.remaining_s(request.num_known_tokens, request.num_computed_tokens)
        delay_s = age_s - reading.at_s + (prefill_s if request.num_remaining_tokens > 1 else 0.0)
        served = reading.area_after(seconds, delay_s, 1.0 / self._step_s)
        waiting = reading.area_after(seconds, seconds, 0.0)
        expected = reading.expected_area(until_s)
        return (served - waiting) / expected if expected > 0 else 0.0

    def _reading(self, request: RequestView) -> Reading:
        reading = self._readings.get(request)
        if reading is None:
            config, target_s = self._config, tpot_target_s(request)
            speed = config.reading_speed if not target_s else 1.0 / target_s
            ttft_s = config.expected_ttft_s if request.ttft_slo_s is None else request.ttft_slo_s
            reading = self._readings[request] = Reading(speed, ttft_s)
        return reading


def _build(config: AndesConfig, context: PolicyContext) -> Andes:
    return Andes(config, context.prefill_time)


SPEC = PolicySpec(
    name="andes",
    layer=Layer.REQUEST_PRIORITIZER,
    config=AndesConfig,
    build=_build,
    summary=(
        "Requests that gain the most quality of experience per token of memory first; requests with buffered tokens "
        "can pause."
    ),
    source="Andes (Liu et al., arXiv:2404.16283)",
    advice=(
        "Use it with `preemptive` for chats that people read: a request whose reader has buffered tokens can pause "
        "unnoticed. Not for outputs that are read by programs."
    ),
)
