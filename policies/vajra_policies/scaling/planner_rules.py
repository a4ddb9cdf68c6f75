"""Rules of Dynamo's planner for one pool: how many replicas the load of its engines asks for, by steps of one.

One more replica as soon as one engine is over a threshold of load; with promised latencies, when every engine is predicted to miss its own.
One less where all engines are below the lower threshold and those that remain would not be over the upper one with the load shared out.

Source: NVIDIA Dynamo 1.6.1, planner, load-based scaling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol, TypeAlias

from vajra_py.contract import PoolRole

Target: TypeAlias = Literal["throughput", "latency", "load", "sla"]

NO_CHANGE = "no_change"
REFUSED = "scale_down_refused_consolidation"
INSUFFICIENT = "insufficient_data"


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of one replica, tokens."""

    queued_prefill: int = 0
    """Left to prefill."""
    scheduled_kv: int = 0
    """Tokens in KV for requests that decode."""
    queued_kv: int = 0
    """Contexts of requests that wait to decode."""
    num_decodes: int = 0
    """Requests that decode."""


class EngineModel(Protocol):
    """Predictions for one replica."""

    def ttft_s(self, load: EngineLoad, *, queue_scale: float, kv_scale: float | None) -> float:
        """Time to first token of a request that arrives now with `queue_scale` times the queue.

        `kv_scale`: decodes beside it count so many times, those that wait included; None: those that are scheduled, as they are.
        """

    def itl_s(self, load: EngineLoad, *, scale: float, counts_prefill: bool) -> float:
        """Time between tokens with `scale` times the decodes, waiting ones included; `counts_prefill`: as if queued prompts decoded too."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Loads of an engine between which a pool stays as it is."""

    up: float
    down: float
    up_at_equal: bool
    """A load equal to `up` is over it."""
    down_at_equal: bool
    """A load equal to `down` is below it."""

    def is_over(self, load: float) -> bool:
        """Return whether an engine with this load needs help."""
        return load >= self.up if self.up_at_equal else load > self.up

    def is_below(self, load: float) -> bool:
        """Return whether an engine with this load could do with less."""
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
class Promises:
    """Latencies that engines should keep, seconds, and how much of them may be used up by scaling down."""

    ttft_s: float
    itl_s: float
    sensitivity: float
    """Part of a promise that engines may take after scaling down, fraction."""
    accept_length: float = 1.0
    """Tokens that a decode step gives a request: above 1 with speculative decoding."""


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Sizes of an engine, tokens; None where unknown."""

    context_length: int | None
    max_kv_tokens: int | None


UNKNOWN_SIZES = EngineSizes(None, None)


@dataclass(frozen=True, slots=True)
class Opinion:
    """Replicas that the load asks for."""

    wanted: int | None
    """None: no opinion, for `reason`."""
    reason: str = ""
    ttft_s: float | None = None
    itl_s: float | None = None
    """Largest predictions over the engines."""

    @property
    def is_refusal(self) -> bool:
        """True if scaling down was refused, since the engines that remain could not take the load."""
        return self.reason == REFUSED


class Consolidation(Enum):
    """Return whether the other engines could take over the load of one."""

    SAFE = "safe"
    REFUSED = "refused"
    NOT_ASKED = "not asked"


def by_thresholds(loads: Sequence[float], thresholds: Thresholds | None, ready: int, least: int) -> Opinion:
    """One up when any load is over, one down when all are below and would not be over afterwards. `ready`: replicas that are up."""
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
    """The load by which an engine is judged; None where a size is unknown."""
    if role is PoolRole.PREFILL:
        if target == "load":
            return float(engine.queued_prefill)
        return engine.queued_prefill / sizes.context_length if sizes.context_length else None
    if not sizes.max_kv_tokens:
        return None
    queued = engine.queued_kv + (engine.queued_prefill if role is PoolRole.MIXED else 0)
    return (engine.scheduled_kv + queued) / sizes.max_kv_tokens


def by_prompts(
    engines: Sequence[EngineLoad], model: EngineModel, promises: Promises, counts: tuple[int, int], role: PoolRole
) -> Opinion:
    """Opinion by times to first token. `counts`: replicas that are up, and the fewest."""
    ready = counts[0]
    if ready == 0:
        return Opinion(None, INSUFFICIENT)
    share = _share(ready)
    kv_scale = share if role is PoolRole.MIXED else None

    def check(engine: EngineLoad) -> Consolidation:
        own_s = model.ttft_s(engine, queue_scale=0.0, kv_scale=kv_scale)
        budget_s = (promises.ttft_s - own_s) * promises.sensitivity
        induced_s = model.ttft_s(engine, queue_scale=share, kv_scale=kv_scale) - own_s
        return Consolidation.REFUSED if budget_s <= 0 or induced_s >= budget_s else Consolidation.SAFE

    found = [model.ttft_s(engine, queue_scale=1.0, kv_scale=None) for engine in engines]
    opinion = _by_latency(found, promises.ttft_s, counts, _consolidation(engines, ready, check))
    return Opinion(opinion.wanted, opinion.reason, ttft_s=max(found, default=None))


def by_decodes(
    engines: Sequence[EngineLoad],
    model: EngineModel,
    promises: Promises,
    counts: tuple[int, int],
    where: tuple[PoolRole, EngineSizes],
) -> Opinion:
    """Opinion by times between tokens. `counts`: replicas that are up, and the fewest."""
    ready, (role, sizes) = counts[0], where
    if ready == 0:
        return Opinion(None, INSUFFICIENT)
    share, is_mixed = _share(ready), role is PoolRole.MIXED

    def check(engine: EngineLoad) -> Consolidation:
        held = engine.scheduled_kv + engine.queued_kv + (engine.queued_prefill if is_mixed else 0)
        if sizes.max_kv_tokens and int(held * share) >= sizes.max_kv_tokens:
            return Consolidation.REFUSED
        itl_s = model.itl_s(engine, scale=share, counts_prefill=is_mixed) / promises.accept_length
        is_late = itl_s >= promises.itl_s * promises.sensitivity
        return Consolidation.REFUSED if is_late else Consolidation.SAFE

    found = [model.itl_s(engine, scale=1.0, counts_prefill=False) / promises.accept_length for engine in engines]
    opinion = _by_latency(found, promises.itl_s, counts, _consolidation(engines, ready, check))
    return Opinion(opinion.wanted, opinion.reason, itl_s=max(found, default=None))


def _share(ready: int) -> float:
    """Factor by which the load of each engine grows when one is gone."""
    return ready / (ready - 1) if ready > 1 else 1.0


def _consolidation(
    engines: Sequence[EngineLoad], ready: int, check: Callable[[EngineLoad], Consolidation]
) -> Consolidation:
    if ready < 2:
        return Consolidation.NOT_ASKED
    is_safe = all(check(engine) is Consolidation.SAFE for engine in engines)
    return Consolidation.SAFE if is_safe else Consolidation.REFUSED


def _by_latency(
    found_s: Sequence[float], promised_s: float, counts: tuple[int, int], consolidation: Consolidation
) -> Opinion:
    ready, least = counts
    if not found_s:
        return Opinion(None, INSUFFICIENT)
    if all(one > promised_s for one in found_s):
        return Opinion(ready + 1)
    if consolidation is Consolidation.SAFE:
        return Opinion(max(ready - 1, least))
    return Opinion(None, REFUSED if consolidation is Consolidation.REFUSED else NO_CHANGE)
