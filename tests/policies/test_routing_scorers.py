"""Do scorers give the scores of llm-d? The rows are those of its own tests, as figures, and the formulas' edges."""

from __future__ import annotations

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
    part,
    prompt,
    replicas,
    scores,
)
from vajra_py.contract import RoutingPartKind

PREFIXES = "approx-prefix-cache-producer"
IN_FLIGHT = "inflight-load-producer"
LATENCIES = "predicted-latency-producer"


def close(*expected: float) -> Any:
    return pytest.approx(list(expected), abs=1e-4)


# Load


@pytest.mark.parametrize(
    ("scorer", "figure"), [("queue-scorer", "num_waiting"), ("running-requests-size-scorer", "num_running")]
)
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([10, 5, 0], [0.0, 0.5, 1.0]),
        ([5, 5], [1.0, 1.0]),
        ([0, 0], [1.0, 1.0]),
        ([2, 6, 10], [1.0, 0.5, 0.0]),
        ([7], [1.0]),
    ],
)
def test_queues_relative_to_the_others(scorer: str, figure: str, values: list[int], expected: list[float]) -> None:
    assert scores(scorer, replicas(**{figure: values})) == close(*expected)


@pytest.mark.parametrize(
    ("used", "expected"), [([80, 50, 0], [0.2, 0.5, 1.0]), ([60, 60], [0.4, 0.4]), ([100, 50], [0.0, 0.5])]
)
def test_free_memory(used: list[int], expected: list[float]) -> None:
    views = replicas(free_blocks=[100 - one for one in used])
    assert scores("kv-cache-utilization-scorer", views) == close(*expected)


def test_load_aware_is_never_above_a_half() -> None:
    assert scores("load-aware-scorer", replicas(num_waiting=[2, 0, 15]), threshold=10) == close(0.4, 0.5, 0.0)
    assert scores("load-aware-scorer", replicas(num_waiting=[0, 64, 128, 500])) == close(0.5, 0.25, 0.0, 0.0)


def test_adapters_that_are_loaded_then_room_then_the_queue() -> None:
    """The rows of llm-d's rule, in its order: a replica with room goes before one where the adapter waits."""
    views = replicas(
        loaded_adapters=[("a", "b"), ("b",), ("b", "c"), ("b",), ("b", "c"), ("b",), ()],
        waiting_adapters=[(), (), (), ("a",), ("a", "d"), ("c",), ()],
        max_loras=[2, 2, 2, 3, 2, 2, 0],
    )
    assert scores("lora-affinity-scorer", views, Request(adapter="a")) == [1.0, 0.8, 0.0, 0.8, 0.6, 0.0, 0.0]
    assert scores("lora-affinity-scorer", views, Request()) == [0.0, 0.8, 0.0, 0.8, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("counts", "params", "expected"),
    [
        ({}, {}, [1.0, 1.0, 1.0]),
        ({0: 3, 2: 6}, {}, [0.5, 1.0, 0.0]),
        ({0: 4, 2: 1}, {}, [0.0, 1.0, 0.75]),
        ({0: 1}, {"max_busy_score": 0.0}, [0.0, 1.0, 1.0]),
        ({0: 1, 1: 2}, {"idle_threshold": 1, "max_busy_score": 0.5}, [1.0, 0.0, 1.0]),
        ({0: 3, 1: 11, 2: 11}, {}, [0.7273, 0.0, 0.0]),
        ({0: 5, 1: 5, 2: 5}, {}, [0.0, 0.0, 0.0]),
    ],
)
def test_active_requests(counts: dict[int, int], params: dict[str, Any], expected: list[float]) -> None:
    views = replicas(num_waiting=[2, 0, 15])
    found = scores("active-request-scorer", views, producers={IN_FLIGHT: Load(requests=counts)}, **params)
    assert found == close(*expected)


@pytest.mark.parametrize(
    ("tokens", "uncached", "expected"),
    [
        ({1: 500, 2: 1000}, 0, [1.0, 0.5, 0.0]),
        ({1: 250, 2: 750}, 250, [0.75, 0.5, 0.0]),
        ({2: 9000}, 0, [1.0, 1.0, 0.0]),
    ],
)
def test_token_load(tokens: dict[int, int], uncached: int, expected: list[float]) -> None:
    load = Load(tokens=tokens, uncached=uncached)
    views = replicas(num_waiting=[0, 0, 0])
    found = scores("token-load-scorer", views, producers={IN_FLIGHT: load}, queue_threshold_tokens=1000)
    assert found == close(*expected)


