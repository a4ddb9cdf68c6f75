"""KV memory under retention policies, pins, copies and events: random use, with every account checked after each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.golden.readers.retention import built
from vajra_py.contract import CachedBlock, Key, KeyMotion, RetentionPolicy
from vajra_py.runtime.kv import PagedKvMemory, PrefixCacheOptions, Retention, TokenBlockHashes
from vajra_py.runtime.kv.block_hashes import PrivateBlockHashes
from vajra_py.runtime.kv.content_events import ContentChange, ContentEvent, ContentEvents
from vajra_py.runtime.kv.pins import Pins
from vajra_py.runtime.kv.retained_pool import RetainedBlockPool
from vajra_py.runtime.kv.retention_order import CachedEntry
from vajra_py.runtime.kv.tier_store import TierStore
from vajra_py.runtime.kv.tiers import KvTiers, TierRules

NUM_BLOCKS, BLOCK_SIZE = 12, 2
PROMPTS = st.builds(
    lambda length, at, token: [0] * min(length, at) + [token] * max(length - at, 0),
    st.integers(1, 13),
    st.sampled_from([4, 8, 13]),
    st.integers(0, 2),
)


class Request:
    """A request as memory sees it, with the facts that policies read."""

    def __init__(self, index: int, tokens: list[int]) -> None:
        self.request_id, self.priority, self.slo_class = f"r{index}", index % 3, "batch" if index % 2 else ""
        self.tokens = tokens
        self.hashes = TokenBlockHashes(tokens, BLOCK_SIZE)
        self.num_computed = 0

    @property
    def num_known_tokens(self) -> int:
        return len(self.tokens)


class ByDepth:
    """Keys that change with anything: the deepest first while the clock is even, else the shallowest."""

    def __init__(self, motion: KeyMotion) -> None:
        self.key_motion = motion

    def key(self, block: CachedBlock, now: float) -> Key:
        return block.depth if int(now) % 2 else -block.depth


class Ageing:
    """Keys that are lines in time: the worth of a use fades."""

    key_motion = KeyMotion.TIME_LINEAR

    def key(self, block: CachedBlock, now: float) -> Key:
        intercept, slope = self.line(block)
        return intercept + slope * now

    def line(self, block: CachedBlock) -> tuple[float, float]:
        return (10.0 * block.num_uses + block.last_used_at, -0.5 * block.num_uses)


POLICIES: dict[str, Any] = {
    **{name: lambda name=name: built(name, {}, NUM_BLOCKS) for name in ("lru", "lfu", "fifo", "mru", "filo", "slru", "arc", "priority")},
    "ttl": lambda: built("ttl", {"ttl_s": 5.0, "ttl_by_slo_class_s": {"batch": 2.0}}, NUM_BLOCKS),
    "time_linear": Ageing,
    "arbitrary": lambda: ByDepth(KeyMotion.ARBITRARY),
    "volatile": lambda: ByDepth(KeyMotion.VOLATILE),
    "none": lambda: None,
}  # fmt: skip


class Machine(RuleBasedStateMachine):
    """Requests come, compute, generate, are pinned, withdraw and leave, while time passes."""

    name = ""

    def __init__(self) -> None:
        super().__init__()
        policy = cast("RetentionPolicy | None", POLICIES[self.name]())
        self.policy = policy
        self.memory = PagedKvMemory(
            NUM_BLOCKS,
            BLOCK_SIZE,
            prefix_cache=PrefixCacheOptions(),
            retention=None if policy is None else Retention(policy, self.name),
        )
        self.time = 0.0
        self.memory.use_clock(lambda: self.time)
        self.memory.report_evictions(self.on_evicted)
        self.record: deque[ContentEvent] = deque()
        self.memory.report_content(ContentEvents(0, self.memory.now, self.record))
        self.heard: set[Hashable] = set()
        self.requests: list[Request] = []
        self.resident: list[Request] = []
        self.written: dict[int, tuple[int, ...]] = {}
        """True content of each block: all tokens up to its end."""
        self.pinned: dict[int, list[Hashable]] = {}
        self.num_made = 0

    def on_evicted(self, entry: CachedEntry, now: float) -> None:
        assert entry.num_children == 0, "a block went before one that continues it"
        assert not any(entry.block_hash in hashes for hashes in self.pinned.values()), "pinned content went"

    @initialize(prompts=st.lists(PROMPTS, min_size=3, max_size=5))
    def start(self, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            self.arrive(prompt)

    @precondition(lambda self: len(self.requests) < 8)
    @rule(prompt=PROMPTS)
    def arrive(self, prompt: list[int]) -> None:
        self.num_made += 1
        request = Request(self.num_made, list(prompt))
        self.memory.register(request, request.hashes)
        self.requests.append(request)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.time += seconds
        for name in self.memory.settle_due():
            del self.pinned[cast(int, name)]

    @rule(data=st.data(), num_tokens=st.integers(1, 8), publish=st.booleans())
    def advance(self, data: st.DataObject, num_tokens: int, publish: bool) -> None:
        if not self.requests:
            return
        request = data.draw(st.sampled_from(self.requests))
        if request not in self.resident:
            found = self.memory.cached_tokens(request)
            room = self.memory.can_allocate(request, request.num_known_tokens)
            got = self.memory.allocate(request, request.num_known_tokens)
            assert (got is not None) == room
            if got is None:
                return
            assert got == found < request.num_known_tokens
            table = self.memory.block_table(request)
            for index in range(got // BLOCK_SIZE):
                assert self.written[table[index]] == tuple(request.tokens[: (index + 1) * BLOCK_SIZE]), "a wrong hit"
            for block in table[got // BLOCK_SIZE :]:
                self.written.pop(block, None)
            request.num_computed = got
            self.resident.append(request)
        self.compute(request, num_tokens, publish)

    def compute(self, request: Request, num_tokens: int, publish: bool) -> None:
        target = min(request.num_computed + num_tokens, len(request.tokens))
        before = len(self.memory.block_table(request))
        if not self.memory.grow(request, target):
            return
        table = self.memory.block_table(request)
        for block in table[before:]:
            self.written.pop(block, None)
        for index in range(target // BLOCK_SIZE):
            content = tuple(request.tokens[: (index + 1) * BLOCK_SIZE])
            assert self.written.get(table[index], content) == content, "written over content that is in use"
            self.written[table[index]] = content
        if publish:
            self.memory.cache_blocks(request, target)
            if num_tokens == 7 and self.memory.uncache_blocks(request, request.num_computed):
                return  # it leaves the step in which this would have been computed
        request.num_computed = target
        if target == len(request.tokens) < 16:
            request.tokens.append(target % 2)
            request.hashes.append(target % 2)

    @precondition(lambda self: self.resident)
    @rule(data=st.data(), leaves=st.booleans(), seconds=st.sampled_from([0.0, 0.0, 1.5, 6.0]))
    def release(self, data: st.DataObject, leaves: bool, seconds: float) -> None:
        request = data.draw(st.sampled_from(self.resident))
        self.resident.remove(request)
        self.memory.free(request, request.num_computed, for_good=leaves)
        request.num_computed = 0
        if seconds:
            self.pin(request, seconds)
        if leaves:
            self.memory.forget(request)
            self.requests.remove(request)

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.resident))
        self.memory.withdraw_blocks(request, 0)
        self.memory.free(request, request.num_computed)
        self.memory.forget(request)
        self.resident.remove(request)
        self.requests.remove(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), seconds=st.sampled_from([1.5, 4.0]))
    def pin_any(self, data: st.DataObject, seconds: float) -> None:
        self.pin(data.draw(st.sampled_from(self.requests)), seconds)

    def pin(self, request: Request, seconds: float) -> None:
        name = int(request.request_id[1:]) % 3
        before = self.memory._pool.num_pinned, self.memory.free_blocks
        if not self.memory.pin(name, request, self.time + seconds):
            assert (self.memory._pool.num_pinned, self.memory.free_blocks) == before
            return
        self.pinned.pop(name, None)
        if request in self.resident:
            blocks = request.num_computed // BLOCK_SIZE
        else:
            blocks = self.memory.cached_tokens(request) // BLOCK_SIZE
        kept = [one for one in request.hashes.block_hashes(0, blocks) if self.memory_holds(one)]
        if kept:
            self.pinned[name] = kept

    def memory_holds(self, block_hash: Hashable) -> bool:
        self.hear()
        return block_hash in self.heard

    @precondition(lambda self: self.pinned)
    @rule(data=st.data(), forced=st.booleans())
    def unpin(self, data: st.DataObject, forced: bool) -> None:
        name: Hashable = data.draw(st.sampled_from(sorted(self.pinned)))
        if forced:
            freed = self.memory.release_pin()
            if freed is None:
                return
            name = freed
        else:
            self.memory.unpin(name)
        self.pinned.pop(cast(int, name), None)

    def hear(self) -> None:
        while self.record:
            event = self.record.popleft()
            if event.change is ContentChange.STORED:
                assert self.heard.isdisjoint(event.hashes)
                self.heard.update(event.hashes)
            elif event.change is ContentChange.REMOVED:
                assert self.heard.issuperset(event.hashes)
                self.heard.difference_update(event.hashes)

    @invariant()
    def agrees(self) -> None:
        self.memory.check()
        assert self.memory.policy_error is None
        assert self.memory._pool.num_pinned <= NUM_BLOCKS // 2
        found = [self.memory.lookup_prefix(one.hashes, len(one.tokens)) for one in self.requests]
        self.hear()  # content that a lookup finds expired is removed
        for request, hit in zip(self.requests, found, strict=True):
            hashes = request.hashes.block_hashes(0, (len(request.tokens) - 1) // BLOCK_SIZE)
            held = next((index for index, one in enumerate(hashes) if one not in self.heard), len(hashes))
            assert held * BLOCK_SIZE == hit

    def teardown(self) -> None:
        """However many pins there are, everybody can be served in the end, one after the other."""
        for request in list(self.resident):
            self.memory.free(request, request.num_computed)
        self.resident.clear()
        for request in self.requests:
            while self.memory.allocate(request, request.num_known_tokens) is None:
                assert self.memory.release_pin() is not None, "a request can never run"
            self.memory.free(request, 0, for_good=True)
            self.memory.check()


@pytest.mark.parametrize("name", POLICIES)
def test_no_block_is_lost_or_shared_wrongly(name: str) -> None:
    run_state_machine_as_test(
        type("PolicyMachine", (Machine,), {"name": name}),
        settings=settings(
            max_examples=10,
            stateful_step_count=40,
            deadline=None,
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def test_continuations_go_with_content_that_was_never_computed_again() -> None:
    """A second request computes known content anew, takes its idle block's place, and leaves the step before it has run."""
    memory = PagedKvMemory(
        NUM_BLOCKS,
        BLOCK_SIZE,
        prefix_cache=PrefixCacheOptions(),
        retention=Retention(POLICIES["lfu"](), "lfu"),
    )
    early, late, other = Request(1, [0] * 8), Request(2, [0] * 8), Request(3, [1] * 8)
    for request in (early, late, other):
        memory.register(request, request.hashes)
        assert memory.allocate(request, 8) == 0
    memory.free(early, 8, for_good=True)
    memory.free(other, 8, for_good=True)
    memory.check()
    memory.cache_blocks(late, 4)
    memory.check()
    assert memory.uncache_blocks(late, 0)
    memory.check()
    memory.free(late, 0)
    memory.check()
    assert memory.lookup_prefix(early.hashes, 8) == 0
    assert memory.lookup_prefix(other.hashes, 8) == 6, "another prompt's content stays"
    assert memory.free_blocks == NUM_BLOCKS


