"""KV memory of a replica: block tables and prefix lookup.

One replica's KV memory: tables of block ids per request, the prefix cache over them, and swap space. Everything is all
or nothing: what does not fit changes nothing. Refusals that a scheduler meets in normal operation are values; calls
that make no sense raise ValueError.

Requests that decode together may grow together: the blocks are taken at once and lent to all of them, and a request's table
gets its part when somebody needs it (`lend`, `settle`).

Invariants (`check`): used + free = total; a block has exactly as many references as tables list it; a request that is
admitted shares only blocks whose content equals its own, and always has at least one token left to compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

from vajra_py.runtime.kv.content import BlockKeys
from vajra_py.runtime.kv.holding import Holding
from vajra_py.runtime.kv.host import BlockCopy, HostSpace
from vajra_py.runtime.kv.pool import BlockPool, PrefixCacheOptions
from vajra_py.runtime.kv.probe import Probe

_FIRST_PROBE_BLOCKS = 32
_PROBE_GROWTH = 4


class KvRequest(Protocol):
    """What KV memory needs of a request: to be hashable by identity, and its length."""

    @property
    def num_known_tokens(self) -> int:
        """Prompt plus generated tokens."""

    def __hash__(self) -> int:
        """By identity."""


@dataclass(frozen=True, slots=True)
class KvStats:
    """Counters since the memory was built."""

    num_queried_tokens: int
    """Known tokens of all admissions that consulted the prefix cache."""
    num_hit_tokens: int
    """Those of them that the cache spared."""
    num_evicted_blocks: int
    """Blocks whose cached content was given up for new content."""
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int


class KvMemory:
    """The KV blocks of one replica without KV parallelism.

    Requests are registered when they arrive and forgotten when they leave. In between a request holds nothing, holds
    device blocks (resident), or holds host blocks (swapped). `passed_over` exists for the interface that this class
    shares with `KvParallelMemory` and has no meaning here.
    """

    __slots__ = ("_hit", "_holdings", "_host", "_lent", "_pool", "_queried", "block_size")

    num_groups = 1

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: PrefixCacheOptions | None = None,
        host_blocks: int = 0,
        records_copies: bool = False,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"KvMemory: block_size is not a number of tokens ({block_size}). At least 1 is allowed.")
        self.block_size = block_size
        self._pool = BlockPool(num_blocks, prefix_cache)
        self._host = HostSpace(host_blocks, records_copies)
        self._holdings: dict[KvRequest, Holding] = {}
        self._lent: list[int] = []
        self._queried = 0
        self._hit = 0

    # Sizes

    @property
    def num_blocks(self) -> int:
        """KV blocks in all."""
        return self._pool.num_blocks

    @property
    def free_blocks(self) -> int:
        """Free blocks, idle cached ones included."""
        return self._pool.num_free

    @property
    def used_blocks(self) -> int:
        """Blocks that at least one request holds."""
        return self._pool.num_blocks - self._pool.num_free

    @property
    def growth_headroom(self) -> int:
        """How many requests `grow_each` can serve now, whichever they are."""
        return self._pool.num_free

    @property
    def free_host_blocks(self) -> int:
        """Free blocks of the swap space."""
        return self._host.free_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def fits(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens could be held if it were alone."""
        return self.blocks_for(num_tokens) <= self._pool.num_blocks

    # Requests

    def register(self, request: KvRequest, keys: BlockKeys | None = None) -> None:
        """A request arrives. Without keys its content is never shared, not even with itself after a preemption."""
        if request in self._holdings:
            raise ValueError(f"KvMemory.register: already registered ({request!r}). Forget it first.")
        self._holdings[request] = Holding(keys if self._pool.options is not None else None)

    def forget(self, request: KvRequest) -> None:
        """A request leaves for good; it must hold nothing."""
        holding = self._holdings[request]
        if holding.table or holding.host:
            raise ValueError(f"KvMemory.forget: it still holds blocks ({request!r}). Release or drop them first.")
        del self._holdings[request]

    def is_registered(self, request: KvRequest) -> bool:
        """Whether the request is known here."""
        return request in self._holdings

    def clear(self) -> None:
        """The device has lost everything: no request is known any more, and no block holds anything."""
        self._pool = BlockPool(self._pool.num_blocks, self._pool.options)
        self._host.clear()
        self._holdings.clear()
        self._lent = []

    def held_blocks(self, request: KvRequest) -> int:
        """Device blocks in the request's table, shared ones included."""
        return len(self._holdings[request].table)

    def table(self, request: KvRequest) -> Sequence[int]:
        """Ids of the request's device blocks, first token's block first; a live view, not to be changed."""
        return self._holdings[request].table

    # Prefix cache

    def probe(self, keys: BlockKeys, num_known_tokens: int) -> int:
        """Leading tokens that the cache holds of some content, for a request that need not be registered here."""
        limit = min(num_known_tokens - 1, keys.num_keyed_tokens) // self.block_size
        if self._pool.options is None or limit <= 0:
            return 0
        blocks: list[int] = []
        self._match(keys, blocks, limit, _FIRST_PROBE_BLOCKS)
        return len(blocks) * self.block_size

    def cached_tokens(self, request: KvRequest) -> int:
        """Leading tokens that admission would find in the cache now, whole blocks; at least one token stays to compute.

        0 for a request that is resident or swapped. Asking again costs what was published or evicted since.
        """
        return len(self._found(request, self._holdings[request])) * self.block_size

    def _found(self, request: KvRequest, holding: Holding) -> list[int]:
        """Blocks of the longest cached run of leading full blocks; not to be changed."""
        keys = holding.keys
        if not holding.may_be_cached or keys is None or holding.table or holding.host:
            return []
        pool = self._pool
        limit = min(request.num_known_tokens - 1, keys.num_keyed_tokens) // self.block_size
        probe = holding.probe
        if probe is None or probe.limit != limit or not probe.survives(pool):
            probe = holding.probe = Probe()
            probe.limit = limit
            probe.removed_epoch = pool.removed_epoch
        probe.num_removed = len(pool.removed)
        if probe.num_published != pool.num_published:
            before = len(probe.blocks)
            self._match(keys, probe.blocks, limit, _FIRST_PROBE_BLOCKS if probe.num_published < 0 else 1)
            probe.num_published = pool.num_published
            if len(probe.blocks) != before:
                probe.members = None
                probe.idle_version = -1
        return probe.blocks

    def _match(self, keys: BlockKeys, blocks: list[int], limit: int, width: int) -> None:
        """Extend `blocks` by what the cache holds after them, asking for few keys at first: most misses come early."""
        while (start := len(blocks)) < limit:
            stop = min(start + width, limit)
            blocks += self._pool.match(keys.keys(start, stop))
            if len(blocks) < stop:
                return
            width *= _PROBE_GROWTH

    def _num_idle(self, holding: Holding, found: list[int]) -> int:
        """How many of the found blocks are free: attaching them takes free capacity too."""
        probe = holding.probe
        if not found or probe is None:
            return 0
        if probe.idle_version != self._pool.idle_version:
            probe.num_idle = self._pool.num_idle(found)
            probe.idle_version = self._pool.idle_version
        return probe.num_idle

    def publish(self, request: KvRequest, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens is (or will be, when the step runs) in memory: let others find it.

        Enters full blocks that are not entered yet. Blocks that nobody else can name before the request ends are only
        noted and entered by `release`, so for content that is private after the prompt it is enough to call this once
        before `release` (or to pass the number to it).
        """
        holding = self._holdings[request]
        keys = holding.keys
        if keys is None:
            return
        if num_tokens > len(holding.table) * self.block_size:
            raise ValueError(
                f"KvMemory.publish: more tokens than the request's blocks hold ({num_tokens}). "
                f"At most {len(holding.table) * self.block_size} are allowed."
            )
        if num_tokens > holding.num_valid_tokens:
            holding.num_valid_tokens = num_tokens
        if not holding.is_private:
            self._publish(holding, keys, min(num_tokens, keys.num_public_tokens))

    def _publish(self, holding: Holding, keys: BlockKeys, num_tokens: int) -> None:
        start = holding.num_published
        stop = min(num_tokens, keys.num_keyed_tokens) // self.block_size
        if stop > start:
            self._pool.publish(holding.table[start:stop], keys.keys(start, stop))
            holding.num_published = stop
            holding.may_be_cached = True

    def withdraw(self, request: KvRequest, num_tokens: int) -> bool:
        """Only the first `num_tokens` tokens will be computed after all: take back what was published beyond them.

        For a request that leaves the step in which it was published. False, and nothing changed, if another request has
        attached such a block already.
        """
        holding = self._resident(request, "withdraw")
        options = self._pool.options
        if options is not None and options.unscheduled == "keep":
            return True
        keep = num_tokens // self.block_size
        if holding.num_published > keep:
            if not self._pool.withdraw(holding.table[keep : holding.num_published]):
                return False
            holding.num_published = keep
        holding.num_valid_tokens = min(holding.num_valid_tokens, num_tokens)
        return True

    # Taking and giving blocks

    def blocks_needed(self, request: KvRequest, num_tokens: int) -> int:
        """Free blocks that would be taken if the request came to hold its first `num_tokens` tokens.

        Counts idle cached blocks that a hit would revive, and none for blocks that it holds or shares already.
        """
        holding = self._holdings[request]
        num_blocks = self.blocks_for(num_tokens)
        if holding.table:
            return max(num_blocks - len(holding.table), 0)
        if holding.host:
            return max(num_blocks, len(holding.host))
        found = self._found(request, holding)
        return max(num_blocks - len(found), 0) + self._num_idle(holding, found)

    def can_admit(self, request: KvRequest, num_tokens: int, passed_over: Collection[int] = ()) -> bool:
        """Whether `admit` (or `swap_in`, or `grow` for a resident request) would succeed now."""
        return self.blocks_needed(request, num_tokens) <= self._pool.num_free

    def admit(self, request: KvRequest, num_tokens: int, passed_over: Collection[int] = ()) -> int | None:
        """Attach the cached prefix and take blocks until `num_tokens` tokens are held (or the hit, if that is longer).

        The number of tokens found in the cache; None, and nothing changed, if the free blocks do not suffice.
        """
        holding = self._holdings[request]
        if holding.table or holding.host or num_tokens < 1:
            raise ValueError(
                f"KvMemory.admit: cannot give {num_tokens} tokens to {request!r}. "
                "It must hold no blocks, on device or host, and get at least 1 token."
            )
        pool = self._pool
        found = self._found(request, holding)
        num_new = max(self.blocks_for(num_tokens) - len(found), 0)
        if num_new + self._num_idle(holding, found) > pool.num_free:
            return None
        if found:
            pool.attach(found)
            holding.table = found + pool.take(num_new)
        else:
            holding.table = pool.take(num_new)
        holding.probe = None
        holding.num_published = len(found)
        hit = holding.num_valid_tokens = len(found) * self.block_size
        if holding.keys is not None:
            self._queried += request.num_known_tokens
            self._hit += hit
        return hit

    def grow(self, request: KvRequest, num_tokens: int) -> bool:
        """Let a resident request hold `num_tokens` leading tokens; False, nothing changed, if blocks are lacking."""
        table = self._resident(request, "grow").table
        num_new = -(-num_tokens // self.block_size) - len(table)
        if num_new <= 0:
            return True
        if num_new > self._pool.num_free:
            return False
        table += self._pool.take(num_new)
        return True

    def grow_each(self, requests: Collection[KvRequest]) -> None:
        """One more block for each of these resident requests, in this order; ValueError if too few are free."""
        holdings = self._holdings
        for request, block in zip(requests, self._pool.take(len(requests)), strict=True):
            holdings[request].table.append(block)

    def lend(self, num_blocks: int) -> None:
        """So many blocks for resident requests that grow together; who has which of them is open until `settle`."""
        self._lent += self._pool.take(num_blocks)

    @property
    def has_lent(self) -> bool:
        """Whether somebody's table lacks blocks that were lent."""
        return bool(self._lent)

    def settle(self, request: KvRequest, num_tokens: int) -> None:
        """The request's first `num_tokens` tokens lie in its own blocks and in lent ones: these become its own too."""
        table, lent = self._holdings[request].table, self._lent
        first = len(lent) - (-(-num_tokens // self.block_size) - len(table))
        table += lent[first:]
        del lent[first:]

    def foresee_growth(self, count: int) -> list[int] | None:
        """The blocks that so many growing requests would get now; None when they would overwrite content or are lacking."""
        return self._pool.foresee(count)

    def release(self, request: KvRequest, num_computed_tokens: int | None = None, *, for_good: bool = False) -> None:
        """The request gives its device blocks back (end, abort, or preemption by recompute).

        `num_computed_tokens` (default: what `publish` was told last) says how much of its KV is valid, so that what was
        kept private can be found from now on. `for_good`: it will not come back for them.
        """
        holding = self._resident(request, "release")
        options = self._pool.options
        if holding.keys is not None and options is not None and options.retain_freed:
            if num_computed_tokens is not None:
                holding.num_valid_tokens = max(holding.num_valid_tokens, num_computed_tokens)
            valid = min(holding.num_valid_tokens, len(holding.table) * self.block_size)
            if for_good and holding.is_private and not holding.num_published:
                self._pool.retire(holding.table, valid // self.block_size)
                holding.table = []
                holding.num_valid_tokens = 0
                return
            self._publish(holding, holding.keys, valid)
        self._pool.release(holding.table, holding.num_published)
        holding.table = []
        holding.num_published = holding.num_valid_tokens = 0

    # Swapping

    def swap_out(self, request: KvRequest, num_computed_tokens: int | None = None) -> int | None:
        """Move a resident request to host memory: the blocks moved, or None, and nothing changed, if the host is full.

        With `num_computed_tokens` (at least 1) only the blocks that hold these tokens are copied and kept; reserved
        ones beyond are just given back. Blocks that the cache knows stay findable on the device until they are reused.
        """
        holding = self._resident(request, "swap_out")
        table = holding.table
        if num_computed_tokens is not None:
            table = table[: max(self.blocks_for(num_computed_tokens), 1)]
        stored = self._host.store(table, self._one_group(table))
        if stored is None:
            return None
        holding.host = stored
        self._pool.release(holding.table, holding.num_published)
        holding.table = []
        holding.num_published = 0
        holding.num_valid_tokens = min(holding.num_valid_tokens, len(stored) * self.block_size)
        return len(stored)

    def swap_in(self, request: KvRequest, num_tokens: int, passed_over: Collection[int] = ()) -> int | None:
        """Bring a swapped request back with room for `num_tokens` tokens: the blocks moved; None if it does not fit."""
        holding = self._swapped(request, "swap_in")
        stored = holding.host
        num_blocks = max(self.blocks_for(num_tokens), len(stored))
        if num_blocks > self._pool.num_free:
            return None
        holding.table = self._pool.take(num_blocks)
        holding.host = []
        self._host.take_back(stored, holding.table, self._one_group(stored))
        return len(stored)

    def drop_swapped(self, request: KvRequest) -> None:
        """Give up a swapped request's host blocks: its content is lost."""
        holding = self._swapped(request, "drop_swapped")
        self._host.drop(holding.host)
        holding.host = []
        holding.num_valid_tokens = 0

    def take_copies(self) -> list[BlockCopy]:
        """Block copies decided since the last call, in the order to carry them out; needs `records_copies`."""
        return self._host.take_copies()

    @staticmethod
    def _one_group(blocks: Sequence[int]) -> Sequence[int]:
        return list(repeat(0, len(blocks)))

    def _resident(self, request: KvRequest, what: str) -> Holding:
        holding = self._holdings[request]
        if not holding.table:
            raise ValueError(f"KvMemory.{what}: it holds no device blocks ({request!r}). Admit or swap it in first.")
        return holding

    def _swapped(self, request: KvRequest, what: str) -> Holding:
        holding = self._holdings[request]
        if not holding.host:
            raise ValueError(f"KvMemory.{what}: it is not swapped ({request!r}). Only swapped requests are allowed.")
        return holding

    # The single group, for callers that also serve KV parallelism

    def groups_of(self, request: KvRequest) -> Sequence[int]:
        """Groups that hold the request's KV, first tokens' group first."""
        return (0,)

    def group_tables(self, request: KvRequest) -> Sequence[Sequence[int]]:
        """The request's block ids in each of `groups_of`."""
        return (self._holdings[request].table,)

    def active_groups(self, request: KvRequest, num_done_tokens: int | None = None) -> Sequence[int]:
        """Groups that take part in computing the token after the first `num_done_tokens`."""
        return (0,)

    def group_context(self, request: KvRequest, num_done_tokens: int) -> list[int]:
        """Of the first `num_done_tokens` tokens, those in each of `active_groups`."""
        return [num_done_tokens]

    def max_chunk(self, request: KvRequest, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Most tokens that a chunk may have behind `num_done_tokens`: all that remain."""
        return num_remaining_tokens

    def on_chunk_done(self, request: KvRequest, num_done_before: int, num_tokens: int) -> None:
        """A chunk was computed; nothing to keep account of with one group."""

    @property
    def pending_prefill_work(self) -> Sequence[int]:
        """Squared prompt tokens still to prefill by group; not tracked with one group."""
        return (0,)

    # Books

    def stats(self) -> KvStats:
        """Counters so far."""
        return KvStats(
            self._queried, self._hit, self._pool.num_evicted, self._host.num_stored, self._host.num_taken_back
        )

    def check(self) -> None:
        """AssertionError if the books do not agree."""
        users = Counter(self._lent)
        for request, holding in self._holdings.items():
            users.update(holding.table)
            if holding.table and holding.host:
                raise AssertionError(f"KvMemory: on device and host at once ({request!r})")
            if len(set(holding.table)) != len(holding.table):
                raise AssertionError(f"KvMemory: a block twice in one table ({request!r}: {holding.table})")
            if holding.num_published > len(holding.table):
                raise AssertionError(f"KvMemory: more blocks published than held ({request!r})")
        self._pool.check(dict(users))
        self._host.check([holding.host for holding in self._holdings.values()])
