"""Tokens a second of the engine on this CPU, against transformers with the same model and requests.

`make bench-engine`. Two Llama-shaped models with random weights in float32; every contender gets the same requests and
threads, in one process, in alternating rounds, and must put out the same tokens. A contender's figure is its best round.

- `mix`: 48 requests, prompts of 16 to 384 tokens, outputs of 8 to 96: `LLM.generate` against transformers' continuous
  batching (what `generate_batch` runs, each request with its own length) and `generate` on one padded batch.
- `equal`: 32 prompts of one length with outputs of one length: against `generate` with a static and a growing cache.
- `overhead`: 64 decodes of a model of a billion parameters: what part of a steady step is scheduling and bookkeeping
  (a minute more and 6 GB; left out with `--small`).

Loading, and making caches that are kept from round to round, is not timed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from machine import processor

from vajra_py.engine.worker import set_passive_omp_wait

set_passive_omp_wait()

import torch  # noqa: E402
import transformers  # noqa: E402

from vajra_py import LLM, SamplingParams  # noqa: E402
from vajra_py.engine.compute import ModelRunner, RunnerOptions, StepInput, StepOutput, load_runner  # noqa: E402
from vajra_py.engine.compute.model.loading import quiet  # noqa: E402

RESULTS = Path(__file__).parent / "results"
SHAPES: Mapping[str, Mapping[str, int]] = {
    "10M": {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 2},
    "30M": {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2},
}
SHARED = {
    "num_hidden_layers": 8,
    "vocab_size": 6144,
    "max_position_embeddings": 1024,
    # Wide enough that the likeliest token is clearly ahead: rounding then changes no choice.
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
}
TARGETS = {("mix", "continuous batching"): 2.5, ("mix", "padded batch"): 2.0, ("equal", "static cache"): 1.0}
MOST_OVERHEAD = 0.05
PAGE_TOKENS = 64
PEER_REQUESTS = 16
"""Requests that continuous batching runs together. Its dense mask over all of them makes more slower: of 8, 16 and 64 tried,
8 and 16 were the fastest, 64 a quarter slower."""

Tokens = list[list[int]]
Contender = Callable[[], Tokens]


@dataclass(frozen=True, slots=True)
class Requests:
    """Input of every contender."""

    name: str
    prompts: Sequence[Sequence[int]]
    num_outputs: Sequence[int]

    @property
    def total_outputs(self) -> int:
        """Number of requested tokens; further ones that a padded batch computes are not counted."""
        return sum(self.num_outputs)


def workloads(seed: int) -> list[Requests]:
    """The ragged mix and the equal lengths."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    lengths = drawn(16, 385, 48)
    mix = Requests("mix", [drawn(3, SHARED["vocab_size"], length) for length in lengths], drawn(8, 97, 48))  # type: ignore[arg-type]
    equal = Requests("equal", [drawn(3, SHARED["vocab_size"], 128) for _ in range(32)], [64] * 32)  # type: ignore[arg-type]
    return [mix, equal]


def write_model(folder: Path, shape: str) -> None:
    """A Llama of that shape with random weights."""
    config = transformers.LlamaConfig(**SHAPES[shape], **SHARED, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    with torch.random.fork_rng(), quiet():
        torch.manual_seed(1)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)


class TimedRunner:
    """Runner that records the durations of decode steps and of the engine's work between them."""

    def __init__(self, options: RunnerOptions) -> None:
        self._runner = load_runner(options)
        self._returned: float | None = None
        self.compute_s = 0.0
        self.between_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, step: StepInput) -> StepOutput:
        """Compute and time one step."""
        start = time.perf_counter()
        output = self._runner.run(step)
        end = time.perf_counter()
        if step.chunks:
            self._returned = None
            return output
        if self._returned is not None:
            self.between_s += start - self._returned
            self.compute_s += end - start
        self._returned = end
        return output

    @property
    def overhead(self) -> float:
        """Fraction of a steady step outside the runner: scheduling and bookkeeping."""
        return self.between_s / (self.between_s + self.compute_s)


