"""Time the engine on this GPU, with and without captured graphs, and record its steps: for `gpu_check` and `gpu_bench`.

Needs transformers and what `vajra_py` needs besides torch; `unavailable` returns what is missing.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import torch
from gpu_facts import ROOT

if TYPE_CHECKING:
    from vajra_py.engine.compute import LookaheadStep, ModelFacts, RunnerOptions, StepInput, StepOutput
    from vajra_py.engine.compute.step.runner import TorchRunner
    from vajra_py.runtime.kv import BlockCopy

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


@dataclass(frozen=True, slots=True)
class Served:
    """Requests that come all at once, with prompts and outputs of random lengths (least, most)."""

    shape: Shape
    num_requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    longest: int


SERVED = (
    Served(QWEN3_600M, 256, (100, 1024), (100, 1024), 4096),  # nano-vLLM's benchmark
    *(Served(LLAMA_8B, 32, (2048, 2048), (200, 200), longest) for longest in (2304, 8192, 131072)),
)
BESIDE_COPIES = Decodes(LLAMA_8B, 32, 2048, 4096)
NUM_COPIED = 128
NUM_STEPS = 50
SLOTS, CHECKED_STEPS = 21, 24


def unavailable() -> str | None:
    """Return the reason that the engine cannot be imported here, or None."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    try:
        import vajra_py.engine.compute.step.runner  # noqa: F401
    except ImportError as problem:
        return f"left out: {problem}"
    return None


def write_model(folder: str, shape: Shape, longest: int) -> None:
    """Write the configuration of such a model, which suffices for random weights."""
    import transformers

    facts = asdict(shape) | {"max_position_embeddings": longest, "initializer_range": 0.1}
    transformers.AutoConfig.for_model(facts.pop("model_type"), **facts).save_pretrained(folder)


