"""Paged KV memory: block tables, prefix cache, swapped blocks, KV-parallel groups."""

from __future__ import annotations

from vajra_py.runtime.kv.block_hashes import (
    BlockHashes,
    PrivateBlockHashes,
    SegmentBlockHashes,
    SegmentId,
    TokenBlockHashes,
    output_segment,
)
from vajra_py.runtime.kv.block_pool import BlockPool, PrefixCacheOptions
from vajra_py.runtime.kv.host import BlockCopy, CopyDirection
from vajra_py.runtime.kv.interface import KvMemory, KvRequest
from vajra_py.runtime.kv.paged import PagedKvMemory
from vajra_py.runtime.kv.retained_pool import Retention
from vajra_py.runtime.kv.sharded import KvGroups, KvParallelMemory

__all__ = [
    "BlockCopy",
    "BlockHashes",
    "BlockPool",
    "CopyDirection",
    "KvGroups",
    "KvMemory",
    "KvParallelMemory",
    "KvRequest",
    "PagedKvMemory",
    "PrefixCacheOptions",
    "PrivateBlockHashes",
    "Retention",
    "SegmentBlockHashes",
    "SegmentId",
    "TokenBlockHashes",
    "output_segment",
]
