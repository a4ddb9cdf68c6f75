"""KV memory against a slow, plain model of the same rules, under random use with every combination of options."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from vajra_py.runtime.kv import PagedKvMemory, PrefixCacheOptions, PrivateBlockHashes, TokenBlockHashes

NUM_BLOCKS = 10
HOST_BLOCKS = 6
BLOCK_SIZE = 2
PROMPTS = st.builds(
    lambda length, at, token: [0] * min(length, at) + [token] * max(length - at, 0),
    st.integers(1, 11),
    st.sampled_from([4, 8, 11]),
    st.integers(0, 1),
)
"""Prompts that agree for a while: zeros, then perhaps ones."""
Content = tuple[str, tuple[int, ...]]
Arrival = tuple[list[int], str, bool]
OWN = "own"
"""Stands for a salt of the request's own: content that nobody else can name."""
ARRIVALS: st.SearchStrategy[Arrival] = st.tuples(PROMPTS, st.sampled_from(["", "", "b", OWN]), st.booleans())


class Hashes(TokenBlockHashes):
    """Token hashes whose generated part may count as private, as segments' does."""

    def __init__(self, tokens: list[int], salt: str, private: bool) -> None:
        super().__init__(tokens, BLOCK_SIZE, salt)
        self.num_prompt_tokens = len(tokens)
        self.private = private

    @property
    def num_public_tokens(self) -> int:
        return self.num_prompt_tokens if self.private else self.num_hashed_tokens


@dataclass(eq=False)
class Request:
    tokens: list[int]
    salt: str
    num_prompt: int
    private: bool
    num_computed: int = 0
    swapped: list[Content | None] | None = None
    hashes: Hashes | PrivateBlockHashes = field(init=False)

    def __post_init__(self) -> None:
        if self.salt == OWN:
            self.salt = f"{OWN}-{id(self)}"
            self.hashes = PrivateBlockHashes(self.salt)
        else:
            self.hashes = Hashes(self.tokens, self.salt, self.private)

    @property
    def num_known_tokens(self) -> int:
        return len(self.tokens)

    def content(self, block_index: int) -> Content:
        return (self.salt, tuple(self.tokens[: (block_index + 1) * BLOCK_SIZE]))


