"""llm-d's program-aware fairness: a program scores high if its attained service, which decays, is small, and if its
first request has waited long.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from vajra_py.contract import (
    FallenGroups,
    KeyMotion,
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    ProgramView,
    ReplicaId,
    RequestView,
)

_REMEMBERED_S = 3600.0
"""Seconds for which a program's service is kept after the latest end of one of its requests."""


class LeastAttainedServiceConfig(PolicyConfig):
    """Parameters of `least_attained_service`; the defaults are llm-d's."""

    service_weight: float = Field(0.8, ge=0, description="Weight of little service in the score (w_s).")
    head_wait_weight: float = Field(0.2, ge=0, description="Weight of the wait of a program's first request (w_h).")
    half_life_s: float = Field(60.0, gt=0, description="Time in which attained service halves, seconds.")
    input_weight: float = Field(
        1.0, ge=0, le=1e9, description=("Service that an ended request counts for each of its prompt tokens.")
    )
    output_weight: float = Field(
        2.0, ge=0, le=1e9, description=("Service that an ended request counts for each token that it generated.")
    )


class LeastAttainedService:
    """Key of a program = -score, with score = w_s * (1 - norm(service)) + w_h * norm(wait of its first request).

    - A request that ends adds its weighted tokens, cached ones included, to its program's service. The service halves
      every `half_life_s`.
    - norm maps the values of programs with waiting requests to 0 .. 1, from the least to the greatest; it is 0 for all
      if they are equal.
    - Requests of one program are served in order of arrival. A request without a program belongs to its tenant.

    A program without recent service goes first, and one that waits long catches up. The passing of time changes no
    score: all services decay in the same proportion, and all waits grow equally. An arrival, admission or end may
    change all scores. Service is forgotten after an hour in which no request of the program has ended.

    Left out: llm-d's bands of priority and the limits of its queues.

    Source: llm-d's router, flow-control plugin `program-aware-fairness`, strategy `las`.
    """

    key_motion = KeyMotion.STATIC

    def __init__(self, config: LeastAttainedServiceConfig) -> None:
        self._config = config
        self._waiting: dict[str, dict[RequestView, None]] = {}
        """Waiting requests of each program with waiting requests, in the order in which the requests began to wait."""
        self._services: dict[str, tuple[float, float]] = {}
        """(service, time of this value) of each program; the program updated last comes last."""
        self._scores: dict[str, float] | None = {}
        """Scores of waiting programs; None if they must be recomputed."""
        self._changed_at = 0.0
        self.fallen_groups = FallenGroups()

    def key(self, request: RequestView, now: float) -> float:
        """Return 0: requests of one program are served in order of arrival."""
        return 0.0

    def group(self, request: RequestView) -> str:
        """Return the name of the group of the request's program or, without one, of its tenant."""
        return _group_of(request)

    def group_key(self, group: str) -> float:
        """Return minus the score; 0 if no request of the program waits."""
        if self._scores is None:
            self._scores = self._scores_at(self._changed_at)
        return -self._scores.get(group, 0.0)

    def service(self, group: str, now: float) -> float:
        """Return the service of a program's or tenant's group after its decay until `now`, weighted tokens."""
        amount, at = self._services.get(group, (0.0, now))
        left: float = amount * 0.5 ** ((now - at) / self._config.half_life_s)
        return left

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Add requests to the waiting ones of their programs."""
        for request in requests:
            if not request.is_resident:
                self._wait(request)
        self._change(now)

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Remove the request from the waiting ones of its program."""
        self._leave(request)
        self._change(now)

    def on_preemption(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Count the request among the waiting ones again."""
        self._wait(request)
        self._change(now)

    def on_moved(self, request: RequestView, source: ReplicaId, target: ReplicaId, now: float) -> None:
        """Count the request among the waiting ones again."""
        self._wait(request)
        self._change(now)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """For each request that was admitted, add its weighted tokens to its program's service; drop old services."""
        config = self._config
        for request in requests:
            self._leave(request)
            if request.admitted_index:
                cost = (
                    config.input_weight * request.num_prompt_tokens + config.output_weight * request.num_output_tokens
                )
                program = _group_of(request)
                service = self.service(program, now) + cost
                self._services.pop(program, None)
                self._services[program] = service, now
        while self._services and now - next(iter(self._services.values()))[1] > _REMEMBERED_S:
            del self._services[next(iter(self._services))]
        self._change(now)

    def on_program_end(self, program: ProgramView, now: float) -> None:
        """Forget the program."""
        self._services.pop(_group_of_program(program.program_id), None)

    def _wait(self, request: RequestView) -> None:
        self._waiting.setdefault(_group_of(request), {})[request] = None

    def _leave(self, request: RequestView) -> None:
        program = _group_of(request)
        members = self._waiting.get(program, {})
        members.pop(request, None)
        if not members:
            self._waiting.pop(program, None)

    def _change(self, now: float) -> None:
        """Discard the scores, and report that the keys of all waiting programs may have fallen."""
        self._scores, self._changed_at = None, now
        for program in self._waiting:
            self.fallen_groups.add(program)

    def _scores_at(self, now: float) -> dict[str, float]:
        heads = {name: next(iter(members)) for name, members in self._waiting.items()}
        services = _normalised({name: self.service(name, now) for name in heads})
        waits = _normalised({name: now - head.arrived_at for name, head in heads.items()})
        by_service, by_wait = self._config.service_weight, self._config.head_wait_weight
        return {name: by_service * (1.0 - services[name]) + by_wait * waits[name] for name in heads}


def _normalised(values: dict[str, float]) -> dict[str, float]:
    """Return the values mapped to 0 .. 1, from the least to the greatest; 0 for all if they are equal."""
    least, most = min(values.values(), default=0.0), max(values.values(), default=0.0)
    span = most - least
    return {name: (value - least) / span if span > 0 else 0.0 for name, value in values.items()}


def _group_of(request: RequestView) -> str:
    return _group_of_program(request.program_id) if request.program_id else f"tenant {request.tenant}"


def _group_of_program(program_id: str) -> str:
    return f"program {program_id}"


def _build(config: LeastAttainedServiceConfig, context: PolicyContext) -> LeastAttainedService:
    return LeastAttainedService(config)


SPEC = PolicySpec(
    name="least_attained_service",
    layer=Layer.REQUEST_PRIORITIZER,
    config=LeastAttainedServiceConfig,
    build=_build,
    summary="The program that recently received the least service goes first; its first request's wait counts too.",
    source="llm-d's program-aware fairness, strategy las",
    aliases=("las", "program_aware_fairness"),
    advice=(
        "Use it for programs that come and go: programs with little recent service go first. Not for exact shares "
        "(`vtc`). Unlike in `plas`, service is counted in tokens and decays with time."
    ),
)
