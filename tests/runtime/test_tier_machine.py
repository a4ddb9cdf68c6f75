"""Memory tiers under random use: two replicas with tiers of their own and a shared one, every account checked after each step."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.golden.readers.retention import built
from vajra_py.runtime.kv import PagedKvMemory, PrefixCacheOptions, Retention, TokenBlockHashes
from vajra_py.runtime.kv.tier_store import TierBlock, TierStore
from vajra_py.runtime.kv.tiers import KvTiers, TierFetch, TierLoad, TierRules

SIZE = 2
NUM_DEVICE, NUM_HOST, NUM_STORE = 8, 5, 6
PROMPTS = st.builds(
    lambda length, at, token: [0] * min(length, at) + [token] * max(length - at, 0),
    st.integers(9, 15),
    st.sampled_from([4, 8]),
    st.integers(0, 2),
)


class Request:
    def __init__(self, index: int, tokens: list[int]) -> None:
        self.request_id, self.priority, self.slo_class = f"r{index}", index % 3, ""
        self.num_prompt_tokens = self.num_known_tokens = len(tokens)
        self.hashes = TokenBlockHashes(tokens, SIZE)
        self.memory: Any = None
        self.load: TierLoad | None = None
        self.num_loaded = 0
        self.num_done = 0
        self.fetches: list[TierFetch] = []


class Machine(RuleBasedStateMachine):
    """Requests are looked up, loaded, computed, called off and leave; copies and fetches arrive late, in part, or never."""

    rules_of: tuple[TierRules, TierRules] = (TierRules(), TierRules(is_shared=True))
    policy = "lru"
    num_replicas = 2

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0
        self.shared = self.store("store", NUM_STORE)
        self.memories = []
        for replica_id in range(self.num_replicas):
            tiers = KvTiers([self.store("host", NUM_HOST), self.shared], self.rules_of, SIZE, replica_id)
            memory = PagedKvMemory(NUM_DEVICE, SIZE, prefix_cache=PrefixCacheOptions())
            memory.put_above(tiers)
            memory.use_clock(lambda: self.time)
            self.memories.append(memory)
        self.under_way: list[tuple[KvTiers, int, TierBlock]] = []
        self.requests: list[Request] = []
        self.num_made = 0
        self.known: set[tuple[int, Hashable]] = set()
        self.given_up = 0

    def store(self, name: str, num_blocks: int) -> TierStore:
        store = TierStore(name, num_blocks, Retention(built(self.policy, {}, num_blocks), self.policy))
        store.number_slots()
        return store

    def tiers(self, memory: PagedKvMemory) -> KvTiers:
        assert memory.tiers is not None
        return memory.tiers

    def take_copies(self, memory: PagedKvMemory) -> None:
        tiers = self.tiers(memory)
        self.under_way += [(tiers, level, one) for level, one in tiers.take_writes()]
        self.under_way += [(tiers, 0, one) for one in tiers.take_computed()]

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=4), replica=st.integers(0, 1), num_lost=st.integers(0, 2))
    def serve(self, prompts: list[list[int]], replica: int, num_lost: int) -> None:
        """Requests come and go one after another, and what they write arrives at once."""
        for tokens in prompts:
            one = self.come(tokens, replica)
            self.begin_fetch(one)
            while one.fetches:
                fetch = one.fetches.pop()
                self.tiers(one.memory).end_fetch(fetch, max(len(fetch.pairs) - num_lost, 0))
                self.take_copies(one.memory)
            self.let_in(one)
            if one.load is not None:
                self.end_load(one, wanted=True)
            self.let_go(one)
            while self.under_way:
                self.land(0)

    @precondition(lambda self: len(self.requests) < 3)
    @rule(tokens=PROMPTS, replica=st.integers(0, 1), is_admitted=st.booleans())
    def arrive(self, tokens: list[int], replica: int, is_admitted: bool) -> None:
        one = self.come(tokens, replica)
        if is_admitted:
            self.let_in(one)

    def come(self, tokens: list[int], replica: int) -> Request:
        self.time += 1.0
        one = Request(self.num_made, tokens)
        self.num_made += 1
        one.memory = self.memories[replica % self.num_replicas]
        one.memory.register(one, one.hashes)
        self.requests.append(one)
        return one

    @precondition(lambda self: any(not one.memory.num_held_blocks(one) for one in self.requests))
    @rule(data=st.data())
    def prefetch(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([one for one in self.requests if not one.memory.num_held_blocks(one)]))
        if not one.fetches:
            self.begin_fetch(one)

    def begin_fetch(self, one: Request) -> None:
        tiers = self.tiers(one.memory)
        start = one.memory.lookup_prefix(one.hashes, one.num_known_tokens) // SIZE
        limit = (one.num_known_tokens - 1) // SIZE
        levels = tiers.levels_of(one.hashes, start, limit)
        one.fetches = list(tiers.begin_fetch(one.hashes.block_hashes(start, start + len(levels)), levels, one))
        self.take_copies(one.memory)

    @precondition(lambda self: any(one.fetches for one in self.requests))
    @rule(data=st.data())
    def fetched(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([one for one in self.requests if one.fetches]))
        fetch = one.fetches.pop()
        self.tiers(one.memory).end_fetch(fetch, data.draw(st.integers(0, len(fetch.pairs))))
        self.take_copies(one.memory)

    @precondition(lambda self: any(not one.memory.num_held_blocks(one) for one in self.requests))
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        self.let_in(data.draw(st.sampled_from([one for one in self.requests if not one.memory.num_held_blocks(one)])))

    def let_in(self, one: Request) -> None:
        self.time += 1.0
        memory, tiers = one.memory, self.tiers(one.memory)
        found = memory.cached_tokens(one)
        levels = tiers.levels_of(one.hashes, found // SIZE, (one.num_known_tokens - 1) // SIZE)
        num_blocks = next((position for position, level in enumerate(levels) if level), len(levels))
        if not memory.can_allocate(one, one.num_known_tokens):
            return
        if num_blocks:
            start = found // SIZE
            one.load = tiers.begin_load(one.hashes.block_hashes(start, start + num_blocks), one)
        assert memory.allocate(one, one.num_known_tokens) == found
        one.num_loaded = found + num_blocks * SIZE
        if one.load is None:
            memory.cache_blocks(one, one.num_known_tokens)
        self.take_copies(memory)

    @precondition(lambda self: any(one.load for one in self.requests))
    @rule(data=st.data(), wanted=st.booleans())
    def loaded(self, data: st.DataObject, wanted: bool) -> None:
        self.end_load(data.draw(st.sampled_from([one for one in self.requests if one.load])), wanted=wanted)

    def end_load(self, one: Request, *, wanted: bool) -> None:
        tiers, load = self.tiers(one.memory), one.load
        assert load is not None
        one.load = None
        if wanted:
            one.memory.cache_blocks(one, one.num_loaded)
            tiers.end_load(load)
            one.memory.cache_blocks(one, one.num_known_tokens)
        else:
            one.memory.free(one, 0)
            tiers.call_off_load(load)
        self.take_copies(one.memory)

    @precondition(lambda self: any(one.memory.num_held_blocks(one) and not one.load for one in self.requests))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        held = [one for one in self.requests if one.memory.num_held_blocks(one) and not one.load]
        self.let_go(data.draw(st.sampled_from(held)))

    def let_go(self, one: Request) -> None:
        self.time += 1.0
        if one.memory.num_held_blocks(one):
            one.memory.free(one, one.num_known_tokens, for_good=True)
        one.memory.forget(one)
        self.requests.remove(one)
        for fetch in one.fetches:
            self.tiers(one.memory).end_fetch(fetch, 0)
        self.take_copies(one.memory)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), is_lost=st.integers(0, 9))
    def copied(self, data: st.DataObject, is_lost: int) -> None:
        self.land(data.draw(st.integers(0, len(self.under_way) - 1)), is_lost=not is_lost)

    def land(self, position: int, *, is_lost: bool = False) -> None:
        tiers, level, one = self.under_way.pop(position)
        if not is_lost:
            tiers.written(level, one)
        else:
            tiers.called_off(level, one)
            self.given_up += 1
        for memory in self.memories:
            self.take_copies(memory)

    @invariant()
    def accounts_agree(self) -> None:
        for memory in self.memories:
            memory.check()

    @invariant()
    def nothing_is_lost_unseen(self) -> None:
        """With write-back everywhere, content is gone only where the last tier gave it up, or a copy was lost or found no room."""
        now = {("any", block_hash) for memory in self.memories for block_hash in memory._pool.contents()}
        now |= {("any", one.block_hash) for memory in self.memories for one in self.tiers(memory).stores[0]}
        now |= {("any", one.block_hash) for one in self.shared}
        now |= {("any", one.block_hash) for each in self.requests if each.load for one in each.load.blocks}
        dropped = sum(sum(self.tiers(memory).num_dropped) for memory in self.memories)
        given_up = self.given_up + self.shared.num_evicted + dropped
        if all(rules.write == "write_back" for rules in self.rules_of):
            assert len(self.known - now) <= given_up - self.seen_given_up
        self.known, self.seen_given_up = now, given_up

    seen_given_up = 0


def through(after: int = 0, **more: Any) -> TierRules:
    return TierRules("write_through_selective", after, **more) if after else TierRules("write_through", **more)


CASES: dict[str, tuple[TierRules, TierRules, str]] = {
    "inclusive": (TierRules(), TierRules(is_shared=True), "lru"),
    "exclusive": (TierRules(is_exclusive=True), TierRules(is_shared=True), "lru"),
    "both_exclusive": (TierRules(is_exclusive=True), TierRules(is_exclusive=True), "lfu"),
    "through": (through(), through(is_shared=True), "lru"),
    "selective": (through(2), TierRules(is_shared=True), "slru"),
    "mixed": (TierRules(is_exclusive=True), through(3, is_shared=True), "arc"),
}


@pytest.mark.parametrize("case", CASES)
def test_tiers_under_random_use(case: str) -> None:
    first, second, policy = CASES[case]

    class Own(Machine):
        rules_of = (first, second)

    Own.policy = policy
    Own.num_replicas = 1 if second.is_exclusive else 2  # a tier that others share cannot be exclusive
    run_state_machine_as_test(
        Own,
        settings=settings(
            max_examples=15,
            stateful_step_count=30,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )


def small_tiers(first: TierRules, second: TierRules | None = None) -> KvTiers:
    """One or two tiers of four blocks."""
    rules = [first] if second is None else [first, second]
    stores = [TierStore(name, 4, Retention(built("lru", {}, 4), "lru")) for name in ("host", "store")]
    return KvTiers(stores[: len(rules)], rules, SIZE)


def test_what_is_written_through_goes_on_to_the_next_tier() -> None:
    tiers = small_tiers(through(), through())
    tiers.cached("ab", None, None)
    for one in tiers.take_computed():
        tiers.written(0, one)
    assert [(level, one.block_hash) for level, one in tiers.take_writes()] == [(1, "a"), (1, "b")]


def test_uses_are_counted_on_the_way_up_and_down_again() -> None:
    """An exclusive tier gives content away that is loaded: a second use, with which it comes back."""
    tiers = small_tiers(TierRules(is_exclusive=True))
    uses = []
    for _ in range(3):
        tiers.cached("a", None, None)
        tiers.while_evicting(lambda taken, count: tiers.gone("a", 0), [], 1)
        ((_, one),) = tiers.take_writes()
        tiers.written(0, one)
        uses.append(one.num_uses)
        tiers.end_load(tiers.begin_load("a", None))
    assert uses == [1, 2, 3]


def test_a_fetch_that_ends_early_leaves_what_has_arrived_and_room_for_others() -> None:
    tiers = small_tiers(TierRules(), TierRules())
    host, store = tiers.stores
    for depth, name in enumerate("abc"):
        one = TierBlock(name, "abc"[depth - 1] if depth else None, depth, None, 0.0)
        assert store.add(one, 0.0) == []
        assert store.written(one, 0.0)
    (fetch,) = tiers.begin_fetch("abc", [1, 1, 1], None)
    assert len(host) == 3
    tiers.end_fetch(fetch, 1)
    assert (host.contents(), len(host), store.contents()) == (["a"], 1, ["a", "b", "c"])
    tiers.check([])
