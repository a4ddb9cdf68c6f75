"""Scalers: what they ask for, from views of pools that are made by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vajra_policies.scaling.device_budget import Budget, guard_one
from vajra_policies.scaling.dynamo_planner import SPEC
from vajra_policies.scaling.dynamo_planner_config import DynamoPlannerConfig
from vajra_policies.scaling.engine_predictions import EnginePredictions
from vajra_policies.scaling.load_scaling import decide_by_load
from vajra_policies.scaling.pair_budget import PairBudget
from vajra_policies.scaling.planner_rules import (
    DECODE_THRESHOLDS,
    PREFILL_THRESHOLDS,
    EngineLoad,
    LatencySlos,
    PlannerRules,
    PoolRules,
    PoolState,
    Traffic,
)
from vajra_policies.scaling.pool_load import by_prompts, by_thresholds
from vajra_policies.scaling.target_utilization import TargetUtilization, TargetUtilizationConfig
from vajra_policies.scaling.throughput_scaling import decide_by_throughput
from vajra_py.contract import EndReason, PoolRole, ReplicaState
from vajra_py.latency import ConstantModel
from vajra_py.plugins import load_registry
from vajra_py.testing import Harness, HarnessOptions, check_scaler

UP, STARTING, DRAINING, DOWN = ReplicaState.UP, ReplicaState.STARTING, ReplicaState.DRAINING, ReplicaState.DOWN


@pytest.mark.parametrize("name", load_registry().scalers)
def test_it_keeps_the_contract(name: str) -> None:
    check_scaler(load_registry().scaler(name).spec)


def test_a_target_beyond_all_kv_blocks_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"a part of the KV blocks is at most 1 \(got 70\.0\)"):
        TargetUtilizationConfig(target=70.0)
    assert TargetUtilizationConfig(metric="requests", target=70.0).target == 70.0


@pytest.mark.parametrize(
    "params",
    [
        {"target": "latency"},
        {"target": "sla"},
        {"target": "sla", "by_load": False},
        {"target": "load", "kv_up_fraction": 0.5, "kv_down_fraction": 0.1, "prefill_up_tokens": 100, "prefill_down_tokens": 10},
        {"max_devices": 4, "devices_per_replica": {"default": 2}},
    ],
)  # fmt: skip
def test_the_planner_keeps_the_contract_with_every_target(params: dict[str, Any]) -> None:
    check_scaler(SPEC, params)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"by_load": False}, "no rule is active"),
        ({"min_devices": 5, "max_devices": 4}, "min_devices (5) is above max_devices (4)"),
        ({"target": "load"}, "needs kv_up_fraction and kv_down_fraction"),
    ],
)
def test_the_planner_refuses_settings_by_which_nothing_is_decided(params: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        DynamoPlannerConfig(**params)


@dataclass
class Load:
    """A replica."""

    state: ReplicaState = UP
    num_running: int = 0
    num_waiting: int = 0
    num_pending_tokens: int = 0
    num_context_tokens: int = 0
    free_blocks: int = 100
    num_blocks: int = 100


@dataclass
class Pool:
    """A pool."""

    replicas: Sequence[Load]
    name: str = "default"
    role: str = "mixed"
    min_replicas: int = 1
    max_replicas: int = 10
    num_queued: int = 0
    num_queued_tokens: int = 0


@dataclass
class Alarm:
    """`WakeUps` that keeps what was asked for."""

    at_s: dict[str, float] = field(default_factory=dict)

    def at(self, time_s: float, key: str = "") -> None:
        """See `WakeUps`."""
        self.at_s[key] = time_s

    def cancel(self, key: str = "") -> None:
        """See `WakeUps`."""


def asked(pool: Pool, **params: Any) -> int:
    """What `target_utilization` asks for at its second look, without waiting to stop replicas."""
    config = TargetUtilizationConfig(**({"metric": "requests", "target": 4.0, "down_window_s": 0.0} | params))
    return TargetUtilization(config, Alarm()).targets([pool], 0.0)["default"]  # type: ignore[list-item]


def busy(*running: int, state: ReplicaState = UP) -> list[Load]:
    return [Load(state, num_running=one) for one in running]


@pytest.mark.parametrize(
    ("replicas", "wanted"),
    [
        (busy(4, 4), 2),
        (busy(8, 8), 4),
        (busy(5, 4), 3),
        (busy(4, 4, 4, 5), 4),  # 6% above: within the tolerance
        (busy(1, 1, 1, 1), 1),
        (busy(0, 0), 1),
        (busy(40, 40), 10),
        ([*busy(8, 8), *busy(0, 0, state=STARTING)], 4),  # the starting replicas suffice
        ([*busy(12, 12), *busy(0, 0, state=STARTING)], 6),
        # Overloaded without the starting replicas, but not with them: no change.
        ([*busy(5, 5), *busy(0, 0, state=STARTING)], 4),
        ([*busy(2, 2), *busy(0, 0, state=STARTING)], 1),
        ([*busy(8), *busy(9, state=DRAINING), *busy(7, state=DOWN)], 2),
    ],
)
def test_target_utilization_computes_what_the_autoscaler_computes(replicas: list[Load], wanted: int) -> None:
    assert asked(Pool(replicas)) == wanted


def test_target_utilization_knows_other_figures() -> None:
    full = [Load(free_blocks=10), Load(free_blocks=30)]
    assert asked(Pool(full), metric="kv_usage", target=0.4) == 4
    assert asked(Pool([Load(num_pending_tokens=500)], num_queued_tokens=900), metric="queued_tokens", target=300.0) == 3
    assert asked(Pool(busy(2), num_queued=9), target=4.0) == 3, "the shared queue counts"


def test_target_utilization_starts_a_replica_for_whoever_waits_for_none() -> None:
    assert asked(Pool([Load(DOWN)], min_replicas=0, num_queued=3)) == 1
    assert asked(Pool([Load(DOWN)], min_replicas=0)) == 0


def test_target_utilization_stops_replicas_only_after_its_window() -> None:
    config = TargetUtilizationConfig(metric="requests", target=4.0, interval_s=10.0, down_window_s=25.0)
    scaler, looks = TargetUtilization(config, Alarm()), []
    for now, running in ((0, 8), (10, 2), (20, 2), (30, 4), (40, 2), (50, 2), (60, 2), (70, 2)):
        pool: Any = Pool(busy(*[running] * 3))
        scaler.on_wake("", float(now))
        looks.append(scaler.targets([pool], float(now))["default"])
    assert looks == [6, 3, 3, 3, 3, 3, 2, 2]


def test_target_utilization_starts_replicas_only_after_its_window() -> None:
    config = TargetUtilizationConfig(metric="requests", target=4.0, interval_s=10.0, up_window_s=15.0)
    scaler, looks = TargetUtilization(config, Alarm()), []
    for now, running in ((0, 4), (10, 12), (20, 8), (30, 8), (40, 4)):
        pool: Any = Pool(busy(running, running))
        scaler.on_wake("", float(now))
        looks.append(scaler.targets([pool], float(now))["default"])
    assert looks == [2, 2, 4, 4, 2]


def test_target_utilization_decides_at_a_wake_up_that_rounding_made_early() -> None:
    config = TargetUtilizationConfig(metric="requests", target=4.0, interval_s=0.1)
    alarm = Alarm()
    scaler = TargetUtilization(config, alarm)
    scaler.targets([Pool(busy(4))], 0.0)  # type: ignore[list-item]
    early = math.nextafter(alarm.at_s[""], 0.0)
    scaler.on_wake("", early)
    assert scaler.targets([Pool(busy(8))], early) == {"default": 2}  # type: ignore[list-item]
    assert alarm.at_s[""] > early


# Dynamo's planner


@pytest.mark.parametrize(
    ("loads", "ready", "wanted"),
    [
        ((1.01, 0.2), 2, 3),
        ((1.0, 0.9), 2, None),
        ((0.5, 0.5, 0.5), 3, 2),
        ((0.59, 0.59), 2, 2),  # one replica alone would be overloaded immediately
        ((0.1,), 1, None),
    ],
)
def test_thresholds_of_decodes(loads: tuple[float, ...], ready: int, wanted: int | None) -> None:
    assert by_thresholds(loads, DECODE_THRESHOLDS["throughput"], ready, 1).wanted == wanted


def test_prompts_are_over_at_their_threshold_and_decodes_above_it() -> None:
    assert by_thresholds((1.0,), PREFILL_THRESHOLDS["throughput"], 1, 1).wanted == 2
    assert by_thresholds((1.0,), DECODE_THRESHOLDS["throughput"], 1, 1).wanted is None


@pytest.mark.parametrize(
    ("current", "wanted", "expected"),
    [
        ((5, 5), (3, 5), ((3, 5), None)),  # above the floor
        ((2, 2), (1, 2), ((2, 2), "gpu_budget_guard_hold")),
        ((5, 5), (6, 5), ((6, 5), None)),  # below the ceiling
        ((6, 6), (7, 6), ((6, 6), "gpu_budget_guard_hold")),
        ((5, 5), (3, 7), ((3, 7), None)),
    ],
)
def test_a_budget_holds_at_its_bounds_alone(
    current: tuple[int, int], wanted: tuple[int, int], expected: tuple[tuple[int, int], str | None]
) -> None:
    assert PairBudget(Budget(12, 4), (1, 1), (1, 1)).guard(current, wanted) == expected


@pytest.mark.parametrize("given_one", ["prefill_up_tokens", "prefill_down_tokens"])
def test_one_threshold_of_two_decides_nothing(given_one: str) -> None:
    config = DynamoPlannerConfig(target="load", kv_up_fraction=0.8, kv_down_fraction=0.2, **{given_one: 100})
    assert config.thresholds(PoolRole.PREFILL) is None
    assert config.thresholds(PoolRole.DECODE) is not None


counts = st.tuples(st.integers(0, 12), st.integers(0, 12))


@given(
    counts,
    counts,
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.none() | st.integers(0, 40),
    st.none() | st.integers(0, 40),
)
def test_a_budget_never_turns_a_decision_round(
    current: tuple[int, int],
    wanted: tuple[int, int],
    devices: tuple[int, int],
    ceiling: int | None,
    floor: int | None,
) -> None:
    if ceiling is not None and floor is not None:
        floor = min(ceiling, floor)
    pair = PairBudget(Budget(ceiling, floor), devices, (0, 0))
    fitted, reason = pair.guard(current, wanted)
    if reason != "gpu_budget_reconcile":
        for now, asked_for, got in zip(current, wanted, fitted, strict=True):
            assert min(now, asked_for) <= got <= max(now, asked_for)
        assert pair.admits(fitted)
        moved = [got != now for now, got in zip(current, fitted, strict=True)]
        if (wanted[0] - current[0]) * (wanted[1] - current[1]) < 0 and not pair.admits(wanted):
            assert moved[0] == moved[1], "an exchange is whole, or there is none"
    if ceiling is not None:
        assert pair.total(fitted) <= ceiling
    one, reason = guard_one(current[0], wanted[0], devices[0], Budget(ceiling, floor), 0)
    if reason != "gpu_budget_reconcile":
        assert min(current[0], wanted[0]) <= one <= max(current[0], wanted[0])
        assert ceiling is None or one * devices[0] <= ceiling


@dataclass
class Request:
    """A request, as the planner looks at it."""

    num_prompt_tokens: int = 1000
    num_output_tokens: int = 100
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    end_reason: EndReason = EndReason.STOP


def planner(**params: Any) -> tuple[Any, Alarm]:
    from dataclasses import replace

    options = HarnessOptions(latency=ConstantModel(0.02), max_batch_size=8, num_blocks=1000, max_model_len=10_000)
    context = Harness("fcfs", "round_robin", "fixed_chunk", options).context
    alarm = Alarm()
    return SPEC.build(DynamoPlannerConfig(**params), replace(context, wake=alarm)), alarm


def test_the_planner_follows_throughput() -> None:
    """Steps of 20 ms: a replica of 8 decodes keeps 50 ms; 100 outputs take 2 s, so 4 a second less the prompts' share."""
    scaler, alarm = planner(target="sla", by_load=False, throughput_interval_s=10.0)
    pools: Any = [Pool(busy(0))]
    assert scaler.targets(pools, 0.0) == {}
    assert alarm.at_s == {"throughput": 10.0}
    scaler.on_arrivals([Request()] * 100, 5.0)
    scaler.on_departures([Request()] * 50, 6.0)
    scaler.on_wake("throughput", 10.0)
    prompt_s, decode_s = 0.02 * 2, 100 * 0.02 / 8  # in chunks of 512 tokens
    expected = -(-10 // (1 / (prompt_s + decode_s)))
    assert scaler.targets(pools, 10.0) == {"default": expected}
    assert alarm.at_s == {"throughput": 20.0}
    scaler.on_wake("throughput", 20.0)
    assert scaler.targets([Pool(busy(0, 0, 0))], 20.0) == {"default": 1}, "nothing arrived"


def test_load_leaves_the_replicas_that_throughput_needs() -> None:
    scaler, _ = planner(target="sla", throughput_interval_s=10.0, load_interval_s=5.0)
    pools: Any = [Pool(busy(0))]
    scaler.targets(pools, 0.0)
    scaler.on_arrivals([Request()] * 100, 5.0)
    scaler.on_departures([Request()] * 50, 6.0)
    scaler.on_wake("throughput", 10.0)
    scaler.targets(pools, 10.0)
    needed = 3
    idle: Any = [Pool(busy(*[0] * (needed + 2)))]
    for at in range(15, 60, 5):
        scaler.on_wake("load", float(at))
        asked = scaler.targets(idle, float(at))["default"]
        idle = [Pool(busy(*[0] * asked))]
    assert asked == needed


def test_the_planner_decides_nothing_on_load_while_a_replica_starts() -> None:
    scaler, _ = planner()
    full = Load(num_context_tokens=17_000, num_running=8)
    changing: Any = [Pool([full, Load(STARTING)])]
    scaler.targets(changing, 0.0)
    scaler.on_wake("load", 5.0)
    assert scaler.targets(changing, 5.0) == {}
    settled: Any = [Pool([full])]
    scaler.on_wake("load", 10.0)
    assert scaler.targets(settled, 10.0) == {"default": 2}


def test_the_planner_decides_on_prompts_and_decodes_together() -> None:
    scaler, _ = planner(max_devices=4)
    prompts = Pool([Load(num_pending_tokens=20_000)], "p", "prefill")
    decodes = Pool([Load(num_context_tokens=100, num_running=1) for _ in range(3)], "d", "decode")
    pools: Any = [prompts, decodes]
    scaler.targets(pools, 0.0)
    scaler.on_wake("load", 5.0)
    assert scaler.targets(pools, 5.0) == {"p": 2, "d": 2}, "one device goes over, and both move"
    alone: Any = [
        Pool([Load(num_pending_tokens=20_000)] * 2, "p", "prefill"),
        Pool([Load(num_context_tokens=15_000)] * 2, "d", "decode"),
    ]
    scaler.on_wake("load", 10.0)
    assert scaler.targets(alone, 10.0) == {"p": 2, "d": 2}, "no device is left, and decodes cannot spare one"


@pytest.mark.parametrize(("itl_s", "num_decodes"), [(0.02, 8), (0.021, 8), (0.019, 1)])
def test_the_largest_batch_meets_its_slo_to_the_letter(itl_s: float, num_decodes: int) -> None:
    options = HarnessOptions(latency=ConstantModel(0.02), max_batch_size=8, num_blocks=1000, max_model_len=10_000)
    context = Harness("fcfs", "round_robin", "fixed_chunk", options).context
    model = EnginePredictions(context, LatencySlos(ttft_s=1.0, itl_s=itl_s, sensitivity=1.0), 100.0)
    rate = model.requests_per_s(PoolRole.DECODE, Traffic(1.0, 100.0, 10.0))
    assert rate == pytest.approx(num_decodes / (10 * 0.02))


class OneLatency:
    """Predicts one latency, and keeps what it was asked."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.kv_scales: list[float | None] = []

    def ttft_s(self, load: EngineLoad, *, queue_scale: float, kv_scale: float | None) -> float:
        self.kv_scales.append(kv_scale)
        return self.seconds * queue_scale

    def itl_s(self, load: EngineLoad, *, scale: float, counts_prefill: bool) -> float:
        return self.seconds


@pytest.mark.parametrize(
    ("seconds", "floor", "counts", "reason"),
    [
        (0.001, 1, (2,), "scale_down"),
        (0.001, 3, None, "scale_down_capped_by_throughput"),
        (0.5, 3, None, "scale_down_refused_consolidation"),
        (9.0, 3, (4,), "scale_up"),
    ],
)
def test_a_mixed_pool_goes_down_as_far_as_throughput_lets_it(
    seconds: float, floor: int, counts: tuple[int, ...] | None, reason: str
) -> None:
    rules = PlannerRules("sla", LatencySlos(ttft_s=1.0, itl_s=1.0, sensitivity=0.5), scales_by_throughput=True)
    pool = PoolState(PoolRules(PoolRole.MIXED), 3, [EngineLoad(num_decodes=1)] * 3, floor=floor)
    decided = decide_by_load(rules, [pool], OneLatency(seconds))
    assert (decided.counts, decided.reason) == (counts, reason)


@pytest.mark.parametrize("floors", [(3, 2), (2, 3)])
def test_each_of_two_pools_goes_down_as_far_as_throughput_lets_it(floors: tuple[int, int]) -> None:
    rules = PlannerRules("sla", LatencySlos(ttft_s=1.0, itl_s=1.0, sensitivity=0.5), scales_by_throughput=True)
    pools = [
        PoolState(PoolRules(role), 3, [EngineLoad(num_decodes=1)] * 3, floor=floor)
        for role, floor in zip((PoolRole.PREFILL, PoolRole.DECODE), floors, strict=True)
    ]
    assert decide_by_load(rules, pools, OneLatency(0.001)).counts == floors


@pytest.mark.parametrize("role", [PoolRole.PREFILL, PoolRole.MIXED])
def test_what_decodes_beside_prompts_counts_where_one_pool_does_both(role: PoolRole) -> None:
    model = OneLatency(0.001)
    by_prompts([EngineLoad()] * 3, model, LatencySlos(1.0, 1.0, 1.0), (3, 1), role)
    assert set(model.kv_scales) == ({None, 1.5} if role is PoolRole.MIXED else {None})


class OneRate(OneLatency):
    """Each replica takes ten requests a second."""

    def requests_per_s(self, role: PoolRole, traffic: Traffic) -> float:
        return 10.0


@pytest.mark.parametrize(
    ("rate", "by_load", "expected"),
    [
        (30.0, False, (None, None, "no_change")),
        (45.0, False, ((5, 5), None, "scale")),
        (30.0, True, (None, (3, 3), "set_lower_bound")),
    ],
)
def test_throughput_decides_on_two_pools_together(rate: float, by_load: bool, expected: Any) -> None:
    rules = PlannerRules("sla", LatencySlos(1.0, 1.0, 1.0), scales_by_load=by_load, scales_by_throughput=True)
    pools = [PoolState(PoolRules(role), 3, [EngineLoad()] * 3) for role in (PoolRole.PREFILL, PoolRole.DECODE)]
    decided = decide_by_throughput(rules, pools, Traffic(rate, 100.0, 10.0), OneRate(0.1))
    assert decided.requests_per_s == (10.0, 10.0)
    assert (decided.counts, decided.floors, decided.reason) == expected


def test_pools_below_their_fewest_replicas_get_what_throughput_needs_of_each() -> None:
    rules = PlannerRules(
        "sla", LatencySlos(1.0, 1.0, 1.0), scales_by_load=False, scales_by_throughput=True, max_change=2
    )
    pools = [
        PoolState(PoolRules(role, least=least), ready, [EngineLoad()] * ready)
        for role, least, ready in ((PoolRole.PREFILL, 2, 1), (PoolRole.DECODE, 1, 3))
    ]
    decided = decide_by_throughput(rules, pools, Traffic(90.0, 100.0, 10.0), OneRate(0.1))
    assert decided.counts == (3, 5), "two more of each"
