"""Publish vLLM's KV cache events for routers: blocks stored in and removed from the prefix cache, by vLLM's hashes.

If events are published, the prefix cache itself is keyed by vLLM's hashes, so that no translation is needed. Two blocks
have equal hashes in vLLM if and only if they have equal hashes in this project, so decisions do not change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    KVCacheEvent,
    KVEventBatch,
)
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind
from vllm.v1.request import Request as VllmRequest

from vajra_py.errors import ConfigError, Problem
from vajra_py.vllm.mechanism import ContentEvents, KvMemory, TokenBlockHashes

HashFunction = Callable[[Any], bytes]


class VllmBlockHashes(TokenBlockHashes):
    """vLLM's hashes of the blocks of a request's tokens.

    Attributes:
        session_id: vLLM's id of the client's session.
    """

    __slots__ = ("_function", "_index_of", "_lora", "_salt", "session_id")

    def __init__(  # noqa: PLR0913  # arguments of the base class, and three more
        self,
        function: HashFunction,
        request: VllmRequest,
        own_salt: str,
        tokens: Iterable[int],
        block_size: int,
        salt: str = "",
        output: Sequence[int] = (),
        *,
        reads_cache: bool = True,
    ) -> None:
        """Create the hashes; for other arguments see `TokenBlockHashes`.

        Args:
            function: hash function of vLLM's `--prefix-caching-hash-algo`.
            request: vLLM's request.
            own_salt: the request's salt, without that of its adapter.
        """
        super().__init__(tokens, block_size, salt, output, reads_cache=reads_cache)
        self._function = function
        self._salt = own_salt
        self._lora = request.lora_request
        self._index_of: dict[Hashable, int] = {}
        self.session_id = request.session_id

    def _hash_up_to(self, num_blocks: int) -> None:
        self._copy_up_to(num_blocks)
        digests, size = self._digests, self._block_size
        for index in range(len(digests), num_blocks):
            tokens = self._tokens[index * size : (index + 1) * size]
            before = BlockHash(digests[-1]) if digests else None
            digests.append(hash_block_tokens(self._function, before, tokens, self._extra_keys(index)))
            self._index_of[digests[-1]] = index

    def _extra_keys(self, index: int) -> tuple[Any, ...] | None:
        keys: list[Any] = [] if self._lora is None else [("lora", self._lora.lora_name, self._lora.lora_path)]
        if index == 0 and self._salt:
            keys.append(("cache_salt", self._salt))
        return tuple(keys) or None

    def stored(self, hashes: Sequence[Hashable]) -> BlockStored:
        """Return the event for storing these consecutive blocks, equal to the event of vLLM's block pool."""
        first, size = self._index_of[hashes[0]], self._block_size
        stop = first + len(hashes)
        keys = [tuple(key[1] for key in self._extra_keys(index) or ()) or None for index in range(first, stop)]
        lora = self._lora
        return BlockStored(
            block_hashes=[_in_events(one) for one in hashes],
            parent_block_hash=_in_events(self._digests[first - 1]) if first else None,
            token_ids=self._tokens[first * size : stop * size].tolist(),
            block_size=size,
            lora_id=None if lora is None else lora.lora_int_id,
            medium=MEDIUM_GPU,
            lora_name=None if lora is None else lora.lora_name,
            extra_keys=cast(Any, keys),
            group_idx=0,
            session_id=self.session_id,
        )


class KvFeed(ContentEvents):
    """Collects the events of the prefix cache. As in vLLM, each of several blocks with equal content causes events."""

    def __init__(self, kind: str) -> None:
        """Create an empty feed; `kind` is vLLM's name for the kind of KV blocks."""
        self._kind = kind
        self.events: list[KVCacheEvent] = []

    def entered(self, hashes: Sequence[Hashable], known: Container[Hashable], request: object) -> None:
        """See `ContentEvents`."""
        event = cast(Any, request).hashes.stored(hashes)
        event.kv_cache_spec_kind = self._kind
        self.events.append(event)

    def stored(self, hashes: Sequence[Hashable]) -> None:
        """See `ContentEvents`. `hashes` must be empty: the collection of events begins with an empty cache."""
        assert not hashes

    def copy_left(self, block_hash: Hashable) -> None:
        """See `ContentEvents`."""
        self.removed(block_hash)

    def removed(self, block_hash: Hashable) -> None:
        """See `ContentEvents`."""
        self.events.append(BlockRemoved(block_hashes=[_in_events(block_hash)], medium=MEDIUM_GPU, group_idx=0))

    def cleared(self) -> None:
        """See `ContentEvents`."""
        self.events.append(AllBlocksCleared())


@dataclass(slots=True)
class KvEvents:
    """Events of one scheduler's prefix cache, and the block hashes used in them."""

    publisher: Any
    feed: KvFeed
    function: HashFunction = field(repr=False)

    def hashes_for(self, request: VllmRequest, salt: str) -> Callable[..., VllmBlockHashes]:
        """Return the constructor of a request's block hashes; `salt` is the request's own salt, without the salt of its
        adapter.
        """
        return partial(VllmBlockHashes, self.function, request, salt)

    def follow(self, memory: KvMemory) -> None:
        """Collect the events of this memory.

        Raises `ConfigError` if a policy observes the prefix cache or orders its eviction.
        """
        if memory.is_watched:
            message = "KV events are not published with a policy that observes the prefix cache or orders its eviction"
            advice = "Leave the option out, or choose other policies"
            raise ConfigError(Problem("--kv-events-config", message, advice))
        memory.report_content(self.feed)

    def publish(self) -> None:
        """Publish the events since the last call, if there are any."""
        events = self.feed.events
        if events:
            self.feed.events = []
            self.publisher.publish(KVEventBatch(ts=time.time(), events=events))


def kv_events_of(vllm_config: Any, kv_cache_config: Any, block_size: int) -> KvEvents | None:
    """Return the events enabled by `--kv-events-config`; None if they, or the prefix cache, are disabled."""
    config, cache = vllm_config.kv_events_config, vllm_config.cache_config
    if config is None or not config.enable_kv_cache_events or not cache.enable_prefix_caching:
        return None
    publisher = EventPublisherFactory.create(config, vllm_config.parallel_config.data_parallel_index)
    kind = get_kv_cache_spec_kind(kv_cache_config.kv_cache_groups[0].kv_cache_spec).value
    return KvEvents(publisher, KvFeed(kind), get_hash_fn_by_name(cache.prefix_caching_hash_algo))


def _in_events(block_hash: Hashable) -> Any:
    return maybe_convert_block_hash(cast(BlockHash, block_hash))
