"""Index of a server's prefix cache, from its KV events (vLLM's `BlockStored`, `BlockRemoved`, `AllBlocksCleared`).

Events contain the blocks' tokens, and identify blocks by the server's hashes, which depend on its seed and algorithm.
The index maps each block to this project's hash of the same tokens, so that matching prompts depends only on tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

from vajra_py.runtime.kv.block_hashes import adapter_salt, root_digest, token_digests

_STORED, _REMOVED, _CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
_ORDER: Mapping[str, Sequence[str]] = {
    _STORED: (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind"),
    ),
    _REMOVED: ("block_hashes", "medium", "group_idx"),
    _CLEARED: (),
}
"""Names of fields by kind of event, for events encoded as arrays (SGLang, and older versions of vLLM)."""
_DEVICE = (None, "GPU")
_WHOLE_PREFIX = (None, "full_attention", "mla_attention", "sink_full_attention")
"""Kinds of KV groups in which a prefix hit needs all blocks of the prefix; in other kinds a hit needs only some of
these blocks.
"""
_Key: TypeAlias = tuple[int, int | bytes]
"""Group and hash that identify a block of a server."""


class ServerBlocks:
    """Index of the blocks that a server holds on its device."""

    def __init__(self, block_size: int, most_blocks: int) -> None:
        """Create an empty index.

        Args:
            block_size: tokens per block of the server.
            most_blocks: maximum number of blocks; must be more than the server can hold.
        """
        self._block_size = block_size
        self._most_blocks = most_blocks
        self._digests: dict[_Key, bytes] = {}
        self._num_names: dict[bytes, int] = {}
        """Number of the server's blocks with each content hash; blocks of several KV groups can contain the same
        tokens.
        """
        self._was_held: dict[bytes, bool] = {}
        """Hashes of the blocks that changed since the last call of `news`; True if the block was held at that call."""
        self.other_block_size = 0
        """Block size of the last event that was ignored because its block size differs from the settings; 0 if there
        was none.
        """

    @property
    def content(self) -> list[str]:
        """Hexadecimal hashes of all blocks held."""
        return [one.hex() for one in self._num_names]

    def clear(self) -> None:
        """Drop all blocks and pending changes."""
        self._digests.clear()
        self._num_names.clear()
        self._was_held.clear()

    def news(self) -> tuple[list[str], list[str]]:
        """Return the hexadecimal hashes of blocks added, and of blocks removed, since the last call."""
        changed, self._was_held = self._was_held, {}
        held = self._num_names
        stored = [one.hex() for one, was_held in changed.items() if not was_held and one in held]
        return stored, [one.hex() for one, was_held in changed.items() if was_held and one not in held]

    def apply(self, batch: Any) -> None:
        """Apply a decoded batch: a list of a time, a list of events, and possibly more items.

        Raises `ValueError` if the batch is malformed, or if there are too many blocks.
        """
        if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
            raise ValueError("it is not a batch of KV events")
        for event in batch[1]:
            kind, fields = _fields(event)
            if kind == _CLEARED:
                for key in list(self._digests):
                    self._remove(key)
            elif kind in (_STORED, _REMOVED) and fields.get("medium") in _DEVICE:
                hashes, group = fields.get("block_hashes"), fields.get("group_idx") or 0
                if not isinstance(hashes, list) or not isinstance(group, int):
                    raise ValueError(f"a {kind} without block_hashes")
                keys = [(group, one) for one in hashes if isinstance(one, int | bytes)]
                if kind == _REMOVED:
                    for key in keys:
                        self._remove(key)
                elif fields.get("kv_cache_spec_kind") in _WHOLE_PREFIX:
                    self._store(keys, group, fields)

    def _store(self, keys: Sequence[_Key], group: int, fields: Mapping[str, Any]) -> None:
        size, tokens = fields.get("block_size"), fields.get("token_ids")
        try:
            ids = array("q", tokens)  # type: ignore[arg-type]  # a server may send anything
        except (TypeError, OverflowError):
            raise ValueError("a BlockStored without token_ids") from None
        if size != self._block_size or len(ids) != len(keys) * size:
            if isinstance(size, int) and len(keys) > 1 and size != self._block_size:  # a single block may be partial
                self.other_block_size = size
            return
        parent = fields.get("parent_block_hash")
        salt = _salt(fields)
        before = (
            self._digests.get((group, parent)) if parent is not None else None if salt is None else root_digest(salt)
        )
        if before is None or salt is None:
            return  # the parent block is unknown, or the blocks depend on more than tokens
        if len(self._digests) + len(keys) > self._most_blocks:
            raise ValueError(f"its events name more than {self._most_blocks} blocks")
        for key, digest in zip(keys, token_digests(before, ids, size), strict=True):
            self._remove(key)
            self._digests[key] = digest
            num_names = self._num_names.get(digest, 0)
            self._was_held.setdefault(digest, num_names > 0)
            self._num_names[digest] = num_names + 1

    def _remove(self, key: _Key) -> None:
        digest = self._digests.pop(key, None)
        if digest is None:
            return
        self._was_held.setdefault(digest, True)
        self._num_names[digest] -= 1
        if not self._num_names[digest]:
            del self._num_names[digest]


def _fields(event: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the kind and the fields of an event, which is encoded as a map or an array."""
    if isinstance(event, dict):
        return str(event.get("type")), event
    if isinstance(event, list) and event:
        return str(event[0]), dict(zip(_ORDER.get(str(event[0]), ()), event[1:], strict=False))
    raise ValueError("an event is neither a map nor an array")


def _salt(fields: Mapping[str, Any]) -> str | None:
    """Return the salt of an event's blocks; None if their content also depends on something besides tokens and salt,
    such as an image.
    """
    adapter = fields.get("lora_name") or ""
    found: list[Hashable] = []
    for keys in fields.get("extra_keys") or ():
        found += [one for one in keys or () if one != adapter]
    if not found:
        return adapter_salt("", adapter)
    is_first = fields.get("parent_block_hash") is None
    return adapter_salt(found[0], adapter) if is_first and len(found) == 1 and isinstance(found[0], str) else None


__all__ = ["ServerBlocks"]
