"""Mooncake's conductor: the replica with the least predicted time to first token."""

from __future__ import annotations

from collections.abc import Sequence

from vajra_policies.routing import BindsOnArrival, those_up
from vajra_py.contract import (
    Layer,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    PrefillTime,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
)


class MooncakeConductorConfig(PolicyConfig):
    """Parameters of `mooncake_conductor`, which has none."""


class MooncakeConductor(BindsOnArrival):
    """Binds on arrival to the replica with the least predicted time to first token, T_queue + T_prefill(p, h).

    T_queue is the sum of the prefill times of the uncomputed prompts at the replica. T_prefill(p, h) is the prefill
    time of this request's prompt of p tokens, of which h are cached at the replica now. Ties go to the replica with the
    fewest uncomputed prompts, then to the lowest id. A request whose prompt was computed in another pool goes to the
    replica with the fewest requests.

    The admission policy `mooncake` refuses requests by the same prediction. Left out: copying a prefix from the replica
    that holds most of it, and Mooncake's threshold for such copies; the choice of the decode replica by TBT.

    Source: Qin et al., "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving", FAST'25 (arXiv:2407.00079),
    Algorithm 1.
    """

    def __init__(self, prefill_time: PrefillTime) -> None:
        self._prefill_time = prefill_time
        self._queues: dict[ReplicaId, dict[RequestView, int]] = {}
        """Requests sent to each replica whose prompts are not computed yet. The value of a request is its prefix hit in
        tokens at the time when it was sent.
        """
        self._sent_to: dict[RequestView, ReplicaId] = {}

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the replica with the least predicted time among those that are up; for a request with a computed
        prompt, the replica with the fewest requests.
        """
        self._forget(request)
        up = those_up(replicas)
        if not up:
            return None
        if request.is_prefill_complete:
            return min(up, key=lambda one: (one.num_running + one.num_waiting, one.replica_id)).replica_id
        ranked = []
        for one in up:
            hit = min(one.prefix_hit_tokens(request), request.num_prompt_tokens - 1)
            queued_s, num_queued = self._queued(one.replica_id)
            own_s = self._prefill_time.remaining_s(request.num_prompt_tokens, hit)
            ranked.append((queued_s + own_s, num_queued, one.replica_id, hit))
        _, _, chosen, hit = min(ranked)
        self._queues.setdefault(chosen, {})[request] = hit
        self._sent_to[request] = chosen
        return chosen

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget these requests."""
        for request in requests:
            self._forget(request)

    def _forget(self, request: RequestView) -> None:
        replica_id = self._sent_to.pop(request, None)
        if replica_id is not None:
            self._queues[replica_id].pop(request, None)

    def _queued(self, replica_id: ReplicaId) -> tuple[float, int]:
        """Return two values for a replica's uncomputed prompts: the sum of their remaining prefill times in seconds,
        and their number.
        """
        queue = self._queues.get(replica_id)
        if not queue:
            return 0.0, 0
        for request in [one for one in queue if one.num_output_tokens]:
            del queue[request]
        remaining_s = self._prefill_time.remaining_s
        times = (remaining_s(one.num_prompt_tokens, max(one.num_computed_tokens, hit)) for one, hit in queue.items())
        return sum(times), len(queue)


def _build(config: MooncakeConductorConfig, context: PolicyContext) -> MooncakeConductor:
    return MooncakeConductor(context.prefill_time)


SPEC = PolicySpec(
    name="mooncake_conductor",
    layer=Layer.REPLICASET_SCHEDULER,
    config=MooncakeConductorConfig,
    build=_build,
    summary=(
        "Each arriving request to the replica with the least predicted TTFT, including queueing and cached prefixes."
    ),
    source="Mooncake (FAST'25, arXiv:2407.00079), Algorithm 1",
    advice=(
        "Use it for a low TTFT with shared prefixes. Not where decoding is the bottleneck. `mooncake` refuses by the "
        "same prediction."
    ),
)
