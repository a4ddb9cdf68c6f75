"""Serve workloads on a real vLLM on the CPU and note every step and request; run by `vllm_cpu.py` in vLLM's own environment.

python vllm_cpu_engine.py MODEL JOB.json OUT.json

The clock is this process's CPU time on one thread, advanced over idle spans. A reference computation after every step, always the same one, shows
how slow other processes make the machine at that moment (shared caches, memory and clocks): the step counts as the time that it takes at the
typical pace, and the reference is not counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from steady import Pace

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


Job: TypeAlias = dict[str, Any]
"""`at` (seconds), `prompt` (token ids), `output` (number of tokens)."""


class SteadyClock:
    """CPU time at the machine's typical pace."""

    def __init__(self) -> None:
        import torch

        torch.manual_seed(0)
        self._input = torch.randn(8, 128)
        self._weights = [torch.randn(512, 128) / 16 for _ in range(24)]
        self._cache = torch.randn(8, 256, 128)
        times = sorted(self._reference_s() for _ in range(200))
        self._pace = Pace(times[len(times) // 2])
        self._since = time.process_time()
        self._latest = 0.0
        self.slowness: list[float] = []
        while not self._pace.is_known:
            self._pace.note(self._reference_s())
        self.settle()

    def _reference_s(self) -> float:
        """CPU seconds of a few small layers: products, and attention over a cache."""
        import torch

        begun = time.process_time()
        with torch.inference_mode():
            hidden = self._input
            for weights in self._weights:
                wide = torch.nn.functional.silu(hidden @ weights.T)
                scores = torch.softmax((self._cache @ hidden[:, :, None])[..., 0], dim=-1)
                hidden = torch.nn.functional.layer_norm(
                    hidden + wide @ weights + (scores[:, None] @ self._cache)[:, 0], (128,)
                )
        return time.process_time() - begun

    def now(self) -> float:
        """Seconds since the clock was made."""
        return self._latest + (time.process_time() - self._since) / self._pace.slowness

    def settle(self) -> None:
        """Freeze the counts so far."""
        self._latest, self._since = self.now(), time.process_time()

    def skip_to(self, at: float) -> None:
        """Advance the clock over an idle span."""
        self.settle()
        self._latest = max(self._latest, at)

    def measure(self) -> None:
        """Stop, measure the machine's slowdown, and scale the time since `settle` accordingly."""
        passed = time.process_time() - self._since
        self._pace.note(self._reference_s())
        self.slowness.append(self._pace.slowness)
        self._latest += passed / self._pace.slowness
        self._since = time.process_time()


class Steps:
    """Records the batch of each step of a scheduler."""

    def __init__(self, scheduler: Any, prompts: dict[str, int]) -> None:
        self.last: tuple[int, int, list[tuple[int, int]]] | None = None
        self.scheduled: dict[str, None] = {}
        self._schedule = scheduler.schedule
        self._prompts = prompts
        scheduler.schedule = self.schedule

    def schedule(self, *given: Any, **named: Any) -> Any:
        """Return the scheduler's output, and record it as (decodes, their context, chunks with their context)."""
        output = self._schedule(*given, **named)
        computed = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        decodes, context = 0, 0
        chunks: list[tuple[int, int]] = []
        for name, number in output.num_scheduled_tokens.items():
            known = computed[name]
            self.scheduled.setdefault(name, None)
            if known >= self._prompts[name.rsplit("-", 1)[0] if name not in self._prompts else name]:
                decodes, context = decodes + 1, context + known
            else:
                chunks.append((number, known))
        self.last = (decodes, context, chunks) if output.num_scheduled_tokens else None
        return output


def serve(
    engine: Any, steps: Steps, prompts: dict[str, int], jobs: Sequence[Job], prefix: str
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]], list[float]]:
    """Serve requests at their times; returns (steps, requests, the machine's slowness in each step)."""
    from vllm import SamplingParams

    clock = SteadyClock()
    now = clock.now

    waiting = sorted(enumerate(jobs), key=lambda one: one[1]["at"])
    noted: list[tuple[Any, ...]] = []
    requests: dict[str, dict[str, Any]] = {}
    while waiting or engine.has_unfinished_requests():
        if not engine.has_unfinished_requests() and waiting[0][1]["at"] > now():
            clock.skip_to(waiting[0][1]["at"])
        while waiting and waiting[0][1]["at"] <= now():
            index, job = waiting.pop(0)
            name = f"{prefix}{index}"
            prompts[name] = len(job["prompt"])
            options = SamplingParams(max_tokens=job["output"], ignore_eos=True, detokenize=False, temperature=0.0)
            engine.add_request(name, {"prompt_token_ids": job["prompt"]}, options)
            requests[name] = {"index": index, "arrival": job["at"], "queued": now()}
        clock.settle()
        begun = now()
        outputs = engine.step()
        clock.measure()
        ended = now()
        if steps.last is not None:
            noted.append((begun, ended, *steps.last))
        for name in steps.scheduled:
            key = name if name in requests else name.rsplit("-", 1)[0]
            requests[key].setdefault("scheduled", begun)
        steps.scheduled.clear()
        for output in outputs:
            one = requests[output.request_id]
            one.setdefault("first", ended)
            one["last"] = ended
    return noted, [requests[f"{prefix}{index}"] for index in range(len(jobs))], clock.slowness


def main() -> None:
    """Serve the job's workloads one after the other."""
    model, job_file, out = sys.argv[1:]
    job = json.loads(Path(job_file).read_text())
    import vllm
    from vllm import EngineArgs, LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(model=model, skip_tokenizer_init=True, **job["engine"]))
    prompts: dict[str, int] = {}
    steps = Steps(engine.engine_core.engine_core.scheduler, prompts)
    config = engine.vllm_config
    serve(engine, steps, prompts, job["warm_up"], "warm-")
    results = {
        name: dict(zip(("steps", "requests", "slowness"), serve(engine, steps, prompts, load, f"{name}-"), strict=True))
        for name, load in job["workloads"].items()
    }
    facts = {
        "version": vllm.__version__,
        "num_blocks": config.cache_config.num_gpu_blocks,
        "block_size": config.cache_config.block_size,
    }
    Path(out).write_text(json.dumps({"facts": facts, "results": results}))


if __name__ == "__main__":
    main()
