"""KV memory spread over KV-parallel groups.

KV parallelism spreads one long request over several groups of workers, each with its own blocks. Token t of a request
lies in the (t // group_tokens)-th of the request's groups. The blocks of an admission are allocated all or nothing;
they should hold the whole prompt (`reservation: prompt`), because several long prompts that grow step by step could
deadlock. Groups are tried in ascending order of pending prefill work, measured in squared prompt tokens.

Source: Medha (arXiv 2409.17264) and Vajra's tracker of KV-parallel state. Vajra's code does not subtract work from
groups that were not active yet; this module subtracts a request's work from all of its groups as chunks complete, and
the rest when the request leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from math import inf

from msgspec import Struct

from vajra_py.runtime.kv.block_hashes import BlockHashes
from vajra_py.runtime.kv.block_pool import BlockPool, PrefixCacheOptions
from vajra_py.runtime.kv.content_events import ContentEvents
from vajra_py.runtime.kv.host import BlockCopy, HostSpace
from vajra_py.runtime.kv.interface import KvRequest
from vajra_py.runtime.kv.retention_order import CachedEntry
from vajra_py.runtime.queues import HitChanges, NoHits


class KvGroups(Struct, frozen=True):
    """Number and sizes of KV-parallel groups."""

    num_groups: int
    blocks_per_group: int
    group_tokens: int
    """Maximum number of tokens of one request that one group holds: a multiple of the block size that fits into the
    group.
    """


class _BlockTables:
    """Groups of one registered request, and its blocks in each group."""

    __slots__ = ("groups", "host", "num_done_tokens", "num_prefill_tokens", "tables")

    def __init__(self) -> None:
        self.groups: list[int] = []
        self.tables: list[list[int]] = []
        self.host: list[int] = []
        self.num_prefill_tokens = 0
        """Number of tokens known at admission; computing them counts as prefill work."""
        self.num_done_tokens = 0
        """Number of leading tokens computed, as counted by `on_chunk_done`."""

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.tables))

    @property
    def work(self) -> int:
        """Pending prefill work, in squared tokens."""
        return max(self.num_prefill_tokens**2 - self.num_done_tokens**2, 0)

    def blocks(self) -> list[int]:
        return list(chain.from_iterable(self.tables))

    def group_of_blocks(self) -> list[int]:
        return [group for group, table in zip(self.groups, self.tables, strict=True) for _ in table]


class KvParallelMemory:
    """`KvMemory` of a replica with KV parallelism.

    Block ids are local to a group. `num_blocks` and `free_blocks` are sums over groups. `excluded_groups` are groups
    that take no new requests now, because the step being formed has enough query tokens in them.
    """

    __slots__ = (
        "_group_blocks",
        "_host",
        "_pending",
        "_pools",
        "_tables_of",
        "block_size",
        "group_tokens",
        "num_groups",
    )

    def __init__(
        self,
        groups: KvGroups,
        block_size: int,
        *,
        prefix_cache: PrefixCacheOptions | None = None,
        host_blocks: int = 0,
        records_copies: bool = False,
    ) -> None:
        _check_sizes(groups, block_size)
        if prefix_cache is not None:
            raise ValueError(
                "KvParallelMemory: prefix_cache ties requests to groups and cannot be combined with KV parallelism "
                f"(got {prefix_cache}). Only None is allowed."
            )
        self.num_groups = groups.num_groups
        self.group_tokens = groups.group_tokens
        self.block_size = block_size
        self._group_blocks = groups.group_tokens // block_size
        self._pools = [BlockPool(groups.blocks_per_group) for _ in range(groups.num_groups)]
        self._pending = [0] * groups.num_groups
        self._host = HostSpace(host_blocks, records_copies)
        self._tables_of: dict[KvRequest, _BlockTables] = {}

    # Sizes

    @property
    def num_blocks(self) -> int:
        """Total number of KV blocks over all groups."""
        return sum(pool.num_blocks for pool in self._pools)

    @property
    def free_blocks(self) -> int:
        """Number of free blocks over all groups."""
        return sum(pool.num_free for pool in self._pools)

    @property
    def used_blocks(self) -> int:
        """Number of blocks that requests hold, over all groups."""
        return self.num_blocks - self.free_blocks

    @property
    def group_free_blocks(self) -> Sequence[int]:
        """Number of free blocks of each group."""
        return [pool.num_free for pool in self._pools]

    @property
    def growth_headroom(self) -> int:
        """Maximum number of requests for which `grow_each` would succeed now, whichever requests they are, if all are
        shorter than the maximum length: the number of free blocks of the fullest group.
        """
        return min(pool.num_free for pool in self._pools)

    @property
    def free_host_blocks(self) -> int:
        """Number of free blocks of the swap space."""
        return self._host.free_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def fits(self, num_tokens: int) -> bool:
        """Return True if a request of `num_tokens` tokens fits into the empty memory."""
        return num_tokens <= self.num_groups * self.group_tokens

    # Requests

    def register(self, request: KvRequest, hashes: BlockHashes | None = None) -> None:
        """Register a request; its hashes are ignored, since nothing is shared."""
        if request in self._tables_of:
            raise ValueError(f"KvParallelMemory.register: already registered ({request!r}). Forget it first.")
        self._tables_of[request] = _BlockTables()

    def forget(self, request: KvRequest) -> None:
        """Unregister a request, which must hold no blocks."""
        entry = self._tables_of[request]
        if entry.groups or entry.host:
            raise ValueError(
                f"KvParallelMemory.forget: it still holds blocks ({request!r}). Release or drop them first."
            )
        del self._tables_of[request]

    def clear(self) -> None:
        """Drop every request and the content of every block, because the devices have lost their memory."""
        self._pools = [BlockPool(pool.num_blocks) for pool in self._pools]
        self._pending = [0] * self.num_groups
        self._host.clear()
        self._tables_of.clear()

    def is_registered(self, request: KvRequest) -> bool:
        """Return True if the request is registered here."""
        return request in self._tables_of

    def num_freed_by(self, requests: Iterable[KvRequest]) -> int:
        """Return the number of blocks that would become free if these resident requests were freed: all of their
        blocks, since none are shared.
        """
        return sum(map(self.num_held_blocks, requests))

    def num_held_blocks(self, request: KvRequest) -> int:
        """Return the number of device blocks of the request over all its groups."""
        return self._tables_of[request].num_blocks

    def block_table(self, request: KvRequest) -> Sequence[int]:
        """Return the group-local ids of the request's device blocks in the order of its tokens; `group_tables` returns
        them by group.
        """
        return self._tables_of[request].blocks()

    def tier_hits(self, hashes: BlockHashes, num_known_tokens: int) -> Mapping[str, int]:
        """Return an empty mapping: there are no tiers."""
        return {}

    def lookup_prefix(self, hashes: BlockHashes, num_known_tokens: int) -> int:
        """Return 0: nothing is cached."""
        return 0

    def cached_tokens(self, request: KvRequest) -> int:
        """Return 0: nothing is cached."""
        return 0

    def follow_hits(self, *, wanted: bool) -> HitChanges | None:
        """Return a source that never reports a change, since nothing is cached."""
        return NoHits()

    def cache_blocks(self, request: KvRequest, num_tokens: int) -> None:
        """Do nothing: no prefix cache."""

    def cache_each(self, requests: Sequence[KvRequest], num_tokens: Sequence[int]) -> None:
        """Do nothing: no prefix cache."""

    def uncache_blocks(self, request: KvRequest, num_tokens: int) -> bool:
        """Return True: nothing was cached."""
        return True

    def withdraw_blocks(self, request: KvRequest, num_tokens: int) -> None:
        """Do nothing: no prefix cache."""

    # Nothing is cached, so there is nothing to pin, to expire or to report

    next_due = inf
    is_watched = expires_content = may_expire = False
    tiers = None
    policy_error = None

    @property
    def repeat_headroom(self) -> int:
        """Maximum number of blocks that fast-forwarded steps may take together: `growth_headroom`."""
        return self.growth_headroom

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Do nothing."""

    def expire(self) -> None:
        """Do nothing."""

    def settle_due(self) -> Sequence[Hashable]:
        """Return no names: there are no pins."""
        return ()

    def pin(self, name: Hashable, request: KvRequest, until: float) -> bool:
        """Pin nothing and return True: nothing is cached."""
        return True

    def unpin(self, name: Hashable) -> bool:
        """Return False: there is no pin."""
        return False

    def release_pin(self) -> None:
        """Return None: there is no pin."""

    def now(self) -> float:
        """Return 0: no clock is needed."""
        return 0.0

    def report_content(self, events: ContentEvents) -> None:
        """Do nothing."""

    def report_evictions(self, notify: Callable[[CachedEntry, float], None] | None) -> None:
        """Do nothing."""

    # Groups

    @property
    def pending_prefill_work(self) -> Sequence[int]:
        """Pending prefill work of each group, in squared prompt tokens; a request's work counts in each of its groups."""
        return tuple(self._pending)

    def groups_of(self, request: KvRequest) -> Sequence[int]:
        """Return the groups that hold the request's KV, in the order of its tokens; empty unless the request is
        resident.
        """
        return self._tables_of[request].groups

    def group_tables(self, request: KvRequest) -> Sequence[Sequence[int]]:
        """Return the request's block ids in each group of `groups_of`."""
        return self._tables_of[request].tables

    def active_groups(self, request: KvRequest, num_done_tokens: int | None = None) -> Sequence[int]:
        """Return the groups that take part in computing the token after the first `num_done_tokens`.

        These are the groups that hold earlier tokens and the group that will hold this token; for a decode, these are
        all groups of the request. `num_done_tokens` defaults to the progress counted by `on_chunk_done`.
        """
        entry = self._tables_of[request]
        if num_done_tokens is None:
            if entry.num_done_tokens >= entry.num_prefill_tokens:
                return entry.groups
            num_done_tokens = entry.num_done_tokens
        return entry.groups[: num_done_tokens // self.group_tokens + 1]

    def group_context(self, request: KvRequest, num_done_tokens: int) -> list[int]:
        """Return how many of the first `num_done_tokens` tokens each group of `active_groups(request, num_done_tokens)`
        holds.
        """
        groups = self.active_groups(request, num_done_tokens)
        return [min(num_done_tokens - i * self.group_tokens, self.group_tokens) for i in range(len(groups))]

    def max_chunk(self, request: KvRequest, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Return the maximum number of tokens in the chunk that follows the first `num_done_tokens` tokens: the
        remaining tokens, as far as they belong to the group in which the chunk begins.
        """
        return min(num_remaining_tokens, self.group_tokens - num_done_tokens % self.group_tokens)

    def on_chunk_done(self, request: KvRequest, num_done_before: int, num_tokens: int) -> None:
        """Subtract the work of a computed chunk from the pending work of each of the request's groups. The work of
        the n tokens that follow the first m tokens is (m + n)^2 - m^2.

        Only prefill counts, and each token counts once even if it is reported twice, so a chunk may be reported when it
        is scheduled or when it is finished.
        """
        entry = self._tables_of[request]
        before = entry.work
        entry.num_done_tokens = max(entry.num_done_tokens, num_done_before + num_tokens)
        self._add_work(entry.groups, entry.work - before)

    def _add_work(self, groups: Iterable[int], work: int) -> None:
        for group in groups:
            self._pending[group] += work

    def _place(self, num_blocks: int, excluded_groups: Collection[int]) -> list[tuple[int, int]] | None:
        """Split `num_blocks` into pairs (group, number of blocks): each pair has a group's full share of blocks, except
        that the last pair has the remainder, if any. Returns None if too few blocks are free.

        Groups are tried in ascending order of pending prefill work; of equal groups, the one with the smaller number
        comes first.
        """
        num_groups, remainder = divmod(num_blocks, self._group_blocks)
        allowed = (group for group in range(self.num_groups) if group not in excluded_groups)
        order = sorted(allowed, key=self._pending.__getitem__)
        full = self._group_blocks if num_groups else remainder
        last = remainder or full
        num_groups += remainder > 0
        with_room: list[int] = []
        for_last: list[int] = []
        for group in order:
            if len(with_room) + len(for_last) == num_groups:
                break
            num_free = self._pools[group].num_free
            if num_free >= full:
                with_room.append(group)
            elif num_free >= last and not for_last:
                for_last.append(group)
        chosen = with_room + for_last
        if len(chosen) < num_groups:
            return None
        return [(group, full) for group in chosen[:-1]] + [(group, last) for group in chosen[-1:]]

    def _growth(
        self, entry: _BlockTables, num_blocks: int, excluded_groups: Collection[int]
    ) -> list[tuple[int, int]] | None:
        """Return the pairs (group, number of blocks) to add so that the request holds `num_blocks` in total: first in
        its last group, then in new groups. Returns None if too few blocks are free.
        """
        num_new = num_blocks - entry.num_blocks
        if num_new <= 0:
            return []
        if not entry.groups:
            return self._place(num_new, excluded_groups)
        last = entry.groups[-1]
        in_last = min(num_new, self._group_blocks - len(entry.tables[-1]))
        if in_last > self._pools[last].num_free:
            return None
        here = [(last, in_last)] if in_last else []
        if in_last == num_new:
            return here
        elsewhere = self._place(num_new - in_last, {*excluded_groups, *entry.groups})
        return None if elsewhere is None else here + elsewhere

    def _take(self, entry: _BlockTables, plan: Iterable[tuple[int, int]]) -> None:
        for group, count in plan:
            blocks = self._pools[group].take(count)
            if entry.groups and entry.groups[-1] == group:
                entry.tables[-1] += blocks
            else:
                entry.groups.append(group)
                entry.tables.append(blocks)
                self._pending[group] += entry.work

    def _give_back(self, entry: _BlockTables) -> None:
        self._add_work(entry.groups, -entry.work)
        for group, table in zip(entry.groups, entry.tables, strict=True):
            self._pools[group].release(table)
        entry.groups = []
        entry.tables = []

    # Allocating and freeing

    def blocks_needed(self, request: KvRequest, num_tokens: int) -> int:
        """Return the number of free blocks needed for the request to hold its first `num_tokens` tokens."""
        entry = self._tables_of[request]
        return max(self.blocks_for(num_tokens) - entry.num_blocks, len(entry.host), 0)

    def blocks_needed_in_steps(self, request: KvRequest, num_tokens: int) -> int:
        """Return `blocks_needed`, since every block is held to the end."""
        return self.blocks_needed(request, num_tokens)

    def expect_load(self, request: KvRequest, num_tokens: int) -> None:
        """Do nothing: a loaded token has a block like any other."""

    def can_allocate(self, request: KvRequest, num_tokens: int, excluded_groups: Collection[int] = ()) -> bool:
        """Return True if `allocate` (or `swap_in`, or `grow` for a resident request) would succeed now."""
        entry = self._tables_of[request]
        num_blocks = max(self.blocks_for(num_tokens), len(entry.host))
        return self._growth(entry, num_blocks, excluded_groups) is not None

    def allocate(self, request: KvRequest, num_tokens: int, excluded_groups: Collection[int] = ()) -> int | None:
        """Reserve blocks for `num_tokens` tokens and return 0, because nothing is cached; return None and change
        nothing if there is no room.

        A request that fits into one group goes to the group with the least pending work among the groups with enough
        free blocks; a longer request goes to as few groups as possible.
        """
        entry = self._tables_of[request]
        if entry.groups or entry.host or num_tokens < 1:
            raise ValueError(
                f"KvParallelMemory.allocate: cannot give {num_tokens} tokens to {request!r}. "
                "It must hold no blocks, on device or host, and get at least 1 token."
            )
        plan = self._place(self.blocks_for(num_tokens), excluded_groups)
        if plan is None:
            return None
        entry.num_prefill_tokens = request.num_known_tokens
        entry.num_done_tokens = 0
        self._take(entry, plan)
        return 0

    def grow(self, request: KvRequest, num_tokens: int) -> bool:
        """Allocate blocks until a resident request can hold `num_tokens` tokens; return False and change nothing if
        blocks are lacking.

        The request grows in its last group until this group holds `group_tokens` of the request's tokens, and then in a
        new group.
        """
        entry = self._resident(request, "grow")
        plan = self._growth(entry, self.blocks_for(num_tokens), ())
        if plan is None:
            return False
        self._take(entry, plan)
        return True

    def shrink(self, request: KvRequest, num_blocks: int) -> None:
        """Raise `ValueError`: only rejected drafts need this, and KV parallelism has no drafts."""
        raise ValueError(f"KvParallelMemory.shrink: blocks cannot be freed one by one (to keep {num_blocks}).")

    def grow_each(self, requests: Collection[KvRequest]) -> None:
        """Take one more block for each of these resident requests, in this order; ValueError if too few are free."""
        growing = [self._resident(request, "grow_each") for request in requests]
        longest = self.num_groups * self._group_blocks
        crossing = [entry for entry in growing if len(entry.tables[-1]) == self._group_blocks]
        if len(growing) > self.growth_headroom or any(entry.num_blocks >= longest for entry in crossing):
            raise ValueError(
                f"KvParallelMemory.grow_each: cannot serve that many requests ({len(growing)}). "
                f"Allowed: {self.growth_headroom}, all of them shorter than {longest} blocks."
            )
        for entry in growing:
            if len(entry.tables[-1]) < self._group_blocks:
                entry.tables[-1] += self._pools[entry.groups[-1]].take(1)
            else:
                self._take(entry, self._place(1, entry.groups) or ())

    can_reserve = has_reserved = recycles = False
    due_places: Collection[int] = ()
    lagging: Collection[KvRequest] = ()

    def reserve_blocks(self, num_blocks: int) -> None:
        """Raise `ValueError`: each request grows in its own groups, so blocks cannot be reserved together."""
        raise ValueError(
            f"KvParallelMemory.reserve_blocks: blocks cannot be reserved (got {num_blocks}). Check `can_reserve` first."
        )

    def materialize(self, request: KvRequest, num_tokens: int) -> None:
        """Do nothing: no blocks are reserved."""

    def free(self, request: KvRequest, num_computed_tokens: int | None = None, *, for_good: bool = False) -> None:
        """Free the request's device blocks (end, abort, or preemption by recompute)."""
        entry = self._resident(request, "free")
        self._give_back(entry)
        entry.num_prefill_tokens = entry.num_done_tokens = 0

    # Swapping

    def swap_out(self, request: KvRequest, num_computed_tokens: int | None = None) -> int | None:
        """Move a resident request to host memory and return the number of blocks moved; return None and change nothing
        if the host is full.

        With `num_computed_tokens` (at least 1), only the blocks that hold this many leading tokens are copied; the
        other blocks are freed.
        """
        entry = self._resident(request, "swap_out")
        blocks = entry.blocks()
        if num_computed_tokens is not None:
            blocks = blocks[: max(self.blocks_for(num_computed_tokens), 1)]
        stored = self._host.store(blocks, entry.group_of_blocks()[: len(blocks)])
        if stored is None:
            return None
        self._give_back(entry)
        entry.host = stored
        return len(stored)

    def swap_in(self, request: KvRequest, num_tokens: int, excluded_groups: Collection[int] = ()) -> int | None:
        """Move a swapped request back to the device with room for `num_tokens` tokens; return the number of blocks
        moved, or None if too few blocks are free.
        """
        entry = self._swapped(request, "swap_in")
        stored = entry.host
        plan = self._place(max(self.blocks_for(num_tokens), len(stored)), excluded_groups)
        if plan is None:
            return None
        self._take(entry, plan)
        entry.host = []
        self._host.take_back(stored, entry.blocks(), entry.group_of_blocks())
        return len(stored)

    def drop_swapped(self, request: KvRequest) -> None:
        """Free a swapped request's host blocks; its content is lost."""
        entry = self._swapped(request, "drop_swapped")
        self._host.drop(entry.host)
        entry.host = []
        entry.num_prefill_tokens = entry.num_done_tokens = 0

    def take_copies(self) -> list[BlockCopy]:
        """Return the block copies decided since the last call, in order of execution; needs `records_copies`."""
        return self._host.take_copies() if self._host.has_copies else []

    def _resident(self, request: KvRequest, what: str) -> _BlockTables:
        entry = self._tables_of[request]
        if not entry.groups:
            raise ValueError(
                f"KvParallelMemory.{what}: it holds no device blocks ({request!r}). Allocate or swap it in first."
            )
        return entry

    def _swapped(self, request: KvRequest, what: str) -> _BlockTables:
        entry = self._tables_of[request]
        if not entry.host:
            raise ValueError(
                f"KvParallelMemory.{what}: it is not swapped ({request!r}). Only swapped requests are allowed."
            )
        return entry

    # Consistency

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        users: list[Counter[int]] = [Counter() for _ in self._pools]
        work = [0] * self.num_groups
        for request, entry in self._tables_of.items():
            if len(set(entry.groups)) != len(entry.groups) or (entry.groups and entry.host):
                raise AssertionError(f"KvParallelMemory: a group twice, or on device and host at once ({request!r})")
            if any(len(table) != self._group_blocks for table in entry.tables[:-1]):
                raise AssertionError(f"KvParallelMemory: a group before the last is not full ({request!r})")
            for group, table in zip(entry.groups, entry.tables, strict=True):
                users[group].update(table)
                work[group] += entry.work
        for pool, used in zip(self._pools, users, strict=True):
            pool.check(dict(used))
        if work != self._pending:
            raise AssertionError(f"KvParallelMemory: pending work is {self._pending} and should be {work}")
        self._host.check([entry.host for entry in self._tables_of.values()])


def _check_sizes(groups: KvGroups, block_size: int) -> None:
    if block_size < 1 or groups.num_groups < 1:
        raise ValueError(
            f"KvParallelMemory: sizes must be positive (block_size {block_size}, {groups.num_groups} groups). "
            "At least 1 is allowed."
        )
    per_group = groups.blocks_per_group * block_size
    if groups.group_tokens < 1 or groups.group_tokens % block_size or groups.group_tokens > per_group:
        raise ValueError(
            f"KvParallelMemory: group_tokens does not suit the blocks ({groups.group_tokens}). "
            f"A multiple of the block size {block_size} up to the {per_group} tokens of a group is allowed."
        )
