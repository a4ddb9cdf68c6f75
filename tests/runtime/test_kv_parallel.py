"""KV parallelism: where requests lie, who works on them, and that nothing is ever half allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vajra_py.runtime.kv import CopyDirection, KvGroups, KvParallelMemory, PrefixCacheOptions

BLOCK_SIZE = 2
GROUP_TOKENS = 8


@dataclass(eq=False)
class Request:
    num_known_tokens: int


def memory_of(num_groups: int = 3, blocks_per_group: int = 6, **options: Any) -> KvParallelMemory:
    return KvParallelMemory(KvGroups(num_groups, blocks_per_group, GROUP_TOKENS), BLOCK_SIZE, **options)


def arrive(memory: KvParallelMemory, num_tokens: int) -> Request:
    request = Request(num_tokens)
    memory.register(request)
    return request


def admitted(memory: KvParallelMemory, num_tokens: int, **options: Any) -> Request:
    request = arrive(memory, num_tokens)
    assert memory.allocate(request, num_tokens, **options) == 0
    return request


def test_kv_parallel_short_prompts_go_where_least_prefill_work_waits() -> None:
    memory = memory_of()
    first, second, third = (admitted(memory, n) for n in (4, 2, 2))
    assert [memory.groups_of(r) for r in (first, second, third)] == [[0], [1], [2]]
    assert memory.pending_prefill_work == (16, 4, 4)
    assert memory.groups_of(admitted(memory, 1)) == [1]
    memory.on_chunk_done(first, 0, 3)
    assert memory.pending_prefill_work[0] == 16 - 9
    memory.on_chunk_done(first, 3, 1)
    assert memory.groups_of(admitted(memory, 2)) == [0]


def test_kv_parallel_long_prompt_fills_groups_and_puts_the_rest_in_the_last() -> None:
    memory = memory_of()
    request = admitted(memory, 19)
    assert memory.groups_of(request) == [0, 1, 2]
    assert [len(table) for table in memory.group_tables(request)] == [4, 4, 2]
    assert memory.num_held_blocks(request) == 10
    assert memory.group_free_blocks == [2, 2, 4]
    assert memory.pending_prefill_work == (361, 361, 361)


def test_kv_parallel_a_group_with_room_for_the_remainder_only_comes_last() -> None:
    memory = memory_of()
    admitted(memory, 8)
    memory.on_chunk_done(admitted(memory, 6, excluded_groups={1, 2, 0} - {1}), 0, 6)
    # Group 0 has 2 blocks left, group 1 has 3, group 2 has 6; by work: 1, 2, 0.
    assert memory.groups_of(admitted(memory, 12)) == [2, 1]


def test_kv_parallel_the_remainder_may_fill_its_group() -> None:
    memory = memory_of(num_groups=2)
    admitted(memory, 8, excluded_groups={1})  # 4 of 6 blocks
    assert memory.group_free_blocks == [2, 6]
    assert memory.groups_of(admitted(memory, 12)) == [1, 0]
    assert memory.group_free_blocks == [0, 2]


def test_kv_parallel_admission_is_all_or_nothing() -> None:
    memory = memory_of(num_groups=2)
    admitted(memory, 8)
    before = (memory.group_free_blocks, memory.pending_prefill_work)
    long = arrive(memory, 16)
    assert memory.free_blocks == memory.blocks_needed(long, 16) == 8
    assert not memory.can_allocate(long, 16)
    assert memory.allocate(long, 16) is None
    assert (memory.group_free_blocks, memory.pending_prefill_work) == before
    assert memory.groups_of(long) == []
    memory.check()


def test_kv_parallel_busy_groups_are_passed_over() -> None:
    memory = memory_of()
    assert memory.groups_of(admitted(memory, 4, excluded_groups={0, 2})) == [1]
    waiting = arrive(memory, 4)
    assert memory.allocate(waiting, 4, excluded_groups={0, 1, 2}) is None
    assert memory.can_allocate(waiting, 4)
    assert not memory.can_allocate(waiting, 4, excluded_groups={0, 1, 2})


def test_kv_parallel_groups_become_active_as_the_prompt_reaches_them() -> None:
    memory = memory_of()
    request = admitted(memory, 19)
    active = []
    done = 0
    while done < 19:
        chunk = memory.max_chunk(request, done, 19 - done)
        active.append((chunk, list(memory.active_groups(request)), memory.group_context(request, done)))
        memory.on_chunk_done(request, done, chunk)
        done += chunk
    assert active == [(8, [0], [0]), (8, [0, 1], [8, 0]), (3, [0, 1, 2], [8, 8, 0])]
    assert memory.active_groups(request) == [0, 1, 2]
    assert memory.group_context(request, 19) == [8, 8, 3]
    assert memory.pending_prefill_work == (0, 0, 0)


def test_kv_parallel_decodes_grow_in_the_last_group_and_then_in_another() -> None:
    memory = memory_of()
    request = admitted(memory, 6)
    memory.on_chunk_done(request, 0, 6)
    assert memory.grow(request, 8)
    assert memory.groups_of(request) == [0]
    assert memory.grow(request, 9)
    assert memory.groups_of(request) == [0, 1]
    memory.grow_each([request])
    assert [len(table) for table in memory.group_tables(request)] == [4, 2]
    memory.check()


def test_kv_parallel_growth_looks_at_the_last_group_only() -> None:
    memory = memory_of(num_groups=2, blocks_per_group=4)
    request = admitted(memory, 2)
    admitted(memory, 6, excluded_groups={1})
    assert memory.free_blocks == 4
    assert memory.growth_headroom == 0
    assert not memory.grow(request, 3)
    with pytest.raises(ValueError, match="Allowed: 0"):
        memory.grow_each([request])
    assert memory.num_held_blocks(request) == 1


def test_kv_parallel_preemption_takes_the_rest_of_the_work_away() -> None:
    memory = memory_of()
    request = admitted(memory, 19)
    memory.on_chunk_done(request, 0, 8)
    assert memory.pending_prefill_work == (297, 297, 297)
    memory.free(request)
    assert memory.pending_prefill_work == (0, 0, 0)
    request.num_known_tokens = 20
    assert memory.allocate(request, 20) == 0
    assert memory.pending_prefill_work == (400, 400, 400)


def test_kv_parallel_swap_round_trip_may_change_groups() -> None:
    memory = memory_of(host_blocks=8, records_copies=True)
    request = admitted(memory, 11)
    memory.on_chunk_done(request, 0, 5)
    assert memory.swap_out(request, num_computed_tokens=5) == 3
    assert memory.used_blocks == 0
    assert memory.pending_prefill_work == (0, 0, 0)
    other = admitted(memory, 8)
    assert memory.swap_in(request, 11, excluded_groups={1, 2}) is None
    assert memory.swap_in(request, 11) == 3
    assert memory.groups_of(request) == [1, 2]
    assert memory.pending_prefill_work == (64, 121 - 25, 121 - 25)
    out, back = memory.take_copies()[:3], memory.take_copies()
    assert [(copy.source, copy.group) for copy in out] == [(0, 0), (1, 0), (2, 0)]
    assert back == []
    memory.free(other)
    memory.check()


def test_kv_parallel_a_lost_memory_is_empty_on_the_host_too() -> None:
    memory = memory_of(host_blocks=4)
    assert memory.swap_out(admitted(memory, 8)) == 4
    admitted(memory, 8)
    memory.clear()
    assert memory.used_blocks == 0
    assert memory.pending_prefill_work == (0, 0, 0)
    assert memory.swap_out(admitted(memory, 8)) == 4


def test_kv_parallel_copies_name_their_group() -> None:
    memory = memory_of(host_blocks=8, records_copies=True)
    request = admitted(memory, 12)
    memory.swap_out(request)
    memory.take_copies()
    memory.swap_in(request, 12)
    copies = memory.take_copies()
    assert {copy.direction for copy in copies} == {CopyDirection.TO_DEVICE}
    assert [copy.group for copy in copies] == [0, 0, 0, 0, 1, 1]
    assert [copy.target for copy in copies] == memory.block_table(request)
    assert memory.swap_out(request) == 6
    memory.drop_swapped(request)
    memory.forget(request)
    assert memory.free_host_blocks == 8


def test_kv_parallel_limits() -> None:
    memory = memory_of()
    assert memory.fits(24)
    assert not memory.fits(25)
    assert memory.num_blocks == memory.free_blocks == 18
    assert memory.cached_tokens(arrive(memory, 5)) == 0


def test_kv_parallel_nothing_is_pinned_and_no_pin_is_refused() -> None:
    memory = memory_of()
    request = admitted(memory, 8)
    assert memory.pin("name", request, 9.0)
    memory.free(request)
    assert (memory.used_blocks, memory.unpin("name")) == (0, False)


@pytest.mark.parametrize("group_tokens", [0, 7, 14])
def test_kv_parallel_refuses_group_tokens_that_do_not_suit_the_blocks(group_tokens: int) -> None:
    with pytest.raises(ValueError, match="A multiple of the block size 2 up to the 12 tokens"):
        KvParallelMemory(KvGroups(2, 6, group_tokens), BLOCK_SIZE)


def test_kv_parallel_refuses_a_prefix_cache() -> None:
    with pytest.raises(ValueError, match=r"prefix_cache .*cannot be combined with KV parallelism"):
        memory_of(prefix_cache=PrefixCacheOptions())


STEPS = st.tuples(
    st.sampled_from(["admit", "chunk", "grow", "release", "out", "in"]), st.integers(0, 5), st.integers(1, 30)
)


@settings(max_examples=100, deadline=None)
@given(st.lists(STEPS, min_size=25, max_size=60))
def test_kv_parallel_books_agree_under_random_use(steps: list[tuple[str, int, int]]) -> None:
    memory = memory_of(host_blocks=12)
    requests = [arrive(memory, n) for n in (3, 8, 9, 17, 24, 30)]
    done = dict.fromkeys(requests, 0)
    swapped: set[Request] = set()
    for what, which, num_tokens in steps:
        request = requests[which]
        known = request.num_known_tokens
        before = (memory.group_free_blocks, memory.pending_prefill_work, memory.free_host_blocks)
        taken: object = True
        if what == "admit" and not memory.groups_of(request) and request not in swapped:
            taken = memory.allocate(request, known, excluded_groups={num_tokens % 4})
            done[request] = 0
            assert taken is None or memory.fits(known)
        elif what == "in" and request in swapped:
            taken = memory.swap_in(request, known)
            swapped -= set() if taken is None else {request}
        elif not memory.groups_of(request):
            continue
        elif what == "chunk" and done[request] < known:
            chunk = min(num_tokens, memory.max_chunk(request, done[request], known - done[request]))
            first, last = done[request] // GROUP_TOKENS, (done[request] + chunk - 1) // GROUP_TOKENS
            assert first == last, "a chunk crosses a group's boundary"
            assert len(memory.active_groups(request)) == first + 1
            memory.on_chunk_done(request, done[request], chunk)
            done[request] += chunk
            assert sum(memory.group_context(request, done[request])) == done[request]
        elif what == "grow":
            taken = memory.grow(request, num_tokens) or None
        elif what == "release":
            memory.free(request)
        elif what == "out":
            taken = memory.swap_out(request)
            swapped |= set() if taken is None else {request}
        if taken is None:
            assert (memory.group_free_blocks, memory.pending_prefill_work, memory.free_host_blocks) == before
        memory.check()
        assert memory.used_blocks == sum(map(memory.num_held_blocks, requests))
        for one in requests:
            tables = memory.group_tables(one)
            assert all(len(table) * BLOCK_SIZE <= GROUP_TOKENS for table in tables)
