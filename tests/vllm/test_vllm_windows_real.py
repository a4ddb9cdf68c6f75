"""Real models with sliding windows, tiny and of random weights, under this project's scheduler and under vLLM's own."""

from __future__ import annotations

import gc
import json
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams

from tests.vllm.test_vllm_real import OPTIONS, greedy, prompts, scheduler_of
from vajra_py.engine.tiny import write_tiny_model
from vajra_py.vllm import Scheduler
from vajra_py.vllm.managed_kv import ManagedKv

pytestmark = pytest.mark.long


def tie_embeddings(model: Path) -> None:
    """Let the output layer be the embedding, as in every Gemma 2: vLLM has no other."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    weights = load_file(model / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("family", "num_groups"), [("mistral", 1), ("gemma2", 2), ("gemma3_text", 2)])
def test_greedy_tokens_and_prefix_hits_are_vllms(tmp_path: Path, family: str, num_groups: int) -> None:
    write_tiny_model(tmp_path / "model", family)
    if family == "gemma2":
        tie_embeddings(tmp_path / "model")
    rng = random.Random(family)
    wanted = prompts(40, 3)
    params: list[SamplingParams] = [greedy(rng, ignore_eos=rng.random() < 0.5) for _ in wanted]
    found = []
    for options in ({"async_scheduling": False}, {"scheduler_cls": Scheduler}):
        given: dict[str, Any] = OPTIONS | options
        llm = LLM(str(tmp_path / "model"), **given)
        scheduler = scheduler_of(llm)
        assert len(scheduler.kv_cache_config.kv_cache_groups) >= num_groups
        if isinstance(scheduler, Scheduler):
            assert isinstance(scheduler.mechanism.replica.memory, ManagedKv)
        outputs = llm.generate(wanted, params, use_tqdm=False)
        found.append([(list(one.outputs[0].token_ids), one.num_cached_tokens) for one in outputs])
        del llm, scheduler
        gc.collect()
    assert found[0] == found[1]
    assert any(num_cached for _, num_cached in found[1])
