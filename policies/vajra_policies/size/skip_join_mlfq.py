"""FastServe's skip-join multi-level feedback queue, for unknown output lengths and known prompt lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from vajra_py.contract import (
    EndedStep,
    FallenRequests,
    KeyMotion,
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    PrefillTime,
    RequestView,
)


class SkipJoinMlfqConfig(PolicyConfig):
    """Parameters of `skip_join_mlfq`; the defaults are those of FastServe's code."""

    quantum_s: float = Field(
        0.01, gt=0, description="Time that a request may run at the first level, seconds; about a decode step."
    )
    quantum_ratio: float = Field(2.0, gt=1, le=1000, description="Quantum of a level over that of the one above it.")
    num_levels: int = Field(16, ge=1, le=64, description="Number of levels.")
    skips: bool = Field(True, description="Join at the level whose quantum covers the prompt; if not, at the first.")
    starvation_s: float = Field(
        3.0, gt=0, description="Time without running after which a request is promoted, seconds."
    )
    promotion_steps: int = Field(
        1000, ge=1, description="Steps of the replicaset between promotions.", json_schema_extra={"unit": "steps"}
    )


@dataclass(slots=True)
class _Place:
    level: int
    ran_s: float
    """Time that the request has run at its present level, seconds."""
    last_run_at: float | None = None


class SkipJoinMlfq:
    """Key = (level, -time of the last step): within a level, requests that have just run continue, and new ones follow
    them.

    - The quantum of level i is q * r^i (`quantum_s`, `quantum_ratio`). A request joins at the first level whose quantum
      covers the prefill time of its prompt computed alone, so the prompt itself does not demote it.
    - After a step: a request that has run for longer than its level's quantum goes one level down.
    - Every `promotion_steps` steps, requests that did not run for `starvation_s` go to the first level.

    Needs a replica scheduler that preempts, such as `preemptive`.

    Left out: proactive swapping (ahead of need, overlapped with computing) and FastServe's rules for free host blocks.
    A request's running time is the duration of the whole steps that it was part of, prefill chunks and other requests
    included.

    Source: Wu et al., "Fast Distributed Inference Serving for Large Language Models" (FastServe, arXiv:2305.05920).
    """

    key_motion = KeyMotion.NAMED_FALLS
    """The key of a waiting request changes only by promotion."""

    def __init__(self, config: SkipJoinMlfqConfig, prefill_time: PrefillTime) -> None:
        self._config = config
        self._quanta = [config.quantum_s * config.quantum_ratio**level for level in range(config.num_levels)]
        self._prefill_time = prefill_time
        self._places: dict[RequestView, _Place] = {}
        self._num_steps = 0
        self.fallen_requests = FallenRequests()

    def key(self, request: RequestView, now: float) -> tuple[float, float]:
        """Return (level from 0; minus the end of the request's last step, 0 before its first)."""
        place = self._place(request)
        return (float(place.level), 0.0 if place.last_run_at is None else -place.last_run_at)

    def on_step_end(self, step: EndedStep) -> None:
        """Add the step's duration to the requests that ran, demote them if needed, and periodically promote starving
        ones.
        """
        last, quanta, places = len(self._quanta) - 1, self._quanta, self._places
        ended_at, duration_s = step.ended_at, step.duration_s
        for request in step.requests:
            place = places.get(request) or self._place(request)
            place.last_run_at = ended_at
            place.ran_s += duration_s
            if place.ran_s > quanta[place.level] and place.level < last:
                place.level += 1
                place.ran_s = 0.0
        self._num_steps += 1
        if self._num_steps % self._config.promotion_steps == 0:
            self._promote(step.ended_at)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget these requests."""
        for request in requests:
            self._places.pop(request, None)

    def _promote(self, now: float) -> None:
        for request, place in self._places.items():
            since = request.arrived_at if place.last_run_at is None else place.last_run_at
            if now - since >= self._config.starvation_s:
                place.level, place.ran_s = 0, 0.0
                self.fallen_requests.add(request)

    def _place(self, request: RequestView) -> _Place:
        place = self._places.get(request)
        if place is None:
            place = self._places[request] = _Place(self._first_level(request), 0.0)
        return place

    def _first_level(self, request: RequestView) -> int:
        if not self._config.skips:
            return 0
        prefill_s = self._prefill_time.total_s(request.num_prompt_tokens)
        covering = (level for level, quantum_s in enumerate(self._quanta) if quantum_s >= prefill_s)
        return next(covering, len(self._quanta) - 1)


def _build(config: SkipJoinMlfqConfig, context: PolicyContext) -> SkipJoinMlfq:
    return SkipJoinMlfq(config, context.prefill_time)


SPEC = PolicySpec(
    name="skip_join_mlfq",
    layer=Layer.REQUEST_PRIORITIZER,
    config=SkipJoinMlfqConfig,
    build=_build,
    summary=(
        "Skip-join multi-level feedback queue: requests that have run little go first, and long prompts join at a "
        "lower level."
    ),
    source="FastServe (Wu et al., arXiv:2305.05920)",
    aliases=("fastserve",),
    advice=(
        "Use it with `preemptive` where output lengths are unknown and differ much. Not where all requests have about "
        "the same length: it then preempts without benefit."
    ),
)
