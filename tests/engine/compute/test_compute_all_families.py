"""Every family of docs/reference/models.md gives transformers' own tokens: two replicas of it in threads at once, over random schedules
of chunks, decodes, preemptions, swaps and shared prefixes.

`VAJRA_FUZZ_SCHEDULES=20 pytest tests/engine/compute/test_compute_all_families.py` tries more schedules of each (default 1).
"""

from __future__ import annotations

import importlib.util
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[3]
NUM_SCHEDULES = int(os.environ.get("VAJRA_FUZZ_SCHEDULES", "1"))
NUM_BLOCKS, NUM_HOST_BLOCKS = 13, 20
MARGIN = 2e-3
"""Logits so near to the largest may win by rounding."""
MOVED = ("norm", "bias", "sink", "ln_", "layernorm")
"""Parameters that are made 0 or 1: they get values, so that mixing them up shows."""


def listed() -> list[str]:
    """The types that the page says can be run."""
    page = (ROOT / "docs" / "reference" / "models.md").read_text()
    fused = page.split("## Tested families")[1].split("\n## ")[0]
    modules = page.split("## Passed, on transformers' modules")[1].split("\n## ")[0]
    return re.findall(r"`([\w.-]+)`", fused + modules)


def small_config(model_type: str) -> Any:
    spec = importlib.util.spec_from_file_location("model_types", ROOT / "benchmarks" / "model_types.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.small_config(model_type)


def write_model(model_type: str, folder: Path) -> Any:
    """A small model of random weights, and transformers' own of it."""
    from transformers import AutoModelForCausalLM

    from vajra_py.engine.compute.model.loading import quiet

    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_config(small_config(model_type), dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or any(part in name.lower() for part in MOVED):
                parameter.data += torch.randn_like(parameter) * 0.2
        model.save_pretrained(folder)
        made = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return made.eval()


def jobs_of(compute_kit: Any, number: int, index: int, vocab_size: int) -> list[Any]:
    """Requests whose lengths depend on the schedule alone, and whose tokens on the replica too."""
    lengths, tokens = np.random.default_rng(number), np.random.default_rng((number, index))
    beginning = tokens.integers(3, vocab_size, 9).tolist()
    jobs = []
    for place in range(6):
        own = tokens.integers(3, vocab_size, int(lengths.integers(1, 16))).tolist()
        jobs.append(compute_kit.job((beginning if place % 2 else []) + own, int(lengths.integers(3, 8))))
    return jobs


def check(model: Any, job: Any, what: str) -> None:
    """Every token is the likeliest one after those before it, by transformers' own forward pass."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([job.known]), use_cache=False).logits[0]
    rows = logits[len(job.prompt) - 1 : -1]
    chosen = rows.gather(1, torch.tensor(job.outputs)[:, None])[:, 0]
    missing = float((rows.amax(-1) - chosen).max())
    assert missing <= MARGIN, f"{what}: a token's logit is {missing:.3g} below the largest"


def run_together(compute_kit: Any, models: list[Any], runners: list[Any], number: int, what: str) -> dict[str, int]:
    """One schedule on runners in threads of their own, at once; how often what happened in it."""

    def work(index: int) -> tuple[list[Any], dict[str, int]]:
        vocab_size = min(runners[index].facts.vocab_size, 128)
        jobs = jobs_of(compute_kit, 1 + number, index, vocab_size)
        # The same steps in both threads, of other tokens: what is mixed up fits, and shows in tokens alone.
        driver = compute_kit.driver(runners[index], NUM_BLOCKS, 1 + number, NUM_HOST_BLOCKS)
        driver.run(jobs, together=5)
        return jobs, driver.counts

    happened: dict[str, int] = {}
    with ThreadPoolExecutor(len(runners)) as pool:
        for index, (jobs, counts) in enumerate(pool.map(work, range(len(runners)))):
            happened = {name: happened.get(name, 0) + count for name, count in counts.items()}
            for place, job in enumerate(jobs):
                check(models[index], job, f"{what}, runner {index}, schedule {number}, request {place}")
    return happened


@pytest.mark.parametrize("model_type", listed())
def test_replicas_in_threads_give_transformers_tokens(compute_kit: Any, tmp_path: Path, model_type: str) -> None:
    model = write_model(model_type, tmp_path)
    runners = [compute_kit.runner(tmp_path, NUM_BLOCKS, NUM_HOST_BLOCKS) for _ in range(2)]
    happened = dict.fromkeys(("recompute", "swap", "shared"), 0)
    for number in range(NUM_SCHEDULES):
        counts = run_together(compute_kit, [model] * 2, runners, number, model_type)
        happened = {name: count + counts[name] for name, count in happened.items()}
    assert all(happened.values()), f"the schedules were too tame to show anything ({happened})"


@pytest.mark.parametrize(
    "types",
    [
        ("llama", "gpt2"),
        ("gemma2", "phimoe"),
        ("qwen3_moe", "deepseek_v3"),
        ("gpt_oss", "cohere2"),
        ("mistral", "qwen2", "gemma3_text"),
    ],
    ids="+".join,
)
def test_different_models_in_threads_give_transformers_tokens(
    compute_kit: Any, tmp_path: Path, types: tuple[str, ...]
) -> None:
    models = [write_model(one, tmp_path / one) for one in types]
    with ThreadPoolExecutor(len(types)) as pool:  # loaded at once too
        load = lambda one: compute_kit.runner(tmp_path / one, NUM_BLOCKS, NUM_HOST_BLOCKS)  # noqa: E731
        runners = list(pool.map(load, types))
    for number in range(3 * NUM_SCHEDULES):
        run_together(compute_kit, models, runners, number, "+".join(types))


@pytest.mark.parametrize("model_type", ["phimoe", "gpt_oss", "cohere2", "gemma2", "gpt2"])
def test_tokens_are_right_without_the_self_check(compute_kit: Any, tmp_path: Path, model_type: str) -> None:
    """Also those of types whose window is told through the mask alone."""
    model = write_model(model_type, tmp_path)
    runner = compute_kit.runner(tmp_path, NUM_BLOCKS, NUM_HOST_BLOCKS, self_check=False, fused=False)
    for number in range(3):
        run_together(compute_kit, [model], [runner], number, model_type)
