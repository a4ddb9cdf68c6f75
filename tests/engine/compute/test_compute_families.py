"""Does every tested family give transformers' own logits, whatever the schedule?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vajra_py.engine.compute import SamplingParams

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe"]


def make_jobs(compute_kit: Any, rng: np.random.Generator, vocab_size: int, sampling: SamplingParams) -> list[Any]:
    """Requests of ragged lengths, some of which begin alike."""
    beginning = rng.integers(3, vocab_size, 18).tolist()
    jobs = []
    for index in range(7):
        own = rng.integers(3, vocab_size, int(rng.integers(1, 22))).tolist()
        prompt = beginning + own if index % 3 == 1 else own
        jobs.append(compute_kit.job(prompt, int(rng.integers(2, 9)), sampling))
    return jobs


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "modules"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(
    compute_kit: Any,
    small_models: Callable[[str], str],
    family: str,
    fused: bool,
) -> None:
    directory = small_models(family)
    runner = compute_kit.runner(directory, num_blocks=15, num_host_blocks=16, fused=fused)
    vocab_size = runner.facts.vocab_size
    sampling = SamplingParams(temperature=0.0, logprobs=vocab_size)
    seen = {"recompute": 0, "swap": 0, "shared": 0}
    for seed in range(2):
        rng = np.random.default_rng(seed)
        jobs = make_jobs(compute_kit, rng, vocab_size, sampling)
        driver = compute_kit.driver(runner, 15, seed, 16)
        driver.run(jobs, together=5)
        seen = {key: seen[key] + driver.counts[key] for key in seen}
        for job in jobs:
            logits = compute_kit.expected_logits(directory, job.known)
            expected = torch.log_softmax(logits[len(job.prompt) - 1 : -1], -1)
            actual = torch.empty_like(expected)
            for place, one in enumerate(job.logprobs):
                ids, values = zip(*one.top, strict=True)
                actual[place, list(ids)] = torch.tensor(values)
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0.0)
            assert job.outputs == logits[len(job.prompt) - 1 : -1].argmax(-1).tolist()
    assert all(seen.values()), f"the schedules were too tame to show anything ({seen})"
    assert runner.facts.forward == ("fused" if fused else "transformers")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "qwen3_moe"])
def test_half_precision_passes_the_check(
    compute_kit: Any,
    small_models: Callable[[str], str],
    family: str,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the norms' weights folded into products, as on a GPU."""
    runner = compute_kit.runner(small_models(family), dtype=dtype)
    assert (runner.facts.forward, runner.facts.dtype) == ("fused", dtype)
    job = compute_kit.job([5, 6, 7, 8, 9], 6)
    compute_kit.driver(runner, 64, 0).run([job])
    logits = compute_kit.expected_logits(small_models(family), job.known)[4:-1]
    likely = logits.topk(8).indices.tolist()
    assert all(token in best for token, best in zip(job.outputs, likely, strict=True))


def test_wrong_block_table_shows(compute_kit: Any, small_models: Callable[[str], str]) -> None:
    """The comparison above can fail: a table with a wrong block gives other logits."""
    from vajra_py.engine.compute import Chunk, NewRow, StepInput, TableUpdate

    directory = small_models("llama")
    runner = compute_kit.runner(directory)
    prompt = list(range(3, 15))
    new = NewRow(0, SamplingParams(temperature=0.0, logprobs=1), 0)
    runner.run(StepInput([Chunk(0, prompt[:8], 0, False)], new=[new], tables=[TableUpdate(0, 0, [5, 9, 2])]))
    wrong = runner.run(StepInput([Chunk(0, prompt[8:], 8, True)], tables=[TableUpdate(0, 0, [5, 7])]))
    expected = torch.log_softmax(compute_kit.expected_logits(directory, prompt)[-1], -1)
    assert abs(wrong.logprobs[0].logprob - float(expected[wrong.token_ids[0]])) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_and_rotations_in_half_precision_round_once(dtype: torch.dtype) -> None:
    """They are what float64 gives for the same operands, rounded: no product or square is rounded on the way."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

    from vajra_py.engine.compute.model.fused_parts import Norm, RopeTables

    generator = torch.Generator().manual_seed(2)
    module = LlamaRMSNorm(256, eps=1e-6)
    module.weight.data = 1.0 + torch.randn(256, generator=generator) * 0.1
    module = module.to(dtype)
    x = (torch.randn(300, 256, generator=generator) * 3.0).to(dtype)
    wide = x.double()
    normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * module.weight.double()
    kept = x.clone()
    assert (Norm.of(module)(x) != normed.to(dtype)).float().mean() < 1e-3  # float32 on the way may round otherwise
    assert torch.equal(x, kept)

    config = LlamaConfig(hidden_size=128, num_attention_heads=4, max_position_embeddings=512)
    embedding = LlamaRotaryEmbedding(config)
    rope = RopeTables(embedding, dtype).rope(None, 32, is_complex=True)
    positions = torch.arange(0, 300, 7)
    heads = torch.randn(len(positions), 4, 32, generator=generator).to(dtype)
    neighbours = rope.reorder(heads.reshape(-1), 32).view(heads.shape)
    rotated = rope.apply(neighbours, rope.at(positions, 512))
    cos, sin = (part[0, :, None, :16].double() for part in embedding(heads, positions[None]))
    first, second = heads.double().chunk(2, -1)
    exact = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    assert (rotated != exact.to(dtype)).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gemmas_norm_counts_from_one_in_float32(dtype: str) -> None:
    """1 + w in half precision loses what w adds: transformers add, and multiply, before they round."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    from vajra_py.engine.compute.model.fused_parts import Norm

    generator = torch.Generator().manual_seed(1)
    module = Gemma2RMSNorm(256, eps=1e-6)
    module.weight.data = torch.randn(256, generator=generator) * 0.01
    module = module.to(getattr(torch, dtype))
    x = (torch.randn(400, 256, generator=generator) * 3.0).to(module.weight.dtype)
    different = Norm.of(module)(x) != module(x)
    assert different.float().mean() < 1e-3  # sums in another order may round otherwise
