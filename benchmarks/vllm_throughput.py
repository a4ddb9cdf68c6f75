"""Tokens per second of one vLLM under its own scheduler and under this project's (preset vllm-v1), in turns.

python benchmarks/vllm_throughput.py [MODEL_FOLDER] [ROUNDS]      in an environment that has vLLM; without a folder, a tiny Llama

The same engine, model, workers and requests: only the scheduler is another one from round to round. The processor time is the whole process's.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler as VllmsOwn
from vllm.v1.structured_output import StructuredOutputManager

from vajra_py.engine.tiny import write_tiny_model
from vajra_py.vllm import Scheduler

NUM_REQUESTS, OUTPUT_TOKENS = 256, 128


def requests(*, ragged: bool) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Prompts and outputs of about the same length, or of very different ones."""
    rng = random.Random(1)
    lengths = [rng.randint(4, 120) if ragged else 24 for _ in range(NUM_REQUESTS)]
    outputs = [rng.randint(8, 2 * OUTPUT_TOKENS) if ragged else OUTPUT_TOKENS for _ in range(NUM_REQUESTS)]
    prompts = [{"prompt_token_ids": [rng.randrange(3, 1000) for _ in range(length)]} for length in lengths]
    return prompts, [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in outputs]


def schedule_by(core: Any, cls: type[Any]) -> None:
    """Put another scheduler in place; nothing may be running."""
    before, config = core.scheduler, core.vllm_config
    before.schedule()
    before.shutdown()
    core.scheduler = cls(
        vllm_config=config,
        kv_cache_config=before.kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=config.cache_config.block_size,
        hash_block_size=config.cache_config.block_size,
    )


def timed(llm: LLM, asked: tuple[Any, Any]) -> tuple[float, float]:
    """Tokens per second, and processor microseconds a token."""
    wall, busy = time.perf_counter(), time.process_time()
    outputs = llm.generate(*asked, use_tqdm=False)
    wall, busy = time.perf_counter() - wall, time.process_time() - busy
    num_tokens = sum(len(one.outputs[0].token_ids) for one in outputs)
    return num_tokens / wall, busy / num_tokens * 1e6


def main() -> None:
    """Print a line for each kind of requests."""
    with tempfile.TemporaryDirectory() as folder:
        model = sys.argv[1] if len(sys.argv) > 1 else str(Path(folder) / "tiny")
        if len(sys.argv) < 2:
            write_tiny_model(Path(model))
        num_rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
        llm = LLM(
            model,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=512,
            max_num_seqs=NUM_REQUESTS,
            max_num_batched_tokens=8192,
            enforce_eager=True,
            async_scheduling=False,
        )
        core = llm.llm_engine.engine_core.engine_core
        for kind in (False, True):
            asked = requests(ragged=kind)
            timed(llm, asked)
            found: dict[type[Any], list[tuple[float, float]]] = {VllmsOwn: [], Scheduler: []}
            for _ in range(num_rounds):
                for cls, each in found.items():
                    schedule_by(core, cls)
                    each.append(timed(llm, asked))
            own, ours = ([statistics.median(column) for column in zip(*each, strict=True)] for each in found.values())
            pairs = list(zip(*found.values(), strict=True))
            ratios = [statistics.median(b[place] / a[place] for a, b in pairs) for place in range(2)]
            print(
                f"{NUM_REQUESTS} requests, {'ragged' if kind else 'equal'}: vLLM {own[0]:.0f} tokens/s, {own[1]:.0f} CPU us a token; "
                f"here {ours[0]:.0f} tokens/s, {ours[1]:.0f} CPU us a token; "
                f"ratios {ratios[0]:.3f} and {ratios[1]:.3f} (medians of {num_rounds} pairs)"
            )


if __name__ == "__main__":
    main()
