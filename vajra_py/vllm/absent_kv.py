"""Methods of the KV memory interface for features that vLLM's KV manager does not support."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from math import inf
from typing import Any

from vajra_py.errors import ConfigError, Problem
from vajra_py.vllm.mechanism import BlockHashes, ContentEvents, KvRequest


class WithoutKvExtras:
    """Base of a KV memory without KV-parallel groups, swap, tiers, pins, retention policies or reserved blocks."""

    num_groups = 1
    free_host_blocks = 0
    can_reserve = has_reserved = is_watched = may_expire = expires_content = False
    repeat_headroom = 0
    next_due = inf
    tiers = policy_error = None
    pending_prefill_work: Sequence[int] = (0,)

    def reserve_blocks(self, num_blocks: int) -> None:
        """Raise `ValueError`: each request allocates its own blocks."""
        raise ValueError(f"ManagedKv.reserve_blocks: {num_blocks} blocks. `can_reserve` says that none are reserved.")

    def materialize(self, request: KvRequest, num_tokens: int) -> None:
        """Do nothing: no blocks are reserved."""

    def shrink(self, request: KvRequest, num_blocks: int) -> None:
        """Raise `ValueError`: a request keeps blocks that hold only rejected drafts."""
        raise ValueError("ManagedKv.shrink: blocks behind rejected drafts are kept here.")

    def swap_out(self, request: KvRequest, num_computed_tokens: int | None = None) -> int | None:
        """Return None: there is no host memory."""
        return None

    def swap_in(self, request: KvRequest, num_tokens: int, excluded_groups: Collection[int] = ()) -> int | None:
        """Raise `ValueError`: nothing is ever swapped out."""
        raise ValueError("ManagedKv.swap_in: there is no host memory.")

    def drop_swapped(self, request: KvRequest) -> None:
        """Raise `ValueError`: nothing is ever swapped out."""
        raise ValueError("ManagedKv.drop_swapped: there is no host memory.")

    def take_copies(self) -> Sequence[Any]:
        """Return no copies: nothing is swapped."""
        return ()

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Ignore the clock: nothing expires."""

    def now(self) -> float:
        """Return 0: this memory uses no times."""
        return 0.0

    def expire(self) -> None:
        """Do nothing: content does not expire."""

    def settle_due(self) -> Sequence[Hashable]:
        """Return no names: there are no pins."""
        return ()

    def pin(self, name: Hashable, request: KvRequest, until: float) -> bool:
        """Return False: vLLM's manager cannot pin blocks, and evicts them by last use."""
        return False

    def unpin(self, name: Hashable) -> bool:
        """Return False: there is no pin."""
        return False

    def release_pin(self) -> Hashable | None:
        """Return None: there is no pin."""
        return None

    def report_content(self, events: ContentEvents) -> None:
        """Raise `ConfigError`: changes of the prefix cache's content are not reported."""
        message = "is not reported for models with several kinds of KV blocks, whose prefix cache is vLLM's"
        raise ConfigError(Problem("content of the prefix cache", message, "Choose policies that do not follow it"))

    def report_evictions(self, notify: Callable[[Any, float], None] | None) -> None:
        """Do nothing: there is no retention policy whose choices could be reported."""

    def tier_hits(self, hashes: BlockHashes, num_known_tokens: int) -> Mapping[str, int]:
        """Return an empty mapping: there are no tiers."""
        return {}

    def follow_hits(self, *, wanted: bool) -> None:
        """Return None: vLLM's manager reports no changes of prefix hits, so queues re-read all keys that use hits."""

    def groups_of(self, request: KvRequest) -> Sequence[int]:
        """Return the one KV-parallel group."""
        return (0,)

    def active_groups(self, request: KvRequest, num_done_tokens: int | None = None) -> Sequence[int]:
        """Return the one KV-parallel group."""
        return (0,)

    def group_context(self, request: KvRequest, num_done_tokens: int) -> Sequence[int]:
        """Return `num_done_tokens`: the one KV-parallel group holds the KV of all tokens."""
        return (num_done_tokens,)

    def max_chunk(self, request: KvRequest, num_done_tokens: int, num_remaining_tokens: int) -> int:
        """Return the number of remaining tokens: no group limits a chunk."""
        return num_remaining_tokens

    def on_chunk_done(self, request: KvRequest, num_done_before: int, num_tokens: int) -> None:
        """Do nothing: pending prefill work is not tracked."""
