"""QoServe's order of prompts: by deadline and remaining length; requests that cannot be in time are relegated."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from vajra_py.contract import (
    EndedRun,
    EndedStep,
    FallenRequests,
    KeyMotion,
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    ReplicaId,
    RequestView,
)


class QoserveConfig(PolicyConfig):
    """Parameters of `qoserve`; the defaults are those of its code, for an 8B model on an A100."""

    alpha_s: float = Field(
        0.008, ge=0, description="Weight of a remaining prompt token against time, seconds; 0: earliest deadline first."
    )
    expected_output_tokens: float = Field(
        15.0,
        ge=0,
        description="Number of output tokens for which time is reserved before a deadline.",
        json_schema_extra={"unit": "tokens"},
    )
    batch_tbt_s: float = Field(0.4, gt=0, description="Time reserved for each expected output token, seconds.")
    default_ttft_s: float = Field(600.0, gt=0, description="TTFT SLO of requests without SLOs, seconds.")
    relegates: bool = Field(True, description="Put requests that would be late anyway behind all others.")
    first_throughput: float = Field(
        8500.0, gt=0, description="Throughput that relegation assumes before a step is measured, tokens per second."
    )
    decay: float = Field(
        0.995,
        ge=0,
        lt=1,
        description=("Weight of earlier steps in the moving average of the throughput, at each step with prompts."),
    )


class Qoserve:
    """Key = (1 if relegated, else 0; arrival + D + alpha * remaining prompt tokens).

    - D is the TTFT SLO; for requests with only a deadline, the deadline minus `expected_output_tokens` times
      `batch_tbt_s`. alpha = 0 is earliest deadline first; a large alpha is shortest remaining prompt first.
    - Relegation: suppose that from now on only the prompt of a request is computed, at the recent throughput. If the
      request would still miss arrival + D, it is relegated: it goes behind all requests that can still be in time. A
      request that is admitted while relegated stays relegated. An overload thus makes only some requests late.

    Companion of `slack_chunk`, QoServe's chunks. Left out: an alpha that adapts to the load, and the relegation of
    important requests last.

    Source: "Niyama: Breaking the Silos of LLM Inference Serving" (arXiv:2503.22562), as QoServe at ASPLOS'26; its branch
    `niyama_asplos2026` of Sarathi-Serve for constants.
    """

    key_motion = KeyMotion.NAMED_FALLS
    """A key rises when its request is relegated, and falls when a higher throughput reinstates the request."""

    def __init__(self, config: QoserveConfig) -> None:
        self._config = config
        self._throughput = config.first_throughput
        self._relegated: dict[RequestView, None] = {}
        self._reprieves: dict[RequestView, None] = {}
        """Waiting requests that were relegated before their deadline; a higher throughput may reinstate them."""
        self.fallen_requests = FallenRequests()

    def key(self, request: RequestView, now: float) -> tuple[float, float]:
        """Return (1 if relegated, else 0; deadline plus weighted rest of the prompt, in seconds)."""
        deadline = request.arrived_at + self._relative_s(request)
        is_relegated = self._is_relegated(request, now)
        if is_relegated and now < deadline and request not in self._relegated:
            self._reprieves[request] = None
        return (float(is_relegated), deadline + self._config.alpha_s * request.num_remaining_prompt_tokens)

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Keep a relegated request relegated while it runs."""
        if self._is_relegated(request, now):
            self._relegated[request] = None
        self._reprieves.pop(request, None)

    def on_step_end(self, step: EndedStep) -> None:
        """Update the moving average of the throughput of steps with prompts."""
        num_tokens = sum(step.num_tokens)
        if num_tokens > len(step.requests) and step.duration_s > 0:
            decay, before = self._config.decay, self._throughput
            self._throughput = decay * before + (1.0 - decay) * num_tokens / step.duration_s
            if self._throughput > before:
                self._reprieve(step.ended_at)

    def on_step_run(self, run: EndedRun) -> None:
        """Do nothing: a run consists of pure decode steps, which do not count."""

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget these requests."""
        for request in requests:
            self._relegated.pop(request, None)
            self._reprieves.pop(request, None)

    def _reprieve(self, now: float) -> None:
        """Report the requests that may be in time after all, so that their keys are re-read."""
        for request in list(self._reprieves):
            if now < request.arrived_at + self._relative_s(request):
                self.fallen_requests.add(request)
            else:
                del self._reprieves[request]

    def _relative_s(self, request: RequestView) -> float:
        config = self._config
        if request.ttft_slo_s is not None:
            return request.ttft_slo_s
        if request.deadline_at is not None:
            return request.deadline_at - request.arrived_at - config.expected_output_tokens * config.batch_tbt_s
        return config.default_ttft_s

    def _is_relegated(self, request: RequestView, now: float) -> bool:
        if not self._config.relegates:
            return False
        if request in self._relegated:
            return True
        if request.is_resident or request.num_output_tokens:
            return False
        prefill_s = request.num_remaining_prompt_tokens / self._throughput
        return now + prefill_s > request.arrived_at + self._relative_s(request)


def _build(config: QoserveConfig, context: PolicyContext) -> Qoserve:
    return Qoserve(config)


SPEC = PolicySpec(
    name="qoserve",
    layer=Layer.REQUEST_PRIORITIZER,
    config=QoserveConfig,
    build=_build,
    summary=(
        "Earliest deadline first, combined with shortest prompt first; requests that would be late anyway go behind "
        "all others."
    ),
    source="QoServe / Niyama (arXiv:2503.22562, ASPLOS'26)",
    aliases=("niyama",),
    advice=(
        "Use it with `slack_chunk` for classes of different urgency in an overload. Not where a late answer is worth "
        "as much as one in time: relegated requests wait for all others."
    ),
)
