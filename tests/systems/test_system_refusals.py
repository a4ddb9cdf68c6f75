"""Where the systems' own code crashes, stalls, loses a request or reads a wrong block: what happens here instead?

The names in brackets are those of the cases in the study of the engines. Each case is refused at submission with a reason, or
behaves as the system's documentation means it.
"""

from __future__ import annotations

from typing import Any

import pytest

from vajra_py.contract import Layer
from vajra_py.contract.observer import EndReason
from vajra_py.errors import PolicyError
from vajra_py.plugins import build_policy
from vajra_py.runtime.kv import PrefixCacheOptions
from vajra_py.runtime.requests.request import Request
from vajra_py.testing.harness import Harness, HarnessOptions
from vajra_py.workload.request import PromptContent, RequestSpec

NANO_CACHE = PrefixCacheOptions(reuse_order="fifo", duplicates="keep_last")
MINI_CACHE = PrefixCacheOptions(
    reuse_order="fifo", release_order="head_first", retain_freed=False, duplicates="keep_last"
)
FCFS = ("fcfs", {"preempted": "first"})
WHOLE = ("nano_vllm", {"prefill": "whole", "prefill_budget_tokens": 32})
CHUNKS = ("nano_vllm", {"prefill": "chunk_first", "prefill_budget_tokens": 32})
ENGINES: list[Any] = [WHOLE, CHUNKS, "minivllm", "nano_vllm_rs", "vllm_v1", "orca"]


def harness_of(scheduler: Any, prioritizer: Any = FCFS, **sizes: Any) -> Harness:
    return Harness(
        prioritizer,
        "round_robin",
        scheduler,
        HarnessOptions(**{"block_size": 4, "num_blocks": 16, "max_batch_size": 8, **sizes}),
    )


def submit(harness: Harness, name: str, prompt: int, output: int, **facts: Any) -> Request:
    """A request whose client allows just the output that it will get."""
    return harness.submit(name, prompt, output, max_tokens=output, **facts)


def same_prompt(name: str, num_tokens: int, output: int) -> RequestSpec:
    content = PromptContent((("the same", num_tokens),))
    return RequestSpec(name, 0.0, num_tokens, output, max_tokens=output, content=content)


def assert_refused(request: Request, *words: str) -> None:
    assert request.end_reason is EndReason.REJECTED
    for word in words:
        assert word in request.detail


def assert_serves(harness: Harness, *names: str) -> None:
    """Everyone else is served, and every block comes back."""
    harness.steps_until_idle()
    for name in names:
        assert harness.request(name).end_reason in (EndReason.LENGTH, EndReason.STOP)
    assert harness.replica().memory.free_blocks == harness.options.num_blocks


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_sequence_that_outgrows_memory_is_refused(engine: Any) -> None:
    """[x1: preempts itself, then an assertion; in vLLM for ever]"""
    harness = harness_of(engine)
    assert_refused(submit(harness, "too long", 20, 46), "can never fit into the KV memory")
    submit(harness, "fits exactly", 20, 11)
    assert_serves(harness, "fits exactly")


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_prompt_larger_than_memory_is_refused_and_blocks_nobody(engine: Any) -> None:
    """[x2: never leaves the head of the queue]"""
    harness = harness_of(engine)
    assert_refused(submit(harness, "huge", 65, 1), "KV memory")
    submit(harness, "behind", 8, 3)
    assert_serves(harness, "behind")


def test_a_prompt_above_the_budget_of_whole_prompts_is_refused() -> None:
    """[x3: never leaves the head of the queue]"""
    harness = harness_of(WHOLE)
    assert_refused(submit(harness, "long", 33, 1), "33 + 1 tokens", "at most 32 tokens")
    submit(harness, "behind", 8, 3)
    assert_serves(harness, "behind")


def test_a_sequence_that_outgrows_the_budget_is_refused() -> None:
    """[x4: cannot come back once it was preempted]"""
    harness = harness_of(WHOLE)
    assert_refused(submit(harness, "grows", 30, 4), "at most 32 tokens")
    submit(harness, "grows to the limit", 30, 3)
    assert_serves(harness, "grows to the limit")


def test_what_whole_prompts_refuse_chunks_serve() -> None:
    harness = harness_of(CHUNKS)
    submit(harness, "long", 50, 5)
    assert_serves(harness, "long")


def test_minivllm_refuses_what_outgrows_its_budget() -> None:
    """[x3, x4 of MinivLLM: stalls with an empty batch]"""
    harness = harness_of("minivllm", max_batch_tokens=20)
    assert_refused(submit(harness, "long", 21, 1), "at most 20 tokens")
    assert_refused(submit(harness, "grows", 18, 4), "at most 20 tokens")
    submit(harness, "behind", 18, 3)
    assert_serves(harness, "behind")


