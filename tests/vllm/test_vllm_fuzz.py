"""Random sessions beside vLLM's own scheduler, and the model of its workers itself."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from tests.vllm.fuzz import RequestScript, Session, compare, compare_in
from tests.vllm.worker_model import ExpectedTokens, FirstRunner, KvSlots, Runner, SecondRunner, WorkerFault


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(1_000_000, 1_000_016))
def test_a_session_is_vllms_and_its_messages_are_carried_out(tiny_model: str, seed: int, is_async: bool) -> None:
    found, _ = compare(tiny_model, seed, is_async=is_async)
    assert found is None


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_sessions_of_this_run_alone(tiny_model: str, is_async: bool) -> None:
    """Other seeds each time; a failure names its own."""
    first = random.SystemRandom().randrange(10**9)
    for seed in range(first, first + 8):
        found, _ = compare(tiny_model, seed, is_async=is_async)
        assert found is None, f"make vllm-fuzz SEED={seed} COUNT=1: {found}"


PLAIN = {
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "policy": "fcfs",
    "caches": True,
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "watermark": 0.0,
    "scheduler_reserve_full_isl": True,
    "prefill_schedule_interval": 1,
    "max_num_active_seqs": None,
    "enable_chunked_prefill": True,
    "max_num_scheduled_tokens": None,
}


def session(scripts: list[RequestScript], num_blocks: int, **options: Any) -> Session:
    return Session(0, 4, num_blocks, PLAIN | options, scripts, [], is_async=False, second_runner=False)


def test_blocks_of_who_is_aborted_while_a_step_is_computed_are_reused_before_those_of_who_ends_with_it(
    tiny_model: str,
) -> None:
    first, second, third = (tuple(range(at, at + 16)) for at in (100, 200, 300))
    scripts = [
        RequestScript("aborted", first, 20, 0, 0.0, aborts=(3, True)),
        RequestScript("ends", second, 4, 0, 0.1),
        RequestScript("evicts", third + first[:12][::-1], 1, 4, 0.2),
        RequestScript("hits", second, 1, 6, 0.3),
    ]
    found, counts = compare_in(tiny_model, session(scripts, 12))
    assert found is None
    assert counts["cached"] == 1


def test_times_of_frontends_before_the_start_order_requests_of_equal_priority(tiny_model: str) -> None:
    scripts = [RequestScript(f"r{index}", (index, 5, 6), 3, 0, 1.0 * index) for index in range(12)]
    given = session(scripts, 20, policy="priority", max_num_seqs=1)
    assert compare_in(tiny_model, replace(given, begins=-1e6))[0] is None


@pytest.mark.parametrize("client", [0, 1])
def test_lengths_count_on_after_a_token_that_ends_one_request_and_not_another(tiny_model: str, client: int) -> None:
    scripts = [
        RequestScript("ignores", (100, 101), 20, 0, 0.0, ends_at=6, ignores_eos=True),
        RequestScript("heeds", (200, 201), 25, 0, 0.1, client=client),
        RequestScript("stops", (300, 301), 30, 0, 0.2, ends_at=23),
    ]
    assert compare_in(tiny_model, session(scripts, 40))[0] is None


def test_where_vllms_requests_preempt_each_other_for_ever_they_do_here(tiny_model: str) -> None:
    """Copies of one prompt arrive at once, and each is the other's victim."""
    scripts = [RequestScript(f"{index}_r", tuple(range(100, 158)), 6, 0, 0.0) for index in range(2)]
    options = {"policy": "priority", "caches": False, "scheduler_reserve_full_isl": False}
    found, counts = compare_in(
        tiny_model, session(scripts, 16, max_num_batched_tokens=11, long_prefill_token_threshold=8, **options)
    )
    assert found is None
    assert counts["endless"] == 1


# The workers' model detects the errors that it is meant to detect


def message(**given: Any) -> SchedulerOutput:
    made = SchedulerOutput.make_empty()
    for name, value in given.items():
        setattr(made, name, value)
    made.total_num_scheduled_tokens = sum(made.num_scheduled_tokens.values())
    return made


def new(name: str, prompt: list[int], blocks: list[int], *, computed: int = 0, known: list[int] | None = None) -> Any:
    return NewRequestData(name, prompt, [], None, None, (blocks,), computed, None, prefill_token_ids=known or prompt)


def cached(name: str, computed: int, output: int, **given: Any) -> CachedRequestData:
    blocks = given.get("blocks")
    return CachedRequestData(
        req_ids=[name],
        resumed_req_ids={name} if given.get("resumed") else set(),
        new_token_ids=[],
        all_token_ids={name: given["tokens"]} if "tokens" in given else {},
        new_block_ids=[None if blocks is None else (blocks,)],
        num_computed_tokens=[computed],
        num_output_tokens=[output],
    )


