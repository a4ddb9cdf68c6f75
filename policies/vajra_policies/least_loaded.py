"""Join the shortest queue: each arriving request goes to the replica with the least load."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from vajra_policies.routing import BindsOnArrival, LoadUnit, load_in, those_up
from vajra_py.contract import Layer, PolicyConfig, PolicyContext, PolicySpec, ReplicaId, ReplicaLoadView, RequestView


class LeastLoadedConfig(PolicyConfig):
    """Parameters of `least_loaded`."""

    by: LoadUnit = Field(
        "requests",
        description=("Unit of load: waiting and running requests, or all their tokens, computed and still to compute."),
    )


class LeastLoaded(BindsOnArrival):
    """Binds on arrival to the replica with the least load among those that are up; ties go to the lowest id.

    While no replica is up, requests wait in the shared queue, from which the first replica that comes up takes them.

    Source: join-the-shortest-queue (Winston, J. Appl. Prob. 1977). `by: tokens` takes into account that lengths of
    requests differ by orders of magnitude.
    """

    def __init__(self, config: LeastLoadedConfig) -> None:
        self._load = load_in(config.by)

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the least loaded replica that is up."""
        load = self._load
        best = min(those_up(replicas), key=lambda one: (load(one), one.replica_id), default=None)
        return None if best is None else best.replica_id


def _build(config: LeastLoadedConfig, context: PolicyContext) -> LeastLoaded:
    return LeastLoaded(config)


SPEC = PolicySpec(
    name="least_loaded",
    layer=Layer.REPLICASET_SCHEDULER,
    config=LeastLoadedConfig,
    build=_build,
    summary="Each arriving request to the least loaded replica, by requests or by tokens.",
    source="Join-the-shortest-queue (Winston 1977)",
    aliases=("join_shortest_queue",),
    advice=(
        "Use it as the simple way to balance uneven loads. Not where prompts share prefixes: it spreads them over all "
        "replicas."
    ),
)
