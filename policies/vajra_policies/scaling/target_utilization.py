"""Target utilisation: the number of replicas that keeps a load metric at its target, as in Kubernetes' Horizontal Pod
Autoscaler.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from vajra_policies.scaling.pools import num_active, replicas_in, shared_requests, shared_tokens, within_bounds
from vajra_py.contract import PolicyConfig, PolicyContext, PoolView, ReplicaLoadView, ReplicaState, ScalerSpec, WakeUps

Metric: TypeAlias = Literal["kv_usage", "requests", "queued_tokens"]

_ROUNDING = 1e-9
"""Quotients that exceed a whole number by at most this are rounded down to it."""


class TargetUtilizationConfig(PolicyConfig):
    """Parameters of `target_utilization`."""

    metric: Metric = Field(
        "kv_usage",
        description=(
            "Load of a replica: fraction of its KV blocks in use, running and waiting requests, or tokens left to prefill. Requests in the shared queue count in the latter two."
        ),
    )
    target: float = Field(
        0.7, gt=0, description="Target of the mean load over the replicas: a fraction, requests, or tokens."
    )
    interval_s: float = Field(15.0, gt=0, description="Interval between decisions, seconds.")
    tolerance_fraction: float = Field(
        0.1, ge=0, lt=1, description="Deviation from the target that changes nothing, fraction of the target."
    )
    up_window_s: float = Field(
        0.0,
        ge=0,
        description="Time for which decisions must agree before replicas are started, seconds; the lowest number counts.",
    )
    down_window_s: float = Field(
        300.0,
        ge=0,
        description="Time for which decisions must agree before replicas are stopped, seconds; the highest number counts.",
    )

    @model_validator(mode="after")
    def _is_within_reach(self) -> Self:
        if self.metric == "kv_usage" and self.target > 1:
            raise ValueError(f"target: a part of the KV blocks is at most 1 (got {self.target})")
        return self


class TargetUtilization:
    """Sets ceil(replicas * load / target) replicas, or changes nothing if load / target is within the tolerance of 1.

    In decisions to start replicas, starting replicas count as replicas without load. In decisions to stop replicas,
    starting replicas do not count. The result is stabilised: to scale up, it is the smallest number computed within the
    last `up_window_s` seconds; to scale down, it is the largest number computed within the last `down_window_s`
    seconds. The number of replicas at the first decision is treated like a computed number.

    Source: Kubernetes, HorizontalPodAutoscaler, algorithm details and stabilisation windows.
    """

    def __init__(self, config: TargetUtilizationConfig, wake: WakeUps) -> None:
        self._config = config
        self._wake = wake
        self._is_due = True
        self._looks: dict[str, deque[tuple[float, int]]] = {}
        self._targets: dict[str, int] = {}

    def targets(self, pools: Sequence[PoolView], now: float) -> Mapping[str, int]:
        """Return the number of replicas of each pool."""
        if self._is_due:
            self._is_due = False
            self._targets = {pool.name: self._stabilized(pool, now) for pool in pools}
            self._wake.at(now + self._config.interval_s)
        return self._targets

    def on_wake(self, key: str, now: float) -> None:
        """Record that a decision is due at the next call of `targets`."""
        self._is_due = True

    def _stabilized(self, pool: PoolView, now: float) -> int:
        config, current = self._config, num_active(pool)
        wanted = within_bounds(pool, self._wanted(pool, current))
        looks = self._looks.setdefault(pool.name, deque([(now, current)]))
        while looks and looks[0][0] <= now - max(config.up_window_s, config.down_window_s):
            looks.popleft()
        least = min((one for at, one in looks if at > now - config.up_window_s), default=wanted)
        most = max((one for at, one in looks if at > now - config.down_window_s), default=wanted)
        least, most = min(least, wanted), max(most, wanted)
        looks.append((now, wanted))
        return within_bounds(pool, min(max(current, least), most))

    def _wanted(self, pool: PoolView, current: int) -> int:
        up = replicas_in(pool, ReplicaState.UP)
        if not up:  # no load is known: keep the number of replicas, but at least one if requests wait
            return max(current, int(pool.num_queued > 0))
        ratio = self._load(pool, up) / (len(up) * self._config.target)
        if self._is_at_target(ratio):
            return current
        if ratio < 1 or len(up) == current:
            return _ceil(ratio * len(up))
        with_starting = ratio * len(up) / current
        return current if with_starting < 1 or self._is_at_target(with_starting) else _ceil(with_starting * current)

    def _is_at_target(self, ratio: float) -> bool:
        return abs(ratio - 1) <= self._config.tolerance_fraction

    def _load(self, pool: PoolView, up: Sequence[ReplicaLoadView]) -> float:
        """Return the total load of the replicas that are up; with metrics other than `kv_usage`, the shared queue is
        included.
        """
        if self._config.metric == "kv_usage":
            return sum(1 - one.free_blocks / one.num_blocks for one in up)
        if self._config.metric == "requests":
            return shared_requests(pool) + sum(one.num_running + one.num_waiting for one in up)
        return shared_tokens(pool) + sum(one.num_pending_tokens for one in up)


def _ceil(value: float) -> int:
    return math.ceil(value - _ROUNDING)


def _build(config: TargetUtilizationConfig, context: PolicyContext) -> TargetUtilization:
    return TargetUtilization(config, context.wake)


SPEC = ScalerSpec(
    name="target_utilization",
    config=TargetUtilizationConfig,
    build=_build,
    summary="The number of replicas that keeps a load figure (KV usage, requests, queued tokens) at its target.",
    source="Kubernetes, HorizontalPodAutoscaler",
    advice=(
        "Use it where one load figure shows when replicas are full, as for services on Kubernetes. Not where replicas "
        "take longer to start than a peak lasts: it reacts, and does not predict."
    ),
)
