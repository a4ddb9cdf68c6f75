"""How does the shared loop form a step: who runs, who is preempted, who is passed over?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from vajra_policies.fixed_chunk import FixedChunk, FixedChunkConfig
from vajra_py.contract import (
    ChunksSoloPrompts,
    DecodeStop,
    KeyMotion,
    PreemptionMode,
    Refusal,
    ReplicaScheduler,
    SteadyState,
    fill,
)
from vajra_py.errors import ConfigError
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.testing.harness import Harness, HarnessOptions, Step
from vajra_py.workload.request import PromptContent


def fixed(chunk_size: int = 2048, **params: Any) -> tuple[str, dict[str, Any]]:
    return "fixed_chunk", {"chunk_size": chunk_size, **params}


def stepped(harness: Harness) -> Step:
    step = harness.step()
    assert step is not None
    return step


def test_is_a_replica_scheduler_that_chunks_lone_prompts() -> None:
    policy = FixedChunk(FixedChunkConfig(), Harness("fcfs", "round_robin", fixed()).context)
    scheduler: ReplicaScheduler = policy
    chunks: ChunksSoloPrompts = policy
    assert isinstance(scheduler, ReplicaScheduler)
    assert chunks.solo_chunk_size(0, 5000) == 2048
    assert chunks.solo_chunk_size(4096, 904) == 904
    assert policy.traits.repeats_decodes == set(SteadyState)


# Chunks of a fixed budget


def test_a_fixed_chunk_leaves_room_for_decodes() -> None:
    harness = Harness("fcfs", "round_robin", fixed(100))
    for name in "ab":
        harness.submit(name, 10, 50)
    stepped(harness)
    harness.submit("long", 500, 1)
    assert stepped(harness).tokens == {"a": 1, "b": 1, "long": 98}
    assert stepped(harness).tokens == {"a": 1, "b": 1, "long": 98}


def test_prompts_share_the_budget_in_order_of_urgency() -> None:
    harness = Harness("priority", "round_robin", fixed(100))
    harness.submit("late", 70, priority=2)
    harness.submit("first", 80, priority=0)
    harness.submit("second", 30, priority=1)
    assert stepped(harness).tokens == {"first": 80, "second": 20}
    assert stepped(harness).tokens == {"second": 10, "late": 70}


def test_the_replica_s_own_budget_counts_too() -> None:
    harness = Harness("fcfs", "round_robin", fixed(100), HarnessOptions(max_batch_tokens=30))
    harness.submit("a", 100)
    assert stepped(harness).tokens == {"a": 30}


def test_a_more_urgent_arrival_overtakes_a_prompt_in_progress() -> None:
    harness = Harness("priority", "round_robin", fixed(32))
    harness.submit("slow", 100, priority=5)
    stepped(harness)
    harness.submit("fast", 20, priority=0)
    assert stepped(harness).tokens == {"fast": 20, "slow": 12}


class GivenKeys:
    """A prioritizer whose keys are set from outside."""

    key_motion = KeyMotion.ARBITRARY

    def __init__(self, **keys: float) -> None:
        self.keys = keys

    def key(self, request: Any, now: float) -> float:
        return self.keys[request.request_id]


def test_a_prompt_in_progress_wins_ties() -> None:
    given = GivenKeys(older=1.0, begun=0.0)
    harness = Harness(given, "round_robin", fixed(32))
    harness.submit("older", 90)
    harness.submit("begun", 90)
    assert stepped(harness).tokens == {"begun": 32}
    given.keys["older"] = 0.0
    assert stepped(harness).tokens == {"begun": 32}, "though the other one arrived earlier"
    given.keys["older"] = -1e-9
    assert stepped(harness).tokens == {"older": 32}


def test_what_is_cached_is_not_computed_again() -> None:
    harness = Harness("fcfs", "round_robin", fixed(64), HarnessOptions(prefix_cache=PrefixCacheOptions()))
    content = PromptContent((("shared", 80),))
    harness.submit("a", 80, content=content)
    harness.steps_until_idle()
    harness.submit("b", 80, content=content)
    assert stepped(harness).tokens == {"b": 16}


# Who is preempted


def squeezed(harness: Harness, *names: str) -> None:
    """Requests of 31 tokens that fill their two blocks with the next token and then need a third."""
    for name, priority in zip(names, (0, 1, 2), strict=False):
        harness.submit(name, 31, 30, priority=priority)
    stepped(harness)
    stepped(harness)


def test_the_least_urgent_decode_gives_way_whatever_its_age() -> None:
    harness = Harness("priority", "round_robin", fixed(), HarnessOptions(num_blocks=4))
    harness.submit("least", 30, 30, priority=9)
    stepped(harness)
    harness.submit("most", 31, 30, priority=0)
    stepped(harness)
    stepped(harness)
    step = stepped(harness)
    assert step.preempted == (("least", "recompute"),), "the one admitted last would be the wrong victim"
    assert step.tokens == {"most": 1}


def test_a_decode_that_is_itself_the_least_urgent_gives_way() -> None:
    harness = Harness("priority", "round_robin", fixed(), HarnessOptions(num_blocks=5))
    squeezed(harness, "most", "mid")
    assert harness.replica().memory.free_blocks == 1
    step = stepped(harness)
    assert step.preempted == (("mid", "recompute"),)
    assert step.tokens == {"most": 1}


def test_a_partial_prefill_gives_way_before_any_decode() -> None:
    harness = Harness("priority", "round_robin", fixed(40), HarnessOptions(num_blocks=6))
    harness.submit("decoding", 31, 30, priority=5)
    stepped(harness)
    harness.submit("urgent", 64, 1, priority=0)
    assert stepped(harness).tokens == {"decoding": 1, "urgent": 39}
    step = stepped(harness)
    assert step.preempted == (("urgent", "recompute"),)
    assert step.tokens == {"decoding": 1}


def test_among_partial_prefills_the_least_urgent_gives_way() -> None:
    harness = Harness("priority", "round_robin", fixed(33), HarnessOptions(num_blocks=8))
    harness.submit("decoding", 30, 40, priority=5)
    stepped(harness)
    harness.submit("less", 48, 1, priority=2)
    assert stepped(harness).tokens == {"decoding": 1, "less": 32}
    harness.submit("more", 48, 1, priority=1)
    assert stepped(harness).tokens == {"decoding": 1, "more": 32}
    step = stepped(harness)  # the decode needs a third block, and each prompt holds three
    assert step.preempted == (("less", "recompute"),)
    assert step.tokens == {"decoding": 1, "more": 16}


def test_several_give_way_in_order_until_there_is_room() -> None:
    """Three decodes need a block at once and none is free: the least urgent goes, and its blocks serve the others."""
    harness = Harness("priority", "round_robin", fixed(), HarnessOptions(num_blocks=6))
    squeezed(harness, "a", "b", "c")
    assert harness.replica().memory.free_blocks == 0
    step = stepped(harness)
    assert step.preempted == (("c", "recompute"),)
    assert step.tokens == {"a": 1, "b": 1}


def test_the_victim_is_not_admitted_again_in_the_same_step_and_does_not_use_up_the_skips() -> None:
    harness = Harness("fcfs", "round_robin", fixed(), HarnessOptions(num_blocks=4))
    squeezed(harness, "a", "b")
    step = stepped(harness)
    assert step.preempted == (("b", "recompute"),)
    assert step.admitted == []
    harness.submit("c", 10)
    rest = harness.steps_until_idle()
    assert harness.controller.num_alive == 0
    resumed = next(entry for step in rest for entry in step.entries if entry.kind == "resumed")
    assert (resumed.request_id, resumed.num_tokens) == ("b", 33), "prompt and generated tokens are computed again"


def test_victims_do_not_use_up_what_may_be_passed_over() -> None:
    """24 decodes need a second block each and there is one: twelve are preempted, and a new prompt still gets in."""
    harness = Harness("fcfs", "round_robin", fixed(), HarnessOptions(num_blocks=25, max_batch_size=64))
    for index in range(24):
        harness.submit(f"r{index}", 15, 20)
    stepped(harness)
    stepped(harness)
    harness.submit("new", 10)
    step = stepped(harness)
    assert [victim for victim, _ in step.preempted] == [f"r{index}" for index in range(23, 11, -1)]
    assert step.admitted == ["new"]


def test_swapped_requests_keep_what_they_computed() -> None:
    sizes = HarnessOptions(num_blocks=4, host_blocks=4)
    harness = Harness("fcfs", "round_robin", fixed(preemption="swap"), sizes)
    squeezed(harness, "a", "b")
    assert stepped(harness).preempted == (("b", "swap"),)
    rest = harness.steps_until_idle()
    resumed = next(entry for step in rest for entry in step.entries if entry.kind == "resumed")
    assert (resumed.request_id, resumed.num_tokens, resumed.num_computed_before) == ("b", 1, 32)


def test_a_full_host_means_recompute() -> None:
    sizes = HarnessOptions(num_blocks=4, host_blocks=1)
    harness = Harness("fcfs", "round_robin", fixed(preemption="swap"), sizes)
    squeezed(harness, "a", "b")
    assert stepped(harness).preempted == (("b", "recompute"),)
    harness.steps_until_idle()
    assert harness.controller.num_alive == 0


@pytest.mark.parametrize("policy", ["fixed_chunk", "dynamic_chunk", "space_sharing"])
def test_swapping_needs_somewhere_to_swap_to(policy: str) -> None:
    with pytest.raises(ConfigError, match=r"host_blocks is 0"):
        Harness("lrs", "round_robin", (policy, {"preemption": "swap"}))


# Who is admitted


def test_a_prompt_reserves_all_its_blocks_and_the_watermark_stays_free() -> None:
    harness = Harness("fcfs", "round_robin", fixed(16), HarnessOptions(num_blocks=12, watermark_blocks=2))
    harness.submit("a", 64)
    assert stepped(harness).free_blocks == 8
    harness.submit("b", 112)  # 7 blocks: 1 would be left
    harness.submit("c", 96)  # 6 blocks
    for _ in range(3):
        stepped(harness)
    assert harness.request("b").num_computed_tokens == harness.request("c").num_computed_tokens == 0
    assert stepped(harness).tokens == {"b": 16}, "alone on the replica, the watermark does not hold it back"
    assert harness.request("a").end_reason is not None


def test_a_smaller_prompt_goes_ahead_of_one_that_does_not_fit() -> None:
    harness = Harness("fcfs", "round_robin", fixed(), HarnessOptions(num_blocks=10))
    harness.submit("running", 80, 20)
    stepped(harness)
    harness.submit("large", 100)
    harness.submit("small", 30)
    assert stepped(harness).tokens == {"running": 1, "small": 30}


@pytest.mark.parametrize(("num_large", "is_reached"), [(9, True), (10, False)])
def test_a_step_looks_past_ten_prompts_at_most(num_large: int, is_reached: bool) -> None:
    sizes = HarnessOptions(num_blocks=10, max_batch_size=64)
    harness = Harness("fcfs", "round_robin", fixed(), sizes)
    harness.submit("running", 80, 20)
    stepped(harness)
    for index in range(num_large):
        harness.submit(f"large{index}", 100)
    harness.submit("small", 30)
    assert ("small" in stepped(harness).tokens) is is_reached


def test_prompts_in_progress_go_on_behind_any_number_that_do_not_fit() -> None:
    """Urgent prompts wait for memory that less urgent ones hold: those must be finished, or nothing ever moves."""
    harness = Harness("priority", "round_robin", fixed(16), HarnessOptions(num_blocks=10, max_batch_size=64))
    harness.submit("holds", 100, priority=9)
    stepped(harness)
    for index in range(12):
        harness.submit(f"urgent{index}", 100, priority=0)
    assert stepped(harness).tokens == {"holds": 16}
    harness.steps_until_idle()
    assert harness.controller.num_alive == 0


def test_a_full_batch_admits_nobody() -> None:
    harness = Harness("priority", "round_robin", fixed(), HarnessOptions(max_batch_size=2))
    for name in "ab":
        harness.submit(name, 10, 5, priority=1)
    stepped(harness)
    harness.submit("c", 10, priority=0)
    assert stepped(harness).tokens == {"a": 1, "b": 1}


def test_prompts_that_hold_all_memory_between_them_do_not_wait_for_each_other() -> None:
    """With incremental reservation two prompts can each hold half of the blocks that each of them needs."""
    sizes = HarnessOptions(num_blocks=8, reserve_prompt=False)
    harness = Harness("priority", "round_robin", fixed(64), sizes)
    harness.submit("less", 100, 2, priority=1)
    assert stepped(harness).tokens == {"less": 64}
    harness.submit("more", 120, 2, priority=0)
    assert stepped(harness).tokens == {"more": 64}
    step = stepped(harness)
    assert step.preempted == (("less", "recompute"),)
    assert step.tokens == {"more": 56}
    harness.steps_until_idle()
    assert harness.controller.num_alive == 0


# What a step costs


class CountingReplica:
    """A replica with nothing to do but decode; any list that is asked for is an error."""

    num_waiting = 0
    num_partial_prefills = 0
    num_decodes = num_running = 1000

    def partial_prefills(self) -> Any:
        raise AssertionError("a list of partial prefills was made")

    decodes = running = waiting = partial_prefills


class FakeBatch:
    """A batch that takes all decodes, or refuses one in a given way."""

    def __init__(self, *stops: Refusal, slots_left: int = 5) -> None:
        self.slots_left = slots_left
        self.tokens_left = 1 << 60
        self.num_requests = 1
        self.free_blocks = 0
        self.stops = [DecodeStop("needing", refusal) for refusal in stops]  # type: ignore[arg-type]
        self.preempted: list[tuple[Any, PreemptionMode]] = []

    def add_decodes(self) -> DecodeStop | None:
        return self.stops.pop(0) if self.stops else None

    def preempt(self, request: Any, mode: PreemptionMode = PreemptionMode.RECOMPUTE) -> Refusal | None:
        self.preempted.append((request, mode))
        return Refusal.IN_FLIGHT


def never(request: Any, batch: Any, replica: Any) -> int:
    raise AssertionError("no prompt may be looked at")


def test_a_step_of_decodes_alone_looks_at_nothing() -> None:
    fill(CountingReplica(), FakeBatch(), never)  # type: ignore[arg-type]


def test_a_full_batch_is_noticed_before_the_queue_is_touched() -> None:
    replica = CountingReplica()
    replica.num_waiting = 100_000
    fill(replica, FakeBatch(slots_left=0), never)  # type: ignore[arg-type]


def test_a_victim_that_cannot_give_way_ends_the_step() -> None:
    class Replica(CountingReplica):
        def partial_prefills(self) -> Any:
            return ["stuck"]

        def waiting(self) -> Iterator[Any]:
            return iter(())

    batch: Any = FakeBatch(Refusal.KV_BLOCKS, Refusal.KV_BLOCKS, slots_left=0)
    replica: Any = Replica()
    fill(replica, batch, never, PreemptionMode.SWAP)
    assert batch.preempted == [("stuck", PreemptionMode.SWAP), ("stuck", PreemptionMode.RECOMPUTE)]
    assert len(batch.stops) == 1, "it does not ask again and again"


class ListedReplica(CountingReplica):
    """A replica with these requests, all as urgent as each other."""

    def __init__(self, partial: Sequence[Any] = (), waiting: Sequence[Any] = ()) -> None:
        self._partial, self._waiting = partial, waiting
        self.num_partial_prefills, self.num_waiting = len(partial), len(waiting)

    def partial_prefills(self) -> Any:
        return list(self._partial)

    def waiting(self) -> Iterator[Any]:
        return iter(self._waiting)

    def urgency(self, request: Any) -> tuple[int]:
        return (0,)


class PromptBatch(FakeBatch):
    """A batch that asks a function about each chunk, and notes who is preempted."""

    def __init__(self, add: Callable[[Any, Any, int], Refusal | None], **figures: int) -> None:
        super().__init__()
        self.__dict__.update(figures)
        self._add = add

    def __contains__(self, request: object) -> bool:
        return False

    def add(self, request: Any, num_tokens: int) -> Refusal | None:
        return self._add(self, request, num_tokens)

    def preempt(self, request: Any, mode: PreemptionMode = PreemptionMode.RECOMPUTE) -> Refusal | None:
        self.preempted.append(request)
        return None


def filled(replica: Any, batch: Any, num_tokens: int) -> None:
    fill(replica, batch, lambda request, batch, replica: min(num_tokens, batch.tokens_left))


def test_partial_prefills_wait_for_steps_in_flight_before_they_take_memory_from_each_other() -> None:
    for num_running, num_preempted in ((3, 0), (2, 1)):
        batch = PromptBatch(lambda *about: Refusal.KV_BLOCKS, num_requests=0)
        replica = ListedReplica([SimpleNamespace(is_resident=True), SimpleNamespace(is_resident=True)])
        replica.num_running = num_running
        filled(replica, batch, 5)
        assert len(batch.preempted) == num_preempted


def test_chunks_of_one_token_are_chunks() -> None:
    added: list[tuple[str, int]] = []
    batch = PromptBatch(lambda batch, request, num_tokens: added.append((request, num_tokens)), free_blocks=9)
    filled(ListedReplica(waiting="ab"), batch, 1)
    assert added == [("a", 1), ("b", 1)]


def test_partial_prefills_give_way_until_the_most_urgent_has_room() -> None:
    urgent, *others = [SimpleNamespace(is_resident=True) for _ in range(4)]

    def add(batch: Any, request: Any, num_tokens: int) -> Refusal | None:
        return None if len(batch.preempted) == 2 else Refusal.KV_BLOCKS

    batch, replica = PromptBatch(add, num_requests=0), ListedReplica([urgent, *others])
    replica.num_running = 4
    filled(replica, batch, 5)
    assert batch.preempted == [others[2], others[1]]


@pytest.mark.parametrize("params", [{"chunk_size": 0}, {"chunk_size": -5}, {"preemption": "drop"}, {"chunk": 5}])
def test_wrong_parameters_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(params))):
        Harness("fcfs", "round_robin", ("fixed_chunk", params))


@pytest.mark.parametrize(("slots", "tokens", "expected"), [(3, 100, "abc"), (10, 5, "abc"), (10, 1, "a")])
def test_the_last_place_and_the_last_token_are_given(slots: int, tokens: int, expected: str) -> None:
    def add(batch: Any, request: Any, num_tokens: int) -> None:
        added.append(request)
        batch.slots_left -= 1
        batch.tokens_left -= num_tokens

    added: list[str] = []
    filled(ListedReplica(waiting="abcd"), PromptBatch(add, free_blocks=9, slots_left=slots, tokens_left=tokens), 2)
    assert "".join(added) == expected