class Model:
    """The same rules with lists and full scans. `order` is the whole free list, next block first."""

    def __init__(self, options: PrefixCacheOptions | None) -> None:
        self.options = options
        self.order = list(range(NUM_BLOCKS))
        self.users = [0] * NUM_BLOCKS
        self.label: list[Content | None] = [None] * NUM_BLOCKS
        self.entered: list[int] = []
        """Blocks in order of entry; a block leaves when its label goes, or when a later twin takes over."""
        self.tables: dict[Request, list[int]] = {}
        self.num_entered: dict[Request, int] = {}

    def hits(self, request: Request) -> list[int]:
        found: list[int] = []
        for i in range((len(request.tokens) - 1) // BLOCK_SIZE):
            twins = [block for block in self.entered if self.label[block] == request.content(i)]
            if not twins:
                break
            found.append(twins[0])
        return found

    def needed(self, request: Request, num_tokens: int) -> int:
        """Free blocks that admission takes."""
        hits = self.hits(request)
        num_blocks = max(-(-num_tokens // BLOCK_SIZE), len(hits))
        return num_blocks - len(hits) + sum(self.users[block] == 0 for block in hits)

    def take(self) -> int:
        block = self.order.pop(0)
        self.label[block] = None
        if block in self.entered:
            self.entered.remove(block)
        self.users[block] = 1
        return block

    def admit(self, request: Request, num_tokens: int) -> int:
        hits = self.hits(request)
        for block in hits:
            if self.users[block] == 0:
                self.order.remove(block)
            self.users[block] += 1
        self.tables[request] = list(hits)
        self.num_entered[request] = len(hits)
        self.grow(request, num_tokens)
        return len(hits) * BLOCK_SIZE

    def grow(self, request: Request, num_tokens: int) -> None:
        while len(self.tables[request]) * BLOCK_SIZE < num_tokens:
            self.tables[request].append(self.take())

    def publish(self, request: Request, num_tokens: int) -> None:
        if self.options is None:
            return
        for i in range(self.num_entered[request], num_tokens // BLOCK_SIZE):
            block = self.tables[request][i]
            self.label[block] = request.content(i)
            if self.options.duplicates == "keep_last":
                self.entered = [twin for twin in self.entered if self.label[twin] != self.label[block]]
            self.entered.append(block)
        self.num_entered[request] = max(self.num_entered[request], num_tokens // BLOCK_SIZE)

    def release(self, request: Request) -> None:
        table = self.tables.pop(request)
        labelled = self.num_entered.pop(request)
        options = self.options or PrefixCacheOptions()
        freed: list[tuple[int, bool]] = []
        for i, block in enumerate(table):
            self.users[block] -= 1
            if self.users[block] == 0:
                freed.append((block, i < labelled))
        if not options.retain_freed:
            for block, _ in freed:
                self.label[block] = None
                if block in self.entered:
                    self.entered.remove(block)
            freed = [(block, False) for block, _ in freed]
        if options.release_order == "tail_first":
            freed.reverse()
        if options.reuse_order == "fifo":
            self.order += [block for block, _ in freed]
        else:
            front = [block for block, keyed in freed if not keyed]
            self.order = front + self.order + [block for block, keyed in freed if keyed]


class Machine(RuleBasedStateMachine):
    """Requests over a two-letter alphabet come, compute, generate, swap and leave."""

    options: PrefixCacheOptions | None = None

    def __init__(self) -> None:
        super().__init__()
        self.memory = PagedKvMemory(
            NUM_BLOCKS, BLOCK_SIZE, prefix_cache=self.options, host_blocks=HOST_BLOCKS, records_copies=True
        )
        self.model = Model(self.options)
        self.requests: list[Request] = []
        self.device: list[Content | None] = [None] * NUM_BLOCKS
        """What was really written to each block; content that a hit relies on must be there."""

    @initialize(arrivals=st.lists(ARRIVALS, min_size=3, max_size=6))
    def start(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            self.arrive(arrival)

    @precondition(lambda self: len(self.requests) < 7)
    @rule(arrival=ARRIVALS)
    def arrive(self, arrival: Arrival) -> None:
        prompt, salt, private = arrival
        request = Request(list(prompt), salt, len(prompt), private)
        self.memory.register(request, request.hashes)
        self.requests.append(request)

    @rule(data=st.data(), num_tokens=st.integers(1, 6), reserve=st.sampled_from([0, 0, 1, 3]))
    def advance(self, data: st.DataObject, num_tokens: int, reserve: int) -> None:
        """Admit a waiting request if need be, then compute some tokens; a decode generates the next one."""
        ready = [r for r in self.requests if r.swapped is None]
        if not ready:
            return
        request = data.draw(st.sampled_from(ready))
        if request not in self.model.tables:
            hit = len(self.model.hits(request)) * BLOCK_SIZE
            self.admit(request, len(request.tokens) + reserve - 1 if reserve else hit + 1)
        if request in self.model.tables:
            self.compute(request, num_tokens)

    def admit(self, request: Request, num_tokens: int) -> None:
        hit = len(self.model.hits(request)) * BLOCK_SIZE
        needed = self.model.needed(request, num_tokens)
        assert self.memory.can_allocate(request, num_tokens) == (needed <= len(self.model.order))
        before = self.memory.free_blocks, self.memory.free_host_blocks
        got = self.memory.allocate(request, num_tokens)
        if needed > len(self.model.order):
            assert got is None
            assert (self.memory.free_blocks, self.memory.free_host_blocks) == before
            return
        assert got == self.model.admit(request, num_tokens) == hit
        assert got < len(request.tokens)
        request.num_computed = hit
        for i, block in enumerate(self.memory.block_table(request)[: hit // BLOCK_SIZE]):
            assert self.device[block] == request.content(i), "a hit on a block with other content"
        for block in self.memory.block_table(request)[hit // BLOCK_SIZE :]:
            self.device[block] = None

    def compute(self, request: Request, num_tokens: int) -> None:
        target = min(request.num_computed + num_tokens, len(request.tokens))
        table = list(self.memory.block_table(request))
        room = self.memory.blocks_needed(request, target) <= self.memory.free_blocks
        assert self.memory.grow(request, target) == room
        if not room:
            assert self.memory.block_table(request) == table
            return
        self.model.grow(request, target)
        request.num_computed = target
        for block in self.memory.block_table(request)[len(table) :]:
            self.device[block] = None
        table = list(self.memory.block_table(request))
        for i in range(target // BLOCK_SIZE):
            assert self.device[table[i]] in (None, request.content(i)), "written over content that is in use"
            self.device[table[i]] = request.content(i)
        if not request.private or target % 2:
            self.memory.cache_blocks(request, target)
            self.model.publish(request, min(target, request.hashes.num_public_tokens))
        if target == len(request.tokens) < 14:
            request.tokens.append(target % 2)
            if isinstance(request.hashes, Hashes):
                request.hashes.append(target % 2)

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data())
    def grow_all(self, data: st.DataObject) -> None:
        growing = data.draw(st.lists(st.sampled_from(list(self.model.tables)), unique=True, max_size=2))
        if len(growing) > self.memory.free_blocks:
            with pytest.raises(ValueError, match="Free"):
                self.memory.grow_each(growing)
            return
        self.memory.grow_each(growing)
        for request in growing:
            self.model.tables[request].append(self.model.take())
            self.device[self.model.tables[request][-1]] = None

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data(), leaves=st.booleans())
    def release(self, data: st.DataObject, leaves: bool) -> None:
        request = data.draw(st.sampled_from(list(self.model.tables)))
        self.memory.free(request, request.num_computed, for_good=leaves)
        if (self.options or PrefixCacheOptions()).retain_freed:
            self.model.publish(request, request.num_computed)
        self.model.release(request)
        request.num_computed = 0
        if leaves:
            self.memory.forget(request)
            self.requests.remove(request)

    @precondition(lambda self: self.model.tables)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.model.tables)))
        if request.num_computed == 0:
            return
        num_moved = -(-request.num_computed // BLOCK_SIZE)
        table = list(self.memory.block_table(request))
        free_host = self.memory.free_host_blocks
        self.memory.take_copies()
        got = self.memory.swap_out(request, request.num_computed)
        if num_moved > free_host:
            assert got is None
            assert self.memory.block_table(request) == table
            return
        assert got == num_moved == free_host - self.memory.free_host_blocks
        assert [copy.source for copy in self.memory.take_copies()] == table[:num_moved]
        request.swapped = [self.device[block] for block in table[:num_moved]]
        self.model.release(request)

    @precondition(lambda self: any(r.swapped is not None for r in self.requests))
    @rule(data=st.data(), back=st.booleans())
    def swap_in_or_drop(self, data: st.DataObject, back: bool) -> None:
        swapped = [r for r in self.requests if r.swapped is not None]
        request = data.draw(st.sampled_from(swapped))
        assert self.memory.cached_tokens(request) == 0
        if not back:
            self.memory.drop_swapped(request)
            request.swapped, request.num_computed = None, 0
            return
        kept = request.swapped
        assert kept is not None
        num_blocks = max(-(-len(request.tokens) // BLOCK_SIZE), len(kept))
        got = self.memory.swap_in(request, len(request.tokens))
        if num_blocks > len(self.model.order):
            assert got is None
            return
        assert got == len(kept)
        self.model.tables[request] = [self.model.take() for _ in range(num_blocks)]
        self.model.num_entered[request] = 0
        copies = self.memory.take_copies()
        assert [copy.target for copy in copies][-len(kept) :] == self.memory.block_table(request)[: len(kept)]
        for block, content in itertools.zip_longest(self.memory.block_table(request), kept):
            self.device[block] = content
        request.swapped = None

    @invariant()
    def agrees(self) -> None:
        self.memory.check()
        assert self.memory.free_blocks == len(self.model.order)
        assert self.memory.used_blocks + self.memory.free_blocks == NUM_BLOCKS
        for request in self.requests:
            assert list(self.memory.block_table(request)) == self.model.tables.get(request, [])
            waits = request not in self.model.tables and request.swapped is None
            expected = len(self.model.hits(request)) * BLOCK_SIZE if waits else 0
            if self.options is not None:
                assert self.memory.cached_tokens(request) == expected
            if waits:
                assert self.memory.lookup_prefix(request.hashes, len(request.tokens)) == self.memory.cached_tokens(
                    request
                )
                assert self.memory.cached_tokens(request) < len(request.tokens)
                for num_tokens in (1, len(request.tokens)):
                    assert self.memory.blocks_needed(request, num_tokens) == self.model.needed(request, num_tokens)


ALL_OPTIONS = [None] + [
    PrefixCacheOptions(reuse, release, retain, duplicates)
    for reuse in ("lru", "fifo")
    for release in ("tail_first", "head_first")
    for retain in (True, False)
    for duplicates in ("keep_first", "keep_last")
]


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=lambda o: "none" if o is None else "-".join(map(str, vars_of(o))))
def test_kv_memory_agrees_with_plain_model(options: PrefixCacheOptions | None) -> None:
    machine = type("OptionedMachine", (Machine,), {"options": options})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=20,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def vars_of(options: PrefixCacheOptions) -> tuple[object, ...]:
    return (
        options.reuse_order,
        options.release_order,
        "retain" if options.retain_freed else "drop",
        options.duplicates,
    )
