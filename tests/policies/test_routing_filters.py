"""Do filters, pickers and deciders decide as llm-d's do? The rows are those of its own tests, as figures."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from pydantic import ValidationError

from tests.policies.routing_views import (
    Latencies,
    Load,
    Matches,
    Replica,
    Request,
    build,
    context,
    kept,
    part,
    replicas,
    seeded,
)
from vajra_py.contract import RoutingPartKind

PREFIXES = "approx-prefix-cache-producer"
IN_FLIGHT = "inflight-load-producer"
LATENCIES = "predicted-latency-producer"
FILTER, PICKER, DECIDER = RoutingPartKind.FILTER, RoutingPartKind.PICKER, RoutingPartKind.DECIDER


# Roles and labels

ROLES = replicas(role=["decode", "prefill", "mixed"], pool=["d", "p", "m"])


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("decode-filter", {}, [0, 2]),
        ("prefill-filter", {}, [1, 2]),
        ("by-label", {"label": "pool", "valid_values": ["d", "m"]}, [0, 2]),
        ("by-label", {"label": "llm-d.ai/role", "valid_values": ["decode"]}, [0]),
        ("by-label", {"label": "llm-d.ai/role", "valid_values": ["both"]}, [2]),
        ("by-label", {"label": "pool", "allows_no_label": True}, []),
        ("label-selector-filter", {"match_labels": {"pool": "p"}}, [1]),
        ("label-selector-filter", {}, [0, 1, 2]),
        (
            "label-selector-filter",
            {"match_expressions": [{"key": "llm-d.ai/role", "operator": "NotIn", "values": ["prefill"]}]},
            [0, 2],
        ),
        (
            "label-selector-filter",
            {
                "match_labels": {"llm-d.ai/role": "prefill-decode"},
                "match_expressions": [{"key": "pool", "operator": "Exists"}],
            },
            [2],
        ),
        ("label-selector-filter", {"match_expressions": [{"key": "pool", "operator": "DoesNotExist"}]}, []),
    ],
)
def test_by_role_and_label(name: str, params: dict[str, Any], expected: list[int]) -> None:
    assert kept(name, ROLES, **params) == expected


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("by-label", {"label": "pool"}),
        ("by-label", {"label": "zone", "valid_values": ["a"]}),
        ("label-selector-filter", {"match_expressions": [{"key": "pool", "operator": "In"}]}),
        ("label-selector-filter", {"match_expressions": [{"key": "pool", "operator": "Exists", "values": ["a"]}]}),
        ("utilization-filter", {"conditions": []}),
        ("utilization-filter", {"conditions": [{"metric": "other", "max_value": 1}]}),
        ("utilization-filter", {"conditions": [{"metric": "active-requests"}]}),
        ("utilization-filter", {"conditions": [{"metric": "active-requests", "max_value": -1}]}),
        ("utilization-filter", {"conditions": [{"metric": "kv-cache-utilization", "max_value": 80}]}),
        ("prefix-cache-affinity-filter", {"affinity_threshold": 1.5}),
        ("prefix-cache-affinity-filter", {"exploration_probability": -0.1}),
        ("prefix-cache-affinity-filter", {"peak_prefill_throughput": 0}),
        ("prefix-cache-affinity-filter", {"ttft_source": "bogus"}),
        ("slo-headroom-tier-filter", {"epsilon_explore_neg": 1.5}),
    ],
)
def test_wrong_parameters_are_refused(name: str, params: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        part(FILTER, name, **params)


@pytest.mark.parametrize(
    "params",
    [
        {"max_ttft_penalty_ms": 0, "peak_prefill_throughput": 0},
        {"ttft_source": "latencyPredictor", "peak_prefill_throughput": 0},
    ],
)
def test_throughput_may_be_0_where_it_is_not_read(params: dict[str, Any]) -> None:
    part(FILTER, "prefix-cache-affinity-filter", **params)


# Load


@pytest.mark.parametrize(
    ("conditions", "figures", "in_flight", "expected"),
    [
        ([("active-requests", 2)], {"num_waiting": [0, 0, 0]}, {0: 1, 1: 2, 2: 3}, [0, 1]),
        ([("running-requests", 4)], {"num_running": [4, 5]}, {}, [0]),
        ([("waiting-queue", 0)], {"num_waiting": [0, 3]}, {}, [0]),
        ([("kv-cache-utilization", 0.8)], {"free_blocks": [50, 10]}, {}, [0]),
        (
            [("running-requests", 40), ("waiting-queue", 0)],
            {"num_running": [10, 41, 10], "num_waiting": [0, 0, 1]},
            {},
            [0],
        ),
        (
            [("active-requests", 10), ("kv-cache-utilization", 0.8)],
            {"free_blocks": [100, 100, 10]},
            {0: 5, 1: 11},
            [0],
        ),
        ([("active-requests", 1)], {"num_waiting": [0, 0]}, {0: 2, 1: 3}, []),
    ],
)
def test_upper_bounds(
    conditions: list[tuple[str, float]], figures: dict[str, list[int]], in_flight: dict[int, int], expected: list[int]
) -> None:
    views, producers = replicas(**figures), {IN_FLIGHT: Load(requests=in_flight)}
    params: Any = {"conditions": [{"metric": metric, "max_value": most} for metric, most in conditions]}
    assert kept("utilization-filter", views, producers=producers, **params) == expected
    everybody = [one.replica_id for one in views]
    fallback = kept("utilization-filter", views, producers=producers, fallback_on_empty=True, **params)
    assert fallback == (expected or everybody)


def test_saturation_detectors_as_filters() -> None:
    views = replicas(num_waiting=[4, 5, 0], free_blocks=[100, 100, 20])
    assert kept("utilization-detector", views) == [0]
    assert kept("utilization-detector", views, headroom=0.1) == [0, 1, 2]
    assert kept("utilization-detector", views[1:]) == [1, 2], "where all are saturated, all are kept"
    load = {IN_FLIGHT: Load(requests={0: 100, 1: 99}, tokens={1: 1_000_000})}
    assert kept("concurrency-detector", views, producers=load) == [1, 2]
    assert kept("concurrency-detector", views, producers=load, concurrency_mode="tokens") == [0, 2]
    assert kept("concurrency-detector", views, producers=load, concurrency_mode="hybrid") == [2]
    assert kept("concurrency-detector", views, producers=load, headroom=0.01) == [0, 1, 2]
    assert kept("concurrency-detector", views[:1], producers=load) == []


def test_by_any_figure() -> None:
    views = replicas(num_running=[1, 5, 9])
    below: Any = {"attribute": "num_running", "algorithm": {"threshold": {"operator": "LessThan", "value": 5}}}
    assert kept("endpoint-attribute-filter", views, **below) == [0]
    assert kept("endpoint-attribute-filter", views[1:], **below) == []
    assert kept("endpoint-attribute-filter", views[1:], fallback_on_empty=True, **below) == [1, 2]


def test_by_length_where_that_is_switched_on() -> None:
    ranges = [{"max_tokens": 100, "replicas": [0]}, {"min_tokens": 101, "max_tokens": 900, "replicas": [1]}]
    views = replicas(num_waiting=[0, 0, 0])
    assert kept("context-length-aware", views, Request(500), ranges=ranges) == [0, 1, 2]
    assert kept("context-length-aware", views, Request(500), ranges=ranges, enable_filtering=True) == [1, 2]


# Prefixes


@pytest.mark.parametrize(
    ("matched", "ttft_ms", "tokens", "params", "expected"),
    [
        ({1: 90}, {}, {}, {"affinity_threshold": 0.0}, [0, 1]),
        ({0: 10, 1: 20}, {}, {}, {}, [0, 1]),
        ({0: 90}, {0: 100.0, 1: 50.0}, {}, {"ttft_source": "latencyPredictor", "max_ttft_penalty_ms": 5000}, [0]),
        ({0: 80}, {}, {}, {}, [0]),
        ({0: 79}, {}, {}, {}, [0, 1]),
        ({0: 90}, {0: 150.0, 1: 50.0}, {}, {"ttft_source": "latencyPredictor", "max_ttft_penalty_ms": 100}, [0]),
        ({0: 90}, {0: 500.0, 1: 50.0}, {}, {"ttft_source": "latencyPredictor", "max_ttft_penalty_ms": 100}, [0, 1]),
        ({0: 90}, {}, {0: 500, 1: 50}, {"max_ttft_penalty_ms": 100, "peak_prefill_throughput": 1000}, [0, 1]),
        ({0: 90}, {}, {0: 500, 1: 50}, {"max_ttft_penalty_ms": 1000, "peak_prefill_throughput": 1000}, [0]),
        ({0: 90}, {}, {0: 5000, 1: 50}, {"max_ttft_penalty_ms": 0}, [0]),
        ({0: 90}, {}, {}, {"exploration_probability": 1.0}, [0, 1]),
        ({0: 90, 1: 85}, {}, {0: 10**9}, {}, [0, 1]),
    ],
)
def test_sticky_replicas(
    matched: dict[int, int],
    ttft_ms: dict[int, float],
    tokens: dict[int, int],
    params: dict[str, Any],
    expected: list[int],
) -> None:
    producers = {
        PREFIXES: Matches(matched, total=100),
        IN_FLIGHT: Load(tokens=tokens),
        LATENCIES: Latencies({one: (0.0, 0.0, time, 0) for one, time in ttft_ms.items()}),
    }
    views = replicas(num_waiting=[0, 0])
    assert kept("prefix-cache-affinity-filter", views, producers=producers, **params) == expected
    assert kept("prefix-cache-affinity-filter", views[:1], producers=producers, **params) == [0]


def test_sessions_as_a_filter() -> None:
    made = part(FILTER, "session-affinity-filter")
    views, request = replicas(num_waiting=[0, 0]), Request(session_id="s")
    assert made.keeps(request, views, 0.0) is views
    made.on_placement(request, {"default": views[1]}, 0.0)
    assert made.keeps(request, views, 0.0) == views[1:]
    assert made.keeps(request, views[:1], 0.0) == views[:1]


# SLOs


@pytest.mark.parametrize(
    ("headroom", "count", "epsilon", "expected"),
    [
        ({0: (10, 5)}, 1, 0.0, [0]),
        ({}, 2, 0.0, [0, 1]),
        ({0: (100, 50), 1: (200, 80)}, 2, 0.0, [0, 1]),
        ({0: (-100, -50), 1: (-200, -80)}, 2, 0.0, [0, 1]),
        ({0: (100, 50), 1: (200, 80), 2: (-100, -50)}, 3, 0.0, [0, 1]),
        ({0: (100, 50), 1: (-100, -50)}, 2, 1.0, [1]),
        ({0: (100, 50)}, 2, 1.0, [1]),
        ({0: (100, -50), 1: (0, 0)}, 2, 0.0, [1]),
    ],
)
def test_tiers_of_headroom(
    headroom: dict[int, tuple[float, float]], count: int, epsilon: float, expected: list[int]
) -> None:
    producers = {LATENCIES: Latencies({one: (*pair, 100.0, 0) for one, pair in headroom.items()})}
    views = replicas(num_waiting=[0] * count)
    assert kept("slo-headroom-tier-filter", views, producers=producers, epsilon_explore_neg=epsilon) == expected


# Pickers


def picks(name: str, scores: list[float], count: int = 4000) -> Counter[int]:
    services = context(stream=seeded(3))
    picker = build(PICKER, name, services, None, {})
    views = [Replica(10 + position) for position in range(len(scores))]
    return Counter(picker.pick(Request(), views, scores, 0.0) for _ in range(count))


def test_the_best_score_and_ties_by_chance() -> None:
    assert picks("max-score-picker", [0.1, 0.9, 0.5], 10) == {11: 10}
    counts = picks("max-score-picker", [0.9, 0.1, 0.9, 0.9])
    assert set(counts) == {10, 12, 13}
    assert all(abs(count / 4000 - 1 / 3) < 0.03 for count in counts.values())


def test_any_candidate() -> None:
    counts = picks("random-picker", [0.0, 5.0, 1.0])
    assert all(abs(counts[one] / 4000 - 1 / 3) < 0.03 for one in (10, 11, 12))


@pytest.mark.parametrize("scores", [[10, 90], [100, 100, 100], [30, 0], [100, 90, 50, 30, 20], [0.2, -1.0, 0.6]])
def test_chances_in_proportion_to_scores(scores: list[float]) -> None:
    counts, total = picks("weighted-random-picker", scores), sum(max(one, 0) for one in scores)
    for position, score in enumerate(scores):
        assert abs(counts[10 + position] / 4000 - max(score, 0) / total) < 0.03
        assert score > 0 or counts[10 + position] == 0


def test_without_a_positive_score_any() -> None:
    counts = picks("weighted-random-picker", [0.0, 0.0, -1.0])
    assert all(abs(counts[one] / 4000 - 1 / 3) < 0.03 for one in (10, 11, 12))


# Deciders


@pytest.mark.parametrize(
    ("params", "prompt", "cached", "expected"),
    [
        ({"non_cached_tokens": 0}, 10, 5, False),
        ({"non_cached_tokens": 5, "prompt_tokens": 20}, 10, 0, False),
        ({"non_cached_tokens": 20}, 10, 0, False),
        ({"non_cached_tokens": 5, "prompt_tokens": 10}, 10, 5, True),
        ({"non_cached_tokens": 5}, 10, 8, False),
        ({"non_cached_tokens": 5}, 10, 5, True),
        ({"non_cached_tokens": 3}, 10, 2, True),
        ({"non_cached_tokens": 1}, 10, 10, False),
        ({"non_cached_tokens": 5}, 10, 0, True),
        ({"non_cached_tokens": 5, "comparison": ">"}, 10, 5, False),
        ({"non_cached_tokens": 5, "comparison": ">"}, 10, 4, True),
        ({"non_cached_tokens": 0, "comparison": ">"}, 10, 9, True),
        ({"non_cached_tokens": 0, "comparison": ">"}, 10, 10, False),
    ],
)
def test_uncached_tokens_decide(params: dict[str, Any], prompt: int, cached: int, expected: bool) -> None:
    producers = {PREFIXES: Matches({0: cached}, block_size=1)}
    decider = part(DECIDER, "prefix-based-pd-decider", producers, **params)
    assert decider.disaggregates(Request(prompt), Replica(0), 0.0) is expected


@pytest.mark.parametrize(
    ("prompt", "cached_blocks", "expected"),
    [(1000, 14, False), (200, 0, True), (2048, 0, True), (4096, 32, True), (4095, 32, False)],
)
def test_dynamos_rule(prompt: int, cached_blocks: int, expected: bool) -> None:
    producers = {PREFIXES: Matches({0: cached_blocks}, block_size=64)}
    decider = part(DECIDER, "isl-bounding-decider", producers)
    assert decider.disaggregates(Request(prompt), Replica(0), 0.0) is expected


def test_always_and_never() -> None:
    answers = [
        part(DECIDER, name).disaggregates(Request(1), Replica(0), 0.0)
        for name in ("always-disagg-pd-decider", "never-disagg-pd-decider")
    ]
    assert answers == [True, False]
