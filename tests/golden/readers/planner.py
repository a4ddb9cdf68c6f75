"""Check the rules of `dynamo_planner` against scaling decisions of format planner-golden/1.

Each tick gives what the planner observed; floors of throughput and the last cache hit rate are carried from tick to tick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any, Literal, TypeAlias

from tests.golden.readers.trace import Difference, Result
from vajra_policies.scaling.device_budget import Budget
from vajra_policies.scaling.load_scaling import LoadDecision, decide_by_load
from vajra_policies.scaling.planner_rules import (
    DECODE_THRESHOLDS,
    PREFILL_THRESHOLDS,
    EngineLoad,
    EngineSizes,
    LatencySlos,
    PlannerRules,
    PoolRules,
    PoolState,
    Thresholds,
    Traffic,
)
from vajra_policies.scaling.throughput_scaling import ThroughputDecision, decide_by_throughput
from vajra_py.contract import PoolRole

SCHEMA = "planner-golden/1"
UNIT = "ticks"
Side: TypeAlias = Literal["prefill", "decode"]
SIDES: tuple[Side, Side] = ("prefill", "decode")
MAX_DIFFERENCE_MS = 1e-3
MAX_RELATIVE_DIFFERENCE = 1e-6


@dataclass(slots=True)
class LineModel:
    """The recorded performance model: straight lines in tokens. `hit_rate` and `accept_length`: the last ones observed."""

    line: Mapping[str, float]
    hit_rate: float = 0.0
    accept_length: float = 1.0

    def ttft_s(self, load: EngineLoad, *, queue_scale: float, kv_scale: float | None) -> float:
        """See `EngineModel`."""
        line = self.line
        return line["p0"] + line["p1"] * (load.queued_prefill * queue_scale + line["avg_isl"]) * (1 - self.hit_rate)

    def itl_s(self, load: EngineLoad, *, scale: float, counts_prefill: bool) -> float:
        """See `EngineModel`."""
        return self.line["d0"] + self.line["d1"] * (load.scheduled_kv + load.queued_kv) * scale

    def requests_per_s(self, role: PoolRole, traffic: Traffic) -> float:
        """See `CapacityModel`."""
        if role is PoolRole.PREFILL:
            return self.line["tokens_per_s_p"] / (traffic.num_prompt_tokens * (1 - traffic.hit_fraction))
        return self.line["tokens_per_s_d"] * self.accept_length / traffic.num_output_tokens


@dataclass(slots=True)
class Planner:
    """A recorded configuration, and what is carried from tick to tick."""

    case: Mapping[str, Any]
    model: LineModel
    floors: dict[Side, int]

    @classmethod
    def of(cls, case: Mapping[str, Any]) -> Planner:
        """Return the planner before the first tick."""
        return cls(case, LineModel(case["line"] or {}), {"prefill": 1, "decode": 1})

    @property
    def sides(self) -> Sequence[Side]:
        """Pools that it scales."""
        mode = self.case["config"]["mode"]
        return SIDES if mode == "disagg" else [side for side in SIDES if side == mode]

    def rules(self) -> PlannerRules:
        """Return the rules of the configuration."""
        config = self.case["config"]
        budget = Budget(*(None if config[name] < 0 else config[name] for name in ("max_gpu_budget", "min_gpu_budget")))
        slos = LatencySlos(
            config["ttft_ms"] / 1000,
            config["itl_ms"] / 1000,
            config["load_scaling_down_sensitivity"] / 100,
            self.model.accept_length,
        )
        return PlannerRules(
            config["optimization_target"],
            slos,
            budget,
            config["enable_load_scaling"],
            config["enable_throughput_scaling"],
            config["max_throughput_scaling_replicas"],
        )

    def pools(self, tick: Mapping[str, Any]) -> list[PoolState]:
        """Return the pools as the tick describes them."""
        return [self._pool(side, tick) for side in self.sides]

    def _pool(self, side: Side, tick: Mapping[str, Any]) -> PoolState:
        config, capabilities, workers = self.case["config"], self.case["capabilities"], tick["workers"]
        role = PoolRole(side)
        if side == "prefill":
            engines = [EngineLoad(queued_prefill=queued) for queued in tick["prefill_queued_tokens"]]
        else:
            engines = [EngineLoad(scheduled_kv=held, queued_kv=queued) for held, queued in tick["decode_kv"]]
        own = config[f"{side}_min_endpoint"]
        rules = PoolRules(
            role,
            config[f"{side}_engine_num_gpu"],
            config["min_endpoint"] if own is None else own,
            thresholds_of(config, role),
            EngineSizes(capabilities["context_length"], capabilities["max_kv_tokens"]),
        )
        ready, expected = workers[f"ready_num_{side}"], workers[f"expected_num_{side}"]
        is_changing = workers[f"{side}_scaling_in_progress"] or expected not in (None, ready)
        return PoolState(rules, ready, engines, is_changing, self.floors[side])

    def observe(self, traffic: Mapping[str, Any]) -> None:
        """Take in a tick's cache hit rate and accepted length."""
        if traffic["predicted_kv_hit_rate"] is not None:
            self.model.hit_rate = traffic["predicted_kv_hit_rate"]
        num_drafted = self.case["capabilities"]["speculative_nextn"]
        if num_drafted and traffic["predicted_accept_length"] is not None:
            self.model.accept_length = min(max(traffic["predicted_accept_length"], 1.0), num_drafted + 1.0)

    def by_throughput(self, tick: Mapping[str, Any]) -> ThroughputDecision | None:
        """Decide by throughput, if the tick predicts traffic."""
        given = tick["traffic"]
        if given is None:
            return None
        self.observe(given)
        rate = given["predicted_num_req"] / given["duration_s"]
        traffic = Traffic(rate, given["predicted_isl"], given["predicted_osl"], given["predicted_kv_hit_rate"] or 0.0)
        decision = decide_by_throughput(self.rules(), self.pools(tick), traffic, self.model)
        if decision.floors is not None:
            self.floors.update(zip(self.sides, decision.floors, strict=True))
        return decision

    def by_load(self, tick: Mapping[str, Any]) -> LoadDecision:
        """Decide by load."""
        return decide_by_load(self.rules(), self.pools(tick), self.model)

    def both(self, values: Sequence[Any] | None) -> list[Any]:
        """Return values of the pools that are scaled as [prompts, decodes], with null for what there is none of."""
        found = dict(zip(self.sides, values or (), strict=False))
        return [found.get(side) for side in SIDES]


