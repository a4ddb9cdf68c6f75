"""KV memory without KV parallelism: a block table for each request, a prefix cache, and swap space.

Without a prefix cache (`prefix_cache=None`) nothing is shared. Requests that decode together may grow together: their
blocks are reserved together, and a request's table gets its blocks when they are needed (`reserve_blocks`,
`materialize`).

Invariants (`check`): used + free = total; a block has exactly as many references as tables list it; an admitted request
shares only blocks whose content equals its own, and has at least one token left to compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from itertools import repeat
from math import inf

from vajra_py.errors import PolicyError
from vajra_py.runtime.kv.block_hashes import (
    FIRST_LOOKUP_BLOCKS,
    LOOKUP_GROWTH,
    BlockHashes,
    PrivateBlockHashes,
    reads_cache,
)
from vajra_py.runtime.kv.block_pool import BlockPool, PrefixCacheOptions
from vajra_py.runtime.kv.content_events import ContentEvents
from vajra_py.runtime.kv.hit_index import FollowedHits
from vajra_py.runtime.kv.host import BlockCopy, HostSpace
from vajra_py.runtime.kv.interface import KvRequest
from vajra_py.runtime.kv.pins import Pins
from vajra_py.runtime.kv.prefix_lookup import PrefixLookup
from vajra_py.runtime.kv.retained_pool import RetainedBlockPool, Retention
from vajra_py.runtime.kv.retention_order import CachedEntry
from vajra_py.runtime.kv.swaps import SwapsUnderWay
from vajra_py.runtime.kv.tiers import KvTiers
from vajra_py.runtime.queues import HitChanges


class _BlockTable:
    """Block hashes and blocks of one registered request."""

    __slots__ = (
        "blocks",
        "hashes",
        "host",
        "is_private",
        "lookup",
        "may_be_cached",
        "num_cached",
        "num_valid_tokens",
        "reads_cache",
    )

    def __init__(self, hashes: BlockHashes | None) -> None:
        self.hashes = hashes
        self.is_private = isinstance(hashes, PrivateBlockHashes)
        """True if no other request can have this request's content."""
        self.reads_cache = reads_cache(hashes)
        self.may_be_cached = hashes is not None and not self.is_private and self.reads_cache
        """True if a lookup for this request may find cached blocks. Private content can be found only after the request
        itself has cached blocks and freed them.
        """
        self.blocks: list[int] = []
        self.num_cached = 0
        """Number of leading blocks of the table that carry a hash."""
        self.num_valid_tokens = 0
        """Number of leading tokens whose KV is in the table's blocks, or will be after the step, as noted by
        `cache_blocks` or found by a lookup.
        """
        self.host: list[int] = []
        self.lookup: PrefixLookup | None = None


