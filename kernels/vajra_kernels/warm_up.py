"""Compile the attention kernels that a run may need, before the run starts.

Invariants:
    - A batch within the limits needs no further compilation: each of its launches has the same specialisation as a
      launch that was run here. Kernels are specialised by constants derived from powers of two, and not by lengths
      (``do_not_specialize``).
    - Host-side bounds choose the launches, while the tensors describe short sequences, so that little is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vajra_kernels.aot import specialization
from vajra_kernels.call import AttentionCall
from vajra_kernels.gpu import attention_launches
from vajra_kernels.launch import Launch, device_facts
from vajra_kernels.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """Attention parameters shared by layers of one kind.

    Attributes:
        num_query_heads: number of heads of q.
        scale: factor of the scores.
        window: sliding window, or None.
        softcap: soft cap, or None.
        with_lse: True if the log-sum-exps are computed too.
    """

    num_query_heads: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    with_lse: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the batches for which kernels are compiled.

    Attributes:
        max_seqs: largest number of sequences.
        max_query_len: largest number of query tokens of one sequence.
        max_kv_len: largest number of KV positions of one sequence.
        causal: ``AttentionMetadata.causal`` of the batches.
    """

    max_seqs: int
    max_query_len: int
    max_kv_len: int
    causal: bool = True


def warm_up_attention(kind: AttentionKind, cache: tuple[torch.Tensor, torch.Tensor], limits: Limits) -> set[str]:
    """Run launches of every specialisation that batches within the limits can need; return the specialisations.

    ``cache`` is one layer's (K, V); its first blocks are read.
    """
    done: set[str] = set()
    facts = device_facts(cache[0].device)
    for metadata in _batches(limits, cache[0]):
        launches = attention_launches(_call(kind, cache, metadata), facts)
        keys = {specialization(launch) for launch in launches}
        if not keys <= done:  # run all launches, since each reads the previous one's output
            done |= keys
            _run(launches)
    return done


def _run(launches: list[Launch]) -> None:
    for launch in launches:
        launch.run()


def _call(kind: AttentionKind, cache: tuple[torch.Tensor, torch.Tensor], metadata: AttentionMetadata) -> AttentionCall:
    k_cache, v_cache = cache
    shape = (metadata.num_query_tokens, kind.num_query_heads)
    window = kind.window if metadata.causal else None
    return AttentionCall(
        k_cache.new_zeros((*shape, k_cache.shape[3])),
        k_cache,
        v_cache,
        metadata,
        kind.scale,
        window,
        kind.softcap,
        k_cache.new_empty((*shape, v_cache.shape[3])),
        torch.empty(shape, dtype=torch.float32, device=k_cache.device) if kind.with_lse else None,
    )


def _batches(limits: Limits, k_cache: torch.Tensor) -> Iterator[AttentionMetadata]:
    """Yield batches of decodes and batches of one chunk whose bounds select every possible launch.

    A mixed batch needs no other launches: it uses those of a batch of chunks, or those of a batch of decodes together
    with those of a batch of chunks.
    """
    contexts = _powers(limits.max_kv_len)
    for num_seqs in _powers(limits.max_seqs):
        for context in contexts:
            for num_kv_tokens in (context + num_seqs, context * num_seqs):
                yield _metadata(k_cache, [1] * num_seqs, context, num_kv_tokens, limits.causal)
    for query_len in _powers(limits.max_query_len)[1:]:
        for context in contexts:
            if context >= query_len:
                yield _metadata(k_cache, [query_len], context, context, limits.causal)


def _powers(largest: int) -> list[int]:
    """Return the powers of two below ``largest``, and ``largest``."""
    return [*(1 << bit for bit in range((largest - 1).bit_length())), largest]


def _metadata(
    k_cache: torch.Tensor, query_lens: list[int], max_kv_len: int, num_kv_tokens: int, causal: bool
) -> AttentionMetadata:
    num_seqs, longest, block_size, device = len(query_lens), max(query_lens), k_cache.shape[1], k_cache.device
    starts = torch.arange(0, num_seqs * longest + 1, longest, dtype=torch.int32, device=device)
    return AttentionMetadata(
        query_start=starts,
        kv_lens=torch.full((num_seqs,), longest, dtype=torch.int32, device=device),
        block_table=torch.zeros((num_seqs, -(-longest // block_size)), dtype=torch.int32, device=device),
        slot_mapping=torch.full((num_seqs * longest,), -1, dtype=torch.int64, device=device),
        block_size=block_size,
        num_decodes=num_seqs if longest == 1 else 0,
        num_query_tokens=num_seqs * longest,
        max_query_len=longest,
        max_kv_len=max_kv_len,
        num_kv_tokens=num_kv_tokens,
        causal=causal,
    )
