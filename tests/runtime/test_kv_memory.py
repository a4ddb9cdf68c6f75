"""KV memory as a scheduler meets it: who is reused first, what is shared, what is refused, what swapping moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from vajra_py.runtime.kv import (
    BlockCopy,
    CopyDirection,
    PagedKvMemory,
    PrefixCacheOptions,
    PrivateBlockHashes,
    SegmentBlockHashes,
    TokenBlockHashes,
)

VLLM = PrefixCacheOptions()
NANO = PrefixCacheOptions(reuse_order="fifo", duplicates="keep_last")
MINI = PrefixCacheOptions(reuse_order="fifo", release_order="head_first", retain_freed=False, duplicates="keep_last")


@dataclass(eq=False)
class Request:
    num_known_tokens: int


def arrive(memory: PagedKvMemory, tokens: list[int], salt: str = "") -> Request:
    request = Request(len(tokens))
    memory.register(request, TokenBlockHashes(tokens, memory.block_size, salt))
    return request


def run(memory: PagedKvMemory, tokens: list[int], salt: str = "") -> Request:
    """A prompt that arrives, is admitted and computed whole."""
    request = arrive(memory, tokens, salt)
    assert memory.allocate(request, len(tokens)) is not None
    memory.cache_blocks(request, len(tokens))
    return request


def new_blocks(memory: PagedKvMemory, num_blocks: int) -> list[int]:
    """The next blocks that the memory hands out."""
    request = Request(num_blocks * memory.block_size)
    memory.register(request)
    assert memory.allocate(request, request.num_known_tokens) == 0
    return list(memory.block_table(request))


A, B = [1, 1, 2, 2, 3, 3, 4], [5, 5, 6, 6, 7]


def test_kv_first_blocks_go_out_in_order_of_id() -> None:
    assert new_blocks(PagedKvMemory(5, 2), 3) == [0, 1, 2]


def test_kv_vllm_order_reuses_what_has_no_content_first_and_the_longest_idle_content_last() -> None:
    memory = PagedKvMemory(8, 2, prefix_cache=VLLM)
    a, b = run(memory, A), run(memory, B)
    assert (list(memory.block_table(a)), list(memory.block_table(b))) == ([0, 1, 2, 3], [4, 5, 6])
    memory.free(a)
    memory.free(b)
    # The partly filled tails, latest release first; the block never used; then a's content from its tail, then b's.
    assert new_blocks(memory, 8) == [6, 3, 7, 2, 1, 0, 5, 4]


def test_kv_without_a_cache_the_latest_block_is_reused_first() -> None:
    memory = PagedKvMemory(6, 2)
    a, b = run(memory, A), run(memory, B[:3])
    memory.free(a)
    memory.free(b)
    assert new_blocks(memory, 6) == [5, 4, 3, 2, 1, 0]


def test_kv_nano_order_is_one_queue_tail_of_a_request_first() -> None:
    memory = PagedKvMemory(8, 2, prefix_cache=NANO)
    a, b = run(memory, A), run(memory, B)
    memory.free(a)
    memory.free(b)
    assert new_blocks(memory, 8) == [7, 3, 2, 1, 0, 6, 5, 4]


def test_kv_mini_order_gives_back_the_head_first_and_finds_only_what_is_in_use() -> None:
    memory = PagedKvMemory(6, 2, prefix_cache=MINI)
    a = run(memory, A)
    twin = arrive(memory, A)
    assert memory.cached_tokens(twin) == 6
    memory.free(a)
    assert memory.cached_tokens(twin) == 0
    assert new_blocks(memory, 6) == [4, 5, 0, 1, 2, 3]


def test_kv_content_survives_until_its_block_is_reused() -> None:
    memory = PagedKvMemory(4, 2, prefix_cache=VLLM)
    memory.free(run(memory, A))
    again = arrive(memory, A)
    assert memory.cached_tokens(again) == 6
    new_blocks(memory, 2)
    assert memory.cached_tokens(again) == 4
    assert memory.allocate(again, 7) is None


def test_kv_blocks_of_running_requests_are_shared_within_the_step() -> None:
    memory = PagedKvMemory(8, 2, prefix_cache=VLLM)
    a = run(memory, A)
    twin = arrive(memory, A)
    assert memory.blocks_needed(twin, 7) == 1
    assert memory.allocate(twin, 7) == 6
    assert memory.used_blocks == 5
    assert list(memory.block_table(twin))[:3] == list(memory.block_table(a))[:3]
    memory.free(a)
    assert memory.used_blocks == 4
    memory.check()


def test_kv_reviving_idle_blocks_costs_free_capacity() -> None:
    memory = PagedKvMemory(6, 2, prefix_cache=VLLM)
    memory.free(run(memory, A))
    assert memory.free_blocks == 6
    again = arrive(memory, A)
    assert memory.blocks_needed(again, 7) == 4
    assert memory.allocate(again, 7) == 6
    assert memory.free_blocks == 2


def test_kv_one_token_is_always_left_to_compute() -> None:
    memory = PagedKvMemory(8, 2, prefix_cache=VLLM)
    memory.free(run(memory, A[:6]))
    exact = arrive(memory, A[:6])
    assert memory.cached_tokens(exact) == 4
    assert memory.allocate(exact, 6) == 4


def test_kv_equal_content_computed_twice_is_found_in_the_order_that_the_option_says() -> None:
    for options, expected in ((VLLM, [0, 1]), (NANO, [2, 3])):
        memory = PagedKvMemory(12, 2, prefix_cache=options)
        first, second = arrive(memory, A[:4]), arrive(memory, A[:4])
        for twin in (first, second):
            assert memory.allocate(twin, 4) == 0
        for twin in (first, second):
            memory.cache_blocks(twin, 4)
        third = arrive(memory, A)
        assert memory.allocate(third, 7) == 4
        assert list(memory.block_table(third))[:2] == expected


def test_kv_a_later_twin_takes_over_when_the_first_is_evicted() -> None:
    memory = PagedKvMemory(5, 2, prefix_cache=VLLM)
    first, second, third = arrive(memory, A[:2]), arrive(memory, A[:2]), arrive(memory, A)
    for twin in (first, second):
        memory.allocate(twin, 2)
    for twin in (first, second):
        memory.cache_blocks(twin, 2)
    memory.free(first)
    assert memory.cached_tokens(third) == 2
    assert new_blocks(memory, 4) == [2, 3, 4, 0]
    assert memory.cached_tokens(third) == 2
    memory.free(second)
    assert memory.allocate(third, 2) == 2
    assert memory.block_table(third) == [1]


def test_kv_tenants_of_different_salt_share_nothing() -> None:
    memory = PagedKvMemory(16, 2, prefix_cache=VLLM)
    run(memory, A, "blue")
    assert memory.cached_tokens(arrive(memory, A, "red")) == 0
    assert memory.cached_tokens(arrive(memory, A, "blue")) == 6
    assert memory.lookup_prefix(TokenBlockHashes(A, 2, "blue"), len(A)) == 6


def test_kv_generated_blocks_that_nobody_can_name_are_published_at_release() -> None:
    memory = PagedKvMemory(16, 2, prefix_cache=VLLM)
    turn = Request(5)
    memory.register(turn, SegmentBlockHashes([("prompt", 5)], "turn1", 2))
    assert memory.allocate(turn, 5) == 0
    turn.num_known_tokens = 9
    assert memory.grow(turn, 9)
    memory.cache_blocks(turn, 8)
    follow_up = Request(12)
    memory.register(follow_up, SegmentBlockHashes([("prompt", 5), (("out", "turn1"), 4), ("more", 3)], "turn2", 2))
    assert memory.cached_tokens(follow_up) == 4
    memory.free(turn)
    assert memory.cached_tokens(follow_up) == 8


def test_kv_preempted_request_finds_its_own_private_blocks_again() -> None:
    memory = PagedKvMemory(8, 2, prefix_cache=VLLM)
    request = Request(7)
    memory.register(request, PrivateBlockHashes("r"))
    assert memory.allocate(request, 7) == 0
    memory.free(request, num_computed_tokens=5)
    assert memory.cached_tokens(request) == 4
    unkeyed = Request(7)
    memory.register(unkeyed)
    memory.allocate(unkeyed, 7)
    memory.free(unkeyed, num_computed_tokens=7)
    assert memory.cached_tokens(unkeyed) == 0


def test_kv_published_blocks_can_be_withdrawn_unless_shared() -> None:
    memory = PagedKvMemory(12, 2, prefix_cache=VLLM)
    a = run(memory, A)
    twin = arrive(memory, A)
    assert memory.uncache_blocks(a, 3)
    assert memory.cached_tokens(twin) == 2
    memory.cache_blocks(a, 7)
    assert memory.allocate(twin, 7) == 6
    assert not memory.uncache_blocks(a, 3)
    assert memory.cached_tokens(arrive(memory, A)) == 6
    memory.check()


def test_kv_repeated_questions_see_what_changed() -> None:
    memory = PagedKvMemory(8, 2, prefix_cache=VLLM)
    a = arrive(memory, A)
    waiting = arrive(memory, A)
    seen = [memory.cached_tokens(waiting)]
    memory.allocate(a, 7)
    for num_tokens in (1, 3, 6):
        memory.cache_blocks(a, num_tokens)
        seen.append(memory.cached_tokens(waiting))
    memory.free(a)
    assert memory.blocks_needed(waiting, 7) == 4
    new_blocks(memory, 6)
    seen.append(memory.cached_tokens(waiting))
    assert seen == [0, 0, 2, 6, 4]


def test_kv_all_or_nothing() -> None:
    memory = PagedKvMemory(4, 2)
    a, b = Request(6), Request(6)
    memory.register(a)
    memory.register(b)
    assert memory.allocate(a, 5) == 0
    assert memory.allocate(b, 5) is None
    assert not memory.grow(a, 9)
    assert memory.num_held_blocks(a) == 3
    assert memory.num_held_blocks(b) == 0
    assert memory.grow(a, 8)
    assert memory.free_blocks == 0
    assert memory.fits(8)
    assert not memory.fits(9)
    memory.check()


def test_kv_bulk_growth_gives_one_block_each_in_order() -> None:
    memory = PagedKvMemory(6, 2)
    requests = [Request(2) for _ in range(3)]
    for request in requests:
        memory.register(request)
        memory.allocate(request, 2)
    memory.grow_each(requests[::-1])
    assert [list(memory.block_table(request)) for request in requests] == [[0, 5], [1, 4], [2, 3]]
    with pytest.raises(ValueError, match="Free: 0"):
        memory.grow_each(requests)
    memory.check()


def test_kv_lent_blocks_are_used_at_once_and_get_into_tables_when_settled() -> None:
    memory = PagedKvMemory(8, 2)
    requests = [Request(6) for _ in range(3)]
    for request in requests:
        memory.register(request)
        memory.allocate(request, 2)
    memory.reserve_blocks(3)
    memory.reserve_blocks(1)
    assert memory.free_blocks == 1
    assert memory.has_reserved
    memory.check()
    memory.materialize(requests[0], 6)
    memory.materialize(requests[1], 2)  # none of these blocks belonged to this request
    assert [memory.num_held_blocks(request) for request in requests] == [3, 1, 1]
    memory.materialize(requests[2], 5)
    assert not memory.has_reserved
    memory.check()
    for request in requests:
        memory.free(request)
    assert memory.free_blocks == 8
    with pytest.raises(ValueError, match="Free: 8"):
        memory.reserve_blocks(9)


def test_kv_swap_round_trip_moves_the_blocks_and_tells_the_copies() -> None:
    memory = PagedKvMemory(4, 2, host_blocks=3, records_copies=True)
    a, b = Request(6), Request(4)
    for request in (a, b):
        memory.register(request)
    memory.allocate(a, 6)
    assert memory.swap_out(a) == 3
    assert (memory.num_held_blocks(a), memory.free_blocks, memory.free_host_blocks) == (0, 4, 0)
    memory.allocate(b, 4)
    assert memory.swap_out(b) is None
    assert memory.num_held_blocks(b) == 2
    assert memory.blocks_needed(a, 7) == 4
    assert memory.swap_in(a, 7) is None
    memory.free(b)
    assert memory.swap_in(a, 7) == 3
    assert (memory.num_held_blocks(a), memory.free_host_blocks) == (4, 3)
    copies = memory.take_copies()
    out, back = copies[:3], copies[3:]
    assert [copy.source for copy in out] == [0, 1, 2]
    assert back == [
        BlockCopy(copy.target, block, CopyDirection.TO_DEVICE)
        for copy, block in zip(out, memory.block_table(a), strict=False)
    ]
    assert memory.take_copies() == []
    memory.check()


def test_kv_swapping_a_partial_prompt_keeps_only_what_is_computed() -> None:
    memory = PagedKvMemory(8, 2, host_blocks=2)
    request = Request(12)
    memory.register(request)
    memory.allocate(request, 12)
    assert memory.swap_out(request, num_computed_tokens=3) == 2
    assert memory.swap_in(request, 12) == 2
    assert memory.num_held_blocks(request) == 6
    assert memory.take_copies() == []


def test_kv_dropping_a_swapped_request_frees_the_host() -> None:
    memory = PagedKvMemory(4, 2, prefix_cache=VLLM, host_blocks=4)
    request = run(memory, A)
    memory.swap_out(request)
    assert memory.cached_tokens(request) == 0
    memory.drop_swapped(request)
    assert memory.free_host_blocks == 4
    assert memory.cached_tokens(request) == 6


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (lambda memory, held, idle: memory.register(held), "already registered"),
        (lambda memory, held, idle: memory.forget(held), "still holds blocks"),
        (lambda memory, held, idle: memory.allocate(held, 3), "must hold no blocks"),
        (lambda memory, held, idle: memory.allocate(idle, 0), "at least 1 token"),
        (lambda memory, held, idle: memory.grow(idle, 3), "holds no device blocks"),
        (lambda memory, held, idle: memory.free(idle), "holds no device blocks"),
        (lambda memory, held, idle: memory.swap_out(idle), "holds no device blocks"),
        (lambda memory, held, idle: memory.swap_in(held, 3), "not swapped"),
        (lambda memory, held, idle: memory.drop_swapped(held), "not swapped"),
        (lambda memory, held, idle: memory.cache_blocks(held, 5), "At most 4"),
    ],
)
def test_kv_misuse_is_refused_and_changes_nothing(misuse: Any, says: str) -> None:
    memory = PagedKvMemory(4, 2, prefix_cache=VLLM)
    held, idle = run(memory, A[:3]), arrive(memory, B)
    with pytest.raises(ValueError, match=says):
        misuse(memory, held, idle)
    assert memory.block_table(held) == [0, 1]
    assert memory.used_blocks == 2
    memory.check()


@pytest.mark.parametrize("wrong", [{"reuse_order": "mru"}, {"release_order": "tail"}, {"duplicates": "first"}])
def test_kv_options_refuse_unknown_words(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Allowed: "):
        PrefixCacheOptions(**wrong)


def test_kv_a_single_group_answers_like_kv_parallelism() -> None:
    memory = PagedKvMemory(4, 2)
    request = Request(5)
    memory.register(request)
    memory.allocate(request, 5)
    assert memory.groups_of(request) == memory.active_groups(request, 3) == (0,)
    assert memory.group_context(request, 3) == [3]
    assert memory.group_tables(request) == ([0, 1, 2],)
    assert memory.max_chunk(request, 1, 4) == 4
    assert memory.growth_headroom == memory.free_blocks == 1


@pytest.mark.parametrize("follows", [False, True])
def test_kv_blocks_of_many_requests_are_cached_as_one_by_one(follows: bool) -> None:
    prompts = [[1, 2, 3, 4, 5], [1, 2, 7, 8], [9, 9, 9, 9, 9], [3], [1, 2, 3, 4, 6]]
    together, apart = (PagedKvMemory(20, 2, prefix_cache=VLLM) for _ in range(2))
    for memory in (together, apart):
        memory.follow_hits(wanted=follows)
        requests = [arrive(memory, tokens) for tokens in prompts]
        for request in requests:
            memory.allocate(request, request.num_known_tokens)
        counts = [len(tokens) for tokens in prompts]
        if memory is together:
            memory.cache_each(requests, counts)
        else:
            for request, count in zip(requests, counts, strict=True):
                memory.cache_blocks(request, count)
        memory.check()
        for request in requests:
            memory.free(request)
    for tokens in prompts:
        hashes = TokenBlockHashes([*tokens, 0], 2)
        assert together.lookup_prefix(hashes, 6) == apart.lookup_prefix(hashes, 6) == len(tokens) // 2 * 2
    assert [together.block_of(TokenBlockHashes([1, 2], 2).block_hash(0))] == [0]


def test_kv_no_block_of_many_requests_is_cached_beyond_its_table() -> None:
    memory = PagedKvMemory(4, 2, prefix_cache=VLLM)
    request = arrive(memory, [1, 2, 3, 4])
    memory.allocate(request, 2)
    with pytest.raises(ValueError, match="At most 2"):
        memory.cache_each([request], [4])
