"""The power of two choices: of two replicas drawn at random, the less loaded one."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from vajra_policies.routing import BindsOnArrival, LoadUnit, load_in, those_up
from vajra_py.contract import (
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    RandomStream,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
)


class PowerOfTwoConfig(PolicyConfig):
    """Parameters of `power_of_two`, which draws from the random stream of the same name."""

    by: LoadUnit = Field(
        "requests",
        description=("Unit of load: waiting and running requests, or all their tokens, computed and still to compute."),
    )


class PowerOfTwo(BindsOnArrival):
    """Binds on arrival to the less loaded of two distinct replicas, drawn uniformly from those that are up.

    Ties go to the replica drawn first, so that an idle replicaset is filled evenly. Only two loads are read, and a
    stale load misleads fewer requests than under a policy that chooses the minimum. While no replica is up, requests
    wait in the shared queue, from which the first replica that comes up takes them.

    Source: Mitzenmacher, "The power of two choices in randomized load balancing" (IEEE TPDS 2001).
    """

    def __init__(self, config: PowerOfTwoConfig, stream: RandomStream) -> None:
        self._load = load_in(config.by)
        self._stream = stream

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the less loaded of two random replicas that are up. If only one replica is up, return this one; if
        none is up, None.
        """
        up = those_up(replicas)
        if len(up) < 2:
            return up[0].replica_id if up else None
        first = int(self._stream.integers(0, len(up)))
        second = int(self._stream.integers(0, len(up) - 1))
        second += second >= first
        one, other = up[first], up[second]
        return other.replica_id if self._load(other) < self._load(one) else one.replica_id


def _build(config: PowerOfTwoConfig, context: PolicyContext) -> PowerOfTwo:
    return PowerOfTwo(config, context.random_stream("power_of_two"))


SPEC = PolicySpec(
    name="power_of_two",
    layer=Layer.REPLICASET_SCHEDULER,
    config=PowerOfTwoConfig,
    build=_build,
    summary="Each arriving request to the less loaded of two replicas drawn at random.",
    source="Mitzenmacher (IEEE TPDS 2001)",
    advice=(
        "Use it where reading loads is expensive, or loads are stale: to compare two loads is nearly as good as to "
        "compare all. Not with a few replicas whose loads are up to date (`least_loaded`)."
    ),
)
