"""Does a request get the same tokens among others, under any system's policies, as it gets alone?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vajra_py.engine.async_llm import AsyncLLM
from vajra_py.engine.compute import SamplingParams
from vajra_py.engine.llm import LLM
from vajra_py.engine.requests import RequestOutput
from vajra_py.plugins import load_registry

PRESETS = sorted(load_registry().presets)
NUM_REQUESTS = 14
NUM_BLOCKS = 18
"""Of 16 tokens: about a third of what all requests would like to have at once."""
KEEPS_WHAT_IT_TOOK = {"orca"}
"""Memory for the longest output is set aside at admission, so that nobody ever has to be preempted."""


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of many lengths, half of them with a common beginning."""
    stream = np.random.default_rng(5)
    common = stream.integers(10, 500, 20).tolist()
    made = []
    for number in range(NUM_REQUESTS):
        own = stream.integers(10, 500, int(stream.integers(3, 40))).tolist()
        params = SamplingParams(max_tokens=int(stream.integers(8, 40)), temperature=0.0, ignore_eos=True)
        made.append(((common if number % 2 else []) + own, params))
    return made


def settings(preset: str) -> dict[str, Any]:
    return {
        "preset": preset,
        "replica": {"max_model_len": 128, "memory": {"block_size": 16, "num_blocks": NUM_BLOCKS}},
        "backend": {
            "engine": {"dtype": "float32", "latency": {"type": "affine", "base_s": 0.001, "per_token_s": 0.0001}}
        },
    }


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> list[Sequence[int]]:
    with LLM(tiny_model, {"replica": {"memory": {"num_blocks": 64, "prefix_cache": {"enabled": False}}}}) as llm:
        return [llm.generate([prompt], params)[0].token_ids for prompt, params in requests()]


async def together(model: Path, preset: str) -> list[RequestOutput]:
    async with AsyncLLM(model, settings(preset)) as llm:
        tasks = []
        for prompt, params in requests():
            tasks.append(asyncio.create_task(llm.generate(prompt, params)))
            await asyncio.sleep(0)
        return await asyncio.gather(*tasks)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_scheduling_never_changes_what_a_request_gets(
    preset: str, tiny_model: Path, alone: list[Sequence[int]]
) -> None:
    outputs = asyncio.run(together(tiny_model, preset))
    assert [list(one.token_ids) for one in outputs] == [list(one) for one in alone]
    if load_registry().presets[preset].spec.replicaset:
        return  # two replicas have memory for all
    gave_way = sum(one.metrics.num_preemptions for one in outputs)
    waited = sum(one.metrics.admitted_at - one.metrics.arrived_at > 0 for one in outputs if one.metrics.admitted_at)
    assert waited
    assert bool(gave_way) == (preset not in KEEPS_WHAT_IT_TOOK)
