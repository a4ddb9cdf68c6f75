"""Interface of every kind of KV memory of a replica.

A request is registered when it is bound to the replica, and forgotten when it leaves the replica. A request in the
shared queue is registered when a policy considers it for a step that is being formed; it is forgotten if it is still in
the shared queue once the step is formed. A registered request holds nothing, holds device blocks (resident), or holds
host blocks (swapped).

Every operation is all or nothing: an operation for which there is no room changes nothing, except that memory that
recycles blocks may free blocks that are no longer needed. Refusals that occur in normal operation of a scheduler are
return values; invalid calls raise `ValueError`.

With KV parallelism, the KV of a request may be spread over several groups; block ids are then local to a group, and
numbers of blocks are sums over the groups. A memory without groups has the single group 0.
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
    """The attributes of a request that KV memory reads: the request's length, and a hash by identity."""

    @property
    def num_known_tokens(self) -> int:
        """Number of prompt and generated tokens."""

    def __hash__(self) -> int:
        """Hash by identity."""


class KvMemory(Protocol):
    """The KV blocks of one replica."""

    @property
    def block_size(self) -> int:
        """Number of tokens per block."""

    @property
    def num_groups(self) -> int:
        """Number of KV-parallel groups; with 1, a request's KV is not divided."""

    @property
    def num_blocks(self) -> int:
        """Total number of KV blocks."""

    @property
    def free_blocks(self) -> int:
        """Number of free blocks, including idle cached ones."""

    @property
    def free_host_blocks(self) -> int:
        """Number of free blocks of the swap space."""

    @property
    def recycles(self) -> bool:
        """True if running requests free blocks whose tokens they no longer attend to (sliding windows); decodes then
        grow one by one, in order of admission.
        """

    @property
    def due_places(self) -> Collection[int]:
        """Positions in a block at which a decode's next token may take, fill or free a block, for memory that recycles
        blocks. A token's position is the number of tokens before it, modulo the block size.
        """

    @property
    def lagging(self) -> Collection[KvRequest]:
        """For memory that recycles blocks: requests whose next token may free a block even at positions that are not in
        `due_places`.
        """

    @property
    def growth_headroom(self) -> int:
        """Maximum number of requests for which `grow_each` would succeed now, whichever requests they are."""

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` tokens occupy."""

    def fits(self, num_tokens: int) -> bool:
        """Return True if a request of `num_tokens` tokens fits into the empty memory."""

    # Requests

    def register(self, request: KvRequest, hashes: BlockHashes | None = None) -> None:
        """Register a request. Without hashes, the request's content is never shared."""

    def is_registered(self, request: KvRequest) -> bool:
        """Return True if the request is registered here."""

    def forget(self, request: KvRequest) -> None:
        """Unregister a request, which must hold no blocks."""

    def clear(self) -> None:
        """Drop every request and the content of every block, because the devices have lost their memory."""

    def num_held_blocks(self, request: KvRequest) -> int:
        """Return the number of device blocks of the request, shared ones included."""

    def num_freed_by(self, requests: Iterable[KvRequest]) -> int:
        """Return the number of blocks that would become free if these resident requests were freed."""

    def block_table(self, request: KvRequest) -> Sequence[int]:
        """Return the ids of the request's device blocks in the order of its tokens; if the request has several tables,
        they follow one another. Callers must not change the sequence.
        """

    # Prefix cache

    @property
    def tiers(self) -> KvTiers | None:
        """Memory tiers below the device; None if there are none."""

    def tier_hits(self, hashes: BlockHashes, num_known_tokens: int) -> Mapping[str, int]:
        """Return the number of leading cached tokens in each memory (the device and each tier), by the memory's name;
        each token counts for the nearest memory that holds it. Empty without lower tiers. Does not count as a use of
        the content.
        """

    def lookup_prefix(self, hashes: BlockHashes, num_known_tokens: int) -> int:
        """Return the number of leading tokens with these hashes that the prefix cache holds, always less than
        `num_known_tokens`. The request need not be registered.
        """

    def cached_tokens(self, request: KvRequest) -> int:
        """Return the number of leading tokens that admission would find cached now, always less than the number of
        known tokens.
        """

    def follow_hits(self, *, wanted: bool) -> HitChanges | None:
        """If `wanted`, start to track changes of prefix hits and return the source that reports the changes; otherwise
        stop. Returns None if changes are not tracked.
        """

    def cache_blocks(self, request: KvRequest, num_tokens: int) -> None:
        """Cache the full blocks of the first `num_tokens` tokens, whose KV is in memory or will be in memory when the
        step has run.
        """

    def cache_each(self, requests: Sequence[KvRequest], num_tokens: Sequence[int]) -> None:
        """Call `cache_blocks` for each of these requests with its number of tokens, in this order."""

    def uncache_blocks(self, request: KvRequest, num_tokens: int) -> bool:
        """Remove the cache entries of a request's blocks that reach beyond its first `num_tokens` tokens, because the
        step will not compute the later tokens.

        Returns False and changes nothing if another request already shares one of these blocks.
        """

    # Allocating and freeing

    def blocks_needed(self, request: KvRequest, num_tokens: int) -> int:
        """Return the number of free blocks needed for the request to hold its first `num_tokens` tokens."""

    def blocks_needed_in_steps(self, request: KvRequest, num_tokens: int) -> int:
        """Return the largest number of free blocks that the request needs at any one time if several steps compute its
        first `num_tokens` tokens.
        """

    def expect_load(self, request: KvRequest, num_tokens: int) -> None:
        """Announce that `num_tokens` tokens after the cached ones will be loaded, not computed; called before the
        waiting request's blocks are allocated.
        """

    def can_allocate(self, request: KvRequest, num_tokens: int, excluded_groups: Collection[int] = ()) -> bool:
        """Return True if `allocate` (or `swap_in`, or `grow` for a resident request) would succeed now."""

    def allocate(self, request: KvRequest, num_tokens: int, excluded_groups: Collection[int] = ()) -> int | None:
        """Attach the cached prefix, and take blocks outside `excluded_groups` for the rest of the first `num_tokens`
        tokens.

        Returns the number of tokens found in the cache; None if there is no room.
        """

    def grow(self, request: KvRequest, num_tokens: int) -> bool:
        """Allocate blocks until a resident request can hold `num_tokens` tokens; return False if blocks are lacking."""

    def shrink(self, request: KvRequest, num_blocks: int) -> None:
        """Free the blocks of a resident request after its first `num_blocks`, because they hold nothing valid."""

    def grow_each(self, requests: Collection[KvRequest]) -> None:
        """Take one more block for each of these resident requests, in this order; `ValueError` if too few are free."""

    @property
    def can_reserve(self) -> bool:
        """True if this memory supports `reserve_blocks`."""

    def reserve_blocks(self, num_blocks: int) -> None:
        """Reserve blocks for resident requests that grow together; `materialize` decides which request gets which."""

    @property
    def has_reserved(self) -> bool:
        """True if some reserved blocks are not in a block table yet."""

    def materialize(self, request: KvRequest, num_tokens: int) -> None:
        """Move the reserved blocks that the request's first `num_tokens` tokens need into its table."""

    def free(self, request: KvRequest, num_computed_tokens: int | None = None, *, for_good: bool = False) -> None:
        """Free a request's device blocks (end, abort, or preemption by recomputation).

        `num_computed_tokens`: number of leading tokens whose KV is valid (None: as noted by `cache_blocks`);
        `for_good`: the request will not use its content again.
        """

    # Swapping

    def swap_out(self, request: KvRequest, num_computed_tokens: int | None = None) -> int | None:
        """Move a resident request to host memory; return the number of blocks moved, or None if the host is full."""

    def swap_in(self, request: KvRequest, num_tokens: int, excluded_groups: Collection[int] = ()) -> int | None:
        """Move a swapped request back to the device with room for `num_tokens` tokens; return the number of blocks
        moved, or None if too few blocks are free.
        """

    def drop_swapped(self, request: KvRequest) -> None:
        """Free a swapped request's host blocks; its content is lost."""

    def take_copies(self) -> Sequence[BlockCopy]:
        """Return the block copies decided since the last call, in order of execution."""

    # Time, pins, and events about content

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Use `clock`, which returns seconds on the run's clock, as the source of the present time from now on."""

    def now(self) -> float:
        """Return the present time in seconds on the run's clock; 0 without a clock."""

    @property
    def is_watched(self) -> bool:
        """True if a retention policy, a listening policy, a log or a lower tier must be notified when content is cached
        or evicted.
        """

    @property
    def may_expire(self) -> bool:
        """True if a pin may end or content may expire later; as long as this is False, `next_due` is infinite."""

    @property
    def repeat_headroom(self) -> int:
        """Maximum number of blocks that fast-forwarded steps may take together: the number of free blocks. The blocks
        are taken only after these steps have ended, which is too late for reports of evictions. If evictions must be
        reported, free blocks with cached content therefore do not count.
        """

    @property
    def next_due(self) -> float:
        """Earliest time at which a pin may end or content may expire, in seconds on the run's clock; infinite if there
        is none.
        """

    @property
    def expires_content(self) -> bool:
        """True if a retention policy gives content a lifetime."""

    def expire(self) -> None:
        """Drop idle content that has expired."""

    def settle_due(self) -> Sequence[Hashable]:
        """End the pins that are due and drop idle content that has expired; return the names of the ended pins."""

    def pin(self, name: Hashable, request: KvRequest, until: float) -> bool:
        """Pin the cached content of a registered request until `until`, seconds on the run's clock; an earlier pin with
        this name ends.

        Returns False and changes nothing if pins would then hold more blocks than allowed.
        """

    def unpin(self, name: Hashable) -> bool:
        """End a pin; return False if there is none."""

    def release_pin(self) -> Hashable | None:
        """End the pin that would last longest, so that a request can run, and return the pin's name. Returns None and
        changes nothing if no idle block is kept for pins, so that ending pins would free no block.
        """

    @property
    def policy_error(self) -> PolicyError | None:
        """Violation of the contract by the retention policy of the device or of a tier; None if there was none."""

    def report_content(self, events: ContentEvents) -> None:
        """Report the present content of the prefix cache to `events`, and every change from now on."""

    def report_evictions(self, notify: Callable[[CachedEntry, float], None] | None) -> None:
        """From now on, for each block that a retention policy evicts, call `notify` with the cached entry and the
        present time before the block is overwritten. Content that no request can hit is not reported. `notify` None:
        stop.
        """

    def withdraw_blocks(self, request: KvRequest, num_tokens: int) -> None:
        """Remove the cache entries of a resident request's blocks that reach beyond its first `num_tokens` tokens.
        Called when these blocks hold invalid KV and the request ends.
        """

    # Groups

    @property
    def pending_prefill_work(self) -> Sequence[int]:
        """Pending prefill work of each group, in squared prompt tokens."""

    def groups_of(self, request: KvRequest) -> Sequence[int]:
        """Return the groups that hold a resident request's KV, in the order of its tokens."""

    def group_tables(self, request: KvRequest) -> Sequence[Sequence[int]]:
        """Return the request's block ids in each group of `groups_of`; the lists must not be changed."""

    def active_groups(self, request: KvRequest, num_done_tokens: int | None = None) -> Sequence[int]:
        """Return the groups that take part in computing the token after the first `num_done_tokens` (None: all tokens
        computed so far).
        """

    def group_context(self, request: KvRequest, num_done_tokens: int) -> Sequence[int]:
        """Return how many of the first `num_done_tokens` tokens each group of `active_groups` holds."""

    def max_chunk(self, request: KvRequest, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Return the maximum number of tokens in the chunk that follows the first `num_done_tokens` tokens: all
        remaining tokens, or only the tokens that still belong to the group in which the chunk begins.
        """

    def on_chunk_done(self, request: KvRequest, num_done_before: int, num_tokens: int) -> None:
        """Update the pending prefill work after a chunk of `num_tokens` tokens was computed."""

    # Consistency

    def check(self) -> None:
        """Raise `AssertionError` if the state is inconsistent."""


def max_request_tokens(limits: ReplicaLimits, memory: KvMemory | None = None) -> int:
    """Return the maximum total of prompt and output tokens that one request may have on a replica of these sizes.

    The last token needs no KV, so the limit is one more than the number of tokens that fit, or the model's length if
    that is smaller. `memory` matters only if it frees blocks while a request runs.
    """
    if memory is not None and memory.recycles:
        return bisect_left(range(limits.max_model_len), True, key=lambda num_tokens: not memory.fits(num_tokens))
    capacity = limits.num_blocks * limits.block_size
    if limits.kv_group_tokens is not None:
        capacity = min(capacity, limits.kv_parallel_groups * limits.kv_group_tokens)
    return min(limits.max_model_len, capacity + 1)
