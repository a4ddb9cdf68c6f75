"""Real hybrid models, tiny and of random weights, under this project's scheduler and under vLLM's own."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config, PretrainedConfig, Qwen3NextConfig
from vllm import LLM, SamplingParams

from tests.vllm.test_vllm_real import prompts, scheduler_of
from vajra_py.vllm import Scheduler
from vajra_py.vllm.managed_kv import ManagedKv

pytestmark = pytest.mark.long

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def short_convolutions() -> PretrainedConfig:
    """LFM2, whose vLLM reads names that transformers has renamed."""
    old = {"conv_dim": 64, "block_dim": 64, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0}
    return Lfm2Config(
        **SIZES,
        **old,
        block_auto_adjust_ff_dim=False,
        block_ff_dim=128,
        conv_L_cache=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["conv", "full_attention"] * 2,
    )


def linear_attention() -> PretrainedConfig:
    """Qwen3-Next: gated delta networks beside attention, with experts."""
    return Qwen3NextConfig(
        **SIZES,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        decoder_sparse_step=1,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention"] * 2,
    )


def write_model(config: PretrainedConfig, folder: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, 0, 0.3)
    model.save_pretrained(folder)


FAMILIES = {"lfm2": (short_convolutions, "float32", 12), "qwen3_next": (linear_attention, "bfloat16", 12)}
"""Each with its type of numbers (vLLM computes gated delta networks on CPUs in this one alone), and blocks for a few requests at once."""


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_vllms(tmp_path: Path, family: str) -> None:
    make, dtype, num_blocks = FAMILIES[family]
    write_model(make(), tmp_path / "model")
    rng = random.Random(family)
    wanted = prompts(20, 3)
    params = [
        SamplingParams(temperature=0, max_tokens=rng.randint(1, 50), ignore_eos=rng.random() < 0.5, detokenize=False)
        for _ in wanted
    ]
    found = []
    for options in ({"async_scheduling": False}, {"scheduler_cls": Scheduler}):
        given: dict[str, Any] = options | {"dtype": dtype, "num_gpu_blocks_override": num_blocks}
        llm = LLM(
            str(tmp_path / "model"),
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            **given,
        )
        scheduler = scheduler_of(llm)
        if isinstance(scheduler, Scheduler):
            assert isinstance(scheduler.mechanism.replica.memory, ManagedKv)
        outputs = llm.generate(wanted, params, use_tqdm=False)
        found.append([list(one.outputs[0].token_ids) for one in outputs])
        del llm, scheduler
        gc.collect()
    assert found[0] == found[1]
    assert sum(map(len, found[0])) > 300
