"""JITServe: requests with the most reward per remaining time first, with upper estimates of output lengths."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import Field

from vajra_policies.size.lengths import LengthConfig, Lengths
from vajra_policies.slo.targets import tpot_target_s
from vajra_py.contract import (
    EndedStep,
    FallenRequests,
    KeyMotion,
    Layer,
    PolicyContext,
    PolicySpec,
    ProgramView,
    RequestView,
)

_LEAST_RATIO = 1e-6


class JitserveConfig(LengthConfig):
    """Parameters of `jitserve`; the defaults are those of its code."""

    estimate: Literal["mean", "p50", "p90"] = Field(
        "p90", description="Statistic of a predicted length that is used; the paper takes an upper quantile."
    )
    output_weight: float = Field(
        8.0, ge=0, le=1e9, description="Reward of an output token over that of a prompt token (w)."
    )
    lateness_power: float = Field(
        1.0, gt=0, description="Power of the ratio by which the reward of a late request falls (k)."
    )
    refresh_steps: int = Field(
        50,
        ge=1,
        description="Steps of the replicaset after which priorities are computed anew.",
        json_schema_extra={"unit": "steps"},
    )
    window_steps: int = Field(
        10, ge=1, description="Steps over which the step time is averaged.", json_schema_extra={"unit": "steps"}
    )
    first_step_s: float = Field(0.02, gt=0, description="Assumed step time before any step has ended, seconds.")


class Jitserve:
    """Key = -(reward / remaining time), recomputed every `refresh_steps` steps.

    - Remaining time = (expected output - generated) * mean step time.
    - Reward of a request with an SLO for TTFT or TBT: p * r_p^k + w * d * r_d^k; with a deadline, or without any SLO:
      (p + w * d) * r^k. p and d are prompt and expected output tokens; r = allowed time / predicted time, at most 1, so
      the reward falls as the request becomes late. r_p is this ratio for the first token, r_d for the time between
      tokens.
    - Calls of a program with a deadline count together: with the sum of their rewards and the longest remaining time.

    Needs a replica scheduler that preempts, such as `preemptive`. Left out: groups of requests with similar inputs,
    among which the paper chooses, and its predictor of lengths, a quantile regression forest that is refined as tokens
    come; the backend's `output_length` takes its place.

    Source: "JITServe: SLO-aware LLM Serving with Imprecise Request Information", NSDI'26 (arXiv:2504.20068); its code.
    """

    key_motion = KeyMotion.NAMED_FALLS
    """Priorities change only when they are recomputed, all at once."""

    def __init__(self, config: JitserveConfig, context: PolicyContext) -> None:
        self._config = config
        self._lengths = Lengths(config, context.output_lengths)
        self._prefill_time = context.prefill_time
        self._durations: deque[float] = deque([config.first_step_s], maxlen=config.window_steps)
        self._num_steps = 0
        self._priorities: dict[RequestView, float] = {}
        self._calls: dict[ProgramView, dict[RequestView, None]] = {}
        self.fallen_requests = FallenRequests()

    def key(self, request: RequestView, now: float) -> float:
        """Return minus the request's last computed priority, in weighted tokens per second."""
        priority = self._priorities.get(request)
        if priority is None:
            priority = self._priorities[request] = self._priority(request, now)
        return -priority

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Record the calls of programs."""
        for request in requests:
            if request.program is not None:
                self._calls.setdefault(request.program, {})[request] = None

    def on_step_end(self, step: EndedStep) -> None:
        """Add the step's duration to the mean step time; every `refresh_steps` steps, discard all priorities."""
        if not self._num_steps:
            self._durations.clear()
        self._durations.append(step.duration_s)
        self._num_steps += 1
        if self._num_steps % self._config.refresh_steps == 0:
            self._priorities.clear()
            self.fallen_requests.add_all()

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget these requests."""
        for request in requests:
            self._priorities.pop(request, None)
            calls = self._calls.get(request.program) if request.program is not None else None
            if calls is not None:
                calls.pop(request, None)

    def on_program_end(self, program: ProgramView, now: float) -> None:
        """Forget the program."""
        self._calls.pop(program, None)

    def _priority(self, request: RequestView, now: float) -> float:
        program = request.program
        if program is None or program.deadline_at is None:
            return self._reward(request, now) / self._remaining_s(request)
        calls: Iterable[RequestView] = self._calls.get(program) or (request,)
        remaining_s = max(self._remaining_s(one) for one in calls)
        ratio = self._ratio(program.deadline_at - program.arrived_at, now - program.arrived_at + remaining_s)
        return sum(self._tokens(one) for one in calls) * ratio / remaining_s

    def _reward(self, request: RequestView, now: float) -> float:
        between_s = tpot_target_s(request)
        age_s = now - request.arrived_at
        if request.deadline_at is not None:
            allowed_s = request.deadline_at - request.arrived_at
            return self._tokens(request) * self._ratio(allowed_s, age_s + self._remaining_s(request))
        if request.ttft_slo_s is None and between_s is None:
            return self._tokens(request)
        prefill = decode = 1.0
        if request.ttft_slo_s is not None and not request.num_output_tokens:
            prefill_s = self._prefill_time.remaining_s(request.num_prompt_tokens, request.num_computed_tokens)
            prefill = self._ratio(request.ttft_slo_s, age_s + prefill_s)
        if between_s is not None:
            decode = self._ratio(between_s, self._step_s())
        outputs = self._config.output_weight * self._lengths.total(request)
        return request.num_prompt_tokens * prefill + outputs * decode

    def _tokens(self, request: RequestView) -> float:
        return request.num_prompt_tokens + self._config.output_weight * self._lengths.total(request)

    def _ratio(self, allowed_s: float, predicted_s: float) -> float:
        """Return allowed time / predicted time, clamped to 1e-6 .. 1, to the power `lateness_power`."""
        ratio = min(max(allowed_s / predicted_s, _LEAST_RATIO), 1.0)
        return float(ratio**self._config.lateness_power)

    def _remaining_s(self, request: RequestView) -> float:
        return self._lengths.remaining(request) * self._step_s()

    def _step_s(self) -> float:
        return sum(self._durations) / len(self._durations)


SPEC = PolicySpec(
    name="jitserve",
    layer=Layer.REQUEST_PRIORITIZER,
    config=JitserveConfig,
    build=Jitserve,
    summary="The highest reward, in tokens served in time, per remaining time first.",
    source="JITServe (NSDI'26, arXiv:2504.20068)",
    advice=(
        "Use it with `preemptive` and upper estimates of lengths, where tokens count only if they are in time. Not "
        "where all requests can be served in time (`edf`)."
    ),
)
