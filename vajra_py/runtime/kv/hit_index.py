"""Index of waiting requests by the cached blocks of their known tokens, and by their first block that is not cached.

When a block enters or leaves the cache, the index therefore finds exactly the requests whose hits have changed. Hashes
are chained, so the cached (held) blocks of all requests form a tree, in which each request is at its last held block.
If a block is removed, the hits of all requests at this block or below it change.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from vajra_py.contract import RequestView
from vajra_py.runtime.kv.block_hashes import BlockHashes, reads_cache

if TYPE_CHECKING:
    from vajra_py.runtime.kv.paged import PagedKvMemory


class _Held:
    """Node of the tree: a block held by the cache, on the path to the last held block of some request."""

    __slots__ = ("block_hash", "children", "parent", "requests")

    def __init__(self, block_hash: Hashable, parent: _Held | None) -> None:
        self.block_hash = block_hash
        self.parent = parent
        self.children: dict[Hashable, _Held] = {}
        self.requests: dict[RequestView, None] = {}
        """Requests whose last held block this is."""


class HitIndex:
    """Index of waiting requests, with a list of the requests whose hits have changed since they were placed in the
    index.
    """

    __slots__ = ("_awaiting", "_changed", "_held", "_place")

    def __init__(self) -> None:
        self._held: dict[Hashable, _Held] = {}
        self._awaiting: dict[Hashable, dict[RequestView, None]] = {}
        """Requests by their first block that is not held."""
        self._place: dict[RequestView, tuple[_Held | None, Hashable | None]] = {}
        """For each request: its last held block (None: no block is held), and the next block, which is awaited (None:
        the request has no further block). A request whose hits have changed has no entry.
        """
        self._changed: dict[RequestView, None] = {}

    def put(self, request: RequestView, chain: Sequence[Hashable], num_held: int) -> None:
        """Place a request whose first `num_held` blocks are held; the next block of its chain is awaited."""
        self.drop(request)
        held = self._node(chain, num_held) if num_held else None
        if held is not None:
            held.requests[request] = None
        awaited = chain[num_held] if num_held < len(chain) else None
        if awaited is not None:
            self._awaiting.setdefault(awaited, {})[request] = None
        self._place[request] = held, awaited

    def _node(self, chain: Sequence[Hashable], num_held: int) -> _Held:
        """Return the node of the last held block of a chain; missing nodes on the path are created."""
        nodes = self._held
        depth = num_held
        while depth and chain[depth - 1] not in nodes:
            depth -= 1
        node = nodes[chain[depth - 1]] if depth else None
        for block_hash in chain[depth:num_held]:
            before, node = node, _Held(block_hash, node)
            nodes[block_hash] = node
            if before is not None:
                before.children[block_hash] = node
        assert node is not None
        return node

    def drop(self, request: RequestView) -> None:
        """Remove a request from the index and from the list of changed requests; does nothing if it is in neither."""
        self._changed.pop(request, None)
        held, awaited = self._place.pop(request, (None, None))
        if awaited is not None:
            waiting = self._awaiting[awaited]
            del waiting[request]
            if not waiting:
                del self._awaiting[awaited]
        if held is not None:
            del held.requests[request]
            self._prune(held)

    def _prune(self, node: _Held | None) -> None:
        """Remove a node that no request needs, and each of its ancestors up to the first one that is needed."""
        while node is not None and not node.requests and not node.children:
            del self._held[node.block_hash]
            before = node.parent
            if before is not None:
                del before.children[node.block_hash]
            node = before

    def stored(self, hashes: Sequence[Hashable]) -> None:
        """Note that the cache holds these blocks from now on."""
        awaiting = self._awaiting
        if awaiting.keys().isdisjoint(hashes):
            return
        for block_hash in hashes:
            for request in list(awaiting.get(block_hash, ())):
                self._change(request)

    def removed(self, block_hash: Hashable) -> None:
        """Note that the cache no longer holds this block."""
        top = self._held.get(block_hash)
        if top is None:
            return
        below, requests = [top], list(top.requests)
        for node in below:
            below += node.children.values()
            requests += node.requests if node is not top else ()
        for request in requests:
            self._change(request)

    def cleared(self) -> None:
        """Mark the hits of all requests as changed, after the cache was cleared."""
        self._changed.update(dict.fromkeys(self._place))
        self._held, self._awaiting, self._place = {}, {}, {}

    def _change(self, request: RequestView) -> None:
        self.drop(request)
        self._changed[request] = None

    def take_changed(self) -> Collection[RequestView]:
        """Return the requests whose hits have changed since the last call; they are no longer in the index."""
        changed = self._changed
        if changed:
            self._changed = {}
        return changed


class HasPrefix(Protocol):
    """Attributes of a waiting request that the index reads."""

    hashes: BlockHashes | None
    num_known_tokens: int


class FollowedHits:
    """Implementation of `HitChanges` for one KV memory."""

    __slots__ = ("_growing", "_memory", "index")

    def __init__(self, memory: PagedKvMemory) -> None:
        self._memory = memory
        self.index = HitIndex()
        self._growing: dict[RequestView, None] = {}
        """Requests some of whose known tokens have no hashes yet, so that their hits may change although the cache does
        not.
        """

    def follow(self, request: RequestView) -> None:
        """See `HitChanges.follow`."""
        known = cast(HasPrefix, request)
        hashes = known.hashes
        if hashes is None or not reads_cache(hashes):
            return
        num_hashed = min(known.num_known_tokens - 1, hashes.num_hashed_tokens)
        if num_hashed < known.num_known_tokens - 1:
            self._growing[request] = None
        else:
            self._growing.pop(request, None)
        limit = num_hashed // self._memory.block_size
        num_held = self._memory.num_leading_blocks(hashes, limit)
        self.index.put(request, hashes.block_hashes(0, min(num_held + 1, limit)), num_held)

    def drop(self, request: RequestView) -> None:
        """See `HitChanges.drop`."""
        self.index.drop(request)
        self._growing.pop(request, None)

    def take_changed(self) -> Collection[RequestView]:
        """See `HitChanges.take_changed`."""
        self._memory.expire()
        changed = self.index.take_changed()
        return {**dict.fromkeys(changed), **self._growing} if self._growing else changed
