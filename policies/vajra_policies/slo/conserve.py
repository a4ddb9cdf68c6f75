"""ConServe: offline requests use the time that online SLOs leave, or the whole step if there are no online requests."""

from __future__ import annotations

from pydantic import Field

from vajra_policies.preemptive import PreemptiveConfig
from vajra_policies.slo.hygen import Hygen, HygenConfig
from vajra_policies.slo.targets import tpot_target_s
from vajra_py.contract import BatchBuilder, Layer, LocalReplicaView, PolicyContext, PolicySpec


class ConserveConfig(PreemptiveConfig):
    """Parameters of `conserve`."""

    default_tpot_s: float = Field(0.1, gt=0, description="TPOT SLO of online requests that state none, seconds.")
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

    - While online requests run, T is the tightest of their TPOT SLOs. While no online request runs, T is
      `default_tpot_s` if the most urgent waiting request is online, else `offline_step_s`.
    - An online request that lacks memory preempts offline requests. Use this policy with the prioritizer `priority`.
    - For checkpoints, configure a memory tier with `write: write_through`. Each full block of a running request is then
      written to the tier in the background. A preemption then copies nothing, and a readmitted request loads its KV.

    Left out: interruption of a step between two layers (safepoints), replaced by the bound `offline_step_s`; restoring
    KV before a request is scheduled (here it is loaded when scheduled). The rule is from memory of the paper; both
    times are round figures.

    Source: Qiao et al., "ConServe: Harvesting GPUs for Low-Latency and High-Throughput LLM Serving" (arXiv:2410.01228).
    """

    def __init__(self, config: ConserveConfig, context: PolicyContext) -> None:
        shared = config.model_dump(include={*PreemptiveConfig.model_fields, "offline_from_priority"})
        super().__init__(HygenConfig(**shared), context)
        self._default_tpot_s = config.default_tpot_s
        self._offline_step_s = config.offline_step_s

    def schedule(self, replica: LocalReplicaView, batch: BatchBuilder, now: float) -> None:
        """Add online requests, then offline requests within the time budget of this step."""
        targets_s = [
            self._default_tpot_s if (target_s := tpot_target_s(one)) is None else target_s
            for one in replica.running()
            if one.priority < self._offline_from
        ]
        head = next(replica.waiting(), None) if replica.num_waiting and not targets_s else None
        if head is not None and head.priority < self._offline_from:
            targets_s.append(self._default_tpot_s)
        self._budget_s = min(targets_s, default=self._offline_step_s)
        super().schedule(replica, batch, now)


SPEC = PolicySpec(
    name="conserve",
    layer=Layer.REPLICA_SCHEDULER,
    config=ConserveConfig,
    build=Conserve,
    summary=(
        "Online requests first; offline ones fill steps up to the tightest TPOT SLO, or the whole step without "
        "online requests."
    ),
    source="ConServe (arXiv:2410.01228)",
    advice=(
        "Use it with the prioritizer `priority` for online load in bursts: offline requests use the replica between "
        "bursts. Not where a single latency budget suffices (`hygen`)."
    ),
)
