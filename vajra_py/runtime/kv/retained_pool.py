"""Pool of KV blocks whose idle content is evicted in the order of a retention policy.

Each content has one entry, which lookups find, and the entry has one block. Further blocks in use with the same content
are copies: one of them becomes the entry's block when the entry's present block loses its last user. An entry's block
is therefore idle only if no request uses the content. A request that uses content also uses all earlier content of the
chain, so nothing that continues idle content is in use. Hence every free block with content can be evicted, the end of
a chain first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Any

from msgspec import Struct, structs

from vajra_py.contract.latency import LAST_S
from vajra_py.contract.retention import ExpiresContent, RetentionPolicy
from vajra_py.errors import PolicyError
from vajra_py.runtime.kv.block_pool import BlockPool, PrefixCacheOptions, require
from vajra_py.runtime.kv.retention_order import CachedEntry, RetentionOrder
from vajra_py.runtime.queues.keys import finite_number


class Retention(Struct, frozen=True):
    """Retention policy of one replica or memory tier, with the policy's name for error messages."""

    policy: RetentionPolicy
    name: str


class RetainedBlockPool(BlockPool):
    """A `BlockPool` whose blocks with content are reused in the order of a retention policy, after those without
    content.
    """

    __slots__ = (
        "_clock",
        "_copies",
        "_copy_of",
        "_due",
        "_entry_of",
        "_expiries",
        "_methods",
        "_num_private",
        "next_expiry",
        "on_evicted",
        "order",
    )

    def __init__(
        self, num_blocks: int, options: PrefixCacheOptions, retention: Retention, clock: Callable[[], float]
    ) -> None:
        super().__init__(num_blocks, options)
        defaults = PrefixCacheOptions()
        free = {"unscheduled": defaults.unscheduled, "max_pinned_fraction": defaults.max_pinned_fraction}
        if structs.replace(options, **free) != defaults:
            raise ValueError(
                f"prefix_cache: a retention policy replaces the order that these options set (got {options}). "
                "Allowed: their defaults."
            )
        self.order: RetentionOrder[CachedEntry] = RetentionOrder(retention.policy, retention.name)
        self.next_expiry = inf
        """Earliest time in `_expiries`, at which idle content expires unless it was used meanwhile; infinite if there
        is none.
        """
        self._clock = clock
        self.on_evicted: Callable[[CachedEntry, float], None] | None = None
        """Called for each block that the policy evicts, with the entry and the present time, before the block is
        overwritten; not called for content that no request can hit. None: nothing is called.
        """
        self._entry_of: dict[int, CachedEntry] = {}
        self._copies: dict[Hashable, list[int]] = {}
        """Blocks in use that lookups do not find because another block has the same content; by the content's hash."""
        self._copy_of: dict[int, Hashable] = {}
        self._expiries: list[tuple[float, int, CachedEntry]] = []
        """Heap of (time of expiry, number that the entry got when it became idle, entry)."""
        self._due: dict[CachedEntry, float] = {}
        """Idle content that has expired but is still continued by other content, with its time of expiry; it is dropped
        after the other content.
        """
        self._num_private = 0
        policy: Any = retention.policy
        names = ("on_stored", "on_used", "on_evicted", "on_withdrawn", "expires_at")
        self._methods = {name: getattr(policy, name, None) for name in names}
        if not isinstance(policy, ExpiresContent):
            self._methods["expires_at"] = None

    # Allocating and releasing

    def _reuse_idle(self, taken: list[int], count: int) -> None:
        now, order, idle = self._clock(), self.order, self._idle
        order.begin()
        while len(taken) < count:
            entry = order.pop(now)
            self._notify("on_evicted", entry, now)
            run = idle.pop(entry.block)
            entry.is_idle = False
            if run is not None:
                taken += run
                if self.lower is not None:
                    self.lower.run_evicted(entry.block)
                continue
            if self.on_evicted is not None:
                self.on_evicted(entry, now)
            taken.append(entry.block)
            self._remove(entry, now)

    def release(self, blocks: list[int], num_hashed: int = 0, request: object = None) -> None:
        """Release a request's references to the blocks of one table; blocks left without users become free unless their
        content is pinned.
        """
        now, extra = self._clock(), self._extra_references
        plain: list[int] = []
        num_idle = 0
        for block in reversed(blocks):
            num_extra = extra.get(block)
            if num_extra is not None:
                if num_extra == 1:
                    del extra[block]
                else:
                    extra[block] = num_extra - 1
                continue
            entry = self._entry_of.get(block)
            if entry is None or self._hand_over(entry):
                self._forget_copy(block)
                plain.append(block)
                continue
            entry.last_used_at = now
            if entry.block_hash in self._pins:
                self._kept[block] = None
            else:
                self._enter_idle(block)
                num_idle += 1
        plain.reverse()
        self._freed.extend(plain)
        self.num_free += len(plain) + num_idle
        self.idle_version += 1

    def retire(self, blocks: list[int], num_filled: int, request: object = None) -> None:
        """Release an unshared table whose first `num_filled` blocks are full of content that cannot be hit again.

        The retention policy sees these blocks as one entry like any other; nothing shows that they cannot be hit.
        """
        self._freed.extend(blocks[num_filled:])
        if num_filled:
            run = blocks[num_filled - 1 :: -1]
            self._num_private += 1
            now = self._clock()
            entry = CachedEntry(run[0], ("private", self._num_private), None, request, now)
            entry.depth = num_filled - 1
            entry.is_idle = True
            self._idle[run[0]] = run
            if self.lower is not None:
                self.lower.retired(run[0], blocks[:num_filled], request)
            self._notify("on_stored", [entry], now)
            self.order.number(entry)
            self.order.add(entry, now)
        self.num_free += len(blocks)

    def _enter_idle(self, block: int) -> None:
        entry, now = self._entry_of[block], self._clock()
        entry.last_used_at = now
        entry.is_idle = True
        self._idle[block] = None
        self.order.number(entry)
        if not entry.num_children:
            self.order.add(entry, now)
        expires_at = self._methods["expires_at"]
        if expires_at is not None:
            self._note_expiry(entry, self.order.ask(expires_at, entry))

    def _leave_idle(self, block: int) -> None:
        entry = self._entry_of[block]
        entry.is_idle = False
        del self._idle[block]
        if not entry.num_children:
            self.order.discard(entry)
        elif self._due:
            self._due.pop(entry, None)

    # Content

    def cache(
        self, blocks: Sequence[int], hashes: Sequence[Hashable], before: Hashable = None, request: object = None
    ) -> None:
        """Cache blocks in use under these hashes, as the continuation of the block `before`; see `BlockPool.cache`."""
        now, entries = self._clock(), self._entries
        parent = None if before is None else self._found(before)
        new: list[CachedEntry] = []
        known: list[CachedEntry] = []
        for block, block_hash in zip(blocks, hashes, strict=True):
            entry = self._found(block_hash)
            if entry is None:
                entry = CachedEntry(block, block_hash, parent, request, now)
                if parent is not None:
                    parent.num_children += 1
                entries[block_hash] = block
                self._hash_of[block] = block_hash
                self._entry_of[block] = entry
                new.append(entry)
            else:
                entry.use(request, now)
                if not self._take_over(entry, block):
                    self._copies.setdefault(block_hash, []).append(block)
                    self._copy_of[block] = block_hash
                known.append(entry)
            parent = entry
        self.num_cached += len(blocks)
        if known:
            self._notify("on_used", known, now)
        if new:
            if self.events is not None:
                self.events.stored([entry.block_hash for entry in new])
            self._notify("on_stored", new, now)
            if self.hits is not None:
                self.hits.stored([entry.block_hash for entry in new])
        if self.lower is not None:
            self.lower.cached(hashes, before, request)

    def withdraw(self, blocks: Sequence[int]) -> None:
        """Remove the hashes of these blocks in use, even of blocks that several requests share."""
        now = self._clock()
        for block in reversed(blocks):
            entry = self._entry_of.get(block)
            if entry is None:
                self._forget_copy(block)
            elif not self._hand_over(entry):
                if entry.num_children:
                    self._drop_continuations(entry, now)
                self._notify("on_withdrawn", entry, now)
                self._remove(entry, now)

    def _drop_continuations(self, entry: CachedEntry, now: float) -> None:
        """Remove all content that continues a withdrawn entry, because lookups can no longer find it.

        There is such content only in two rare cases, so a search through all entries is acceptable: another request
        shares the withdrawn block, or a request has recomputed cached content, so that its block replaced the idle
        block of this content.
        """
        behind = [one for one in self._entry_of.values() if one is not entry and _continues(one, entry)]
        for one in sorted(behind, key=lambda each: -each.depth):
            block = one.block
            if one.is_idle:
                self._leave_idle(block)
                self._freed.append(block)
            elif block in self._kept:
                del self._kept[block]
                self.num_free += 1
                self._freed.append(block)
            for copy in tuple(self._copies.get(one.block_hash, ())):
                self._forget_copy(copy)
            self._notify("on_withdrawn", one, now)
            self._remove(one, now)
        self.idle_version += 1

    def attach(self, blocks: Sequence[int], request: object = None) -> None:
        """Add a reference to each of these blocks (found by `match`), for a request; idle blocks among them stop being
        free.
        """
        now, extra = self._clock(), self._extra_references
        used: list[CachedEntry] = []
        for block in reversed(blocks):
            entry = self._entry_of[block]
            if entry.is_idle:
                self._leave_idle(block)
                self.num_free -= 1
            elif block in self._kept:
                del self._kept[block]
            else:
                extra[block] = extra.get(block, 0) + 1
            entry.use(request, now)
            used.append(entry)
        self.idle_version += 1
        used.reverse()
        self._notify("on_used", used, now)
        if self.lower is not None:
            self.lower.used([entry.block_hash for entry in used], request)

    def _found(self, block_hash: Hashable) -> CachedEntry | None:
        block = self._entries.get(block_hash)
        return None if block is None else self._entry_of[block]  # type: ignore[index] # each content has one block here

    def _hand_over(self, entry: CachedEntry) -> bool:
        """Replace the entry's block, which has lost its last user, by a copy in use; return False if no copy exists."""
        copies = self._copies.get(entry.block_hash)
        if copies is None:
            return False
        block = copies[0]
        self._forget_copy(block)
        self._move(entry, block)
        return True

    def _take_over(self, entry: CachedEntry, block: int) -> bool:
        """Replace the entry's block by `block`, which is in use; return False and change nothing if the entry's own
        block is in use.
        """
        old = entry.block
        if entry.is_idle:
            self._leave_idle(old)
        elif old in self._kept:
            del self._kept[old]
            self.num_free += 1
        else:
            return False
        self._move(entry, block)
        self._freed.append(old)
        self.idle_version += 1
        return True

    def _move(self, entry: CachedEntry, block: int) -> None:
        old, block_hash = entry.block, entry.block_hash
        entry.block = block
        del self._entry_of[old], self._hash_of[old]
        self._entry_of[block] = entry
        self._hash_of[block] = block_hash
        self._entries[block_hash] = block
        self._note_removed(old)

    def _forget_copy(self, block: int) -> None:
        block_hash = self._copy_of.pop(block, None)
        if block_hash is not None:
            copies = self._copies[block_hash]
            copies.remove(block)
            if not copies:
                del self._copies[block_hash]

    def _remove(self, entry: CachedEntry, now: float) -> None:
        """Remove an entry's content; the entry's parent may become a candidate for eviction."""
        del self._entry_of[entry.block]
        self._forget(entry.block)
        parent = entry.parent
        if parent is not None:
            parent.num_children -= 1
            if not parent.num_children and parent.is_idle:
                self.order.add(parent, now)
                at = self._due.pop(parent, None)
                if at is not None:
                    heappush(self._expiries, (at, parent.index, parent))
                    self.next_expiry = self._expiries[0][0]

    # Expiry

    @property
    def expires_content(self) -> bool:
        """True if the policy gives content a lifetime."""
        return self._methods["expires_at"] is not None

    def _note_expiry(self, entry: CachedEntry, at: object) -> None:
        if at is None:
            return
        time = finite_number(at)
        if time is None:
            error = PolicyError(
                self.order.name, f"expires_at() is not a time (got {at!r})", request_id=entry.request_id
            )
            self.order.fail(error)
            return
        heappush(self._expiries, (float(min(max(time, 0), LAST_S)), entry.index, entry))
        self.next_expiry = self._expiries[0][0]

    def expire(self, now: float) -> None:
        """Drop idle content that has expired; content that other content continues is dropped after that other content."""
        if self.next_expiry > now:
            return
        expiries = self._expiries
        while expiries and expiries[0][0] <= now:
            at, index, entry = heappop(expiries)
            if not entry.is_idle or entry.index != index or self._entry_of.get(entry.block) is not entry:
                continue  # outdated: the entry was used, or its block got other content, after this expiry was noted
            if entry.num_children:
                self._due[entry] = at
                continue
            block = entry.block
            self._leave_idle(block)
            self._notify("on_withdrawn", entry, at)
            self._remove(entry, at)
            self._freed.append(block)
            self.idle_version += 1
        self.next_expiry = expiries[0][0] if expiries else inf

    def _notify(self, name: str, about: object, now: float) -> None:
        method = self._methods[name]
        if method is not None:
            self.order.ask(method, about, now)

    # Invariants

    def check(self, references: dict[int, int] | None = None) -> None:
        """Raise AssertionError if the state is inconsistent; see `BlockPool.check`."""
        super().check(references)
        entries = self._entry_of
        children = dict.fromkeys(entries.values(), 0)
        for block, entry in entries.items():
            require(entry.block == block and self._entries.get(entry.block_hash) == block, "an entry stands elsewhere")
            require(entry.is_idle == (block in self._idle), f"block {block} is idle and in use at once")
            if entry.parent is not None:
                require(entry.parent in children, "content is kept that continues nothing")
                children[entry.parent] += 1
                require(
                    not entry.parent.is_idle or entry.is_idle, "a block is idle before one that is in use or pinned"
                )
        require(all(entry.num_children == count for entry, count in children.items()), "continuations are miscounted")
        require(entries.keys() == self._hash_of.keys(), "a block has content and no entry")
        require(self._copy_of.keys().isdisjoint(entries), "a copy is found by lookups")
        ends = sum(entry.is_idle and not entry.num_children for entry in entries.values())
        runs = sum(run is not None for run in self._idle.values())
        require(len(self.order) == ends + runs, "an end of a chain is no candidate, or a candidate is no end")


def _continues(entry: CachedEntry | None, first: CachedEntry) -> bool:
    while entry is not None and entry.depth >= first.depth:
        if entry is first:
            return True
        entry = entry.parent
    return False
