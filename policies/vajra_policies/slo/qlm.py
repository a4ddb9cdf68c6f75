"""QLM: groups of requests with a common SLO, ordered by deadline after a group is predicted to be late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import Field

from vajra_policies.slo.waiting_time import WaitingTimeEstimator
from vajra_py.contract import (
    FallenGroups,
    KeyMotion,
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    ReplicaId,
    RequestView,
)


class QlmConfig(PolicyConfig):
    """Parameters of `qlm`."""

    granularity_s: float = Field(1.0, gt=0, description="SLOs are rounded down to a multiple of this time, seconds.")
    group_requests: int = Field(
        32, ge=1, description=("Maximum number of requests in a group."), json_schema_extra={"unit": "requests"}
    )
    default_slo_s: float = Field(600.0, gt=0, description="SLO of requests that state none, seconds.")
    throughput: float = Field(
        1000.0, gt=0, description="Assumed output tokens per second before any request has ended."
    )
    output_tokens: float = Field(
        256.0,
        gt=0,
        description=("Assumed mean number of output tokens before any request has ended."),
        json_schema_extra={"unit": "tokens"},
    )
    window: int = Field(
        200,
        ge=2,
        description="Number of ended requests over which throughput and output length are averaged.",
        json_schema_extra={"unit": "requests"},
    )


@dataclass(eq=False, slots=True)
class Group:
    """Successive requests whose SLOs are equal when rounded down."""

    number: int
    slo_s: float
    arrived_at: float
    num_joined: int = 0
    """Number of requests that have ever joined."""
    num_live: int = 0
    """Number of its requests that have not ended."""
    waiting: dict[RequestView, None] = field(default_factory=dict)


class Qlm:
    """Key = (number or deadline of the request's group; arrival).

    - A group has up to `group_requests` requests whose TTFT SLOs (or, without one, deadlines) are equal when rounded
      down to a multiple of `granularity_s`. Its deadline is that of its first request. Groups are numbered in order of
      arrival.
    - Waiting time of a group = requests ahead * mean output / throughput in output tokens per second, both averaged
      over recent requests.
    - Groups are normally ordered by number. When a request arrives, the waiting time of each group is predicted in this
      order. If it exceeds the time left for any group, groups are ordered by deadline until no request waits.

    Left out: the mixed integer program for several workers and models, model swapping, and groups formed by clustering.
    Size and granularity of groups are round figures.

    Source: Patke et al., "Queue Management for SLO-Oriented Large Language Model Serving", SoCC'24 (arXiv:2407.00047); its code.
    """

    key_motion = KeyMotion.STATIC

    def __init__(self, config: QlmConfig) -> None:
        self._config = config
        self._groups: dict[int, Group] = {}
        """Groups with waiting requests, by number."""
        self._alive: dict[int, Group] = {}
        """Groups with live requests, by number."""
        self._open: dict[float, Group] = {}
        self._of: dict[RequestView, Group] = {}
        self._num_groups = 0
        self._by_deadline = False
        self.estimator = WaitingTimeEstimator(config.window, config.output_tokens, config.throughput)
        self.fallen_groups = FallenGroups()

    def key(self, request: RequestView, now: float) -> float:
        """Return the arrival, seconds on the run's clock."""
        return request.arrived_at

    def group(self, request: RequestView) -> str:
        """Return the number of the request's group."""
        return str(self._join(request).number)

    def group_key(self, group: str) -> float:
        """Return the group's number, or its deadline while the order is by deadline.

        The order is by deadline after a group was predicted to be late, until no request waits.
        """
        own = self._alive.get(int(group))
        if own is None:
            return 0.0
        return own.arrived_at + own.slo_s if self._by_deadline else float(own.number)

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Add the requests to groups, and switch to deadlines if a group is predicted to be late."""
        for request in requests:
            self._wait(request)
        if not self._by_deadline and self._is_late(now):
            self._order(by_deadline=True)

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Stop counting the request as waiting."""
        self._leave(request)

    def on_preemption(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Count the request among the waiting ones again."""
        self._wait(request)

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Record the requests' output lengths and the time of their end, and forget the requests."""
        for request in requests:
            self.estimator.learn(request.num_output_tokens, now)
            self._leave(request)
            group = self._of.pop(request, None)
            if group is not None:
                group.num_live -= 1
                if not group.num_live:
                    del self._alive[group.number]

    def _join(self, request: RequestView) -> Group:
        group = self._of.get(request)
        if group is not None:
            return group
        config = self._config
        target_s = request.ttft_slo_s
        if target_s is None:
            target_s = config.default_slo_s if request.deadline_at is None else request.deadline_at - request.arrived_at
        slo_s = target_s // config.granularity_s * config.granularity_s
        group = self._open.get(slo_s)
        if group is None or group.num_joined >= config.group_requests or not group.waiting:
            group = self._open[slo_s] = Group(self._num_groups, slo_s, request.arrived_at)
            self._num_groups += 1
            self._alive[group.number] = group
        self._of[request] = group
        group.num_joined += 1
        group.num_live += 1
        return group

    def _wait(self, request: RequestView) -> None:
        if request.is_resident:
            return
        group = self._join(request)
        group.waiting[request] = None
        self._groups[group.number] = group
        self.fallen_groups.add(str(group.number))

    def _leave(self, request: RequestView) -> None:
        group = self._of.get(request)
        if group is None:
            return
        group.waiting.pop(request, None)
        if not group.waiting:
            self._groups.pop(group.number, None)
            if self._open.get(group.slo_s) is group:
                del self._open[group.slo_s]
        if not self._groups and self._by_deadline:
            self._order(by_deadline=False)

    def _is_late(self, now: float) -> bool:
        num_ahead = 0
        for _, group in sorted(self._groups.items()):
            if self.estimator.wait_s(num_ahead) > group.arrived_at + group.slo_s - now:
                return True
            num_ahead += len(group.waiting)
        return False

    def _order(self, *, by_deadline: bool) -> None:
        self._by_deadline = by_deadline
        for number in self._alive:
            self.fallen_groups.add(str(number))


def _build(config: QlmConfig, context: PolicyContext) -> Qlm:
    return Qlm(config)


SPEC = PolicySpec(
    name="qlm",
    layer=Layer.REQUEST_PRIORITIZER,
    config=QlmConfig,
    build=_build,
    summary="Groups of requests with a common SLO, by arrival, or by deadline once a group is predicted to be late.",
    source="QLM (SoCC'24, arXiv:2407.00047)",
    advice=(
        "Use it for interactive and batch requests in one queue, where order of arrival suffices as long as all are "
        "in time. Not where every request has a different SLO (`edf`): groups round SLOs."
    ),
)
