"""Tokens, positions and KV slots of a step, derived from the worker's state of each request.

Invariants:
    - Decodes come first in the flattened batch, then chunks of one token, then longer chunks, since attention has a
      fast path for the one-token sequences at the beginning. With KV parallelism, sequences whose newest tokens this
      rank holds come before the others, and each of the two parts has this order.
    - State is kept in arrays by slot and updated when a step is submitted, so that the next step can be submitted
      before this step's tokens are available on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vajra_kernels import AttentionMetadata
from vajra_kernels.cpu_plan import CpuPlans
from vajra_kernels.metadata import StepMemo
from vajra_py.engine.compute.interface import Chunk, StepInput, TableUpdate
from vajra_py.engine.compute.model.kv_groups import Exchange, GroupLinks, Metadata, SplitMetadata
from vajra_py.engine.compute.transfer import all_to_device, to_device
from vajra_py.errors import ExecutorError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HostBatch:
    """One step's batch on the host.

    Attributes:
        slots: slot of every sequence, in the order of the flattened batch.
        num_decodes: number of sequences that continue from their last sampled token.
        token_ids: tokens of all chunks, concatenated.
        query_lens: number of tokens to compute, for every sequence.
        kv_lens: KV length of every sequence including this step's tokens; with KV parallelism, of the part held by this
            rank.
        positions: position of every token.
        write_slots: KV slot (block * block_size + offset) of every token whose K and V are written on this rank.
        table: block tables, int32 [sequences, blocks of the longest].
        sampled: indices of the sequences to sample from, in the step's order (decodes, then chunks); with drafts, in
            the order of their rows.
        num_drafts: by sequence index, number of drafts at the end of the sequence's tokens; tokens are sampled from
            these rows too.
        followers: by sequence index, the tokens to score; see `Chunk.followers`.
        num_newest: number of sequences whose newest tokens are held by this rank; all without KV parallelism.
        groups: with KV parallelism, the groups that compute each sequence.
        max_kv_len: KV length of the longest sequence; with KV parallelism, over all groups.
    """

    slots: Ints
    num_decodes: int
    token_ids: Ints
    query_lens: Ints
    kv_lens: Ints
    positions: Ints
    write_slots: Ints
    table: npt.NDArray[np.int32]
    sampled: Ints
    num_drafts: Mapping[int, int]
    followers: Mapping[int, Sequence[int]]
    num_newest: int
    groups: Sequence[Sequence[int]]
    max_kv_len: int

    @property
    def sampled_slots(self) -> Ints:
        """Slot of each sampled row."""
        if self.is_all_decodes:
            return self.slots
        slots = self.slots[self.sampled]
        return np.repeat(slots, self._rows_each) if self.num_drafts else slots

    @property
    def sampled_rows(self) -> Ints:
        """Rows of the flattened batch that are sampled."""
        last = np.cumsum(self.query_lens)[self.sampled] - 1
        return np.repeat(last, self._rows_each) - self._rows_behind if self.num_drafts else last

    @property
    def draft_offsets(self) -> Ints | None:
        """For each sampled row, the number of preceding drafts of the same sequence; None without drafts."""
        return np.repeat(self._rows_each, self._rows_each) - 1 - self._rows_behind if self.num_drafts else None

    @property
    def _rows_each(self) -> Ints:
        """Number of sampled rows of each sampled sequence."""
        return np.array([1 + self.num_drafts.get(one, 0) for one in self.sampled.tolist()], np.int64)

    @property
    def _rows_behind(self) -> Ints:
        """For each sampled row, the number of later sampled rows of the same sequence."""
        return np.concatenate([np.arange(count - 1, -1, -1) for count in self._rows_each.tolist()])

    @property
    def is_all_decodes(self) -> bool:
        """True if every sequence continues from its last sampled token, so that all rows are sampled in order."""
        return self.num_decodes == len(self.slots)


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """One step's tensors on the device, for T tokens and R sampled rows.

    Attributes:
        token_ids: token of each row, int64 [T].
        positions: position of each row, int64 [T].
        rows: indices of the sampled rows in the flattened batch, int64 [R].
        slots: slot of each sampled row, int64 [R].
        metadata: inputs of the step's attention.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    metadata: Metadata


