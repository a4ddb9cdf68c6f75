"""Pool of KV blocks: free list, reference counts, cached contents.

Invariants (`check`): every block is free, used, or kept without users for a pin; a used block has a reference from each
table that lists it; only blocks that have or had a hash are shared; a lookup by hash finds only blocks that still
hold the content. A free block may keep its hash until it is handed out again.

The order of reuse consists of three parts: blocks released without a hash (a stack), blocks never handed out (a
counter), and idle blocks with a hash in order of release. Blocks without hashes can therefore be handed out with one
list slice. If no request can hit the content of a released block table again, all its blocks are added to the idle
blocks as a single entry (`retire`), so that the time for releasing them does not depend on their number.

vLLM's order of reuse is called `lru` here, nano-vLLM's `fifo`; any other order comes from a retention policy
(`retained_pool`). Idle blocks whose content is pinned are kept apart and do not count as free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, get_args

from msgspec import Struct

from vajra_py.runtime.kv.content_events import ContentEvents

if TYPE_CHECKING:
    from vajra_py.runtime.kv.hit_index import HitIndex
    from vajra_py.runtime.kv.tiers import KvTiers

ReuseOrder = Literal["lru", "fifo"]
ReleaseOrder = Literal["tail_first", "head_first"]
Duplicates = Literal["keep_first", "keep_last"]
Unscheduled = Literal["withdraw", "keep"]

_REMOVED_LOG_BLOCKS = 1 << 16
_FRESH_BLOCKS = 256
"""Minimum number of never-used blocks that are put at the bottom of the free stack when the stack runs short."""


class PrefixCacheOptions(Struct, frozen=True):
    """Order of reuse and rules of lookup of a prefix cache; the defaults are vLLM's."""

    reuse_order: ReuseOrder = "lru"
    """lru: blocks without a hash are reused first, the latest released first; then blocks with a hash, the longest idle
    first. fifo: all blocks are reused in order of release.
    """
    release_order: ReleaseOrder = "tail_first"
    """Order among the blocks of one table that are released together, where `reuse_order` does not determine it:
    tail_first or head_first, by the end of the table from which blocks are reused first.
    """
    retain_freed: bool = True
    """True if a block can still be found after its last user freed it; False: only blocks in use are shared."""
    duplicates: Duplicates = "keep_first"
    """Block that a lookup finds if several blocks have the same content. keep_first: the earliest block that is still
    cached. keep_last: the latest block; the others are never found again.
    """
    unscheduled: Unscheduled = "withdraw"
    """Treatment of blocks that were cached while a step was formed, although their request was then preempted and the
    step does not compute them. withdraw: their hashes are removed. keep: they stay cached, as in vLLM, and a request
    that hits them reads KV that was never written; only for comparison with vLLM.
    """
    max_pinned_fraction: float = 0.5
    """Maximum fraction of the blocks that pins may hold."""
    drop_last_hit: bool = False
    """True if the last block of a hit is recomputed, as vLLM does for EAGLE's drafts."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for misspelt options, which must not silently select the other choice."""
        for name, allowed in (
            ("reuse_order", get_args(ReuseOrder)),
            ("release_order", get_args(ReleaseOrder)),
            ("duplicates", get_args(Duplicates)),
            ("unscheduled", get_args(Unscheduled)),
        ):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name}: unknown choice ({value!r}). Allowed: {', '.join(allowed)}.")


_IDS: list[int] = []
"""Integer objects of the first block ids, shared by all pools, so that a thousand replicas need no more memory for ids
than one.
"""
_IDS_GROW = Lock()


def _block_ids(start: int, stop: int) -> list[int]:
    if len(_IDS) < stop:
        with _IDS_GROW:
            _IDS.extend(range(len(_IDS), stop))
    return _IDS[start:stop]


