"""Measure the gain of batched decodes and divided chunks over one attention call per sequence on this CPU.

Prints CPU milliseconds per layer for the per-sequence way (gather a sequence, one scaled_dot_product_attention) and for
``vajra_kernels.paged_attention``, the one-off cost of a step's metadata and plan, and the largest difference of results.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpu_facts import use_checkout

use_checkout()

import vajra_kernels  # noqa: E402

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 2, 64, 16


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: a name and (new tokens, KV length) per sequence."""

    name: str
    lens: tuple[tuple[int, int], ...]


def batches() -> list[Batch]:
    """Decodes of even and uneven lengths, prompts, a chunk, a mixed step."""
    generator = torch.Generator().manual_seed(0)
    uneven = torch.randint(16, 1025, (32,), generator=generator).tolist()
    return [
        *(
            Batch(f"{n} decodes at {kv}", ((1, kv),) * n)
            for n, kv in ((1, 512), (8, 512), (32, 128), (32, 512), (32, 1024))
        ),
        Batch("32 decodes at 16 to 1024", tuple((1, kv) for kv in uneven)),
        Batch("prompt of 512", ((512, 512),)),
        Batch("chunk of 128 after 1024", ((128, 1152),)),
        Batch("31 decodes at 512, prompt of 128", (*((1, 512),) * 31, (128, 128))),
        Batch("16 prompts of 24", ((24, 24),) * 16),
    ]


def cpu_milliseconds(function: Callable[[], object], rounds: int) -> float:
    """Least CPU time of a call over ``rounds`` rounds of three calls."""
    function()
    best = float("inf")
    for _ in range(rounds):
        begin = time.process_time()
        for _ in range(3):
            function()
        best = min(best, (time.process_time() - begin) / 3)
    return best * 1e3


def per_sequence(batch: Batch, q: torch.Tensor, caches: list[torch.Tensor], table: torch.Tensor) -> torch.Tensor:
    """Every sequence gathered and attended on its own; grouped heads packed for decodes."""
    tokens = [cache.view(-1, NUM_KV_HEADS, HEAD_DIM) for cache in caches]
    out = torch.empty_like(q)
    row = 0
    attention = torch.nn.functional.scaled_dot_product_attention
    for blocks, (new, kv_len) in zip(table, batch.lens, strict=True):
        slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).view(-1)[:kv_len]
        k, v = (rows.index_select(0, slots).transpose(0, 1)[None] for rows in tokens)
        mine = q[row : row + new]
        if new == 1:
            part = attention(mine.view(1, NUM_KV_HEADS, -1, HEAD_DIM), k, v).view(1, NUM_HEADS, HEAD_DIM)
        else:
            mask = torch.ones((new, kv_len), dtype=torch.bool).tril(kv_len - new)
            part = attention(mine.transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
        out[row : row + new] = part
        row += new
    return out


def measure(batch: Batch, rounds: int) -> str:
    """One row of the table."""
    query_lens, kv_lens = [new for new, _ in batch.lens], [kv for _, kv in batch.lens]
    width = -(-max(kv_lens) // BLOCK_SIZE)
    num_blocks = width * len(kv_lens)
    table = torch.randperm(num_blocks, dtype=torch.int32).view(len(kv_lens), width)
    block_shape = (BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    k_cache, v_cache = (c[0] for c in vajra_kernels.allocate_kv_cache(1, num_blocks, block_shape, torch.float32, "cpu"))
    caches = [k_cache.normal_(), v_cache.normal_()]
    q = torch.randn(sum(query_lens), NUM_HEADS, HEAD_DIM)

    def build() -> vajra_kernels.AttentionMetadata:
        return vajra_kernels.build_metadata(query_lens, kv_lens, table, BLOCK_SIZE)

    def ours(metadata: vajra_kernels.AttentionMetadata) -> torch.Tensor:
        return vajra_kernels.paged_attention(q, k_cache, v_cache, metadata)

    metadata = build()
    one_by_one = per_sequence(batch, q, caches, table)
    difference = float((ours(metadata) - one_by_one).abs().max())
    alone_ms = cpu_milliseconds(lambda: per_sequence(batch, q, caches, table), rounds)
    ours_ms = cpu_milliseconds(lambda: ours(metadata), rounds)
    first_ms = cpu_milliseconds(lambda: ours(build()), rounds)
    cells = [batch.name, f"{alone_ms:.2f}", f"{ours_ms:.2f}", f"{alone_ms / ours_ms:.1f}x", f"{first_ms - ours_ms:.2f}"]
    return "| " + " | ".join(cells) + f" | {difference:.0e} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (CPU time is of all of them)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds per figure; the least counts")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    heads = f"{NUM_HEADS} query heads, {NUM_KV_HEADS} KV heads of {HEAD_DIM}"
    print(f"torch {torch.__version__}, {options.threads} threads, {heads}, float32, CPU ms per layer\n")
    print("| batch | one by one | paged_attention | gain | once per step | difference |")
    print("|---|--:|--:|--:|--:|--:|")
    for batch in batches():
        print(measure(batch, options.rounds))


if __name__ == "__main__":
    main()
