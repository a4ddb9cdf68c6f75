"""Two real vLLMs, one for prompts and one for decodes, with KV that goes between them through a folder."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from vajra_py.vllm import Scheduler

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 4096,  # the connector saves no prompt that is computed in parts
    "enforce_eager": True,
    "disable_log_stats": False,
    "block_size": 32,
    "num_gpu_blocks_override": 64,
}


def prompts(number: int) -> list[dict[str, list[int]]]:
    rng = random.Random(3)
    return [{"prompt_token_ids": [rng.randrange(3, 1000) for _ in range(rng.randint(40, 240))]} for _ in range(number)]


def tokens(llm: LLM, wanted: list[Any], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return [list(one.outputs[0].token_ids) for one in llm.generate(wanted, params, use_tqdm=False)]


def metric(llm: LLM, name: str) -> int:
    (found,) = [one.value for one in llm.get_metrics() if one.name == name]
    return int(found)


@pytest.mark.long
@pytest.mark.parametrize("connector", ["ExampleConnector", "StorageBesideSteps"])
def test_a_pair_gives_the_tokens_of_one_server(tiny_model: str, tmp_path: Path, connector: str) -> None:
    wanted, found = prompts(12), {}
    for role in ("none", "kv_producer", "kv_consumer"):
        transfer = (
            KVTransferConfig(
                kv_connector=connector,
                kv_role=role,
                kv_connector_module_path=None if connector == "ExampleConnector" else "tests.vllm.storage_connector",
                kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
            )
            if role != "none"
            else None
        )
        llm = LLM(tiny_model, scheduler_cls=Scheduler, kv_transfer_config=transfer, **OPTIONS)
        found[role] = tokens(llm, wanted, 1 if role == "kv_producer" else 24)
        if role == "kv_consumer":
            loaded = sum((len(one["prompt_token_ids"]) - 2) // 32 * 32 for one in wanted)
            assert metric(llm, "vllm:external_prefix_cache_hits") == loaded
        del llm
        gc.collect()
    assert found["kv_consumer"] == found["none"]
    assert found["kv_producer"] == [one[:1] for one in found["none"]]
