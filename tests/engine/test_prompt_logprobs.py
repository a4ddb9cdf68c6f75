"""Log-probabilities of prompts, against transformers' own forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

PROMPTS = [[5 + (7 * k + 3 * j * j) % 300 for j in range(length)] for k, length in enumerate((1, 2, 23, 40, 61))]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vajra_py.engine.tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def sizes(**replica: Any) -> dict[str, Any]:
    memory = {"block_size": 8, "num_blocks": 30, "reservation": "incremental", "watermark_fraction": 0.0}
    return {
        "scheduling": {
            "request_prioritizer": "fcfs",
            "replicaset_scheduler": "round_robin",
            "replica_scheduler": {"policy": "fixed_chunk", "params": {"chunk_size": 24}},
        },
        "replica": {"max_batch_size": 2, "max_model_len": 160, "memory": memory, **replica},
    }


def expected(model: Path, tokens: list[int]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits.float(), -1)


@pytest.mark.parametrize("fused", [True, False])
def test_they_are_the_models_own_whatever_the_batches_and_caches(tiny_model: Path, fused: bool) -> None:
    from vajra_py import LLM, SamplingParams

    plain = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    asked = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, prompt_logprobs=2)
    config = {**sizes(), "backend": {"engine": {"fused": fused}}}
    with LLM(tiny_model, config) as llm:
        before = llm.generate(PROMPTS, plain)  # their prefixes are cached from here on
        # with other requests, in chunks of 24 tokens, four rows scored at a time, and with preemptions, since there are
        # only 30 blocks
        outputs = llm.generate([*PROMPTS, *PROMPTS], [asked] * len(PROMPTS) + [plain] * len(PROMPTS))
    assert [one.token_ids for one in outputs] == [one.token_ids for one in [*before, *before]]
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        rows = expected(tiny_model, prompt)
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        for place, entry in enumerate(output.prompt_logprobs[1:]):
            assert entry is not None
            assert entry.logprob == pytest.approx(float(rows[place, prompt[place + 1]]), abs=1e-4)
            ahead = rows[place] - rows[place, prompt[place + 1]]  # those within 1e-4 may be on either side
            assert int((ahead > 1e-4).sum()) + 1 <= entry.rank <= int((ahead >= -1e-4).sum())
            assert [token for token, _ in entry.top] == rows[place].topk(2).indices.tolist()
    assert outputs[-1].prompt_logprobs is None


def test_a_prompt_that_is_computed_again_is_scored_whole(tiny_model: Path) -> None:
    from vajra_py import LLM, SamplingParams

    asked = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    config = sizes(max_batch_size=4, memory={"block_size": 8, "num_blocks": 14, "reservation": "incremental"})
    with LLM(tiny_model, config) as llm:
        outputs = llm.generate([prompt[:20] for prompt in PROMPTS[2:]], asked)
    assert sum(one.metrics.num_preemptions for one in outputs) > 0
    for prompt, output in zip(PROMPTS[2:], outputs, strict=True):
        rows = expected(tiny_model, prompt[:20])
        found = [one.logprob for one in output.prompt_logprobs or () if one is not None]
        assert found == pytest.approx([float(rows[k, prompt[k + 1]]) for k in range(19)], abs=1e-4)