# Prefixes


def test_matched_part_of_the_prompt() -> None:
    producers = {PREFIXES: Matches({0: 5, 1: 2}, total=10, block_size=1)}
    views = replicas(num_waiting=[0, 0, 0])
    assert scores("prefix-cache-scorer", views, producers=producers) == close(0.5, 0.2, 0.0)
    assert scores("prefix-cache-scorer", views, Request(0), {PREFIXES: Matches({}, total=0)}) == close(0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("matched", "total", "expected"), [(5, 10, 0.25125), (50, 100, 0.375), (500, 1000, 0.75)], ids=str
)
def test_length_of_the_match(matched: int, total: int, expected: float) -> None:
    producers = {PREFIXES: Matches({0: matched}, total=total, block_size=1)}
    params = {"match_length_weight": 0.5, "match_length_scale_tokens": 100}
    assert scores("prefix-cache-scorer", [Replica(0)], producers=producers, **params) == close(expected)


@pytest.mark.parametrize(
    "params", [{"match_length_weight": -0.1}, {"match_length_weight": 1.1}, {"match_length_scale_tokens": 0}]
)
def test_wrong_weights_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        part(RoutingPartKind.SCORER, "prefix-cache-scorer", **params)


def test_prompts_without_a_hit_go_round_by_last_use() -> None:
    matches = Matches({}, total=10)
    scorer = part(RoutingPartKind.SCORER, "no-hit-lru-scorer", {PREFIXES: matches})
    views = replicas(num_waiting=[0, 0, 0])

    def ask(request: Any) -> list[float]:
        return list(scorer.scores(request, views, 0.0))

    def place(request: Any, position: int) -> None:
        scorer.on_placement(request, {"default": views[position]}, 0.0)

    cold = [Request() for _ in range(4)]
    assert ask(cold[0]) == close(1.0, 0.5, 0.0)
    place(cold[0], 0)
    assert ask(cold[1]) == close(0.0, 1.0, 0.5)
    warm = Request()
    matches.by_replica = {0: 5}
    assert ask(warm) == close(0.5, 0.5, 0.5)
    place(warm, 1)
    matches.by_replica = {}
    assert ask(cold[1]) == close(0.0, 1.0, 0.5), "a hit leaves the order alone"
    place(cold[1], 1)
    assert ask(cold[2]) == close(0.5, 0.0, 1.0)
    place(cold[2], 2)
    assert ask(cold[3]) == close(1.0, 0.5, 0.0)
    assert list(scorer.scores(cold[3], views[1:2], 0.0)) == [1.0]


def test_both_legs_count_as_used() -> None:
    scorer = part(RoutingPartKind.SCORER, "no-hit-lru-scorer", {PREFIXES: Matches({}, total=10)})
    views, request = replicas(num_waiting=[0, 0, 0, 0]), Request()
    scorer.scores(request, views, 0.0)
    scorer.on_placement(request, {"prefill": views[0], "decode": views[2]}, 0.0)
    prefill, decode = (list(scorer.scores(Request(), part_of, 0.0)) for part_of in (views[:2], views[2:]))
    assert prefill[1] > prefill[0]
    assert decode[1] > decode[0]


# Sessions


def test_a_session_stays_where_it_is() -> None:
    scorer = part(RoutingPartKind.SCORER, "session-affinity-scorer")
    views = replicas(num_waiting=[0, 0, 0])
    first = Request(session_id="s")
    assert list(scorer.scores(first, views, 0.0)) == [0.0, 0.0, 0.0]
    scorer.on_placement(first, {"default": views[1]}, 0.0)
    assert list(scorer.scores(Request(session_id="s"), views, 1e9)) == [0.0, 1.0, 0.0]
    assert list(scorer.scores(Request(session_id="other"), views, 0.0)) == [0.0, 0.0, 0.0]
    assert list(scorer.scores(Request(), views, 0.0)) == [0.0, 0.0, 0.0]


def test_an_unused_session_is_forgotten_by_the_router() -> None:
    scorer = part(RoutingPartKind.SCORER, "session-affinity-scorer", strategy="session_id", eviction_ttl_seconds=10.0)
    views, request = replicas(num_waiting=[0, 0]), Request(session_id="s")
    scorer.on_placement(request, {"decode": views[1], "prefill": views[0]}, 0.0)
    assert list(scorer.scores(request, views, 10.0)) == [0.0, 1.0]
    assert list(scorer.scores(request, views, 10.1)) == [0.0, 0.0]


