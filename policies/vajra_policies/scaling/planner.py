"""Decisions of Dynamo's planner over the pools of a deployment, as pure arithmetic over what was observed.

Two loops. Throughput: replicas for the requests that are expected, from the rate of one engine that keeps its promises. Load: one replica
up or down for each pool. With both, the first gives the fewest replicas that the second may choose. A budget of devices bounds both.

Source: NVIDIA Dynamo 1.6.1, planner (`PlannerScalingState`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from vajra_policies.scaling.device_budget import HOLD, NO_BUDGET, RECONCILE, Budget, Counts, PairBudget, guard_one
from vajra_policies.scaling.planner_rules import (
    NO_CHANGE,
    REFUSED,
    UNKNOWN_SIZES,
    EngineLoad,
    EngineModel,
    EngineSizes,
    Opinion,
    Promises,
    Target,
    Thresholds,
    by_decodes,
    by_prompts,
    by_thresholds,
    load_of,
)
from vajra_py.contract import PoolRole

IN_PROGRESS = "scaling_in_progress"
NO_FIGURES = "no_fpm_data"
MISMATCH = "worker_count_mismatch"
CAPPED = "scale_down_capped_by_throughput"
UP, DOWN = "scale_up", "scale_down"
LOWER_BOUND = "set_lower_bound"
NOT_READY = "model_not_ready"
SCALE = "scale"
"""Reasons, by the names that the program gives them."""

_INTEREST = {UP: 4, CAPPED: 3, DOWN: 2, NO_CHANGE: 1}


@dataclass(frozen=True, slots=True)
class PoolRules:
    """Rules of one pool."""

    role: PoolRole
    devices: int = 1
    """Devices of a replica."""
    least: int = 1
    """Fewest replicas."""
    thresholds: Thresholds | None = None
    """Factor of its load, unless the target is latencies that are promised."""
    sizes: EngineSizes = UNKNOWN_SIZES


@dataclass(frozen=True, slots=True)
class PlannerRules:
    """Rules of a deployment."""

    target: Target
    promises: Promises
    budget: Budget = NO_BUDGET
    scales_by_load: bool = True
    scales_by_throughput: bool = False
    max_change: int = 8
    """Most replicas by which one decision on throughput changes a pool."""


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


class CapacityModel(EngineModel, Protocol):
    """Predictions for one replica, its highest rate among them."""

    def requests_per_s(self, role: PoolRole, traffic: Traffic) -> float:
        """Requests of this traffic a second of a replica of such a pool that keeps the promises; 0 when unknown."""


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """Decision by load."""

    counts: tuple[int, ...] | None
    """Replicas of each pool; None: as they are."""
    reason: str
    by_pool: tuple[str, ...] = ()
    """Reason of each of two pools."""
    ttft_s: float | None = None
    itl_s: float | None = None


@dataclass(frozen=True, slots=True)
class ThroughputDecision:
    """Decision by throughput."""

    counts: tuple[int, ...] | None
    """Replicas of each pool; None: as they are."""
    floors: tuple[int, ...] | None
    """Fewest replicas of each pool from now on, where load decides too."""
    reason: str
    requests_per_s: tuple[float | None, ...] = ()
    """Highest rate of one engine of each pool."""


# By load


def decide_by_load(rules: PlannerRules, pools: Sequence[PoolState], model: EngineModel) -> LoadDecision:
    """Decide on one pool, or on a pool for prompts and one that decodes."""
    if len(pools) == 2:
        return _decide_on_two(rules, (pools[0], pools[1]), model)
    return _decide_on_one(rules, pools[0], model)


def _hold(pools: Sequence[PoolState]) -> str | None:
    """Reason for which nothing can be decided; None when it can."""
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
    opinions = [_opinion(rules, pool, model) if pool.engines else Opinion(None) for pool in pools]
    asked = [pool.ready if one.wanted is None else one.wanted for pool, one in zip(pools, opinions, strict=True)]
    lifted = [
        max(one, pool.floor) if rules.scales_by_throughput else one for one, pool in zip(asked, pools, strict=True)
    ]
    wanted: Counts = max(lifted[0], pools[0].rules.least), max(lifted[1], pools[1].rules.least)
    if lifted != asked:
        wanted = _fit_two(rules, pools, wanted)
    counts, by_budget = _guard_two(rules, pools, wanted)
    reasons = [_reason_of(*one) for one in zip(pools, asked, lifted, counts, strict=True)]
    reason = by_budget or max(reasons, key=lambda one: _INTEREST[one])
    is_same = counts == _ready(pools)
    if is_same:
        own = [one.reason if one.reason not in ("", NO_CHANGE) else "" for one in opinions]
        reasons = [mine or reason_of_pool for mine, reason_of_pool in zip(own, reasons, strict=True)]
        reason = by_budget or next(filter(None, own), reason)
    return LoadDecision(None if is_same else counts, reason, tuple(reasons), opinions[0].ttft_s, opinions[1].itl_s)


def _reason_of(pool: PoolState, asked: int, lifted: int, count: int) -> str:
    """Reason for a pool's count, by what its load asked for and what the throughput made of it."""
    is_capped = lifted > asked and asked < pool.ready
    if count > pool.ready:
        return UP
    if count < pool.ready:
        return CAPPED if is_capped else DOWN
    return CAPPED if is_capped else NO_CHANGE