def test_vllm_without_chunks_refuses_what_outgrows_its_budget() -> None:
    """[the head of the queue waits for ever]"""
    harness = harness_of(("vllm_v1", {"chunked_prefill": False}), max_batch_tokens=20)
    assert_refused(submit(harness, "long", 21, 1), "without chunked prefill")
    submit(harness, "behind", 18, 3)
    assert_serves(harness, "behind")


def test_the_rust_engine_without_chunks_refuses_what_outgrows_its_budget() -> None:
    """[goes on above the limit, if it is first]"""
    scheduler = ("nano_vllm_rs", {"chunked_prefill": False, "prefill_budget_tokens": 20})
    harness = harness_of(scheduler, "priority")
    assert_refused(submit(harness, "long", 21, 1), "at most 20 prompt tokens")
    submit(harness, "behind", 18, 3)
    assert_serves(harness, "behind")


def test_orca_refuses_a_prompt_that_no_step_holds() -> None:
    harness = harness_of("orca", "fcfs", max_batch_tokens=20)
    assert_refused(submit(harness, "long", 21, 1), "at most 20 tokens")
    submit(harness, "behind", 20, 30)
    assert_serves(harness, "behind")


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_no_room_for_output_is_refused(engine: Any) -> None:
    """[max_tokens 0 never stops; vLLM's front end refuses prompts of the model's length]"""
    harness = harness_of(engine, max_model_len=30)
    assert_refused(submit(harness, "fills the model", 30, 1), "no room for output")
    submit(harness, "one token", 29, 9)
    harness.steps_until_idle()
    assert harness.request("one token").num_output_tokens == 1


@pytest.mark.parametrize(("engine", "cache"), [(WHOLE, NANO_CACHE), (CHUNKS, NANO_CACHE), ("minivllm", MINI_CACHE)])
def test_a_prompt_that_is_cached_whole_still_computes_a_token(engine: Any, cache: PrefixCacheOptions) -> None:
    """[x5: scheduled with no token at all, and samples from another sequence's logits]"""
    harness = harness_of(engine, prefix_cache=cache)
    harness.submit_spec(same_prompt("first", 8, 6))
    harness.step()
    harness.submit_spec(same_prompt("second", 8, 6))
    step = harness.step()
    assert step is not None
    assert step.tokens == {"second": 4}
    assert step.entries[0].num_computed_before == 4
    assert_serves(harness, "first", "second")


def test_a_reused_block_is_not_found_under_its_old_prefix() -> None:
    """[x8: the old dictionary entry names a block that meanwhile holds the same own tokens behind another prefix]"""
    harness = harness_of(WHOLE, prefix_cache=NANO_CACHE, num_blocks=2)

    def prompt(name: str, *tokens: int) -> RequestSpec:
        return RequestSpec(name, 0.0, len(tokens), 1, max_tokens=1, prompt_token_ids=tokens)

    same = (7, 7, 7, 7)
    harness.submit_spec(prompt("a", 1, 1, 1, 1, *same))
    harness.steps_until_idle()
    harness.submit_spec(prompt("b", 2, 2, 2, 2, *same))  # takes both blocks again; the second holds equal own tokens
    harness.steps_until_idle()
    harness.submit_spec(prompt("c", 1, 1, 1, 1, *same))
    steps = harness.steps_until_idle()
    assert steps[0].tokens == {"c": 8}


def test_a_hit_behind_a_miss_does_not_count() -> None:
    """[x9, MinivLLM: blocks found behind one that was not are counted as a prefix]"""
    harness = harness_of("minivllm", prefix_cache=MINI_CACHE)

    def prompt(name: str, tokens: list[int], output: int) -> RequestSpec:
        return RequestSpec(name, 0.0, len(tokens), output, max_tokens=output, prompt_token_ids=tuple(tokens))

    first, second = [1] * 4, [2] * 4
    harness.submit_spec(prompt("owner", [*first, *second, 3], 30))
    harness.step()
    harness.submit_spec(prompt("twin", [*first], 1))  # enters the first block anew, over the owner's entry, and ends
    harness.step()
    harness.submit_spec(prompt("late", [*first, *second, 9], 2))
    step = harness.step()
    assert step is not None
    computed_before = step.entries[0].num_computed_before
    assert computed_before in (0, 8)  # the whole run or nothing, never the second block alone
    assert_serves(harness, "owner", "twin", "late")


def test_blocks_of_one_token_work() -> None:
    """[block_size 1: a growing sequence is never given a block, or an index runs out]"""
    for engine in (WHOLE, CHUNKS, "minivllm"):
        harness = harness_of(engine, block_size=1, num_blocks=30)
        for index in range(3):
            submit(harness, f"r{index}", 5, 12)
        assert_serves(harness, "r0", "r1", "r2")
        assert sum(harness.request(f"r{index}").num_preemptions for index in range(3)) > 0


