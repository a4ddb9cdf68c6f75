"""Retention of cached content: which idle KV block is overwritten first, how long content is pinned, when it expires.

A retention policy ranks blocks that no request holds and whose content a later request may find, as a prioritizer ranks requests: by
a key with a declared motion. The block with the lowest key goes first, and only at the end of a chain: a block is never overwritten
before the blocks that continue it. One object serves one replica.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol, runtime_checkable

from vajra_py.contract.policies import KeyMotion
from vajra_py.contract.requests import ReplicaId, RequestView
from vajra_py.contract.views import Key


class CachedBlock(Protocol):
    """Read-only facts about one block of cached content. Equal views are the same object; hashable by identity."""

    @property
    def block_hash(self) -> Hashable:
        """Hash of the content, as in `RequestView.block_hashes`; a unique name if no request can hit the content again."""

    @property
    def depth(self) -> int:
        """Number of blocks before it in its chain; 0 for the first block of a prompt."""

    @property
    def stored_at(self) -> float:
        """Time at which the content was entered, seconds on the run's clock."""

    @property
    def last_used_at(self) -> float:
        """Latest time at which a request or a pin held it, seconds on the run's clock; for an idle block when it became idle."""

    @property
    def num_uses(self) -> int:
        """Requests that entered it, found it, or computed the same content beside it; at least 1."""

    @property
    def priority(self) -> int:
        """Most urgent priority (the lowest number) among the requests that used it."""

    @property
    def request(self) -> RequestView:
        """Request that used it last; it may have ended."""


@runtime_checkable
class RetentionPolicy(Protocol):
    """Ranks idle content. Every method but these two is optional."""

    @property
    def key_motion(self) -> KeyMotion:
        """Volatility of the keys; read once, when the policy is built.

        `STATIC` and `PROGRESS`: a key is read when no request holds the block any more and nothing continues it, and stays until a request
        uses it. `TIME_LINEAR`: it follows `line` from then on. `ARBITRARY`: all keys are read again whenever blocks are lacking.
        `VOLATILE`: they are read again for each block that is overwritten.
        """

    def key(self, block: CachedBlock, now: float) -> Key:
        """The block's key at `now`; the lowest goes first. Ties go to the block that became idle first, the end of a chain before its head."""


@runtime_checkable
class TimeLinearRetention(RetentionPolicy, Protocol):
    """A retention policy whose keys are straight lines in time; needed with `KeyMotion.TIME_LINEAR`."""

    def line(self, block: CachedBlock) -> tuple[float, float]:
        """(intercept, slope), with key(block, now) = intercept + slope * now until the block is used."""


@runtime_checkable
class RetainsInSegments(Protocol):
    """Optional methods of a retention policy that keeps blocks in lists of their own and chooses the list for each victim."""

    def segment(self, block: CachedBlock) -> int:
        """Number of the list that a block joins; read with its key."""

    def next_segment(self, now: float) -> int:
        """Number of the list that the next victim is taken from; if it has none, the first list that has one gives it."""


@runtime_checkable
class ExpiresContent(Protocol):
    """Optional method of a retention policy whose content lives for some time only."""

    def expires_at(self, block: CachedBlock) -> float | None:
        """Time from which an idle block is no longer found, seconds on the run's clock; None: it stays until it is overwritten.

        Read when no request holds the block any more. Its continuations expire with it.
        """


@runtime_checkable
class PinsContent(Protocol):
    """Optional method of a retention policy that keeps the content of some requests for sure."""

    def pin_s(self, request: RequestView, now: float) -> float:
        """Seconds for which to keep the content of a request that is about to give its blocks back, whatever its key; 0: no pin.

        Called when the request ends on the replica for good. The pin of a session replaces its last one. Refused where pins would hold more than
        `replica.memory.prefix_cache.max_pinned_fraction`; ended before its time if the replica could run no request otherwise.
        """


class ListensToContent(Protocol):
    """Optional callbacks of a retention policy about the cache that it ranks; each method is optional by itself.

    A retention policy may also listen to requests (`ListensToRequests`), except that it is not woken.
    """

    def on_stored(self, blocks: Sequence[CachedBlock], now: float) -> None:
        """New content of one request, in order of its chain, has been entered."""

    def on_used(self, blocks: Sequence[CachedBlock], now: float) -> None:
        """A request has found these blocks, in order of their chain, or computed their content again."""

    def on_evicted(self, block: CachedBlock, now: float) -> None:
        """A block is about to be overwritten, by this policy's choice."""

    def on_withdrawn(self, block: CachedBlock, now: float) -> None:
        """Content is gone that was not evicted: it has expired, or was never computed after all."""

    def on_cleared(self, now: float) -> None:
        """All content is gone."""


class ListensToCaches(Protocol):
    """Optional callbacks of policies of any layer about the content of the replicas' caches; each method is optional by itself.

    What vLLM publishes as `BlockStored`, `BlockRemoved` and `AllBlocksCleared`. A policy is notified before it is called for a request,
    of everything that happened at least `kv_event_lag_s` before; hashes are those of `RequestView.block_hashes`.
    """

    def on_blocks_stored(self, replica_id: ReplicaId, hashes: Sequence[Hashable], now: float) -> None:
        """Content that the replica did not have can be found there since `now`, in order of its chain."""

    def on_blocks_removed(self, replica_id: ReplicaId, hashes: Sequence[Hashable], now: float) -> None:
        """Content can no longer be found there since `now`."""

    def on_cache_cleared(self, replica_id: ReplicaId, now: float) -> None:
        """The replica has lost all content at `now`."""

    def on_tier_blocks_stored(self, replica_id: ReplicaId, tier: str, hashes: Sequence[Hashable], now: float) -> None:
        """Content can be found in a memory tier below the replica's device since `now`; for a shared tier `replica_id` is the replica that wrote it."""

    def on_tier_blocks_removed(self, replica_id: ReplicaId, tier: str, hashes: Sequence[Hashable], now: float) -> None:
        """Content can no longer be found in that tier since `now`; for a shared tier `replica_id` is the replica whose content took its place."""

    def on_tier_cleared(self, replica_id: ReplicaId, tier: str, now: float) -> None:
        """The tier has lost all content at `now`."""
