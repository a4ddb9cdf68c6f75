"""Protocols of retention policies: order of eviction of cached KV blocks, pins, and expiry.

An idle block is a cached block that no request holds; later requests may hit it. A retention policy ranks idle blocks
by a key, as a prioritizer ranks requests, and declares when keys may change (`key_motion`). The block with the lowest
key is evicted first, but never before the blocks that continue it in its chain. One object serves the device memory of
one replica, or one memory tier below it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol, runtime_checkable

from vajra_py.contract.policies import KeyMotion
from vajra_py.contract.requests import ReplicaId, RequestView
from vajra_py.contract.views import Key


class CachedBlock(Protocol):
    """Read-only facts about one block of cached content. Views are compared and hashed by identity."""

    @property
    def block_hash(self) -> Hashable:
        """Hash of the content, as in `RequestView.block_hashes`; if no request can hit the content, a unique value."""

    @property
    def depth(self) -> int:
        """Number of blocks before it in its chain; 0 for the first block of a prompt."""

    @property
    def stored_at(self) -> float:
        """Time at which the content was added to the cache, seconds on the run's clock."""

    @property
    def last_used_at(self) -> float:
        """Latest time at which a request or a pin held it, seconds on the run's clock.

        For an idle block, this is the time at which it became idle.
        """

    @property
    def num_uses(self) -> int:
        """Number of requests that added it to the cache, hit it, or computed a duplicate of it; at least 1."""

    @property
    def priority(self) -> int:
        """Most urgent priority (the lowest number) among the requests that used it."""

    @property
    def request(self) -> RequestView:
        """Request that used the block last; the request may have ended."""


@runtime_checkable
class RetentionPolicy(Protocol):
    """Ranks idle blocks. `key_motion` and `key` are required; the methods of the Protocols below are optional."""

    @property
    def key_motion(self) -> KeyMotion:
        """Volatility of the keys; read once, when the policy is built.

        `STATIC` and `PROGRESS`: a key is read as soon as the block is idle and no cached block continues it; the key is
        valid until a request uses the block. `TIME_LINEAR`: the key follows `line` from that reading on. `ARBITRARY`:
        all keys are re-read whenever blocks are lacking. `VOLATILE`: all keys are re-read for each evicted block.
        """

    def key(self, block: CachedBlock, now: float) -> Key:
        """Return the block's key at `now`; the lowest is evicted first.

        Among equal keys, the block that became idle first is evicted first, and the end of a chain before its head.
        """


@runtime_checkable
class TimeLinearRetention(RetentionPolicy, Protocol):
    """A retention policy whose keys are straight lines in time; needed with `KeyMotion.TIME_LINEAR`."""

    def line(self, block: CachedBlock) -> tuple[float, float]:
        """Return (intercept, slope): key(block, now) = intercept + slope * now until the block is used."""


@runtime_checkable
class RetainsInSegments(Protocol):
    """Optional methods of a retention policy that divides blocks into lists, and chooses a list for each victim."""

    def segment(self, block: CachedBlock) -> int:
        """Return the number of the list that a block joins when it becomes a candidate for eviction."""

    def next_segment(self, now: float) -> int:
        """Return the number of the list for the next victim; if that list is empty, the non-empty list with the lowest
        number is used.
        """


@runtime_checkable
class ExpiresContent(Protocol):
    """Optional method of a retention policy with expiry of cached content; not allowed for memory tiers."""

    def expires_at(self, block: CachedBlock) -> float | None:
        """Return the time from which an idle block can no longer be hit, seconds on the run's clock; None: no expiry.

        Read when the block becomes idle. A block expires only after the cached blocks that continue it.
        """


@runtime_checkable
class PinsContent(Protocol):
    """Optional method of a retention policy that pins the content of some requests; not allowed for memory tiers."""

    def pin_s(self, request: RequestView, now: float) -> float:
        """Return the seconds for which to pin the content of a request that is about to free its blocks; 0: no pin.

        Called when the request ends on the replica. A new pin replaces the session's earlier pin. A pin is refused if
        pins would hold more than `replica.memory.prefix_cache.max_pinned_fraction`; it ends early if the replica could
        run no request otherwise.
        """


class ListensToContent(Protocol):
    """Optional callbacks of a retention policy about its replica's cache; each method is optional by itself.

    A retention policy may also listen to requests (`ListensToRequests`), but cannot be woken (`HandlesWakes`).
    """

    def on_stored(self, blocks: Sequence[CachedBlock], now: float) -> None:
        """Called after new content of one request was added to the cache; `blocks` are in order of their chain."""

    def on_used(self, blocks: Sequence[CachedBlock], now: float) -> None:
        """Called after a request hit `blocks` or recomputed their content; they are in order of their chain."""

    def on_evicted(self, block: CachedBlock, now: float) -> None:
        """Called before a block that this policy chose is evicted."""

    def on_withdrawn(self, block: CachedBlock, now: float) -> None:
        """Called when content is removed without eviction: it expired, is invalid, or was never computed."""

    def on_cleared(self, now: float) -> None:
        """Called after all content was removed."""


class ListensToCaches(Protocol):
    """Optional callbacks of policies of any layer about the content of the replicas' caches; each method is optional.

    They correspond to vLLM's events `BlockStored`, `BlockRemoved` and `AllBlocksCleared`. Events that are at least
    `kv_event_lag_s` seconds old are delivered before the replicaset scheduler is called for a request (`assign`,
    `place_after_prompt`) or for a replica (`pull`); `now` is the time of the event, not of its delivery. Hashes are
    those of `RequestView.block_hashes`.
    """

    def on_blocks_stored(self, replica_id: ReplicaId, hashes: Sequence[Hashable], now: float) -> None:
        """Called for new content that can be hit on the replica from `now` on; `hashes` are in order of their chain."""

    def on_blocks_removed(self, replica_id: ReplicaId, hashes: Sequence[Hashable], now: float) -> None:
        """Called for content that can no longer be hit on the replica from `now` on."""

    def on_cache_cleared(self, replica_id: ReplicaId, now: float) -> None:
        """Called after the replica lost all content, at `now`."""

    def on_tier_blocks_stored(self, replica_id: ReplicaId, tier: str, hashes: Sequence[Hashable], now: float) -> None:
        """Called for new content that can be hit in a memory tier below the device from `now` on.

        For a shared tier, `replica_id` is the replica that wrote it.
        """

    def on_tier_blocks_removed(self, replica_id: ReplicaId, tier: str, hashes: Sequence[Hashable], now: float) -> None:
        """Called for content that can no longer be hit in a memory tier below the device from `now` on.

        For a shared tier, `replica_id` is the replica whose content replaced it.
        """

    def on_tier_cleared(self, replica_id: ReplicaId, tier: str, now: float) -> None:
        """Called after a memory tier below the device lost all content, at `now`."""
