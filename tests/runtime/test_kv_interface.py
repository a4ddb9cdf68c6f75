"""The contract of `KvMemory`, for every kind of memory."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import vajra_py
from vajra_py.runtime.kv import (
    KvGroups,
    KvMemory,
    KvParallelMemory,
    PagedKvMemory,
    PrefixCacheOptions,
    PrivateBlockHashes,
)

KINDS: dict[str, Callable[[], KvMemory]] = {
    "plain": lambda: PagedKvMemory(8, 2, host_blocks=4, records_copies=True),
    "prefix cache": lambda: PagedKvMemory(8, 2, prefix_cache=PrefixCacheOptions(), host_blocks=4, records_copies=True),
    "groups": lambda: KvParallelMemory(KvGroups(2, 4, 8), 2, host_blocks=4, records_copies=True),
}


@dataclass(eq=False)
class Sequence:
    num_known_tokens: int


@pytest.fixture(params=KINDS)
def memory(request: pytest.FixtureRequest) -> KvMemory:
    return KINDS[request.param]()


def test_a_request_holds_what_it_was_given_and_gives_it_back(memory: KvMemory) -> None:
    one = Sequence(5)
    memory.register(one, PrivateBlockHashes("one"))
    assert (memory.num_blocks, memory.free_blocks, memory.blocks_needed(one, 5)) == (8, 8, 3)
    assert memory.can_allocate(one, 5)
    assert memory.allocate(one, 5) == 0
    memory.cache_blocks(one, 5)
    assert memory.num_held_blocks(one) == len(memory.block_table(one)) == 3
    assert memory.grow(one, 7)
    memory.grow_each([Sequence(1)][:0])
    assert (memory.num_held_blocks(one), memory.free_blocks) == (4, 4)
    memory.free(one, 5, for_good=True)
    memory.forget(one)
    assert (memory.free_blocks, memory.is_registered(one)) == (8, False)
    memory.check()


def test_what_does_not_fit_changes_nothing(memory: KvMemory) -> None:
    one, other = Sequence(8), Sequence(12)
    for sequence in (one, other):
        memory.register(sequence)
    assert memory.allocate(one, 8) == 0
    free = memory.free_blocks
    assert not memory.can_allocate(other, 12)
    assert memory.allocate(other, 12) is None
    assert not memory.grow(one, 17)
    assert (memory.free_blocks, memory.num_held_blocks(other)) == (free, 0)
    memory.check()


def test_a_swapped_request_comes_back_whole(memory: KvMemory) -> None:
    one = Sequence(6)
    memory.register(one)
    assert memory.allocate(one, 6) == 0
    assert memory.swap_out(one, 5) == 3
    assert (memory.free_blocks, memory.free_host_blocks) == (8, 1)
    assert memory.swap_in(one, 7) == 3
    assert (memory.num_held_blocks(one), memory.free_host_blocks) == (4, 4)
    assert len(memory.take_copies()) == 6
    memory.check()


def test_reserved_blocks_find_their_owners(memory: KvMemory) -> None:
    """Where blocks can be reserved at all; elsewhere it is refused, and nothing is ever open."""
    one = Sequence(2)
    memory.register(one)
    assert memory.allocate(one, 2) == 0
    if not memory.can_reserve:
        with pytest.raises(ValueError, match="can_reserve"):
            memory.reserve_blocks(1)
        assert not memory.has_reserved
        return
    memory.reserve_blocks(1)
    assert memory.has_reserved
    memory.materialize(one, 3)
    assert len(memory.block_table(one)) == 2
    assert not memory.has_reserved


def test_nobody_asks_which_kind_of_memory_it_is() -> None:
    """Outside the folder of the memories, code relies on the interface."""
    kinds = {"PagedKvMemory", "KvParallelMemory"}
    root = Path(vajra_py.__file__).parent
    asking = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if "isinstance" in (text := path.read_text()) and any(kind in text for kind in kinds)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        and kinds & {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
    ]
    assert not asking
