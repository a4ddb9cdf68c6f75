"""ConServe: offline requests run in what online promises leave, and alone at full width."""

from __future__ import annotations

from pydantic import Field

from vajra_policies.preemptive import PreemptiveConfig
from vajra_policies.slo.hygen import Hygen, HygenConfig
from vajra_policies.slo.promises import promised_tpot_s
from vajra_py.contract import BatchBuilder, Layer, LocalReplicaView, PolicyContext, PolicySpec


class ConserveConfig(PreemptiveConfig):
    """Parameters of `conserve`."""

    default_tpot_s: float = Field(
        0.1, gt=0, description="Time per output token of online requests that promise none, seconds."
    )
    offline_step_s: float = Field(
        0.1,
        gt=0,
        description="Predicted time of a step of offline requests alone, seconds: the longest that an online request waits.",
    )
    offline_from_priority: int = Field(
        1, description="Requests with this priority, or a less urgent one, are offline; lower numbers are more urgent."
    )


class Conserve(Hygen):
    """`preemptive`, with offline requests added while the step is predicted to take at most T.

    - With online requests running or waiting, T is the tightest time per token that those that run promise: the budget of tokens that
      keeps online promises. Without any, T = `offline_step_s`, and offline requests have the replica for themselves.
    - An online request that lacks memory takes it from offline ones. Use it with the prioritizer `priority`.
    - Checkpoints are the mechanism's: a memory tier with `write: write_through` gets each block of a running request once it is full, in
      the background, so that a preemption copies nothing, and the request that comes back loads what was computed.

    Left out: interruption of a step between two layers (safepoints), in whose place `offline_step_s` bounds steps; restoring before a
    request is scheduled, which is loaded when it is. Rule from memory of the paper; both times are round figures.

    Source: Qiao et al., "ConServe: Harvesting GPUs for Low-Latency and High-Throughput LLM Serving" (arXiv:2410.01228).
    """

    def __init__(self, config: ConserveConfig, context: PolicyContext) -> None:
        shared = config.model_dump(include={*PreemptiveConfig.model_fields, "offline_from_priority"})
        super().__init__(HygenConfig(**shared), context)
        self._default_tpot_s = config.default_tpot_s
        self._offline_step_s = config.offline_step_s

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Online requests, then offline ones within the budget of this step."""
        promises = [
            self._default_tpot_s if (promised_s := promised_tpot_s(one)) is None else promised_s
            for one in replica.running()
            if one.priority < self._offline_from
        ]
        head = next(replica.waiting(), None) if replica.num_waiting and not promises else None
        if head is not None and head.priority < self._offline_from:
            promises.append(self._default_tpot_s)
        self._budget_s = min(promises, default=self._offline_step_s)
        super().schedule(replica, batch, now)


SPEC = PolicySpec(
    name="conserve",
    layer=Layer.REPLICA_SCHEDULER,
    config=ConserveConfig,
    build=Conserve,
    summary="Online requests first; offline ones fill what the tightest promise leaves, and all of a step without online ones.",
    source="ConServe (arXiv:2410.01228)",
    advice=(
        "Use it with the prioritizer `priority` for online load in bursts: offline work takes the replica between "
        "them. Not where one budget does for all (`hygen`)."
    ),
)
