"""Requests that run, are paused and are preempted under `preemptive`, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from vajra_py.errors import ConfigError
from vajra_py.testing.harness import Harness, HarnessOptions, Step


def harness(prioritizer: Any = "priority", params: dict[str, Any] | None = None, **options: Any) -> Harness:
    return Harness(prioritizer, "round_robin", ("preemptive", params or {}), HarnessOptions(**options))


def step(one: Harness) -> Step:
    done = one.step()
    assert done is not None
    return done


def test_a_more_urgent_request_takes_the_slot_and_the_other_keeps_its_memory() -> None:
    one = harness(max_batch_size=1)
    one.submit("late", 40, 5, priority=1)
    step(one)
    one.submit("urgent", 30, 2, priority=0)
    assert step(one).tokens == {"urgent": 30}
    assert one.request("late").is_resident
    assert step(one).tokens == {"urgent": 1}
    assert step(one).tokens == {"late": 1}, "it goes on where it was: nothing is computed again"
    one.steps_until_idle()
    assert one.request("late").num_preemptions == 0


def test_memory_is_taken_from_the_least_urgent_alone_and_only_as_much_as_is_needed() -> None:
    one = harness(num_blocks=9, max_batch_size=8)
    for name, priority in (("b", 2), ("c", 3), ("a", 1)):
        one.submit(name, 40, 8, priority=priority)
    step(one)
    assert one.replica().running_set.num_running == 3
    one.submit("urgent", 40, 2, priority=0)
    taken = step(one)
    assert [name for name, _ in taken.preempted] == ["c"]
    assert taken.tokens == {"urgent": 40, "a": 1, "b": 1}


def test_nobody_is_preempted_in_vain() -> None:
    one = harness(num_blocks=9)
    one.submit("first", 80, 20, priority=0)
    one.submit("small", 30, 20, priority=2)
    step(one)
    one.submit("large", 100, 2, priority=1)
    one.submit("tiny", 4, 2, priority=3)
    after = step(one)
    assert not after.preempted, "what `small` holds would not do for `large`"
    assert after.tokens == {"first": 1, "small": 1}, "and nobody is admitted past it"


def test_who_came_first_is_never_preempted_for_who_came_later() -> None:
    one = harness("fcfs", num_blocks=20, max_batch_size=3)
    for index in range(12):
        one.submit(f"r{index}", 50, 6)
    steps = one.steps_until_idle()
    assert not any(one.preempted for one in steps)
    admitted = [name for one in steps for name in one.admitted]
    assert admitted == [f"r{index}" for index in range(12)]


def test_decodes_behind_a_prompt_keep_their_token() -> None:
    one = harness(params={"chunk_size": 64})
    one.submit("chat", 10, 9, priority=1)
    step(one)
    one.submit("document", 200, 1, priority=0)
    assert step(one).tokens == {"document": 63, "chat": 1}


def test_a_preempted_request_does_not_preempt_in_turn() -> None:
    class MoreUrgentWithoutMemory:
        """Whoever lacks memory is more urgent than whoever has some: the keys of two requests change places for ever."""

        from vajra_py.contract import KeyMotion

        key_motion = KeyMotion.PROGRESS

        def key(self, request: Any, now: float) -> float:
            return float(request.num_computed_tokens)

    one = Harness(MoreUrgentWithoutMemory(), "round_robin", "preemptive", HarnessOptions(num_blocks=8))
    for index in range(6):
        one.submit(f"r{index}", 60, 10)
    steps = one.steps_until_idle()
    assert sum(len(each.preempted) for each in steps) <= 6
    assert all(one.request(f"r{index}").num_output_tokens == 10 for index in range(6))


def test_swapped_requests_come_back_without_being_computed_again() -> None:
    options: dict[str, Any] = {"num_blocks": 4, "host_blocks": 8, "bytes_per_block": 1}
    one = harness(params={"preemption": "swap"}, **options)
    one.submit("late", 50, 6, priority=1)
    step(one)
    one.submit("urgent", 30, 2, priority=0)
    assert step(one).preempted == (("late", "swap"),)
    one.steps_until_idle()
    assert sum(each.tokens.get("late", 0) for each in one.steps) == 50 + 5


def test_swapping_needs_somewhere_to_swap_to() -> None:
    with pytest.raises(ConfigError, match="host_blocks"):
        harness(params={"preemption": "swap"})
