"""Do greedy tokens equal those of transformers' `generate`, token for token, on hundreds of schedules?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

FAMILIES = ["llama", "qwen3", "gemma2", "mixtral"]
NUM_OUTPUTS = 9
NUM_SCHEDULES = 52


def generated(compute_kit: Any, directory: str, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers' own `generate` puts out for each prompt alone."""
    from vajra_py.engine.compute.model.loading import quiet

    model = compute_kit.reference(directory)
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with quiet(), torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_OUTPUTS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=2,
            )
        tokens.append(out[0, len(prompt) :].tolist())
    return tokens


def prompts_of(rng: np.random.Generator, vocab_size: int) -> list[list[int]]:
    """Ragged prompts, some of which begin alike; one token and several windows long among them."""
    beginning = rng.integers(3, vocab_size, 14).tolist()
    prompts = [rng.integers(3, vocab_size, int(length)).tolist() for length in (1, 2, 5, 9, 16, 17, 30)]
    return prompts + [beginning + rng.integers(3, vocab_size, int(length)).tolist() for length in (1, 3, 8, 13)]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate(compute_kit: Any, small_models: Callable[[str], str], family: str) -> None:
    directory = small_models(family)
    runner = compute_kit.runner(directory, num_blocks=26, num_host_blocks=20)
    prompts = prompts_of(np.random.default_rng(5), runner.facts.vocab_size)
    expected = generated(compute_kit, directory, prompts)
    counts: Counter[str] = Counter()
    for seed in range(NUM_SCHEDULES):
        rng = np.random.default_rng(1000 + seed)
        chosen = rng.choice(len(prompts), 5, replace=False).tolist()
        lengths = rng.integers(1, NUM_OUTPUTS + 1, 5).tolist()
        jobs = [compute_kit.job(prompts[index], length) for index, length in zip(chosen, lengths, strict=True)]
        # The longest sequence takes 10 blocks of 4.
        driver = compute_kit.driver(
            runner, int(rng.integers(11, 27)), seed, int(rng.integers(0, 21)), int(rng.integers(2, 33))
        )
        driver.run(jobs, together=int(rng.integers(2, 6)))
        for index, length, job in zip(chosen, lengths, jobs, strict=True):
            assert job.outputs == expected[index][:length], f"schedule {seed}, prompt {index}"
        counts.update(driver.counts)
    assert min(counts.values()) > 5, f"the schedules were too tame to show anything ({counts})"
