"""A replica scheduler that hands requests off wherever a rule says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from vajra_py.contract import (
    BatchBuilder,
    Layer,
    LocalReplicaView,
    PolicyConfig,
    PolicyContext,
    PolicySpec,
    QueueView,
    Refusal,
    ReplicaId,
    ReplicaLoadView,
    RequestView,
)
from vajra_py.plugins import Registry, load_registry

Rule = Callable[[RequestView], bool]


class HandsOff:
    """Chunks of 50 tokens in order of admission, then those that wait; before that, what the rule names leaves."""

    def __init__(self, rule: Rule, refusals: list[tuple[str, Refusal]]) -> None:
        self._rule, self._refusals = rule, refusals

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        for request in replica.running():
            if self._rule(request):
                refusal = batch.hand_off(request)
                if refusal is not None:
                    self._refusals.append((request.request_id, refusal))
        while (stop := batch.add_running(50)) is not None:
            victim = max(replica.running(), key=lambda one: one.admitted_index)
            if batch.preempt(victim) is not None or victim is stop.request:
                break
        if batch.num_preempted:
            return
        for request in replica.waiting():
            left = min(50, request.num_known_tokens - batch.cached_tokens(request))
            if batch.add(request, left) not in (None, Refusal.LOADING):
                break


class Elsewhere:
    """Assigns prompts to replicas 0 and 1 in turn, and what leaves to the next replica that is up, three times; then it stays."""

    def __init__(self, *, stays: bool = False) -> None:
        self._num = 0
        self._most = 0 if stays else 3
        self._placed: Counter[str] = Counter()

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        up = [one.replica_id for one in replicas if one.is_up]
        self._num += 1
        return up[self._num % min(2, len(up))] if up else None

    def pull(self, replica: ReplicaLoadView, queued: QueueView, now: float) -> Iterable[str]:
        return [one.request_id for one in queued]

    def place_after_prompt(
        self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float
    ) -> ReplicaId | None:
        if self._placed[request.request_id] == self._most:
            return None
        self._placed[request.request_id] += 1
        self._num += 1
        return replicas[self._num % len(replicas)].replica_id


def scheduler_of(rule: Rule, refusals: list[tuple[str, Refusal]]) -> PolicySpec:
    """The replica scheduler, as `hands_off`."""
    return PolicySpec(
        "hands_off",
        Layer.REPLICA_SCHEDULER,
        PolicyConfig,
        lambda config, context: HandsOff(rule, refusals),
        "Hands off what a rule names.",
    )


def registry_of(rule: Rule, refusals: list[tuple[str, Refusal]] | None = None, *, stays: bool = False) -> Registry:
    """Both policies: `hands_off` and the router `elsewhere`."""
    router = PolicySpec(
        "elsewhere",
        Layer.REPLICASET_SCHEDULER,
        PolicyConfig,
        lambda config, context: _elsewhere(context, stays=stays),
        "Places what leaves elsewhere.",
    )
    return load_registry().with_policies([scheduler_of(rule, [] if refusals is None else refusals), router])


def _elsewhere(context: PolicyContext, *, stays: bool) -> Elsewhere:
    return Elsewhere(stays=stays)
