"""Keys of blocks: equal exactly for equal content, however it is told."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vajra_py.runtime.kv import BlockHashes, PrivateBlockHashes, SegmentBlockHashes, TokenBlockHashes, output_segment
from vajra_py.runtime.kv.block_hashes import RecentPrompts

TOKENS = st.lists(st.integers(0, 1), max_size=14)
NAMES: st.SearchStrategy[int | str | tuple[str, str]] = st.sampled_from([1, 2, "1", ("out", "a")])


def common_blocks(first: list[object], second: list[object], block_size: int) -> int:
    """Blocks up to which two contents are equal."""
    num_common = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        num_common += 1
    return num_common // block_size


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_kv_token_keys_equal_while_tokens_equal(first: list[int], second: list[int], block_size: int) -> None:
    num_blocks = min(len(first), len(second)) // block_size
    ours, theirs = TokenBlockHashes(first, block_size), TokenBlockHashes(second, block_size)
    num_equal = common_blocks(list(first), list(second), block_size)
    assert [ours.block_hash(i) == theirs.block_hash(i) for i in range(num_blocks)] == [
        i < num_equal for i in range(num_blocks)
    ]


@given(TOKENS, TOKENS, st.integers(1, 4), st.booleans())
def test_kv_token_keys_do_not_depend_on_when_tokens_came(
    prompt: list[int], generated: list[int], block_size: int, look: bool
) -> None:
    grown, whole = TokenBlockHashes(prompt, block_size), TokenBlockHashes(prompt + generated, block_size)
    for token in generated:
        if look and len(prompt) >= block_size:
            grown.block_hash(0)
        grown.append(token)
    num_blocks = whole.num_hashed_tokens // block_size
    assert grown.num_hashed_tokens == len(prompt) + len(generated)
    assert grown.block_hashes(0, num_blocks) == whole.block_hashes(0, num_blocks)


def test_kv_token_keys_partial_block_has_none() -> None:
    hashed = TokenBlockHashes(range(7), block_size=4)
    hashed.block_hash(0)
    with pytest.raises(IndexError, match=r"block 1 is not full \(7 tokens, 4 a block\)"):
        hashed.block_hash(1)


def test_kv_token_keys_take_ids_of_64_bits() -> None:
    assert TokenBlockHashes([-(2**63), 2**63 - 1], 2).block_hash(0) != TokenBlockHashes([0, 0], 2).block_hash(0)


def test_kv_token_keys_tell_the_same_tokens_after_other_prefixes_apart() -> None:
    assert TokenBlockHashes([1, 1, 5, 5], 2).block_hash(1) != TokenBlockHashes([2, 2, 5, 5], 2).block_hash(1)


@pytest.mark.parametrize(
    "make", [lambda salt: TokenBlockHashes(range(8), 2, salt), lambda salt: SegmentBlockHashes([(1, 8)], "r", 2, salt)]
)
def test_kv_salt_separates_tenants(make: Callable[[str], BlockHashes]) -> None:
    plain, blue, red = (make(salt).block_hashes(0, 4) for salt in ("", "blue", "red"))
    assert not set(blue) & set(red)
    assert not set(plain) & set(blue)
    assert list(make("blue").block_hashes(0, 4)) == list(blue)


RUNS = st.lists(st.tuples(NAMES, st.integers(0, 5)), max_size=5)


def spelled(runs: list[tuple[int | str | tuple[str, str], int]], request_id: str, num_tokens: int) -> list[object]:
    """Every token as (name, position in its run), neighbours of one name being one run; then the output."""
    symbols: list[object] = []
    for name, cut in groupby((run for run in runs if run[1]), key=lambda run: run[0]):
        symbols += [(name, i) for i in range(sum(length for _, length in cut))]
    start = len(symbols)
    if symbols and (last := symbols[-1])[0] == output_segment(request_id):  # type: ignore[index]
        start -= last[1] + 1  # type: ignore[index]
    return symbols + [(output_segment(request_id), i - start) for i in range(len(symbols), num_tokens)]


@given(RUNS, RUNS, st.integers(1, 4))
def test_kv_segment_keys_equal_while_content_equal(
    first: list[tuple[int | str | tuple[str, str], int]],
    second: list[tuple[int | str | tuple[str, str], int]],
    block_size: int,
) -> None:
    num_blocks = 8
    ours, theirs = SegmentBlockHashes(first, "a", block_size), SegmentBlockHashes(second, "b", block_size)
    symbols = (spelled(first, "a", 64), spelled(second, "b", 64))
    num_equal = common_blocks(*symbols, block_size)
    equal = [
        one == other
        for one, other in zip(ours.block_hashes(0, num_blocks), theirs.block_hashes(0, num_blocks), strict=True)
    ]
    assert equal == [i < num_equal for i in range(num_blocks)]
    assert [ours.block_hash(i) for i in range(num_blocks)] == list(ours.block_hashes(0, num_blocks))
    assert ours.num_public_tokens == sum(length for _, length in first)


@given(st.lists(st.tuples(st.integers(0, 4), RUNS, st.booleans(), st.integers(0, 8)), max_size=8), st.integers(1, 4))
def test_kv_segment_keys_are_the_same_beside_recent_prompts(
    prompts: list[tuple[int, list[tuple[int | str | tuple[str, str], int]], bool, int]], block_size: int
) -> None:
    """Each prompt continues one of the others, by its answer and further runs, or begins anew."""
    recent = RecentPrompts(capacity=3)
    said: list[tuple[tuple[Any, int], ...]] = [()]
    for number, (before, more, is_answered, num_asked) in enumerate(prompts):
        place = before % len(said)
        answer = ((output_segment(f"r{place}"), 3),) if is_answered and place else ()
        segments = (*said[place], *answer, *more)
        said.append(segments)
        request_id, salt = f"r{number + 1}", "ab"[before % 2]
        ours = SegmentBlockHashes(segments, request_id, block_size, salt, recent=recent)
        alone = SegmentBlockHashes(segments, request_id, block_size, salt)
        assert ours.num_public_tokens == alone.num_public_tokens
        assert ours.block_hashes(0, num_asked) == alone.block_hashes(0, num_asked)
        assert ours.block_hashes(1, 32) == alone.block_hashes(1, 32)


def test_kv_segment_keys_do_not_depend_on_the_cut() -> None:
    whole = SegmentBlockHashes([(7, 6), (8, 2)], "x", 2)
    cut = SegmentBlockHashes([(7, 1), (7, 0), (9, 0), (7, 5), (8, 1), (8, 1)], "y", 2)
    assert whole.block_hashes(0, 4) == cut.block_hashes(0, 4)
    assert whole.block_hash(4) != cut.block_hash(4)


def test_kv_segment_keys_find_an_earlier_answer_in_a_follow_up() -> None:
    first = SegmentBlockHashes([("system", 3), ("question", 3)], "turn1", 2)
    follow_up = SegmentBlockHashes(
        [("system", 3), ("question", 3), (output_segment("turn1"), 4), ("again", 2)], "turn2", 2
    )
    assert first.block_hashes(0, 5) == follow_up.block_hashes(0, 5)
    assert first.num_public_tokens == 6
    assert first.is_private_after_prompt


def test_kv_segment_keys_refuse_negative_runs() -> None:
    with pytest.raises(ValueError, match="negative length"):
        SegmentBlockHashes([(1, -1)], "r", 2)


def test_kv_private_keys_match_only_their_own_request() -> None:
    mine = PrivateBlockHashes("a").block_hashes(0, 3)
    assert mine == PrivateBlockHashes("a").block_hashes(0, 3)
    assert not set(mine) & set(PrivateBlockHashes("b").block_hashes(0, 3))
    assert PrivateBlockHashes("a").num_public_tokens == 0


@pytest.mark.parametrize("block_size", [0, -1])
def test_kv_keys_refuse_block_sizes(block_size: int) -> None:
    with pytest.raises(ValueError, match="At least 1"):
        TokenBlockHashes([], block_size)


def test_equal_prompts_have_equal_block_hashes_and_private_ones_none() -> None:
    def hashes(hashed: BlockHashes, num_tokens: int) -> list[Any]:
        return list(hashed.shared_prompt_hashes(num_tokens))

    one, other = (TokenBlockHashes(tokens, 4) for tokens in ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 0, 9]))
    one.append(3)
    assert len(hashes(one, 9)) == 2
    assert [a == b for a, b in zip(hashes(one, 9), hashes(other, 9), strict=True)] == [True, False]
    first, second = (SegmentBlockHashes([("system", 6), (name, 6)], name, 4) for name in ("a", "b"))
    assert [a == b for a, b in zip(hashes(first, 12), hashes(second, 12), strict=True)] == [True, False, False]
    assert hashes(PrivateBlockHashes("a"), 12) == []


def test_output_that_is_there_already_is_not_counted_twice() -> None:
    output = [8, 9]
    hashed, whole = TokenBlockHashes([1, 2, 3, 4, 8, 9], 2, output=output), TokenBlockHashes([1, 2, 3, 4, 8, 9, 7], 2)
    assert hashed.num_public_tokens == hashed.num_hashed_tokens == 6
    output.append(7)
    assert hashed.num_public_tokens == 7
    assert hashed.block_hashes(0, 3) == whole.block_hashes(0, 3)


@pytest.mark.parametrize("num_prompt", [0, 1, 3, 4, 7, 8])
@pytest.mark.parametrize("at_once", [1, 3, 20])
def test_output_in_the_callers_list_is_hashed_like_a_prompt(num_prompt: int, at_once: int) -> None:
    tokens, output = [(place * 37 - 5) * 2**40 for place in range(24)], list[int]()
    hashed, whole = TokenBlockHashes(tokens[:num_prompt], 4, "salt", output), TokenBlockHashes(tokens, 4, "salt")
    while len(output) < len(tokens) - num_prompt:
        output += tokens[num_prompt + len(output) :][:at_once]
        num_blocks = hashed.num_hashed_tokens // 4
        assert hashed.block_hashes(0, num_blocks) == whole.block_hashes(0, num_blocks)
    with pytest.raises(IndexError, match="not full"):
        hashed.block_hash(6)
