"""Which tokens, positions and KV slots does a step compute, given what the worker remembers?

Invariants:
    - Decodes come first in the flattened row, then chunks of one token, then longer ones: attention's fast path reads
      the leading run of single tokens.
    - What is remembered lives in arrays by slot and is updated when a step is taken in, so that the next step can be
      taken in before this one's tokens are known on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vajra_kernels import AttentionMetadata
from vajra_kernels.cpu_plan import CpuPlans
from vajra_kernels.metadata import StepMemo
from vajra_py.engine.compute.interface import Chunk, StepInput, TableUpdate
from vajra_py.errors import ExecutorError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """One step's tensors.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T].
        rows: int64 [R], rows of the flattened batch that are sampled.
        slots: the slot of each sampled row, in the order in which the step lists them (decodes, then chunks).
        slots_on_device: int64 [R], the same.
        metadata: of the step's attention.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    slots: Ints
    slots_on_device: torch.Tensor
    metadata: AttentionMetadata


class BatchState:
    """What a worker remembers of its slots: block tables, progress, and the last sampled tokens (on the device)."""

    __slots__ = ("_device", "_limits", "block_size", "last_tokens", "num_computed", "tables")

    def __init__(self, max_requests: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self._device = device
        self._limits = (max_requests, max_model_len)
        self.tables: npt.NDArray[np.int32] = np.zeros((max_requests, -(-max_model_len // block_size)), np.int32)
        self.num_computed: Ints = np.zeros(max_requests, np.int64)
        self.last_tokens = torch.zeros(max_requests, dtype=torch.int64, device=device)

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

    def take(self, step: StepInput) -> BatchInputs:
        """The step's tensors; progress is counted on as if it were computed."""
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
        self.num_computed[slots] = kv_lens
        ends = np.cumsum(query_lens)
        sampled = [(order[place], num_decodes + place) for place, chunk in enumerate(chunks) if chunk.samples]
        sampled.sort()
        sequences = np.array([*range(num_decodes), *(sequence for _, sequence in sampled)], np.int64)
        return self._tensors(chunks, (slots, query_lens, kv_lens), ends, sequences)

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

    def _tensors(
        self, chunks: Sequence[Chunk], lens: tuple[Ints, Ints, Ints], ends: Ints, sequences: Ints
    ) -> BatchInputs:
        slots, query_lens, kv_lens = lens
        block_size, num_tokens = self.block_size, int(ends[-1])
        num_decodes = len(slots) - len(chunks)
        if num_tokens == len(slots):
            sequence_of = np.arange(num_tokens)
            positions = kv_lens - 1
        else:
            sequence_of = np.repeat(np.arange(len(slots)), query_lens)
            positions = np.arange(num_tokens) + (kv_lens - ends)[sequence_of]
        table = self.tables[slots, : -(-int(kv_lens.max()) // block_size)]
        mapping = table[sequence_of, positions // block_size].astype(np.int64) * block_size + positions % block_size
        query_start = np.zeros(len(slots) + 1, np.int64)
        query_start[1:] = ends
        ids = np.empty(num_tokens - num_decodes, np.int64)
        at = 0
        for chunk in chunks:
            ids[at : at + len(chunk.token_ids)] = chunk.token_ids
            at += len(chunk.token_ids)
        wide = self._to_device([slots[:num_decodes], ids, positions, mapping, ends[sequences] - 1, slots[sequences]])
        narrow = self._to_device([query_start.astype(np.int32), kv_lens.astype(np.int32), table.reshape(-1)])
        token_ids = wide[1] if not num_decodes else torch.cat((self.last_tokens[wide[0]], wide[1]))
        num_singles = int(np.argmax(query_lens > 1)) if num_tokens > len(slots) else len(slots)
        kv_list = tuple(kv_lens.tolist())
        metadata = AttentionMetadata(
            query_start=narrow[0],
            kv_lens=narrow[1],
            block_table=narrow[2].view(table.shape),
            slot_mapping=wide[3],
            block_size=block_size,
            num_decodes=num_singles,
            num_query_tokens=num_tokens,
            max_query_len=int(query_lens.max()),
            max_kv_len=max(kv_list),
            num_kv_tokens=sum(kv_list),
            memo=StepMemo(CpuPlans(tuple(query_lens.tolist()), kv_list)),
        )
        return BatchInputs(token_ids, wide[2], wide[4], slots[sequences], wide[5], metadata)

    def _to_device(
        self, arrays: Sequence[npt.NDArray[np.int64]] | Sequence[npt.NDArray[np.int32]]
    ) -> list[torch.Tensor]:
        """One transfer for all of them (on the CPU: none)."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        joined = torch.from_numpy(np.concatenate(arrays)).pin_memory()
        return list(torch.split(joined.to(self._device, non_blocking=True), [array.size for array in arrays]))
