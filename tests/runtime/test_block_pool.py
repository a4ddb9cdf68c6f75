"""The check of a block pool finds accounts that disagree."""

from __future__ import annotations

from typing import Any

import pytest

from vajra_py.runtime.kv.block_pool import BlockPool, PrefixCacheOptions


def used_pool() -> BlockPool:
    """Four blocks were taken; 1 and 2 are free again, 2 with content."""
    pool = BlockPool(8, PrefixCacheOptions())
    assert pool.take(4) == [0, 1, 2, 3]
    return pool


def test_a_pool_in_use_is_sound() -> None:
    pool = used_pool()
    pool.check({0: 1, 1: 1, 2: 1, 3: 1})
    pool.release([1, 2])
    pool.check({0: 1, 3: 1})


@pytest.mark.parametrize(
    ("users", "words"),
    [
        ({0: 1, 3: 1}, "do not make up 8 blocks"),
        ({0: 1, 1: 1, 2: 1, 3: 2}, "block 3 has 1 references and 2 users"),
        ({0: 1, 1: 1, 2: 1, 9: 1}, "never taken"),
    ],
)
def test_wrong_users_are_found(users: dict[int, int], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        used_pool().check(users)


def uncounted(pool: Any) -> None:
    pool.num_free += 1


def referenced(pool: Any) -> None:
    pool._extra_references[1] = 1


def left_at_zero(pool: Any) -> None:
    pool._extra_references[0] = 0


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(uncounted, "counted"), (referenced, "has references"), (left_at_zero, "left at zero")],
)
def test_spoilt_accounts_are_found(spoil: Any, words: str) -> None:
    pool = used_pool()
    pool.release([1, 2])
    spoil(pool)
    with pytest.raises(AssertionError, match=words):
        pool.check()


def test_a_run_of_idle_blocks_stands_under_its_first() -> None:
    pool: Any = BlockPool(8, PrefixCacheOptions(reuse_order="fifo"))
    pool.take(4)
    pool.release([1, 2])
    for first, stands in ((1, True), (2, False)):
        pool._idle.clear()
        pool._idle[first] = [1, 2]
        if stands:
            pool.check()
        else:
            with pytest.raises(AssertionError, match="stands elsewhere"):
                pool.check()