class PagedKvMemory:
    """`KvMemory` of a single group, with or without a prefix cache. `excluded_groups` is ignored."""

    __slots__ = (
        "_clock",
        "_events",
        "_hits",
        "_host",
        "_most_pinned",
        "_notify_evicted",
        "_pins",
        "_pool",
        "_reserved",
        "_retention",
        "_swaps",
        "_tables",
        "block_size",
        "is_watched",
        "may_expire",
        "tiers",
    )

    num_groups = 1
    can_reserve = True
    recycles = False
    due_places: Collection[int] = ()
    lagging: Collection[KvRequest] = ()

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: PrefixCacheOptions | None = None,
        host_blocks: int = 0,
        records_copies: bool = False,
        retention: Retention | None = None,
    ) -> None:
        """Create the memory. `retention`: policy for the order in which idle content is evicted (None: the order that
        `prefix_cache` sets).
        """
        if block_size < 1:
            raise ValueError(
                f"PagedKvMemory: block_size is not a number of tokens ({block_size}). At least 1 is allowed."
            )
        self.block_size = block_size
        self._clock: Callable[[], float] = _no_clock
        self._events: ContentEvents | None = None
        self._hits: FollowedHits | None = None
        """Index through which a queue tracks the prefix hits of its requests; None if no queue does."""
        self._retention = retention
        self.tiers: KvTiers | None = None
        """Memory tiers below the device; None if there are none."""
        self._notify_evicted: Callable[[CachedEntry, float], None] | None = None
        self.is_watched = retention is not None
        """True if a retention policy, a listening policy, a log or a lower tier must be notified when content is cached
        or evicted.
        """
        self.may_expire = retention is not None
        """True if a pin may end or content may expire later; as long as this is False, `next_due` is infinite."""
        self._pins = Pins()
        self._most_pinned = 0 if prefix_cache is None else int(prefix_cache.max_pinned_fraction * num_blocks)
        self._pool = self._new_pool(num_blocks, prefix_cache)
        self._host = HostSpace(host_blocks, records_copies)
        self._tables: dict[KvRequest, _BlockTable] = {}
        self._reserved: list[int] = []
        self._swaps: SwapsUnderWay | None = None
        """Blocks that are being read by copies for swaps while steps run; None if blocks are swapped between steps."""

    def _new_pool(self, num_blocks: int, options: PrefixCacheOptions | None) -> BlockPool:
        if self._retention is None or options is None:
            pool = BlockPool(num_blocks, options)
        else:
            pool = RetainedBlockPool(num_blocks, options, self._retention, self.now)
            pool.on_evicted = self._notify_evicted
        pool.lower = self.tiers
        pool.hits = None if self._hits is None else self._hits.index
        return pool

    def put_above(self, tiers: KvTiers) -> None:
        """Make `tiers` the lower levels of the prefix cache, which must be enabled and empty."""
        self.tiers = self._pool.lower = tiers
        self.is_watched = True

    def now(self) -> float:
        """Return the present time in seconds on the run's clock; 0 without a clock."""
        return self._clock()

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Use `clock`, which returns seconds on the run's clock, as the source of the present time from now on."""
        self._clock = clock
        if self.tiers is not None:
            self.tiers.use_clock(clock)

    # Sizes

    @property
    def num_blocks(self) -> int:
        """Total number of KV blocks."""
        return self._pool.num_blocks

    @property
    def free_blocks(self) -> int:
        """Number of free blocks, including idle cached ones."""
        return self._pool.num_free

    @property
    def used_blocks(self) -> int:
        """Number of blocks that are not free: held or reserved by requests, being copied, or kept by pins."""
        return self._pool.num_blocks - self._pool.num_free

    @property
    def growth_headroom(self) -> int:
        """Maximum number of requests for which `grow_each` would succeed now, whichever requests they are."""
        return self._pool.num_free

    @property
    def repeat_headroom(self) -> int:
        """Maximum number of blocks that fast-forwarded steps may take together: the number of free blocks. The blocks
        are taken only after these steps have ended, which is too late for reports of evictions. If evictions must be
        reported, free blocks with cached content therefore do not count.
        """
        pool = self._pool
        return pool.num_without_content if self.is_watched else pool.num_free

    @property
    def next_due(self) -> float:
        """Earliest time at which a pin may end or content may expire, in seconds on the run's clock; infinite if there
        is none.
        """
        pool = self._pool
        expiry = pool.next_expiry if isinstance(pool, RetainedBlockPool) else inf
        return min(self._pins.next_end, expiry)

    @property
    def free_host_blocks(self) -> int:
        """Number of free blocks of the swap space."""
        return self._host.free_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def fits(self, num_tokens: int) -> bool:
        """Return True if a request of `num_tokens` tokens fits into the empty memory."""
        return self.blocks_for(num_tokens) <= self._pool.num_blocks

    # Requests

    def register(self, request: KvRequest, hashes: BlockHashes | None = None) -> None:
        """Register a request. Without `hashes`, the request's content is never cached, so that it is computed again
        after a preemption by recompute.
        """
        if request in self._tables:
            raise ValueError(f"PagedKvMemory.register: already registered ({request!r}). Forget it first.")
        self._tables[request] = _BlockTable(hashes if self._pool.options is not None else None)

    def forget(self, request: KvRequest) -> None:
        """Unregister a request, which must hold no blocks."""
        entry = self._tables[request]
        if entry.blocks or entry.host:
            raise ValueError(f"PagedKvMemory.forget: it still holds blocks ({request!r}). Release or drop them first.")
        del self._tables[request]
        if self.tiers is not None:
            self.tiers.forget(request)
        if self._swaps is not None:
            self._swaps.on_forget(request)

    def is_registered(self, request: KvRequest) -> bool:
        """Return True if the request is registered here."""
        return request in self._tables

    def clear(self) -> None:
        """Drop every request and the content of every block, because the device has lost its memory."""
        if self.tiers is not None:
            self.tiers.clear()
        self._pool = self._new_pool(self._pool.num_blocks, self._pool.options)
        self._pins = Pins()
        if self._retention is not None:
            on_cleared = getattr(self._retention.policy, "on_cleared", None)
            if on_cleared is not None and isinstance(self._pool, RetainedBlockPool):
                self._pool.order.ask(on_cleared, self.now())
        if self._events is not None:
            self._pool.events = self._events
            self._events.cleared()
        if self._hits is not None:
            self._hits.index.cleared()
        if self._swaps is not None:
            self._swaps.clear()
        self._host.clear()
        self._tables.clear()
        self._reserved = []

    def num_freed_by(self, requests: Iterable[KvRequest]) -> int:
        """Return the number of blocks that would become free if these resident requests were freed."""
        held = Counter(block for request in requests for block in self._tables[request].blocks)
        return sum(count == self._pool.num_references(block) for block, count in held.items())

    def num_held_blocks(self, request: KvRequest) -> int:
        """Return the number of device blocks in the request's table, shared ones included."""
        return len(self._tables[request].blocks)

    def block_table(self, request: KvRequest) -> Sequence[int]:
        """Return the ids of the request's device blocks in the order of its tokens. This is the table itself, which
        callers must not change.
        """
        return self._tables[request].blocks

    # Prefix cache

    def block_of(self, block_hash: Hashable) -> int | None:
        """Return the device block that a lookup of this content finds; None if there is none."""
        return self._pool.block_of(block_hash)

    def tier_hits(self, hashes: BlockHashes, num_known_tokens: int) -> Mapping[str, int]:
        """Return the number of leading cached tokens in each memory (the device and each tier), by the memory's name;
        each token counts for the nearest memory that holds it. Empty without lower tiers. Does not count as a use of
        the content.
        """
        if self.tiers is None:
            return {}
        return self.tiers.hit_tokens(hashes, num_known_tokens, self.lookup_prefix(hashes, num_known_tokens))

    def lookup_prefix(self, hashes: BlockHashes, num_known_tokens: int) -> int:
        """Return the number of leading tokens with these hashes that the prefix cache holds, always less than
        `num_known_tokens`. The request need not be registered.
        """
        limit = min(num_known_tokens - 1, hashes.num_hashed_tokens) // self.block_size
        if self._pool.options is None or limit <= 0 or not reads_cache(hashes):
            return 0
        self.expire()
        blocks: list[int] = []
        self._match(hashes, blocks, limit, FIRST_LOOKUP_BLOCKS)
        return len(self._usable(blocks)) * self.block_size

    def num_leading_blocks(self, hashes: BlockHashes, limit: int) -> int:
        """Return the number of leading blocks with these hashes that a lookup finds, at most `limit`."""
        blocks: list[int] = []
        self._match(hashes, blocks, limit, FIRST_LOOKUP_BLOCKS)
        return len(blocks)

    def follow_hits(self, *, wanted: bool) -> HitChanges | None:
        """If `wanted`, start to track changes of prefix hits and return the source that reports the changes; otherwise
        stop and return None.
        """
        self._hits = FollowedHits(self) if wanted else None
        self._pool.hits = None if self._hits is None else self._hits.index
        return self._hits

    def cached_tokens(self, request: KvRequest) -> int:
        """Return the number of leading tokens, in whole blocks, that admission would find cached now, always less than
        the number of known tokens.

        Returns 0 for a request that is resident or swapped. The cost of a repeated call depends only on the blocks
        cached or evicted since the last call.
        """
        return len(self._found(request, self._tables[request])) * self.block_size

    def _found(self, request: KvRequest, entry: _BlockTable) -> list[int]:
        """Return the cached blocks that the request's admission would hit; empty if the request holds blocks, on device
        or host. Callers must not change the list.
        """
        hashes = entry.hashes
        if not entry.may_be_cached or hashes is None or entry.blocks or entry.host:
            return []
        pool = self._pool
        limit = min(request.num_known_tokens - 1, hashes.num_hashed_tokens) // self.block_size
        lookup = entry.lookup
        if lookup is None or lookup.limit != limit or not lookup.survives(pool):
            lookup = entry.lookup = PrefixLookup()
            lookup.limit = limit
            lookup.removed_epoch = pool.removed_epoch
        lookup.num_removed = len(pool.removed)
        if lookup.num_cached != pool.num_cached:
            before = len(lookup.blocks)
            self._match(hashes, lookup.blocks, limit, FIRST_LOOKUP_BLOCKS if lookup.num_cached < 0 else 1)
            lookup.num_cached = pool.num_cached
            if len(lookup.blocks) != before:
                lookup.members = None
                lookup.idle_version = -1
        return self._usable(lookup.blocks)

    def _usable(self, found: list[int]) -> list[int]:
        """Return the found blocks that a hit uses: all of them, or all but the last if `drop_last_hit` is set."""
        options = self._pool.options
        return found[:-1] if options is not None and options.drop_last_hit else found

    def _match(self, hashes: BlockHashes, blocks: list[int], limit: int, width: int) -> None:
        """Extend `blocks`, the leading blocks found so far, up to the first miss or `limit`. `width`: number of blocks
        hashed at first; further batches are larger, because most misses come early.
        """
        while (start := len(blocks)) < limit:
            stop = min(start + width, limit)
            blocks += self._pool.match(hashes.block_hashes(start, stop))
            if len(blocks) < stop:
                return
            width *= LOOKUP_GROWTH

    def _num_idle(self, entry: _BlockTable, found: list[int]) -> int:
        """Return the number of found blocks that are free: attaching them reduces the number of free blocks."""
        lookup = entry.lookup
        if not found or lookup is None:
            return 0
        if lookup.idle_version != self._pool.idle_version:
            lookup.num_idle = self._pool.num_idle(found)
            lookup.idle_version = self._pool.idle_version
        return lookup.num_idle

    def cache_blocks(self, request: KvRequest, num_tokens: int) -> None:
        """Make the KV of the first `num_tokens` tokens available to other requests; the KV is in memory or will be in
        memory once the step has run.

        Caches full blocks that are not cached yet. If no other request can have the generated content before this
        request ends, `free` caches it. Such a request needs one call, which states the number of valid tokens, at any
        time before `free`. It needs none if `free` gets this number as `num_computed_tokens`.
        """
        entry = self._tables[request]
        num_public = self._validate(entry, num_tokens)
        if num_public:
            assert entry.hashes is not None
            self._cache(entry, entry.hashes, num_public, request)

    def cache_each(self, requests: Sequence[KvRequest], num_tokens: Sequence[int]) -> None:
        """Call `cache_blocks` for each of these requests, in this order. All blocks are cached in one pass, unless
        changes of the cache are tracked or reported.
        """
        if self.is_watched or self._hits is not None:
            for request, count in zip(requests, num_tokens, strict=True):
                self.cache_blocks(request, count)
            return
        blocks, block_hashes, size = list[int](), list[Hashable](), self.block_size
        for entry, count in zip(map(self._tables.__getitem__, requests), num_tokens, strict=True):
            start, stop = entry.num_cached, self._validate(entry, count) // size
            if stop > start:
                assert entry.hashes is not None
                if stop - start == 1:
                    blocks.append(entry.blocks[start])
                    block_hashes.append(entry.hashes.block_hash(start))
                else:
                    blocks += entry.blocks[start:stop]
                    block_hashes += entry.hashes.block_hashes(start, stop)
                entry.num_cached = stop
                entry.may_be_cached = entry.reads_cache
        self._pool.cache(blocks, block_hashes)

    def _validate(self, entry: _BlockTable, num_tokens: int) -> int:
        """Record that the KV of the first `num_tokens` tokens is valid; return the number of these tokens whose KV
        other requests may use, or 0 if no further block can be cached.
        """
        hashes, size = entry.hashes, self.block_size
        if hashes is None:
            return 0
        if num_tokens > len(entry.blocks) * size:
            raise ValueError(
                f"PagedKvMemory.cache_blocks: more tokens than the request's blocks hold ({num_tokens}). "
                f"At most {len(entry.blocks) * size} are allowed."
            )
        if num_tokens > entry.num_valid_tokens:
            entry.num_valid_tokens = num_tokens
        if entry.is_private or num_tokens < (entry.num_cached + 1) * size:
            return 0
        return min(num_tokens, hashes.num_public_tokens)

    def _cache(self, entry: _BlockTable, hashes: BlockHashes, num_tokens: int, request: KvRequest) -> None:
        start = entry.num_cached
        stop = num_tokens // self.block_size
        if stop > start:
            asks_chains = self._retention is not None or self.tiers is not None
            before = hashes.block_hash(start - 1) if start and asks_chains else None
            self._pool.cache(entry.blocks[start:stop], hashes.block_hashes(start, stop), before, request)
            entry.num_cached = stop
            entry.may_be_cached = entry.reads_cache

    def uncache_blocks(self, request: KvRequest, num_tokens: int) -> bool:
        """Remove the cache entries of a request's blocks that reach beyond its first `num_tokens` tokens, because the
        step will not compute the later tokens; with `unscheduled: keep`, do nothing.

        Called for a request that leaves the step in which the blocks were cached. Returns False and changes nothing if
        another request already shares one of these blocks.
        """
        entry = self._resident(request, "uncache_blocks")
        options = self._pool.options
        if options is not None and options.unscheduled == "keep":
            return True
        keep = num_tokens // self.block_size
        if entry.num_cached > keep:
            if not self._pool.uncache(entry.blocks[keep : entry.num_cached]):
                return False
            entry.num_cached = keep
        entry.num_valid_tokens = min(entry.num_valid_tokens, num_tokens)
        return True

    def withdraw_blocks(self, request: KvRequest, num_tokens: int) -> None:
        """Remove the cache entries of a resident request's blocks that reach beyond its first `num_tokens` tokens.
        Called when these blocks hold invalid KV and the request ends.

        Another request that shares such a block keeps the block. In the other request's table, the shared block and all
        later blocks are removed from the cache too, and no block of this table is cached from then on.
        """
        entry = self._tables[request]
        void = set(entry.blocks[num_tokens // self.block_size : entry.num_cached])
        self._withdraw(entry, num_tokens // self.block_size)
        for other in self._tables.values() if void else ():
            first = next((place for place, block in enumerate(other.blocks) if block in void), None)
            if first is not None:
                self._withdraw(other, first)

    def _withdraw(self, entry: _BlockTable, num_kept: int) -> None:
        """Remove the hashes of a table's blocks beyond the first `num_kept`, and never cache blocks of this table
        again.
        """
        if entry.num_cached > num_kept:
            self._pool.withdraw(entry.blocks[num_kept : entry.num_cached])
            entry.num_cached = num_kept
        entry.num_valid_tokens = min(entry.num_valid_tokens, num_kept * self.block_size)
        entry.hashes = None

    # Allocating and freeing

    def blocks_needed(self, request: KvRequest, num_tokens: int) -> int:
        """Return the number of free blocks needed for the request to hold its first `num_tokens` tokens.

        This includes the idle cached blocks that a hit would reuse; it does not include blocks that any request holds
        already.
        """
        entry = self._tables[request]
        num_blocks = -(-num_tokens // self.block_size)
        if entry.blocks:
            return max(num_blocks - len(entry.blocks), 0)
        if entry.host:
            return max(num_blocks, len(entry.host))
        if not entry.may_be_cached:
            return num_blocks
        found = self._found(request, entry)
        return max(num_blocks - len(found), 0) + self._num_idle(entry, found)

    def blocks_needed_in_steps(self, request: KvRequest, num_tokens: int) -> int:
        """Return `blocks_needed`, since every block is held to the end."""
        return self.blocks_needed(request, num_tokens)

    def expect_load(self, request: KvRequest, num_tokens: int) -> None:
        """Do nothing: a loaded token has a block like any other."""

    def can_allocate(self, request: KvRequest, num_tokens: int, excluded_groups: Collection[int] = ()) -> bool:
        """Return True if `allocate` (or `swap_in`, or `grow` for a resident request) would succeed now."""
        return self.blocks_needed(request, num_tokens) <= self._pool.num_free

    def allocate(self, request: KvRequest, num_tokens: int, excluded_groups: Collection[int] = ()) -> int | None:
        """Attach the cached prefix and take blocks for the rest of the first `num_tokens` tokens, or none if the hit is
        longer.

        Returns the number of tokens found in the cache; returns None and changes nothing if too few blocks are free.
        """
        entry = self._tables[request]
        if entry.blocks or entry.host or num_tokens < 1:
            raise ValueError(
                f"PagedKvMemory.allocate: cannot give {num_tokens} tokens to {request!r}. "
                "It must hold no blocks, on device or host, and get at least 1 token."
            )
        pool = self._pool
        num_blocks = -(-num_tokens // self.block_size)
        found = self._found(request, entry) if entry.may_be_cached else None
        if not found:
            if num_blocks > pool.num_free:
                return None
            entry.blocks = pool.take(num_blocks)
            entry.lookup = None
            entry.num_cached = entry.num_valid_tokens = 0
            return 0
        num_new = max(num_blocks - len(found), 0)
        if num_new + self._num_idle(entry, found) > pool.num_free:
            return None
        pool.attach(found, request)
        entry.blocks = found + pool.take(num_new)
        entry.lookup = None
        entry.num_cached = len(found)
        entry.num_valid_tokens = len(found) * self.block_size
        return entry.num_valid_tokens

    def grow(self, request: KvRequest, num_tokens: int) -> bool:
        """Allocate blocks until a resident request can hold `num_tokens` tokens; return False and change nothing if
        blocks are lacking.
        """
        table = self._tables[request].blocks or self._resident(request, "grow").blocks
        num_new = -(-num_tokens // self.block_size) - len(table)
        if num_new <= 0:
            return True
        if num_new > self._pool.num_free:
            return False
        table += self._pool.take(num_new)
        return True

    def shrink(self, request: KvRequest, num_blocks: int) -> None:
        """Free the blocks of a resident request after its first `num_blocks`, because they hold nothing valid."""
        entry = self._resident(request, "shrink")
        if not entry.num_cached <= num_blocks:
            raise ValueError(f"PagedKvMemory.shrink: {num_blocks} blocks, and {entry.num_cached} of them have content.")
        self._pool.release(entry.blocks[num_blocks:])
        del entry.blocks[num_blocks:]

    def grow_each(self, requests: Collection[KvRequest]) -> None:
        """Take one more block for each of these resident requests, in this order; ValueError if too few are free."""
        tables = self._tables
        for request, block in zip(requests, self._pool.take(len(requests)), strict=True):
            tables[request].blocks.append(block)

    def reserve_blocks(self, num_blocks: int) -> None:
        """Reserve blocks for resident requests that grow together; `materialize` decides which request gets which."""
        self._reserved += self._pool.take(num_blocks)

    @property
    def has_reserved(self) -> bool:
        """True if some reserved blocks are not in a block table yet."""
        return bool(self._reserved)

    def materialize(self, request: KvRequest, num_tokens: int) -> None:
        """Move the reserved blocks that the request's first `num_tokens` tokens need into its table."""
        blocks, reserved = self._tables[request].blocks, self._reserved
        first = len(reserved) - (-(-num_tokens // self.block_size) - len(blocks))
        blocks += reserved[first:]
        del reserved[first:]

    def free(self, request: KvRequest, num_computed_tokens: int | None = None, *, for_good: bool = False) -> None:
        """Free the request's device blocks (end, abort, or preemption by recompute).

        `num_computed_tokens`: number of leading tokens whose KV is valid (default: as noted by `cache_blocks`); their
        full blocks are cached. `for_good`: the request will not use its content again.
        """
        entry = self._resident(request, "free")
        options = self._pool.options
        if entry.hashes is not None and options is not None and options.retain_freed:
            if num_computed_tokens is not None and num_computed_tokens > entry.num_valid_tokens:
                entry.num_valid_tokens = num_computed_tokens
            valid = min(entry.num_valid_tokens, len(entry.blocks) * self.block_size)
            if for_good and entry.is_private and not entry.num_cached:
                self._pool.retire(entry.blocks, valid // self.block_size, request)
                entry.blocks = []
                entry.num_valid_tokens = 0
                return
            self._cache(entry, entry.hashes, min(valid, entry.hashes.num_hashed_tokens), request)
        self._pool.release(entry.blocks, entry.num_cached, request)
        entry.blocks = []
        entry.num_cached = entry.num_valid_tokens = 0

    # Pins, expiry, and events about content

    def pin(self, name: Hashable, request: KvRequest, until: float) -> bool:
        """Pin the presently cached content of a request until `until`, seconds on the run's clock; an earlier pin with
        this name ends.

        Returns False and changes nothing if pins would then hold more blocks than allowed.
        """
        entry = self._tables[request]
        hashes, pool = entry.hashes, self._pool
        if hashes is None or entry.is_private or pool.options is None or not pool.options.retain_freed:
            self.unpin(name)
            return True  # success: no other request could hit the content after `free`, so there is nothing to pin
        num_blocks = entry.num_cached if entry.blocks else len(self._found(request, entry))
        wanted = hashes.block_hashes(0, num_blocks)
        before = self._pins.hashes_of(name)
        released = pool.num_pinned_once(before, wanted)
        if pool.num_pinned - released + pool.num_newly_pinned(wanted) > self._most_pinned:
            return False
        pinned = pool.pin(wanted)
        self.unpin(name)
        if pinned:
            self._pins.add(name, pinned, until)
            self.may_expire = True
        return True

    def unpin(self, name: Hashable) -> bool:
        """End a pin; return False if there is none."""
        hashes = self._pins.remove(name)
        if hashes:
            self._pool.unpin(hashes)
        return bool(hashes)

    def release_pin(self) -> Hashable | None:
        """End the pin that would last longest, so that a request can run, and return the pin's name. Returns None and
        changes nothing if no idle block is kept for pins, so that ending pins would free no block.
        """
        if not self._pool.num_kept:
            return None
        name = self._pins.last()
        self.unpin(name)
        return name

    def settle_due(self) -> list[Hashable]:
        """End the pins that are due and drop idle content that has expired; return the names of the ended pins."""
        ended = self._pins.due(self.now())
        for name in ended:
            self.unpin(name)
        self.expire()
        return ended

    @property
    def expires_content(self) -> bool:
        """True if a retention policy gives content a lifetime."""
        return isinstance(self._pool, RetainedBlockPool) and self._pool.expires_content

    def expire(self) -> None:
        """Drop idle content that has expired."""
        if isinstance(self._pool, RetainedBlockPool):
            self._pool.expire(self.now())

    @property
    def policy_error(self) -> PolicyError | None:
        """Violation of the contract by the retention policy of the device or of a tier; None if there was none."""
        if self.tiers is not None and self.tiers.policy_error is not None:
            return self.tiers.policy_error
        return self._pool.order.error if isinstance(self._pool, RetainedBlockPool) else None

    def report_content(self, events: ContentEvents) -> None:
        """Report the present content of the prefix cache to `events`, and every change from now on."""
        self._events = self._pool.events = events
        self.is_watched = True
        events.stored(self._pool.contents())

    def report_evictions(self, notify: Callable[[CachedEntry, float], None] | None) -> None:
        """From now on, for each block that a retention policy evicts, call `notify` with the cached entry and the
        present time before the block is overwritten. Content that no request can hit is not reported. `notify` None:
        stop.
        """
        self._notify_evicted = notify
        if isinstance(self._pool, RetainedBlockPool):
            self._pool.on_evicted = notify

    # Swapping

    def swap_out(self, request: KvRequest, num_computed_tokens: int | None = None) -> int | None:
        """Move a resident request to host memory and return the number of blocks moved; return None and change nothing
        if the host is full.

        With `num_computed_tokens` (at least 1), only the blocks that hold this many leading tokens are copied; the
        other blocks are freed. Cached blocks can still be hit on the device until they are reused.
        """
        entry = self._resident(request, "swap_out")
        table = entry.blocks
        if num_computed_tokens is not None:
            table = table[: max(self.blocks_for(num_computed_tokens), 1)]
        stored = self._host.store(table, self._one_group(table))
        if stored is None:
            return None
        entry.host = stored
        if self._swaps is None or self._swaps.frees_at_once:
            self._pool.release(entry.blocks, entry.num_cached, request)
        else:
            self._swaps.leaving[request] = entry.blocks, entry.num_cached
        entry.blocks = []
        entry.num_cached = 0
        entry.num_valid_tokens = min(entry.num_valid_tokens, len(stored) * self.block_size)
        return len(stored)

    def swap_in(self, request: KvRequest, num_tokens: int, excluded_groups: Collection[int] = ()) -> int | None:
        """Move a swapped request back to the device with room for `num_tokens` tokens; return the number of blocks
        moved, or None if too few blocks are free.
        """
        entry = self._swapped(request, "swap_in")
        stored = entry.host
        num_blocks = max(self.blocks_for(num_tokens), len(stored))
        if num_blocks > self._pool.num_free:
            return None
        entry.blocks = self._pool.take(num_blocks)
        entry.host = []
        if self._swaps is None:
            self._host.take_back(stored, entry.blocks, self._one_group(stored))
        else:
            self._swaps.coming[request] = stored
        return len(stored)

    def swap_beside_steps(self, swaps: SwapsUnderWay) -> None:
        """From now on, copies for swaps are made while steps run: the blocks that a copy reads are released at
        `end_swap`, not before. With `swaps.frees_at_once`, this applies only to host blocks.
        """
        self._swaps = swaps

    def end_swap(self, request: KvRequest) -> None:
        """Release the blocks that this request's swap copies were reading."""
        assert self._swaps is not None
        left = self._swaps.leaving.pop(request, None)
        if left is not None:
            self._pool.release(*left, request)
        came = self._swaps.coming.pop(request, None)
        if came is not None:
            self._host.drop(came)

    def drop_swapped(self, request: KvRequest) -> None:
        """Free a swapped request's host blocks; its content is lost."""
        entry = self._swapped(request, "drop_swapped")
        self._host.drop(entry.host)
        entry.host = []
        entry.num_valid_tokens = 0

    def take_copies(self) -> list[BlockCopy]:
        """Return the block copies decided since the last call, in order of execution; needs `records_copies`."""
        return self._host.take_copies() if self._host.has_copies else []

    @staticmethod
    def _one_group(blocks: Sequence[int]) -> Sequence[int]:
        return list(repeat(0, len(blocks)))

    def _resident(self, request: KvRequest, what: str) -> _BlockTable:
        entry = self._tables[request]
        if not entry.blocks:
            raise ValueError(
                f"PagedKvMemory.{what}: it holds no device blocks ({request!r}). Allocate or swap it in first."
            )
        return entry

    def _swapped(self, request: KvRequest, what: str) -> _BlockTable:
        entry = self._tables[request]
        if not entry.host:
            raise ValueError(
                f"PagedKvMemory.{what}: it is not swapped ({request!r}). Only swapped requests are allowed."
            )
        return entry

    # KV-parallel groups: this memory has exactly one group

    def groups_of(self, request: KvRequest) -> Sequence[int]:
        """Return the only group."""
        return (0,)

    def group_tables(self, request: KvRequest) -> Sequence[Sequence[int]]:
        """Return the request's block ids in the only group."""
        return (self._tables[request].blocks,)

    def active_groups(self, request: KvRequest, num_done_tokens: int | None = None) -> Sequence[int]:
        """Return the only group."""
        return (0,)

    def group_context(self, request: KvRequest, num_done_tokens: int) -> list[int]:
        """Return a list with `num_done_tokens` alone: the only group holds all of these tokens."""
        return [num_done_tokens]

    def max_chunk(self, request: KvRequest, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Return `num_remaining_tokens`: chunks are not limited by groups."""
        return num_remaining_tokens

    def on_chunk_done(self, request: KvRequest, num_done_before: int, num_tokens: int) -> None:
        """Do nothing: pending prefill work is not tracked with one group."""

    @property
    def pending_prefill_work(self) -> Sequence[int]:
        """0 for the only group: its pending prefill work is not tracked."""
        return (0,)

    # Consistency

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        users = Counter(self._reserved)
        if self._swaps is not None:
            users.update(self._swaps.device_blocks)
        for request, entry in self._tables.items():
            users.update(entry.blocks)
            if entry.blocks and entry.host:
                raise AssertionError(f"PagedKvMemory: on device and host at once ({request!r})")
            if len(set(entry.blocks)) != len(entry.blocks):
                raise AssertionError(f"PagedKvMemory: a block twice in one table ({request!r}: {entry.blocks})")
            if entry.num_cached > len(entry.blocks):
                raise AssertionError(f"PagedKvMemory: more blocks cached than held ({request!r})")
        self._pool.check(dict(users))
        self._pins.check(self._pool.num_pinned)
        stored = [entry.host for entry in self._tables.values()]
        self._host.check(stored if self._swaps is None else [*stored, *self._swaps.coming.values()])
        if self.tiers is not None:
            self.tiers.check(self._pool.contents())


def _no_clock() -> float:
    return 0.0
