"""Content hashes of KV blocks.

A block's KV depends on every token up to the block's end, so its hash does too. Two blocks have equal hashes if all
tokens up to the blocks' ends are equal and both requests have the same salt; otherwise their hashes differ, since
collisions of the 128-bit hashes can be neglected. Only full blocks have hashes. Requests with different salts never
share blocks, which keeps tenants from probing each other's prompts.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from itertools import repeat
from struct import Struct
from typing import Protocol, TypeAlias

from xxhash import xxh3_128_digest, xxh3_128_hexdigest

SegmentId: TypeAlias = int | str | tuple[str | int, ...]
"""Name of a segment: consecutive tokens whose ids are unknown. Equal names mean equal tokens."""

UNBOUNDED_TOKENS = sys.maxsize
"""Length given to a segment whose tokens are not all generated yet, so that its real length is unknown."""

FIRST_LOOKUP_BLOCKS, LOOKUP_GROWTH = 32, 4
"""Number of hashes in the first batch that a lookup computes, and the ratio of each later batch's size to the size of
the previous batch. The first batch is small because most lookups miss early.
"""

_MOST_NEW_SEGMENTS = 8
"""Maximum number of segments by which a prompt may exceed a stored prompt to be recognised as its continuation."""

_PromptKey: TypeAlias = tuple[str, int, int, tuple[SegmentId, int]]
"""Key of a stored prompt: (salt, block size, number of segments, last segment with its length)."""


class BlockHashes(Protocol):
    """The hashes of one request's blocks, first block first. Hashes of different implementations are never equal."""

    @property
    def num_hashed_tokens(self) -> int:
        """Number of leading tokens that are known, or that belong to a named segment even if they are not generated
        yet. Only blocks that end within these tokens have hashes. May grow as tokens are generated.
        """

    @property
    def num_public_tokens(self) -> int:
        """Number of leading tokens that may also be in another request's prompt while this request lives; the blocks of
        later tokens need not be cached before this request ends.
        """

    @property
    def is_private_after_prompt(self) -> bool:
        """True if no other request's prompt can contain the generated content before this request ends."""

    def block_hash(self, block_index: int) -> Hashable:
        """Return the hash of the block with this index, from 0. IndexError if not all of its content is known."""

    def block_hashes(self, start: int, stop: int) -> Sequence[Hashable]:
        """Return the hashes of blocks `start` .. `stop` - 1."""

    def shared_prompt_hashes(self, num_prompt_tokens: int) -> Sequence[Hashable]:
        """Return the hashes of the prompt's full blocks; empty if no other request can have the same content."""


def output_segment(request_id: str) -> SegmentId:
    """Return the name of a request's generated tokens, for follow-ups whose prompts contain them."""
    return ("out", request_id)


