"""HyGen: offline requests fill the rest of a step's latency budget."""

from __future__ import annotations

from pydantic import Field

from vajra_policies.preemptive import Preemptive, PreemptiveConfig
from vajra_policies.search import most_that_fits
from vajra_py.contract import (
    BatchBuilder,
    Layer,
    LocalReplicaView,
    PolicyContext,
    PolicySpec,
    RequestView,
    SchedulerTraits,
)


class HygenConfig(PreemptiveConfig):
    """Parameters of `hygen`."""

    latency_budget_s: float = Field(
        0.05,
        gt=0,
        description="Predicted time of a step that offline requests may fill, seconds; the paper searches it for each SLO.",
    )
    offline_from_priority: int = Field(
        1, description="Requests with this priority, or a less urgent one, are offline; lower numbers are more urgent."
    )


class Hygen(Preemptive):
    """`preemptive`, with offline requests added only while the step's predicted time stays within `latency_budget_s`.

    Online requests are added by urgency regardless of the budget; then offline decodes, and offline prompts in chunks
    that fit. Online requests preempt offline ones for memory. A step that would be empty gets an offline request in any
    case. Use this policy with the prioritizer `priority`, which puts offline requests behind online ones.

    Left out: the search for the budget that keeps an SLO (see `vajra capacity`), and the order of offline requests by
    shared prefixes. Predictions are those of the run's latency model, where the paper fits a linear one.

    Source: Sun et al., "HyGen: Efficient LLM Serving via Elastic Online-Offline Request Co-location", NeurIPS'25 (arXiv:2501.14808).
    """

    traits = SchedulerTraits(is_work_conserving=True)
    """`repeats_decodes` is empty, since offline decodes may be left out of a step as contexts grow."""

    def __init__(self, config: HygenConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self._budget_s = config.latency_budget_s
        self._offline_from = config.offline_from_priority

    def _takes_all(self, replica: LocalReplicaView, batch: BatchBuilder) -> bool:
        return False

    def _tokens(self, request: RequestView, behind: list[RequestView], batch: BatchBuilder) -> int:
        """Return the number of tokens as `preemptive` does; for an offline request, limited by the latency budget (but
        at least 1 in an empty batch).
        """
        num_tokens = super()._tokens(request, behind, batch)
        if request.priority < self._offline_from or num_tokens < 1 or self._fits(request, num_tokens, batch):
            return num_tokens
        most = most_that_fits(0, num_tokens, lambda num: self._fits(request, num, batch))
        return most if most or batch.num_requests else 1

    def _fits(self, request: RequestView, num_tokens: int, batch: BatchBuilder) -> bool:
        return batch.predicted_time_with(request, num_tokens) <= self._budget_s


SPEC = PolicySpec(
    name="hygen",
    layer=Layer.REPLICA_SCHEDULER,
    config=HygenConfig,
    build=Hygen,
    summary="Online requests first; offline ones fill the rest of a step's latency budget.",
    source="HyGen (NeurIPS'25, arXiv:2501.14808)",
    advice=(
        "Use it with the prioritizer `priority`: offline requests have priority 1 or more. Not where offline requests "
        "have deadlines: they only get capacity that is left over."
    ),
)
