"""PolyServe: replicas per SLO tier; each request goes to the most loaded replica that still meets its SLOs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vajra_policies.routing import load_in, those_up
from vajra_policies.slo.tiers import TierConfig, Tiers
from vajra_py.contract import Layer, PolicyContext, PolicySpec, QueueView, ReplicaId, ReplicaLoadView, RequestView


class PolyserveConfig(TierConfig):
    """Parameters of `polyserve`."""


class Polyserve:
    """Binds on arrival to the most loaded replica that passes the checks below.

    Replicas of the request's tier are tried first, then those of tighter tiers. If none passes, an idle replica takes
    the request and joins the request's tier.

    A replica passes if three conditions hold. (1) The request's first token is in time after the replica's pending
    prompts. (2) The request's second token is in time. (3) With the request, and with each request grown by the tier's
    mean output, a decode step takes at most the TPOT of the replica's tier, and the replica's memory suffices.

    If no replica passes or is idle, the request waits in the shared queue. If even an idle replica would miss the SLOs
    of a request, the request belongs to the loosest tier, and its own SLOs are ignored.

    Some replicas thus have high load, and unneeded ones stay idle and may be stopped by a scaler. With a fixed number
    of replicas, `least_loaded` has lower latencies.

    Left out: reassignment of replicas between tiers while they work, dynamic chunks, and split prompts and decodes.
    Written from a summary of sections 4.5 to 4.7; the tiers are those of the paper's experiments, from memory.

    Source: Zhu et al., "PolyServe: Efficient Multi-SLO Serving at Scale" (arXiv:2507.17769).
    """

    def __init__(self, config: PolyserveConfig, context: PolicyContext) -> None:
        self._tiers = Tiers(config, context)
        self._load = load_in("tokens")
        self._placed: dict[RequestView, ReplicaId] = {}
        self._num_there: dict[ReplicaId, int] = {}
        """Number of requests placed at each replica that is not idle."""
        self._tier_of: dict[ReplicaId, int] = {}
        """Tier of each replica that is not idle."""

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the replica by the rule in the class docstring; None if the request must wait in the shared queue."""
        self._leave(request)
        up = those_up(replicas)
        if not up:
            return None
        tier, is_attainable = self._tiers.of(request, now)
        for own in range(tier, -1, -1):
            members = [one for one in up if self._tier_of.get(one.replica_id) == own]
            for one in sorted(members, key=lambda one: (-self._load(one), one.replica_id)):
                if self._tiers.keeps(request, one, own, now, is_attainable=is_attainable):
                    return self._place(request, one.replica_id, own)
        idle = min((one.replica_id for one in up if one.replica_id not in self._tier_of), default=None)
        return None if idle is None else self._place(request, idle, tier)

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        """Yield the id of the most urgent queued request for which the replica passes the checks. An idle replica takes
        the most urgent request without checks.
        """
        for request in queued:
            tier, is_attainable = self._tiers.of(request, now)
            own = self._tier_of.get(replica.replica_id)
            if own is None or (
                own <= tier and self._tiers.keeps(request, replica, own, now, is_attainable=is_attainable)
            ):
                yield request.request_id
                return

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """If the request was pulled from the shared queue, count it at the replica that pulled it."""
        if self._placed.get(request) != replica_id:
            self._leave(request)
            self._place(request, replica_id, self._tiers.of(request, now)[0])

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Record output lengths; a replica without requests becomes idle."""
        for request in requests:
            self._tiers.learn(request)
            self._leave(request)

    def _place(self, request: RequestView, replica_id: ReplicaId, tier: int) -> ReplicaId:
        self._placed[request] = replica_id
        self._num_there[replica_id] = self._num_there.get(replica_id, 0) + 1
        self._tier_of.setdefault(replica_id, tier)
        return replica_id

    def _leave(self, request: RequestView) -> None:
        replica_id = self._placed.pop(request, None)
        if replica_id is not None:
            self._num_there[replica_id] -= 1
            if not self._num_there[replica_id]:
                del self._num_there[replica_id], self._tier_of[replica_id]


SPEC = PolicySpec(
    name="polyserve",
    layer=Layer.REPLICASET_SCHEDULER,
    config=PolyserveConfig,
    build=Polyserve,
    summary=(
        "Separate replicas for tiers of TPOT SLOs; each request to the most loaded replica that still meets its SLOs."
    ),
    source="PolyServe (arXiv:2507.17769)",
    advice=(
        "Use it to determine how few replicas a load needs, or with a scaler that stops idle replicas. Not with a "
        "fixed number of replicas, where nothing is saved (`least_loaded`)."
    ),
)
