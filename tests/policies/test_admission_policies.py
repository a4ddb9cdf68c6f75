"""Shipped admission policies: each held to its formula, and in simulation to what it is for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vajra_policies.admission.holding import Holding, HoldingConfig, Line
from vajra_policies.admission.mooncake import Mooncake, MooncakeConfig
from vajra_policies.admission.priority_holdback import HoldbackConfig, holdback_ceilings
from vajra_policies.admission.saturation import SaturationConfig, saturation_of
from vajra_policies.admission.soft_reflective_ceiling import opening_period
from vajra_py.config import config_from_mapping
from vajra_py.contract import ACCEPT, Refuse
from vajra_py.contract.observer import EndReason
from vajra_py.experiment.runs.run import run_experiment
from vajra_py.latency import AffineModel
from vajra_py.runtime.support.clock import to_seconds, to_ticks
from vajra_py.testing import Harness, HarnessOptions
from vajra_py.workload.request import RequestSpec


@dataclass
class Load:
    """Figures of a replica."""

    num_waiting: int = 0
    used_fraction: float = 0.0
    num_running: int = 0
    num_pending_tokens: int = 0
    num_context_tokens: int = 0
    is_up: bool = True
    role: str = "mixed"
    replica_id: int = 0
    num_blocks: int = 1000
    hit: int = 0

    @property
    def free_blocks(self) -> int:
        return round(self.num_blocks * (1 - self.used_fraction))

    def prefix_hit_tokens(self, request: Any) -> int:
        return self.hit


# Saturation


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([], 1.0),
        ([Load(is_up=False)], 1.0),
        ([Load()], 0.0),
        ([Load(num_waiting=5)], 1.0),
        ([Load(num_waiting=10)], 2.0),
        ([Load(used_fraction=0.8)], 1.0),
        ([Load(used_fraction=0.4)], 0.5),
        ([Load(num_waiting=1, used_fraction=0.4)], 0.5),
        ([Load(num_waiting=3, used_fraction=0.4)], 0.6),
        ([Load(num_waiting=5), Load()], 0.5),
        ([Load(num_waiting=5), Load(used_fraction=0.4), Load(num_waiting=9, is_up=False)], 0.75),
    ],
)
def test_utilization_is_the_mean_of_the_scarcer_resource(loads: list[Any], expected: float) -> None:
    assert saturation_of(SaturationConfig(), loads) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "loads", "expected"),
    [
        ("requests", [Load(num_running=50)], 0.5),
        ("requests", [Load(num_running=60, num_waiting=40), Load()], 0.5),
        ("requests", [Load(num_running=150), Load(num_running=100)], 1.25),
        ("tokens", [Load(num_pending_tokens=500_000, num_running=90)], 0.5),
        ("tokens", [Load(num_pending_tokens=2_000_000), Load()], 1.0),
        ("hybrid", [Load(num_pending_tokens=500_000, num_running=90)], 0.9),
        ("hybrid", [Load(num_pending_tokens=500_000, num_running=10), Load(num_running=30)], 0.4),
        ("requests", [], 1.0),
    ],
)
def test_concurrency_counts_what_is_in_flight(kind: Any, loads: list[Any], expected: float) -> None:
    config = SaturationConfig(detector="concurrency", concurrency=kind)
    assert saturation_of(config, loads) == pytest.approx(expected)


# Ceilings


@pytest.mark.parametrize(
    ("priorities", "config", "expected"),
    [
        ([0], {"min_ceiling": 0.2}, [1.0]),
        ([-1, 0], {"min_ceiling": 0.5}, [1.0, 0.5]),
        ([-5, 0, 1], {"min_ceiling": 0.4}, [1.0, 0.7, 0.4]),
        ([0, 1, 2, 3, 4], {"min_ceiling": 0.6, "max_ceiling": 0.8}, [0.8, 0.75, 0.7, 0.65, 0.6]),
        ([0, 1, 10], {"min_ceiling": 0.5, "spacing": "value"}, [1.0, 0.95, 0.5]),
        ([-10, 0, 10], {"min_ceiling": 0.4, "spacing": "value", "max_ceiling": 0.8}, [0.8, 0.6, 0.4]),
        ([0, 1, 2], {"ceilings": {0: 1.0, 2: 0.3}}, [1.0, 0.0, 0.3]),
    ],
)
def test_ceilings_are_spread_as_stated(priorities: list[int], config: dict[str, Any], expected: list[float]) -> None:
    found = holdback_ceilings(priorities, HoldbackConfig(**config))
    assert [found[one] for one in priorities] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("saturation", "rank", "bands", "period"),
    [
        (0.0, 2, 3, 1),  # below its ceiling
        (0.4, 1, 2, 1),  # ceiling 0.6
        (0.5, 1, 2, 1),  # at its ceiling: every round(1)-th cycle
        (0.6, 1, 2, 1),  # just below 1.5
        (0.61, 1, 2, 2),
        (0.75, 1, 2, 3),
        (0.9, 1, 2, 9),
        (0.99, 1, 2, 99),
        (1.0, 1, 2, 0),
        (1.7, 1, 2, 0),
        (0.99, 0, 2, 1),
        (1.0, 0, 2, 0),
        (0.6, 1, 3, 1),  # ceiling 0.7
        (0.7, 1, 3, 2),  # ceiling 0.65: every round(2.33)-th
        (0.65, 2, 3, 2),
        (0.9, 0, 1, 1),
    ],
)
def test_soft_ceilings_open_every_so_many_cycles(saturation: float, rank: int, bands: int, period: int) -> None:
    assert opening_period(saturation, rank, bands) == period


def test_a_line_is_by_priority_then_by_submission() -> None:
    @dataclass
    class Some:
        priority: int
        index: int

    line: Any = Line()
    third, first, second = Some(2, 1), Some(0, 2), Some(0, 3)
    for one in (third, second, first, first):
        line.join(one)
    assert len(line) == 3
    assert [line.waits_behind(one) for one in (first, second, third)] == [False, True, True]
    line.leave(first)
    assert [line.waits_behind(one) for one in (second, third)] == [False, True]
    line.leave(second)
    line.leave(third)
    assert not line.waits_behind(Some(9, 9))


# Token bucket


def admitted(harness: Harness, names: list[str]) -> list[float | None]:
    return [harness.request(name).admitted_at for name in names]


def run(policy: Any, specs: list[RequestSpec], **options: Any) -> Harness:
    roomy = {"num_blocks": 4000, "max_batch_size": 256, "latency": AffineModel(base_s=1e-6, per_token_s=0.0), **options}
    harness = Harness("fcfs", "round_robin", "fixed_chunk", HarnessOptions(**roomy), admission=policy)
    harness.run(specs)
    harness.controller.check_conservation()
    return harness


def test_a_bucket_lets_in_what_it_holds_and_then_exactly_its_rate() -> None:
    policy = ("token_bucket", {"capacity": 300, "refill_per_s": 50, "when_empty": "defer"})
    specs = [RequestSpec(f"r{i}", 0.0, 100, 1, tenant="a") for i in range(8)]
    harness = run(policy, specs)
    times = admitted(harness, [one.request_id for one in specs])
    assert times == pytest.approx([0.0, 0.0, 0.0, 2.0, 4.0, 6.0, 8.0, 10.0])


def test_each_tenant_has_a_bucket_and_some_have_their_own_size() -> None:
    params = {
        "cost": "requests",
        "capacity": 1,
        "refill_per_s": 1.0,
        "when_empty": "defer",
        "buckets": {"gold": {"capacity": 2, "refill_per_s": 4.0}},
    }
    specs = [RequestSpec(f"{tenant}{i}", 0.0, 10, 1, tenant=tenant) for tenant in ("gold", "iron") for i in range(3)]
    harness = run(("token_bucket", params), specs)
    assert admitted(harness, ["gold0", "gold1", "gold2"]) == pytest.approx([0.0, 0.0, 0.25])
    assert admitted(harness, ["iron0", "iron1", "iron2"]) == pytest.approx([0.0, 1.0, 2.0])


@pytest.mark.parametrize("when_empty", ["defer", "refuse"])
def test_requests_at_the_rate_of_the_bucket_are_accepted_at_once_whatever_is_rounded(when_empty: str) -> None:
    params = {"cost": "requests", "capacity": 1, "refill_per_s": 10.0, "when_empty": when_empty}
    specs = [RequestSpec(f"r{i}", i / 10, 10, 1) for i in range(100)]
    harness = run(("token_bucket", params), specs)
    assert admitted(harness, [one.request_id for one in specs]) == pytest.approx([one.arrived_at for one in specs])


def test_a_refusing_bucket_says_when_it_would_do() -> None:
    policy = ("token_bucket", {"capacity": 300, "refill_per_s": 50})
    specs = [RequestSpec(f"r{i}", 0.5 * i, 200, 1) for i in range(4)]
    harness = run(policy, specs)
    refused = harness.request("r1")
    assert refused.end_reason is EndReason.REJECTED
    assert refused.admission is not None
    assert refused.admission.retry_after_s == pytest.approx((200 - 125) / 50)
    assert harness.request("r2").end_reason is EndReason.REJECTED
    assert harness.request("r3").end_reason is EndReason.REJECTED
    assert "has used up its prompt tokens" in refused.detail


def test_what_costs_more_than_a_bucket_holds_is_refused_at_once() -> None:
    policy = ("token_bucket", {"capacity": 100, "refill_per_s": 50, "when_empty": "defer"})
    harness = run(policy, [RequestSpec("r0", 0.0, 101, 1, tenant="a")])
    assert "tenant 'a' may use 100 at once, and this request needs 101" in harness.request("r0").detail


def test_a_request_whose_turn_would_come_after_the_end_of_the_clock_is_refused() -> None:
    policy = ("token_bucket", {"cost": "requests", "capacity": 1, "refill_per_s": 2e-7, "when_empty": "defer"})
    harness = run(policy, [RequestSpec(f"r{i}", 0.0, 10, 1) for i in range(4)])
    reasons = [harness.request(f"r{i}").end_reason for i in range(4)]
    assert reasons == [EndReason.STOP, EndReason.STOP, EndReason.REJECTED, EndReason.REJECTED]


def test_who_leaves_the_gate_gives_back_what_it_took_in_advance() -> None:
    policy = ("token_bucket", {"capacity": 100, "refill_per_s": 50, "when_empty": "defer"})
    specs = [
        RequestSpec("r0", 0.0, 100, 1),
        RequestSpec("r1", 0.0, 100, 1, expires_after_s=0.5),
        RequestSpec("r2", 1.0, 100, 1),
    ]
    harness = run(policy, specs)
    assert harness.request("r1").end_reason is EndReason.EXPIRED
    assert harness.request("r2").admitted_at == pytest.approx(2.0)


@pytest.mark.parametrize("when_empty", ["defer", "refuse"])
def test_no_tenant_exceeds_its_rate_over_any_span(when_empty: str) -> None:
    capacity, rate = 500.0, 200.0
    policy = ("token_bucket", {"capacity": capacity, "refill_per_s": rate, "when_empty": when_empty})
    stream = np.random.default_rng(4)
    specs = [
        RequestSpec(f"r{i}", float(at), int(stream.integers(1, 300)), 1, tenant="ab"[int(stream.integers(2))])
        for i, at in enumerate(np.sort(stream.uniform(0, 20, 200)))
    ]
    harness = run(policy, specs)
    for tenant in "ab":
        own = [harness.request(one.request_id) for one in specs if one.tenant == tenant]
        let_in = sorted((one.admitted_at, one.num_prompt_tokens) for one in own if one.admitted_at is not None)
        for first, (start, _) in enumerate(let_in):
            total = 0
            for at, tokens in let_in[first:]:
                total += tokens
                assert total <= capacity + rate * (at - start) + 1e-6
        total = sum(tokens for _, tokens in let_in)
        if when_empty == "defer":
            assert len(let_in) == len(own)
            assert total >= rate * (let_in[-1][0] - let_in[0][0])  # the bucket is never full while a request waits


# Bounds and shedding


def test_a_bound_holds_at_every_moment_and_lets_the_most_urgent_in_first() -> None:
    slow = AffineModel(base_s=0.01, per_token_s=0.0)
    specs = [RequestSpec(f"r{i}", 0.001 * i, 10, 5, priority=i % 3) for i in range(30)]
    harness = run(("max_load", {"max_requests": 4}), specs, latency=slow)
    spans = [(one.admitted_at, one.ended_at) for one in map(harness.request, (one.request_id for one in specs))]
    for at, _ in spans:
        assert at is not None
        assert sum(begin is not None and end is not None and begin <= at < end for begin, end in spans) <= 4
    order = sorted((one.admitted_at, one.index) for one in map(harness.request, (s.request_id for s in specs[4:])))
    priorities = [specs[index].priority for _, index in order]
    assert priorities[4:] == sorted(priorities[4:])


def test_rechecks_go_on_after_a_wake_up_that_rounding_made_early() -> None:
    """The third wake-up, at 0.3 s, comes before 0.1 s + 0.1 s + 0.1 s."""
    woken: list[float] = []
    holding = Holding(HoldingConfig(recheck_s=0.1), SimpleNamespace(at=lambda at, key="": woken.append(at)))
    request: Any = SimpleNamespace(replicaset="s", priority=0, index=0)
    holding._closed(holding._line_of(request), request, 0.0, "full")
    for _ in range(5):
        holding.on_wake("", to_seconds(to_ticks(woken[-1])))
    assert woken == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])


def test_an_empty_replicaset_takes_a_request_of_any_size() -> None:
    harness = run(("max_load", {"max_requests": None, "max_tokens": 50}), [RequestSpec("r0", 0.0, 500, 1)])
    assert harness.request("r0").end_reason is EndReason.STOP


def overload(policy: Any, count: int = 300) -> Harness:
    """A quarter more requests than a replica can serve, of priorities 0 and 1 in turn."""
    specs = [RequestSpec(f"r{i}", 0.004 * i, 20, 10, priority=i % 2) for i in range(count)]
    options = {
        "num_replicas": 1,
        "max_batch_size": 4,
        "num_blocks": 64,
        "latency": AffineModel(base_s=0.002, per_token_s=0.0),
    }
    return run(policy, specs, **options)


def outcomes(harness: Harness, priority: int) -> Counter[EndReason | None]:
    requests = harness._recorder.requests.values()
    return Counter(one.end_reason for one in requests if one.priority == priority)


def test_only_what_may_be_shed_is_shed() -> None:
    harness = overload("saturation_shedding")
    assert outcomes(harness, 0) == {EndReason.STOP: 150}
    assert outcomes(harness, 1)[EndReason.REJECTED] > 50
    waits = [
        one.admitted_at - one.arrived_at for one in harness._recorder.requests.values() if one.admitted_at is not None
    ]
    without = run(
        lambda context: type("All", (), {"admit": lambda self, *_: ACCEPT})(),
        [RequestSpec(f"r{i}", 0.004 * i, 20, 10) for i in range(300)],
        max_batch_size=4, num_blocks=64, latency=AffineModel(base_s=0.002, per_token_s=0.0),
    )  # fmt: skip
    others = [one.admitted_at - one.arrived_at for one in without._recorder.requests.values()]  # type: ignore[operator]
    assert max(waits) < max(others) / 2


def test_shedding_by_lot_follows_its_probability() -> None:
    """Saturation is held at one value; the frequency of refusals is within four standard deviations of the formula."""
    from vajra_policies.admission.probabilistic_shedding import ProbabilisticConfig, ProbabilisticShedding

    @dataclass
    class Pool:
        replicas: list[Any]

    @dataclass
    class Set:
        pools: list[Any]
        name: str = "s"

    @dataclass
    class Some:
        priority: int
        replicaset: str = "s"

    for waiting, expected in ((1, 300 * 0.2**5), (2, 1.0), (0, 0.0)):
        policy: Any = ProbabilisticShedding(ProbabilisticConfig(), np.random.default_rng(1))
        sets = [Set([Pool([Load(num_waiting=waiting)])])]
        count = 4000
        shed = sum(isinstance(policy.admit(Some(1), sets, 0.0), Refuse) for _ in range(count))
        spread = 4 * (expected * (1 - expected) / count) ** 0.5 if expected < 1 else 0.0
        assert abs(shed / count - min(expected, 1.0)) <= spread
        assert not any(isinstance(policy.admit(Some(0), sets, 0.0), Refuse) for _ in range(100))


def ttfts(harness: Harness, priority: int) -> list[float]:
    requests = harness._recorder.requests.values()
    return [one.first_token_at - one.arrived_at for one in requests if one.priority == priority]  # type: ignore[operator]


@pytest.mark.parametrize(
    "policy",
    [
        ("priority_holdback", {"min_ceiling": 0.5}),
        ("priority_holdback", {"detector": "concurrency", "max_concurrency_requests": 8, "min_ceiling": 0.5}),
        ("soft_reflective_ceiling", {"detector": "concurrency", "max_concurrency_requests": 6}),
    ],
)
def test_holding_back_keeps_the_urgent_fast_and_loses_nobody(policy: Any) -> None:
    plain = overload(lambda context: type("All", (), {"admit": lambda self, *_: ACCEPT})())
    held = overload(policy)
    assert outcomes(held, 0) == outcomes(held, 1) == {EndReason.STOP: 150}
    urgent, before = ttfts(held, 0), ttfts(plain, 0)
    # Not all: behind the last of them come requests that arrived earlier and were held, which go first by arrival.
    assert np.percentile(urgent, 95) < 0.5 * np.percentile(before, 95)
    assert np.mean(ttfts(held, 1)) > np.mean(urgent)
    served = [max(one.ended_at for one in each._recorder.requests.values()) for each in (plain, held)]  # type: ignore[type-var]
    assert served[1] < 1.2 * served[0]  # type: ignore[operator]


# Mooncake


class Linear:
    """A prefill of 1 ms a token, and decode steps of 1 ms and 0.1 ms a sequence."""

    num_stages = 1

    def remaining_s(self, num_prompt_tokens: int, num_done_tokens: int) -> float:
        return 0.001 * max(0, num_prompt_tokens - num_done_tokens)

    def total_s(self, num_prompt_tokens: int) -> float:
        return self.remaining_s(num_prompt_tokens, 0)

    def batch_time_s(self, features: Any) -> float:
        return 0.001 + 0.0001 * features.num_decodes


@dataclass
class Context:
    prefill_time: Any = field(default_factory=Linear)
    latency: Any = field(default_factory=Linear)
    emitted: list[tuple[str, float]] = field(default_factory=list)

    def emit(self, name: str, value: float, now: float, request: Any = None) -> None:
        self.emitted.append((name, value))


@dataclass(eq=False)
class Asked:
    num_prompt_tokens: int = 100
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    replicaset: str = "s"
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    is_resident: bool = False


@dataclass
class System:
    replicas: list[Any]
    name: str = "s"


def mooncake(context: Any = None, **params: Any) -> Any:
    return Mooncake(MooncakeConfig(**params), context or Context())


@pytest.mark.parametrize(
    ("replicas", "ttft_s"),
    [
        ([Load()], 0.1),
        ([Load(hit=60)], 0.04),  # 40 tokens are left to compute
        ([Load(hit=100)], 0.001),  # the last token is computed anyway
        ([Load(hit=0), Load(hit=50, replica_id=1)], 0.05),
        ([Load(is_up=False, hit=90), Load(replica_id=1, hit=10)], 0.09),
        ([Load(role="decode", hit=90), Load(role="prefill", replica_id=1)], 0.1),
    ],
)
def test_a_predicted_ttft_is_the_shortest_queue_and_prefill(replicas: list[Any], ttft_s: float) -> None:
    context = Context()
    assert mooncake(context).admit(Asked(ttft_slo_s=ttft_s + 1e-9), [System(replicas)], 0.0) is ACCEPT
    assert context.emitted[0] == ("predicted_ttft_s", pytest.approx(ttft_s))
    decision = mooncake().admit(Asked(ttft_slo_s=ttft_s - 1e-4), [System(replicas)], 0.0)
    assert decision == Refuse("its predicted TTFT exceeds its SLO")


def test_queued_prompts_count_where_their_tokens_are() -> None:
    policy, first, second = mooncake(), Asked(300), Asked(100)
    near, far = Load(), Load(replica_id=1)
    for request, replica in ((first, near), (second, far)):
        assert policy.admit(request, [System([near, far])], 0.0) is ACCEPT
        policy.on_arrivals([request], 0.0)
        replica.num_pending_tokens += request.num_prompt_tokens
    assert policy.admit(Asked(100, ttft_slo_s=0.2001), [System([near, far])], 0.0) is ACCEPT
    assert isinstance(policy.admit(Asked(100, ttft_slo_s=0.19), [System([near, far])], 0.0), Refuse)
    policy.on_departures([second], 0.0)
    far.num_pending_tokens = 0
    assert policy.admit(Asked(100, ttft_slo_s=0.1001), [System([near, far])], 0.0) is ACCEPT


@pytest.mark.parametrize("rule", ["request", "predicted_load"])
def test_requests_of_another_replicaset_do_not_count(rule: str) -> None:
    policy, systems = mooncake(rule=rule), [System([Load()]), System([Load(num_pending_tokens=10)], "other")]
    for _ in range(9):
        request = Asked(300, is_resident=True)
        assert policy.admit(request, systems, 0.0) is ACCEPT
        policy.on_arrivals([request], 0.0)
        policy.on_admission(request, 0, 0.0)
    asked = Asked(100, ttft_slo_s=0.1001, tbt_slo_s=0.0011, replicaset="other")
    assert policy.admit(asked, systems, 0.25) is ACCEPT


@pytest.mark.parametrize(("running", "slo_s", "refused"), [(9, 0.002, False), (10, 0.002, True), (0, 0.0011, False)])
def test_a_predicted_tbt_is_a_step_with_this_request(running: int, slo_s: float, refused: bool) -> None:
    decision = mooncake(tbt_slo_s=slo_s).admit(Asked(), [System([Load(num_running=running)])], 0.0)
    assert isinstance(decision, Refuse) is refused


def test_the_request_states_its_slo_or_the_parameters_do() -> None:
    policy = mooncake(ttft_slo_s=0.05)
    assert isinstance(policy.admit(Asked(), [System([Load()])], 0.0), Refuse)
    assert policy.admit(Asked(ttft_slo_s=1.0), [System([Load()])], 0.0) is ACCEPT
    assert mooncake().admit(Asked(), [System([Load()])], 0.0) is ACCEPT


def test_the_predicted_load_is_that_at_the_end_of_the_prompt() -> None:
    """Decodes that will have begun by then count, those that will have gone do not; what runs now does not matter."""
    policy = mooncake(rule="predicted_load", decode_s=1.0, tbt_slo_s=0.00125)
    system = [System([Load(num_running=50)])]
    first, second = Asked(100), Asked(100)
    for request in (first, second):
        decision = policy.admit(request, system, 0.0)
        policy.on_arrivals([request], 0.0)
        assert decision is ACCEPT
    assert isinstance(policy.admit(Asked(100), system, 0.0), Refuse)  # its prompt ends at 0.1 s, when both decode
    assert policy.admit(Asked(50), system, 0.0) is ACCEPT  # its prompt ends before theirs
    assert policy.admit(Asked(100), system, 1.1) is ACCEPT  # they are gone by then


def decodes_over_time(rule: str) -> np.ndarray[Any, Any]:
    """Decodes at every arrival under a steady overload, with a prompt that takes 1 s on replicas of its own and 2 s of decoding.

    The two pools are played by hand: prompts do not wait for each other, and join the decodes when they are computed.
    """
    policy = mooncake(rule=rule, tbt_slo_s=0.006, decode_s=2.0)  # 50 decodes
    begins: list[tuple[float, Asked]] = []
    counts = []
    for number in range(2000):
        now = 0.01 * number
        policy.on_departures([request for begun_at, request in begins if begun_at + 2.0 <= now], now)
        begins = [one for one in begins if now < one[0] + 2.0]
        num_decodes = sum(begun_at <= now for begun_at, _ in begins)
        counts.append(num_decodes)
        pools = [Load(role="prefill"), Load(role="decode", replica_id=1, num_running=num_decodes)]
        request = Asked(1000)
        if policy.admit(request, [System(pools)], now) is ACCEPT:
            policy.on_arrivals([request], now)
            begins.append((now + 1.0, request))
    return np.array(counts[500:])


def test_the_prediction_damps_the_swing_of_plain_early_rejection() -> None:
    plain, predicted = decodes_over_time("load"), decodes_over_time("predicted_load")
    assert plain.max() > 1.8 * 50  # a prefill time's worth of requests comes on top of what was there
    assert plain.min() < 0.5 * 50
    assert predicted.max() <= 50
    assert predicted.min() >= 0.9 * 50
    assert predicted.std() < 0.1 * plain.std()


def decodes_in_simulation(rule: str, folder: Path) -> tuple[np.ndarray[Any, Any], int]:
    """Decodes over time on the replica that decodes, of a simulated overload, and how many requests were served."""
    sizes = {"prompt_tokens": {"type": "constant", "value": 2000}, "output_tokens": {"type": "constant", "value": 150}}
    mapping = {
        "version": 1,
        "scheduling": {
            "admission": {"policy": "mooncake", "params": {"rule": rule, "tbt_slo_s": 0.022, "decode_s": 3.0}},
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": "least_loaded",
            "replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_size": 200}},
        },
        "pools": {"prefill": {"num_replicas": 24}, "decode": {"num_replicas": 1}},
        "replica": {"max_batch_size": 256, "memory": {"num_blocks": 40_000}},
        "workload": {
            "type": "synthetic",
            "num_requests": 1000,
            "arrivals": {"type": "poisson", "rate": 20},
            **sizes,
        },
        "backend": {"simulator": {"latency": {"type": "affine", "base_s": 0.01, "per_token_s": 0.0003}}},
        "output": {"decision_log": False, "steps": False},
    }
    rows = run_experiment(config_from_mapping(mapping), folder=folder).requests().to_pylist()
    served = [row for row in rows if row["reason"] in ("length", "stop")]
    firsts, ends = (np.array([row[name] for row in served])[:, None] for name in ("first_token_at", "ended_at"))
    times = np.arange(10.0, 45.0, 0.05)
    return ((firsts <= times) & (times < ends)).sum(axis=0), len(served)


def test_the_prediction_damps_the_swing_of_simulated_pools(tmp_path: Path) -> None:
    plain, num_plain = decodes_in_simulation("load", tmp_path / "plain")
    predicted, num_predicted = decodes_in_simulation("predicted_load", tmp_path / "predicted")
    assert plain.std() / plain.mean() > 0.25
    assert predicted.std() / predicted.mean() < 0.12
    assert (plain.min(), plain.max()) == pytest.approx((10, 60), abs=5)
    assert predicted.min() > 2 * plain.min()
    assert num_predicted > num_plain


@pytest.mark.parametrize("highest", [0.4, 0.5])
def test_ceilings_that_do_not_rise_are_refused(highest: float) -> None:
    with pytest.raises(ValueError, match=f"below max_ceiling .got 0.5 and {highest:g}"):
        HoldbackConfig(min_ceiling=0.5, max_ceiling=highest)
