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
"""Dynamo's name for the reason of a decision that changes nothing, whether made by load or by throughput."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Load thresholds of an engine; a load between them changes nothing."""

    up: float
    down: float
    up_at_equal: bool
    """True if a load equal to `up` counts as above it."""
    down_at_equal: bool
    """True if a load equal to `down` counts as below it."""

    def is_over(self, load: float) -> bool:
        """Return True if the load is above the upper threshold."""
        return load >= self.up if self.up_at_equal else load > self.up

    def is_below(self, load: float) -> bool:
        """Return True if the load is below the lower threshold."""
        return load <= self.down if self.down_at_equal else load < self.down


PREFILL_THRESHOLDS = {
    "throughput": Thresholds(1.0, 0.1, up_at_equal=True, down_at_equal=False),
    "latency": Thresholds(0.1, 0.0, up_at_equal=True, down_at_equal=True),
}
"""Thresholds for the ratio of queued prompt tokens to the longest context, by the planner's target."""
DECODE_THRESHOLDS = {
    "throughput": Thresholds(1.0, 0.6, up_at_equal=False, down_at_equal=False),
    "latency": Thresholds(0.4, 0.1, up_at_equal=False, down_at_equal=False),
}
"""Thresholds for the ratio of tokens in KV memory to its capacity, by the planner's target."""


@dataclass(frozen=True, slots=True)
class LatencySlos:
    """Latency SLOs of the engines in seconds, and parameters for the comparison with predicted latencies."""

    ttft_s: float
    itl_s: float
    sensitivity: float
    """To scale down, the latency predicted for the remaining engines must be below this fraction of the SLO."""
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
    """Number of devices of a replica."""
    least: int = 1
    """Minimum number of replicas."""
    thresholds: Thresholds | None = None
    """Load thresholds of the pool; None if the targets are latency SLOs, or no thresholds are given."""
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
    """Largest change of a pool's number of replicas in one decision of throughput-based scaling."""


# Observations


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of one replica."""

    queued_prefill: int = 0
    """Number of tokens left to prefill."""
    scheduled_kv: int = 0
    """Number of tokens that decoding requests hold in KV memory."""
    queued_kv: int = 0
    """Number of context tokens of requests that wait to decode."""
    num_decodes: int = 0
    """Number of requests that decode."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """Present state of a pool."""

    rules: PoolRules
    ready: int
    """Number of replicas that are up."""
    engines: Sequence[EngineLoad]
    is_changing: bool = False
    """True if a replica is starting or draining."""
    floor: int = 1
    """Minimum number of replicas, set by the last decision of throughput-based scaling."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Expected traffic: the request rate, and the mean lengths and prefix hits of requests."""

    requests_per_s: float
    num_prompt_tokens: float
    num_output_tokens: float
    hit_fraction: float = 0.0
    """Fraction of prompt tokens that are prefix hits."""


def both_ready(pools: tuple[PoolState, PoolState]) -> Counts:
    """Return the number of replicas of each pool that are up."""
    return pools[0].ready, pools[1].ready


def budget_of_two(rules: PlannerRules, pools: tuple[PoolState, PoolState]) -> PairBudget:
    """Return the budget that two pools share."""
    one, other = pools[0].rules, pools[1].rules
    return PairBudget(rules.budget, (one.devices, other.devices), (one.least, other.least))


# Predictions


class EngineModel(Protocol):
    """Predictions for one replica."""

    def ttft_s(self, load: EngineLoad, *, queue_scale: float, kv_scale: float | None) -> float:
        """Return the TTFT in seconds of a request that arrives now; `queue_scale` scales the queued prompt tokens.

        `kv_scale` scales the number of decodes, and the context tokens of decodes and of requests that wait to decode.
        None: these numbers are not scaled, and requests that wait to decode are left out.
        """

    def itl_s(self, load: EngineLoad, *, scale: float, counts_prefill: bool) -> float:
        """Return the time between tokens in seconds. `scale` scales the number of decodes, and the context tokens of
        decodes and of requests that wait to decode. With `counts_prefill`, tokens of queued prompts count as
        context tokens too.
        """


class CapacityModel(EngineModel, Protocol):
    """Predictions for one replica, including its highest rate."""

    def requests_per_s(self, role: PoolRole, traffic: Traffic) -> float:
        """Return the requests per second of this traffic that a replica with this role can serve within the SLOs; 0 if
        unknown.
        """
