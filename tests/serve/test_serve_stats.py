"""A server's numbers: what each counts, held against a simulation in which every time is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from tests.sim.split_pools import prepared, settings
from vajra_py.contract import Layer
from vajra_py.contract.observer import PolicySwap
from vajra_py.errors import ExecutorError
from vajra_py.latency import ConstantModel
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.serve.observe.stats import NUM_EVENTS, RECENT, Histogram, ServerStats, time_policies
from vajra_py.sim.simulator import SimulationOptions
from vajra_py.testing import Harness, HarnessOptions
from vajra_py.workload import PromptContent, RequestSpec

STEP_S = 0.02
OPTIONS = HarnessOptions(num_blocks=200, max_batch_size=4, latency=ConstantModel(STEP_S))


def served(
    requests: Sequence[RequestSpec], options: HarnessOptions = OPTIONS, max_labels: int = 100
) -> tuple[ServerStats, Harness]:
    """The numbers after these requests were served, each step of which takes 20 ms."""
    harness = Harness("fcfs", "round_robin", ("fixed_chunk", {"chunk_size": 512}), options)
    stats = ServerStats(harness.controller, max_labels)
    harness.controller.watch((stats,))
    harness.simulator(SimulationOptions()).run(requests)
    return stats, harness


def values(histogram: Histogram) -> tuple[int, float]:
    """How many values, and their sum."""
    return sum(histogram.counts), pytest.approx(histogram.total)


def test_the_times_of_a_request_are_its_own() -> None:
    """It waits for nobody, its prompt takes one step, and four more tokens come in four more."""
    stats, _ = served([RequestSpec("r", 1.0, 100, 5)])
    one = stats.sets["harness"]
    assert values(one.queue) == (1, 0.0)
    assert values(one.ttft) == values(one.prefill) == (1, STEP_S)
    assert values(one.gaps) == (4, 4 * STEP_S)
    assert values(one.tpot) == (1, STEP_S)
    assert values(one.decode) == (1, 4 * STEP_S)
    assert values(one.inference) == values(one.e2e) == (1, 5 * STEP_S)
    assert values(one.prompt) == (1, 100)
    assert values(one.output) == (1, 5)
    assert (one.num_prompt_tokens, dict(one.ended)) == (100, {"stop": 1})


def test_waiting_is_in_the_first_token_and_not_in_the_prefill() -> None:
    options = replace(OPTIONS, max_batch_size=1)
    stats, _ = served([RequestSpec("first", 0.0, 10, 3), RequestSpec("second", 0.0, 10, 1)], options)
    one = stats.sets["harness"]
    assert values(one.queue) == (2, 3 * STEP_S)
    assert values(one.ttft) == (2, (1 + 4) * STEP_S)
    assert values(one.prefill) == (2, 2 * STEP_S)
    assert values(one.tpot) == (1, STEP_S)  # a response of one token has no time between tokens


def test_steps_and_their_tokens_are_counted_also_when_they_repeat() -> None:
    stats, harness = served([RequestSpec("a", 0.0, 100, 40), RequestSpec("b", 0.0, 50, 40)])
    one = stats.sets["harness"]
    assert values(one.step) == (40, 40 * STEP_S)
    assert values(one.step_tokens) == (40, 150 + 2 * 39)
    assert (one.num_decodes, one.prefill_tokens) == (2 * 39, 150)
    assert one.last_steps == {0: (2, 0, 0)}
    assert one.predicted_s == pytest.approx(one.measured_s) == pytest.approx(40 * STEP_S)
    assert harness.replica().num_steps == 40


def test_a_model_that_predicts_nothing_is_asked_once() -> None:
    asked = 0

    class Silent(ConstantModel):
        def batch_time_s(self, batch: Any) -> float:
            nonlocal asked
            asked += 1
            raise ExecutorError("nothing is known of this")

    harness = Harness("fcfs", "round_robin", "fixed_chunk", OPTIONS)
    harness.replica().parts = structs.replace(harness.replica().parts, latency=Silent(STEP_S))
    stats = ServerStats(harness.controller, 100)
    harness.controller.watch((stats,))
    harness.simulator(SimulationOptions()).run([RequestSpec("r", 0.0, 10, 8)])
    assert asked == 1
    assert (stats.sets["harness"].predicted_s, stats.sets["harness"].measured_s) == (0.0, 0.0)
    assert values(stats.sets["harness"].step)[0] == 8


def test_what_the_prefix_cache_spares_is_counted_at_the_first_admission() -> None:
    content = PromptContent((("system", 64), ("own", 36)))
    other = PromptContent((("system", 64), ("other", 36)))
    stats, _ = served(
        [
            RequestSpec("a", 0.0, 100, 2, content=content),
            RequestSpec("b", 1.0, 100, 2, content=other),
        ],
        replace(OPTIONS, prefix_cache=PrefixCacheOptions()),
    )
    one = stats.sets["harness"]
    assert (one.num_looked_up_tokens, one.num_cached_tokens) == (200, 64)


def test_preemptions_are_counted_and_waiting_again_is_no_queueing() -> None:
    options = replace(OPTIONS, num_blocks=5, block_size=4, reserve_prompt=False)
    stats, _ = served([RequestSpec("a", 0.0, 8, 8), RequestSpec("b", 0.0, 8, 8)], options)
    one = stats.sets["harness"]
    assert one.num_preemptions == 1
    assert values(one.queue)[0] == 2
    assert one.num_looked_up_tokens == 16


def test_a_request_that_moves_to_another_pool_is_counted_once() -> None:
    run, simulator, _ = prepared(settings())
    stats = ServerStats(run.controller, 100)
    run.controller.watch((stats,))
    simulator.run([RequestSpec(f"r{number}", 0.0, 100, 5) for number in range(4)])
    one = stats.sets["default"]
    assert dict(one.ended) == {"stop": 4}
    assert (values(one.queue)[0], one.num_looked_up_tokens) == (4, 400)


# SLOs


@pytest.mark.parametrize(
    ("kept", "broken"),
    [
        ({"ttft_slo_s": 0.021}, {"ttft_slo_s": 0.019}),
        ({"tpot_slo_s": 0.021}, {"tpot_slo_s": 0.019}),
        ({"tbt_slo_s": 0.021}, {"tbt_slo_s": 0.019}),
        ({"deadline_s": 0.11}, {"deadline_s": 0.09}),
    ],
    ids=["ttft", "tpot", "tbt", "deadline"],
)
def test_an_slo_is_missed_or_met_by_class(
    kept: dict[str, float], broken: dict[str, float], request: pytest.FixtureRequest
) -> None:
    stats, _ = served(
        [
            RequestSpec("kept", 0.0, 10, 5, slo_class="gold", **kept),  # type: ignore[arg-type]
            RequestSpec("broken", 1.0, 10, 5, slo_class="iron", **broken),  # type: ignore[arg-type]
            RequestSpec("no SLO", 2.0, 10, 5),
        ]
    )
    counts = {key: count for key, count in stats.sets["harness"].violations.items() if count}
    assert counts == {(request.node.callspec.id, "iron"): 1}


def test_an_answer_of_one_token_violates_no_slo_about_those_after_it() -> None:
    stats, _ = served([RequestSpec("r", 0.0, 10, 1, tpot_slo_s=1e-9, tbt_slo_s=1e-9)])
    assert not any(stats.sets["harness"].violations.values())


def test_a_rejected_request_has_neither_tokens_nor_times() -> None:
    stats, _ = served([RequestSpec("huge", 0.0, 100_000, 5, tenant="t", ttft_slo_s=0.001)])
    one = stats.sets["harness"]
    assert dict(one.ended) == {"rejected": 1}
    assert values(one.prompt) == values(one.ttft) == values(one.e2e) == (0, 0.0)
    assert not stats.service_tokens
    assert not any(one.violations.values())


def test_a_request_that_expired_in_the_queue_has_tokens_and_no_times() -> None:
    options = replace(OPTIONS, max_batch_size=1)
    stats, _ = served(
        [RequestSpec("long", 0.0, 10, 50), RequestSpec("hasty", 0.0, 10, 5, expires_after_s=0.1)], options
    )
    one = stats.sets["harness"]
    assert dict(one.ended) == {"stop": 1, "expired": 1}
    assert values(one.prompt) == (2, 20)
    assert values(one.ttft)[0] == values(one.e2e)[0] == 1


# Tenants and classes


def test_tenants_beyond_the_limit_count_together_and_old_ones_go_on_by_name() -> None:
    names = ["a", "b", "c", "d", "a"]
    stats, _ = served(
        [RequestSpec(str(index), float(index), 10, 6, tenant=name) for index, name in enumerate(names)], max_labels=2
    )
    each = 10 + 5 + 6  # prompt and all but the last token computed; tokens generated
    assert dict(stats.service_tokens) == {"a": 2 * each, "b": each, "other": 2 * each}


@pytest.mark.parametrize(
    ("served_tokens", "index"),
    [
        ({}, 1.0),
        ({"a": 0}, 1.0),
        ({"a": 7}, 1.0),
        ({"a": 5, "b": 5}, 1.0),
        ({"a": 5, "b": 0}, 0.5),
        ({"a": 3, "b": 1}, 0.8),
    ],
)
def test_jains_index(served_tokens: dict[str, int], index: float) -> None:
    stats, _ = served([])
    stats.service_tokens.update(served_tokens)
    assert stats.total_service_jain_index() == pytest.approx(index)


def test_percentiles_are_those_of_each_class() -> None:
    stats, _ = served(
        [
            *(RequestSpec(f"chat{index}", float(index), 10, 3, slo_class="chat") for index in range(3)),
            RequestSpec("plain", 10.0, 10, 1),
        ]
    )
    found = stats.percentiles()
    assert found.keys() == {"chat", "(none)"}
    assert found["chat"]["requests"] == 3
    assert found["chat"]["ttft_p50_ms"] == found["chat"]["ttft_p99_ms"] == pytest.approx(20)
    assert found["chat"]["tpot_p50_ms"] == pytest.approx(20)
    assert found["chat"]["e2e_p99_ms"] == pytest.approx(60)
    assert found["(none)"]["tpot_p99_ms"] == 0
    assert stats.recent_latencies() == {
        "ttft_p50_ms": pytest.approx(20),
        "ttft_p99_ms": pytest.approx(20),
        "tpot_p50_ms": pytest.approx(20),
        "tpot_p99_ms": pytest.approx(20),
    }


def test_percentiles_forget_what_is_long_ago() -> None:
    stats, _ = served([RequestSpec("r", 0.0, 10, 3, slo_class="chat")])
    stats.recent["chat"].ttft_s.extend([5.0] * RECENT)
    assert stats.percentiles()["chat"]["requests"] == RECENT
    assert stats.percentiles()["chat"]["ttft_p50_ms"] == 5000


def test_numbers_of_a_server_that_served_nobody() -> None:
    stats, _ = served([])
    assert stats.percentiles() == {}
    assert set(stats.recent_latencies().values()) == {0.0}
    assert stats.total_service_jain_index() == 1.0


# Streamed tokens


def test_output_tokens_are_counted_while_requests_run_and_never_go_down() -> None:
    harness = Harness("fcfs", "round_robin", "fixed_chunk", OPTIONS)
    stats = ServerStats(harness.controller, 100)
    harness.controller.watch((stats, harness._recorder))
    for name in ("a", "b"):
        harness.submit(name, 10, 5)
    counts = []
    for _ in range(5):
        harness.step()
        stats.count_output_tokens()
        counts.append(stats.sets["harness"].num_output_tokens)
    assert counts == [2, 4, 6, 8, 10]
    stats.sets["harness"].output.total -= 3  # as if one had ended without being counted yet
    stats.count_output_tokens()
    assert stats.sets["harness"].num_output_tokens == 10


# Information for operators


def test_events_are_kept_in_order_up_to_a_number_and_a_length() -> None:
    stats, _ = served([])
    stats.on_replica_lost("harness", 0, "its process was killed", 1.0)
    stats.on_replica_restored("harness", 0, 2.0)
    swap = PolicySwap("harness", Layer.REPLICA_SCHEDULER, "orca", {}, "vllm_v1", {}, num_requeued=0)
    stats.on_policy_swapped(swap, 3.0)
    stats.on_out_of_service("harness", "x" * 900, 4.0)
    kinds, texts = [kind for _, kind, _ in stats.events], [text for *_, text in stats.events]
    assert kinds == ["failure", "restart", "swap", "failure"]
    assert texts[0] == "harness 0: its process was killed"
    assert texts[2] == "harness replica_scheduler: orca → vllm_v1"
    assert len(texts[3]) == 500
    one = stats.sets["harness"]
    assert (dict(one.lost), dict(one.restored), one.num_out_of_service) == ({0: 1}, {0: 1}, 1)
    assert dict(one.swaps) == {"replica_scheduler": 1}
    for _ in range(NUM_EVENTS):
        stats.on_replica_restored("harness", 0, 5.0)
    assert len(stats.events) == NUM_EVENTS
    assert {kind for _, kind, _ in stats.events} == {"restart"}


def test_each_decision_of_a_policy_is_timed() -> None:
    harness = Harness("fcfs", "round_robin", "fixed_chunk", OPTIONS)
    stats = ServerStats(harness.controller, 100)
    time_policies(harness.controller, stats)
    harness.controller.watch((stats,))
    simulator = harness.simulator(SimulationOptions(fast_forward=False))
    simulator.run([RequestSpec(f"r{index}", 0.0, 10, 5) for index in range(3)])
    layers = {layer: values(histogram) for (_, layer, _), histogram in stats.decisions.items()}
    assert layers["replicaset_scheduler"][0] == 3
    assert layers["replica_scheduler"][0] >= simulator.num_steps == 5