class TokenBlockHashes:
    """Hashes of token ids: the 128-bit xxh3 of the previous block's hash and the block's ids (64-bit little-endian).

    Each block is hashed once, when its hash is first needed. Generated tokens are hashed like prompt tokens, since a
    client may send them in its next prompt. They are added with `append`, or by the caller to its own list `output`.
    """

    __slots__ = ("_block_size", "_digests", "_num_before", "_output", "_root", "_tokens", "reads_cache")

    is_private_after_prompt = False

    def __init__(
        self,
        tokens: Iterable[int],
        block_size: int,
        salt: str = "",
        output: Sequence[int] = (),
        *,
        reads_cache: bool = True,
    ) -> None:
        """Create the hashes. `output`: the caller's list of generated tokens, which may grow later. The tokens that
        this list has already must also be at the end of `tokens`.

        If `reads_cache` is False, the blocks are cached for other requests, but this request gets no prefix hits
        itself.
        """
        self.reads_cache = reads_cache
        self._tokens = array("q", tokens)
        self._output = output
        self._num_before = len(self._tokens) - len(output)
        self._block_size = _checked_block_size(block_size)
        self._root = root_digest(salt)
        self._digests: list[bytes] = []

    @property
    def num_hashed_tokens(self) -> int:
        """Number of prompt tokens plus the number of generated tokens added so far."""
        num_known, num_copied = self._num_before + len(self._output), len(self._tokens)
        return num_known if num_known > num_copied else num_copied

    num_public_tokens = num_hashed_tokens  # not a property that returns the other one: that would cost another call

    def append(self, token: int) -> None:
        """Add one generated token."""
        self._tokens.append(token)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add generated tokens."""
        self._tokens.extend(tokens)

    def block_hash(self, block_index: int) -> Hashable:
        """Return the hash of one block. IndexError if the block is not full."""
        digests = self._digests
        if block_index >= len(digests):
            self._hash_up_to(block_index + 1)
        return digests[block_index]

    def block_hashes(self, start: int, stop: int) -> Sequence[Hashable]:
        """Return the hashes of blocks `start` .. `stop` - 1. IndexError if one of them is not full."""
        digests = self._digests
        if stop > len(digests):
            self._hash_up_to(stop)
        return digests[start:stop]

    def shared_prompt_hashes(self, num_prompt_tokens: int) -> Sequence[Hashable]:
        """Return the hashes of the prompt's full blocks."""
        return self.block_hashes(0, num_prompt_tokens // self._block_size)

    def _copy_up_to(self, num_blocks: int) -> None:
        """Append output tokens to `_tokens` if the first `num_blocks` blocks need them. IndexError if one of these
        blocks is not full.
        """
        size, tokens = self._block_size, self._tokens
        if num_blocks * size <= len(tokens):
            return
        num_missing = self._num_before + len(self._output) - len(tokens)
        if num_missing > 0:
            missing = self._output[-num_missing:]
            tokens.fromlist(missing if isinstance(missing, list) else list(missing))  # faster than `extend`
        if num_blocks * size > len(tokens):
            raise IndexError(
                f"TokenBlockHashes: block {num_blocks - 1} is not full ({len(tokens)} tokens, {size} a block). "
                "Only full blocks have hashes."
            )

    def _hash_up_to(self, num_blocks: int) -> None:
        digests, size = self._digests, self._block_size
        begin, end = len(digests) * size, num_blocks * size
        first, stop = begin - self._num_before, end - self._num_before
        if first >= 0 and stop <= len(self._output):  # all in `_output`: no copy to `_tokens` needed
            ids = _packer(stop - first)(*self._output[first:stop])
        else:
            self._copy_up_to(num_blocks)
            ids = _little_endian(self._tokens[begin:end])
        before = digests[-1] if digests else self._root
        if end - begin == size:
            digests.append(xxh3_128_digest(before + ids))
        else:
            digests += _digests_of(before, ids, size)


def root_digest(salt: str) -> bytes:
    """Return the digest that the first block of content with this salt uses in place of a previous block's hash."""
    return xxh3_128_digest(salt.encode())


def token_digests(before: bytes, tokens: array[int], block_size: int) -> list[bytes]:
    """Return the hashes of consecutive full blocks of token ids (type code q). `before`: hash of the preceding block,
    or a `root_digest` if there is none.
    """
    return _digests_of(before, _little_endian(tokens), block_size)


@lru_cache
def _packer(num_tokens: int) -> Callable[..., bytes]:
    """Return a function that packs `num_tokens` token ids into bytes, in the format that `token_digests` hashes."""
    return Struct(f"<{num_tokens}q").pack


def _little_endian(tokens: array[int]) -> bytes:
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def _digests_of(before: bytes, ids: bytes, block_size: int) -> list[bytes]:
    digests, digest, width = [], before, block_size * 8
    for begin in range(0, len(ids), width):
        digest = xxh3_128_digest(digest + ids[begin : begin + width])
        digests.append(digest)
    return digests


class SegmentBlockHashes:
    """Hashes from segments (named sequences of tokens), for workloads that state which parts of prompts are equal, but
    not their tokens.

    Token j of a segment is identified by (name, j). Adjacent segments of the same name are merged, so it does not
    matter where a workload splits a segment. The output is one more segment, `output_segment(request_id)`, with no end.
    A block's hash combines three values: the hash of all segments before the segment in which the block ends, the name
    of this segment, and the position in this segment at which the block ends. Each segment is hashed once, whatever its
    length.
    """

    __slots__ = ("_bases", "_block_size", "_ends", "_hashes", "_names", "num_public_tokens")

    is_private_after_prompt = True
    num_hashed_tokens = UNBOUNDED_TOKENS
    _names: list[SegmentId]
    _ends: list[int]
    num_public_tokens: int

    def __init__(
        self,
        segments: Sequence[tuple[SegmentId, int]],
        request_id: str,
        block_size: int,
        salt: str = "",
        *,
        recent: RecentPrompts | None = None,
    ) -> None:
        """Create the hashes. `recent`: earlier prompts; if this prompt continues one of them, that prompt's hashes are
        reused.
        """
        self._block_size = _checked_block_size(block_size)
        known = None if recent is None else recent.longest_prefix(segments, block_size, salt)
        if known is None:
            num_known_segments, end = 0, 0
            names, ends = [], []
            self._bases = [root_digest(salt)]
            self._hashes: list[bytes] = []
        else:
            num_known_segments, before = known
            end = before.num_public_tokens
            names, ends = before._names[:-1], before._ends[:-1]
            self._bases = before._bases[: len(names) + 1]
            self._hashes = before._hashes[: end // block_size]
        for name, num_tokens in segments[num_known_segments:]:
            if num_tokens < 0:
                raise ValueError(
                    f"SegmentBlockHashes: a run has a negative length ({name!r}: {num_tokens}). At least 0 is allowed."
                )
            end += num_tokens
            if num_tokens and names and names[-1] == name:
                ends[-1] = end
            elif num_tokens:
                names.append(name)
                ends.append(end)
        self.num_public_tokens = end
        output = output_segment(request_id)
        if names and names[-1] == output:
            ends[-1] = UNBOUNDED_TOKENS
        else:
            names.append(output)
            ends.append(UNBOUNDED_TOKENS)
            if recent is not None:
                recent.add(segments, salt, self)
        self._names = names
        self._ends = ends

    def block_hash(self, block_index: int) -> Hashable:
        """Return the hash of one block."""
        return self.block_hashes(block_index, block_index + 1)[0]

    def block_hashes(self, start: int, stop: int) -> Sequence[Hashable]:
        """Return the hashes of blocks `start` .. `stop` - 1."""
        if stop > len(self._hashes):
            self._hash_up_to(stop)
        return self._hashes[start:stop]

    def shared_prompt_hashes(self, num_prompt_tokens: int) -> Sequence[Hashable]:
        """Return the hashes of the prompt's full blocks."""
        return self.block_hashes(0, min(num_prompt_tokens, self.num_public_tokens) // self._block_size)

    def _hash_up_to(self, num_blocks: int) -> None:
        size, ends, bases, hashes = self._block_size, self._ends, self._bases, self._hashes
        block_end = (len(hashes) + 1) * size
        last_end = num_blocks * size
        run = bisect_left(ends, block_end)
        self._make_bases(bisect_left(ends, last_end))
        while block_end <= last_end:
            begin = ends[run - 1] if run else 0
            base, within = bases[run + 1], min(last_end, ends[run]) - begin
            ends_in_run = range(block_end - begin, within + 1, size)
            hashes += [base + end.to_bytes(8, "little") for end in ends_in_run]
            block_end += len(ends_in_run) * size
            run += 1

    def _make_bases(self, run: int) -> None:
        """Compute the bases of all segments up to and including the one with index `run`. A segment's base is the hash
        of all segments before it and of its own name.
        """
        bases, ends, names = self._bases, self._ends, self._names
        for this in range(len(bases) - 1, run + 1):
            before = ends[this - 1] if this else 0
            bases.append(xxh3_128_digest(bases[-1] + before.to_bytes(8, "little") + _encoded(names[this])))


class RecentPrompts:
    """The latest prompts made of segments, with their hashes, for reuse: a program's call usually continues the prompt
    of the previous call.

    Reused hashes equal the hashes that would otherwise be computed for the new prompt.
    """

    __slots__ = ("_capacity", "_prompts")

    def __init__(self, capacity: int = 1024) -> None:
        """Create an empty store of at most `capacity` prompts; the prompt that was added or continued least recently is
        dropped first.
        """
        self._capacity = capacity
        self._prompts: OrderedDict[_PromptKey, tuple[Sequence[tuple[SegmentId, int]], SegmentBlockHashes]] = (
            OrderedDict()
        )

    def longest_prefix(
        self, segments: Sequence[tuple[SegmentId, int]], block_size: int, salt: str
    ) -> tuple[int, SegmentBlockHashes] | None:
        """Find the longest stored prompt with which these segments begin; return its number of segments and its hashes,
        or None if there is no such prompt.

        Only prompts that are at most `_MOST_NEW_SEGMENTS` segments shorter are searched.
        """
        num_segments = len(segments)
        for count in range(num_segments, max(0, num_segments - _MOST_NEW_SEGMENTS - 1), -1):
            key = (salt, block_size, count, segments[count - 1])
            found = self._prompts.get(key)
            if found is not None and found[0] == segments[:count]:
                self._prompts.move_to_end(key)
                return count, found[1]
        return None

    def add(self, segments: Sequence[tuple[SegmentId, int]], salt: str, hashes: SegmentBlockHashes) -> None:
        """Store a prompt; it replaces a stored prompt with the same `_PromptKey`."""
        if not segments:
            return
        key = (salt, hashes._block_size, len(segments), segments[-1])
        self._prompts[key] = (segments, hashes)
        if len(self._prompts) > self._capacity:
            self._prompts.popitem(last=False)


class PrivateBlockHashes:
    """Hashes of content that no other request has. Cached blocks of this content can be hit only by the request itself,
    after a preemption.
    """

    __slots__ = ("_request_id",)

    is_private_after_prompt = True
    num_hashed_tokens = UNBOUNDED_TOKENS
    num_public_tokens = 0

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def block_hash(self, block_index: int) -> Hashable:
        """Return the request's id and the block's index."""
        return (self._request_id, block_index)

    def block_hashes(self, start: int, stop: int) -> Sequence[Hashable]:
        """Return the hashes of blocks `start` .. `stop` - 1."""
        return list(zip(repeat(self._request_id), range(start, stop)))

    def shared_prompt_hashes(self, num_prompt_tokens: int) -> Sequence[Hashable]:
        """Return no hash: the content is private."""
        return ()


def adapter_salt(salt: str, adapter: str) -> str:
    """Return the salt of content computed with `adapter` (empty: the base model); two adapters never share KV."""
    # The digest is repeated to make the result longer than any tenant's name, so that it cannot equal a tenant's salt.
    return xxh3_128_hexdigest(repr((salt, adapter)).encode()) * 20 if adapter else salt


def reads_cache(hashes: BlockHashes | None) -> bool:
    """Return True if content with these hashes may be looked up in a cache."""
    return not isinstance(hashes, TokenBlockHashes) or hashes.reads_cache


def _checked_block_size(block_size: int) -> int:
    if block_size < 1:
        raise ValueError(f"block_size: not a number of tokens ({block_size}). At least 1 is allowed.")
    return block_size


def _encoded(name: SegmentId) -> bytes:
    """Return a segment's name as bytes. Names of different types or values have different bytes; equal integers of any
    integer type have the same bytes.
    """
    if isinstance(name, str):
        return b"s" + name.encode()
    if isinstance(name, tuple):
        return b"t" + repr(name).encode()
    return b"i" + str(int(name)).encode()