def runner(kind: type[Runner], *, is_async: bool = False, **prompts: list[int]) -> Runner:
    made = kind(KvSlots(4), {}, is_async, 2)
    for name, prompt in prompts.items():
        made.expected[name] = ExpectedTokens(prompt, "", lambda position: 100 + position)
    return made


@pytest.mark.parametrize("kind", [FirstRunner, SecondRunner])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_is_computed_and_decodes(kind: type[Runner], is_async: bool) -> None:
    worker = runner(kind, is_async=is_async, a=[1, 2, 3])
    assert worker.execute(message(scheduled_new_reqs=[new("a", [1, 2, 3], [1])], num_scheduled_tokens={"a": 2})) == {
        "a": []
    }
    for computed, output in ((2, 0), (3, 1)):
        told = cached("a", computed, output)
        assert worker.execute(message(scheduled_cached_reqs=told, num_scheduled_tokens={"a": 1})) == {
            "a": [100 + output]
        }


def test_a_request_that_comes_back_after_an_empty_step_has_to_bring_its_tokens() -> None:
    worker = runner(FirstRunner, is_async=True, a=[1, 2, 3])
    worker.execute(message(scheduled_new_reqs=[new("a", [1, 2, 3], [1])], num_scheduled_tokens={"a": 3}))
    worker.execute(message())
    with pytest.raises(WorkerFault, match="all_token_ids"):
        worker.execute(message(scheduled_cached_reqs=cached("a", 3, 1), num_scheduled_tokens={"a": 1}))


def test_a_count_that_is_ahead_of_the_tokens_shifts_them() -> None:
    worker = runner(FirstRunner, is_async=True, a=[1, 2, 3])
    worker.execute(message(scheduled_new_reqs=[new("a", [1, 2, 3], [1])], num_scheduled_tokens={"a": 3}))
    told = cached("a", 0, 1, resumed=True, blocks=[2], tokens=[1, 2, 3])  # its token is still in flight
    with pytest.raises(WorkerFault, match="its output is"):
        worker.execute(message(scheduled_cached_reqs=told, num_scheduled_tokens={"a": 4}))


def test_the_second_runner_wants_every_token_of_one_that_comes_back() -> None:
    worker = runner(SecondRunner, is_async=True, a=[1, 2, 3])
    worker.execute(message(scheduled_new_reqs=[new("a", [1, 2, 3], [1])], num_scheduled_tokens={"a": 3}))
    again = new("a", [1, 2, 3], [2], known=[1, 2, 3])
    with pytest.raises(WorkerFault, match="computes up to"):
        worker.execute(message(preempted_req_ids={"a"}, scheduled_new_reqs=[again], num_scheduled_tokens={"a": 5}))


@pytest.mark.parametrize("kind", [FirstRunner, SecondRunner])
def test_kv_of_another_content_is_noticed(kind: type[Runner]) -> None:
    worker = runner(kind, a=[1, 2, 3, 4, 5], b=[1, 2, 3, 9, 5])
    worker.execute(message(scheduled_new_reqs=[new("a", [1, 2, 3, 4, 5], [1, 2])], num_scheduled_tokens={"a": 5}))
    hit = new("b", [1, 2, 3, 9, 5], [1, 3], computed=4)
    with pytest.raises(WorkerFault, match="reads KV of token 3"):
        worker.execute(message(scheduled_new_reqs=[hit], num_scheduled_tokens={"b": 1}))


@pytest.mark.parametrize("kind", [FirstRunner, SecondRunner])
def test_two_writers_of_a_slot_and_too_many_rows_are_noticed(kind: type[Runner]) -> None:
    worker = runner(kind, a=[1, 2], b=[3, 4], c=[5])
    both = [new("a", [1, 2], [1]), new("b", [3, 4], [1])]
    with pytest.raises(WorkerFault, match="write one slot"):
        worker.execute(message(scheduled_new_reqs=both, num_scheduled_tokens={"a": 2, "b": 2}))
    three = [new(name, worker.expected[name].prompt, [row]) for row, name in enumerate("abc", 1)]  # type: ignore[arg-type]
    with pytest.raises(WorkerFault, match=r"room for|no slot"):
        runner(kind, a=[1, 2], b=[3, 4], c=[5]).execute(
            message(scheduled_new_reqs=three, num_scheduled_tokens={"a": 2, "b": 2, "c": 1})
        )