def test_minivllm_loses_nobody_beyond_its_limits() -> None:
    """[y4, y5: preempted and deferred sequences vanish from every queue]"""
    harness = harness_of("minivllm", max_batch_size=2, max_batch_tokens=20, num_blocks=12)
    names = [f"r{index}" for index in range(7)]
    for name in names:
        submit(harness, name, 6, 9)
    assert_serves(harness, *names)
    assert max(len(step.entries) for step in harness.steps) == 2
    assert sum(harness.request(name).num_preemptions for name in names) > 0


def test_minivllm_gives_back_blocks_once_their_last_owner_leaves() -> None:
    """[y1 to y3: blocks of one owner never come back, shared ones are freed by the first to leave]"""
    harness = harness_of("minivllm", prefix_cache=MINI_CACHE)
    harness.submit_spec(same_prompt("short", 9, 2))
    harness.submit_spec(same_prompt("long", 9, 10))
    harness.step()
    harness.step()
    assert harness.request("short").end_reason is not None
    assert harness.replica().memory.num_held_blocks(harness.request("long")) == 3
    assert harness.replica().memory.free_blocks == 13
    assert_serves(harness, "short", "long")


def test_minivllm_stops_at_the_first_token_boundary_of_every_kind() -> None:
    """[y6 to y8: prompts of k and k + 1 blocks crash or never stop]"""
    for prompt in (3, 4, 5, 8, 9):
        for output in (1, 2, 6):
            harness = harness_of("minivllm")
            submit(harness, "r", prompt, output)
            assert_serves(harness, "r")
            assert harness.request("r").num_output_tokens == output


def test_an_aborted_request_that_waits_counts_no_more() -> None:
    """[Rust: its heap entry stays and counts as a waiter for preemption]"""
    harness = harness_of("nano_vllm_rs", "priority", host_blocks=16)
    submit(harness, "running", 30, 20, priority=1)
    harness.step()
    submit(harness, "urgent", 60, 1, priority=0)
    assert harness.controller.abort("urgent", EndReason.ABORTED, 10**12)
    harness.steps_until_idle()
    assert harness.request("running").num_preemptions == 0


def test_a_policy_that_fails_while_refusing_is_named() -> None:
    class Failing:
        def schedule(self, replica: Any, batch: Any, now: float) -> None:
            """Never reached."""

        def refuses(self, request: Any, replica: Any, now: float) -> str | None:
            raise KeyError("tenant")

    harness = harness_of(Failing())
    with pytest.raises(PolicyError, match=r"Failing.*KeyError"):
        submit(harness, "r", 5, 5)


def test_prompts_of_minivllm_may_use_up_the_budget() -> None:
    harness = harness_of("minivllm", max_batch_tokens=20)
    for name in ("a", "b"):
        submit(harness, name, 10, 2)
    submit(harness, "c", 4, 2)
    first, second = (harness.step(), harness.step())
    assert first is not None
    assert first.tokens == {"a": 10, "b": 10}
    assert second is not None
    assert second.tokens == {"c": 4}


def test_vllm_keeps_its_watermark_free_where_a_chunk_needs_more_blocks_than_the_whole_prompt() -> None:
    """[sliding windows leave blocks of a prompt behind between steps, so that all of it may take fewer than one chunk]"""

    class Batch:
        num_preempted, tokens_left, free_blocks = 0, 100, 10

        def __init__(self, chunk_blocks: int) -> None:
            self.chunk_blocks = chunk_blocks
            self.added: list[int] = []

        def add_running(self, cap: int | None) -> None:
            """Nothing is in the way."""

        def cached_tokens(self, request: Any) -> int:
            return 0

        def max_chunk(self, request: Any) -> int:
            return 1000

        def blocks_needed(self, request: Any, num_tokens: int, *, in_steps: bool = False) -> int:
            return 5 if in_steps else self.chunk_blocks

        def add(self, request: Any, num_tokens: int, *, reserve_tokens: int) -> None:
            self.added.append(num_tokens)

    class Replica:
        num_running = num_waiting = 1

        def waiting(self) -> Any:
            return iter([type("Asked", (), {"num_known_tokens": 1000})])

    context = harness_of("vllm_v1", num_blocks=10).context
    scheduler = build_policy(Layer.REPLICA_SCHEDULER, "vllm_v1", {"watermark_fraction": 0.2}, context)
    for chunk_blocks, added in ((8, [100]), (9, [])):
        batch = Batch(chunk_blocks)
        scheduler.schedule(Replica(), batch, 0.0)
        assert batch.added == added
