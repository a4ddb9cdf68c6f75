"""Divide one step's attention into few, large calls on the CPU.

Decodes of similar KV length form a group that is gathered and attended in one call, padded to the group's longest.
Chunks are divided into pieces of rows, so that a causal chunk does not compute its upper triangle. A plan contains only
index tensors and masks; it is built once per step and used by all layers with the same window and KV row size.

Invariants:
    - A sequence's keys are gathered token by token, only from its own slots: padding repeats its first token, so stale
      contents of a block's unused slots are never read.
    - Every row with a KV length above 0 is in exactly one group or chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from vajra_kernels.metadata import AttentionMetadata

GROUP_BYTES = 2 << 20
"""Largest gathered K of one decode group in bytes, so that it is still in the CPU cache when it is multiplied."""
GROUP_WASTE = 96 << 10
"""Number of padding elements (K and V) whose multiplication takes about as long as the overhead of one more group. It
is the same for all dtypes, since a multiplication in half precision is not faster.
"""
PIECE_ROWS = 64
"""Number of query tokens in one piece of a chunk."""

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Cache slots of the keys of one gather.

    Attributes:
        slots: int32 [num_rows * length] to gather, or None if they are consecutive from ``first`` on, so that a view
            suffices.
        first: first slot, if ``slots`` is None.
        num_rows: number of sequences gathered together.
        length: number of keys per sequence, padded.
        buffers: memory into which the step's layers gather rows of tokens: (the memory, its view by head) for each
            ("k" or "v", number of KV heads, elements per row).
    """

    slots: torch.Tensor | None
    first: int
    num_rows: int
    length: int
    buffers: dict[tuple[str, int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Single-token queries that are attended in one call.

    Attributes:
        rows: int64 rows of the flattened query, or None if they are consecutive from ``first_row`` on.
        first_row: first row, if ``rows`` is None.
        keys: slots of the keys that the queries attend to.
        mask: additive float32 [num_rows, 1, 1, length] of 0 and -inf, or None if all lengths are equal.
    """

    rows: torch.Tensor | None
    first_row: int
    keys: KeyRange
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ChunkPiece:
    """Query rows [row_begin, row_end) of the batch, attending to keys [key_begin, key_end) of their chunk's gather."""

    row_begin: int
    row_end: int
    key_begin: int
    key_end: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's query tokens, divided into pieces."""

    keys: KeyRange
    pieces: tuple[ChunkPiece, ...]


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """Attention calls of one step; ``covers_all`` is True if these calls write every output row."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
    covers_all: bool

    @property
    def is_one_group(self) -> bool:
        """True if the whole batch is one group of consecutive rows, so that its result is the output."""
        return len(self.groups) == 1 and not self.chunks and self.covers_all and self.groups[0].rows is None


@dataclass(slots=True)
class CpuPlans:
    """Plans of a step by (window, bytes of one token's K, bytes of one element), created on first use.

    Attributes:
        query_lens: query lengths of the batch, or None until the first plan reads them from the tensors.
        kv_lens: KV lengths of the batch, or None until the first plan reads them from the tensors.
    """

    query_lens: tuple[int, ...] | None = None
    kv_lens: tuple[int, ...] | None = None
    _plans: dict[tuple[int | None, int, int], CpuPlan] = field(default_factory=dict)

    def get(self, metadata: AttentionMetadata, window: int | None, token_bytes: int, itemsize: int) -> CpuPlan:
        """Return the plan for layers with this window, KV row size and element size."""
        longest = metadata.max_kv_len
        key = (window if window is not None and window < longest else None, token_bytes, itemsize)
        plan = self._plans.get(key)
        if plan is None:
            if self.query_lens is None or self.kv_lens is None:
                self.query_lens = tuple(metadata.query_start.diff().tolist())
                self.kv_lens = tuple(metadata.kv_lens.tolist())
            plan = self._plans[key] = _Planner(
                metadata, metadata.block_table.numpy(), self.query_lens, self.kv_lens, *key
            ).plan()
        return plan


@dataclass(frozen=True, slots=True)
class _Planner:
    metadata: AttentionMetadata
    table: Ints
    query_lens: Sequence[int]
    kv_lens: Sequence[int]
    window: int | None
    token_bytes: int
    itemsize: int

    def plan(self) -> CpuPlan:
        decodes: list[tuple[int, int, int]] = []  # (keys attended, row, sequence)
        chunks: list[tuple[int, int]] = []  # (sequence, first row)
        row = 0
        covers_all = True
        for seq, (query_len, kv_len) in enumerate(zip(self.query_lens, self.kv_lens, strict=True)):
            if kv_len == 0:
                covers_all = covers_all and query_len == 0
            elif query_len == 1:
                decodes.append((kv_len if self.window is None else min(kv_len, self.window), row, seq))
            elif query_len > 1:
                chunks.append((seq, row))
            row += query_len
        groups = self._groups(decodes) if decodes else ()
        if not chunks:
            return CpuPlan(groups, (), covers_all)
        if not self.metadata.causal:
            return CpuPlan(groups, tuple(self._uncut_chunk(seq, row) for seq, row in chunks), covers_all)
        mask = self._band(max(self.query_lens), max(self.kv_lens))
        return CpuPlan(groups, tuple(self._chunk(seq, row, mask) for seq, row in chunks), covers_all)

    def _groups(self, decodes: list[tuple[int, int, int]]) -> tuple[DecodeGroup, ...]:
        lane = np.arange(max(decodes)[0], dtype=np.int32)
        return tuple(self._group(members, lane) for members in _similar(decodes, self.token_bytes, self.itemsize))

    def _group(self, members: list[tuple[int, int, int]], lane: Ints) -> DecodeGroup:
        """Return the group of ``members`` (longest first); ``lane`` is 0, 1, ..., with at least one entry per key of
        the longest.
        """
        length = members[0][0]
        even = members[-1][0] == length
        members.sort(key=_row_of)
        rows = [row for _, row, _ in members]
        consecutive = rows[-1] - rows[0] == len(rows) - 1
        mask = None
        if len(members) == 1:
            seq = members[0][2]
            keys = self._keys(seq, self.kv_lens[seq] - length, self.kv_lens[seq])
        else:
            counts = np.array([keys for keys, _, _ in members], np.int32)[:, None]
            slots = self._slots([seq for _, _, seq in members], counts, lane[:length])
            if not even:
                owned = lane[:length] < counts
                slots = np.where(owned, slots, slots[:, :1])
                mask = torch.from_numpy(np.where(owned, np.float32(0.0), np.float32("-inf")))[:, None, None, :]
            keys = KeyRange(torch.from_numpy(slots.reshape(-1)), 0, len(members), length)
        return DecodeGroup(None if consecutive else torch.tensor(rows), rows[0], keys, mask)

    def _slots(self, seqs: list[int], counts: Ints, lane: Ints) -> Ints:
        """Return the slots of the last ``counts[i]`` keys of each sequence i, in order, int32 [n, length of lane].

        The entries of row i from ``counts[i]`` on are arbitrary.
        """
        block_size = self.metadata.block_size
        table = self.table[seqs]
        if self.window is None:
            starts = table[:, : -(-len(lane) // block_size), None] * block_size
            return (starts + _lane(block_size)).reshape(len(seqs), -1)[:, : len(lane)]
        begin = np.array([self.kv_lens[seq] for seq in seqs], np.int32)[:, None] - counts
        positions = begin + np.minimum(lane, counts - 1)
        return np.take_along_axis(table, positions // block_size, 1) * block_size + positions % block_size

    def _keys(self, seq: int, begin: int, end: int) -> KeyRange:
        """Return the slots of positions [begin, end) of one sequence."""
        block_size = self.metadata.block_size
        first_block = begin // block_size
        blocks = self.table[seq, first_block : -(-end // block_size)]
        offset = begin - first_block * block_size
        if (blocks[1:] - blocks[:-1] == 1).all():
            return KeyRange(None, int(blocks[0]) * block_size + offset, 1, end - begin)
        slots = (blocks[:, None] * block_size + _lane(block_size)).reshape(-1)
        return KeyRange(torch.from_numpy(slots[offset : offset + end - begin]), 0, 1, end - begin)

    def _band(self, max_query_len: int, max_kv_len: int) -> torch.Tensor:
        """Return an additive float32 mask [R, max_kv_len + R], of which every piece's mask is a slice.

        Column ``max_kv_len + t`` is for the key whose position is t after that of row 0 (t may be negative). Row r
        attends to keys with t <= r and, with a window, t > r - window.
        """
        rows = min(max_query_len, PIECE_ROWS)
        mask = torch.zeros((rows, max_kv_len + rows))
        hidden = torch.full((rows, rows), float("-inf")).triu_(1)
        mask[:, max_kv_len:] = hidden
        if self.window is not None:
            distance = torch.arange(-max_kv_len, rows) - torch.arange(rows)[:, None]
            mask.masked_fill_(distance <= -self.window, float("-inf"))
        return mask

    def _uncut_chunk(self, seq: int, first_row: int) -> Chunk:
        """Return a chunk in which every row attends to every key."""
        kv_len = self.kv_lens[seq]
        piece = ChunkPiece(first_row, first_row + self.query_lens[seq], 0, kv_len, None)
        return Chunk(self._keys(seq, 0, kv_len), (piece,))

    def _chunk(self, seq: int, first_row: int, band: torch.Tensor) -> Chunk:
        query_len, kv_len = self.query_lens[seq], self.kv_lens[seq]
        context = kv_len - query_len
        origin = band.shape[1] - band.shape[0]

        def first_key(position: int) -> int:
            return 0 if self.window is None else max(0, position - self.window + 1)

        base = first_key(context)
        pieces = []
        for begin in range(0, query_len, PIECE_ROWS):
            end = min(begin + PIECE_ROWS, query_len)
            position = context + begin
            low, high = first_key(position), context + end
            mask = band[: end - begin, origin + low - position : origin + high - position]
            pieces.append(ChunkPiece(first_row + begin, first_row + end, low - base, high - base, mask))
        return Chunk(self._keys(seq, base, kv_len), tuple(pieces))


@cache
def _lane(block_size: int) -> Ints:
    """Return int32 0, 1, ... block_size - 1."""
    return np.arange(block_size, dtype=np.int32)


def _row_of(member: tuple[int, int, int]) -> int:
    return member[1]


def _similar(decodes: list[tuple[int, int, int]], token_bytes: int, itemsize: int) -> list[list[tuple[int, int, int]]]:
    """Divide decodes into groups of similar length, with little padding and gathers that fit into the CPU cache."""
    groups: list[list[tuple[int, int, int]]] = []
    longest = waste = 0
    for member in sorted(decodes, reverse=True):
        padding = (longest - member[0]) * 2 * token_bytes // itemsize
        full = groups and (len(groups[-1]) + 1) * longest * token_bytes > GROUP_BYTES
        if not groups or full or waste + padding > GROUP_WASTE:
            groups.append([])
            longest, waste, padding = member[0], 0, 0
        groups[-1].append(member)
        waste += padding
    return groups
