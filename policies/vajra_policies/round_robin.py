"""Round robin: each arriving request goes to the next replica in turn."""

from __future__ import annotations

from collections.abc import Sequence

from vajra_policies.routing import BindsOnArrival
from vajra_py.contract import (
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
    SchedulerTraits,
)


class RoundRobinConfig(PolicyConfig):
    """`round_robin` has no parameters."""


class RoundRobin(BindsOnArrival):
    """Binds on arrival to the next replica, in order of id, after the one chosen last; skips replicas that are not up.

    While no replica is up, requests wait in the shared queue, from which the first replica that comes up takes them.

    Source: Vajra's scheduling architecture, round-robin replicaset scheduler.
    """

    traits = SchedulerTraits(reads_load=False)
    """`assign` reads no load."""

    def __init__(self) -> None:
        self._next = 0

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the next replica that is up."""
        count = len(replicas)
        for offset in range(count):
            position = (self._next + offset) % count
            if replicas[position].is_up:
                self._next = (position + 1) % count
                return replicas[position].replica_id
        return None


def _build(config: RoundRobinConfig, context: PolicyContext) -> RoundRobin:
    return RoundRobin()


SPEC = PolicySpec(
    name="round_robin",
    layer=Layer.REPLICASET_SCHEDULER,
    config=RoundRobinConfig,
    build=_build,
    summary="Each arriving request to the next replica in turn.",
    source="Vajra's scheduling architecture, round-robin replicaset scheduler",
    advice=(
        "Use it as the baseline, and to divide a simulation among processes. Not where requests differ much in length."
    ),
)
