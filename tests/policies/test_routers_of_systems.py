"""Do the routers of Dynamo, SGLang and Preble follow their rules?"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.policies.routing_views import Replica, Request, context, prompt, replicas, seeded
from vajra_py.contract import Layer, PolicyContext
from vajra_py.contract.latency import LengthEstimate
from vajra_py.plugins import build_policy


def router(name: str, services: PolicyContext | None = None, **params: Any) -> Any:
    return build_policy(Layer.REPLICASET_SCHEDULER, name, params, services or context())


def idle(count: int = 3) -> list[Any]:
    return replicas(num_waiting=[0] * count)


@pytest.mark.parametrize("name", ["dynamo_kv_router", "sglang_cache_aware", "preble_e2"])
def test_replicas_that_are_down_get_nothing(name: str) -> None:
    made = router(name)
    assert {made.assign(Request(), replicas(is_up=[False, True, False]), 0.0) for _ in range(5)} == {1}
    assert made.assign(Request(), replicas(is_up=[False]), 0.0) is None
    queue: Any = [Request(request_id="a")]
    assert list(made.pull(Replica(1), queue, 0.0)) == ["a"]
    assert list(made.pull(Replica(1, is_up=False), queue, 0.0)) == []


# Dynamo: recorded selections are in tests/golden/test_golden_decisions.py


def test_fractions_of_blocks_to_compute_count() -> None:
    made = router("dynamo_kv_router", context(block_size=64))
    assert made.costs(Request(1000), idle(1), made.overlaps(Request(1000), idle(1), 0.0)) == [15.625 + 15]


def test_the_credit_of_cached_blocks_decays_with_the_work_before_a_prompt() -> None:
    made = router("dynamo_kv_router", context(block_size=64), overlap_score_credit_decay=1.0)
    made.sequences.prefill_tokens[:2] = [0, 128]
    # One block of prompt, cached on both; the second has two blocks to compute before it: a third of the credit.
    costs = made.costs(Request(64), idle(2), np.array([1, 1]))
    scale = made._config.prefill_load_scale
    assert costs.tolist() == pytest.approx([1.0, scale * (3.0 - 1.0 / 3.0) + 1.0])


def test_sent_prompts_count_as_cached_for_a_while_without_events() -> None:
    made = router("dynamo_kv_router", use_kv_events=False, router_ttl_secs=10.0)
    first = made.assign(prompt("a", blocks=4), idle(), 0.0)
    views = idle()
    assert made.overlaps(prompt("a", blocks=4), views, 10.0).tolist() == [4 * (one == first) for one in range(3)]
    assert made.overlaps(prompt("a", blocks=4), views, 10.1).tolist() == [0, 0, 0]


def test_the_prompt_is_computed_when_the_first_token_is_there() -> None:
    made, request = router("dynamo_kv_router"), Request(160)
    made.assign(request, idle(1), 0.0)
    sequences = made.sequences
    request.num_output_tokens = 1
    sequences.note_first_tokens()
    assert sequences.prefill_tokens[0] == 160, "it was not admitted, as far as is known"
    made.on_admission(request, 0, 0.0)
    sequences.note_first_tokens()
    assert (sequences.prefill_tokens[0], sequences.blocks[0], sequences.requests[0]) == (0, 10, 1)
    made.on_departures([request], 1.0)
    assert (sequences.blocks[0], sequences.requests[0]) == (0, 0)


def test_generated_blocks_count_where_that_is_switched_on() -> None:
    made, request = router("dynamo_kv_router", router_track_output_blocks=True), Request(160)
    made.assign(request, idle(1), 0.0)
    request.num_output_tokens = 40
    made.assign(Request(16), idle(1), 1.0)
    assert made.sequences.blocks[0] == 10 + 2 + 1
    made.on_departures([request], 2.0)
    assert made.sequences.blocks[0] == 1


def test_shared_blocks_count_once_per_replica() -> None:
    made = router("dynamo_kv_router")
    one, two = prompt("a", "b", blocks=2), prompt("a", "c", blocks=2)
    made.assign(one, idle(1), 0.0)
    made.assign(two, idle(1), 0.0)
    assert made.sequences.blocks[0] == 6
    made.on_departures([one], 1.0)
    assert made.sequences.blocks[0] == 4
    assert made.sequences.potential_blocks(one.block_hashes(), 4)[0] == 6


def test_a_request_that_is_placed_again_is_booked_once() -> None:
    made, request = router("dynamo_kv_router"), Request(160)
    for _ in range(3):
        made.assign(request, idle(1), 0.0)
    assert (made.sequences.blocks[0], made.sequences.requests[0], made.sequences.prefill_tokens[0]) == (10, 1, 160)


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, 0.8808), (1.0, 0.7311), (1e-3, 1.0)])
def test_temperature_is_a_softmax_over_scaled_costs(temperature: float, expected: float) -> None:
    counts: Counter[int] = Counter()
    stream = seeded(1)
    made = router("dynamo_kv_router", context(stream=stream), router_temperature=temperature)
    busy = Request(1600)
    while made.assign(busy, idle(2), 0.0) != 1:
        pass
    for _ in range(3000):
        request = Request(160)
        counts[made.assign(request, idle(2), 0.0)] += 1
        made.on_departures([request], 0.0)
    assert counts[0] / 3000 == pytest.approx(expected, abs=0.03)


# SGLang


def test_long_common_prefixes_are_followed() -> None:
    made = router("sglang_cache_aware")
    assert made.assign(prompt("a", blocks=4), idle(), 0.0) == 0
    assert made.assign(prompt("b", blocks=4), idle(), 0.0) == 1
    assert made.assign(prompt("a", "x", blocks=4), idle(), 0.0) == 0
    assert made.assign(prompt("b", "y", blocks=4), idle(), 0.0) == 1
    assert made.assign(prompt("a", "z", "w", "v", blocks=4), idle(), 0.0) == 2, "a quarter is not above 0.3"


def test_a_common_part_of_exactly_the_threshold_is_not_enough() -> None:
    made = router("sglang_cache_aware", cache_threshold=0.5)
    made.assign(prompt("a", blocks=4), idle(), 0.0)
    assert made.assign(prompt("a", "x", blocks=4), idle(), 0.0) == 1


def test_uneven_load_goes_to_the_least_loaded() -> None:
    made = router("sglang_cache_aware", balance_abs_threshold=2, balance_rel_threshold=1.5)
    same = [prompt("a", blocks=4, request_id=f"r{index}") for index in range(5)]
    # 0, 1, 2, 3 requests there: 3 - 0 > 2 turns the next one away.
    assert [made.assign(one, idle(2), 0.0) for one in same[:3]] == [0, 0, 0]
    assert made.assign(same[3], idle(2), 0.0) == 1
    assert made.assign(same[4], idle(2), 0.0) == 1, "both have it now, and the second has less to do"
    made.on_departures(same[:3], 1.0)
    assert made.assign(prompt("z", blocks=4), idle(2), 1.0) == 0


def test_a_large_quotient_alone_is_not_uneven() -> None:
    made = router("sglang_cache_aware")
    assert [made.assign(prompt("a", blocks=4), idle(2), 0.0) for _ in range(60)] == [0] * 60


def test_old_prompts_are_forgotten() -> None:
    made = router("sglang_cache_aware", max_tree_size=64)
    assert made.assign(prompt("a", blocks=4), idle(2), 0.0) == 0
    for name in "bcde":
        made.on_departures([one := prompt(name, blocks=4)], 0.0)
        made.assign(one, idle(1), 0.0)
    assert made.assign(prompt("a", blocks=4), idle(2), 0.0) == 1


# Preble


def test_a_prefix_longer_than_the_rest_is_exploited() -> None:
    made = router("preble_e2", context(num_blocks=64))
    first = made.assign(prompt("a", blocks=8), idle(), 0.0)
    assert made.assign(prompt("a", "x", blocks=5), idle(), 0.0) != first, "5 of 10 blocks are not more than the rest"
    made = router("preble_e2", context(num_blocks=64))
    first = made.assign(prompt("a", blocks=8), idle(), 0.0)
    longer = prompt("a", blocks=8)
    longer.num_prompt_tokens += 16 * 7
    assert [made.assign(longer, idle(), 0.0) for _ in range(4)] == [first] * 4


def test_exploration_spreads_work_not_requests() -> None:
    made = router("preble_e2", default_output_tokens=0)
    assert made.assign(Request(3000), idle(2), 0.0) == 0
    assert [made.assign(Request(100), idle(2), 0.0) for _ in range(6)] == [1] * 6


def test_work_counts_for_the_window() -> None:
    made = router("preble_e2", default_output_tokens=0, window_s=10.0)
    assert made.assign(Request(3000), idle(2), 0.0) == 0
    assert made.assign(Request(100), idle(2), 10.0) == 1
    assert made.assign(Request(100), idle(2), 10.1) == 0


def test_expected_outputs_count() -> None:
    class Lengths:
        def predict(self, request: Any) -> LengthEstimate:
            tokens = request.metadata["output"]
            return LengthEstimate(tokens, tokens, tokens)

    made = router("preble_e2", replace(context(), output_lengths=Lengths()))
    assert made.assign(Request(100, metadata={"output": 900.0}), idle(2), 0.0) == 0
    assert [made.assign(Request(100, metadata={"output": 1.0}), idle(2), 0.0) for _ in range(5)] == [1] * 5


def test_a_hot_prefix_moves_when_its_holder_is_too_heavy() -> None:
    made = router("preble_e2", context(num_blocks=64), min_requests_per_replica=2, default_output_tokens=0)
    hot = prompt("a", blocks=40)
    assert made.assign(hot, idle(2), 0.0) == 0
    for size in (16, 16):
        assert made.assign(Request(size), idle(2), 0.0) == 1
    chosen = [made.assign(prompt("a", blocks=40), idle(2), 0.0) for _ in range(12)]
    assert set(chosen) == {0, 1}
    still = router("preble_e2", context(num_blocks=64), min_requests_per_replica=1000)
    assert still.assign(hot, idle(2), 0.0) == 0
    assert [still.assign(prompt("a", blocks=40), idle(2), 0.0) for _ in range(12)] == [0] * 12
