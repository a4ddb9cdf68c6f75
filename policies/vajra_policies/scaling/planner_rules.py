"""Data of Dynamo's planner: pools, loads of engines, thresholds, SLOs, predicted traffic.

Source: NVIDIA Dynamo 1.6.1, planner (`PlannerScalingState`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from vajra_policies.scaling.device_budget import NO_BUDGET, Budget
from vajra_policies.scaling.pair_budget import Counts, PairBudget
from vajra_py.contract import PoolRole

Target: TypeAlias = Literal["throughput", "latency", "load", "sla"]

NO_CHANGE = "no_change"
"""Reason of decisions by load and by throughput, under Dynamo's name."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Load thresholds of an engine; between them, the pool does not change."""

    up: float
    down: float
    up_at_equal: bool
    """True if a load equal to `up` counts as above it."""
    down_at_equal: bool
    """True if a load equal to `down` counts as below it."""

    def is_over(self, load: float) -> bool:
        """Return whether an engine with this load needs help."""
        return load >= self.up if self.up_at_equal else load > self.up

    def is_below(self, load: float) -> bool:
        """Return whether an engine with this load is underused."""
        return load <= self.down if self.down_at_equal else load < self.down


PREFILL_THRESHOLDS = {
    "throughput": Thresholds(1.0, 0.1, up_at_equal=True, down_at_equal=False),
    "latency": Thresholds(0.1, 0.0, up_at_equal=True, down_at_equal=True),
}
"""Ratio of queued prompt tokens to the longest context."""
DECODE_THRESHOLDS = {
    "throughput": Thresholds(1.0, 0.6, up_at_equal=False, down_at_equal=False),
    "latency": Thresholds(0.4, 0.1, up_at_equal=False, down_at_equal=False),
}
"""Ratio of tokens in KV to the room for them."""


@dataclass(frozen=True, slots=True)
class LatencySlos:
    """SLOs of the engines, in seconds, and the fraction of them that scaling down may use up."""

    ttft_s: float
    itl_s: float
    sensitivity: float
    """Fraction of an SLO that engines may use up after scaling down."""
    accept_length: float = 1.0
    """Tokens per request and decode step: above 1 with speculative decoding."""


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Sizes of an engine in tokens; None if unknown."""

    context_length: int | None
    max_kv_tokens: int | None


UNKNOWN_SIZES = EngineSizes(None, None)


@dataclass(frozen=True, slots=True)
class PoolRules:
    """Rules of one pool."""

    role: PoolRole
    devices: int = 1
    """Devices of a replica."""
    least: int = 1
    """Fewest replicas."""
    thresholds: Thresholds | None = None
    """Load thresholds of the pool; None if the targets are latency SLOs."""
    sizes: EngineSizes = UNKNOWN_SIZES


@dataclass(frozen=True, slots=True)
class PlannerRules:
    """Rules of a deployment."""

    target: Target
    slos: LatencySlos
    budget: Budget = NO_BUDGET
    scales_by_load: bool = True
    scales_by_throughput: bool = False
    max_change: int = 8
    """Largest change of a pool's number of replicas by one decision on throughput."""


# Observations


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of one replica, tokens."""

    queued_prefill: int = 0
    """Tokens left to prefill."""
    scheduled_kv: int = 0
    """Tokens in KV for requests that decode."""
    queued_kv: int = 0
    """Contexts of requests that wait to decode."""
    num_decodes: int = 0
    """Number of requests that decode."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """A pool as it is now."""

    rules: PoolRules
    ready: int
    """Replicas that are up."""
    engines: Sequence[EngineLoad]
    is_changing: bool = False
    """A replica is starting or draining."""
    floor: int = 1
    """Fewest replicas by throughput."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests that are expected."""

    requests_per_s: float
    num_prompt_tokens: float
    num_output_tokens: float
    """Means over the requests."""
    hit_fraction: float = 0.0
    """Part of the prompts that is in prefix caches."""


def both_ready(pools: tuple[PoolState, PoolState]) -> Counts:
    """Return the replicas of two pools that are up."""
    return pools[0].ready, pools[1].ready


def budget_of_two(rules: PlannerRules, pools: tuple[PoolState, PoolState]) -> PairBudget:
    """Return the budget that two pools share."""
    one, other = pools[0].rules, pools[1].rules
    return PairBudget(rules.budget, (one.devices, other.devices), (one.least, other.least))


# Predictions


class EngineModel(Protocol):
    """Predictions for one replica."""

    def ttft_s(self, load: EngineLoad, *, queue_scale: float, kv_scale: float | None) -> float:
        """Return the TTFT of a request that arrives now, with the queue multiplied by `queue_scale`.

        `kv_scale` multiplies the decodes, including waiting ones; None: the scheduled ones, unscaled.
        """

    def itl_s(self, load: EngineLoad, *, scale: float, counts_prefill: bool) -> float:
        """Return the time between tokens with the decodes, including waiting ones, multiplied by `scale`;
        `counts_prefill`: as if queued prompts decoded too.
        """


class CapacityModel(EngineModel, Protocol):
    """Predictions for one replica, including its highest rate."""

    def requests_per_s(self, role: PoolRole, traffic: Traffic) -> float:
        """Return the requests per second of this traffic that a replica with this role can serve within the SLOs; 0 if
        unknown.
        """
