"""LMetric: the replica with the least product of tokens to prefill and requests."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from vajra_policies.routing import BindsOnArrival, those_up
from vajra_py.contract import Layer, PolicyConfig, PolicyContext, PolicySpec, ReplicaId, ReplicaLoadView, RequestView


class LmetricConfig(PolicyConfig):
    """Parameters of `lmetric`; the paper's rule has none."""

    counts_pending: bool = Field(
        True, description="Count the tokens that a replica has left to prefill besides the request's own."
    )
    counts_itself: bool = Field(
        True,
        description="Count the request among the replica's; false: any idle replica wins over a cached prefix.",
    )


class Lmetric(BindsOnArrival):
    """Binds on arrival to the replica with the least P * B, with P tokens to prefill and B running and waiting
    requests.

    P = prompt - cached prefix, plus the replica's tokens left to prefill (`counts_pending`); B includes the request
    itself (`counts_itself`). The paper's text does not settle either option. A product needs no weights: rescaling P or
    B by a constant does not change the choice. Ties go to the least P, then to the next replica in turn.

    Left out: the detector of prefixes that are cached on too few replicas for their share of the load.

    Source: LMetric (arXiv:2603.15202, OSDI'26).
    """

    def __init__(self, config: LmetricConfig) -> None:
        self._counts_pending = config.counts_pending
        self._own = int(config.counts_itself)
        self._last = -1

    def assign(self, request: RequestView, replicas: Sequence[ReplicaLoadView], now: float) -> ReplicaId | None:
        """Return the replica with the least product among those that are up; None if no replica is up."""
        up = those_up(replicas)
        if not up:
            return None
        scored = [(*self._score(request, one), one.replica_id <= self._last, one.replica_id) for one in up]
        self._last = min(scored)[-1]
        return self._last

    def _score(self, request: RequestView, replica: ReplicaLoadView) -> tuple[int, int]:
        num_tokens = request.num_prompt_tokens - replica.prefix_hit_tokens(request)
        if self._counts_pending:
            num_tokens += replica.num_pending_tokens
        return (num_tokens * (replica.num_running + replica.num_waiting + self._own), num_tokens)


def _build(config: LmetricConfig, context: PolicyContext) -> Lmetric:
    return Lmetric(config)


SPEC = PolicySpec(
    name="lmetric",
    layer=Layer.REPLICASET_SCHEDULER,
    config=LmetricConfig,
    build=_build,
    summary="Each arriving request to the replica with the least product of tokens to prefill and requests.",
    source="LMetric (arXiv:2603.15202, OSDI'26)",
    advice=(
        "Use it for shared prefixes, without weights that have to be tuned. Not where a few prefixes make up most of "
        "the load: the paper's detector of such hot spots is left out."
    ),
)
