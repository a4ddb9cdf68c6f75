"""Late binding: requests wait in one shared queue until a replica has room for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vajra_policies.routing import whole_queue
from vajra_py.contract import (
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    QueueView,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
    SchedulerTraits,
)


class PullConfig(PolicyConfig):
    """`pull` has no parameters."""


class Pull:
    """Binds no request on arrival; a replica with a free slot and a free KV block may take any request of the shared
    queue.

    With pipeline stages, the slots are those of all steps in flight.

    A replica sees the queue lazily, most urgent first, and a request is bound when the replica's scheduler admits it. A
    preempted request stays with the replica that admitted it.

    Source: Vajra's scheduling architecture, pull replicaset scheduler.
    """

    traits = SchedulerTraits(reads_load=False, is_work_conserving=True)
    """`assign` reads no load; a replica with room may take any waiting request."""

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return None: every request waits in the shared queue."""
        return None

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        """Return the ids of the whole queue, most urgent first, if the replica has room."""
        return whole_queue(replica, queued)


def _build(config: PullConfig, context: PolicyContext) -> Pull:
    return Pull()


SPEC = PolicySpec(
    name="pull",
    layer=Layer.REPLICASET_SCHEDULER,
    config=PullConfig,
    build=_build,
    summary="One shared queue, from which replicas take requests when they have room.",
    source="Vajra's scheduling architecture, pull replicaset scheduler",
    advice=(
        "Use it where prompts differ much in length: no request is bound to a busy replica. Not where requests should "
        "go to replicas that cache their prefix, or with `preemptive`."
    ),
)
