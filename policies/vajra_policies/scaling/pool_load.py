"""Rules of Dynamo's planner for one pool: the number of replicas by the load of its engines, in steps of one.

With thresholds, scale up if the load of any engine is above the upper threshold. Scale down if the loads of all engines
are below the lower threshold, and would stay below the upper threshold when the remaining engines share the load. With
latency SLOs, scale up if every engine is predicted to miss the same SLO; scale down if the remaining engines are
predicted to stay within a fraction of the SLOs.

Source: NVIDIA Dynamo 1.6.1, planner, load-based scaling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from vajra_policies.scaling.planner_rules import (
    NO_CHANGE,
    EngineLoad,
    EngineModel,
    EngineSizes,
    LatencySlos,
    PlannerRules,
    PoolState,
    Target,
    Thresholds,
)
from vajra_py.contract import PoolRole

REFUSED = "scale_down_refused_consolidation"
INSUFFICIENT = "insufficient_data"
"""Reasons for a number of replicas that is unknown or unchanged, under Dynamo's names."""


@dataclass(frozen=True, slots=True)
class Opinion:
    """Number of replicas that the load requires, or the reason why it is unknown or unchanged."""

    wanted: int | None
    """Number of replicas; None if it is unknown or unchanged (`reason` states why)."""
    reason: str = ""
    ttft_s: float | None = None
    """Largest predicted TTFT of any engine, seconds; None if it was not predicted."""
    itl_s: float | None = None
    """Largest predicted time between tokens of any engine, seconds; None if it was not predicted."""

    @property
    def is_refusal(self) -> bool:
        """True if scaling down was refused because the remaining engines could not take the load."""
        return self.reason == REFUSED


class Consolidation(Enum):
    """Outcome of the check that the remaining engines can take over the load of one engine."""

    SAFE = "safe"
    REFUSED = "refused"
    NOT_ASKED = "not asked"


def opinion_of(rules: PlannerRules, pool: PoolState, model: EngineModel) -> Opinion:
    """Return the number of replicas that a pool's load requires, by the rules of its role and target."""
    own, slos = pool.rules, rules.slos
    counts = pool.ready, own.least
    if rules.target != "sla":
        loads = [load_of(engine, own.role, rules.target, own.sizes) for engine in pool.engines]
        known = [load for load in loads if load is not None]
        return by_thresholds(known if len(known) == len(loads) else (), own.thresholds, *counts)
    if own.role is PoolRole.PREFILL:
        return by_prompts(pool.engines, model, slos, counts, own.role)
    decodes = by_decodes(pool.engines, model, slos, counts, (own.role, own.sizes))
    if own.role is PoolRole.DECODE:
        return decodes
    return _both(by_prompts(pool.engines, model, slos, counts, own.role), decodes, pool.ready)


def _both(prompts: Opinion, decodes: Opinion, ready: int) -> Opinion:
    """Combine the results for prompts and for decodes in a mixed pool: scale up if either requires it, down if both
    allow it.
    """
    estimates = prompts.ttft_s, decodes.itl_s
    p_wanted, d_wanted = prompts.wanted, decodes.wanted
    for wanted in (p_wanted, d_wanted):
        if wanted is not None and wanted > ready:
            return Opinion(wanted, "", *estimates)
    if p_wanted is not None and d_wanted is not None and p_wanted < ready and d_wanted < ready:
        return Opinion(max(p_wanted, d_wanted), "", *estimates)
    is_refused = prompts.is_refusal or decodes.is_refusal
    return Opinion(None, REFUSED if is_refused else NO_CHANGE, *estimates)


def by_thresholds(loads: Sequence[float], thresholds: Thresholds | None, ready: int, least: int) -> Opinion:
    """Require one replica more if any load is above the upper threshold.

    Require one replica less, but at least `least`, if all loads are below the lower threshold and the largest load
    would stay below the upper threshold afterwards. `ready`: number of replicas that are up.
    """
    if ready == 0 or not loads or thresholds is None:
        return Opinion(None, INSUFFICIENT)
    if any(map(thresholds.is_over, loads)):
        return Opinion(ready + 1)
    if ready > 1 and all(map(thresholds.is_below, loads)):
        wanted = max(ready - 1, least)
        if 0 < wanted < ready and max(loads) * ready / wanted >= thresholds.up:
            return Opinion(ready)
        return Opinion(wanted)
    return Opinion(None, NO_CHANGE)


