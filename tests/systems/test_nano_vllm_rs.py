"""Rules in the document of the Rust nano-vllm that its own code does not implement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.sim.split_pools import Way, settings, simulate
from vajra_py.contract.observer import EndReason
from vajra_py.testing.harness import Harness, HarnessOptions
from vajra_py.workload import PromptContent, RequestSpec


def harness_of(params: dict[str, Any] | None = None, **sizes: Any) -> Harness:
    return Harness(
        "priority",
        "round_robin",
        ("nano_vllm_rs", params or {}),
        HarnessOptions(**{"block_size": 4, "num_blocks": 12, "max_batch_size": 8, "host_blocks": 32, **sizes}),
    )


def test_the_second_chunk_follows_the_first() -> None:
    harness = harness_of({"chunk_size": 10}, num_blocks=20)
    harness.submit("long", 25, 2)
    harness.submit("short", 4, 3)
    assert [step.tokens for step in harness.steps_until_idle()][:3] == [
        {"long": 10, "short": 4},
        {"short": 1, "long": 10},
        {"short": 1, "long": 5},
    ]


def test_a_step_mixes_decodes_with_a_prompt_cut_to_the_budget() -> None:
    """The document's figure: three decodes, and a prompt in the rest of a budget of ten."""
    harness = harness_of({"prefill_budget_tokens": 7}, num_blocks=40)
    for name in "abc":
        harness.submit(name, 2, 9)
        harness.step()
    harness.submit("d", 12, 2)
    step = harness.step()
    assert step is not None
    assert step.tokens == {"a": 1, "b": 1, "c": 1, "d": 7}


def test_an_urgent_request_takes_memory_from_the_least_urgent_and_runs_in_the_same_step() -> None:
    """The document's figure: A is preempted for X, and is resumed when there is room."""
    harness = harness_of()
    harness.submit("A", 15, 20, priority=10)
    harness.submit("B", 15, 9, priority=0)
    harness.submit("C", 12, 9, priority=0)
    harness.step()
    harness.submit("X", 11, 4, priority=-10)
    step = harness.step()
    assert step is not None
    assert step.preempted == (("A", "swap"),)
    assert step.admitted == ["X"]
    assert list(step.tokens) == ["B", "C", "X"]
    harness.steps_until_idle()
    resumed = [entry for step in harness.steps for entry in step.entries if entry.kind == "resumed"]
    assert resumed[-1].request_id == "A"
    assert {entry.num_tokens for entry in resumed} == {1}  # the KV was swapped in, nothing was recomputed
    assert harness.request("A").num_output_tokens == 20
    assert harness.replica().memory.free_blocks == 12


def test_equal_priorities_do_not_give_way_to_each_other() -> None:
    harness = harness_of()
    harness.submit("running", 40, 8)
    harness.step()
    harness.submit("waiting", 20, 2)
    harness.steps_until_idle()
    assert harness.request("running").num_preemptions == 0
    assert harness.request("waiting").num_output_tokens == 2


def test_nobody_gives_way_when_that_would_not_make_enough_room() -> None:
    harness = harness_of()
    harness.submit("small", 4, 8, priority=5)
    harness.submit("equal", 30, 8, priority=0)
    harness.step()
    harness.submit("urgent", 30, 2, priority=0)
    step = harness.step()
    assert step is not None
    assert step.preempted == ()


def test_a_decode_without_a_block_takes_it_from_the_latest_of_the_least_urgent() -> None:
    harness = harness_of(num_blocks=6)
    harness.submit("first", 8, 12, priority=1)
    harness.submit("second", 8, 12, priority=1)
    harness.submit("urgent", 8, 12, priority=0)
    harness.steps_until_idle()
    victims = [victim for step in harness.steps for victim, _ in step.preempted]
    assert victims[0] == "second"
    assert "urgent" not in victims
    assert all(harness.request(name).num_output_tokens == 12 for name in ("first", "second", "urgent"))


