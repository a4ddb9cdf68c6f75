"""Prompt tokens of steps in which others decode, under P-PAS, the mixed-prefill governor, the hold of small chunks and waves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_py.testing.harness import Harness, HarnessOptions, Step
from vajra_py.workload.request import RequestSpec


def harness(name: str, params: dict[str, Any], **options: Any) -> Harness:
    return Harness("fcfs", "round_robin", (name, params), HarnessOptions(**{"num_blocks": 2000, **options}))


def step(one: Harness) -> Step:
    done = one.step()
    assert done is not None
    return done


def with_chat(name: str, params: dict[str, Any], **options: Any) -> Harness:
    """A request decodes."""
    one = harness(name, params, **options)
    one.submit("chat", 10, 60)
    step(one)
    return one


def prompt_tokens(step: Step) -> int:
    return sum(tokens for name, tokens in step.tokens.items() if name != "chat")


# P-PAS


def test_p_pas_caps_prompts_only_while_several_compete_with_decodes() -> None:
    one = with_chat("p_pas", {"chunk_size": 1000, "capped_tokens": 100})
    one.submit("first", 2500)
    assert step(one).tokens == {"chat": 1, "first": 999}, "one prompt alone is no pressure"
    one.submit("second", 300)
    assert [prompt_tokens(step(one)) for _ in range(3)] == [100, 100, 100]
    alone = harness("p_pas", {"chunk_size": 1000, "capped_tokens": 100})
    alone.submit("first", 1500)
    alone.submit("second", 500)
    assert step(alone).num_tokens == 1000, "nobody decodes"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 400), st.integers(1, 30)), min_size=2, max_size=15))
def test_no_step_under_pressure_exceeds_the_cap(requests: list[tuple[float, int, int]]) -> None:
    one = harness("p_pas", {"chunk_size": 512, "capped_tokens": 64, "pressure_prefills": 1})
    specs = [
        RequestSpec(f"r{index}", at, prompt, output) for index, (at, prompt, output) in enumerate(sorted(requests))
    ]
    one.run(specs)
    prompts = {spec.request_id: spec.num_prompt_tokens for spec in specs}
    for each in one.steps:
        of_prompts = [entry for entry in each.entries if entry.num_computed_before < prompts[entry.request_id] - 1]
        of_decodes = [entry for entry in each.entries if entry.num_computed_before >= prompts[entry.request_id]]
        if of_decodes:
            assert sum(entry.num_tokens for entry in of_prompts) <= 64


# Mixed-prefill governor

GOVERNOR = {"chunk_size": 1000, "mixed_tokens": 100, "min_decode_steps": 3, "max_wait_s": None}


def test_steps_of_decodes_alone_stand_between_small_steps_with_prompts() -> None:
    one = with_chat("mixed_prefill_governor", GOVERNOR)
    one.submit("document", 250)
    assert [prompt_tokens(step(one)) for _ in range(12)] == [0, 0, 0, 100, 0, 0, 0, 100, 0, 0, 0, 50]


def test_decodes_before_the_prompt_came_count_and_a_long_wait_ends_the_run() -> None:
    one = with_chat("mixed_prefill_governor", GOVERNOR)
    for _ in range(3):
        step(one)
    one.submit("document", 250)
    assert prompt_tokens(step(one)) == 100
    waiting = with_chat("mixed_prefill_governor", {**GOVERNOR, "max_wait_s": 1e-9})
    waiting.submit("document", 250)
    step(waiting)
    assert prompt_tokens(step(waiting)) in (0, 100)
    assert waiting.request("document").num_computed_tokens >= 100, "after one step it had waited"


def test_prompts_in_progress_share_the_tokens_and_no_third_one_joins_unless_it_is_computed_at_once() -> None:
    one = harness("mixed_prefill_governor", {**GOVERNOR, "min_decode_steps": 0, "chunk_size": 100})
    one.submit("chat", 10, 60)
    one.submit("a", 400)
    step(one)
    one.submit("b", 400)
    assert step(one).tokens == {"chat": 1, "a": 99}
    one.submit("tiny", 8)
    one.submit("large", 400)
    for _ in range(2):
        tokens = step(one).tokens
        assert set(tokens) <= {"chat", "a", "b", "tiny"}


def test_an_urgent_prompt_waits_like_others_while_as_many_as_may_be_are_in_progress() -> None:
    options = HarnessOptions(num_blocks=2000)
    params = {**GOVERNOR, "min_decode_steps": 0, "max_partial_prefills": 1}
    one = Harness("priority", "round_robin", ("mixed_prefill_governor", params), options)
    one.submit("chat", 10, 60, priority=1)
    step(one)
    one.submit("document", 400, priority=1)
    step(one)
    one.submit("urgent", 400, priority=0)
    assert step(one).tokens == {"chat": 1, "document": 100}


def test_decodes_count_too_where_nothing_can_be_formed_while_they_are_in_a_stage() -> None:
    """Two stages, of 6 ms for the prompt and 5.1 ms for a decode: the sixth step of `chat` begins at 54 ms, and the first half of it is idle."""
    one = harness("mixed_prefill_governor", GOVERNOR, pipeline_stages=2)
    one.run([RequestSpec("chat", 0.0, 10, 10), RequestSpec("document", 0.012 + 5 * 0.0102, 250, 1)])
    begun = next(each for each in one.steps if "document" in each.tokens)
    assert begun.tokens == {"chat": 1, "document": 100}


# Minimum-chunk hold

HOLD = {"chunk_size": 1000, "min_chunk": 100, "max_delay_steps": 4}


def test_a_small_chunk_is_held_back_for_so_many_steps_and_a_large_one_not() -> None:
    one = with_chat("min_chunk_hold", HOLD)
    one.submit("small", 60)
    assert [prompt_tokens(step(one)) for _ in range(5)] == [0, 0, 0, 0, 60]
    one.submit("large", 150)
    assert prompt_tokens(step(one)) == 150


def test_small_chunks_are_released_together_once_they_make_up_a_large_one() -> None:
    one = with_chat("min_chunk_hold", HOLD)
    one.submit("small", 60)
    assert prompt_tokens(step(one)) == 0
    one.submit("other", 40)
    assert step(one).tokens == {"chat": 1, "small": 60, "other": 40}


def test_a_small_chunk_that_is_held_back_does_not_hold_up_a_large_one_behind_it() -> None:
    one = with_chat("min_chunk_hold", HOLD)
    one.submit("small", 60)
    assert prompt_tokens(step(one)) == 0
    one.submit("large", 150)
    assert step(one).tokens == {"chat": 1, "large": 150}


def test_nothing_is_held_back_while_nobody_decodes() -> None:
    one = harness("min_chunk_hold", HOLD)
    one.submit("small", 60)
    assert step(one).tokens == {"small": 60}


# Bounded waves


def waves(**options: Any) -> Harness:
    return harness("prefill_waves", {"chunk_size": 1000, "wave_slots": 2}, max_batch_size=4, **options)


def test_steps_are_of_decodes_alone_while_they_fill_the_batch_and_then_a_wave_of_prompts_comes() -> None:
    one = waves()
    for index in range(4):
        one.submit(f"d{index}", 10, 4 if index == 1 else 20)
    step(one)
    step(one)
    for index in range(3):
        one.submit(f"p{index}", 30, 5)
    alone = step(one)
    assert alone.tokens == {f"d{index}": 1 for index in range(4)}
    wave = [step(one) for _ in range(2)][-1]
    assert wave.tokens == {"d0": 1, "d2": 1, "p0": 30, "p1": 30}, "two slots of the wave; the last decode is paused"
    assert one.request("d3").is_resident
    later = step(one)
    assert all(tokens == 1 for tokens in later.tokens.values()), "five decode, so that the batch is full again"
    assert len(later.tokens) == 4


def test_slots_that_no_prompt_uses_go_to_decodes() -> None:
    one = waves()
    for index in range(3):
        one.submit(f"d{index}", 10, 20)
        step(one)
    one.submit("p", 30, 5)
    assert step(one).tokens == {"d0": 1, "d1": 1, "d2": 1, "p": 30}


@pytest.mark.parametrize("name", ["p_pas", "mixed_prefill_governor", "min_chunk_hold", "prefill_waves"])
def test_each_has_a_prompt_alone_computed_in_the_largest_chunks(name: str) -> None:
    one = harness(name, {"chunk_size": 300})
    one.submit("document", 700)
    assert [each.num_tokens for each in one.steps_until_idle()] == [300, 300, 100]