def thresholds_of(config: Mapping[str, Any], role: PoolRole) -> Thresholds | None:
    """Return a pool's thresholds of load; None without any."""
    target = config["optimization_target"]
    if target == "sla":
        return None
    if target != "load":
        return (PREFILL_THRESHOLDS if role is PoolRole.PREFILL else DECODE_THRESHOLDS)[target]
    names = ("prefill_scale_{}_queue_tokens", 1.0) if role is PoolRole.PREFILL else ("decode_scale_{}_kv_rate", 100.0)
    up, down = (config[names[0].format(way)] for way in ("up", "down"))
    if up is None or down is None:
        return None
    return Thresholds(up / names[1], down / names[1], up_at_equal=True, down_at_equal=True)


def decided(planner: Planner, tick: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decisions of a tick in the recorded fields."""
    throughput = planner.by_throughput(tick)
    load = planner.by_load(tick)
    counts = None if throughput is None or throughput.counts is None else planner.both(throughput.counts)
    is_pair = len(planner.sides) == 2
    return {
        "throughput_decision": counts,
        "load_decision": None if load.counts is None else planner.both(load.counts),
        "floor": [planner.floors[side] for side in SIDES],
        "reasons": [
            load.reason,
            *(load.by_pool if is_pair else (None, None)),
            None if throughput is None else throughput.reason,
        ],
        "estimates": [None if one is None else one * 1000 for one in (load.ttft_s, load.itl_s)],
        "rps": planner.both(None if throughput is None else throughput.requests_per_s),
    }


def compare(system: str, name: str, case: Mapping[str, Any]) -> Result:
    """Compare one case tick by tick."""
    planner = Planner.of(case)
    for number, tick in enumerate(case["ticks"]):
        for field, actual in decided(planner, tick).items():
            if not is_equal(field, tick[field], actual):
                state = [f"{key}: {tick[key]}" for key in ("workers", "prefill_queued_tokens", "decode_kv", "traffic")]
                config = [f"config: {case['config']}", f"floors: {planner.floors}"]
                difference = Difference(str(number), field, tick[field], actual, state, config)
                return Result(system, name, number + 1, difference, UNIT)
    return Result(system, name, len(case["ticks"]), unit=UNIT)


def is_equal(field: str, expected: Any, actual: Any) -> bool:
    """Return whether a field is as recorded; recorded predictions are rounded."""
    if field not in ("estimates", "rps"):
        return bool(expected == actual)
    return all(
        one is other is None
        or (
            one is not None
            and other is not None
            and isclose(one, other, rel_tol=MAX_RELATIVE_DIFFERENCE, abs_tol=MAX_DIFFERENCE_MS)
        )
        for one, other in zip(expected, actual, strict=True)
    )