class BatchState:
    """State of a worker's slots: block tables, progress, and the last sampled tokens (on the device)."""

    __slots__ = (
        "_device",
        "_groups",
        "_limits",
        "block_size",
        "last_tokens",
        "max_model_len",
        "num_computed",
        "tables",
    )

    def __init__(
        self,
        max_requests: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        groups: GroupLinks | None = None,
    ) -> None:
        self.block_size = block_size
        self._groups = groups
        self._device = device
        self._limits = (max_requests, max_model_len)
        self.max_model_len = max_model_len
        self.tables: npt.NDArray[np.int32] = np.zeros((max_requests, -(-max_model_len // block_size)), np.int32)
        self.num_computed: Ints = np.zeros(max_requests, np.int64)
        # Padding rows of a CUDA graph read and write the last entry, which belongs to no slot.
        self.last_tokens = torch.zeros(max_requests + 1, dtype=torch.int64, device=device)

    def update_tables(self, updates: Sequence[TableUpdate], num_blocks: int) -> None:
        """Apply changed block tables. Raises `ExecutorError` for a slot, length or block id out of range."""
        width = self.tables.shape[1]
        for update in updates:
            end = update.start + len(update.block_ids)
            if end > width or not 0 <= update.slot < self._limits[0]:
                raise ExecutorError(
                    f"block table of slot {update.slot}: entries up to {end}. "
                    f"There are {self._limits[0]} slots of {width} blocks."
                )
            row = self.tables[update.slot, update.start : end]
            row[:] = update.block_ids
            if row.size and not 0 <= row.min() <= row.max() < num_blocks:
                raise ExecutorError(
                    f"block table of slot {update.slot}: there is no such block (ids {row.min()} to {row.max()}). "
                    f"There are {num_blocks} blocks."
                )

    def undo(self, slots: Sequence[int], last_tokens: torch.Tensor) -> None:
        """Undo one decode of each of these slots; `last_tokens` is a copy of `self.last_tokens` made before these
        decodes.
        """
        undone = np.array(slots, np.int64)
        self.num_computed[undone] -= 1
        places = to_device(undone, self._device)
        self.last_tokens.index_copy_(0, places, last_tokens.index_select(0, places))

    def take(self, step: StepInput) -> HostBatch:
        """Return the step's batch on the host; advance its requests' progress as if the step were computed already."""
        order = sorted(range(len(step.chunks)), key=lambda index: self._place(step.chunks[index]))
        chunks = [step.chunks[index] for index in order]
        listed = [*step.decodes, *(chunk.slot for chunk in chunks)]
        self._check_slots(listed)
        slots = np.array(listed, np.int64)
        query_lens = np.ones(len(slots), np.int64)
        num_decodes = len(step.decodes)
        first = self.num_computed[slots]
        if chunks:
            query_lens[num_decodes:] = [len(chunk.token_ids) for chunk in chunks]
            first[num_decodes:] = [chunk.num_computed for chunk in chunks]
        kv_lens = first + query_lens
        longest = self._checked_longest(slots, query_lens, kv_lens)
        token_ids = _joined([chunk.token_ids for chunk in chunks])
        self.num_computed[slots] = kv_lens
        sampled = [(order[place], num_decodes + place) for place, chunk in enumerate(chunks) if chunk.samples]
        num_drafts = {num_decodes + place: one.num_drafts for place, one in enumerate(chunks) if one.num_drafts}
        # Without drafts, sampled rows are sorted into the order of `step.chunks`. With drafts they stay in row order:
        # every row may be sampled, and the forward pass then expects all rows in row order.
        if not num_drafts:
            sampled.sort()
        positions, held, num_newest, begins = kv_lens - 1, kv_lens, len(slots), first
        if self._groups is not None:
            size, own = self._groups.group_tokens, self._groups.own
            begins = np.array([one.groups.index(own) * size for one in chunks], np.int64)
            held = np.minimum(kv_lens - begins, size)
            num_newest = sum(one.groups[-1] == own for one in chunks)
        longest_held = longest if self._groups is None else int(held.max())
        table = self.tables[slots, : -(-longest_held // self.block_size)]
        sequence_of = np.arange(len(slots))
        if chunks:
            sequence_of = np.repeat(sequence_of, query_lens)
            positions = np.arange(len(sequence_of)) + (kv_lens - np.cumsum(query_lens))[sequence_of]
        places, writers = positions, sequence_of
        if self._groups is not None:
            writers = sequence_of[sequence_of < num_newest]
            places = positions[: len(writers)] - begins[writers]
        blocks = table[writers, places // self.block_size].astype(np.int64)
        return HostBatch(
            slots=slots,
            num_decodes=num_decodes,
            token_ids=token_ids,
            query_lens=query_lens,
            kv_lens=held,
            positions=positions,
            write_slots=blocks * self.block_size + places % self.block_size,
            table=table,
            num_drafts=num_drafts,
            sampled=np.array([*range(num_decodes), *(sequence for _, sequence in sampled)], np.int64),
            followers={num_decodes + place: one.followers for place, one in enumerate(chunks) if one.followers},
            num_newest=num_newest,
            groups=[one.groups for one in chunks] if self._groups is not None else (),
            max_kv_len=longest,
        )

    def _place(self, chunk: Chunk) -> tuple[bool, bool]:
        """Return a chunk's sort key.

        Chunks of requests whose newest tokens this rank holds precede the others; in both parts, chunks of one token
        come first.
        """
        is_earlier = self._groups is not None and chunk.groups[-1] != self._groups.own
        return is_earlier, len(chunk.token_ids) > 1

    def _check_slots(self, slots: Sequence[int]) -> None:
        if not slots:
            raise ExecutorError("step: there is nothing to compute. A step has a decode or a chunk.")
        if not 0 <= min(slots) <= max(slots) < self._limits[0] or len(set(slots)) != len(slots):
            raise ExecutorError(f"step: slots are not distinct ones of 0 to {self._limits[0] - 1} ({slots}).")

    def _checked_longest(self, slots: Ints, query_lens: Ints, kv_lens: Ints) -> int:
        """Return the KV length of the longest sequence.

        Raises `ExecutorError` if a sequence is too long or has no tokens to compute.
        """
        longest, found = self._limits[1], int(kv_lens.max())
        if query_lens.min() < 1 or (kv_lens - query_lens).min() < 0 or found > longest:
            worst = int(np.argmax(kv_lens)) if found > longest else int(np.argmin(query_lens))
            raise ExecutorError(
                f"step: slot {slots[worst]} computes {query_lens[worst]} tokens up to position {kv_lens[worst]}. "
                f"A chunk has 1 token or more, within the {longest} of the longest sequence."
            )
        return found

    def tensors(self, batch: HostBatch) -> BatchInputs:
        """Copy the batch to the device."""
        if batch.is_all_decodes:
            longs = [batch.slots, batch.positions, batch.write_slots, batch.sampled]
            sampled_slots, positions, write_slots, rows = all_to_device(longs, self._device)
            token_ids = self.last_tokens[sampled_slots]
        else:
            longs = [
                batch.slots[: batch.num_decodes],
                batch.token_ids,
                batch.positions,
                batch.write_slots,
                batch.sampled_rows,
                batch.sampled_slots,
            ]
            last, given, positions, write_slots, rows, sampled_slots = all_to_device(longs, self._device)
            token_ids = given if not batch.num_decodes else torch.cat((self.last_tokens[last], given))
        metadata: Metadata
        if any(len(one) > 1 for one in batch.groups):
            metadata = self._split(batch, write_slots)
        else:
            metadata = self._metadata(batch, slice(0, len(batch.slots)), write_slots)
        return BatchInputs(token_ids, positions, rows, sampled_slots, metadata)

    def _metadata(
        self, batch: HostBatch, sequences: slice, write_slots: torch.Tensor, causal: bool = True
    ) -> AttentionMetadata:
        query_lens, kv_lens, table = batch.query_lens[sequences], batch.kv_lens[sequences], batch.table[sequences]
        query_start = np.zeros(len(query_lens) + 1, np.int32)
        query_start[1:] = np.cumsum(query_lens)
        ints = [query_start, kv_lens.astype(np.int32), table.reshape(-1)]
        starts, lens, blocks = all_to_device(ints, self._device)
        num_tokens, count = int(query_start[-1]), len(query_lens)
        kv_list = tuple(kv_lens.tolist())
        return AttentionMetadata(
            query_start=starts,
            kv_lens=lens,
            block_table=blocks.view(table.shape),
            slot_mapping=write_slots,
            block_size=self.block_size,
            num_decodes=count if num_tokens == count else int(np.argmin(query_lens == 1)),
            num_query_tokens=num_tokens,
            max_query_len=int(query_lens.max()),
            max_kv_len=max(kv_list),
            num_kv_tokens=sum(kv_list),
            causal=causal,
            memo=StepMemo(CpuPlans(tuple(query_lens.tolist()), kv_list)),
        )

    def _split(self, batch: HostBatch, write_slots: torch.Tensor) -> SplitMetadata:
        """Return the attention metadata of a batch with sequences that other groups compute too."""
        assert self._groups is not None
        count, newest = len(batch.slots), batch.num_newest
        ends = np.cumsum(batch.query_lens)
        # Both groups of an exchange must list the shared sequences in the same order. A request has the same slot in
        # all groups, so the sequences are sorted by slot.
        shared = sorted((k for k in range(count) if len(batch.groups[k]) > 1), key=lambda k: int(batch.slots[k]))
        rows = {k: np.arange(ends[k] - batch.query_lens[k], ends[k]) for k in shared}
        first = dict(zip(shared, np.cumsum([0, *(len(rows[k]) for k in shared)]).tolist(), strict=False))
        others = sorted({group for k in shared for group in batch.groups[k]} - {self._groups.own})
        exchanges = []
        for group in others:
            theirs = [k for k in shared if group in batch.groups[k]]
            places = [first[k] + np.arange(len(rows[k])) for k in theirs]
            exchanged, at = all_to_device(
                [np.concatenate([rows[k] for k in theirs]), np.concatenate(places)], self._device
            )
            exchanges.append(Exchange(group, self._groups.ranks[group], exchanged, at))
        (merged,) = all_to_device([np.concatenate([rows[k] for k in shared])], self._device)
        nowhere = write_slots[:0]
        return SplitMetadata(
            self._metadata(batch, slice(0, newest), write_slots) if newest else None,
            self._metadata(batch, slice(newest, count), nowhere, causal=False) if newest < count else None,
            merged,
            exchanges,
            sum(group < self._groups.own for group in others),
            batch.max_kv_len,
        )


def _joined(token_ids: Sequence[Sequence[int]]) -> Ints:
    joined = np.empty(sum(map(len, token_ids)), np.int64)
    at = 0
    for ids in token_ids:
        joined[at : at + len(ids)] = ids
        at += len(ids)
    return joined