def test_without_host_memory_victims_are_recomputed() -> None:
    harness = harness_of(num_blocks=6, host_blocks=0)
    for name in ("first", "second"):
        harness.submit(name, 11, 10, priority=1)
    harness.steps_until_idle()
    modes = {mode for step in harness.steps for _, mode in step.preempted}
    assert modes == {"recompute"}
    assert all(harness.request(name).num_output_tokens == 10 for name in ("first", "second"))


def test_without_preemption_memory_for_the_longest_output_is_set_aside() -> None:
    harness = harness_of({"preemption": False}, num_blocks=8)
    harness.submit("first", 8, 16, max_tokens=16)
    harness.submit("second", 8, 16, max_tokens=16)
    harness.steps_until_idle()
    assert not any(step.preempted for step in harness.steps)
    assert max(len(step.entries) for step in harness.steps) == 1


def test_no_more_run_at_once_than_the_limit_prompts_in_progress_included() -> None:
    harness = harness_of({"chunk_size": 4}, max_batch_size=2, num_blocks=60)
    for name in ("a", "b", "c"):
        harness.submit(name, 10, 3)
    harness.step()
    assert harness.replica().running_set.num_running == 2
    assert harness.waiting() == ["c"]


def test_a_request_that_ends_with_its_first_token_is_told() -> None:
    harness = harness_of()
    request = harness.submit("r", 9, 1)
    harness.step()
    assert request.end_reason is not None
    assert request.num_output_tokens == 1
    assert harness.replica().memory.free_blocks == 12


def ways_of(
    *requests: RequestSpec, order: str, memory: Mapping[str, Any], retention: Any = None, **replica: Any
) -> Mapping[str, Way]:
    """Simulate one replica, which has blocks of 16 tokens, to the end."""
    policies = {
        "request_prioritizer": order,
        "replicaset_scheduler": "round_robin",
        "replica_scheduler": "nano_vllm_rs",
        "retention": retention,
    }
    memory = {"watermark_fraction": 0.0, **memory}
    mapping = settings(scheduling=policies, replica={"max_batch_tokens": 2048, "memory": memory, **replica})
    for only_of_split_pools in ("pools", "hand_off", "links"):
        del mapping[only_of_split_pools]
    return simulate(mapping, requests).ways


@pytest.mark.parametrize("order", ["priority", "fcfs"])
def test_nobody_gives_way_to_a_request_whose_adapter_is_being_loaded(order: str) -> None:
    running = RequestSpec("running", 0.0, 100, 20, priority=1)
    urgent = RequestSpec("urgent", 0.05, 100, 2, priority=0, adapter="french")
    sizes: dict[str, Any] = {
        "memory": {"num_blocks": 10},
        "adapters": {"max_loras": 1, "models": [{"name": "french", "load_s": 1.0}]},
    }
    alone = ways_of(running, order=order, **sizes)
    ways = ways_of(running, urgent, order=order, **sizes)
    assert ways["running"].ended == alone["running"].ended
    assert ways["urgent"].reason is EndReason.STOP


@pytest.mark.parametrize("order", ["priority", "fcfs"])
def test_nobody_gives_way_whose_blocks_are_pinned(order: str) -> None:
    """`next` would give back one block of eleven, which is not enough for `urgent`."""
    pins = {"policy": "session_pin", "params": {"pin_s": 100.0}}
    chat = PromptContent((("chat", 160),))
    question = PromptContent((("chat", 160), ("question", 16)))
    ways = ways_of(
        RequestSpec("first", 0.0, 160, 2, session_id="s", content=chat),
        RequestSpec("other", 1.0, 150, 1),
        RequestSpec("next", 1.001, 176, 10, session_id="s", content=question, priority=1),
        RequestSpec("urgent", 1.002, 240, 3, priority=0),
        order=order,
        memory={"num_blocks": 20, "prefix_cache": {"max_pinned_fraction": 0.6}},
        retention=pins,
    )
    assert {name: way.reason for name, way in ways.items()} == dict.fromkeys(ways, EndReason.STOP)
    first = [ways[name].first_token for name in ("next", "urgent")]
    assert sorted(first) == (first if order == "fcfs" else first[::-1])
