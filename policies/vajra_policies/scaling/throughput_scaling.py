"""Throughput-based scaling of Dynamo's planner: the number of replicas for the expected request rate, from the rate
that one replica serves within the SLOs.

If load-based scaling is on too, this number is the minimum for its decisions.

Source: NVIDIA Dynamo 1.6.1, planner (`PlannerScalingState`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vajra_policies.scaling.device_budget import HOLD, guard_one
from vajra_policies.scaling.planner_rules import (
    NO_CHANGE,
    CapacityModel,
    PlannerRules,
    PoolState,
    Traffic,
    both_ready,
    budget_of_two,
)

LOWER_BOUND = "set_lower_bound"
NOT_READY = "model_not_ready"
SCALE = "scale"
"""Reasons of decisions, under Dynamo's names."""


@dataclass(frozen=True, slots=True)
class ThroughputDecision:
    """A decision of throughput-based scaling."""

    counts: tuple[int, ...] | None
    """Number of replicas of each pool; None: unchanged."""
    floors: tuple[int, ...] | None
    """Minimum number of replicas of each pool, for decisions by load; None unless load-based scaling is on."""
    reason: str
    requests_per_s: tuple[float | None, ...] = ()
    """Highest request rate that one engine of each pool can serve; None: unknown."""


def decide_by_throughput(
    rules: PlannerRules, pools: Sequence[PoolState], traffic: Traffic, model: CapacityModel
) -> ThroughputDecision:
    """Decide on the replicas of one pool, or of a prompt pool and a decode pool together."""
    rates = [model.requests_per_s(pool.rules.role, traffic) for pool in pools]
    is_known = all(rate > 0 for rate in rates)
    wanted = []
    for pool, rate in zip(pools, rates, strict=True):
        count = max(math.ceil(traffic.requests_per_s / rate), pool.rules.least) if is_known else pool.ready
        bounded = min(max(count, pool.ready - rules.max_change, 0), pool.ready + rules.max_change)
        wanted.append(max(bounded, pool.rules.least))
    decide = _plan_two if len(pools) == 2 else _plan_one
    decision = decide(rules, pools, wanted)
    observed = tuple(rate if rate > 0 else None for rate in rates)
    return replace(decision, reason=decision.reason if is_known else NOT_READY, requests_per_s=observed)


def _plan_one(rules: PlannerRules, pools: Sequence[PoolState], wanted: Sequence[int]) -> ThroughputDecision:
    (pool,), (count,) = pools, wanted
    devices, least, ready = pool.rules.devices, pool.rules.least, pool.ready
    count, by_ceiling = guard_one(ready, count, devices, rules.budget.without_floor(), least)
    if rules.scales_by_load:
        return ThroughputDecision(None, (count,), HOLD if by_ceiling == HOLD else LOWER_BOUND)
    count, by_budget = guard_one(ready, count, devices, rules.budget, least)
    if count == ready:
        return ThroughputDecision(None, None, by_budget or by_ceiling or NO_CHANGE)
    return ThroughputDecision((count,), None, SCALE)


def _plan_two(rules: PlannerRules, pools: Sequence[PoolState], wanted: Sequence[int]) -> ThroughputDecision:
    pair, asked = (pools[0], pools[1]), (wanted[0], wanted[1])
    budget, ready = budget_of_two(rules, pair), both_ready(pair)
    counts = budget.plan(ready, asked)
    is_held = counts == ready != asked
    if rules.scales_by_load:
        return ThroughputDecision(None, counts, HOLD if is_held else LOWER_BOUND)
    counts, by_budget = budget.decide(ready, counts)
    if counts == ready:
        return ThroughputDecision(None, None, by_budget or (HOLD if is_held else NO_CHANGE))
    return ThroughputDecision(counts, None, SCALE)
