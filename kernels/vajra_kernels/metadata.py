"""Rows, lengths and KV blocks of one step's attention.

The metadata is built once per step and shared by all layers.

Invariants:
    - The ``query_start[i+1] - query_start[i]`` new tokens of sequence i are at the last positions below ``kv_lens[i]``:
      ``kv_lens`` includes the step's own tokens, whose K and V are written before the attention runs.
    - The first ``num_decodes`` sequences have one query token each.
    - Host-side lengths may be upper bounds, which suffice to choose a launch; kernels read the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from vajra_kernels.cpu_plan import CpuPlans


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's ragged batch.

    Attributes:
        query_start: int32 [B + 1], first row of each sequence in the flattened query, followed by the end.
        kv_lens: int32 [B], KV length of each sequence including this step's tokens; 0 for a padding row of a CUDA
            graph.
        block_table: int32 [B, max_blocks]; entries past a sequence's last block are not read as KV.
        slot_mapping: int64 [T], slot of each token's K and V (block * block_size + offset), or -1 if they are not
            written.
        block_size: tokens per KV block.
        num_decodes: number of leading sequences with exactly one query token.
        num_query_tokens: number of query tokens, T.
        max_query_len: length of the longest query, or an upper bound.
        max_kv_len: length of the longest KV sequence, or an upper bound.
        num_kv_tokens: sum of the KV lengths, or an upper bound.
        causal: False if the blocks hold an earlier part of the sequences (KV parallelism): every query then attends to
            all ``kv_lens`` positions, and windows are not allowed.
        memo: values derived from the other attributes once per step.
    """

    query_start: torch.Tensor
    kv_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int
    num_decodes: int
    num_query_tokens: int
    max_query_len: int
    max_kv_len: int
    num_kv_tokens: int
    causal: bool = True
    memo: StepMemo = field(default_factory=lambda: StepMemo(), compare=False, repr=False)

    @property
    def num_seqs(self) -> int:
        """Number of sequences, B."""
        return self.kv_lens.shape[0]

    @property
    def knows_lengths(self) -> bool:
        """True if every sequence's exact length is known on the host, instead of bounds only."""
        return self.memo.cpu_plans.kv_lens is not None

    def parts(self) -> tuple[AttentionMetadata, AttentionMetadata]:
        """Return (the leading decodes, the other sequences): two batches that share this batch's memory, created once.

        The second batch's ``query_start`` counts rows of the whole batch. If the lengths are not known on the host,
        both batches have the whole batch's ``max_kv_len`` and ``num_kv_tokens`` as upper bounds.
        """
        if self.memo.parts is None:
            n = self.num_decodes
            self.memo.parts = (self._slice(0, n), self._slice(n, self.num_seqs))
        return self.memo.parts

    def _slice(self, begin: int, end: int) -> AttentionMetadata:
        is_decodes = begin == 0
        host = self.memo.cpu_plans.kv_lens
        lens = host[begin:end] if host is not None else None
        tokens = slice(0, self.num_decodes) if is_decodes else slice(self.num_decodes, None)
        return AttentionMetadata(
            query_start=self.query_start[begin : end + 1],
            kv_lens=self.kv_lens[begin:end],
            block_table=self.block_table[begin:end],
            slot_mapping=self.slot_mapping[tokens],
            block_size=self.block_size,
            num_decodes=self.num_decodes if is_decodes else 0,
            num_query_tokens=self.num_decodes if is_decodes else self.num_query_tokens - self.num_decodes,
            max_query_len=1 if is_decodes else self.max_query_len,
            max_kv_len=self.max_kv_len if lens is None else max(lens, default=0),
            num_kv_tokens=self.num_kv_tokens if lens is None else sum(lens),
            causal=self.causal,
            memo=StepMemo(CpuPlans(None, lens)) if is_decodes else StepMemo(),
        )


@dataclass(slots=True)
class StepMemo:
    """Values computed once per step for all layers: plans of both backends, and the two parts of a mixed batch."""

    cpu_plans: CpuPlans = field(default_factory=CpuPlans)
    decode_plans: dict[tuple[int, int, int | None], torch.Tensor] = field(default_factory=dict)
    """Decode plans by (programs per piece, KV positions per tile, window). A caller that changes the contents of the
    metadata's tensors must clear these plans."""
    parts: tuple[AttentionMetadata, AttentionMetadata] | None = None


