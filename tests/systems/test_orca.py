"""ORCA's selection, as its Algorithm 1 has it."""

from __future__ import annotations

from typing import Any

from vajra_py.testing.harness import Harness, HarnessOptions


def harness_of(**sizes: Any) -> Harness:
    return Harness(
        "fcfs",
        "round_robin",
        "orca",
        HarnessOptions(**{"block_size": 4, "num_blocks": 20, "max_batch_size": 3, **sizes}),
    )


def test_an_iteration_mixes_whole_prompts_with_decodes() -> None:
    harness = harness_of()
    harness.submit("a", 6, 4, max_tokens=4)
    harness.step()
    harness.submit("b", 9, 2, max_tokens=2)
    step = harness.step()
    assert step is not None
    assert step.tokens == {"a": 1, "b": 9}


def test_memory_for_the_longest_output_is_set_aside_so_that_nobody_gives_way() -> None:
    harness = harness_of()
    for name in ("a", "b", "c"):
        harness.submit(name, 8, 5, max_tokens=33)  # 40 tokens each, of 80
    steps = harness.steps_until_idle()
    assert list(steps[0].tokens) == ["a", "b"]
    assert steps[0].free_blocks == 0
    assert not any(step.preempted for step in steps)
    assert list(steps[5].tokens) == ["c"]  # once a and b have ended with five tokens each


def test_the_first_that_does_not_fit_ends_the_selection() -> None:
    harness = harness_of()
    harness.submit("a", 8, 40, max_tokens=40)
    harness.step()
    harness.submit("large", 8, 40, max_tokens=41)
    harness.submit("small", 4, 2, max_tokens=2)
    step = harness.step()
    assert step is not None
    assert step.tokens == {"a": 1}
    assert harness.waiting() == ["large", "small"]


def test_the_batch_limit_counts_everyone() -> None:
    harness = harness_of(max_batch_size=2)
    for name in ("a", "b", "c"):
        harness.submit(name, 4, 3, max_tokens=3)
    steps = harness.steps_until_idle()
    assert list(steps[0].tokens) == ["a", "b"]
    assert list(steps[3].tokens) == ["c"]
