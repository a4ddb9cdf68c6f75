"""Tiers of one replica's KV memory below the device: content that is written down to them, and content that is loaded
back.

The first tier is next to the device; content of the other tiers is loaded through it. A tier gets content from the
level above: when that level evicts the content (`write_back`), as soon as that level stores it (`write_through`), or
after a number of uses (`write_through_selective`). Content is copied from the device through a buffer: a block may be
overwritten before its copy has arrived in the tier.

This module does not model time. Transfers are listed (`take_writes`, `take_computed`) or returned (`begin_load`,
`begin_fetch`), and the owner of the links decides when they have arrived. Replicas may share their last tier.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from vajra_py.errors import PolicyError
from vajra_py.runtime.kv.block_hashes import FIRST_LOOKUP_BLOCKS, LOOKUP_GROWTH, BlockHashes, reads_cache
from vajra_py.runtime.kv.block_pool import require
from vajra_py.runtime.kv.content_events import ContentEvents
from vajra_py.runtime.kv.tier_store import TierBlock, TierStore

WriteRule: TypeAlias = Literal["write_back", "write_through", "write_through_selective"]

DEVICE = "device"
"""Name of the memory above the first tier."""


class TierRules(Struct, frozen=True):
    """Rules by which one tier gets and keeps content."""

    write: WriteRule = "write_back"
    after_uses: int = 2
    """Number of uses of content, its first computation included, that `write_through_selective` requires."""
    is_exclusive: bool = False
    """True if the tier drops content that the level above holds. Only with `write_back`."""
    is_shared: bool = False
    """True if replicas share the tier."""

    def writes_at(self, num_uses: int) -> bool:
        """Return True if content with this number of uses is written while the level above still holds it."""
        if self.write == "write_back":
            return False
        return self.write == "write_through" or num_uses >= self.after_uses


class _OnDevice:
    """Content that the device's cache holds."""

    __slots__ = ("depth", "num_uses", "parent_hash", "request")

    def __init__(self, parent_hash: Hashable, depth: int, request: Any, num_uses: int) -> None:
        self.parent_hash = parent_hash
        self.depth = depth
        self.request = request
        self.num_uses = num_uses


class TierLoad(Struct, frozen=True):
    """Load of blocks from the first tier to the device, in order of their chain."""

    blocks: Sequence[TierBlock]
    were_taken: bool
    """True if the tier is exclusive, so that it may have dropped the blocks when the load began."""


class TierFetch(Struct, frozen=True):
    """Fetch of blocks from one lower tier to the first tier, as pairs (block in the lower tier, block in the first
    tier) in order of their chain.
    """

    level: int
    pairs: Sequence[tuple[TierBlock, TierBlock]]