def build_metadata(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]] | torch.Tensor,
    block_size: int,
    device: torch.device | str = "cpu",
    causal: bool = True,
) -> AttentionMetadata:
    """Return the metadata of one step, built from host-side lengths and block ids.

    Args:
        query_lens: number of new tokens per sequence (>= 0). Decodes (1 token) should come first: on a GPU, only
            leading ones can use the split-KV decode kernel.
        kv_lens: KV length per sequence including the new tokens (>= its query length). One new token with KV length 0
            is a padding row, which is not written (slot -1) and attends to nothing.
        block_tables: KV block ids per sequence, at least ceil(kv_len / block_size) of them; lists, or a padded integer
            tensor [B, max_blocks] on the host or on ``device`` (an int32 tensor on ``device`` is not copied).
        block_size: tokens per KV block.
        device: device of the tensors.
        causal: see ``AttentionMetadata``. When False, KV lengths exclude the new tokens, which are not written.

    Raises:
        ValueError: lengths and tables are inconsistent.
    """
    _check_lengths(query_lens, kv_lens, block_tables, block_size, causal)
    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    table = _table_tensor(block_tables)
    query_start = torch.tensor(starts, dtype=torch.int32).to(table.device, non_blocking=True)
    lens = torch.tensor(list(kv_lens), dtype=torch.int32).to(table.device, non_blocking=True)
    num_decodes = next((i for i, length in enumerate(query_lens) if length != 1), len(query_lens))
    if not causal:
        slots = torch.full((starts[-1],), -1, device=table.device)
    elif num_decodes == len(query_lens):
        slots = _slots_at(lens - 1, torch.arange(num_decodes, device=table.device), table, block_size)
    else:
        slots = token_slots(query_start, lens, table, block_size, starts[-1])
    return AttentionMetadata(
        query_start=query_start.to(device, non_blocking=True),
        kv_lens=lens.to(device, non_blocking=True),
        block_table=table.to(device, non_blocking=True),
        slot_mapping=slots.to(device, non_blocking=True),
        block_size=block_size,
        num_decodes=num_decodes,
        num_query_tokens=starts[-1],
        max_query_len=max(query_lens, default=0),
        max_kv_len=max(kv_lens, default=0),
        num_kv_tokens=sum(kv_lens),
        causal=causal,
        memo=StepMemo(CpuPlans(tuple(query_lens), tuple(kv_lens))),
    )


def token_slots(
    query_start: torch.Tensor, kv_lens: torch.Tensor, block_table: torch.Tensor, block_size: int, num_tokens: int
) -> torch.Tensor:
    """Return the cache slot of each of the step's tokens, int64 [num_tokens]; all tensors are on one device."""
    query_lens = query_start.diff()
    seq = torch.repeat_interleave(query_lens.long(), output_size=num_tokens)
    first = (kv_lens - query_lens) - query_start[:-1]
    positions = torch.arange(num_tokens, device=query_start.device, dtype=torch.int32) + first[seq]
    return _slots_at(positions, seq, block_table, block_size)


def _slots_at(positions: torch.Tensor, seq: torch.Tensor, block_table: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return the slot of each position ``positions[i]`` of sequence ``seq[i]``; -1 for a negative position."""
    blocks = block_table[seq, torch.div(positions, block_size, rounding_mode="floor")]
    return torch.where(positions < 0, -1, blocks.long() * block_size + positions % block_size)


def _table_tensor(block_tables: Sequence[Sequence[int]] | torch.Tensor) -> torch.Tensor:
    if isinstance(block_tables, torch.Tensor):
        return block_tables.to(torch.int32)
    width = max((len(blocks) for blocks in block_tables), default=0) or 1
    rows = [list(blocks) + [0] * (width - len(blocks)) for blocks in block_tables]
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), width)


def _check_lengths(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]] | torch.Tensor,
    block_size: int,
    causal: bool,
) -> None:
    if block_size < 1:
        raise ValueError(f"attention metadata: block_size is not positive (got {block_size}). Use 16 to 128.")
    if not len(query_lens) == len(kv_lens) == len(block_tables):
        raise ValueError(
            f"attention metadata: {len(query_lens)} query lengths, {len(kv_lens)} KV lengths and {len(block_tables)} "
            "block tables. Give one of each per sequence."
        )
    padded = block_tables.shape[1] if isinstance(block_tables, torch.Tensor) else None
    for i, (num_new, kv_len) in enumerate(zip(query_lens, kv_lens, strict=True)):
        most_new = kv_len if causal and (kv_len, num_new) != (0, 1) else num_new
        if not 0 <= num_new <= most_new:
            raise ValueError(
                f"attention metadata: sequence {i} has {num_new} new tokens and KV length {kv_len}. "
                "The KV length counts the new tokens too (only a padding row has 1 and 0)."
            )
        num_blocks = padded if padded is not None else len(block_tables[i])
        if num_blocks * block_size < kv_len:
            raise ValueError(
                f"attention metadata: sequence {i} has KV length {kv_len} and {num_blocks} blocks of {block_size}. "
                f"It needs {-(-kv_len // block_size)} blocks."
            )
