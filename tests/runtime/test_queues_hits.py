"""Do queues for keys that move with prefix hits give the order of keys that are all read at each step, whatever the cache does?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vajra_py.contract import FallenGroups, KeyMotion
from vajra_py.errors import PolicyError
from vajra_py.route.memory import ServerMemory
from vajra_py.runtime.kv import PagedKvMemory, PrefixCacheOptions, Retention, TokenBlockHashes
from vajra_py.runtime.queues import ArbitraryQueue, make_queue, ranks

BLOCK = 2


@dataclass(eq=False)
class Waiting:
    """A request, as queues, memory and the prioritizers below read it."""

    index: int
    memory: PagedKvMemory
    tokens: list[int]
    tenant: str = "a"
    arrived_at: float = 0.0
    num_computed_tokens: int = 0
    is_away: bool = False
    request_id: str = field(init=False)
    hashes: TokenBlockHashes = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = f"r{self.index}"
        self.hashes = TokenBlockHashes(self.tokens, BLOCK)

    @property
    def num_known_tokens(self) -> int:
        return len(self.tokens)

    def prefix_hit_tokens(self) -> int:
        return 0 if self.is_away else self.memory.lookup_prefix(self.hashes, self.num_known_tokens)


class MostHits:
    """The most hits first; who has waited for three seconds goes before all, and everybody by size while a test says so."""

    def __init__(self, motion: KeyMotion) -> None:
        self.key_motion = motion
        self.num_reads = 0
        self.num_changes = 0

    def key(self, request: Any, now: float) -> tuple[float, float]:
        self.num_reads += 1
        if self.num_changes % 2:
            return (0.0, float(request.num_known_tokens))
        return (0.0 if now >= request.arrived_at + 3.0 else 1.0, -float(request.prefix_hit_tokens()))

    def falls_at(self, request: Any, now: float) -> float | None:
        return None if now >= request.arrived_at + 3.0 else request.arrived_at + 2.9

    def key_epoch(self) -> int:
        return self.num_changes


class MostHitsOfTenants:
    """The most hits first among the tenants with the lowest keys."""

    def __init__(self, motion: KeyMotion) -> None:
        self.key_motion = motion
        self.keys = dict.fromkeys("abc", 0)
        self.fallen_groups = FallenGroups()

    def key(self, request: Any, now: float) -> float:
        return -float(request.prefix_hit_tokens())

    def group(self, request: Any) -> str:
        name: str = request.tenant
        return name

    def group_key(self, group: str) -> int:
        return self.keys[group]


class ShortLived:
    """A retention policy under which content lives for two seconds."""

    key_motion = KeyMotion.STATIC

    def key(self, block: Any, now: float) -> float:
        return float(block.depth)

    def expires_at(self, block: Any) -> float:
        return float(block.last_used_at) + 2.0


MEMORIES: dict[str, Any] = {
    "lru": lambda: PagedKvMemory(6, BLOCK, prefix_cache=PrefixCacheOptions()),
    "fifo": lambda: PagedKvMemory(
        6,
        BLOCK,
        prefix_cache=PrefixCacheOptions(
            reuse_order="fifo", release_order="head_first", duplicates="keep_last", drop_last_hit=True
        ),
    ),
    "retained": lambda: PagedKvMemory(
        6, BLOCK, prefix_cache=PrefixCacheOptions(), retention=Retention(ShortLived(), "short")
    ),
    "server": lambda: ServerMemory(6, BLOCK, prefix_cache=PrefixCacheOptions()),
}


class HitsMachine(RuleBasedStateMachine):
    """A memory whose content comes and goes, and the same requests in this queue and in one that reads all keys at each step."""

    kind: Any = MostHits
    memory_kind = "lru"
    can_follow = True

    def __init__(self) -> None:
        super().__init__()
        self.usual_block = ranks._BLOCK
        ranks._BLOCK = 2
        self.now = 0.0
        self.memory: PagedKvMemory = MEMORIES[self.memory_kind]()
        self.memory.use_clock(lambda: self.now)
        self.policy = self.kind(KeyMotion.PREFIX_HITS)
        self.queue: Any = make_queue(self.policy)
        self.naive: Any = make_queue(_Naive(self.policy))
        assert isinstance(self.naive, ArbitraryQueue)
        if self.can_follow:
            self.queue.use_hits(self.memory.follow_hits(wanted=True))
        self.waiting: list[Waiting] = []
        self.running: list[Waiting] = []
        self.indices = count()
        self.readers: list[tuple[Iterator[Any], Iterator[Any]]] = []
        self.looks_often = False

    def teardown(self) -> None:
        ranks._BLOCK = self.usual_block

    def new(self, tokens: list[int], tenant: str = "a") -> Waiting:
        return Waiting(next(self.indices), self.memory, tokens, tenant, arrived_at=self.now)

    # The queue

    @initialize(
        many=st.lists(st.tuples(st.deferred(lambda: prompts), st.sampled_from("abc")), max_size=6), often=st.booleans()
    )
    def start(self, many: list[tuple[list[int], str]], often: bool) -> None:
        self.looks_often = often
        for tokens, tenant in many:
            self.add(tokens, tenant)

    @precondition(lambda self: len(self.waiting) < 8)
    @rule(tokens=st.deferred(lambda: prompts), tenant=st.sampled_from("abc"))
    def add(self, tokens: list[int], tenant: str) -> None:
        request = self.new(tokens, tenant)
        self.waiting.append(request)
        for queue in (self.queue, self.naive):
            queue.add(request, self.now)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(request)
        for queue in (self.queue, self.naive):
            queue.remove(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        """A late token comes for a request that waits."""
        request = data.draw(st.sampled_from(self.waiting))
        request.tokens.append(7)
        for queue in (self.queue, self.naive):
            queue.refresh(request, self.now)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def go_away(self, data: st.DataObject) -> None:
        """The state of a request changes, and with it whether it has hits."""
        request = data.draw(st.sampled_from(self.waiting))
        request.is_away = not request.is_away
        self.queue.touch(request)

    @rule()
    def begin_step(self) -> None:
        for queue in (self.queue, self.naive):
            queue.begin_step()

    @rule(step=st.sampled_from([0.0, 0.1, 1.0, 2.9, 3.0, -0.5]))
    def pass_time(self, step: float) -> None:
        if step >= 0 or self.memory_kind != "retained":  # time only moves forward for retention policies
            self.now += step

    @rule(num_read=st.integers(0, 6))
    def start_reading(self, num_read: int) -> None:
        readers = (self.queue.ordered(self.now), self.naive.ordered(self.now))
        self.readers = [readers]
        self.go_on_reading(num_read)

    @precondition(lambda self: self.readers)
    @rule(num_read=st.integers(1, 6))
    def go_on_reading(self, num_read: int) -> None:
        mine, naive = self.readers[0]
        for _ in range(num_read):
            assert next(mine, None) is next(naive, None)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit_while_reading(self, data: st.DataObject) -> None:
        """Take some and pass over others, while steps begin and content comes and goes."""
        self.readers = []
        mine, naive = self.queue.ordered(self.now), self.naive.ordered(self.now)
        while True:
            request = next(mine, None)
            assert request is next(naive, None)
            if request is None:
                return
            action = data.draw(st.integers(0, 4))
            if action <= 1:
                self.waiting.remove(request)
                for queue in (self.queue, self.naive):
                    queue.remove(request)
                self.compute(request.tokens)
            if action in (1, 2):
                self.begin_step()
            if action == 3:
                return

    @rule()
    def same_order(self) -> None:
        self.readers = []
        assert self.queue.peek(self.now) is self.naive.peek(self.now)
        assert list(self.queue.ordered(self.now)) == list(self.naive.ordered(self.now))
        for request in self.waiting:
            assert self.queue.urgency(request, self.now) == self.naive.urgency(request, self.now)
        assert (len(self.queue), self.queue.num_tokens) == (len(self.naive), self.naive.num_tokens)

    @invariant()
    def same_order_after_each_event(self) -> None:
        """A step begins after each event in half of the lives."""
        if self.looks_often:
            self.begin_step()
            assert list(self.queue.ordered(self.now)) == list(self.naive.ordered(self.now))

    # The cache

    @rule(tokens=st.deferred(lambda: prompts))
    def run(self, tokens: list[int]) -> None:
        """Somebody runs and ends, whose blocks can be found from now on; what was idle may be overwritten."""
        num_running = len(self.running)
        self.compute(tokens)
        if len(self.running) > num_running:
            request: Any = self.running.pop()
            self.memory.free(request)
            self.memory.forget(request)

    @rule(tokens=st.deferred(lambda: prompts))
    def compute(self, tokens: list[int]) -> None:
        """Somebody runs, and goes on."""
        request: Any = self.new([*tokens])
        self.memory.register(request, request.hashes)
        if self.memory.allocate(request, len(tokens)) is None:
            self.memory.forget(request)
            return
        self.memory.cache_blocks(request, len(tokens))
        self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), kind=st.sampled_from(["free", "free", "uncache", "withdraw"]))
    def end(self, data: st.DataObject, kind: str) -> None:
        request: Any = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if kind == "uncache":
            self.memory.uncache_blocks(request, BLOCK)
        if kind == "withdraw":
            self.memory.withdraw_blocks(request, BLOCK)
        self.memory.free(request)
        self.memory.forget(request)

    @rule()
    def lose_memory(self) -> None:
        self.memory.clear()
        self.running = []

    @precondition(lambda self: isinstance(self.memory, ServerMemory))
    @rule(tokens=st.deferred(lambda: prompts), kind=st.sampled_from(["begin", "end", "stored", "stored", "removed"]))
    def hear_of_server(self, tokens: list[int], kind: str) -> None:
        memory: Any = self.memory
        hashes = TokenBlockHashes(tokens, BLOCK).block_hashes(0, len(tokens) // BLOCK)
        if kind == "begin":
            memory.begin()
        elif kind == "end":
            memory.end()
        else:
            memory.change(*((hashes, ()) if kind == "stored" else ((), hashes[-1:])))

    @invariant()
    def nobody_is_lost(self) -> None:
        assert set(self.queue) == set(self.waiting)

    # Keys that move for other reasons

    @precondition(lambda self: self.kind is MostHits)
    @rule()
    def change_all(self) -> None:
        self.policy.num_changes += 1
        self.begin_step()


class _Naive:
    """The same keys, declared to change with anything."""

    def __init__(self, policy: Any) -> None:
        self.key_motion = KeyMotion.ARBITRARY
        if hasattr(policy, "group"):
            self.key = lambda request, now: (policy.group_key(request.tenant), policy.key(request, now))
        else:
            self.key = policy.key


class GroupedHitsMachine(HitsMachine):
    """The same life in groups, whose keys rise and fall between steps."""

    kind = MostHitsOfTenants

    @rule(group=st.sampled_from("abc"), by=st.integers(-2, 2))
    def move_group(self, group: str, by: int) -> None:
        self.policy.keys[group] += by
        self.policy.fallen_groups.add(group)
        self.begin_step()


prompts = st.builds(
    lambda first, rest: [*first, *first, *rest],
    st.sampled_from([[1], [1], [2]]),
    st.lists(st.sampled_from([1, 1, 2]), max_size=7),
)


def machine(of: type[HitsMachine], memory_kind: str, **attributes: Any) -> Any:
    case = type(f"{of.__name__}{memory_kind}", (of,), {"memory_kind": memory_kind, **attributes}).TestCase
    case.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
    return case


TestLru = machine(HitsMachine, "lru")
TestFifo = machine(HitsMachine, "fifo")
TestRetained = machine(HitsMachine, "retained")
TestServer = machine(HitsMachine, "server")
TestOfAMemoryThatCannotSay = machine(HitsMachine, "lru", can_follow=False)
TestGrouped = machine(GroupedHitsMachine, "lru")
TestGroupedRetained = machine(GroupedHitsMachine, "retained")


def filled(num: int, kind: Any = MostHits) -> tuple[PagedKvMemory, Any, Any, list[Any]]:
    memory = PagedKvMemory(4 * num, BLOCK, prefix_cache=PrefixCacheOptions())
    policy = kind(KeyMotion.PREFIX_HITS)
    queue: Any = make_queue(policy, "mine")
    queue.use_hits(memory.follow_hits(wanted=True))
    waiting: list[Any] = [Waiting(index, memory, [index, index, 0, 0, 1]) for index in range(num)]
    for one in waiting:
        queue.add(one, 0.0)
    assert queue.peek(0.0) is waiting[0]
    return memory, policy, queue, waiting


def run(memory: PagedKvMemory, tokens: list[int]) -> None:
    request: Any = Waiting(-1, memory, tokens)
    memory.register(request, request.hashes)
    memory.allocate(request, len(tokens))
    memory.cache_blocks(request, len(tokens))
    memory.free(request)
    memory.forget(request)


def test_what_one_block_changes_is_read_and_nothing_else() -> None:
    memory, policy, queue, waiting = filled(2000)
    policy.num_reads = 0
    run(memory, [700, 700, 0, 0, 1])
    queue.begin_step()
    assert queue.peek(0.0) is waiting[700]
    queue.begin_step()
    assert queue.peek(0.1) is waiting[700]
    assert policy.num_reads == 1


def test_keys_stand_while_a_step_is_formed() -> None:
    """Content that comes within a step counts from the next one on, as with keys that are all read once a step."""
    memory, _, queue, waiting = filled(20)
    run(memory, [5, 5])
    assert queue.peek(0.0) is waiting[0]
    queue.begin_step()
    assert queue.peek(0.0) is waiting[5]


def test_a_key_that_breaks_the_contract_is_named_until_it_is_mended() -> None:
    memory, policy, queue, waiting = filled(20)
    policy.key = lambda request, now: (math.nan, 0.0)
    queue._keys._key = policy.key
    run(memory, [5, 5])
    for _ in range(2):
        queue.begin_step()
        with pytest.raises(PolicyError, match=r"mine, request r5: key\(\) is not finite"):
            queue.peek(0.0)
    queue._keys._key = MostHits(KeyMotion.PREFIX_HITS).key
    assert queue.peek(0.0) is waiting[5]


def test_a_key_that_could_not_be_read_when_its_time_came_is_read_once_it_is_mended() -> None:
    memory, policy, queue, waiting = filled(2)
    late = Waiting(2, memory, [2, 2, 0], arrived_at=2.0)
    run(memory, [2, 2])
    queue.add(late, 2.0)
    assert list(queue.ordered(2.0)) == [late, *waiting]
    queue._keys._key = lambda request, now: (math.nan, 0.0)
    with pytest.raises(PolicyError, match=r"mine, request r\d: key\(\) is not finite"):
        queue.peek(3.0)
    queue._keys._key = policy.key
    assert list(queue.ordered(3.0)) == [*waiting, late]


def test_a_queue_follows_the_memory_that_it_is_given_last() -> None:
    _, _, queue, waiting = filled(20)
    other = PagedKvMemory(80, BLOCK, prefix_cache=PrefixCacheOptions())
    run(other, [9, 9])
    for one in waiting:
        one.memory = other
    queue.use_hits(other.follow_hits(wanted=True))
    assert queue.peek(0.0) is waiting[9]
    run(other, [11, 11, 0, 0])
    queue.begin_step()
    assert queue.peek(0.0) is waiting[11]
    assert other.follow_hits(wanted=False) is None


def test_content_that_expires_takes_its_hits_along() -> None:
    now = 0.0
    memory = PagedKvMemory(8, BLOCK, prefix_cache=PrefixCacheOptions(), retention=Retention(ShortLived(), "short"))
    memory.use_clock(lambda: now)
    queue: Any = make_queue(MostHitsOfTenants(KeyMotion.PREFIX_HITS))
    queue.use_hits(memory.follow_hits(wanted=True))
    waiting: list[Any] = [Waiting(index, memory, [index, index, 0]) for index in range(3)]
    for one in waiting:
        queue.add(one, now)
    run(memory, [2, 2])
    queue.begin_step()
    assert queue.peek(now) is waiting[2]
    now = 5.0
    assert list(queue.ordered(now)) == waiting


def test_a_block_in_the_middle_takes_those_behind_it_along() -> None:
    """Blocks go before those that continue them where the head of a table is reused first."""
    options = PrefixCacheOptions(release_order="head_first")
    memory = PagedKvMemory(5, BLOCK, prefix_cache=options)
    queue: Any = make_queue(MostHits(KeyMotion.PREFIX_HITS))
    queue.use_hits(memory.follow_hits(wanted=True))
    few, many = (Waiting(index, memory, tokens) for index, tokens in enumerate(([5, 5, 0], [7, 7, 8, 8, 9, 9, 0])))
    run(memory, many.tokens[:6])
    for one in (few, many):
        queue.add(one, 0.0)  # type: ignore[arg-type]
    assert queue.peek(0.0) is many
    run(memory, [5, 5, 6, 6, 6, 6])
    assert [one.prefix_hit_tokens() for one in (few, many)] == [2, 0]
    queue.begin_step()
    assert queue.peek(0.0) is few


def test_tokens_that_are_known_late_bring_hits() -> None:
    memory, _, queue, waiting = filled(4)
    late = Waiting(9, memory, [8, 8])
    late.tokens += [8, 8, 8]
    run(memory, [8, 8, 8, 8])
    run(memory, [3, 3, 0, 0])
    queue.add(late, 0.0)
    queue.begin_step()
    assert queue.peek(0.0) is waiting[3], "four hits to two"
    for _ in range(3):
        late.hashes.append(8)
    queue.remove(waiting[3])
    run(memory, [2, 2])
    queue.begin_step()
    assert list(queue.ordered(0.0))[:2] == [late, waiting[2]]
    assert queue.urgency(late, 0.0)[0] == (1.0, -4.0)


def test_times_that_come_in_any_order_are_answered() -> None:
    memory, _, queue, waiting = filled(3)
    late = Waiting(3, memory, [1, 2], arrived_at=1.0)
    queue.add(late, 4.5)
    early = Waiting(4, memory, [1, 2], arrived_at=-1.0)
    queue.add(early, 1.0)
    assert list(queue.ordered(2.5)) == [early, *waiting, late]
    assert list(queue.ordered(4.5)) == [early, *waiting, late]
    run(memory, [2, 2])
    assert list(queue.ordered(1.0)) == [waiting[2], early, waiting[0], waiting[1], late]


def test_who_comes_at_another_time_has_keys_looked_after() -> None:
    memory, _, queue, waiting = filled(3)
    run(memory, [2, 2])
    assert queue.peek(0.0) is waiting[2 - 2], "keys stand within a step"
    queue.add(Waiting(3, memory, [1, 2]), 1.0)
    assert queue.peek(0.0) is waiting[2]


def test_a_reader_does_not_see_who_comes_later() -> None:
    memory, _, queue, waiting = filled(3)
    order = queue.ordered(0.0)
    assert next(order) is waiting[0]
    run(memory, [2, 2])
    late = Waiting(3, memory, [2, 2, 2, 2])
    queue.add(late, 0.0)
    queue.begin_step()
    assert list(order) == [waiting[2], waiting[1]]


def test_what_a_server_tells_of_its_cache_moves_keys() -> None:
    memory = ServerMemory(40, BLOCK, prefix_cache=PrefixCacheOptions())
    queue: Any = make_queue(MostHits(KeyMotion.PREFIX_HITS))
    queue.use_hits(memory.follow_hits(wanted=True))
    waiting: list[Any] = [Waiting(index, memory, [index, index, 0]) for index in range(3)]
    for one in waiting:
        queue.add(one, 0.0)

    def first() -> int:
        queue.begin_step()
        head = queue.peek(0.0)
        assert head is queue.peek(0.0)
        return int(head.index)

    hashes = [one.hashes.block_hash(0) for one in waiting]
    run(memory, [1, 1])
    assert first() == 1, "what was sent there is taken for its content"
    memory.begin()
    assert first() == 0
    memory.change([hashes[2]], [])
    assert first() == 2
    run(memory, [1, 1])
    assert first() == 2, "the server is believed"
    memory.change([], [hashes[2]])
    assert first() == 0
    memory.end()
    assert first() == 1
    run(memory, [0, 0])
    assert first() == 0