class BlockPool:
    """Pool of `num_blocks` blocks with ids from 0. Blocks that were never used are handed out in order of id. With
    `options`, the pool is also a prefix cache.
    """

    __slots__ = (
        "_entries",
        "_extra_references",
        "_freed",
        "_hash_of",
        "_idle",
        "_is_fifo",
        "_is_tail_first",
        "_keeps_last",
        "_kept",
        "_next_fresh",
        "_pins",
        "events",
        "hits",
        "idle_version",
        "lower",
        "num_blocks",
        "num_cached",
        "num_free",
        "options",
        "removed",
        "removed_epoch",
    )

    def __init__(self, num_blocks: int, options: PrefixCacheOptions | None = None) -> None:
        if num_blocks < 0:
            raise ValueError(f"num_blocks: negative ({num_blocks}). At least 0 is allowed.")
        self.num_blocks = num_blocks
        self.options = options
        self.num_free = num_blocks
        """Number of free blocks, idle ones with content included."""
        self.num_cached = 0
        """Number of blocks ever cached; while it is unchanged, repeated lookups cannot find more blocks."""
        self.idle_version = 0
        """Counter that changes when a block with content becomes idle or is used again (not when it is evicted)."""
        self.removed: list[int] = []
        """Blocks that lookups no longer return, in order of removal; emptied when long, which increments
        `removed_epoch`.
        """
        self.removed_epoch = 0
        self._is_fifo = options is not None and options.reuse_order == "fifo"
        self._is_tail_first = options is None or options.release_order == "tail_first"
        self._keeps_last = options is not None and options.duplicates == "keep_last"
        self._freed: list[int] = []
        """Stack of free blocks; the last one is handed out first. With lru it has the blocks freed without a hash. With
        either order it also has never-used blocks, and the remaining blocks of an entry of several blocks (`retire`)
        that was handed out in part.
        """
        self._next_fresh = 0
        """Lowest id of the blocks that were neither handed out nor put on the stack so far."""
        self._idle: OrderedDict[int, list[int] | None] = OrderedDict()
        """Queue of free blocks; the first one is handed out first. With lru it has the blocks with a hash; with fifo,
        all free blocks that were used before. Several blocks released by `retire` are one entry, a list under its first
        block, which has no hash.
        """
        self._hash_of: dict[int, Hashable] = {}
        self._entries: dict[Hashable, int | dict[int, None]] = {}
        """Block that holds the content of a hash; with keep_first, if several blocks hold it, all of them in the order
        in which they were cached.
        """
        self._extra_references: dict[int, int] = {}
        """Number of references beyond the first, by block; blocks with one reference are not listed."""
        self._pins: dict[Hashable, int] = {}
        """Number of pins of each pinned content."""
        self._kept: dict[int, None] = {}
        """Blocks without users whose content is pinned."""
        self.events: ContentEvents | None = None
        """Writer of events about content that becomes available or is removed; None: no events are written."""
        self.hits: HitIndex | None = None
        """Index of the waiting requests whose prefix hits are tracked; None: hits are not tracked."""
        self.lower: KvTiers | None = None
        """Memory tiers that receive stored or evicted content; None without tiers."""

    # Allocating and releasing

    def take(self, count: int) -> list[int]:
        """Hand out `count` free blocks in their order of reuse. ValueError if there are fewer."""
        freed = self._freed
        if count <= 0:
            if count < 0:
                raise ValueError(f"BlockPool.take: negative number of blocks ({count}). At least 0 is allowed.")
            return []
        if count <= len(freed):
            taken = freed[: -count - 1 : -1]
            del freed[-count:]
            self.num_free -= count
            return taken
        return self._take_any(count)

    def _take_any(self, count: int) -> list[int]:
        if count > self.num_free:
            raise ValueError(f"BlockPool.take: cannot hand out that many blocks ({count}). Free: {self.num_free}.")
        taken = self._freed[::-1]
        num_fresh = min(max(count - len(taken), _FRESH_BLOCKS), self.num_blocks - self._next_fresh)
        if num_fresh:
            taken += _block_ids(self._next_fresh, self._next_fresh + num_fresh)
            self._next_fresh += num_fresh
        if len(taken) < count:
            if self.lower is None:
                self._reuse_idle(taken, count)
            else:
                self.lower.while_evicting(self._reuse_idle, taken, count)
        self._freed = taken[: count - 1 : -1]
        del taken[count:]
        self.num_free -= count
        return taken

    def _reuse_idle(self, taken: list[int], count: int) -> None:
        """Add idle blocks to `taken`, in their order of reuse, until it has at least `count`."""
        pop = self._idle.popitem
        hashed = self._hash_of
        while len(taken) < count:
            block, run = pop(False)
            if run is not None:
                taken += run
                if self.lower is not None:
                    self.lower.run_evicted(block)
                continue
            if block in hashed:
                self._forget(block)
            taken.append(block)

    @property
    def num_without_content(self) -> int:
        """Number of free blocks that can be handed out before any cached content is overwritten."""
        return len(self._freed) + self.num_blocks - self._next_fresh

    def release(self, blocks: list[int], num_hashed: int = 0, request: object = None) -> None:
        """Release a request's references to the blocks of one table, whose first `num_hashed` blocks have hashes;
        blocks left without users become free unless their content is pinned.
        """
        if not num_hashed and not self._extra_references and not self._is_fifo:
            self._freed.extend(blocks if self._is_tail_first else reversed(blocks))
            self.num_free += len(blocks)
            return
        hashed = self._without_users(blocks[:num_hashed]) if num_hashed else []
        plain = self._without_users(blocks[num_hashed:] if num_hashed else blocks)
        if self._pins and hashed:
            hashed = self._without_pinned(hashed)
        self.num_free += len(hashed) + len(plain)
        if hashed and self.options is not None and not self.options.retain_freed:
            self.withdraw(hashed)
            plain, hashed = hashed + plain, []
        if self._is_fifo:
            back = hashed + plain
        else:
            self._freed.extend(plain if self._is_tail_first else reversed(plain))
            back = hashed
        if back:
            self._idle.update(dict.fromkeys(reversed(back) if self._is_tail_first else back))
        if hashed:
            self.idle_version += 1

    def retire(self, blocks: list[int], num_filled: int, request: object = None) -> None:
        """Release an unshared table whose first `num_filled` blocks are full of content that cannot be hit again.

        These blocks get the place in the order of reuse that they would get if they were cached. The pool takes
        ownership of the list `blocks`.
        """
        if not num_filled or self.options is None or not self.options.retain_freed:
            self.release(blocks)
            return
        run, rest = blocks, blocks[num_filled:]
        del run[num_filled:]
        if self._is_tail_first:
            run.reverse()
            if rest:
                self.release(rest)
        self._idle[run[0]] = run
        if self.lower is not None:
            self.lower.retired(run[0], run[::-1] if self._is_tail_first else run[:], request)
        self.num_free += num_filled
        if rest and not self._is_tail_first:
            self.release(rest)

    def _without_users(self, blocks: list[int]) -> list[int]:
        """Remove one reference from each block; return the blocks that have none left."""
        extra = self._extra_references
        if not extra:
            return blocks
        unused = []
        for block in blocks:
            num_extra = extra.get(block)
            if num_extra is None:
                unused.append(block)
            elif num_extra == 1:
                del extra[block]
            else:
                extra[block] = num_extra - 1
        return unused

    def num_references(self, block: int) -> int:
        """Return the number of block tables that list a block in use."""
        return 1 + self._extra_references.get(block, 0)

    # Content

    def cache(
        self, blocks: Sequence[int], hashes: Sequence[Hashable], before: Hashable = None, request: object = None
    ) -> None:
        """Cache blocks in use, none of which has a hash yet, under these hashes.

        `before`: the hash of the block before the first one (None: there is none, or chains are not needed); `request`:
        the request that holds the blocks.
        """
        self.num_cached += len(blocks)
        entries, hash_of = self._entries, self._hash_of
        if self.events is not None:
            self.events.entered(hashes, entries, request)
        for block, block_hash in zip(blocks, hashes, strict=True):
            hash_of[block] = block_hash
            present = entries.setdefault(block_hash, block)
            if present == block:
                continue
            if self._keeps_last:
                entries[block_hash] = block
                if isinstance(present, int):
                    self._note_removed(present)
            elif isinstance(present, int):
                entries[block_hash] = {present: None, block: None}
            else:
                present[block] = None
        if self.hits is not None:
            self.hits.stored(hashes)
        if self.lower is not None:
            self.lower.cached(hashes, before, request)

    def uncache(self, blocks: Sequence[int]) -> bool:
        """Remove the hashes of these blocks in use; return False and change nothing if one of them is shared."""
        if not self._extra_references.keys().isdisjoint(blocks):
            return False
        self.withdraw(blocks)
        return True

    def withdraw(self, blocks: Sequence[int]) -> None:
        """Remove the hashes of these blocks, which must not be idle, even of blocks that several requests share."""
        for block in filter(self._hash_of.__contains__, blocks):
            self._forget(block)

    def match(self, hashes: Iterable[Hashable]) -> list[int]:
        """Return the blocks of the leading hashes, up to the first hash that is not cached."""
        found: list[Any] = list(map(self._entries.get, hashes))
        if None in found:
            del found[found.index(None) :]
        if dict in set(map(type, found)):
            return [next(iter(entry)) if isinstance(entry, dict) else entry for entry in found]
        return found

    def block_of(self, block_hash: Hashable) -> int | None:
        """Return the block that a lookup of this content finds; None if there is none."""
        found = self.match((block_hash,))
        return found[0] if found else None

    def num_idle(self, blocks: Iterable[int]) -> int:
        """Return the number of these blocks (found by `match`) that are free."""
        return sum(map(self._idle.__contains__, blocks))

    def attach(self, blocks: Sequence[int], request: object = None) -> None:
        """Add a reference to each of these blocks (found by `match`), for a request; idle blocks among them stop being
        free.
        """
        idle, kept = self._idle, self._kept
        extra = self._extra_references
        num_revived = 0
        for block in blocks:
            if block in idle:
                del idle[block]
                num_revived += 1
            elif kept and block in kept:
                del kept[block]
            else:
                extra[block] = extra.get(block, 0) + 1
        if num_revived:
            self.num_free -= num_revived
            self.idle_version += 1
        if self.lower is not None:
            self.lower.used([self._hash_of[block] for block in blocks], request)

    def _forget(self, block: int) -> None:
        """Remove a block's hash, and remove the block from `_entries`."""
        block_hash = self._hash_of.pop(block)
        entry = self._entries.pop(block_hash, None)
        if entry == block:
            self._note_removed(block)
            if self._pins:
                self._pins.pop(block_hash, None)
            if self.events is not None:
                self.events.removed(block_hash)
            if self.hits is not None:
                self.hits.removed(block_hash)
            if self.lower is not None:
                self.lower.gone(block_hash, block)
            return
        if self.events is not None:
            self.events.copy_left(block_hash)
        if isinstance(entry, int):
            # With `_keeps_last`, this hash's entry is another block, which was cached later: put that entry back.
            self._entries[block_hash] = entry
        elif entry is not None:
            was_first = next(iter(entry)) == block
            del entry[block]
            self._entries[block_hash] = entry if len(entry) > 1 else next(iter(entry))
            if was_first:
                self._note_removed(block)

    def _note_removed(self, block: int) -> None:
        if len(self.removed) >= _REMOVED_LOG_BLOCKS:
            self.removed.clear()
            self.removed_epoch += 1
        self.removed.append(block)

    def contents(self) -> list[Hashable]:
        """Return the hashes of all content that lookups can find, in the order in which it was cached."""
        return list(self._entries)

    # Pins

    @property
    def num_pinned(self) -> int:
        """Number of pinned contents, each of which counts as one block, in use or not."""
        return len(self._pins)

    @property
    def num_kept(self) -> int:
        """Number of idle blocks that are not free, because their content is pinned."""
        return len(self._kept)

    def num_newly_pinned(self, hashes: Iterable[Hashable]) -> int:
        """Return the number of these contents that are cached and have no pin yet."""
        return sum(one in self._entries and one not in self._pins for one in hashes)

    def num_pinned_once(self, hashes: Iterable[Hashable], but: Iterable[Hashable]) -> int:
        """Return the number of these contents that have exactly one pin and are not in `but`."""
        others = set(but)
        return sum(self._pins.get(one) == 1 and one not in others for one in hashes)

    def pin(self, hashes: Iterable[Hashable]) -> list[Hashable]:
        """Pin these contents up to the first one that is not cached, so that their blocks are kept until `unpin`;
        return the pinned contents.
        """
        pins = self._pins
        pinned: list[Hashable] = []
        for block_hash in hashes:
            if block_hash not in self._entries:
                break
            pinned.append(block_hash)
            pins[block_hash] = pins.get(block_hash, 0) + 1
        for block_hash in reversed(pinned):
            for block in self._blocks_of(block_hash):
                if block in self._idle:
                    self._leave_idle(block)
                    self._kept[block] = None
                    self.num_free -= 1
        self.idle_version += 1
        return pinned

    def unpin(self, hashes: Sequence[Hashable]) -> None:
        """Remove one pin from each of these contents; blocks with neither users nor pins become free, the end of the
        chain first.
        """
        for block_hash in reversed(hashes):
            count = self._pins.get(block_hash)
            if count is None:
                continue  # the content has left the cache, and its pins with it
            if count > 1:
                self._pins[block_hash] = count - 1
                continue
            del self._pins[block_hash]
            for block in self._blocks_of(block_hash):
                if block in self._kept:
                    del self._kept[block]
                    self._enter_idle(block)
                    self.num_free += 1
        self.idle_version += 1

    def _blocks_of(self, block_hash: Hashable) -> list[int]:
        entry = self._entries[block_hash]
        return [entry] if isinstance(entry, int) else list(entry)

    def _without_pinned(self, hashed: list[int]) -> list[int]:
        """Move to `_kept` those of these unused blocks whose content is pinned; return the rest."""
        rest: list[int] = []
        for block in hashed:
            block_hash = self._hash_of[block]
            if block_hash in self._pins and block in self._blocks_of(block_hash):
                self._kept[block] = None
            else:
                rest.append(block)
        return rest

    def _leave_idle(self, block: int) -> None:
        """Remove one block with content from the order of reuse."""
        del self._idle[block]

    def _enter_idle(self, block: int) -> None:
        """Put one block with content at the end of the order of reuse."""
        self._idle[block] = None

    # Invariants

    def check(self, references: dict[int, int] | None = None) -> None:
        """Raise AssertionError if the state is inconsistent, or disagrees with `references` (block to number of users).

        The cost grows with the number of blocks that were ever used.
        """
        num_fresh = self.num_blocks - self._next_fresh
        runs = [block for run in self._idle.values() if run is not None for block in run]
        singles = [block for block, run in self._idle.items() if run is None]
        free = [*self._freed, *singles, *runs]
        kept = self._kept
        require(
            kept.keys().isdisjoint((*free, *self._extra_references))
            and all(self._hash_of.get(block) in self._pins for block in kept),
            f"blocks {sorted(kept)} are kept for pins, and one of them is free, shared or not pinned",
        )
        require(
            all(count > 0 for count in self._pins.values()) and self._pins.keys() <= self._entries.keys(),
            "content is pinned that no lookup can find",
        )
        require(
            len(free) == len(set(free)) == self.num_free - num_fresh,
            f"free blocks: {self.num_free} counted, {sorted(free)} listed and {num_fresh} never used",
        )
        used = [*free, *kept, *self._extra_references, *self._hash_of, *(references or ())]
        require(all(0 <= block < self._next_fresh for block in used), "a block is known that was never taken")
        require(all(run is None or run[0] == block for block, run in self._idle.items()), "a run stands elsewhere")
        unshared = set(free)
        require(unshared.isdisjoint(self._extra_references), "a free block has references")
        require(all(count > 0 for count in self._extra_references.values()), "an extra reference was left at zero")
        require(self._hash_of.keys().isdisjoint([*self._freed, *runs]), "a block without content has a hash")
        require(self._is_fifo or all(block in self._hash_of for block in singles), "an idle block has no hash")
        found: set[int] = set()
        for block_hash, entry in self._entries.items():
            blocks = [entry] if isinstance(entry, int) else list(entry)
            require(len(blocks) > (0 if isinstance(entry, int) else 1), f"hash {block_hash!r} leads nowhere")
            require(
                all(self._hash_of.get(block) == block_hash for block in blocks),
                f"hash {block_hash!r} leads to other content",
            )
            found.update(blocks)
        require(self._keeps_last or found == self._hash_of.keys(), "a block with a hash cannot be found")
        if references is not None:
            require(
                references.keys().isdisjoint((*unshared, *kept))
                and len(references) + len(free) + len(kept) + num_fresh == self.num_blocks,
                f"used {sorted(references)}, kept {sorted(kept)} and free {sorted(free)} do not make up {self.num_blocks} blocks",
            )
            for block, count in references.items():
                held = 1 + self._extra_references.get(block, 0)
                require(held == count, f"block {block} has {held} references and {count} users")


def require(holds: bool, otherwise: str) -> None:
    """Raise AssertionError unless an invariant holds."""
    if not holds:
        raise AssertionError(f"BlockPool: {otherwise}")
