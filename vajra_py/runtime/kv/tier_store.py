"""Content of one tier of KV memory below the device: blocks by hash, evicted in the order of a retention policy.

A block is a candidate for eviction when it is neither being read nor being written and no block of the tier continues
it. The tier may hold a block without its predecessor in the chain; the block and its predecessor are linked when the
predecessor arrives in the tier.

Invariants (`check`): the tier holds at most `num_blocks` blocks; lookups do not find a block that is being written; a
block that is being read or written is not evicted; if slots are numbered, each slot is free or holds one block.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

from vajra_py.errors import PolicyError
from vajra_py.runtime.kv.block_pool import require
from vajra_py.runtime.kv.retained_pool import Retention
from vajra_py.runtime.kv.retention_order import CachedEntry, RetentionOrder


class TierBlock(CachedEntry):
    """One block of content in a tier."""

    __slots__ = ("continuations", "is_here", "num_locks", "parent_hash", "slot", "source")

    def __init__(self, block_hash: Hashable, parent_hash: Hashable, depth: int, request: Any, now: float) -> None:
        super().__init__(-1, block_hash, None, request, now)
        self.parent_hash = parent_hash
        """Hash of the block that this one continues; None for the first block of a chain."""
        self.depth = depth
        self.continuations: dict[TierBlock, None] = {}
        """Blocks of the tier that continue this one."""
        self.is_here = False
        """True once the content has been written to the tier."""
        self.num_locks = 1
        """Number of transfers that read or write this block."""
        self.slot = -1
        """Slot of the tier in which the block is stored; -1 if slots are not numbered."""
        self.source = -1
        """Device block from which the content is copied, if that block is about to be overwritten; else -1."""


class TierStore:
    """Blocks of the tier `name`, which has a capacity of `num_blocks`."""

    def __init__(self, name: str, num_blocks: int, retention: Retention) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self.order: RetentionOrder[TierBlock] = RetentionOrder(retention.policy, f"{retention.name} of tier {name}")
        self.num_evicted = 0
        """Number of blocks evicted so far."""
        self._policy: Any = retention.policy
        self._blocks: dict[Hashable, TierBlock] = {}
        self._without_parent: dict[Hashable, dict[TierBlock, None]] = {}
        """Blocks whose parent is not in this tier, by the parent's hash."""
        self._free_slots: list[int] | None = None
        """Free slots; None: slots are not numbered."""
        names = ("on_stored", "on_used", "on_evicted", "on_withdrawn", "on_cleared")
        self._methods: dict[str, Callable[..., Any] | None] = {
            name: getattr(self._policy, name, None) for name in names
        }

    def __len__(self) -> int:
        """Number of allocated blocks, including blocks being written."""
        return len(self._blocks)

    def __iter__(self) -> Iterator[TierBlock]:
        """Iterate over the blocks in the order in which they were added, including blocks being written."""
        return iter(self._blocks.values())

    @property
    def policy_error(self) -> PolicyError | None:
        """Violation of the contract by the tier's retention policy; None if there was none."""
        return self.order.error

    def number_slots(self) -> None:
        """Assign each block a slot, 0 to `num_blocks` - 1, while it is in the tier; call this while the tier is empty."""
        self._free_slots = list(range(self.num_blocks - 1, -1, -1))

    # Content

    def holds(self, block_hash: Hashable) -> bool:
        """Return True if the content can be read here."""
        one = self._blocks.get(block_hash)
        return one is not None and one.is_here

    def get(self, block_hash: Hashable) -> TierBlock | None:
        """Return the block of this content, written or being written; None if the tier has none."""
        return self._blocks.get(block_hash)

    def contents(self) -> list[Hashable]:
        """Return the hashes of the content that can be read, in the order in which it was added."""
        return [block_hash for block_hash, one in self._blocks.items() if one.is_here]

    # Adding and removing

    def add(self, new: TierBlock, now: float) -> list[TierBlock] | None:
        """Allocate a block for content to be written; return the blocks that were evicted for it.

        Returns None and changes nothing if the tier is full and no other block is a candidate for eviction. Raises
        `ValueError` if the tier has the content already.
        """
        if new.block_hash in self._blocks:
            raise ValueError(f"TierStore: {new.block_hash!r} is in tier {self.name} already")
        self._link(new)  # must come before evictions, which could otherwise evict the new block's parent
        evicted: list[TierBlock] = []
        while len(self._blocks) >= self.num_blocks:
            one = self._evict(now)
            if one is None:
                self._unlink(new, now)
                return None
            evicted.append(one)
        self._blocks[new.block_hash] = new
        if self._free_slots is not None:
            new.slot = self._free_slots.pop()
        for child in self._without_parent.pop(new.block_hash, ()):
            self._join(child, new)
        self._notify("on_stored", [new], now)
        return evicted

    def written(self, one: TierBlock, now: float) -> bool:
        """Make content readable after its transfer to the tier; return False if its block was removed meanwhile."""
        if self._blocks.get(one.block_hash) is not one:
            return False
        one.is_here = True
        self.unlock(one, now)
        return True

    def remove(self, one: TierBlock, now: float) -> None:
        """Remove content that another level holds or that was never written; not counted as an eviction."""
        if self._blocks.get(one.block_hash) is one:
            self._leave_idle(one)
            self._remove(one, now)
            self._notify("on_withdrawn", one, now)

    def use(self, one: TierBlock, request: Any, now: float) -> None:
        """Count a use of the block by a request, and update its place in the order of eviction."""
        was_idle = one.is_idle
        self._leave_idle(one)
        one.use(request, now)
        if was_idle:
            self._enter_idle(one, now)
        self._notify("on_used", [one], now)

    def lock(self, one: TierBlock) -> None:
        """Protect a block from eviction while it is read."""
        one.num_locks += 1
        self._leave_idle(one)

    def unlock(self, one: TierBlock, now: float) -> None:
        """Undo one `lock`; does nothing for a block that was removed."""
        if self._blocks.get(one.block_hash) is one:
            one.num_locks -= 1
            if not one.num_locks:
                self._enter_idle(one, now)

    def clear(self, now: float) -> None:
        """Drop all content."""
        for one in self._blocks.values():
            one.is_here = False
        self.order = RetentionOrder(self._policy, self.order.name)
        self._blocks, self._without_parent = {}, {}
        if self._free_slots is not None:
            self.number_slots()
        on_cleared = self._methods["on_cleared"]
        if on_cleared is not None:
            self.order.ask(on_cleared, now)

    # Order

    def _evict(self, now: float) -> TierBlock | None:
        if not len(self.order):
            return None
        self.order.begin()
        entry = self.order.pop(now)
        entry.is_idle = False
        self._notify("on_evicted", entry, now)
        self._remove(entry, now)
        self.num_evicted += 1
        return entry

    def _enter_idle(self, entry: TierBlock, now: float) -> None:
        entry.is_idle = True
        self.order.number(entry)
        if not entry.num_children:
            self.order.add(entry, now)

    def _leave_idle(self, entry: TierBlock) -> None:
        if entry.is_idle:
            entry.is_idle = False
            if not entry.num_children:
                self.order.discard(entry)

    def _link(self, one: TierBlock) -> None:
        if one.parent_hash is None:
            return
        parent = self._blocks.get(one.parent_hash)
        if parent is None:
            self._without_parent.setdefault(one.parent_hash, {})[one] = None
            return
        self.order.discard(parent)
        self._join(one, parent)

    @staticmethod
    def _join(one: TierBlock, parent: TierBlock) -> None:
        one.parent = parent
        parent.continuations[one] = None
        parent.num_children += 1

    def _unlink(self, one: TierBlock, now: float) -> None:
        parent = one.parent
        if isinstance(parent, TierBlock):
            one.parent = None
            del parent.continuations[one]
            parent.num_children -= 1
            if not parent.num_children and parent.is_idle:
                self.order.add(parent, now)
        elif one.parent_hash is not None and (others := self._without_parent.get(one.parent_hash)) is not None:
            others.pop(one, None)
            if not others:
                del self._without_parent[one.parent_hash]

    def _remove(self, one: TierBlock, now: float) -> None:
        del self._blocks[one.block_hash]
        if self._free_slots is not None:
            self._free_slots.append(one.slot)
        self._unlink(one, now)
        one.is_here = False
        if one.num_children:
            for child in one.continuations:
                child.parent = None
            self._without_parent[one.block_hash] = one.continuations
            one.continuations, one.num_children = {}, 0

    def _notify(self, name: str, about: object, now: float) -> None:
        method = self._methods[name]
        if method is not None:
            self.order.ask(method, about, now)

    # Invariants

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        require(len(self._blocks) <= self.num_blocks, f"tier {self.name} holds more blocks than it has")
        if self._free_slots is not None:
            slots = [*self._free_slots, *(one.slot for one in self._blocks.values())]
            require(sorted(slots) == list(range(self.num_blocks)), f"tier {self.name}: a place is lost, or taken twice")
        children = dict.fromkeys(self._blocks.values(), 0)
        for block_hash, one in self._blocks.items():
            require(one.block_hash == block_hash, f"tier {self.name}: a block stands elsewhere")
            require(one.is_idle == (not one.num_locks), f"tier {self.name}: a block is idle and in transfer at once")
            require(one.is_here or one.num_locks > 0, f"tier {self.name}: a block is neither written nor being written")
            parent = None if one.parent_hash is None else self._blocks.get(one.parent_hash)
            require(one.parent is parent, f"tier {self.name}: a chain is broken")
            if parent is not None:
                children[parent] += 1
            elif one.parent_hash is not None:
                orphans = self._without_parent.get(one.parent_hash, {})
                require(one in orphans, f"tier {self.name}: a chain cannot be joined again")
        require(
            all(one.num_children == count == len(one.continuations) for one, count in children.items()),
            f"tier {self.name}: continuations are miscounted",
        )
        listed = sum(map(len, self._without_parent.values()))
        waiting = sum(one.parent is None and one.parent_hash is not None for one in self._blocks.values())
        require(listed == waiting, f"tier {self.name}: a block is listed that is gone")
        ends = sum(one.is_idle and not one.num_children for one in self._blocks.values())
        require(
            len(self.order) == ends, f"tier {self.name}: an end of a chain is no candidate, or a candidate is no end"
        )
