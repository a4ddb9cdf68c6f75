"""What the engine's forward pass does on this GPU, with captured graphs and without: for `gpu_check` and `gpu_bench`.

Needs transformers and what `vajra_py` needs besides torch; `unavailable` says what is missing.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from gpu_facts import ROOT

if TYPE_CHECKING:
    from vajra_py.engine.compute import StepInput
    from vajra_py.engine.compute.runner import TorchRunner

BLOCK_SIZE = 64
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 512}
SMALL_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
LLAMA_8B_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}


def unavailable() -> str | None:
    """Why the engine cannot be imported here, or None."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    try:
        import vajra_py.engine.compute.runner  # noqa: F401
    except ImportError as problem:
        return f"left out: {problem}"
    return None


@contextmanager
def runner_of(shape: dict[str, int], sizes: tuple[int, int], **options: Any) -> Iterator[TorchRunner]:
    """A Llama of that shape with random weights; `sizes` is (slots, longest sequence), and each slot gets its own blocks."""
    import transformers

    from vajra_py.engine.compute import RunnerOptions
    from vajra_py.engine.compute.runner import TorchRunner

    slots, longest = sizes
    with tempfile.TemporaryDirectory() as folder:
        extra = {"max_position_embeddings": longest, "initializer_range": 0.1}
        transformers.LlamaConfig(**shape, **extra).save_pretrained(folder)
        made = RunnerOptions(
            folder,
            random_weights=True,
            block_size=BLOCK_SIZE,
            max_requests=slots,
            max_model_len=longest,
            self_check=False,
            **options,
        )
        runner = TorchRunner.load(made)
    runner.allocate(slots * -(-longest // BLOCK_SIZE))
    try:
        yield runner
    finally:
        runner.close()
        del runner
        gc.collect()
        torch.cuda.empty_cache()


def first_step(slots: int, longest: int, lengths: list[int], prompt_tokens: int) -> StepInput:
    """Every slot computes the last `prompt_tokens` of so many tokens; what is before them in KV memory stays as it is."""
    from vajra_py.engine.compute import Chunk, NewRow, SamplingParams, StepInput, TableUpdate

    per_slot = -(-longest // BLOCK_SIZE)
    blocks = torch.randperm(slots * per_slot, generator=torch.Generator().manual_seed(1)).tolist()
    starts = [max(0, length - prompt_tokens) for length in lengths]
    chunks = [
        Chunk(slot, [3 + (slot * 7 + index) % 500 for index in range(length - start)], start, True)
        for slot, (length, start) in enumerate(zip(lengths, starts, strict=True))
    ]
    return StepInput(
        chunks,
        new=[NewRow(slot, SamplingParams(temperature=0.0), slot) for slot in range(slots)],
        tables=[TableUpdate(slot, 0, blocks[slot * per_slot : (slot + 1) * per_slot]) for slot in range(slots)],
    )


def tokens_of(device: str, dtype: str, max_graph_rows: int) -> tuple[list[list[int]], int]:
    """(tokens of 24 steps of changing numbers of decodes, how many steps were replayed)."""
    from vajra_py.engine.compute import StepInput

    with runner_of(
        SMALL | SMALL_HEADS, (21, 1024), device=device, dtype=dtype, max_graph_rows=max_graph_rows
    ) as runner:
        lengths = [1 + (37 * slot) % 200 for slot in range(21)]
        found = [list(runner.run(first_step(21, 1024, lengths, 1024)).token_ids)]
        for number in range(24):
            rows = [slot for slot in range(21) if slot % 5 <= number % 6]
            found.append(list(runner.run(StepInput(decodes=rows)).token_ids))
        return found, runner.num_replays


def check_tokens(dtype: str, device: str) -> tuple[float, float]:
    """(share of tokens that differ between replayed and eager decodes, what is tolerated)."""
    replayed, num_replays = tokens_of(device, dtype, 16)
    eager, _ = tokens_of(device, dtype, 0)
    if not num_replays:
        raise RuntimeError("nothing was captured; the log says why")
    pairs = [pair for step in zip(replayed, eager, strict=True) for pair in zip(*step, strict=True)]
    different = sum(one != other for one, other in pairs) / len(pairs)
    # With 16 bits, another order of additions changes choices that are close, and all that follows them.
    return different, 0.0 if dtype == "float32" else 0.5


def bench_decodes(limits: dict[str, float], device: str, batch: int = 64, context: int = 2048) -> list[dict[str, Any]]:
    """Steps of a Llama-3.1-8B-shaped model: replayed and eager, one by one and back to back, against what must be read."""
    from vajra_py.engine.compute import StepInput

    records = []
    for max_graph_rows in (batch, 0):
        shape, sizes = LLAMA_8B | LLAMA_8B_HEADS, (batch, context + 256)
        with runner_of(shape, sizes, device=device, dtype="bfloat16", max_graph_rows=max_graph_rows) as runner:
            runner.run(first_step(batch, context + 256, [context] * batch, 1))
            step = StepInput(decodes=list(range(batch)))
            for _ in range(5):
                runner.run(step)
            alone = [runner.run(step).duration_s for _ in range(50)]
            start = time.perf_counter()
            pending = [runner.submit(step) for _ in range(50)]
            for one in pending:
                one.result()
            together = (time.perf_counter() - start) / len(pending)
            embedding = shape["vocab_size"] * shape["hidden_size"] * 2
            read = runner.facts.weight_bytes - embedding + batch * context * runner.facts.kv_bytes_per_token
            floor = read / limits["copy_bytes_per_s"]
            record = {
                "batch": batch,
                "context": context,
                "graphs": bool(runner.num_replays),
                "step_ms": statistics.median(alone) * 1e3,
                "back_to_back_ms": together * 1e3,
                "read_floor_ms": floor * 1e3,
                "floor_x": statistics.median(alone) / floor,
            }
        print(record)
        records.append(record)
    return records