def test_a_session_of_another_profile() -> None:
    scorer = part(RoutingPartKind.SCORER, "session-affinity-scorer", profile_name="prefill")
    views, request = replicas(num_waiting=[0, 0]), Request(session_id="s")
    scorer.on_placement(request, {"decode": views[1], "prefill": views[0]}, 0.0)
    assert list(scorer.scores(request, views, 0.0)) == [1.0, 0.0]


# Lengths


def test_tight_ranges_score_above_wide_ones() -> None:
    ranges = [
        {"min_tokens": 0, "max_tokens": 200, "replicas": [0]},
        {"min_tokens": 0, "max_tokens": 10_000, "pools": ["wide"]},
        {"min_tokens": 1000, "max_tokens": 2000, "replicas": [2]},
    ]
    views = replicas(pool=["default", "wide", "default", "default"])
    tight, wide, beyond, without = scores("context-length-aware", views, Request(100), ranges=ranges)
    assert tight > wide > 0.3 > beyond > 0.0
    assert without == 0.5
    assert tight == pytest.approx(0.3 + 0.7 * (0.7 / (1 + 200 / 10_000) + 0.3 * 100 / 200))
    assert beyond == pytest.approx(0.3 / (1 + 900 / 1000))


@pytest.mark.parametrize(
    ("length", "lowest", "highest", "expected"),
    [(5, 5, 5, 1.0), (0, 0, 10_000, 0.3 + 0.7 * 0.65), (12_000, 0, 10_000, 0.1)],
)
def test_range_scores(length: int, lowest: int, highest: int, expected: float) -> None:
    ranges = [{"min_tokens": lowest, "max_tokens": highest, "replicas": [0]}]
    assert scores("context-length-aware", [Replica(0)], Request(length), ranges=ranges) == close(expected)


@pytest.mark.parametrize(
    "wrong",
    [{"min_tokens": 9, "max_tokens": 3, "replicas": [0]}, {"max_tokens": 3}, {"max_tokens": -1, "pools": ["a"]}],
)
def test_a_wrong_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        part(RoutingPartKind.SCORER, "context-length-aware", ranges=[wrong])


# Latencies


def latency(given: dict[int, tuple[float, float, float, int]], count: int, **params: Any) -> list[float]:
    producers = {LATENCIES: Latencies(given), PREFIXES: Matches({}, total=10)}
    return scores("latency-scorer", replicas(num_waiting=[0] * count), producers=producers, **params)


def test_headroom_of_those_that_meet_their_slos() -> None:
    kept = {0: (100.0, 20.0, 50.0, 0), 1: (30.0, 5.0, 120.0, 0)}
    assert latency(kept, 2) == close(0.01, 1.01)
    assert latency(kept, 2, headroom_selection_strategy="most") == close(1.01, 0.01)


def test_the_one_dimension_that_differs_decides() -> None:
    assert latency({0: (10.0, 5.0, 0.0, 0), 1: (20.0, 5.0, 0.0, 0)}, 2) == close(1.01, 0.01)
    assert latency({0: (10.0, 5.0, 0.0, 0), 1: (10.0, 9.0, 0.0, 0)}, 2) == close(1.01, 0.01)
    assert latency({0: (10.0, 5.0, 0.0, 0), 1: (10.0, 5.0, 0.0, 0)}, 2) == close(0.51, 0.51)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({0: (-10.0, -5.0, 110.0, 1), 1: (-100.0, -30.0, 200.0, 1)}, [1.01, 0.01]),
        ({0: (-50.0, -10.0, 150.0, 5), 1: (-50.0, -10.0, 150.0, 0)}, [0.0, 0.51]),
        ({0: (-50.0, 10.0, 150.0, 5), 1: (50.0, -10.0, 150.0, 5)}, [0.0, 0.51]),
        ({0: (-50.0, -10.0, 150.0, 5), 1: (-5000.0, 10.0, 150.0, 5)}, [0.0, 0.51]),
        ({0: (1.0, 1.0, 150.0, 5), 1: (-1.0, 1.0, 150.0, 0)}, [0.51, 0.0]),
    ],
    ids=["less missed", "idle first", "only TPOT missed first", "only TTFT missed next", "kept before idle"],
)
def test_buckets(given: dict[int, tuple[float, float, float, int]], expected: list[float]) -> None:
    assert latency(given, 2) == close(*expected)