def test_content_that_continues_a_failed_requests_blocks_goes_with_them_though_it_is_in_use() -> None:
    memory = PagedKvMemory(
        NUM_BLOCKS, BLOCK_SIZE, prefix_cache=PrefixCacheOptions(), retention=Retention(POLICIES["lfu"](), "lfu")
    )
    failed, longer, twin, later = (Request(index, [0] * count) for index, count in enumerate((5, 9, 9, 9)))
    for request in (failed, longer, twin):
        memory.register(request, request.hashes)
        assert memory.allocate(request, len(request.tokens)) == (0 if request is failed else 4)
        memory.cache_blocks(request, 4)
    memory.cache_blocks(longer, 8)
    memory.cache_blocks(twin, 8)  # copies of the same content
    memory.withdraw_blocks(failed, 0)
    memory.check()
    memory.register(later, later.hashes)
    assert memory.cached_tokens(later) == 0
    for request in (failed, longer, twin):
        memory.free(request, len(request.tokens), for_good=True)
        memory.check()
    assert memory.cached_tokens(later) == 0
    assert memory.free_blocks == NUM_BLOCKS


@pytest.mark.parametrize("hashes", [None, PrivateBlockHashes("r2")])
def test_a_pin_of_content_that_no_other_request_can_find_ends_the_earlier_one(hashes: Any) -> None:
    memory = PagedKvMemory(NUM_BLOCKS, BLOCK_SIZE, prefix_cache=PrefixCacheOptions())
    pinned, unnamed = Request(1, [0] * 8), Request(2, [1] * 8)
    memory.register(pinned, pinned.hashes)
    memory.register(unnamed, hashes)
    assert memory.allocate(pinned, 8) == 0
    memory.free(pinned, 8)
    assert memory.pin("session", pinned, 9.0)
    assert memory.free_blocks < NUM_BLOCKS
    assert memory.pin("session", unnamed, 9.0)
    assert memory.free_blocks == NUM_BLOCKS
    assert not memory.unpin("session")


