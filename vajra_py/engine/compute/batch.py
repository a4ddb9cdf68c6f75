"""Tokens, positions and KV slots of a step, derived from what the worker remembers of each request.

Invariants:
    - Decodes come first in the flattened row, then chunks of one token, then longer ones: attention's fast path reads
      the leading run of single tokens.
    - What is remembered lives in arrays by slot and is updated when a step is taken in, so that the next step can be
      taken in before this one's tokens are known on the host.
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
from vajra_py.engine.compute.interface import StepInput, TableUpdate
from vajra_py.engine.compute.transfer import all_to_device
from vajra_py.errors import ExecutorError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HostBatch:
    """One step's batch on the host.

    Attributes:
        slots: of every sequence: decodes, then chunks of one token, then longer ones.
        num_decodes: how many of them go on from the token that was sampled last.
        token_ids: of the chunks, one after another.
        query_lens: of every sequence.
        kv_lens: of every sequence, this step's tokens included.
        positions: of every token.
        write_slots: where every token's K and V go (block * block_size + offset).
        table: int32 [sequences, blocks of the longest].
        sampled: the sequences that are sampled, in the order in which the step lists them (decodes, then chunks).
        followers: by sequence, the tokens to score by the logits of its first tokens; only of sequences that have any.
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
    followers: Mapping[int, Sequence[int]]

    @property
    def sampled_slots(self) -> Ints:
        """The slot of each sampled row."""
        return self.slots[self.sampled]


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """One step's tensors.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T].
        rows: int64 [R], rows of the flattened batch that are sampled.
        slots: int64 [R], the slot of each of them.
        metadata: of the step's attention.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    metadata: AttentionMetadata


class BatchState:
    """What a worker remembers of its slots: block tables, progress, and the last sampled tokens (on the device)."""

    __slots__ = ("_device", "_limits", "block_size", "last_tokens", "max_model_len", "num_computed", "tables")

    def __init__(self, max_requests: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self._device = device
        self._limits = (max_requests, max_model_len)
        self.max_model_len = max_model_len
        self.tables: npt.NDArray[np.int32] = np.zeros((max_requests, -(-max_model_len // block_size)), np.int32)
        self.num_computed: Ints = np.zeros(max_requests, np.int64)
        # One more than there are slots: what padding rows of a graph read and write.
        self.last_tokens = torch.zeros(max_requests + 1, dtype=torch.int64, device=device)

    def update_tables(self, updates: Sequence[TableUpdate], num_blocks: int) -> None:
        """Take in changed block tables."""
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
        """Take back a step of decodes of these slots; `last_tokens` is a copy from before it."""
        self.num_computed[list(slots)] -= 1
        self.last_tokens.copy_(last_tokens)

    def take(self, step: StepInput) -> HostBatch:
        """The step's batch; progress is counted on as if it were computed."""
        order = sorted(range(len(step.chunks)), key=lambda index: len(step.chunks[index].token_ids) > 1)
        chunks = [step.chunks[index] for index in order]
        slots = np.array([*step.decodes, *(chunk.slot for chunk in chunks)], np.int64)
        self._check_slots(slots)
        query_lens = np.ones(len(slots), np.int64)
        num_decodes = len(step.decodes)
        query_lens[num_decodes:] = [len(chunk.token_ids) for chunk in chunks]
        first = self.num_computed[slots]
        first[num_decodes:] = [chunk.num_computed for chunk in chunks]
        kv_lens = first + query_lens
        self._check(slots, query_lens, kv_lens)
        token_ids = _joined([chunk.token_ids for chunk in chunks])
        self.num_computed[slots] = kv_lens
        sampled = [(order[place], num_decodes + place) for place, chunk in enumerate(chunks) if chunk.samples]
        sampled.sort()
        positions, table = kv_lens - 1, self.tables[slots, : -(-int(kv_lens.max()) // self.block_size)]
        sequence_of = np.arange(len(slots))
        if chunks:
            sequence_of = np.repeat(sequence_of, query_lens)
            positions = np.arange(len(sequence_of)) + (kv_lens - np.cumsum(query_lens))[sequence_of]
        blocks = table[sequence_of, positions // self.block_size].astype(np.int64)
        return HostBatch(
            slots=slots,
            num_decodes=num_decodes,
            token_ids=token_ids,
            query_lens=query_lens,
            kv_lens=kv_lens,
            positions=positions,
            write_slots=blocks * self.block_size + positions % self.block_size,
            table=table,
            sampled=np.array([*range(num_decodes), *(sequence for _, sequence in sampled)], np.int64),
            followers={num_decodes + place: one.followers for place, one in enumerate(chunks) if one.followers},
        )

    def _check_slots(self, slots: Ints) -> None:
        if not slots.size:
            raise ExecutorError("step: there is nothing to compute. A step has a decode or a chunk.")
        if not 0 <= slots.min() <= slots.max() < self._limits[0] or len(np.unique(slots)) != len(slots):
            raise ExecutorError(f"step: slots are not distinct ones of 0 to {self._limits[0] - 1} ({slots.tolist()}).")

    def _check(self, slots: Ints, query_lens: Ints, kv_lens: Ints) -> None:
        longest = self._limits[1]
        if query_lens.min() < 1 or (kv_lens - query_lens).min() < 0 or kv_lens.max() > longest:
            worst = int(np.argmax(kv_lens)) if kv_lens.max() > longest else int(np.argmin(query_lens))
            raise ExecutorError(
                f"step: slot {slots[worst]} computes {query_lens[worst]} tokens up to position {kv_lens[worst]}. "
                f"A chunk has 1 token or more, within the {longest} of the longest sequence."
            )

    def tensors(self, batch: HostBatch) -> BatchInputs:
        """The batch on the device."""
        ends = np.cumsum(batch.query_lens)
        query_start = np.zeros(len(ends) + 1, np.int32)
        query_start[1:] = ends
        longs = [
            batch.slots[: batch.num_decodes],
            batch.token_ids,
            batch.positions,
            batch.write_slots,
            ends[batch.sampled] - 1,
            batch.sampled_slots,
        ]
        last, given, positions, write_slots, rows, sampled_slots = all_to_device(longs, self._device)
        ints = [query_start, batch.kv_lens.astype(np.int32), batch.table.reshape(-1)]
        starts, kv_lens, table = all_to_device(ints, self._device)
        token_ids = given if not batch.num_decodes else torch.cat((self.last_tokens[last], given))
        is_single = batch.query_lens == 1
        kv_list = tuple(batch.kv_lens.tolist())
        metadata = AttentionMetadata(
            query_start=starts,
            kv_lens=kv_lens,
            block_table=table.view(batch.table.shape),
            slot_mapping=write_slots,
            block_size=self.block_size,
            num_decodes=len(is_single) if is_single.all() else int(np.argmin(is_single)),
            num_query_tokens=len(batch.positions),
            max_query_len=int(batch.query_lens.max()),
            max_kv_len=max(kv_list),
            num_kv_tokens=sum(kv_list),
            memo=StepMemo(CpuPlans(tuple(batch.query_lens.tolist()), kv_list)),
        )
        return BatchInputs(token_ids, positions, rows, sampled_slots, metadata)


def _joined(token_ids: Sequence[Sequence[int]]) -> Ints:
    joined = np.empty(sum(map(len, token_ids)), np.int64)
    at = 0
    for ids in token_ids:
        joined[at : at + len(ids)] = ids
        at += len(ids)
    return joined
