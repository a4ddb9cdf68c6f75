"""Load-based scaling of Dynamo's planner: at most one replica more or less per pool, within the device budget, and not
below the minimum that throughput-based scaling sets.

Source: NVIDIA Dynamo 1.6.1, planner (`PlannerScalingState`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vajra_policies.scaling.device_budget import guard_one
from vajra_policies.scaling.planner_rules import (
    NO_CHANGE,
    EngineModel,
    PlannerRules,
    PoolState,
    both_ready,
    budget_of_two,
)
from vajra_policies.scaling.pool_load import Opinion, opinion_of
from vajra_py.contract import PoolRole

IN_PROGRESS = "scaling_in_progress"
NO_FIGURES = "no_fpm_data"
MISMATCH = "worker_count_mismatch"
CAPPED = "scale_down_capped_by_throughput"
UP, DOWN = "scale_up", "scale_down"
"""Reasons of decisions, under Dynamo's names."""

_INTEREST = {UP: 4, CAPPED: 3, DOWN: 2, NO_CHANGE: 1}


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """A decision of load-based scaling."""

    counts: tuple[int, ...] | None
    """Number of replicas of each pool; None: unchanged."""
    reason: str
    by_pool: tuple[str, ...] = ()
    """Reason for each pool, if two pools are decided on together."""
    ttft_s: float | None = None
    itl_s: float | None = None


def decide_by_load(rules: PlannerRules, pools: Sequence[PoolState], model: EngineModel) -> LoadDecision:
    """Decide on the replicas of one pool, or of a prompt pool and a decode pool together."""
    if len(pools) == 2:
        return _decide_on_two(rules, (pools[0], pools[1]), model)
    return _decide_on_one(rules, pools[0], model)


def _hold(pools: Sequence[PoolState]) -> str | None:
    """Return the reason why no decision is possible; None if one is possible."""
    if not any(pool.engines for pool in pools):
        return NO_FIGURES
    if any(pool.is_changing for pool in pools):
        return IN_PROGRESS
    if any(pool.engines and len(pool.engines) != pool.ready for pool in pools):
        return MISMATCH
    return None


def _decide_on_two(rules: PlannerRules, pools: tuple[PoolState, PoolState], model: EngineModel) -> LoadDecision:
    held = _hold(pools)
    if held is not None:
        return LoadDecision(None, held, (held, held))
    budget, ready = budget_of_two(rules, pools), both_ready(pools)
    opinions = [opinion_of(rules, pool, model) if pool.engines else Opinion(None) for pool in pools]
    asked = [pool.ready if one.wanted is None else one.wanted for pool, one in zip(pools, opinions, strict=True)]
    lifted = [
        max(one, pool.floor) if rules.scales_by_throughput else one for one, pool in zip(asked, pools, strict=True)
    ]
    wanted = budget.raised((lifted[0], lifted[1]))
    if lifted != asked:
        wanted = budget.plan(ready, wanted)
    counts, by_budget = budget.decide(ready, wanted)
    reasons = [_reason_of(*one) for one in zip(pools, asked, lifted, counts, strict=True)]
    reason = by_budget or max(reasons, key=lambda one: _INTEREST[one])
    is_same = counts == ready
    if is_same:
        own = [one.reason if one.reason not in ("", NO_CHANGE) else "" for one in opinions]
        reasons = [mine or reason_of_pool for mine, reason_of_pool in zip(own, reasons, strict=True)]
        reason = by_budget or next(filter(None, own), reason)
    return LoadDecision(None if is_same else counts, reason, tuple(reasons), opinions[0].ttft_s, opinions[1].itl_s)


def _reason_of(pool: PoolState, asked: int, lifted: int, count: int) -> str:
    """Return the reason why a pool gets `count` replicas. `asked`: number that its load requires; `lifted`: `asked`,
    raised to the minimum that throughput-based scaling sets.
    """
    if count > pool.ready:
        return UP
    if lifted > asked and asked < pool.ready:
        return CAPPED
    return DOWN if count < pool.ready else NO_CHANGE


def _decide_on_one(rules: PlannerRules, pool: PoolState, model: EngineModel) -> LoadDecision:
    is_mixed = pool.rules.role is PoolRole.MIXED
    held = _hold((pool,))
    if held == NO_FIGURES and not is_mixed and pool.is_changing:
        held = IN_PROGRESS
    if held is not None:
        return LoadDecision(None, held)
    opinion = opinion_of(rules, pool, model)
    if is_mixed and rules.target != "sla" and opinion.wanted is None:
        return LoadDecision(None, opinion.reason)
    asked = pool.ready if opinion.wanted is None else opinion.wanted
    wanted = max(asked, pool.rules.least)
    floored = max(wanted, pool.floor) if rules.scales_by_throughput else wanted
    count, by_budget = guard_one(pool.ready, floored, pool.rules.devices, rules.budget, pool.rules.least)
    estimates = opinion.ttft_s, opinion.itl_s
    if count == pool.ready and (opinion.wanted is None or (is_mixed and rules.target == "sla")):
        is_capped = is_mixed and count > asked and asked < pool.ready
        reason = by_budget or (CAPPED if is_capped else opinion.reason or NO_CHANGE)
        return LoadDecision(None, reason, (), *estimates)
    if count < pool.ready:
        reason = CAPPED if count > (asked if is_mixed else wanted) else DOWN
    else:
        reason = UP if count > pool.ready else NO_CHANGE
    return LoadDecision((count,), by_budget or reason, (), *estimates)