def test_a_policy_is_told_of_uses_in_the_order_of_the_chain() -> None:
    class Told(Ageing):
        def on_used(self, blocks: Sequence[CachedBlock], now: float) -> None:
            told.append([block.depth for block in blocks])

    told: list[list[int]] = []
    memory = PagedKvMemory(
        NUM_BLOCKS, BLOCK_SIZE, prefix_cache=PrefixCacheOptions(), retention=Retention(Told(), "told")
    )
    for index in range(2):
        request = Request(index, [0] * 9)
        memory.register(request, request.hashes)
        assert memory.allocate(request, 9) == 8 * index
        memory.free(request, 9, for_good=True)
    assert told == [[0, 1, 2, 3]]


def above_a_tier(num_blocks: int, rules: TierRules) -> tuple[RetainedBlockPool, KvTiers]:
    """A pool, and a tier below it that has room for everything."""
    retention = Retention(POLICIES["lru"](), "lru")
    pool = RetainedBlockPool(num_blocks, PrefixCacheOptions(), retention, lambda: 0.0)
    tiers = KvTiers([TierStore("host", NUM_BLOCKS, Retention(POLICIES["lru"](), "lru"))], [rules], BLOCK_SIZE)
    pool.lower = tiers
    return pool, tiers


def test_content_that_nobody_can_name_goes_down_when_it_is_overwritten() -> None:
    """Three of four blocks are full: the fourth goes first, and then all three at once, each copied once."""
    pool, tiers = above_a_tier(4, TierRules())
    table = pool.take(4)
    pool.retire(table, 3)
    pool.check()
    assert pool.take(1) == table[3:]
    assert not tiers.take_writes()
    assert pool.take(3) == table[2::-1]
    assert [(level, one.depth) for level, one in tiers.take_writes()] == [(0, 0), (0, 1), (0, 2)]


def test_what_is_entered_is_written_through_in_the_order_of_the_chain() -> None:
    pool, tiers = above_a_tier(4, TierRules("write_through"))
    table = pool.take(4)
    pool.cache(table[:3], "abc")
    pool.cache(table[3:], "d", "c")
    assert [(one.block_hash, one.depth) for one in tiers.take_computed()] == [("a", 0), ("b", 1), ("c", 2), ("d", 3)]


def test_pins_that_are_due_are_named_first_end_first() -> None:
    pins = Pins()
    for name, until in (("late", 3.0), ("taken back", 1.5), ("early", 1.0), ("middle", 2.0)):
        pins.add(name, [name], until)
    pins.remove("taken back")
    assert pins.due(0.5) == []
    assert pins.due(2.0) == ["early", "middle"]
    assert (pins.next_end, pins.due(2.5), pins.due(3.0)) == (3.0, [], ["late"])