def test_without_predictions_a_composite() -> None:
    producers = {LATENCIES: Latencies({}), PREFIXES: Matches({1: 10}, total=10)}
    views = replicas(num_waiting=[0, 5], free_blocks=[80, 20])
    found = scores("latency-scorer", views, producers=producers)
    assert found == close(round((0.8 + 1.0 + 0.0) / 3, 2), round((0.2 + 0.0 + 1.0) / 3, 2))


@pytest.mark.parametrize("scale", [0.01, 0.5, 20.0])
def test_weights_of_the_composite_are_relative(scale: float) -> None:
    weights = {"composite_kv_weight": 0.0, "composite_queue_weight": scale, "composite_prefix_weight": scale}
    producers = {LATENCIES: Latencies({}), PREFIXES: Matches({1: 10}, total=10)}
    views = replicas(num_waiting=[0, 5], free_blocks=[80, 20])
    found = scores("latency-scorer", views, producers=producers, **weights)
    assert found == close(0.5, 0.5)


def test_predictions_follow_the_latency_model() -> None:
    services = context(2)
    predictor = build(RoutingPartKind.PRODUCER, LATENCIES, services, None, {})
    idle, busy = Replica(0), Replica(1, num_running=3, num_context_tokens=900, num_pending_tokens=500)
    request = Request(100, ttft_slo_s=1e9, tpot_slo_s=1e9)
    for_idle, for_busy = predictor.latencies(request, [idle, busy], 0.0)
    assert for_idle.ttft_s == pytest.approx(services.prefill_time.total_s(100))
    assert for_busy.ttft_s > for_idle.ttft_s
    assert for_busy.tpot_s > for_idle.tpot_s > 0
    assert (for_idle.num_dispatched, for_busy.num_dispatched) == (0, 3)
    assert for_idle.is_met
    for slos in ({}, {"tpot_slo_s": 1e9}):
        without_ttft = predictor.latencies(Request(100, **slos), [idle], 0.0)[0]
        assert (without_ttft.is_met, without_ttft.ttft_headroom_s) == (False, -for_idle.ttft_s)
        assert without_ttft.tpot_headroom_s >= 0
    assert predictor.latencies(Request(100, ttft_slo_s=1e9), [idle], 0.0)[0].is_met


# Any attribute


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({"type": "linear_lower_is_better"}, [1.0, 0.5, 0.0]),
        ({"type": "linear_higher_is_better"}, [0.0, 0.5, 1.0]),
        (
            {"type": "linear_lower_is_better", "normalization": {"fixed_range": {"min": 0, "max": 40}}},
            [0.75, 0.5, 0.25],
        ),
        (
            {"type": "linear_higher_is_better", "normalization": {"fixed_range": {"min": 10, "max": 20}}},
            [0.0, 1.0, 1.0],
        ),
    ],
)
def test_a_figure_by_name(algorithm: dict[str, Any], expected: list[float]) -> None:
    views = replicas(num_pending_tokens=[10, 20, 30])
    found = scores("endpoint-attribute-scorer", views, attribute_key="num_pending_tokens", algorithm=algorithm)
    assert found == close(*expected)


def test_memory_in_use_is_a_figure() -> None:
    views = replicas(free_blocks=[100, 0])
    params: Any = {"attribute_key": "kv_cache_utilization", "algorithm": {"type": "linear_lower_is_better"}}
    assert scores("endpoint-attribute-scorer", views, **params) == close(1.0, 0.0)


# Producers


def test_sent_prompts_are_remembered_until_others_push_them_out() -> None:
    services = context(3, num_blocks=64)
    index = build(
        RoutingPartKind.PRODUCER,
        PREFIXES,
        services,
        None,
        {"auto_tune": False, "lru_capacity_per_server": 3, "min_block_size_tokens": 16},
    )
    views = [Replica(0), Replica(1), Replica(2)]
    one, other = prompt("a", "b", blocks=1), prompt("a", "c", blocks=1)
    assert list(index.matched_blocks(one, views)) == [0, 0, 0]
    index.on_placement(one, {"prefill": views[0], "decode": views[2]}, 0.0)
    assert list(index.matched_blocks(other, views)) == [1, 0, 1]
    assert list(index.matched_blocks(one, views[1:])) == [0, 2]
    assert index.num_blocks(one) == 2
    index.on_placement(prompt("x", "y", blocks=1), {"default": views[0]}, 0.0)
    assert list(index.matched_blocks(one, views)) == [1, 0, 2], "the oldest block has gone, and a later one counts"


