"""The KV manager of vLLM behind this project's interface of KV memory, for models that have more than one block table.

Layers with sliding windows give blocks back while their request runs, layers that keep a state (Mamba, linear attention) hold the same
blocks throughout, and models with several kinds of layers have a table for each kind. Which blocks those are, and what of them the prefix cache can serve, is decided by vLLM's `KVCacheManager`; policies get the
same figures as with any memory. Every decode whose blocks change is queried by itself, in order of admission, which costs more than
this project's own memory does; that one serves models of full attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, cast

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager

from vajra_py.vllm.absent_kv import WithoutKvExtras
from vajra_py.vllm.mechanism import BlockHashes, KvRequest, Request, reads_cache
from vajra_py.vllm.support import holds_states


class _Hashes(Sequence[bytes]):
    """The hashes of a request's full blocks, as vLLM reads them; each is made when it is first read."""

    __slots__ = ("_block_size", "_hashes")

    def __init__(self, hashes: BlockHashes, block_size: int) -> None:
        self._hashes = hashes
        self._block_size = block_size

    def __len__(self) -> int:
        return self._hashes.num_hashed_tokens // self._block_size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            return self._hashes.block_hashes(start, stop) if start < stop else ()
        return self._hashes.block_hash(index)

    def __iter__(self) -> Iterator[bytes]:
        for index in range(len(self)):
            yield cast(bytes, self._hashes.block_hash(index))


