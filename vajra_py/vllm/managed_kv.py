"""Adapt vLLM's KV manager to this project's KV memory interface, for models that are not served by one block table of
full attention.

Layers with sliding windows free blocks while their request runs, layers that keep a state (Mamba, linear attention)
hold a fixed number of blocks, and models with several kinds of layers have a block table for each kind. vLLM's
`KVCacheManager` decides about these blocks and their prefix hits; policies see the same figures as with any memory. The
manager is called for every decode whose blocks change, in order of admission. This costs more than this project's own
memory, which therefore serves models with a single table of full attention.
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
    """Hashes of a request's full blocks for vLLM's manager; each is computed on first access."""

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
    """A registered request, with the attributes that vLLM's manager reads."""

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
        """While the request waits: number of tokens, after the cached ones, that a connector will load."""
        self.found: tuple[Any, int, int] | None = None
        """Result of vLLM's `get_computed_blocks` (the request's prefix hit); None if there was no lookup."""
        self.found_at: tuple[int, int] = (-1, -1)
        """Version of the memory and length of the request when `found` was looked up."""


@dataclass(frozen=True, slots=True)
class ManagedSizes:
    """Sizes of a vLLM that limit allocations.

    Attributes:
        block_size: number of tokens in a block of attention.
        scheduler_block_size: common multiple of the block sizes of all groups.
        hash_block_size: number of tokens that one hash covers.
        max_step_tokens: maximum number of tokens of one request in a step.
        max_in_flight_tokens: maximum number of tokens in steps in flight.
        lag_tokens: number of tokens that a decode has in flight while its next token is planned.
        drops_last_hit: True if the last block of a prefix hit is recomputed in groups of layers that a drafter reads.
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
    """`KvMemory` backed by vLLM's `KVCacheManager`.

    Blocks have vLLM's numbers; 0 stands for a block that was freed because it lies before the sliding window.
    """

    recycles = True

    def __init__(self, kv_cache_config: Any, sizes: ManagedSizes, num_in_flight: Callable[[str], int]) -> None:
        """Create the memory.

        Args:
            kv_cache_config: vLLM's configuration of the KV cache.
            sizes: limits on allocations.
            num_in_flight: returns the number of tokens, without drafts, that steps in flight compute for the request
                with a given id; these steps may still read its blocks.
        """
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
        """For each table, True if it holds states, whose number does not grow with the request."""
        growing = [
            one for one, has_states in zip(managers, self._has_states, strict=True) if not has_states
        ] or managers
        self._num_growing = len(growing)
        widest = max(growing, key=lambda one: getattr(one, "sliding_window", inf))
        self._table: dict[str, list[Any]] = widest.req_to_blocks
        """By request id, its block table in the group with the widest window; its attention tables are equally long."""
        self._num_entered: dict[str, int] = widest.num_cached_block
        """By request id, number of blocks of `_table[id]` in the prefix cache; its other tables have no fewer."""
        self._held: dict[KvRequest, _Held] = {}
        self._version = 0
        """Incremented whenever results of prefix lookups or block counts may change."""
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
        """Return the token offsets within a block at which a decode allocates, completes or frees a block."""
        size, lag = self.block_size, self._sizes.lag_tokens
        leaves = {(window + behind) % size for window in self._windows for behind in range(lag + 1)}
        return frozenset({0, size - 1} | leaves)

    # Sizes

    @property
    def free_blocks(self) -> int:
        """Number of free blocks, including idle cached ones."""
        return int(self._pool.get_num_free_blocks())

    @property
    def growth_headroom(self) -> int:
        """Largest n such that `grow_each` would succeed now for any n resident requests."""
        return self.free_blocks // self._num_growing

    def blocks_for(self, num_tokens: int) -> int:
        """Return the largest number of blocks, in all tables together, that `num_tokens` tokens can occupy."""
        total = 0
        for one in self._coordinator.single_type_managers:
            count = -(-num_tokens // one.block_size)
            cap = one.max_admission_blocks_per_request
            total += count if cap is None else min(count, cap)
        return total

    def fits(self, num_tokens: int) -> bool:
        """Return whether a request of `num_tokens` tokens fits into an otherwise empty memory."""
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
        """Unregister a request, which must hold no blocks."""
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
        """Return the block table of each group for a request; callers must not change it."""
        found: tuple[Sequence[Any], ...] = self._coordinator.get_blocks(self._held[request].request_id)
        return found

    def num_entries(self, request: KvRequest) -> int:
        """Return the length of each of the request's attention tables, including the entries of freed blocks."""
        return len(self._table.get(self._held[request].request_id, ()))

    def numbers(self, request: KvRequest, start: int = 0, end: int | None = None) -> tuple[list[int], ...]:
        """Return vLLM's numbers of the blocks at the entries [start, end) of each table.

        A table of states is returned whole if `start` is 0, and empty otherwise.
        """
        parts = (
            table[start:end] if not has_states else table if start == 0 else ()
            for table, has_states in zip(self.tables(request), self._has_states, strict=True)
        )
        return tuple([block.block_id for block in part] for part in parts)

    def numbers_at_end(self, request: KvRequest, num_tokens: int) -> tuple[list[int], ...]:
        """Free the blocks of an ending request that lie before its sliding windows. Return vLLM's numbers of the blocks
        of its first `num_tokens` tokens, with 0 for each freed block.
        """
        self._leave_behind(self._held[request])
        self._version += 1
        return self.numbers(request, 0, -(-num_tokens // self.block_size))

    def num_stored(self, request: KvRequest) -> int:
        """Estimate the number of leading tokens of a resident request that are in the prefix cache in every table."""
        return int(self.manager.estimate_cached_tokens(self._held[request]))

    def blocks_of(self, request: KvRequest) -> KVCacheBlocks:
        """Return the blocks of a request in vLLM's form for connectors."""
        return self.manager.get_blocks(self._held[request].request_id)

    def num_held_blocks(self, request: KvRequest) -> int:
        """Return the number of blocks that the request holds in all tables, shared ones included."""
        return sum(not block.is_null for table in self.tables(request) for block in table)

    def num_freed_by(self, requests: Iterable[KvRequest]) -> int:
        """Return the number of blocks that would become free if these resident requests were freed."""
        tables = (table for request in requests for table in self.tables(request))
        held = Counter(block.block_id for table in tables for block in table if not block.is_null)
        return sum(count == self._pool.blocks[block].ref_cnt for block, count in held.items())

    def block_table(self, request: KvRequest) -> Sequence[int]:
        """Return the numbers of the request's blocks, one table after the other."""
        return [block.block_id for table in self.tables(request) for block in table if not block.is_null]

    def group_tables(self, request: KvRequest) -> Sequence[Sequence[int]]:
        """Return `block_table` for the one KV-parallel group."""
        return (self.block_table(request),)

    # Prefix cache

    def _found(self, request: KvRequest) -> tuple[Any, int, int]:
        """Look up a waiting request's prefix hit: blocks by table, number of tokens, boundary of a shared prefix."""
        held = self._held[request]
        now = self._version, request.num_known_tokens
        if held.found is None or held.found_at != now:
            held.num_tokens = request.num_known_tokens
            blocks, num_tokens, boundary = self.manager.get_computed_blocks(held)
            held.found, held.found_at = (blocks.blocks, num_tokens, boundary), now
        return held.found

    def lookup_prefix(self, hashes: BlockHashes, num_known_tokens: int) -> int:
        """Return the number of leading tokens that hit the prefix cache; works for unregistered requests."""
        if not self._sizes.caches or num_known_tokens < 2 or not reads_cache(hashes):
            return 0
        named = _Hashes(hashes, self.block_size)
        longest = min(num_known_tokens - 1, len(named) * self.block_size)
        return int(self._coordinator.find_longest_cache_hit(named, longest)[1])

    def cached_tokens(self, request: KvRequest) -> int:
        """Return the number of tokens that would hit the cache on admission now; the last token never counts."""
        return 0 if any(self.tables(request)) else self._found(request)[1]

    def cache_blocks(self, request: KvRequest, num_tokens: int) -> None:
        """Enter the full blocks of the first `num_tokens` tokens into the prefix cache.

        Their KV is in memory, or will be after the step.
        """
        held = self._held[request]
        if held.hashes is None or num_tokens // self.block_size <= self._num_entered.get(held.request_id, 0):
            return
        if (num_known := held.hashes.num_hashed_tokens) >= self.block_size:
            self._coordinator.cache_blocks(held, min(num_tokens, num_known))
            self._version += 1

    def cache_each(self, requests: Sequence[KvRequest], num_tokens: Sequence[int]) -> None:
        """Call `cache_blocks` for each of these requests with its number of tokens, in this order."""
        for request, count in zip(requests, num_tokens, strict=True):
            self.cache_blocks(request, count)

    def uncache_blocks(self, request: KvRequest, num_tokens: int) -> bool:
        """Remove blocks beyond the first `num_tokens` tokens from the prefix cache, since these blocks will not be
        computed.

        Returns False and changes nothing if another request already shares such a block.
        """
        first = num_tokens // self.block_size
        entered = [block for table in self.tables(request) for block in table[first:] if block.block_hash is not None]
        if any(block.ref_cnt > 1 for block in entered):
            return False
        self._withdraw(request, first, entered)
        return True

    def withdraw_blocks(self, request: KvRequest, num_tokens: int) -> None:
        """Remove the void blocks of an ending request, beyond its first `num_tokens` tokens, from the prefix cache."""
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
        """Return vLLM's count of the free blocks needed to hold the first `num_tokens` tokens.

        `capped` is true if the tokens take several steps. Windows then limit the number of blocks held at a time.
        """
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
        """Return the number of free blocks needed for the request to hold its first `num_tokens` tokens.

        If the tokens take several steps, blocks that windows free after a step are reused in later steps, and count
        once.
        """
        held = self._held[request]
        done = self.cached_tokens(request) + held.num_loaded or held.request.num_computed_tokens
        return self._needed(held, num_tokens, capped=num_tokens - done > self._sizes.max_step_tokens)

    def blocks_needed_in_steps(self, request: KvRequest, num_tokens: int) -> int:
        """Return the largest number of free blocks needed at any time if the tokens are computed in several steps."""
        return self._needed(self._held[request], num_tokens, capped=True)

    def expect_load(self, request: KvRequest, num_tokens: int) -> None:
        """Announce that a connector will load this many tokens after the cached ones.

        Loaded tokens that lie before the sliding windows need no blocks. If all tokens are loaded, the last token is
        recomputed, and the windows end at this token.
        """
        is_all = num_tokens > 0 and self.cached_tokens(request) + num_tokens == request.num_known_tokens
        self._held[request].num_loaded = num_tokens - is_all

    def can_allocate(self, request: KvRequest, num_tokens: int, excluded_groups: Collection[int] = ()) -> bool:
        """Return whether `allocate`, or `grow` for a resident request, would succeed now.

        Like `grow`, this first frees those blocks of a resident request that lie before its sliding windows.
        """
        held = self._held[request]
        if any(self.tables(request)):
            self._leave_behind(held)
        return self._needed(held, num_tokens) <= self.free_blocks

    def allocate(self, request: KvRequest, num_tokens: int, excluded_groups: Collection[int] = ()) -> int | None:
        """Attach the cached prefix, and allocate blocks for the rest of the first `num_tokens` tokens.

        Returns the number of cached tokens; None if blocks are lacking.
        """
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
        """Free a request's blocks that lie before its sliding windows, unless a step in flight may still read them."""
        num_done = held.request.num_computed_tokens - self._num_in_flight(held.request_id)
        if num_done > self._least_window:
            self._coordinator.remove_skipped_blocks(held.request_id, num_done, held.num_prompt_tokens)

    def grow(self, request: KvRequest, num_tokens: int) -> bool:
        """Allocate blocks for the first `num_tokens` tokens of a resident request; return False if they are lacking.

        In either case, the request's blocks that lie before its sliding windows are freed.
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
        """Allocate blocks for one more token of each resident request, in order.

        Raises `ValueError` if they are lacking.
        """
        for request in requests:
            if not self.grow(request, self._held[request].request.num_computed_tokens + 1):
                raise ValueError(f"ManagedKv.grow_each: {self.free_blocks} blocks are too few ({request!r})")

    def free(self, request: KvRequest, num_computed_tokens: int | None = None, *, for_good: bool = False) -> None:
        """Free a request's blocks at its end, abort, or preemption by recomputation; other arguments are ignored."""
        held = self._held[request]
        held.num_loaded = 0
        self.manager.free(held)
        self.lagging.pop(request, None)
        self._version += 1

    def take_cleared(self) -> list[int]:
        """Return the numbers of the blocks that the workers must zero, among those allocated since the last call."""
        return cast("list[int]", self.manager.take_new_block_ids())

    # Consistency

    def check(self) -> None:
        """Raise `AssertionError` if the block counts are inconsistent."""
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
