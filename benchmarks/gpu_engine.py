"""Check and time the engine on this GPU, with captured graphs and without: for `gpu_check` and `gpu_bench`.

Needs transformers and what `vajra_py` needs besides torch; `unavailable` says what is missing.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from gpu_facts import ROOT

if TYPE_CHECKING:
    from vajra_py.engine.compute import StepInput
    from vajra_py.engine.compute.runner import TorchRunner

BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """A model to be made with random weights."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool = False


SMALL = Shape("llama", 256, 512, 3, 512, 8, 2, 64)
LLAMA_8B = Shape("llama", 4096, 14336, 32, 128256, 32, 8, 128)
QWEN3_600M = Shape("qwen3", 1024, 3072, 28, 151936, 16, 8, 128, tie_word_embeddings=True)


@dataclass(frozen=True, slots=True)
class Decodes:
    """`batch` requests with `context` tokens each, of an engine whose sequences may have `longest`."""

    shape: Shape
    batch: int
    context: int
    longest: int
    graphs: bool = True

    @property
    def held(self) -> int:
        """Tokens that a slot has blocks for: what is measured goes on behind the context."""
        return self.context + 256


DECODES = (
    *(Decodes(LLAMA_8B, 32, 2048, longest) for longest in (2304, 8192, 131072)),
    Decodes(LLAMA_8B, 32, 2048, 8192, graphs=False),
    Decodes(LLAMA_8B, 256, 1024, 8192),
    Decodes(QWEN3_600M, 256, 1024, 2048),
)
NUM_STEPS = 50
SLOTS, CHECKED_STEPS = 21, 24


