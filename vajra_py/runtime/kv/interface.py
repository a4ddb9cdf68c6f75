"""Interface of a replica's KV memory, whichever kind it is.

A request is registered when it is bound to the replica and forgotten when it leaves. In between it holds nothing, holds
device blocks (resident), or holds host blocks (swapped). Everything is all or nothing: what does not fit changes nothing.
Refusals that a scheduler meets in normal operation are values; calls that make no sense raise `ValueError`.

Where the KV of a request may be spread over several groups (KV parallelism), block ids are local to a group, and sizes are
sums over the groups. A memory without groups is one of a single group, 0.
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
        """Prompt plus generated tokens."""

    def __hash__(self) -> int:
        """Hash by identity."""


class KvMemory(Protocol):
    """The KV blocks of one replica."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""

    @property
    def num_groups(self) -> int:
        """KV-parallel groups; 1: a request's KV lies in one place."""

    @property
    def num_blocks(self) -> int:
        """KV blocks in all."""

    @property
    def free_blocks(self) -> int:
        """Free blocks, idle cached ones included."""

    @property
    def free_host_blocks(self) -> int:
        """Free blocks of the swap space."""

    @property
    def recycles(self) -> bool:
        """True if running requests leave blocks behind that become free: decodes grow one by one then, in order of admission."""

    @property
    def due_places(self) -> Collection[int]:
        """Places within a block at which the blocks of a decode change, if the memory recycles: by its computed tokens."""

    @property
    def lagging(self) -> Collection[KvRequest]:
        """If the memory recycles: requests whose next token may leave blocks behind at other places than `due_places`."""

    @property
    def growth_headroom(self) -> int:
        """Number of requests that `grow_each` can serve now, whichever they are."""

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""

    def fits(self, num_tokens: int) -> bool:
        """Return True if a request of `num_tokens` tokens fits when it is alone."""

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
        """Device blocks of the request, shared ones included."""

    def num_freed_by(self, requests: Iterable[KvRequest]) -> int:
        """Number of blocks that would become free if these resident requests were freed."""

    def block_table(self, request: KvRequest) -> Sequence[int]:
        """Ids of the request's device blocks in order of tokens; not to be changed."""

    # Prefix cache

    @property
    def tiers(self) -> KvTiers | None:
        """Tiers below the device; None: there are none."""

    def tier_hits(self, hashes: BlockHashes, num_known_tokens: int) -> Mapping[str, int]:
        """Leading tokens of some content by the nearest memory that holds them; empty without lower tiers. Nothing changes."""

    def lookup_prefix(self, hashes: BlockHashes, num_known_tokens: int) -> int:
        """Leading tokens that the cache holds of some content, for a request that need not be registered here."""

    def cached_tokens(self, request: KvRequest) -> int:
        """Leading tokens that admission would find in the cache now; at least one token stays to compute."""

    def follow_hits(self, *, wanted: bool) -> HitChanges | None:
        """Return the source of changes of prefix hits from now on; None where the memory has none, or it is not needed."""

    def cache_blocks(self, request: KvRequest, num_tokens: int) -> None:
        """Enter the full blocks of the first `num_tokens` tokens, whose KV is in memory or will be when the step has run."""

    def uncache_blocks(self, request: KvRequest, num_tokens: int) -> bool:
        """Take back what was entered beyond the first `num_tokens` tokens, since no more will be computed after all.

        False, and nothing changed, if another request has attached such a block already.
        """

    # Allocating and freeing

    def blocks_needed(self, request: KvRequest, num_tokens: int) -> int:
        """Free blocks that would be taken if the request came to hold its first `num_tokens` tokens."""

    def blocks_needed_in_steps(self, request: KvRequest, num_tokens: int) -> int:
        """Free blocks that would be taken at most at any time if several steps computed these tokens."""

    def expect_load(self, request: KvRequest, num_tokens: int) -> None:
        """Note that so many tokens behind the cached ones are to be loaded to blocks that a waiting request is about to get, not computed."""

    def can_allocate(self, request: KvRequest, num_tokens: int, excluded_groups: Collection[int] = ()) -> bool:
        """Return True if `allocate` (or `swap_in`, or `grow` for a resident request) would succeed now."""

    def allocate(self, request: KvRequest, num_tokens: int, excluded_groups: Collection[int] = ()) -> int | None:
        """Attach the cached prefix and take blocks for `num_tokens` tokens, none of them in `excluded_groups`.

        The number of tokens found in the cache; None if there is no room.
        """

    def grow(self, request: KvRequest, num_tokens: int) -> bool:
        """Let a resident request hold `num_tokens` leading tokens; False if blocks are lacking."""

    def shrink(self, request: KvRequest, num_blocks: int) -> None:
        """Give back the last blocks of a resident request, which hold nothing valid; the first ones stay."""

    def grow_each(self, requests: Collection[KvRequest]) -> None:
        """Take one more block for each of these resident requests, in this order; `ValueError` if too few are free."""

    @property
    def can_reserve(self) -> bool:
        """True if resident requests that grow together can be given blocks together, by `reserve_blocks`."""

    def reserve_blocks(self, num_blocks: int) -> None:
        """Reserve blocks for resident requests that grow together; `materialize` decides which request gets which."""

    @property
    def has_reserved(self) -> bool:
        """True if some block table still lacks reserved blocks."""

    def materialize(self, request: KvRequest, num_tokens: int) -> None:
        """Move the reserved blocks that the request's first `num_tokens` tokens need into its table."""

    def free(self, request: KvRequest, num_computed_tokens: int | None = None, *, for_good: bool = False) -> None:
        """Give a request's device blocks back (end, abort, or preemption by recomputation).

        `num_computed_tokens`: tokens whose KV is valid; `for_good`: the request will not use it again.
        """

    # Swapping

    def swap_out(self, request: KvRequest, num_computed_tokens: int | None = None) -> int | None:
        """Move a resident request to host memory: the blocks moved, or None if the host is full."""

    def swap_in(self, request: KvRequest, num_tokens: int, excluded_groups: Collection[int] = ()) -> int | None:
        """Bring a swapped request back with room for `num_tokens` tokens: the blocks moved; None if it does not fit."""

    def drop_swapped(self, request: KvRequest) -> None:
        """Give up a swapped request's host blocks: its content is lost."""

    def take_copies(self) -> Sequence[BlockCopy]:
        """Block copies decided since the last call, in the order in which they are to be carried out."""

    # Time, pins, and notices of content

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Read the present time here from now on, seconds on the run's clock."""

    def now(self) -> float:
        """Present time, seconds on the run's clock; 0 without a clock."""

    @property
    def is_watched(self) -> bool:
        """True if a policy, or a record, notes when content comes and goes."""

    @property
    def may_expire(self) -> bool:
        """False if nothing has been pinned yet, and content cannot expire: `next_due` is infinite."""

    @property
    def repeat_headroom(self) -> int:
        """Blocks that decodes may take in steps that are applied later than they happen."""

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
        """Keep the cached content of a registered request until a time, under a name, whose earlier pin ends.

        False, and nothing changed, if pins would hold too much.
        """

    def unpin(self, name: Hashable) -> bool:
        """End a pin; False if there is none."""

    def release_pin(self) -> Hashable | None:
        """End the pin that would last longest, so that a request can run; None if no pin keeps a block from being free."""

    @property
    def policy_error(self) -> PolicyError | None:
        """Violation of the contract by the retention policy; None: there was none."""

    def report_content(self, events: ContentEvents) -> None:
        """Record the content of the prefix cache, and from now on its changes."""

    def report_evictions(self, notify: Callable[[CachedEntry, float], None] | None) -> None:
        """Call this from now on for each block that a retention policy gives up, with the time, before it is overwritten."""

    def withdraw_blocks(self, request: KvRequest, num_tokens: int) -> None:
        """Hide the KV of a resident request beyond its first `num_tokens` tokens: it is void, and the request ends."""

    # Groups

    @property
    def pending_prefill_work(self) -> Sequence[int]:
        """Squared prompt tokens still to prefill, by group."""

    def groups_of(self, request: KvRequest) -> Sequence[int]:
        """Groups that hold a resident request's KV, first tokens' group first."""

    def group_tables(self, request: KvRequest) -> Sequence[Sequence[int]]:
        """The request's block ids in each of `groups_of`; not to be changed."""

    def active_groups(self, request: KvRequest, num_done_tokens: int | None = None) -> Sequence[int]:
        """Groups that take part in computing the token after the first `num_done_tokens`."""

    def group_context(self, request: KvRequest, num_done_tokens: int) -> Sequence[int]:
        """Tokens in each of `active_groups`, of the first `num_done_tokens` tokens."""

    def max_chunk(self, request: KvRequest, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Most tokens that a chunk may have behind `num_done_tokens`: all that remain, or up to a group's boundary."""

    def on_chunk_done(self, request: KvRequest, num_done_before: int, num_tokens: int) -> None:
        """Count a computed chunk."""

    # Consistency

    def check(self) -> None:
        """Raise `AssertionError` if the accounts do not agree."""


def max_request_tokens(limits: ReplicaLimits, memory: KvMemory | None = None) -> int:
    """Return the most tokens, prompt and output together, that one request may have on a replica of these sizes.

    Called for a memory whose blocks are left behind while a request runs.
    """
    if memory is not None and memory.recycles:
        return bisect_left(range(limits.max_model_len), True, key=lambda num_tokens: not memory.fits(num_tokens))
    capacity = limits.num_blocks * limits.block_size
    if limits.kv_group_tokens is not None:
        capacity = min(capacity, limits.kv_parallel_groups * limits.kv_group_tokens)
    return min(limits.max_model_len, capacity + 1)