def engine(llm: LLM, requests: Requests) -> Contender:
    """The project's engine, tokens in and out."""
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in requests.num_outputs]

    def run() -> Tokens:
        return [list(output.token_ids) for output in llm.generate(requests.prompts, params)]

    return run


def padded_batch(model: Any, requests: Requests, **cache: Any) -> Contender:
    """`generate` on one batch, padded on the left, until the longest output is complete."""
    longest = max(map(len, requests.prompts))
    ids = torch.tensor([[2] * (longest - len(prompt)) + list(prompt) for prompt in requests.prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in requests.prompts])

    def run() -> Tokens:
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max(requests.num_outputs),
            do_sample=False,
            eos_token_id=None,
            disable_compile=True,
            **cache,
        )
        rows = out[:, longest:].tolist()
        return [row[:count] for row, count in zip(rows, requests.num_outputs, strict=True)]

    return run


@contextmanager
def continuous_batching(model: Any, requests: Requests, max_batch_tokens: int) -> Iterator[Contender]:
    """The loop of `generate_batch`, with each request's own output length; its cache is kept between rounds."""
    lengths = zip(requests.prompts, requests.num_outputs, strict=True)
    num_pages = sum(-(-(len(prompt) + count) // PAGE_TOKENS) for prompt, count in lengths)
    settings = transformers.ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=num_pages + 8,
        max_batch_tokens=max_batch_tokens,
        max_requests_per_batch=PEER_REQUESTS,
        allow_block_sharing=False,  # rounds repeat the same prompts
    )
    generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=2)
    with model.continuous_batching_context_manager(generation, continuous_batching_config=settings) as manager:

        def run() -> Tokens:
            lengths = zip(requests.prompts, requests.num_outputs, strict=True)
            ids = [manager.add_request(list(prompt), max_new_tokens=count) for prompt, count in lengths]
            found: dict[str, list[int]] = {}
            while len(found) < len(ids):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    found[result.request_id] = list(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("transformers' continuous batching ended before its requests")
            return [found[name] for name in ids]

        yield run


@contextmanager
def contenders(folder: Path, requests: Requests, options: argparse.Namespace) -> Iterator[dict[str, Contender]]:
    """Return all contenders, the engine first."""
    with ExitStack() as stack:
        replica = {"max_batch_size": 64, "max_model_len": 512, "memory": {"num_blocks": 2048, "block_size": 16}}
        scheduler = {"policy": "fixed_chunk", "params": {"chunk_size": options.chunk}}
        scheduling = {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": "round_robin",
            "replica_scheduler": scheduler,
        }
        backend = {"engine": {"num_threads": options.threads}}
        llm = stack.enter_context(LLM(folder, {"scheduling": scheduling, "replica": replica, "backend": backend}))
        found = {"engine": engine(llm, requests)}
        with quiet():
            load = transformers.AutoModelForCausalLM.from_pretrained
            model = load(folder, attn_implementation="sdpa", dtype=torch.float32).eval()
            batching = load(folder, attn_implementation="sdpa", dtype=torch.float32).eval()
        if requests.name == "mix":
            manager = continuous_batching(batching, requests, options.chunk)
            found["continuous batching"] = stack.enter_context(manager)
            found["padded batch"] = padded_batch(model, requests)
        else:
            found["static cache"] = padded_batch(model, requests, cache_implementation="static")
            found["growing cache"] = padded_batch(model, requests)
        yield found


def measure(folder: Path, requests: Requests, options: argparse.Namespace) -> dict[str, Any]:
    """Best tokens per second of each contender, and the engine's as multiples of the others'."""
    best: dict[str, float] = {}
    different: dict[str, int] = {}
    with contenders(folder, requests, options) as found, quiet(), torch.inference_mode():
        wanted = found["engine"]()  # also warms up the engine; the first round warms up its peers
        for _ in range(options.rounds):
            for name, run in found.items():
                start = time.perf_counter()
                tokens = run()
                rate = requests.total_outputs / (time.perf_counter() - start)
                best[name] = max(best.get(name, 0.0), rate)
                different[name] = sum(theirs != ours for theirs, ours in zip(tokens, wanted, strict=True))
    ratios = {name: best["engine"] / rate for name, rate in best.items() if name != "engine"}
    return {"output_tokens_per_s": best, "engine_x": ratios, "requests_with_other_tokens": different}


def measure_overhead(place: Path, options: argparse.Namespace) -> float:
    """The part of a steady step of 64 decodes that is not the runner's, on a model of a billion parameters."""
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 32000}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    transformers.LlamaConfig(**shape, **heads, max_position_embeddings=1024).save_pretrained(place)
    made: list[TimedRunner] = []

    def load(runner_options: RunnerOptions) -> ModelRunner:
        made.append(TimedRunner(runner_options))
        return made[0]

    settings = {"random_weights": True, "self_check": False, "num_threads": options.threads}
    replica = {"max_batch_size": 64, "max_model_len": 64, "memory": {"num_blocks": 512, "block_size": 16}}
    requests = Requests("overhead", [[3 + index] * 2 for index in range(64)], [12] * 64)
    with LLM(place, {"replica": replica, "backend": {"engine": settings}}, load=load) as llm:
        engine(llm, requests)()
    return made[0].overhead


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """Return machine, versions and options of the figures."""
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def main() -> int:
    """Measure, print and write; return 1 if tokens differ or a ratio is below its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of every contender")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each; the best counts")
    parser.add_argument("--chunk", type=int, default=512, help="most tokens of a step, here and in continuous batching")
    parser.add_argument("--models", nargs="*", default=list(SHAPES), choices=SHAPES, help="which models")
    parser.add_argument("--small", action="store_true", help="leave the model of a billion parameters out")
    parser.add_argument("--output", type=Path, default=Path("runs") / "engine_cpu.json", help="where the JSON goes")
    parser.add_argument("--record", action="store_true", help=f"write it to {RESULTS.name}/engine_cpu.json instead")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    content: dict[str, Any] = {"machine": machine(options), "chunk": options.chunk, "figures": {}}
    failed = False
    with tempfile.TemporaryDirectory() as place:
        for shape in options.models:
            folder = Path(place) / shape
            write_model(folder, shape)
            for requests in workloads(0):
                figures = measure(folder, requests, options)
                content["figures"][f"{shape} {requests.name}"] = figures
                failed |= report(shape, requests, figures)
        if not options.small:
            content["overhead"] = share = measure_overhead(Path(place) / "1B", options)
            failed |= share > MOST_OVERHEAD
            print(f"\n1B, 64 decodes: {share:.2%} of a step is scheduling and bookkeeping (target {MOST_OVERHEAD:.0%})")
    if options.record:
        options.output = RESULTS / "engine_cpu.json"
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"written: {options.output}")
    return 1 if failed else 0


def report(shape: str, requests: Requests, figures: Mapping[str, Any]) -> bool:
    """Print one table; return True if tokens differ or a ratio is below its target."""
    print(f"\n{shape} {requests.name}: {len(requests.prompts)} requests, {requests.total_outputs} output tokens")
    failed = False
    for name, rate in figures["output_tokens_per_s"].items():
        ratio, target = figures["engine_x"].get(name), TARGETS.get((requests.name, name))
        other = figures["requests_with_other_tokens"][name]
        words = [f"  {name:20} {rate:9,.0f} tokens/s"]
        if ratio is not None:
            words.append(f"engine {ratio:.2f}x" + ("" if target is None else f" (target {target}x)"))
        if other:
            words.append(f"OTHER TOKENS in {other} requests")
        failed |= bool(other) or (target is not None and ratio is not None and ratio < target)
        print("  ".join(words), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