class KvTiers:
    """The tiers below one replica's device, nearest first; level 0 is the first one."""

    def __init__(
        self,
        stores: Sequence[TierStore],
        rules: Sequence[TierRules],
        block_size: int,
        replica_id: int = 0,
        *,
        prompts_only: bool = False,
    ) -> None:
        """Create the tiers. With `prompts_only`, only blocks within a request's prompt are written to tiers, so
        generated tokens reach a tier only if a later prompt contains them.
        """
        self.stores = stores
        self.rules = rules
        self.block_size = block_size
        self.num_dropped = [0] * len(stores)
        """Number of blocks, by level, that a tier could not take because it was full and could evict none."""
        self.on_forget: Callable[[Any], None] | None = None
        """Called with each request that leaves the replica or its queue."""
        self.on_give_up: Callable[[Any], None] | None = None
        """Called with each request whose loaded content is dropped so that other requests can run."""
        self.on_clear: Callable[[], None] | None = None
        """Called before `clear` drops the content of the tiers."""
        self.events: Sequence[ContentEvents | None] = [None] * len(stores)
        """Writer of events about the content of each tier; None: no events are written."""
        self._replica_id = replica_id
        self._prompts_only = prompts_only
        self._clock: Callable[[], float] = float
        self._device: dict[Hashable, _OnDevice] = {}
        self._loaded: dict[Hashable, int] = {}
        """Number of uses of each content that is being loaded to the device from an exclusive tier."""
        self._runs: dict[int, tuple[int, Sequence[int], Any]] = {}
        """Runs of idle device blocks whose content no request can hit; an evicted run is written to the first tier like
        other content. By the run's first block: (number of the run, blocks in order of content, request).
        """
        self._num_runs = 0
        self._writes: list[tuple[int, TierBlock]] = []
        self._computed: dict[Hashable, TierBlock] = {}
        """Planned copies to the first tier, of content that the step being formed computes or found on the device."""
        self._is_evicting = False

    @property
    def names(self) -> Sequence[str]:
        """Names of the tiers, nearest first."""
        return [store.name for store in self.stores]

    @property
    def policy_error(self) -> PolicyError | None:
        """Violation of the contract by a tier's retention policy; None if there was none."""
        return next((store.policy_error for store in self.stores if store.policy_error is not None), None)

    def report(self, events: Sequence[ContentEvents]) -> None:
        """Report the present content of each tier to its element of `events`, and every change from now on."""
        self.events = events
        for store, one in zip(self.stores, events, strict=True):
            one.stored(store.contents())

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Use `clock`, which returns seconds on the run's clock, as the source of the present time from now on."""
        self._clock = clock

    # Device

    def cached(self, hashes: Sequence[Hashable], before: Hashable, request: Any) -> None:
        """Note that consecutive blocks of a request, which continue the block with the hash `before`, were added to the
        device's cache.
        """
        device = self._device
        known = None if before is None else device.get(before)
        depth, parent = 0 if known is None else known.depth + 1, before
        for block_hash in hashes:
            one = device.get(block_hash)
            if one is not None:
                one.num_uses += 1
                one.request = request
            else:
                below = self.stores[0].get(block_hash)
                num_uses = self._loaded.pop(block_hash, 1 if below is None else below.num_uses)
                one = device[block_hash] = _OnDevice(parent, depth, request, num_uses)
                self._leave_exclusive(0, block_hash)
            self._reaches_device(block_hash, one)
            parent, depth = block_hash, depth + 1

    def used(self, hashes: Sequence[Hashable], request: Any) -> None:
        """Note that a request has found content in the device's cache."""
        now = self._clock()
        for block_hash in hashes:
            one = self._device[block_hash]
            one.num_uses += 1
            one.request = request
            for level, store in enumerate(self.stores):
                below = store.get(block_hash)
                if below is not None:
                    store.use(below, request, now)
                    if below.is_here:
                        self._write_below(level, below)
            self._reaches_device(block_hash, one)

    def _reaches_device(self, block_hash: Hashable, one: _OnDevice) -> None:
        if (
            self.rules[0].writes_at(one.num_uses)
            and self.stores[0].get(block_hash) is None
            and self._is_kept(one.depth, one.request)
        ):
            new = TierBlock(block_hash, one.parent_hash, one.depth, one.request, self._clock())
            new.num_uses = one.num_uses
            if self._add(0, new):
                self._computed[block_hash] = new

    def _is_kept(self, depth: int, request: Any) -> bool:
        """Return True if the request's block at this depth may be written to the tiers; with `prompts_only`, only
        blocks within the prompt may.
        """
        if not self._prompts_only:
            return True
        return bool((depth + 1) * self.block_size <= request.num_prompt_tokens)

    def _write_below(self, level: int, one: TierBlock) -> None:
        """Write a block that a tier has received or reused to the tier below, if that tier's rules require it."""
        below = level + 1
        if below < len(self.stores) and self.rules[below].writes_at(one.num_uses):
            self._write(below, one.block_hash, one)

    def while_evicting(self, reuse: Callable[[list[int], int], None], taken: list[int], count: int) -> None:
        """Call `reuse` with the other arguments. Content that leaves the device's cache during the call counts as
        evicted; content that leaves it at any other time has expired, is invalid or was never computed.
        """
        self._is_evicting = True
        reuse(taken, count)
        self._is_evicting = False

    def gone(self, block_hash: Hashable, block: int) -> None:
        """Note that content has left the device's cache, in which `block` held it."""
        one = self._device.pop(block_hash)
        if not self._is_evicting:
            copy = self._computed.pop(block_hash, None)
            if copy is not None:
                # The content was not evicted: it is invalid, has expired or was never computed. So cancel the copy that
                # was planned.
                self.called_off(0, copy)
        elif self.rules[0].write == "write_back" and self._is_kept(one.depth, one.request):
            self._write(0, block_hash, one, block)

    def retired(self, first_block: int, blocks: Sequence[int], request: Any) -> None:
        """Note that these blocks, in order of content, became idle and that no request can hit their content again.
        Such content takes up room and bandwidth in the tiers like any other.
        """
        self._num_runs += 1
        run = self._num_runs, blocks, request
        if self.rules[0].write == "write_back":
            self._runs[first_block] = run
        elif self.rules[0].writes_at(1):
            self._write_run(run)

    def run_evicted(self, first_block: int) -> None:
        """Note that the run of idle blocks that begins with `first_block` was evicted; no request can hit its content
        again.
        """
        run = self._runs.pop(first_block, None)
        if run is not None:
            self._write_run(run)

    def _write_run(self, run: tuple[int, Sequence[int], Any]) -> None:
        number, blocks, request = run
        parent: Hashable = None
        for depth, block in enumerate(blocks):
            if not self._is_kept(depth, request):
                return
            name = "private", self._replica_id, number, depth
            self._write(0, name, _OnDevice(parent, depth, request, 1), block)
            parent = name

    # Writing

    def _write(self, level: int, block_hash: Hashable, above: _OnDevice | TierBlock, source: int = -1) -> None:
        """Copy a block from the level above into a tier, unless the tier has it. `source`: the device block that holds
        the content, if that block is about to be overwritten.
        """
        if self.stores[level].get(block_hash) is not None:
            return
        new = TierBlock(block_hash, above.parent_hash, above.depth, above.request, self._clock())
        new.num_uses = above.num_uses
        new.source = source
        if self._add(level, new):
            self._writes.append((level, new))

    def _add(self, level: int, new: TierBlock) -> bool:
        evicted = self.stores[level].add(new, self._clock())
        if evicted is None:
            self.num_dropped[level] += 1
            return False
        for one in evicted:
            self._notify_removed(level, one)
            if level + 1 < len(self.stores) and self.rules[level + 1].write == "write_back":
                self._write(level + 1, one.block_hash, one)
        return True

    def take_writes(self) -> Sequence[tuple[int, TierBlock]]:
        """Return the copies of existing content decided since the last call, as (level, block) in order. The caller
        must call `written` for each copy that arrives, and `called_off` for each that fails.
        """
        writes = self._writes
        if writes:
            self._writes = []
        return writes

    def take_computed(self) -> Sequence[TierBlock]:
        """Return the copies to the first tier that were decided since the last call. Their content has been computed by
        now. As with `take_writes`, the caller must report the end of each copy.
        """
        computed = self._computed
        if not computed:
            return ()
        self._computed = {}
        return list(computed.values())

    def written(self, level: int, one: TierBlock) -> None:
        """Note that a copy has arrived in a tier."""
        store = self.stores[level]
        if not store.written(one, self._clock()):
            return
        if self.rules[level].is_exclusive and self._is_above(level, one.block_hash):
            store.remove(one, self._clock())
            return
        self._notify_stored(level, one)
        self._write_below(level, one)
        self._leave_exclusive(level + 1, one.block_hash)

    def _leave_exclusive(self, level: int, block_hash: Hashable) -> None:
        """Remove content from an exclusive tier because the level above now holds it."""
        if level < len(self.stores) and self.rules[level].is_exclusive:
            below = self.stores[level].get(block_hash)
            if below is not None and not below.num_locks:
                self._withdraw(level, below)

    def called_off(self, level: int, one: TierBlock) -> None:
        """Note that a copy will not arrive in a tier."""
        self.stores[level].remove(one, self._clock())

    def _is_above(self, level: int, block_hash: Hashable) -> bool:
        return self.stores[level - 1].holds(block_hash) if level else block_hash in self._device

    # Lookups

    def levels_of(self, hashes: BlockHashes, start: int, limit: int) -> list[int]:
        """Return, for each block from `start` to `limit` - 1, the level of the nearest tier that holds it, up to the
        first block that no tier holds.
        """
        levels: list[int] = []
        width = FIRST_LOOKUP_BLOCKS
        while (at := start + len(levels)) < limit:
            stop = min(at + width, limit)
            for block_hash in hashes.block_hashes(at, stop):
                level = next((level for level, store in enumerate(self.stores) if store.holds(block_hash)), None)
                if level is None:
                    return levels
                levels.append(level)
            width *= LOOKUP_GROWTH
        return levels

    def hit_tokens(self, hashes: BlockHashes, num_known_tokens: int, num_on_device: int) -> Mapping[str, int]:
        """Return the number of leading cached tokens in each memory, by the memory's name; each token counts for the
        nearest memory that holds it. `num_on_device`: number of leading tokens that the device holds. Changes nothing.
        """
        size = self.block_size
        found = {DEVICE: num_on_device, **dict.fromkeys(self.names, 0)}
        limit = min(num_known_tokens - 1, hashes.num_hashed_tokens) // size
        if reads_cache(hashes):
            for level in self.levels_of(hashes, num_on_device // size, limit):
                found[self.stores[level].name] += size
        return found

    # Loading

    def begin_load(self, hashes: Sequence[Hashable], request: Any) -> TierLoad:
        """Begin to load blocks for a request from the first tier, which must hold them. An exclusive tier drops the
        blocks unless another transfer is reading or writing them.
        """
        store, now = self.stores[0], self._clock()
        blocks: list[TierBlock] = []
        is_exclusive = self.rules[0].is_exclusive
        for block_hash in hashes:
            one = store.get(block_hash)
            assert one is not None
            if is_exclusive and not one.num_locks:
                one.use(request, now)
                self._loaded[block_hash] = one.num_uses
                self._withdraw(0, one)
            else:
                store.lock(one)
                store.use(one, request, now)
            blocks.append(one)
        return TierLoad(blocks, is_exclusive)

    def end_load(self, load: TierLoad) -> None:
        """End a load whose content has arrived on the device."""
        for one in load.blocks:
            self.stores[0].unlock(one, self._clock())
            self._leave_exclusive(0, one.block_hash)

    def call_off_load(self, load: TierLoad) -> None:
        """Cancel an unneeded load; content that an exclusive tier dropped for the load returns to that tier if it has
        room.
        """
        store, now = self.stores[0], self._clock()
        for one in load.blocks:
            store.unlock(one, now)
            self._loaded.pop(one.block_hash, None)
            is_lost = load.were_taken and store.get(one.block_hash) is None and one.block_hash not in self._device
            if is_lost:
                again = TierBlock(one.block_hash, one.parent_hash, one.depth, one.request, now)
                again.num_uses = one.num_uses
                if self._add(0, again):
                    self.written(0, again)

    def begin_fetch(self, hashes: Sequence[Hashable], levels: Sequence[int], request: Any) -> Sequence[TierFetch]:
        """Begin to fetch blocks of lower tiers into the first tier, as far as it can take them; return one fetch for
        each lower tier that sends blocks, the nearest tier first.
        """
        now, first = self._clock(), self.stores[0]
        sources: list[tuple[int, TierBlock]] = []
        for block_hash, level in zip(hashes, levels, strict=True):
            source = self.stores[level].get(block_hash)
            assert source is not None
            if level and first.get(block_hash) is not None:
                break  # the first tier is receiving this block already
            # Lock all sources before the first `_add` below, which could otherwise evict sources to make room.
            self.stores[level].lock(source)
            sources.append((level, source))
        pairs: dict[int, list[tuple[TierBlock, TierBlock]]] = {}
        has_room = True
        for level, source in sources:
            if level and has_room:
                new = TierBlock(source.block_hash, source.parent_hash, source.depth, request, now)
                new.num_uses = source.num_uses
                has_room = self._add(0, new)
                if has_room:
                    self.stores[level].use(source, request, now)
                    pairs.setdefault(level, []).append((source, new))
                    continue
            self.stores[level].unlock(source, now)
        return [TierFetch(level, pairs[level]) for level in sorted(pairs)]

    def end_fetch(self, fetch: TierFetch, num_arrived: int) -> None:
        """End a fetch; its first `num_arrived` blocks have arrived in the first tier, the others will not arrive."""
        store, now = self.stores[fetch.level], self._clock()
        for position, (source, new) in enumerate(fetch.pairs):
            store.unlock(source, now)
            if position < num_arrived:
                self.written(0, new)
            else:
                self.called_off(0, new)

    def _withdraw(self, level: int, one: TierBlock) -> None:
        self.stores[level].remove(one, self._clock())
        self._notify_removed(level, one)

    # Requests that leave or give up loaded content, and loss of all content

    def forget(self, request: Any) -> None:
        """Call `on_forget` for a request that has left the replica or its queue."""
        if self.on_forget is not None:
            self.on_forget(request)

    def give_up(self, request: Any) -> None:
        """Call `on_give_up` for a request whose loaded content is to be dropped; the request will compute it instead."""
        if self.on_give_up is not None:
            self.on_give_up(request)

    def clear(self) -> None:
        """Drop all content of the lost replica's own tiers; shared tiers are kept."""
        if self.on_clear is not None:
            self.on_clear()
        self._device.clear()
        self._loaded.clear()
        self._runs.clear()
        for level, one in [*self.take_writes(), *((0, one) for one in self.take_computed())]:
            self.called_off(level, one)
        for store, rules, events in zip(self.stores, self.rules, self.events, strict=True):
            if not rules.is_shared:
                store.clear(self._clock())
                if events is not None:
                    events.cleared()

    def clear_shared(self) -> None:
        """Drop the content of shared tiers, which has become invalid."""
        for store, rules, events in zip(self.stores, self.rules, self.events, strict=True):
            if rules.is_shared:
                store.clear(self._clock())
                if events is not None:
                    events.cleared()

    def _notify_stored(self, level: int, one: TierBlock) -> None:
        events = self.events[level]
        if events is not None:
            events.stored([one.block_hash])

    def _notify_removed(self, level: int, one: TierBlock) -> None:
        events = self.events[level]
        if events is not None:
            events.removed(one.block_hash)

    # Invariants

    def check(self, cached: Sequence[Hashable]) -> None:
        """Raise AssertionError if the state is inconsistent, or disagrees with `cached`, the content of the device's
        cache.
        """
        require(self._device.keys() == set(cached), "tiers know other content of the device than its cache")
        for level, (store, rules) in enumerate(zip(self.stores, self.rules, strict=True)):
            store.check()
            if rules.is_exclusive:
                twice = [
                    one.block_hash
                    for one in store
                    if one.is_here and not one.num_locks and self._is_above(level, one.block_hash)
                ]
                require(not twice, f"tier {store.name} is exclusive, and content is also above it ({twice[:3]})")
