"""Learning to rank: shortest expected output first, with a boost for requests that have waited too long."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from pydantic import Field

from vajra_policies.size.lengths import FirstLengths, LengthConfig, Lengths
from vajra_py.contract import (
    EndedRun,
    EndedStep,
    FallenRequests,
    KeyMotion,
    Layer,
    PolicyContext,
    PolicySpec,
    RequestView,
)

_ROUNDING_S = 1e-6
"""Seconds by which `falls_at` is early, so that the queue does not miss the start of a boost through rounding."""


class LearningToRankConfig(LengthConfig):
    """Parameters of `ltr`. The paper's code has no defaults for wait and boost, and counts the wait in steps."""

    starvation_s: float = Field(
        10.0, gt=0, description="Time without running after which a request is boosted, seconds."
    )
    boost_steps: int = Field(
        100,
        ge=1,
        description="Number of steps for which a boosted request goes before others.",
        json_schema_extra={"unit": "steps"},
    )


class LearningToRank:
    """Key = (0 if boosted, else 1; score), with the output length expected at arrival as score.

    A request that has run in no step for `starvation_s` is boosted until it has run in `boost_steps` steps, so no
    request waits much longer than `starvation_s`. Only the order of scores matters, so a predictor needs a high rank
    correlation with the true lengths (Kendall's tau), not a small error. Needs a replica scheduler that preempts, such
    as `preemptive`; with others it is shortest job first.

    Left out: the ranking model, a small language model trained on prompts; the backend's `output_length` takes its
    place.

    Source: Fu et al., "Efficient LLM Scheduling by Learning to Rank", NeurIPS'24 (arXiv:2408.15792).
    """

    key_motion = KeyMotion.NAMED_FALLS
    """A key falls when the request's boost begins, at a known time, and rises when the boost ends."""

    def __init__(self, config: LearningToRankConfig, context: PolicyContext) -> None:
        self._starvation_s = config.starvation_s
        self._boost_steps = config.boost_steps
        self._lengths = FirstLengths(Lengths(config, context.output_lengths))
        self._last_run_at: dict[RequestView, float] = {}
        self._boosts: dict[RequestView, int] = {}
        """Number of remaining steps of each boost."""
        self.fallen_requests = FallenRequests()

    def key(self, request: RequestView, now: float) -> tuple[float, float]:
        """Return (0 if the request is boosted, else 1; the output length expected at its arrival)."""
        is_boosted = request in self._boosts or self._starves(request, now)
        return (0.0 if is_boosted else 1.0, self._lengths.total(request))

    def falls_at(self, request: RequestView, now: float) -> float | None:
        """Return a time just before the request's boost begins, in seconds; None if it is boosted already."""
        if request in self._boosts or self._starves(request, now):
            return None
        return self._last_run_at.get(request, request.arrived_at) + self._starvation_s - _ROUNDING_S

    def on_step_end(self, step: EndedStep) -> None:
        """Count the step for each boosted request in it. Start the boost of each request in the step that had not run
        for `starvation_s` before.
        """
        boosts, ran_at, starved_at = self._boosts, self._last_run_at, step.formed_at - self._starvation_s
        for request in step.requests:
            if boosts and request in boosts:
                boosts[request] -= 1
                if not boosts[request]:
                    del boosts[request]
            elif ran_at.get(request, inf) <= starved_at + _ROUNDING_S or request not in ran_at:
                self._begin_boost(request, step.formed_at)
        ran_at.update(dict.fromkeys(step.requests, step.ended_at))

    def on_step_run(self, run: EndedRun) -> None:
        """Count each step of the run, as `on_step_end` does."""
        for step in run.steps():
            self.on_step_end(step)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget these requests."""
        self._lengths.forget(requests)
        for request in requests:
            self._last_run_at.pop(request, None)
            self._boosts.pop(request, None)

    def _begin_boost(self, request: RequestView, now: float) -> None:
        if self._starves(request, now) and self._boost_steps > 1:
            self._boosts[request] = self._boost_steps - 1

    def _starves(self, request: RequestView, now: float) -> bool:
        return now - self._last_run_at.get(request, request.arrived_at) >= self._starvation_s


SPEC = PolicySpec(
    name="ltr",
    layer=Layer.REQUEST_PRIORITIZER,
    config=LearningToRankConfig,
    build=LearningToRank,
    summary="Shortest expected output first, by rank; requests that have not run for long are boosted.",
    source="LTR (Fu et al., NeurIPS'24, arXiv:2408.15792)",
    aliases=("learning_to_rank",),
    advice=(
        "Use it with `preemptive` and a predictor that ranks well. Not without one: with a constant prediction it is "
        "FCFS with boosts."
    ),
)
