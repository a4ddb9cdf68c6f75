"""Block table of one request."""

from __future__ import annotations

from vajra_py.runtime.kv.block_hashes import BlockHashes, PrivateBlockHashes
from vajra_py.runtime.kv.prefix_lookup import PrefixLookup


class BlockTable:
    """One registered request: its block hashes and its blocks."""

    __slots__ = ("blocks", "hashes", "host", "is_private", "lookup", "may_be_cached", "num_cached", "num_valid_tokens")

    def __init__(self, hashes: BlockHashes | None) -> None:
        self.hashes = hashes
        self.is_private = isinstance(hashes, PrivateBlockHashes)
        """Whether nobody else ever asks for its content."""
        self.may_be_cached = hashes is not None and not self.is_private
        """Whether a lookup can find anything; of private content, only what it gave back itself."""
        self.blocks: list[int] = []
        self.num_cached = 0
        """Leading blocks of the table that carry a hash."""
        self.num_valid_tokens = 0
        """Leading tokens whose KV is known to be in the table (what `cache_blocks` was told)."""
        self.host: list[int] = []
        self.lookup: PrefixLookup | None = None
