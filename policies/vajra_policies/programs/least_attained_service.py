"""llm-d's program-aware fairness: least attained service first, which fades with time, mixed with the wait."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from vajra_policies.waiting import Waiting
from vajra_py.contract import (
    KeyMotion,
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    ProgramView,
    ReplicaId,
    RequestView,
)


class LeastAttainedServiceConfig(PolicyConfig):
    """Parameters of `least_attained_service`; the defaults are llm-d's."""

    service_weight: float = Field(0.8, ge=0, description="Weight of little service in the score (w_s).")
    head_wait_weight: float = Field(0.2, ge=0, description="Weight of the wait of a program's first request (w_h).")
    half_life_s: float = Field(60.0, gt=0, description="Time in which attained service halves, seconds.")
    input_weight: float = Field(1.0, ge=0, description="Service for a prompt token of a request that has ended.")
    output_weight: float = Field(2.0, ge=0, description="Service for a token that it generated.")


class LeastAttainedService:
    """Key = minus the score w_s * (1 - norm(service)) + w_h * norm(wait of the first request) of the request's program.

    - A request that ends adds its weighted tokens, cached ones included, to its program's service, which halves every `half_life_s`.
    - norm maps what programs with waiting requests have to 0 .. 1, from the least to the most; it is 0 for all where these are equal.
    - Requests of one program are served in order of arrival. One without a program belongs to its tenant.

    A program that has used nothing lately goes first, and one that waits for long catches up. Scores are made anew whenever a
    request is admitted, so keys are `VOLATILE`.

    Left out: the service of programs that are idle for an hour is not dropped; by then it has halved sixty times.

    Source: llm-d's router, flow-control plugin `program-aware-fairness`, strategy `las`.
    """

    key_motion = KeyMotion.VOLATILE

    def __init__(self, config: LeastAttainedServiceConfig) -> None:
        self._config = config
        self._waiting = Waiting(_program_of)
        self._services: dict[str, tuple[float, float]] = {}
        """Service of each program, and when it was that."""
        self._scores: dict[str, float] = {}
        self._scored_at: float | None = None

    def key(self, request: RequestView, now: float) -> float:
        """Minus the score; 0 where no request of the program waits."""
        if self._scored_at != now:
            self._scores, self._scored_at = self._scores_at(now), now
        return -self._scores.get(_program_of(request), 0.0)

    def service(self, program: str, now: float) -> float:
        """What is left at `now` of the program's service, weighted tokens."""
        amount, at = self._services.get(program, (0.0, now))
        left: float = amount * 0.5 ** ((now - at) / self._config.half_life_s)
        return left

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Programs have more requests that wait."""
        for request in requests:
            if not request.is_resident:
                self._waiting.add(request)
        self._scored_at = None

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """The program's next request is its first one."""
        self._waiting.remove(request)
        self._scored_at = None

    def on_preemption(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """It waits again."""
        self._waiting.add(request)
        self._scored_at = None

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Count the service of those that were served."""
        config = self._config
        for request in requests:
            self._waiting.remove(request)
            if request.admitted_index:
                cost = (
                    config.input_weight * request.num_prompt_tokens + config.output_weight * request.num_output_tokens
                )
                program = _program_of(request)
                self._services[program] = (self.service(program, now) + cost, now)
        self._scored_at = None

    def on_program_end(self, program: ProgramView, now: float) -> None:
        """Forget it."""
        self._services.pop(program.program_id, None)

    def _scores_at(self, now: float) -> dict[str, float]:
        heads = {name: next(iter(members)) for name, members in self._waiting.groups.items()}
        services = _normalised({name: self.service(name, now) for name in heads})
        waits = _normalised({name: now - head.arrived_at for name, head in heads.items()})
        by_service, by_wait = self._config.service_weight, self._config.head_wait_weight
        return {name: by_service * (1.0 - services[name]) + by_wait * waits[name] for name in heads}


def _normalised(values: dict[str, float]) -> dict[str, float]:
    """The values mapped to 0 .. 1, from the least to the most."""
    least, most = min(values.values(), default=0.0), max(values.values(), default=0.0)
    span = most - least
    return {name: (value - least) / span if span > 0 else 0.0 for name, value in values.items()}


def _program_of(request: RequestView) -> str:
    return request.program_id or request.tenant


def _build(config: LeastAttainedServiceConfig, context: PolicyContext) -> LeastAttainedService:
    return LeastAttainedService(config)


SPEC = PolicySpec(
    name="least_attained_service",
    layer=Layer.REQUEST_PRIORITIZER,
    config=LeastAttainedServiceConfig,
    build=_build,
    summary="The program with the least service of late first, mixed with the wait of its first request.",
    source="llm-d's program-aware fairness, strategy las",
    aliases=("las", "program_aware_fairness"),
)
