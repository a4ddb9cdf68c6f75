"""What the Rust nano-vllm's document promises and its code does not do."""

from __future__ import annotations

from typing import Any

from vajra_py.testing.harness import Harness, HarnessOptions


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
    assert {entry.num_tokens for entry in resumed} == {1}  # the KV came back, nothing was computed again
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