def load_of(engine: EngineLoad, role: PoolRole, target: Target, sizes: EngineSizes) -> float | None:
    """Return an engine's load for the comparison with thresholds; None if a size of the engine is unknown."""
    if role is PoolRole.PREFILL:
        if target == "load":
            return float(engine.queued_prefill)
        return engine.queued_prefill / sizes.context_length if sizes.context_length else None
    if not sizes.max_kv_tokens:
        return None
    queued = engine.queued_kv + (engine.queued_prefill if role is PoolRole.MIXED else 0)
    return (engine.scheduled_kv + queued) / sizes.max_kv_tokens


def by_prompts(
    engines: Sequence[EngineLoad], model: EngineModel, slos: LatencySlos, counts: tuple[int, int], role: PoolRole
) -> Opinion:
    """Return the number of replicas that the predicted TTFTs require. `counts`: (replicas that are up, minimum)."""
    ready = counts[0]
    if ready == 0:
        return Opinion(None, INSUFFICIENT)
    share = _share(ready)
    kv_scale = share if role is PoolRole.MIXED else None

    def check(engine: EngineLoad) -> Consolidation:
        own_s = model.ttft_s(engine, queue_scale=0.0, kv_scale=kv_scale)
        budget_s = (slos.ttft_s - own_s) * slos.sensitivity
        induced_s = model.ttft_s(engine, queue_scale=share, kv_scale=kv_scale) - own_s
        return Consolidation.REFUSED if budget_s <= 0 or induced_s >= budget_s else Consolidation.SAFE

    found = [model.ttft_s(engine, queue_scale=1.0, kv_scale=None) for engine in engines]
    opinion = _by_latency(found, slos.ttft_s, counts, _consolidation(engines, ready, check))
    return Opinion(opinion.wanted, opinion.reason, ttft_s=max(found, default=None))


def by_decodes(
    engines: Sequence[EngineLoad],
    model: EngineModel,
    slos: LatencySlos,
    counts: tuple[int, int],
    where: tuple[PoolRole, EngineSizes],
) -> Opinion:
    """Return the number of replicas that the predicted times between tokens require. `counts`: (replicas that are up,
    minimum).
    """
    ready, (role, sizes) = counts[0], where
    if ready == 0:
        return Opinion(None, INSUFFICIENT)
    share, is_mixed = _share(ready), role is PoolRole.MIXED

    def check(engine: EngineLoad) -> Consolidation:
        held = engine.scheduled_kv + engine.queued_kv + (engine.queued_prefill if is_mixed else 0)
        if sizes.max_kv_tokens and int(held * share) >= sizes.max_kv_tokens:
            return Consolidation.REFUSED
        itl_s = model.itl_s(engine, scale=share, counts_prefill=is_mixed) / slos.accept_length
        is_late = itl_s >= slos.itl_s * slos.sensitivity
        return Consolidation.REFUSED if is_late else Consolidation.SAFE

    found = [model.itl_s(engine, scale=1.0, counts_prefill=False) / slos.accept_length for engine in engines]
    opinion = _by_latency(found, slos.itl_s, counts, _consolidation(engines, ready, check))
    return Opinion(opinion.wanted, opinion.reason, itl_s=max(found, default=None))


def _share(ready: int) -> float:
    """Return the factor by which the load of each remaining engine grows when one engine is removed."""
    return ready / (ready - 1) if ready > 1 else 1.0


def _consolidation(
    engines: Sequence[EngineLoad], ready: int, check: Callable[[EngineLoad], Consolidation]
) -> Consolidation:
    if ready < 2:
        return Consolidation.NOT_ASKED
    is_safe = all(check(engine) is Consolidation.SAFE for engine in engines)
    return Consolidation.SAFE if is_safe else Consolidation.REFUSED


def _by_latency(
    found_s: Sequence[float], target_s: float, counts: tuple[int, int], consolidation: Consolidation
) -> Opinion:
    ready, least = counts
    if not found_s:
        return Opinion(None, INSUFFICIENT)
    if all(one > target_s for one in found_s):
        return Opinion(ready + 1)
    if consolidation is Consolidation.SAFE:
        return Opinion(max(ready - 1, least))
    return Opinion(None, REFUSED if consolidation is Consolidation.REFUSED else NO_CHANGE)