def _decide_on_one(rules: PlannerRules, pool: PoolState, model: EngineModel) -> LoadDecision:
    is_mixed = pool.rules.role is PoolRole.MIXED
    held = _hold((pool,))
    if held == NO_FIGURES and not is_mixed and pool.is_changing:
        held = IN_PROGRESS
    if held is not None:
        return LoadDecision(None, held)
    opinion = _opinion(rules, pool, model)
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


def _opinion(rules: PlannerRules, pool: PoolState, model: EngineModel) -> Opinion:
    own, promises = pool.rules, rules.promises
    counts = pool.ready, own.least
    if rules.target != "sla":
        loads = [load_of(engine, own.role, rules.target, own.sizes) for engine in pool.engines]
        known = [load for load in loads if load is not None]
        return by_thresholds(known if len(known) == len(loads) else (), own.thresholds, *counts)
    if own.role is PoolRole.PREFILL:
        return by_prompts(pool.engines, model, promises, counts, own.role)
    decodes = by_decodes(pool.engines, model, promises, counts, (own.role, own.sizes))
    if own.role is PoolRole.DECODE:
        return decodes
    return _both(by_prompts(pool.engines, model, promises, counts, own.role), decodes, pool.ready)


def _both(prompts: Opinion, decodes: Opinion, ready: int) -> Opinion:
    """Opinion of a pool that does both: up if either asks for it, down if both agree."""
    estimates = prompts.ttft_s, decodes.itl_s
    p_wanted, d_wanted = prompts.wanted, decodes.wanted
    for wanted in (p_wanted, d_wanted):
        if wanted is not None and wanted > ready:
            return Opinion(wanted, "", *estimates)
    if p_wanted is not None and d_wanted is not None and p_wanted < ready and d_wanted < ready:
        return Opinion(max(p_wanted, d_wanted), "", *estimates)
    is_refused = prompts.is_refusal or decodes.is_refusal
    return Opinion(None, REFUSED if is_refused else NO_CHANGE, *estimates)


# By throughput


def decide_by_throughput(
    rules: PlannerRules, pools: Sequence[PoolState], traffic: Traffic, model: CapacityModel
) -> ThroughputDecision:
    """Decide on one pool, or on a pool for prompts and one that decodes."""
    rates = [model.requests_per_s(pool.rules.role, traffic) for pool in pools]
    is_known = all(rate > 0 for rate in rates)
    wanted = []
    for pool, rate in zip(pools, rates, strict=True):
        count = max(math.ceil(traffic.requests_per_s / rate), pool.rules.least) if is_known else pool.ready
        bounded = min(max(count, pool.ready - rules.max_change, 0), pool.ready + rules.max_change)
        wanted.append(max(bounded, pool.rules.least))
    decide = _plan_two if len(pools) == 2 else _plan_one
    decision = decide(rules, pools, wanted)
    reasons = tuple(rate if rate > 0 else None for rate in rates)
    return replace(decision, reason=decision.reason if is_known else NOT_READY, requests_per_s=reasons)


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
    ready = _ready(pair)
    counts = _fit_two(rules, pair, asked)
    is_held = counts == ready != asked
    if rules.scales_by_load:
        return ThroughputDecision(None, counts, HOLD if is_held else LOWER_BOUND)
    counts, by_budget = _guard_two(rules, pair, counts)
    if counts == ready:
        return ThroughputDecision(None, None, by_budget or (HOLD if is_held else NO_CHANGE))
    return ThroughputDecision(counts, None, SCALE)


# The budget of two pools


def _ready(pools: tuple[PoolState, PoolState]) -> Counts:
    return pools[0].ready, pools[1].ready


def _pair(rules: PlannerRules, pools: tuple[PoolState, PoolState]) -> PairBudget:
    one, other = pools[0].rules, pools[1].rules
    return PairBudget(rules.budget, (one.devices, other.devices), (one.least, other.least))


def _lacks_replicas(pools: tuple[PoolState, PoolState]) -> bool:
    return any(pool.ready < pool.rules.least for pool in pools)


def _raised(pools: tuple[PoolState, PoolState], wanted: Counts) -> Counts:
    return max(wanted[0], pools[0].rules.least), max(wanted[1], pools[1].rules.least)


def _fit_two(rules: PlannerRules, pools: tuple[PoolState, PoolState], wanted: Counts) -> Counts:
    """Fit the counts of the throughput rule under the ceiling alone; the floor does not raise them."""
    pair = _pair(rules, pools).without_floor()
    if _lacks_replicas(pools):
        return pair.clamp(_raised(pools, wanted))
    return pair.fit(_ready(pools), wanted)


def _guard_two(rules: PlannerRules, pools: tuple[PoolState, PoolState], wanted: Counts) -> tuple[Counts, str | None]:
    pair = _pair(rules, pools)
    if _lacks_replicas(pools):
        return pair.clamp(_raised(pools, wanted)), RECONCILE
    return pair.guard(_ready(pools), wanted)