def unavailable() -> str | None:
    """Why the engine cannot be imported here, or None."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    try:
        import vajra_py.engine.compute.runner  # noqa: F401
    except ImportError as problem:
        return f"left out: {problem}"
    return None


def write_model(folder: str, shape: Shape, longest: int) -> None:
    """The configuration of such a model, which is all that random weights need."""
    import transformers

    facts = asdict(shape) | {"max_position_embeddings": longest, "initializer_range": 0.1}
    transformers.AutoConfig.for_model(facts.pop("model_type"), **facts).save_pretrained(folder)


@contextmanager
def runner_of(shape: Shape, sizes: tuple[int, int, int], **options: Any) -> Iterator[TorchRunner]:
    """A model of that shape; `sizes` is (slots, tokens that each has blocks for, longest sequence)."""
    from vajra_py.engine.compute import RunnerOptions
    from vajra_py.engine.compute.runner import TorchRunner

    slots, held, longest = sizes
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, shape, longest)
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
    runner.allocate(slots * -(-held // BLOCK_SIZE))
    try:
        yield runner
    finally:
        runner.close()
        del runner
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def first_step(slots: int, held: int, lengths: list[int], prompt_tokens: int, temperature: float = 0.0) -> StepInput:
    """Every slot computes the last `prompt_tokens` of so many tokens; what is before them in KV memory stays as it is."""
    from vajra_py.engine.compute import Chunk, NewRow, SamplingParams, StepInput, TableUpdate

    per_slot = -(-held // BLOCK_SIZE)
    blocks = torch.randperm(slots * per_slot, generator=torch.Generator().manual_seed(1)).tolist()
    starts = [max(0, length - prompt_tokens) for length in lengths]
    chunks = [
        Chunk(slot, [3 + (slot * 7 + index) % 500 for index in range(length - start)], start, True)
        for slot, (length, start) in enumerate(zip(lengths, starts, strict=True))
    ]
    params = SamplingParams(temperature=temperature, top_p=1.0 if temperature == 0.0 else 0.9)
    return StepInput(
        chunks,
        new=[NewRow(slot, params, slot) for slot in range(slots)],
        tables=[TableUpdate(slot, 0, blocks[slot * per_slot : (slot + 1) * per_slot]) for slot in range(slots)],
    )


def tokens_of(device: str, dtype: str, max_graph_rows: int, temperature: float) -> tuple[list[list[int]], int]:
    """(tokens of some steps of changing numbers of decodes, how many steps were replayed)."""
    from vajra_py.engine.compute import StepInput

    options = {"device": device, "dtype": dtype, "max_graph_rows": max_graph_rows}
    with runner_of(SMALL, (SLOTS, 1024, 1024), **options) as runner:
        lengths = [1 + (37 * slot) % 200 for slot in range(SLOTS)]
        found = [list(runner.run(first_step(SLOTS, 1024, lengths, 1024, temperature)).token_ids)]
        for number in range(CHECKED_STEPS):
            rows = [slot for slot in range(SLOTS) if slot % 5 <= number % 6]
            found.append(list(runner.run(StepInput(decodes=rows)).token_ids))
        return found, runner.num_replays


def check_tokens(dtype: str, device: str, temperature: float) -> tuple[float, float]:
    """(share of tokens that differ between replayed and eager decodes, what is tolerated)."""
    replayed, num_replays = tokens_of(device, dtype, 16, temperature)
    eager, _ = tokens_of(device, dtype, 0, temperature)
    if not num_replays:
        raise RuntimeError("nothing was captured; the log says why")
    pairs = [pair for step in zip(replayed, eager, strict=True) for pair in zip(*step, strict=True)]
    different = sum(one != other for one, other in pairs) / len(pairs)
    # With 16 bits, another order of additions changes choices that are close, and all that follows them.
    return different, 0.0 if dtype == "float32" and temperature == 0.0 else 0.5


def check_warm_up(device: str) -> tuple[float, float]:
    """(seconds of the slowest of a new runner's steps over the median, what is tolerated): nothing is compiled in them."""
    from vajra_py.engine.compute import StepInput

    with runner_of(SMALL, (SLOTS, 1024, 4096), device=device, dtype="bfloat16", max_graph_rows=0) as runner:
        lengths = [1 + (37 * slot) % 200 for slot in range(SLOTS)]
        times = [runner.run(first_step(SLOTS, 1024, lengths, 1024)).duration_s]
        for number in range(CHECKED_STEPS):
            rows = [slot for slot in range(SLOTS) if slot % 5 <= number % 6]
            times.append(runner.run(StepInput(decodes=rows)).duration_s)
    return max(times[1:]) - statistics.median(times), 0.3


def bench_decodes(cases: Sequence[Decodes], limits: dict[str, float], device: str) -> list[dict[str, Any]]:
    """Steps of decodes alone, one by one and back to back, against what must be read."""
    from vajra_py.engine.compute import StepInput

    records = []
    for case in cases:
        shape, sizes = case.shape, (case.batch, case.held, case.longest)
        rows = case.batch if case.graphs else 0
        with runner_of(shape, sizes, device=device, dtype="bfloat16", max_graph_rows=rows) as runner:
            runner.run(first_step(case.batch, case.held, [case.context] * case.batch, 1))
            step = StepInput(decodes=list(range(case.batch)))
            for _ in range(5):
                runner.run(step)
            alone = [runner.run(step).duration_s for _ in range(NUM_STEPS)]
            start = time.perf_counter()
            pending = [runner.submit(step) for _ in range(NUM_STEPS)]
            for one in pending:
                one.result()
            together = (time.perf_counter() - start) / len(pending)
            # Of an embedding that is not the head too, rows are looked up.
            embedding = 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size * 2
            read = runner.facts.weight_bytes - embedding
            read += case.batch * case.context * runner.facts.kv_bytes_per_token
            floor = read / limits["copy_bytes_per_s"]
            record = asdict(case) | {
                "replayed": bool(runner.num_replays),
                "step_ms": statistics.median(alone) * 1e3,
                "back_to_back_ms": together * 1e3,
                "read_floor_ms": floor * 1e3,
                "floor_x": statistics.median(alone) / floor,
            }
        print(record)
        records.append(record)
    return records


def bench_serving(
    device: str, shape: Shape = QWEN3_600M, num_requests: int = 256, lengths: tuple[int, int] = (100, 1024)
) -> dict[str, Any]:
    """The whole engine with its scheduler: nano-vLLM's benchmark, prompts and outputs of random lengths, all at once."""
    from vajra_py import LLM, SamplingParams

    stream = random.Random(0)
    prompts = [
        [stream.randrange(shape.vocab_size) for _ in range(stream.randint(*lengths))] for _ in range(num_requests)
    ]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=stream.randint(*lengths))
        for _ in range(num_requests)
    ]
    longest = 4 * lengths[1]
    config: dict[str, Any] = {
        "replica": {"max_batch_size": num_requests, "max_model_len": longest},
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": "round_robin",
            "replica_scheduler": {"policy": "vllm_v1"},
        },
        "backend": {"engine": {"device": device, "dtype": "bfloat16", "random_weights": True, "self_check": False}},
    }
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, shape, longest)
        with LLM(folder, config) as llm:
            llm.generate(prompts[:2], SamplingParams(max_tokens=4, ignore_eos=True))
            start = time.perf_counter()
            outputs = llm.generate(prompts, params)
            seconds = time.perf_counter() - start
    num_tokens = sum(len(one.token_ids) for one in outputs)
    record = {
        "shape": asdict(shape),
        "requests": num_requests,
        "output_tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_s": num_tokens / seconds,
    }
    print(record)
    return record
