"""Ascendra: replicas for throughput, and a few that take over requests that would miss their TTFT SLOs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import Field

from vajra_policies.routing import BindsOnArrival, PeriodicWakeUps, those_up
from vajra_py.contract import (
    Layer,
    Move,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
)


class AscendraConfig(PolicyConfig):
    """Parameters of `ascendra`."""

    high_priority_fraction: float = Field(
        0.25,
        gt=0,
        lt=1,
        description="Fraction of the replicas, at least one of several, that take over urgent requests (HP).",
    )
    margin_s: float = Field(
        0.2, ge=0, description="Time before its latest start at which a request is handed over, seconds."
    )
    interval_s: float = Field(0.05, gt=0, description="Interval at which waiting requests are checked, seconds.")


class Ascendra(BindsOnArrival):
    """Binds on arrival to the least loaded low-priority (LP) replica; a request that is about to miss its TTFT SLO
    moves to a high-priority (HP) replica.

    A waiting request moves when now + `margin_s` + T(prompt) > arrival + TTFT SLO, with T(prompt) the predicted prefill
    time of the prompt alone. The target is the HP replica with the fewest tokens to prefill; the request moves only if
    the target has fewer such tokens than the request's present replica. HP replicas are those with the highest ids. LP
    replicas may therefore order and batch for throughput, and HP replicas have room for requests that would be late as
    a result. Requests without a TTFT SLO stay. If only one replica is up, it takes all requests.

    Left out: the LP replicas' value function, elapsed time over urgency; use any prioritizer instead. Fraction, margin
    and interval are round figures.

    Source: "Ascendra: Dynamic Request Prioritization for Efficient LLM Serving" (arXiv:2504.20828).
    """

    def __init__(self, config: AscendraConfig, context: PolicyContext) -> None:
        self._config = config
        self._prefill_time = context.prefill_time
        self._looks = PeriodicWakeUps(context.wake, config.interval_s)
        self._waiting: dict[RequestView, ReplicaId] = {}
        """Requests with a TTFT SLO that wait for the first time, each with the LP replica where it waits."""

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the least loaded LP replica."""
        low, _ = self._split(replicas)
        if not low:
            return None
        best = min(low, key=lambda one: (one.num_running + one.num_waiting, one.replica_id)).replica_id
        if request.ttft_slo_s is not None and not request.num_output_tokens:
            self._waiting[request] = best
            self._looks.start(now)
        return best

    def moves(self, replicas: Sequence[ReplicaLoadView], now: float) -> Iterable[Move]:
        """Return moves to HP replicas, for requests that would be late on their LP replicas."""
        _, high = self._split(replicas)
        pending = {one.replica_id: one.num_pending_tokens for one in replicas}
        targets = [one.replica_id for one in high]
        moves = []
        for request, source in list(self._waiting.items()) if targets else ():
            if not self._is_urgent(request, now):
                continue
            target = min(targets, key=lambda one: (pending[one], one))
            if source in pending and pending[target] < pending[source]:
                pending[target] += request.num_remaining_tokens
                pending[source] -= request.num_remaining_tokens
                del self._waiting[request]
                moves.append(Move(request, target, "would be late"))
        return moves

    def on_wake(self, key: str, now: float) -> None:
        """Set the next wake-up, one interval later, if a tracked request waits."""
        self._looks.woken(now, goes_on=bool(self._waiting))

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Stop tracking the request, which no longer waits."""
        self._waiting.pop(request, None)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget these requests."""
        for request in requests:
            self._waiting.pop(request, None)

    def _is_urgent(self, request: RequestView, now: float) -> bool:
        needed_s = self._config.margin_s + self._prefill_time.total_s(request.num_prompt_tokens)
        return now + needed_s > request.arrived_at + (request.ttft_slo_s or 0.0)

    def _split(self, replicas: Sequence[ReplicaLoadView]) -> tuple[list[ReplicaLoadView], list[ReplicaLoadView]]:
        """Return (LP replicas, HP replicas) among those that are up."""
        up = sorted(those_up(replicas), key=lambda one: one.replica_id)
        num_high = min(max(round(self._config.high_priority_fraction * len(up)), 1), len(up) - 1) if up else 0
        return up[: len(up) - num_high], up[len(up) - num_high :]


SPEC = PolicySpec(
    name="ascendra",
    layer=Layer.REPLICASET_SCHEDULER,
    config=AscendraConfig,
    build=Ascendra,
    summary=(
        "The least loaded of most replicas; requests that would be late there move to one of a few replicas reserved "
        "for this."
    ),
    source="Ascendra (arXiv:2504.20828)",
    advice=(
        "Use it where bursts or long prompts delay first tokens on some replicas at a time. Not near full load: the "
        "reserved replicas are then missing for ordinary requests."
    ),
)
