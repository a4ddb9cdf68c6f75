"""Longest prefix match: the request with the most cached tokens of its prompt goes first."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from vajra_py.contract import KeyMotion, Layer, PolicyConfig, PolicyContext, PolicySpec, ReplicaId, RequestView


class LongestPrefixMatchConfig(PolicyConfig):
    """Parameters of `lpm`; the default is SGLang's."""

    fcfs_above: int | None = Field(
        128,
        ge=0,
        description="Number of waiting requests for each replica above which they are served in order of arrival; null: never.",
    )


class LongestPrefixMatch:
    """Key = minus the request's prefix hit in tokens; 0 for all while more than `fcfs_above` requests wait per replica.

    A cached prefix is thus used again before it is overwritten. The wait of a request without a hit is unbounded. A
    request in a shared queue has no hits yet.

    Left out: of several waiting requests with a common uncached prefix, SGLang delays all but the first by one step.
    Here they need no delay: a step's blocks can be hit as soon as the step is formed, so the others hit the first one's
    blocks in the same step.

    Source: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs" (arXiv:2312.07104); SGLang's
    `schedule_policy.py` for the limit.
    """

    key_motion = KeyMotion.PREFIX_HITS

    def __init__(self, config: LongestPrefixMatchConfig, num_replicas: int) -> None:
        self._limit = None if config.fcfs_above is None else config.fcfs_above * num_replicas
        self._waiting: dict[RequestView, None] = {}
        self._went_by_arrival = False
        self._num_changes = 0

    def key(self, request: RequestView, now: float) -> float:
        """Return minus the number of the request's cached tokens: those cached now, or for a running request, those
        that were cached at its first admission. Return 0 while requests are served in order of arrival.
        """
        if self._goes_by_arrival():
            return 0.0
        return -float(request.num_cached_tokens if request.is_resident else request.prefix_hit_tokens())

    def key_epoch(self) -> int:
        """Return the number of switches between the order by cached tokens and the order of arrival."""
        if self._goes_by_arrival() is not self._went_by_arrival:
            self._went_by_arrival = not self._went_by_arrival
            self._num_changes += 1
        return self._num_changes

    def _goes_by_arrival(self) -> bool:
        return self._limit is not None and len(self._waiting) > self._limit

    def on_arrivals(self, requests: Sequence[RequestView], now: float) -> None:
        """Count the waiting ones among these requests."""
        self._waiting.update((request, None) for request in requests if not request.is_resident)

    def on_admission(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Stop counting the request as waiting."""
        self._waiting.pop(request, None)

    def on_preemption(self, request: RequestView, replica_id: ReplicaId, now: float) -> None:
        """Count the request among the waiting ones again."""
        self._waiting[request] = None

    def on_moved(self, request: RequestView, source: ReplicaId, target: ReplicaId, now: float) -> None:
        """Count the request among the waiting ones again."""
        self._waiting[request] = None

    def on_departures(self, requests: Sequence[RequestView], now: float) -> None:
        """Forget these requests."""
        for request in requests:
            self._waiting.pop(request, None)


def _build(config: LongestPrefixMatchConfig, context: PolicyContext) -> LongestPrefixMatch:
    return LongestPrefixMatch(config, context.num_replicas)


SPEC = PolicySpec(
    name="lpm",
    layer=Layer.REQUEST_PRIORITIZER,
    config=LongestPrefixMatchConfig,
    build=_build,
    summary="Longest cached prefix first; in order of arrival while many wait.",
    source="SGLang (Zheng et al., arXiv:2312.07104)",
    aliases=("longest_prefix_match",),
    advice=(
        "Use it where prompts share prefixes and the cache is too small for all of them. Not where a request without "
        "a cached prefix must not starve (`dlpm`, `residual_sjf`)."
    ),
)