@contextmanager
def runner_of(
    shape: Shape, sizes: tuple[int, int, int], num_host_blocks: int = 0, **options: Any
) -> Iterator[TorchRunner]:
    """A model of that shape; `sizes` is (slots, tokens that each has blocks for, longest sequence)."""
    from vajra_py.engine.compute import RunnerOptions
    from vajra_py.engine.compute.step.runner import TorchRunner

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
    runner.allocate(slots * -(-held // BLOCK_SIZE) + num_host_blocks, num_host_blocks)
    try:
        yield runner
    finally:
        runner.close()
        del runner
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def first_step(slots: int, held: int, lengths: list[int], prompt_tokens: int) -> StepInput:
    """Every slot computes the last `prompt_tokens` of so many tokens; what is before them in KV memory stays as it is."""
    from vajra_py.engine.compute import Chunk, NewRow, SamplingParams, StepInput, TableUpdate

    per_slot = -(-held // BLOCK_SIZE)
    blocks = torch.randperm(slots * per_slot, generator=torch.Generator().manual_seed(1)).tolist()
    starts = [max(0, length - prompt_tokens) for length in lengths]
    chunks = [
        Chunk(slot, [3 + (slot * 7 + index) % 500 for index in range(length - start)], start, True)
        for slot, (length, start) in enumerate(zip(lengths, starts, strict=True))
    ]
    params = SamplingParams(temperature=0.0)
    return StepInput(
        chunks,
        new=[NewRow(slot, params, slot) for slot in range(slots)],
        tables=[TableUpdate(slot, 0, blocks[slot * per_slot : (slot + 1) * per_slot]) for slot in range(slots)],
    )


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
            floor = floor_s(case.shape, runner.facts, case.batch * case.context, limits)
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


def bench_copies(case: Decodes, num_blocks: int, device: str) -> dict[str, Any]:
    """Steps of decodes alone and beside copies of so many other blocks, over and over, to the host, to the device and both."""
    from vajra_py.engine.compute import StepInput

    sizes = (case.batch, case.held, case.longest)
    rows = case.batch if case.graphs else 0
    with runner_of(case.shape, sizes, num_blocks, device=device, dtype="bfloat16", max_graph_rows=rows) as runner:
        first = case.batch * -(-case.held // BLOCK_SIZE)  # those of slots come before
        runner.run(first_step(case.batch, case.held, [case.context] * case.batch, 1))
        step = StepInput(decodes=list(range(case.batch)))
        record: dict[str, Any] = asdict(case) | {"num_blocks": num_blocks, "bytes": num_blocks * runner.kv_block_bytes}
        for name, ways in (("alone", ()), ("to_host", (True,)), ("to_device", (False,)), ("both", (True, False))):
            copiers = [_Copies(runner, first, num_blocks, to_host) for to_host in ways]
            times = [runner.run(step).duration_s for _ in range(NUM_STEPS)]
            record[name] = {
                "step_ms": statistics.median(times) * 1e3,
                "deciles_ms": [one * 1e3 for one in statistics.quantiles(times, n=10)],
                "gb_per_s": [one.stop() * runner.kv_block_bytes / 1e9 for one in copiers],
            }
    print(record)
    return record


class _Copies:
    """Copies the blocks from `first` on in one direction, over and over, in a thread."""

    def __init__(self, runner: TorchRunner, first: int, num_blocks: int, to_host: bool) -> None:
        from vajra_py.runtime.kv import BlockCopy, CopyDirection

        pairs = [(first + index, index) for index in range(num_blocks)]
        self._runner = runner
        self._copies = [
            BlockCopy(block, place, CopyDirection.TO_HOST)
            if to_host
            else BlockCopy(place, block, CopyDirection.TO_DEVICE)
            for block, place in pairs
        ]
        self._is_stopped = Event()
        self._rate = 0.0
        self._runner.move_kv(self._copies, self._runner.mark())  # buffers are made with the first
        self._thread = Thread(target=self._work)
        self._thread.start()

    def stop(self) -> float:
        """End, and return the blocks a second that were copied."""
        self._is_stopped.set()
        self._thread.join()
        return self._rate

    def _work(self) -> None:
        start, count = time.perf_counter(), 0
        while not (self._is_stopped.is_set() and count):
            self._runner.move_kv(self._copies, self._runner.mark())
            count += len(self._copies)
        self._rate = count / (time.perf_counter() - start)


def floor_s(shape: Shape, facts: ModelFacts, num_kv_tokens: int, limits: dict[str, float]) -> float:
    """Seconds in which a step of decodes reads the weights and so many tokens of KV, at the rate of a copy."""
    # An embedding that is not shared with the head is only read by rows.
    embedding = 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size * 2
    return (facts.weight_bytes - embedding + num_kv_tokens * facts.kv_bytes_per_token) / limits["copy_bytes_per_s"]


@dataclass(slots=True)
class Watch:
    """Records the steps submitted to an engine's only runner, and the device's durations.

    Attributes:
        runner: it.
        counts: steps, rows that were started ahead and used, blocks that were swapped, stored in a tier and loaded from it, and
            decodes whose first draft was accepted.
        device_s: of all steps.
        decode_s: of each step of so many decodes and nothing else.
    """

    runner: TorchRunner | None = None
    counts: Counter[str] = field(default_factory=Counter)
    device_s: float = 0.0
    decode_s: dict[int, list[float]] = field(default_factory=dict)

    def load(self, options: RunnerOptions) -> TorchRunner:
        """Load a recorded runner, for `LLM(..., load=…)`."""
        from vajra_py.engine.compute.step.runner import TorchRunner
        from vajra_py.runtime.kv import CopyDirection

        self.runner = runner = TorchRunner.load(options)
        run, run_ahead, move = runner.run, runner.run_ahead, runner.move_kv

        def watched_run(step: StepInput) -> StepOutput:
            return self._note(step, 0, run(step))

        def watched_run_ahead(work: LookaheadStep) -> StepOutput:
            return self._note(work.step, len(work.begun), run_ahead(work))

        def watched_move(copies: Sequence[BlockCopy], after: object = None) -> None:
            name = "stored blocks" if copies[0].direction is CopyDirection.TO_HOST else "loaded blocks"
            self.counts[name] += len(copies)  # each is counted by one thread
            move(copies, after)

        runner.run, runner.run_ahead, runner.move_kv = watched_run, watched_run_ahead, watched_move  # type: ignore[method-assign]
        return runner

    def _note(self, step: StepInput, num_begun: int, output: StepOutput) -> StepOutput:
        self.counts.update({"steps": 1, "rows ahead": num_begun, "swapped blocks": len(step.copies)})
        sampled = dict(zip(reversed(output.slots), reversed(output.token_ids), strict=True))  # the first of each
        drafted = [chunk for chunk in step.chunks if chunk.num_drafts]
        self.counts["accepted drafts"] += sum(sampled[one.slot] == one.token_ids[-one.num_drafts] for one in drafted)
        self.device_s += output.duration_s
        if not step.chunks:
            self.decode_s.setdefault(len(step.decodes), []).append(output.duration_s)
        return output


def bench_serving(cases: Sequence[Served], limits: dict[str, float], device: str) -> list[dict[str, Any]]:
    """The whole engine with its scheduler: tokens a second, and the share of the time in which the device had no step."""
    return [_served(case, limits, device) for case in cases]


def _served(case: Served, limits: dict[str, float], device: str) -> dict[str, Any]:
    from vajra_py import LLM, SamplingParams

    stream, shape, watch = random.Random(0), case.shape, Watch()
    prompts = [
        [stream.randrange(shape.vocab_size) for _ in range(stream.randint(*case.prompt))]
        for _ in range(case.num_requests)
    ]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=stream.randint(*case.output))
        for _ in range(case.num_requests)
    ]
    config: dict[str, Any] = {
        "replica": {"max_batch_size": case.num_requests, "max_model_len": case.longest},
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": "round_robin",
            "replica_scheduler": {"policy": "vllm_v1"},
        },
        "backend": {"engine": {"device": device, "dtype": "bfloat16", "random_weights": True, "self_check": False}},
    }
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, shape, case.longest)
        with LLM(folder, config, load=watch.load) as llm:
            llm.generate(prompts[:2], SamplingParams(max_tokens=4, ignore_eos=True))
            watch.device_s, before = 0.0, watch.counts["steps"]
            watch.decode_s.clear()
            start = time.perf_counter()
            outputs = llm.generate(prompts, params)
            seconds = time.perf_counter() - start
        assert watch.runner is not None
        facts = watch.runner.facts
    num_tokens = sum(len(one.token_ids) for one in outputs)
    rows, decodes = max(watch.decode_s.items(), key=lambda one: len(one[1]), default=(0, [float("nan")]))
    context = sum(len(prompt) + one.max_tokens / 2 for prompt, one in zip(prompts, params, strict=True)) / len(prompts)
    step_s = statistics.median(decodes)
    record = asdict(case) | {
        "output_tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_s": num_tokens / seconds,
        "steps": watch.counts["steps"] - before,
        "outside_device_fraction": 1.0 - watch.device_s / seconds,
        "decode_rows": rows,
        "decode_step_ms": step_s * 1e3,
        "decode_floor_x": step_s / floor_s(shape, facts, int(rows * context), limits),
    }
    print(record)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return record
