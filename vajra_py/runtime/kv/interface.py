"""Interface of every kind of KV memory of a replica.

A request is registered when it is bound to the replica and forgotten when it leaves. In between it holds nothing, holds
device blocks (resident), or holds host blocks (swapped). Every operation is all or nothing: one that does not fit
changes nothing. Refusals that a scheduler meets in normal operation are values; calls that make no sense raise
`ValueError`.

With KV parallelism, the KV of a request may be spread over several groups; block ids are then local to a group, and
sizes are sums over the groups. A memory without groups has the single group 0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Protocol

from vajra_py.contract import ReplicaLimits
from vajra_py.errors import PolicyError
from vajra_py.runtime.kv.block_hashes import BlockHashes
from vajra_py.runtime.kv.content_events import ContentEvents
from vajra_py.runtime.kv.host import BlockCopy
from vajra_py.runtime.kv.retention_order import CachedEntry
from vajra_py.runtime.kv.tiers import KvTiers
from vajra_py.runtime.queues import HitChanges


class KvRequest(Protocol):
    """A request as KV memory sees it: its length, and a hash by identity."""

    @property
    def num_known_tokens(self) -> int:
        """Number of prompt and generated tokens."""

    def __hash__(self) -> int:
        """Hash by identity."""


class KvMemory(Protocol):
    """The KV blocks of one replica."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""

    @property
    def num_groups(self) -> int:
        """Number of KV-parallel groups; with 1, a request's KV is not divided."""

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks in all."""

    @property
    def free_blocks(self) -> int:
        """Free blocks, idle cached ones included."""

    @property
    def free_host_blocks(self) -> int:
        """Free blocks of the swap space."""

    @property
    def recycles(self) -> bool:
        """True if running requests free blocks that they leave behind (sliding windows); decodes then grow one by one,
        in order of admission.
        """

    @property
    def due_places(self) -> Collection[int]:
        """Values of (computed tokens modulo block size), for memory that recycles blocks, at which a decode takes,
        fills or leaves a block.
        """

    @property
    def lagging(self) -> Collection[KvRequest]:
        """Requests, in memory that recycles blocks, whose next token may free blocks at other positions than
        `due_places`.
        """

    @property
    def growth_headroom(self) -> int:
        """Number of requests that `grow_each` can serve now, whichever they are."""

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` tokens occupy."""

    def fits(self, num_tokens: int) -> bool:
        """Return True if a request of `num_tokens` tokens fits into the empty memory."""

    # Requests

    def register(self, request: KvRequest, hashes: BlockHashes | None = None) -> None:
        """Register a request that was bound to the replica. Without hashes its content is never shared."""

    def is_registered(self, request: KvRequest) -> bool:
        """Return True if the request is registered here."""

    def forget(self, request: KvRequest) -> None:
        """Unregister a request; it must hold nothing."""

    def clear(self) -> None:
        """Drop every request and the contents of every block: the devices have lost everything."""

    def num_held_blocks(self, request: KvRequest) -> int:
        """Return the number of device blocks of the request, shared ones included."""

    def num_freed_by(self, requests: Iterable[KvRequest]) -> int:
        """Return the number of blocks that would become free if these resident requests were freed."""

    def block_table(self, request: KvRequest) -> Sequence[int]:
        """Return the ids of the request's device blocks in order of tokens; not to be changed."""

    # Prefix cache

    @property
    def tiers(self) -> KvTiers | None:
        """Tiers below the device; None: there are none."""

    def tier_hits(self, hashes: BlockHashes, num_known_tokens: int) -> Mapping[str, int]:
        """Return the number of leading tokens of some content by the nearest memory that holds them, without changing
        anything; empty without lower tiers.
        """

    def lookup_prefix(self, hashes: BlockHashes, num_known_tokens: int) -> int:
        """Leading tokens that the cache holds of some content, for a request that need not be registered here."""

    def cached_tokens(self, request: KvRequest) -> int:
        """Return the number of leading tokens that admission would find in the cache now; at least one token is left to compute."""

    def follow_hits(self, *, wanted: bool) -> HitChanges | None:
        """Return the source of changes of prefix hits from now on; None if the memory has none, or needs none."""

    def cache_blocks(self, request: KvRequest, num_tokens: int) -> None:
        """Enter the full blocks of the first `num_tokens` tokens, whose KV is in memory or will be when the step has run."""

    def cache_each(self, requests: Sequence[KvRequest], num_tokens: Sequence[int]) -> None:
        """Call `cache_blocks` for each of these requests with its number of tokens, in this order."""

    def uncache_blocks(self, request: KvRequest, num_tokens: int) -> bool:
        """Remove the cache entries beyond the first `num_tokens` tokens, which will not be computed after all.

        Returns False and changes nothing if another request has attached such a block already.
        """

    # Allocating and freeing

    def blocks_needed(self, request: KvRequest, num_tokens: int) -> int:
        """Return the number of free blocks needed for the request to hold its first `num_tokens` tokens."""

    def blocks_needed_in_steps(self, request: KvRequest, num_tokens: int) -> int:
        """Return the largest number of free blocks taken at any one time if several steps compute these tokens."""

    def expect_load(self, request: KvRequest, num_tokens: int) -> None:
        """Note that this many tokens after the cached ones will be loaded, not computed, into blocks that a waiting
        request is about to get.
        """

    def can_allocate(self, request: KvRequest, num_tokens: int, excluded_groups: Collection[int] = ()) -> bool:
        """Return True if `allocate` (or `swap_in`, or `grow` for a resident request) would succeed now."""

    def allocate(self, request: KvRequest, num_tokens: int, excluded_groups: Collection[int] = ()) -> int | None:
        """Attach the cached prefix and take blocks for `num_tokens` tokens, none of them in `excluded_groups`.

        Returns the number of tokens found in the cache; None if there is no room.
        """

    def grow(self, request: KvRequest, num_tokens: int) -> bool:
        """Allocate blocks until a resident request can hold `num_tokens` tokens; return False if blocks are lacking."""

    def shrink(self, request: KvRequest, num_blocks: int) -> None:
        """Free the last blocks of a resident request, which hold nothing valid, and keep the first ones."""

    def grow_each(self, requests: Collection[KvRequest]) -> None:
        """Take one more block for each of these resident requests, in this order; `ValueError` if too few are free."""

    @property
    def can_reserve(self) -> bool:
        """True if blocks for resident requests that grow together can be reserved together, by `reserve_blocks`."""

    def reserve_blocks(self, num_blocks: int) -> None:
        """Reserve blocks for resident requests that grow together; `materialize` decides which request gets which."""

    @property
    def has_reserved(self) -> bool:
        """True if some block table still lacks reserved blocks."""

    def materialize(self, request: KvRequest, num_tokens: int) -> None:
        """Move the reserved blocks that the request's first `num_tokens` tokens need into its table."""

    def free(self, request: KvRequest, num_computed_tokens: int | None = None, *, for_good: bool = False) -> None:
        """Free a request's device blocks (end, abort, or preemption by recomputation).

        `num_computed_tokens`: tokens whose KV is valid; `for_good`: the request will not use it again.
        """

    # Swapping

    def swap_out(self, request: KvRequest, num_computed_tokens: int | None = None) -> int | None:
        """Move a resident request to host memory; return the blocks moved, None if the host is full."""

    def swap_in(self, request: KvRequest, num_tokens: int, excluded_groups: Collection[int] = ()) -> int | None:
        """Move a swapped request back to the device with room for `num_tokens` tokens; return the blocks moved, None if
        it does not fit.
        """

    def drop_swapped(self, request: KvRequest) -> None:
        """Free a swapped request's host blocks; its content is lost."""

    def take_copies(self) -> Sequence[BlockCopy]:
        """Return the block copies decided since the last call, in order of execution."""

    # Time, pins, and events about content

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Read the present time here from now on, seconds on the run's clock."""

    def now(self) -> float:
        """Present time, seconds on the run's clock; 0 without a clock."""

    @property
    def is_watched(self) -> bool:
        """True if a policy or a log follows when content is cached and evicted."""

    @property
    def may_expire(self) -> bool:
        """True unless nothing has been pinned yet and content cannot expire, so that `next_due` is infinite."""

    @property
    def repeat_headroom(self) -> int:
        """Number of blocks that decodes may take in fast-forwarded steps, which are applied after the fact."""

    @property
    def next_due(self) -> float:
        """Time at which a pin ends or content expires next, seconds on the run's clock; infinite if nothing does."""

    @property
    def expires_content(self) -> bool:
        """True if content may expire."""

    def expire(self) -> None:
        """Drop idle content whose time has come."""

    def settle_due(self) -> Sequence[Hashable]:
        """End the pins and drop the content whose time has come; returns the names of the pins."""

    def pin(self, name: Hashable, request: KvRequest, until: float) -> bool:
        """Pin the cached content of a registered request until a time, under a name; an earlier pin of that name ends.

        Returns False and changes nothing if pins would hold too much.
        """

    def unpin(self, name: Hashable) -> bool:
        """End a pin; return False if there is none."""

    def release_pin(self) -> Hashable | None:
        """End the pin that would last longest, so that a request can run, and return its name; None if no pin holds a
        block that would be free otherwise.
        """

    @property
    def policy_error(self) -> PolicyError | None:
        """Violation of the contract by the retention policy; None: there was none."""

    def report_content(self, events: ContentEvents) -> None:
        """Record the content of the prefix cache, and from now on its changes."""

    def report_evictions(self, notify: Callable[[CachedEntry, float], None] | None) -> None:
        """Call `notify` from now on, with the time, for each block that a retention policy evicts, before it is
        overwritten.
        """

    def withdraw_blocks(self, request: KvRequest, num_tokens: int) -> None:
        """Remove a resident request's blocks beyond its first `num_tokens` tokens from the cache: their KV is void, and
        the request ends.
        """

    # Groups

    @property
    def pending_prefill_work(self) -> Sequence[int]:
        """Squared prompt tokens still to prefill, by group."""

    def groups_of(self, request: KvRequest) -> Sequence[int]:
        """Groups that hold a resident request's KV, first tokens' group first."""

    def group_tables(self, request: KvRequest) -> Sequence[Sequence[int]]:
        """Return the request's block ids in each of `groups_of`; not to be changed."""

    def active_groups(self, request: KvRequest, num_done_tokens: int | None = None) -> Sequence[int]:
        """Groups that take part in computing the token after the first `num_done_tokens`."""

    def group_context(self, request: KvRequest, num_done_tokens: int) -> Sequence[int]:
        """Return the number of tokens in each of `active_groups`, of the first `num_done_tokens` tokens."""

    def max_chunk(self, request: KvRequest, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Return the largest chunk after `num_done_tokens` tokens: all remaining tokens, or up to a group's boundary."""

    def on_chunk_done(self, request: KvRequest, num_done_before: int, num_tokens: int) -> None:
        """Count a computed chunk."""

    # Consistency

    def check(self) -> None:
        """Raise `AssertionError` if the accounts do not agree."""


def max_request_tokens(limits: ReplicaLimits, memory: KvMemory | None = None) -> int:
    """Return the largest number of tokens, prompt and output together, that one request may have on a replica of these sizes.

    Called for memories that free blocks while a request runs.
    """
    if memory is not None and memory.recycles:
        return bisect_left(range(limits.max_model_len), True, key=lambda num_tokens: not memory.fits(num_tokens))
    capacity = limits.num_blocks * limits.block_size
    if limits.kv_group_tokens is not None:
        capacity = min(capacity, limits.kv_parallel_groups * limits.kv_group_tokens)
    return min(limits.max_model_len, capacity + 1)
