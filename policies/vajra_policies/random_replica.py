"""Random replica, each with equal probability: the baseline for other ways of balancing load."""

from __future__ import annotations

from collections.abc import Sequence

from vajra_policies.routing import BindsOnArrival, those_up
from vajra_py.contract import (
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    RandomStream,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
    SchedulerTraits,
)


class RandomConfig(PolicyConfig):
    """`random` has no parameters; it draws from the random stream of the same name."""


class RandomReplica(BindsOnArrival):
    """Binds on arrival to a replica drawn uniformly from those that are up.

    While no replica is up, requests wait in the shared queue, from which the first replica that comes up takes them.

    Source: random splitting, the baseline of Mitzenmacher (IEEE TPDS 2001).
    """

    traits = SchedulerTraits(reads_load=False)
    """`assign` draws at random and reads no load."""

    def __init__(self, stream: RandomStream) -> None:
        self._stream = stream

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return a random replica that is up."""
        up = those_up(replicas)
        return up[int(self._stream.integers(0, len(up)))].replica_id if up else None


def _build(config: RandomConfig, context: PolicyContext) -> RandomReplica:
    return RandomReplica(context.random_stream("random"))


SPEC = PolicySpec(
    name="random",
    layer=Layer.REPLICASET_SCHEDULER,
    config=RandomConfig,
    build=_build,
    summary="Each arriving request to a replica drawn at random.",
    source="Mitzenmacher (IEEE TPDS 2001), the baseline",
    advice="Use it as a baseline that reads no figures. Not in production.",
)