def test_blocks_of_the_index_are_at_least_64_tokens() -> None:
    index = build(RoutingPartKind.PRODUCER, PREFIXES, context(2), None, {})
    views = [Replica(0), Replica(1)]
    sent = prompt("a", "b", blocks=4, rest=5)
    index.on_placement(sent, {"default": views[1]}, 0.0)
    assert (index.block_size, index.num_blocks(sent)) == (64, 2)
    assert list(index.matched_blocks(prompt("a", "b", blocks=4), views)) == [0, 2]
    assert list(index.matched_blocks(prompt("a", "c", blocks=4), views)) == [0, 1]


def test_only_so_much_of_a_prompt_is_compared() -> None:
    limits = {"min_block_size_tokens": 16, "max_prefix_tokens_to_match": 40}
    index = build(RoutingPartKind.PRODUCER, PREFIXES, context(1), None, limits)
    sent = prompt("a", blocks=10)
    index.on_placement(sent, {"default": Replica(0)}, 0.0)
    assert (index.num_blocks(sent), list(index.matched_blocks(sent, [Replica(0)]))) == (2, [2])


def test_precise_matches_are_those_of_the_replicas() -> None:
    matches = build(RoutingPartKind.PRODUCER, "precise-prefix-cache-producer", context(2), None, {})
    assert list(matches.matched_blocks(Request(100), replicas(hit_tokens=[47, 48]))) == [2, 3]


def test_loads_in_flight_follow_a_request() -> None:
    load = build(RoutingPartKind.PRODUCER, IN_FLIGHT, context(3), {PREFIXES: Matches({1: 2})}, {})
    views = [Replica(0), Replica(1), Replica(2)]
    request, other = Request(100), Request(50)
    assert list(load.request_tokens(request, views)) == [100, 68, 100]
    load.on_placement(request, {"prefill": views[1], "decode": views[2]}, 0.0)
    load.on_placement(other, {"default": views[0]}, 0.0)
    assert list(load.num_requests(views)) == [1, 1, 1]
    assert list(load.num_tokens(views)) == [50, 68, 100]
    request.num_output_tokens = 1
    assert list(load.num_tokens(views)) == [50, 68, 100], "it was not admitted, as far as is known"
    load.on_admission(request, 1, 0.0)
    assert list(load.num_tokens(views)) == [50, 0, 0]
    assert list(load.num_requests(views)) == [1, 0, 1], "the prefill share ends with the first token"
    load.on_admission(request, 2, 0.0)
    assert list(load.num_tokens(views)) == [50, 0, 0], "the prompt of a request that is admitted again was subtracted"
    load.on_departures([request, other], 0.0)
    assert list(load.num_requests(views)) == [0, 0, 0]
    assert list(load.num_tokens(views)) == [0, 0, 0]


def test_a_request_that_is_placed_again_counts_once() -> None:
    load = build(RoutingPartKind.PRODUCER, IN_FLIGHT, context(2), {PREFIXES: Matches({})}, {})
    views, request = [Replica(0), Replica(1)], Request(100)
    load.on_placement(request, {"default": views[0]}, 0.0)
    load.on_placement(request, {"default": views[1]}, 0.0)
    assert (list(load.num_requests(views)), list(load.num_tokens(views))) == ([0, 1], [0, 100])


@pytest.mark.parametrize(
    ("params", "max_tokens", "expected"),
    [({}, 1000, 15), ({"output_ratio": 0.5}, 1000, 8), ({"max_estimated_output_tokens": 4}, 1000, 7), ({}, 2, 5)],
)
def test_estimated_output_counts_to_the_end(params: dict[str, Any], max_tokens: int, expected: int) -> None:
    settings = {"add_estimated_output_tokens": True, "output_ratio": 4.0, **params}
    load = build(RoutingPartKind.PRODUCER, IN_FLIGHT, context(1), {PREFIXES: Matches({})}, settings)
    request, view = Request(3, max_tokens=max_tokens), Replica(0)
    if "output_ratio" in params:
        request.num_prompt_tokens = 5  # half of it is rounded up
    load.on_placement(request, {"default": view}, 0.0)
    assert list(load.num_tokens([view])) == [expected]
    load.on_admission(request, 0, 0.0)
    request.num_output_tokens = 1
    assert list(load.num_tokens([view])) == [expected - request.num_prompt_tokens]
    load.on_departures([request], 0.0)
    assert list(load.num_tokens([view])) == [0]