class _Held:
    """A registered request, with what vLLM's manager reads of one."""

    __slots__ = (
        "block_hashes",
        "found",
        "found_at",
        "hashes",
        "num_loaded",
        "num_prompt_tokens",
        "num_tokens",
        "request",
        "request_id",
        "shared_prefix_boundary",
        "skip_reading_prefix_cache",
    )

    def __init__(self, request: Request, hashes: BlockHashes | None, block_size: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.hashes = hashes
        self.block_hashes: Sequence[bytes] = () if hashes is None else _Hashes(hashes, block_size)
        self.skip_reading_prefix_cache = hashes is None or not reads_cache(hashes)
        self.num_prompt_tokens = request.num_prompt_tokens
        self.num_tokens = request.num_known_tokens
        self.shared_prefix_boundary = 0
        self.num_loaded = 0
        """Tokens behind the cached ones that are to be loaded, while it waits."""
        self.found: tuple[Any, int, int] | None = None
        """Its content in the prefix cache, by vLLM's `get_computed_blocks`; None: not looked up."""
        self.found_at: tuple[int, int] = (-1, -1)
        """State of the memory and length of the request at that time."""


@dataclass(frozen=True, slots=True)
class ManagedSizes:
    """Sizes of a vLLM that decide what a request may take.

    Attributes:
        block_size: tokens of a block of attention.
        scheduler_block_size: tokens of which vLLM's scheduler takes blocks to be.
        hash_block_size: tokens of a hash.
        max_step_tokens: most tokens of one request in a step.
        max_in_flight_tokens: most tokens of steps that have not come back.
        lag_tokens: tokens of a decode that are in flight while its next one is planned.
        drops_last_hit: True if groups of layers that a drafter reads compute the last block anew that they find in the prefix cache.
    """

    block_size: int
    scheduler_block_size: int
    hash_block_size: int
    max_model_len: int
    max_step_tokens: int
    max_in_flight_tokens: int
    lag_tokens: int
    caches: bool
    drops_last_hit: bool


class ManagedKv(WithoutKvExtras):
    """`KvMemory` by vLLM's `KVCacheManager`. Blocks have vLLM's numbers, of which 0 stands for one that a window has left behind."""

    recycles = True

    def __init__(self, kv_cache_config: Any, sizes: ManagedSizes, num_in_flight: Callable[[str], int]) -> None:
        """`num_in_flight`: tokens of a request, by its id, in steps that have not come back, without drafts; they may still read its blocks."""
        self.block_size = sizes.block_size
        self._sizes = sizes
        self._num_in_flight = num_in_flight
        self.manager = KVCacheManager(
            kv_cache_config=kv_cache_config,
            max_model_len=sizes.max_model_len,
            scheduler_block_size=sizes.scheduler_block_size,
            hash_block_size=sizes.hash_block_size,
            max_in_flight_tokens=sizes.max_in_flight_tokens,
            enable_caching=sizes.caches,
            use_eagle=sizes.drops_last_hit,
        )
        self._coordinator: Any = self.manager.coordinator
        self._pool: Any = self.manager.block_pool
        self._none: Any = self.manager.empty_kv_cache_blocks.blocks
        managers = self._coordinator.single_type_managers
        self._has_states = [holds_states(one.kv_cache_spec) for one in managers]
        """For each table, whether it holds states, whose number does not grow with the request."""
        growing = [
            one for one, has_states in zip(managers, self._has_states, strict=True) if not has_states
        ] or managers
        self._num_growing = len(growing)
        widest = max(growing, key=lambda one: getattr(one, "sliding_window", inf))
        self._table: dict[str, list[Any]] = widest.req_to_blocks
        """Table of each resident request of which windows leave the fewest blocks behind; others of attention are as long."""
        self._num_entered: dict[str, int] = widest.num_cached_block
        """Number of blocks of that table in the prefix cache; of each other table at least as many are."""
        self._held: dict[KvRequest, _Held] = {}
        self._version = 0
        """Changes whenever a lookup in the prefix cache, or a count of blocks, could give another answer."""
        self.num_blocks: int = self._pool.num_gpu_blocks - 1
        self._windows: list[int] = [
            one.sliding_window - 1 + one.extra_retained_tokens
            for one in self._coordinator.single_type_managers
            if hasattr(one, "sliding_window")
        ]
        self._least_window = min(self._windows, default=inf)
        self.due_places: Collection[int] = self._places()
        self.lagging: dict[KvRequest, None] = {}

    def _places(self) -> frozenset[int]:
        """Places within a block at which a decode takes one, fills one or leaves one behind."""
        size, lag = self.block_size, self._sizes.lag_tokens
        leaves = {(window + behind) % size for window in self._windows for behind in range(lag + 1)}
        return frozenset({0, size - 1} | leaves)

    # Sizes

    @property
    def free_blocks(self) -> int:
        """Free blocks, idle cached ones included."""
        return int(self._pool.get_num_free_blocks())

    @property
    def growth_headroom(self) -> int:
        """Number of requests that `grow_each` can serve now, whichever they are."""
        return self.free_blocks // self._num_growing

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy at most, in all tables."""
        total = 0
        for one in self._coordinator.single_type_managers:
            count = -(-num_tokens // one.block_size)
            cap = one.max_admission_blocks_per_request
            total += count if cap is None else min(count, cap)
        return total

    def fits(self, num_tokens: int) -> bool:
        """Return True if a request of `num_tokens` tokens fits when it is alone."""
        return self.blocks_for(num_tokens) <= self.num_blocks

    # Requests

    def register(self, request: KvRequest, hashes: BlockHashes | None = None) -> None:
        """Register a request. Without hashes its content is never shared."""
        if request in self._held:
            raise ValueError(f"ManagedKv.register: already registered ({request!r}). Forget it first.")
        own = cast(Request, request)
        self._held[request] = _Held(own, hashes if self._sizes.caches else None, self.block_size)

    def is_registered(self, request: KvRequest) -> bool:
        """Return True if the request is registered here."""
        return request in self._held

    def forget(self, request: KvRequest) -> None:
        """Unregister a request; it must hold nothing."""
        if any(self.tables(request)):
            raise ValueError(f"ManagedKv.forget: it still holds blocks ({request!r}). Free them first.")
        del self._held[request]

    def clear(self) -> None:
        """Drop every request and the contents of every block."""
        for held in self._held.values():
            self.manager.free(held)
        self._held.clear()
        self.lagging.clear()
        self._version += 1
        if not self.manager.reset_prefix_cache():
            raise RuntimeError("ManagedKv.clear: blocks are held by requests that are not registered")

    def tables(self, request: KvRequest) -> tuple[Sequence[Any], ...]:
        """Return vLLM's blocks of a request, a table for each group; not to be changed."""
        found: tuple[Sequence[Any], ...] = self._coordinator.get_blocks(self._held[request].request_id)
        return found

    def num_entries(self, request: KvRequest) -> int:
        """Entries of each of the request's tables of attention, those left behind included."""
        return len(self._table.get(self._held[request].request_id, ()))

    def numbers(self, request: KvRequest, start: int = 0, end: int | None = None) -> tuple[list[int], ...]:
        """Return vLLM's numbers of the blocks from an entry on, or up to another, by table; states are part of every first entry."""
        parts = (
            table[start:end] if not has_states else table if start == 0 else ()
            for table, has_states in zip(self.tables(request), self._has_states, strict=True)
        )
        return tuple([block.block_id for block in part] for part in parts)

    def numbers_at_end(self, request: KvRequest, num_tokens: int) -> tuple[list[int], ...]:
        """Return the block numbers of a request that ends with so many computed tokens, after its windows have left behind what they can."""
        self._leave_behind(self._held[request])
        self._version += 1
        return self.numbers(request, 0, -(-num_tokens // self.block_size))

    def num_stored(self, request: KvRequest) -> int:
        """Estimate of the leading tokens of a resident request that are in the prefix cache in every table."""
        return int(self.manager.estimate_cached_tokens(self._held[request]))

    def blocks_of(self, request: KvRequest) -> KVCacheBlocks:
        """Return vLLM's blocks of a request as a connector reads them."""
        return self.manager.get_blocks(self._held[request].request_id)

    def num_held_blocks(self, request: KvRequest) -> int:
        """Device blocks of the request, shared ones included, in all tables."""
        return sum(not block.is_null for table in self.tables(request) for block in table)

    def num_freed_by(self, requests: Iterable[KvRequest]) -> int:
        """Number of blocks that would become free if these resident requests were freed."""
        tables = (table for request in requests for table in self.tables(request))
        held = Counter(block.block_id for table in tables for block in table if not block.is_null)
        return sum(count == self._pool.blocks[block].ref_cnt for block, count in held.items())

    def block_table(self, request: KvRequest) -> Sequence[int]:
        """Numbers of the request's device blocks, one table after the other."""
        return [block.block_id for table in self.tables(request) for block in table if not block.is_null]

    def group_tables(self, request: KvRequest) -> Sequence[Sequence[int]]:
        """Return the same, for the one KV-parallel group."""
        return (self.block_table(request),)

    # Prefix cache

    def _found(self, request: KvRequest) -> tuple[Any, int, int]:
        """Return what the prefix cache holds of a waiting request: blocks by table, tokens, and the shared prefix beyond."""
        held = self._held[request]
        now = self._version, request.num_known_tokens
        if held.found is None or held.found_at != now:
            held.num_tokens = request.num_known_tokens
            blocks, num_tokens, boundary = self.manager.get_computed_blocks(held)
            held.found, held.found_at = (blocks.blocks, num_tokens, boundary), now
        return held.found

    def lookup_prefix(self, hashes: BlockHashes, num_known_tokens: int) -> int:
        """Leading tokens that the cache holds of some content, for a request that need not be registered here."""
        if not self._sizes.caches or num_known_tokens < 2 or not reads_cache(hashes):
            return 0
        named = _Hashes(hashes, self.block_size)
        longest = min(num_known_tokens - 1, len(named) * self.block_size)
        return int(self._coordinator.find_longest_cache_hit(named, longest)[1])

    def cached_tokens(self, request: KvRequest) -> int:
        """Leading tokens that admission would find in the cache now; at least one token stays to compute."""
        return 0 if any(self.tables(request)) else self._found(request)[1]

    def cache_blocks(self, request: KvRequest, num_tokens: int) -> None:
        """Enter the full blocks of the first `num_tokens` tokens, whose KV is in memory or will be when the step has run."""
        held = self._held[request]
        if held.hashes is None or num_tokens // self.block_size <= self._num_entered.get(held.request_id, 0):
            return
        if (num_known := held.hashes.num_hashed_tokens) >= self.block_size:
            self._coordinator.cache_blocks(held, min(num_tokens, num_known))
            self._version += 1

    def uncache_blocks(self, request: KvRequest, num_tokens: int) -> bool:
        """Take back what was entered beyond the first `num_tokens` tokens, since no more will be computed after all.

        False, and nothing changed, if another request has attached such a block already.
        """
        first = num_tokens // self.block_size
        entered = [block for table in self.tables(request) for block in table[first:] if block.block_hash is not None]
        if any(block.ref_cnt > 1 for block in entered):
            return False
        self._withdraw(request, first, entered)
        return True

    def withdraw_blocks(self, request: KvRequest, num_tokens: int) -> None:
        """Hide the KV of a resident request beyond its first `num_tokens` tokens: it is void, and the request ends."""
        first = num_tokens // self.block_size
        entered = [block for table in self.tables(request) for block in table[first:] if block.block_hash is not None]
        self._withdraw(request, first, entered)

    def _withdraw(self, request: KvRequest, first: int, entered: Sequence[Any]) -> None:
        self.manager.evict_blocks({block.block_id for block in entered})
        name = self._held[request].request_id
        for one in self._coordinator.single_type_managers:
            if one.num_cached_block.get(name, 0) > first:
                one.num_cached_block[name] = first
        self._version += 1

    # Allocating and freeing

    def _needed(self, held: _Held, num_tokens: int, *, capped: bool = False) -> int:
        """Return vLLM's count of the free blocks that would be taken for the first `num_tokens` tokens."""
        request = held.request
        if self._table.get(held.request_id):
            blocks, local, done = self._none, request.num_computed_tokens, request.num_computed_tokens
        else:
            blocks, local, _ = self._found(request)
            done = local + held.num_loaded
        if not capped:
            num_tokens = min(num_tokens, self._sizes.max_model_len)
        return int(
            self._coordinator.get_num_blocks_to_allocate(
                request_id=held.request_id,
                num_tokens=num_tokens,
                new_computed_blocks=blocks,
                num_encoder_tokens=0,
                total_computed_tokens=done,
                num_local_computed_tokens=local,
                num_tokens_main_model=num_tokens,
                apply_admission_cap=capped,
                prefill_end=max(held.num_prompt_tokens, request.num_known_tokens - 1),
            )
        )

    def blocks_needed(self, request: KvRequest, num_tokens: int) -> int:
        """Free blocks that would be taken if the request came to hold its first `num_tokens` tokens.

        Of what no step is large enough to compute at once, windows leave a part behind before the rest is taken.
        """
        held = self._held[request]
        done = self.cached_tokens(request) + held.num_loaded or held.request.num_computed_tokens
        return self._needed(held, num_tokens, capped=num_tokens - done > self._sizes.max_step_tokens)

    def blocks_needed_in_steps(self, request: KvRequest, num_tokens: int) -> int:
        """Free blocks that would be taken at most, if several steps computed these tokens."""
        return self._needed(self._held[request], num_tokens, capped=True)

    def expect_load(self, request: KvRequest, num_tokens: int) -> None:
        """Note that so many tokens behind the cached ones are to be loaded: windows need no blocks for what they leave behind of them.

        Of a request all of whose tokens are loaded the last one is computed, and its windows begin there.
        """
        is_all = num_tokens > 0 and self.cached_tokens(request) + num_tokens == request.num_known_tokens
        self._held[request].num_loaded = num_tokens - is_all

    def can_allocate(self, request: KvRequest, num_tokens: int, excluded_groups: Collection[int] = ()) -> bool:
        """Return True if `allocate`, or `grow` for a resident request, would succeed now."""
        held = self._held[request]
        if any(self.tables(request)):
            self._leave_behind(held)
        return self._needed(held, num_tokens) <= self.free_blocks

    def allocate(self, request: KvRequest, num_tokens: int, excluded_groups: Collection[int] = ()) -> int | None:
        """Attach the cached prefix and take blocks for `num_tokens` tokens: the tokens found in the cache; None if there is no room."""
        held = self._held[request]
        if num_tokens < 1 or any(self.tables(request)):
            raise ValueError(
                f"ManagedKv.allocate: cannot give {num_tokens} tokens to {request!r}. "
                "It must hold no blocks, and get at least 1 token."
            )
        blocks, hit, held.shared_prefix_boundary = self._found(request)
        num_tokens = max(num_tokens, hit)
        if self._needed(held, num_tokens) > self.free_blocks:
            return None
        if blocks is not self._none or held.num_loaded:
            self._coordinator.allocate_new_computed_blocks(
                request_id=held.request_id,
                new_computed_blocks=blocks,
                num_local_computed_tokens=hit,
                num_external_computed_tokens=held.num_loaded,
            )
        num_tokens = min(num_tokens, self._sizes.max_model_len)
        self._coordinator.allocate_new_blocks(held.request_id, num_tokens, num_tokens)
        held.num_loaded = 0
        self._version += 1
        self.lagging[request] = None
        return hit

    def _leave_behind(self, held: _Held) -> None:
        """Free what no step reads any more: the windows of steps in flight begin at tokens that they have computed."""
        num_done = held.request.num_computed_tokens - self._num_in_flight(held.request_id)
        if num_done > self._least_window:
            self._coordinator.remove_skipped_blocks(held.request_id, num_done, held.num_prompt_tokens)

    def grow(self, request: KvRequest, num_tokens: int) -> bool:
        """Let a resident request hold `num_tokens` leading tokens; False if blocks are lacking.

        What its windows have left behind is free afterwards in either case.
        """
        held = self._held[request]
        name, done = held.request_id, held.request.num_computed_tokens
        self._leave_behind(held)
        self._version += 1
        if num_tokens > len(self._table[name]) * self.block_size:
            num_tokens = min(num_tokens, self._sizes.max_model_len)
            if self._needed(held, num_tokens) > self.free_blocks:
                return False
            self._coordinator.allocate_new_blocks(name, num_tokens, num_tokens)
        if num_tokens - done > 1 or (self._sizes.lag_tokens and self._num_in_flight(name) > 1):
            self.lagging[request] = None
        else:
            self.lagging.pop(request, None)
        return True

    def grow_each(self, requests: Collection[KvRequest]) -> None:
        """Let each of these resident requests hold one more token, in this order; `ValueError` if too few blocks are free."""
        for request in requests:
            if not self.grow(request, self._held[request].request.num_computed_tokens + 1):
                raise ValueError(f"ManagedKv.grow_each: {self.free_blocks} blocks are too few ({request!r})")

    def free(self, request: KvRequest, num_computed_tokens: int | None = None, *, for_good: bool = False) -> None:
        """Give a request's device blocks back (end, abort, or preemption by recomputation)."""
        held = self._held[request]
        held.num_loaded = 0
        self.manager.free(held)
        self.lagging.pop(request, None)
        self._version += 1

    def take_cleared(self) -> list[int]:
        """Return vLLM's numbers of the blocks that were taken since the last call and are to be cleared."""
        return cast("list[int]", self.manager.take_new_block_ids())

    # Consistency

    def check(self) -> None:
        """Raise `AssertionError` if the accounts do not agree."""
        users: Counter[int] = Counter()
        for request, held in self._held.items():
            tables = self.tables(request)
            users.update(block.block_id for table in tables for block in table if not block.is_null)
            growing = (table for table, has_states in zip(tables, self._has_states, strict=True) if not has_states)
            if len({len(table) for table in growing}) > 1:
                raise AssertionError(f"ManagedKv: tables of several lengths ({held.request_id})")
        for block in self._pool.blocks:
            if not block.is_null and block.ref_cnt != users[block.block_id]:
                raise AssertionError(f"ManagedKv: block {block.block_id} is held {block.ref_cnt} times, not {users}")
        if len(users) + self.free_blocks != self.num_blocks:
            raise AssertionError(f"ManagedKv: {len(users)} held and {self.free_blocks} free of {self.num_blocks}")
